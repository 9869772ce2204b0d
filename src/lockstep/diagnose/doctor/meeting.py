"""Where the ranks find each other: who came, who did not, who came twice, and why.

met = meet(place)                           # met.board, or findings that say why there is none
"""

import os
import re
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.diagnose.doctor.board import Board
from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok
from lockstep.diagnose.doctor.network import to_master
from lockstep.distributed.world import meeting_point, meeting_store
from lockstep.errors import ConfigError
from lockstep.run.devices import ranges

__all__ = ["Met", "holder", "meet", "surplus"]

_NAME = "meeting"
_ALIKE = "start all nodes with the same --nnodes and --nproc-per-node"


@dataclass
class Met:
    """How a meeting went.

    Attributes:
        board: what the ranks tell each other; None where this rank did not reach it.
        findings: on rank 0, of the whole; elsewhere why this rank did not get there.
    """

    board: Board | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def found(self) -> Found:
        """The same as a check has it."""
        return Found(self.findings)


def meet(place: Place) -> Met:
    """Goes to the meeting point, says who this is, and waits for the others, `place.patience` seconds in all."""
    if place.size == 1 and "WORLD_SIZE" not in place.environ:
        return Met(Board(None, 0, 1))
    if place.lost:  # at the meeting point it would stand in the place of another
        return Met()
    deadline = time.monotonic() + place.patience
    host, port, held = meeting_point()
    at = f"{host}:{port}"
    if place.rank or held:
        why = to_master(host, port, place.patience)
        if why:
            who = place.who(place.rank)
            mend = "check MASTER_ADDR and MASTER_PORT, that rank 0 was started, and the firewall between the nodes"
            return Met(findings=[fail(_NAME, f"{who} cannot reach rank 0 at {at}: {why}", mend)])
    try:
        store = meeting_store(
            place.rank, place.size, timedelta(seconds=max(1.0, deadline - time.monotonic())), all_ranks=False
        )
    except ConfigError as error:
        return Met(findings=[_cannot_listen(error, port, place)])
    except RuntimeError as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Met(findings=[fail(_NAME, f"no meeting point at {at}: {line}", "check MASTER_ADDR and MASTER_PORT")])
    restart = place.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    board = Board(store, place.rank, place.size, f"lockstep/doctor/{restart}")
    me = {"rank": place.rank, "host": place.host, "pid": os.getpid(), "size": place.size, "local": place.local_size}
    number = board.count(f"here/{place.rank}")
    if number > 1:
        board.note(f"twice/{place.rank}", me)
        text = f"process {me['pid']} on {place.host} says that it is rank {place.rank}, and so does another"
        return Met(findings=[fail(_NAME, text, "give each process its own RANK; one launcher a node sets it")])
    board.note(f"arrived/{board.count('arrived')}", me)
    here = board.gather("here", me, max(0.5, deadline - time.monotonic()))
    place.hosts = [each["host"] if each else "" for each in here]
    return Met(board, list(_judged(here, board, place)) if place.rank == 0 else [])


def _cannot_listen(error: ConfigError, port: int, place: Place) -> Finding:
    text, _, mend = str(error).partition("; ")
    by = holder(port, place.root)
    return fail(_NAME, text + (f" ({by})" if by else ""), mend or "give another MASTER_ADDR")


def holder(port: int, root: Path = Path("/")) -> str:
    """Who listens at a port of this machine: `python, process 417`; "" where that cannot be seen."""
    inodes = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        try:
            lines = (root / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    for link in (root / "proc").glob("[0-9]*/fd/*") if inodes else ():
        try:
            if os.readlink(link) in inodes:
                process = link.parts[-3]
                name = (root / "proc" / process / "comm").read_text().strip()
                return f"{re.sub(r'[^ -~]', '?', name)}, process {process}"
        except OSError:
            continue
    return ""


def _judged(here: list[Any], board: Board, place: Place) -> list[Finding]:
    """What rank 0 says of who came."""
    found = []
    missing = [rank for rank, each in enumerate(here) if each is None]
    if missing:
        known = sorted({each["host"] for each in here if each})
        several = len(missing) > 1
        text = f"rank{'s' * several} {ranges(missing)} of {place.size} did not come within {place.patience:.0f} s"
        text += f"; there are those of {', '.join(known)}"
        mend = "look at the launcher there: was it started, with this MASTER_ADDR and MASTER_PORT, and does its own "
        found.append(fail(_NAME, text, mend + "doctor say more? A slow start: --wait 60"))
    for rank, each in enumerate(here):
        if each and each["size"] != place.size:
            text = f"{place.who(rank)} has WORLD_SIZE {each['size']}, and rank 0 has {place.size}"
            found.append(fail(_NAME, text, _ALIKE))
    hosts = sorted({each["host"] for each in here if each})
    where = f"on {', '.join(hosts)}" if len(hosts) < 5 else f"on {len(hosts)} nodes"
    return found or [ok(_NAME, f"{place.size} rank{'s' * (place.size > 1)} {where}")]


def surplus(board: Board, place: Place) -> list[Finding]:
    """What rank 0 says of those who came though their place was taken, or is none."""
    if place.size == 1:
        return []
    found, arrived = list[Finding](), list[Any]()
    while (one := board.noted(f"arrived/{len(arrived) + 1}")) is not None:
        arrived.append(one)
    for rank in range(place.size):
        twice, first = board.noted(f"twice/{rank}"), board.of("here", rank)
        if twice and first:
            both = " and ".join(f"process {one['pid']} on {one['host']}" for one in (first, twice))
            text = f"rank {rank} came twice: {both}"
            found.append(fail(_NAME, text, "give each node another --node-rank, and each process its own RANK"))
    for one in arrived:
        if one["rank"] >= place.size:
            text = f"rank {one['rank']} on {one['host']} came too: WORLD_SIZE is {one['size']} there, {place.size} here"
            found.append(fail(_NAME, text, _ALIKE))
    return found
