"""The signals that ask a run to save itself and end: of a scheduler, a person, a terminal. The launcher hands them on.

for number in STOP_SIGNALS: ...     SIGHUP among them, where heeds_hangup()
leave_terminal()                    on SIGHUP
"""

import contextlib
import json
import os
import random
import signal
import socket
import stat
import struct
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.distributed.progress import MEETING_VARIABLE, MEMBER_VARIABLE, rank_label, renumber
from lockstep.errors import ConfigError, LockstepError, PeerError

__all__ = [
    "STOP_SIGNALS",
    "Generation",
    "LeaveReport",
    "Member",
    "check_store",
    "heeds_hangup",
    "is_lost_peer",
    "keys_of",
    "leave_terminal",
    "lost_peers",
    "typed_errors",
]


_VALIDATE, _PING = 0, 13  # c10d's TCPStoreBackend.hpp: the first byte of what a client asks
_MAGIC = 0x3C85F7CE
_CONNECT = 5.0  # seconds
_TRIES, _PAUSE = 4, 0.5  # for a store that is just closed or begun


class _Challenge(Enum):
    RIGHT = "a store's"
    WRONG = "another service's, or none in time"
    CLOSED = "the connection was closed: by another service, or by a store that ends or begins"
    NOBODY = "nobody listens"


def check_store(host: str, port: int, wait: float, named: str) -> None:
    """Refuse another service in the place of torch's store. Where nobody listens yet, torch's client is to wait.

    Args:
        wait: seconds for an answer.
        named: host and port as the user gave them.

    Raises:
        ConfigError: another service listens there.
    """
    answer = _ask(host, port, wait)
    for _ in range(_TRIES):
        if answer is not _Challenge.CLOSED:
            break
        time.sleep(_PAUSE)
        answer = _ask(host, port, wait)
    if answer not in (_Challenge.RIGHT, _Challenge.NOBODY) and _knows_protocol():
        raise ConfigError(
            f"{named}: another service listens there, and no meeting point of ranks; give all ranks a port that is "
            "free on the node of rank 0"
        )


def _ask(host: str, port: int, wait: float) -> _Challenge:
    """Greet as torch's client does."""
    number = random.SystemRandom().getrandbits(31)
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT)
    except OSError:
        return _Challenge.NOBODY
    with connection:
        connection.settimeout(wait)
        found = b""
        try:
            connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, number))
            while len(found) < 4 and (more := connection.recv(4 - len(found))):
                found += more
        except TimeoutError:
            return _Challenge.WRONG
        except OSError:
            return _Challenge.CLOSED
    if not found:
        return _Challenge.CLOSED
    return _Challenge.RIGHT if found == struct.pack("=I", number) else _Challenge.WRONG


@cache
def _knows_protocol() -> bool:
    """Whether this torch's own store answers as is expected here."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return _ask("127.0.0.1", store.port, _CONNECT) is _Challenge.RIGHT


# Modules in which torch communicates; DDP's reducer does so within the backward.
_COMMUNICATING = ("torch.distributed.", "torch.nn.parallel.distributed", "torch.autograd.graph", "deepspeed.")
_BETWEEN = ("torch._ops", "torch.utils._contextlib")  # what lies between them and the backend
_TAG = 0x6C6B  # of a message that nobody sends


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise PeerError for a lost peer, and LockstepError for `sys.exit`; any other error stays the program's own."""
    try:
        yield
    except SystemExit as left:
        raise _ended_early(left) from left
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise lost_peers(dist.get_rank(), error) from error


def lost_peers(rank: int, error: Exception, when: str = "") -> PeerError:
    """Make the error of a collective of `rank` that failed with `error`.

    Args:
        when: of the run, as "before step 7".
    """
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    found = PeerError(
        f"{rank_label(rank)} lost the other ranks{' ' if when else ''}{when}: {reason}; the first error is in the "
        "log of the rank that failed; for slow steps or data raise --timeout"
    )
    found.names_nobody = True
    return found


def is_lost_peer(error: BaseException) -> bool:
    """Whether torch raised `error` since another rank is gone, or did not answer in time."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next((name for name in reversed(modules) if name not in _BETWEEN), "")
    if not f"{innermost}.".startswith(_COMMUNICATING):
        return False
    # Subclasses of RuntimeError have a meaning of their own: out of memory, a kernel that failed.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _is_a_link_closed())


def _is_a_link_closed() -> bool:
    """Whether a gloo group of this process has a link that is closed: by its other end, or after a timeout.

    Gloo refuses at once to receive over such a link. Over an open one the message never comes: this process is ending.
    """
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    for group in groups:
        with suppress(RuntimeError):  # it has no backend for tensors of a CPU
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() == "gloo" and not all(_is_open(backend, peer) for peer in range(group.size())):
                return True
    return False


def _is_open(backend: Any, peer: int) -> bool:
    try:
        if peer != backend.rank():
            backend.recv([torch.empty(1)], peer, _TAG)
    except RuntimeError:
        return False
    return True


def _ended_early(left: SystemExit) -> LockstepError:
    """The error of a rank whose code calls `sys.exit` before the run's end."""
    where = traceback.extract_tb(left.__traceback__)[-1]
    error = LockstepError(
        f"sys.exit({left.code!r}) was called before the run's end, in {Path(where.filename).name}:{where.lineno} "
        f"({where.name}); raise an error there, or end the run with run.stop() on all ranks"
    )
    error.exit_code = left.code if isinstance(left.code, int) and left.code else 1
    return error


def keys_of(restart: str | int) -> str:
    """What begins the keys of this start of the processes in the meeting point."""
    return f"lockstep/members/{restart}"


class LeaveReport(NamedTuple):
    """What a member says when it has left its groups.

    Attributes:
        taken: steps that its state holds; -1: it has none, as within a rollback.
        evaluated: the step after which it evaluated last.
        plan: what must be the same on all members, as a digest.
        waited: it waited for the others for a whole `--timeout`, so that nobody who is silent needs more time.
        patience: seconds to wait for those that are silent; `--timeout`.
    """

    taken: int
    evaluated: int
    plan: str
    waited: bool
    patience: float


class Generation(NamedTuple):
    """Who takes part from now on.

    Attributes:
        number: 1 for the first after the start.
        members: their names, by their new rank: who was there before first, in the order before.
        reports: of each of them, by name.
        fresh: the names of those that were not there before.
        lost: a line for each that was lost.
    """

    number: int
    members: list[str]
    reports: dict[str, LeaveReport]
    fresh: list[str]
    lost: list[str]

    @classmethod
    def read(cls, text: str) -> Self:
        """From what the launcher wrote."""
        found = json.loads(text)
        reports = {name: LeaveReport(*values) for name, values in found["reports"].items()}
        return cls(found["number"], found["members"], reports, found["fresh"], found["lost"])

    def written(self) -> str:
        """For the members to read."""
        reports = {name: list(report) for name, report in self.reports.items()}
        return json.dumps(self._asdict() | {"reports": reports})


@dataclass
class Member:
    """This process as a member.

    Attributes:
        name: of this process; with a dot where it came in the place of a lost one.
        generation: the number of the present one; -1: it takes part in none yet.
    """

    name: str
    generation: int
    _keys: str
    _address: tuple[str, int]
    _store: TCPStore | None = None

    @classmethod
    def of_this_process(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """What the launcher's variables say; None where lost processes are not replaced."""
        name = variables.get(MEMBER_VARIABLE) or variables.get("RANK", "")
        host, _, port = variables.get(MEETING_VARIABLE, "").rpartition(":")
        if not name or not host:
            return None
        keys = keys_of(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(name, -1 if "." in name else 0, keys, (host, int(port)))

    @property
    def is_new(self) -> bool:
        """Whether it comes in the place of a lost process, and has not joined the others yet."""
        return self.generation < 0

    def ready(self, why_not: str = "", experiment: str = "") -> None:
        """Tells the launcher that the others may go on without this process, or why they cannot; and the run's name."""
        self._connected().set(f"{self._keys}/experiment", experiment)
        self._connected().set(f"{self._keys}/ready/{self.name}", why_not or "yes")

    def experiment(self) -> str:
        """The name of the run that the others train."""
        key, store = f"{self._keys}/experiment", self._connected()
        return store.get(key).decode() if store.check([key]) else ""

    def ends(self, why: str = "the run is at its end") -> None:
        """Tells the launcher why this process, should it end from now on, is not replaced."""
        self._connected().set(f"{self._keys}/ready/{self.name}", why)

    def is_wished(self, store: TCPStore) -> bool:
        """Whether somebody waits to be taken in. For another thread, over a connection of its own."""
        return bool(store.check([f"{self._keys}/wish/{self.generation}"]))

    def regroup(self, report: LeaveReport, wait: float) -> Generation:
        """Who goes on together. To be called once all groups of before are left; waits for all who live to do so.

        Args:
            wait: seconds, at most.

        Raises:
            PeerError: the launcher does not go on, or without this process.
        """
        store = self._connected()
        place = f"{self._keys}/seat/{self.name}" if self.is_new else f"{self._keys}/members/{self.generation + 1}"
        try:
            here = "new" if self.is_new else f"here/{self.generation + 1}"
            store.set(f"{self._keys}/{here}/{self.name}", json.dumps(list(report)))
            store.wait([place], timedelta(seconds=wait))
            found = store.get(place).decode()
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            raise PeerError(f"the launcher did not say within {wait:g} s who goes on: {line}") from error
        if not found.startswith("{"):
            raise PeerError(found)
        generation = Generation.read(found)
        if self.name not in generation.members:
            raise PeerError("the others went on without this process, which was silent for too long")
        self.generation = generation.number
        renumber(generation.members)
        return generation

    def connection(self) -> TCPStore:
        """A new connection to the meeting point, for one thread."""
        return TCPStore(*self._address, None, False, timedelta(seconds=60.0), wait_for_workers=False)

    def _connected(self) -> TCPStore:
        """This process's own connection, which outlives every group."""
        if self._store is None:
            self._store = self.connection()
        return self._store


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def heeds_hangup() -> bool:
    """Whether the end of the terminal (SIGHUP) concerns this process: under nohup it does not."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def leave_terminal() -> None:
    """Has what is written from now on go nowhere where it went to a terminal, which is gone: a write would raise."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
