"""Check the process groups: whether they form, sum correctly, and how fast.

result = sums(place)                       # facts: each rank's contribution and result, by backend
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
from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, fail, ok, skip, warn
from lockstep.diagnose.doctor.network import NcclChoice, read_log, to_master
from lockstep.distributed.launcher import ROUND_VARIABLE
from lockstep.distributed.world import World, meeting_point, meeting_store
from lockstep.errors import ConfigError
from lockstep.files import bytes_text
from lockstep.training.step.guards import format_ranges

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
_SAME_FLAGS = "start all nodes with the same --nnodes and --nproc-per-node"


@dataclass
class Met:
    """The result of a meeting.

    Attributes:
        board: exchange with the ranks; None if this rank did not reach it.
        findings: on rank 0, about all ranks; elsewhere why this rank could not connect.
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
    # Without valid variables it would register as another rank.
    if place.lost:
        return Met()
    deadline = time.monotonic() + place.patience
    host, port, external = meeting_point()
    at = f"{host}:{port}"
    if place.rank or external:
        why = to_master(host, port, place.patience)
        if why:
            name = place.who(place.rank)
            mend = "check MASTER_ADDR and MASTER_PORT, that rank 0 was started, and the firewall between the nodes"
            return Met(findings=[fail(_NAME, f"{name} cannot reach rank 0 at {at}: {why}", mend)])
    try:
        store = meeting_store(
            place.rank, place.size, timedelta(seconds=max(1.0, deadline - time.monotonic())), all_ranks=False
        )
    except ConfigError as error:
        return Met(findings=[_cannot_listen(error, port, place)])
    except RuntimeError as error:
        if str(error):
            line = str(error).splitlines()[0]
        else:
            line = type(error).__name__
        return Met(
            findings=[fail(_NAME, f"cannot open the store at {at}: {line}", "check MASTER_ADDR and MASTER_PORT")]
        )
    start = place.environ.get(ROUND_VARIABLE) or place.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    board = Board(store, place.rank, place.size, f"lockstep/doctor/{start}")
    me = {"rank": place.rank, "host": place.host, "pid": os.getpid(), "size": place.size, "local": place.local_size}
    # Two processes with one RANK both count, so the second one notices it.
    number = board.count(f"here/{place.rank}")
    if number > 1:
        board.note(f"twice/{place.rank}", me)
        text = f"process {me['pid']} on {place.host} has RANK {place.rank}, and so does another process"
        return Met(findings=[fail(_NAME, text, "give each process its own RANK; one launcher per node sets it")])
    board.note(f"arrived/{board.count('arrived')}", me)
    arrivals = board.gather("here", me, max(0.5, deadline - time.monotonic()))
    place.hosts = [arrival["host"] if arrival else "" for arrival in arrivals]
    return Met(board, list(_arrival_findings(arrivals, board, place)) if place.rank == 0 else [])


def _cannot_listen(error: ConfigError, port: int, place: CheckContext) -> Finding:
    text, _, mend = str(error).partition("; ")
    by = _holder(port, place.root)
    return fail(_NAME, text + (f" ({by})" if by else ""), mend or "give another MASTER_ADDR")


def _holder(port: int, root: Path = Path("/")) -> str:
    """Return the process that listens on a port; "" if unknown.

    Such as `python, process 417`.
    """
    inodes = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        try:
            lines = (root / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            # 0A is the state LISTEN; the address ends with the port in hexadecimal.
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


def _arrival_findings(arrivals: list[Any], board: Board, place: CheckContext) -> list[Finding]:
    """Return rank 0's findings about the connected ranks."""
    findings = []
    missing = []
    for rank, arrival in enumerate(arrivals):
        if arrival is None:
            missing.append(rank)
    if missing:
        connected = sorted({arrival["host"] for arrival in arrivals if arrival})
        several = len(missing) > 1
        ranks = f"rank{'s' * several} {format_ranges(missing)}"
        text = f"{ranks} of {place.size} did not connect within {place.patience:.0f} s"
        text += f"; connected hosts: {', '.join(connected)}"
        mend = "check that its launcher was started with this MASTER_ADDR and MASTER_PORT, and see the output of its "
        findings.append(fail(_NAME, text, mend + "own doctor; for a slow start give --wait 50"))
    for rank, arrival in enumerate(arrivals):
        if arrival and arrival["size"] != place.size:
            text = f"{place.who(rank)} has WORLD_SIZE {arrival['size']}, but rank 0 has {place.size}"
            findings.append(fail(_NAME, text, _SAME_FLAGS))
    hosts = sorted({arrival["host"] for arrival in arrivals if arrival})
    if len(hosts) < 5:
        location = f"on {', '.join(hosts)}"
    else:
        location = f"on {len(hosts)} nodes"
    return findings or [ok(_NAME, f"{place.size} rank{'s' * (place.size > 1)} {location}")]


def surplus(board: Board, place: CheckContext) -> list[Finding]:
    """Report ranks that connected twice or are outside the world, on rank 0."""
    if place.size == 1:
        return []
    findings = list[Finding]()
    arrivals = list[Any]()
    while (arrival := board.read_note(f"arrived/{len(arrivals) + 1}")) is not None:
        arrivals.append(arrival)
    for rank in range(place.size):
        twice = board.read_note(f"twice/{rank}")
        earlier = board.of("here", rank)
        if twice and earlier:
            both = " and ".join(f"process {arrival['pid']} on {arrival['host']}" for arrival in (earlier, twice))
            text = f"rank {rank} connected twice: {both}"
            findings.append(fail(_NAME, text, "give each node its own --node-rank, and each process its own RANK"))
    for arrival in arrivals:
        if arrival["rank"] >= place.size:
            text = f"rank {arrival['rank']} on {arrival['host']} connected too: "
            text += f"WORLD_SIZE is {arrival['size']} there, {place.size} here"
            findings.append(fail(_NAME, text, _SAME_FLAGS))
    return findings


# Seconds for the groups to form.
_FORM_LIMIT = 15.0
# Lengths of the messages, in float32 elements.
_LENGTHS = {"gloo": (1 << 10, 1 << 16, 1 << 20, 1 << 22), "nccl": (1 << 10, 1 << 18, 1 << 22, 1 << 26)}
# Repeats of each size, and seconds that the next size may take.
_REPEATS = 5
_TIME_LIMIT = 1.5
# Share of the link's rate to expect; gloo copies through the processor.
_SHARE = {"gloo": 0.15, "nccl": 0.4}


def group(place: CheckContext) -> CheckResult:
    """Form the groups that training would form: gloo and, on CUDA devices, NCCL."""
    if place.size == 1:
        return CheckResult([skip("group", "one process: nothing to exchange")])
    if place.world is None:
        place.world = World.join(place.config.device, _FORM_LIMIT)
    if place.world.device.type == "cuda":
        backend = "gloo and NCCL"
    else:
        backend = "gloo"
    return CheckResult([ok("group", f"{place.size} ranks formed a group of {backend}")])


def _backends(world: World) -> list[tuple[str, torch.device, Any]]:
    """List (name, device of its tensors, group) of each backend."""
    backends: list[tuple[str, torch.device, Any]] = [("gloo", torch.device("cpu"), world.control)]
    if world.device.type == "cuda":
        # The default group has the NCCL backend.
        backends.append(("nccl", world.device, None))
    return backends


def own(rank: int) -> list[float]:
    """Return a rank's contribution to the sum.

    It is made so that two ranks cannot be exchanged for two others.
    """
    return [rank + 1.0, (rank + 1.0) ** 2, 2.0 ** (rank % 40)]


def _sum_contributions(size: int) -> list[float]:
    """Return the sum of the contributions of `size` ranks."""
    return [sum(column) for column in zip(*map(own, range(size)), strict=True)]


def sums(place: CheckContext) -> CheckResult:
    """Sum over all ranks by each backend, and gather each rank's contribution."""
    world = place.world
    if world is None or world.size == 1:
        return CheckResult()
    facts = {}
    for name, device, ranks in _backends(world):
        contribution = torch.tensor(own(world.rank), dtype=torch.float64, device=device)
        contributions = [torch.zeros_like(contribution) for _ in range(world.size)]
        # All ranks: what each received from every other one shows which link is wrong.
        dist.all_gather(contributions, contribution, group=ranks)  # collective
        total = contribution.clone()
        # All ranks: the sum that training relies on.
        dist.all_reduce(total, group=ranks)  # collective
        # The host waits for the device here, once for each backend.
        facts[name] = {"total": total.tolist(), "each": [row.tolist() for row in contributions]}
    return CheckResult([], facts)


def judge_sums(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Compare each rank's result with the expected one."""
    findings = []
    expected = _sum_contributions(place.size)
    names = {name for result in facts if result for name in result}
    for name in sorted(names):
        wrong = {}
        for rank, result in enumerate(facts):
            if result and result[name]["total"] != expected:
                wrong[rank] = result[name]
        for rank, result in wrong.items():
            odd = []
            for peer, value in enumerate(result["each"]):
                if value != own(peer):
                    odd.append(peer)
            total = result["total"][0]
            text = f"{name}: the sum over all ranks is {total:g} on {place.who(rank)}, expected {expected[0]:g}"
            if odd:
                text += (
                    f"; it received {result['each'][odd[0]][0]:g} from {place.who(odd[0])}, expected {own(odd[0])[0]:g}"
                )
            mend = "check the link and the device there: NCCL_DEBUG=INFO (`lockstep launch --nccl-debug`), dmesg"
            findings.append(fail("sum", text, mend))
    if not findings and names:
        findings.append(ok("sum", f"{' and '.join(sorted(names))}: {expected[0]:g} on all ranks, as expected"))
    return findings


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
                # The device must be idle before the clock starts.
                _synchronize(device)
                # All ranks start at the same time, or one would measure another's delay.
                world.barrier()  # collective
                began = time.perf_counter()
                # All ranks, timed: the message of this size.
                dist.all_reduce(data, group=ranks)  # collective
                # The host waits for the device here: the collective's time is measured.
                _synchronize(device)
                seconds.append(time.perf_counter() - began)
            times[str(4 * length)] = statistics.median(seconds[1:])
            # All ranks: the slowest one decides whether to go on, so that all stop together.
            slowest = max(world.gather(times[str(4 * length)]))  # collective
            if slowest * 4 * (1 + _REPEATS) > _TIME_LIMIT:
                break
        facts[name] = times
    _, interface = gloo_address(place.environ, place.host)
    facts["link"] = link_speed(place.root, interface)
    facts["interface"] = interface
    return CheckResult([], facts)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        # The host waits for the device, before and after each timed collective.
        torch.cuda.synchronize(device)


def judge_bandwidth(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Compare the largest message's rate with the slowest link's."""
    answers = [answer for answer in facts if answer]
    if not answers:
        return []
    findings = []
    links = [answer["link"] for answer in answers]
    link = min(links) if all(links) and place.several_nodes else 0.0
    for name in ("gloo", "nccl"):
        times = answers[0].get(name)
        if not times:
            continue
        sizes = sorted(map(int, times))
        least = max(answer[name][str(sizes[0])] for answer in answers)
        most = max(answer[name][str(sizes[-1])] for answer in answers)
        # A ring sends 2 (n - 1) / n of the bytes over each link.
        rate = 2 * (place.size - 1) / place.size * sizes[-1] / most
        text = f"{name}: {1e3 * least:.2g} ms for {bytes_text(sizes[0])}"
        text += f", {bytes_text(rate)}/s at {bytes_text(sizes[-1])}"
        if link and rate < _SHARE[name] * link:
            slowest = place.who(links.index(link))
            text += f"; the link of {slowest} ({answers[0]['interface']}) should give {bytes_text(link)}/s"
            mend = "check for other load, errors (`ip -s link`) or a slow switch port (`ethtool`)"
            findings.append(warn("bandwidth", text, mend + ("; InfiniBand, if there is any" if name == "nccl" else "")))
        else:
            if link:
                note = f" of {bytes_text(link)}/s"
            else:
                note = " (this machine does not report the speed of the link)"
            findings.append(ok("bandwidth", text + note))
    return findings


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
    """Check that NCCL avoids sockets if InfiniBand is up, the same on all ranks."""
    by_rank = {}
    for rank, fact in enumerate(facts):
        if fact:
            by_rank[rank] = fact
    if not by_rank:
        return [skip("transport", "no NCCL here; with CUDA devices: its interface and transport, from its own log")]
    findings = []
    chosen = {rank: NcclChoice(**fact["chosen"]) for rank, fact in by_rank.items()}
    for rank, choice in chosen.items():
        ports = by_rank[rank]["infiniband"]
        if ports and choice.network == "Socket" and place.several_nodes:
            text = f"{place.who(rank)}: NCCL uses sockets ({choice.interface}) although {', '.join(ports)} is up"
            mend = "unset NCCL_IB_DISABLE and NCCL_NET; in a container: libibverbs, --device /dev/infiniband, "
            mend += "--ulimit memlock=-1"
            findings.append(fail("transport", text, mend))
    networks = set()
    for choice in chosen.values():
        if choice.network:
            networks.add(choice.network)
    if len(networks) > 1:
        listing = "; ".join(f"{place.who(rank)}: {choice.network}" for rank, choice in chosen.items())
        findings.append(
            fail("transport", f"NCCL uses different networks: {listing}", "set NCCL_NET, or fix the node that differs")
        )
    choice_of_first_rank = chosen[min(chosen)]
    return findings or [ok("transport", f"NCCL {choice_of_first_rank}")]
