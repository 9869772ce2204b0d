"""Check the process groups: whether they form, sum correctly, and how fast.

found = sums(place)                        # facts: each rank's contribution and result, by backend
"""

import json
import os
import re
import statistics
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.diagnose.doctor.board import Board, gloo_address, infiniband, interfaces, link_speed
from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, fail, ok, warn
from lockstep.diagnose.doctor.network import NcclChoice, read_log, to_master
from lockstep.distributed.world import World, meeting_point, meeting_store
from lockstep.errors import ConfigError
from lockstep.files import bytes_text
from lockstep.training.guards import ranges

__all__ = [
    "Met",
    "bandwidth",
    "group",
    "judge_bandwidth",
    "judge_sums",
    "judge_transport",
    "meet",
    "sums",
    "surplus",
    "transport",
]


_NAME = "meeting"
_ALIKE = "start all nodes with the same --nnodes and --nproc-per-node"


@dataclass
class Met:
    """The result of a meeting.

    Attributes:
        board: exchange with the ranks; None if this rank did not reach it.
        findings: on rank 0, about the whole; elsewhere why this rank did not get there.
    """

    board: Board | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def found(self) -> CheckResult:
        """The findings as the result of a check."""
        return CheckResult(self.findings)


def meet(place: CheckContext) -> Met:
    """Connect to the ranks' store, register, and wait for the others up to `place.patience` seconds."""
    if place.size == 1 and "WORLD_SIZE" not in place.environ:
        return Met(Board(None, 0, 1))
    if place.lost:  # it would register as another rank
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


def _cannot_listen(error: ConfigError, port: int, place: CheckContext) -> Finding:
    text, _, mend = str(error).partition("; ")
    by = _holder(port, place.root)
    return fail(_NAME, text + (f" ({by})" if by else ""), mend or "give another MASTER_ADDR")


def _holder(port: int, root: Path = Path("/")) -> str:
    """The process that listens on a port: `python, process 417`; "" if unknown."""
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


def _judged(here: list[Any], board: Board, place: CheckContext) -> list[Finding]:
    """Rank 0's findings about the ranks that came."""
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


def surplus(board: Board, place: CheckContext) -> list[Finding]:
    """Report ranks that came twice or outside the world, on rank 0."""
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


_FORM = 15.0  # seconds
_LENGTHS = {"gloo": (1 << 10, 1 << 16, 1 << 20, 1 << 22), "nccl": (1 << 10, 1 << 18, 1 << 22, 1 << 26)}  # float32
_REPEATS, _ENOUGH = 5, 1.5  # of each size; seconds that the next size may take
_SHARE = {"gloo": 0.15, "nccl": 0.4}  # share of the link's rate to expect; gloo copies through the processor


def group(place: CheckContext) -> CheckResult:
    """Form the groups that training would form: gloo and, on CUDA devices, NCCL."""
    if place.size == 1:
        return CheckResult([ok("group", "one process: nothing to exchange")])
    if place.world is None:
        place.world = World.join(place.config.device, _FORM)
    backend = "gloo and NCCL" if place.world.device.type == "cuda" else "gloo"
    return CheckResult([ok("group", f"{place.size} ranks formed a group of {backend}")])


def _backends(world: World) -> list[tuple[str, torch.device, Any]]:
    """List (name, device of its tensors, group) of each backend."""
    found: list[tuple[str, torch.device, Any]] = [("gloo", torch.device("cpu"), world.control)]
    if world.device.type == "cuda":
        found.append(("nccl", world.device, None))  # the default group's
    return found


def own(rank: int) -> list[float]:
    """Return a rank's contribution to the sum.

    It is made so that two ranks cannot be exchanged for two others.
    """
    return [rank + 1.0, (rank + 1.0) ** 2, 2.0 ** (rank % 40)]


def _expected(size: int) -> list[float]:
    """The sum of the contributions of `size` ranks."""
    return [sum(column) for column in zip(*map(own, range(size)), strict=True)]


def sums(place: CheckContext) -> CheckResult:
    """Sum over all ranks by each backend, and gather each rank's contribution."""
    world = place.world
    if world is None or world.size == 1:
        return CheckResult()
    facts = {}
    for name, device, ranks in _backends(world):
        given = torch.tensor(own(world.rank), dtype=torch.float64, device=device)
        each = [torch.zeros_like(given) for _ in range(world.size)]
        dist.all_gather(each, given, group=ranks)  # collective
        total = given.clone()
        dist.all_reduce(total, group=ranks)  # collective
        facts[name] = {"total": total.tolist(), "each": [one.tolist() for one in each]}  # waits for the device
    return CheckResult([], facts)


def judge_sums(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Compare each rank's result with the expected one."""
    found = []
    wanted = _expected(place.size)
    names = {name for each in facts if each for name in each}
    for name in sorted(names):
        wrong = {rank: each[name] for rank, each in enumerate(facts) if each and each[name]["total"] != wanted}
        for rank, each in wrong.items():
            odd = [other for other, gave in enumerate(each["each"]) if gave != own(other)]
            total = each["total"][0]
            text = f"{name}: the sum of all ranks is {total:g} on {place.who(rank)}, and should be {wanted[0]:g}"
            if odd:
                text += (
                    f"; what came from {place.who(odd[0])} is {each['each'][odd[0]][0]:g}, and not {own(odd[0])[0]:g}"
                )
            mend = "look for a defective link or device there: NCCL_DEBUG=INFO (`lockstep launch --nccl-debug`), dmesg"
            found.append(fail("sum", text, mend))
    if not found and names:
        found.append(ok("sum", f"{' and '.join(sorted(names))}: {wanted[0]:g} on all ranks, as it should be"))
    return found


def bandwidth(place: CheckContext) -> CheckResult:
    """Time all-reduces of growing messages."""
    world = place.world
    if world is None or world.size == 1:
        return CheckResult()
    facts: dict[str, Any] = {}
    for name, device, ranks in _backends(world):
        times: dict[str, float] = {}
        for length in _LENGTHS[name]:
            data = torch.ones(length, device=device)
            seconds = []
            for _ in range(1 + _REPEATS):
                data.fill_(1.0)
                _ready(device)
                world.barrier()  # collective
                began = time.perf_counter()
                dist.all_reduce(data, group=ranks)  # collective
                _ready(device)
                seconds.append(time.perf_counter() - began)
            times[str(4 * length)] = statistics.median(seconds[1:])
            slowest = max(world.gather(times[str(4 * length)]))  # collective
            if slowest * 4 * (1 + _REPEATS) > _ENOUGH:
                break
        facts[name] = times
    _, interface = gloo_address(place.environ, place.host)
    facts["link"] = link_speed(place.root, interface)
    facts["interface"] = interface
    return CheckResult([], facts)


def _ready(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # waits for the device


def judge_bandwidth(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Compare the largest message's rate with the slowest link's."""
    there = [each for each in facts if each]
    if not there:
        return []
    found = []
    links = [each["link"] for each in there]
    link = min(links) if all(links) and place.several_nodes else 0.0
    for name in ("gloo", "nccl"):
        times = there[0].get(name)
        if not times:
            continue
        sizes = sorted(map(int, times))
        least, most = (max(each[name][str(size)] for each in there) for size in (sizes[0], sizes[-1]))
        rate = 2 * (place.size - 1) / place.size * sizes[-1] / most
        text = f"{name}: {1e3 * least:.2g} ms for {bytes_text(sizes[0])}"
        text += f", {bytes_text(rate)}/s at {bytes_text(sizes[-1])}"
        if link and rate < _SHARE[name] * link:
            slowest = place.who(links.index(link))
            text += f"; the link of {slowest} ({there[0]['interface']}) should give {bytes_text(link)}/s"
            mend = "look for another load, errors (`ip -s link`) or a lower speed of the switch (`ethtool`)"
            found.append(warn("bandwidth", text, mend + ("; InfiniBand, if there is any" if name == "nccl" else "")))
        else:
            told = f" of {bytes_text(link)}/s" if link else " (this machine does not report the speed of the link)"
            found.append(ok("bandwidth", text + told))
    return found


def transport(place: CheckContext) -> CheckResult:
    """Read NCCL's choice of transport from its log, and list the alternatives."""
    path = place.environ.get("NCCL_DEBUG_FILE", "")
    if not place.devices or place.size == 1 or not path:
        return CheckResult([], None)
    chosen = read_log(Path(path.replace("%h", place.host).replace("%p", str(os.getpid()))))
    facts = {
        "chosen": json.loads(chosen.to_json()),
        "infiniband": infiniband(place.root),
        "there": interfaces(place.root),
    }
    return CheckResult([], facts)


def judge_transport(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Check that NCCL avoids sockets if InfiniBand is up, alike on all ranks."""
    there = {rank: each for rank, each in enumerate(facts) if each}
    if not there:
        return [
            ok("transport", "no NCCL here; on CUDA devices: which interface and transport it takes, from its own log")
        ]
    found = []
    chosen = {rank: NcclChoice(**each["chosen"]) for rank, each in there.items()}
    for rank, one in chosen.items():
        ports = there[rank]["infiniband"]
        if ports and one.network == "Socket" and place.several_nodes:
            text = f"{place.who(rank)}: NCCL takes sockets ({one.interface}), and {', '.join(ports)} is up"
            mend = "unset NCCL_IB_DISABLE and NCCL_NET; in a container: libibverbs, --device /dev/infiniband, "
            mend += "--ulimit memlock=-1"
            found.append(fail("transport", text, mend))
    networks = {one.network for one in chosen.values() if one.network}
    if len(networks) > 1:
        told = "; ".join(f"{place.who(rank)}: {one.network}" for rank, one in chosen.items())
        found.append(
            fail("transport", f"NCCL takes different networks: {told}", "set NCCL_NET, or mend the odd node's")
        )
    first = chosen[min(chosen)]
    return found or [ok("transport", f"NCCL {first}")]
