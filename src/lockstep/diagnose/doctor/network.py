"""Check speed and connections between ranks: names, plain sockets, clocks, NCCL's choices.

result = between(place)                    # facts: errors by rank, round trip, clock offset

The sockets use the addresses that gloo would use.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lockstep.diagnose.doctor.board import gloo_address, is_loopback
from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, fail, ok, warn

__all__ = [
    "NcclChoice",
    "between",
    "judge_between",
    "judge_names",
    "judge_speed",
    "names",
    "read_log",
    "speed",
    "to_master",
]


# Most bytes that are read.
_LIMIT = 8 << 20
_VERSION = re.compile(r"NCCL version (\S+)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([^:\s]+):(\S+?)<")
_NETWORK = re.compile(r"Using network (\S+)")
_SOCKET = re.compile(r"NET/Socket ?: Using \[0\]([^:\s]+):")
_IB = re.compile(r"NET/IB ?: Using (\[0\].*?)(?: \[RO\]| ?;|$)")
_PORT = re.compile(r"\[\d+\]([\w.-]+:\d+)")
_VIA = re.compile(r"Channel \d+(?:/\d+)? ?: .*? via (\S+)")


@dataclasses.dataclass(frozen=True)
class NcclChoice:
    """The choices of a process's NCCL.

    Attributes:
        version: "2.27.5+cuda12.9".
        interface: of its bootstrap.
        network: between nodes: "IB", "Socket", a plugin's name.
        devices: of the network: interfaces, or ports as "mlx5_0:1".
        ways: transport of the channels between ranks -> count: "P2P/CUMEM", "SHM/direct/direct", "NET/IB/0/GDRDMA".
    """

    version: str = ""
    interface: str = ""
    network: str = ""
    devices: list[str] = dataclasses.field(default_factory=list)
    ways: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        through = f" ({', '.join(self.devices)})" if self.devices else ""
        ways = ", ".join(sorted(self.ways, key=lambda way: -self.ways[way]))
        text = (
            f"{self.version or 'of an unknown version'} meets at {self.interface or '?'}, network {self.network or '?'}"
        )
        return f"{text}{through}" + (f", channels by {ways}" if ways else "")

    def to_json(self) -> str:
        """Return a JSON object."""
        return json.dumps(dataclasses.asdict(self))


def read_log(path: Path) -> NcclChoice:
    """Parse a log file; an empty `NcclChoice` if there is none."""
    try:
        with path.open("rb") as file:
            return parse(file.read(_LIMIT).decode("utf-8", "replace"))
    except OSError:
        return NcclChoice()


def parse(text: str) -> NcclChoice:
    """Parse the lines of a log, in the formats of NCCL 2.18 to 2.29."""
    version = _first(_VERSION, text)
    network = _first(_NETWORK, text)
    devices: list[str] = []
    if network == "Socket":
        devices = [interface] if (interface := _first(_SOCKET, text)) else []
    elif (ports := re.search(_IB.pattern, text, re.MULTILINE)) is not None:
        devices = _PORT.findall(ports[1])
    ways: dict[str, int] = {}
    for way in _VIA.findall(text):
        ways[way] = ways.get(way, 0) + 1
    return NcclChoice(version, _first(_BOOTSTRAP, text), network, devices, ways)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    if match:
        return match[1]
    return ""


# Ratio to the other ranks above which a rank is slow.
_SLOW_RATIO = 1.10
# Rounds, and seconds that one should take: less than a scheduler's time slice.
_ROUNDS = 25
_ROUND = 0.008
# Least rounds, and seconds after which no round starts, because a machine may be busy.
_LEAST = 5
_TIME_LIMIT = 1.0
# Measurements in which a rank must be slow, so that a passing disturbance does not count.
_REPEATS = 3
# Side of the matrices, and bytes to copy, by device.
_SIDE = {"cpu": 256, "cuda": 4096}
_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}


def multiplying(device: torch.device) -> Callable[[], None]:
    """Return a product of two square matrices to time.

    It is in float32 on a CPU, in bfloat16 on a CUDA device.
    """
    side = _SIDE[device.type]
    operand = torch.full(
        (side, side), 0.5, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16
    )
    into = torch.empty_like(operand)

    def work() -> None:
        torch.mm(operand, operand, out=into)

    return work


def _copying(device: torch.device) -> Callable[[], None]:
    """Return a copy within the device's memory to time."""
    source = torch.zeros(_BYTES[device.type] // 4, device=device)
    into = torch.empty_like(source)

    def work() -> None:
        into.copy_(source)

    return work


def _times(work: Callable[[], None], device: torch.device) -> list[float]:
    """Time one call, in each of up to 25 rounds, in seconds."""

    def round_of(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            # The host waits for the device here, once a round: the work's time is measured.
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    round_of(1)
    calls = max(1, min(200, int(_ROUND / max(round_of(2), 1e-6))))
    rounds = list[float]()
    deadline = time.monotonic() + _TIME_LIMIT
    while len(rounds) < _ROUNDS and (len(rounds) < _LEAST or time.monotonic() < deadline):
        rounds.append(round_of(calls))
    return rounds


def slower(rounds: Mapping[int, Sequence[float]]) -> list[int]:
    """Find ranks that are more than a tenth slower than the others.

    A rank is slow if its best round exceeds 1.1 times the median of every other rank's rounds, and three quarters of
    them: the rest may have been disturbed.

    Args:
        rounds: by rank, the seconds of each round.
    """
    slow = []
    for rank, rank_rounds in rounds.items():
        peers = []
        for peer, peer_rounds in rounds.items():
            if peer != rank:
                peers.append(sorted(peer_rounds))
        # Compare with the faster others only: other slow ranks would hide this one.
        if peers and len(rounds) > 2:
            peers = sorted(peers, key=statistics.median)[: max(1, len(peers) * 3 // 4)]
        if peers and all(
            min(rank_rounds) > max(_SLOW_RATIO * statistics.median(peer_rounds), peer_rounds[3 * len(peer_rounds) // 4])
            for peer_rounds in peers
        ):
            slow.append(rank)
    return slow


def speed(place: CheckContext) -> CheckResult:
    """Time products and copies; if a rank looks slow, repeat on all ranks."""
    device = place.world.device if place.world else torch.device("cpu")
    facts: list[dict[str, list[float]]] = []
    for number in range(_REPEATS):
        facts.append({"multiplying": _times(multiplying(device), device), "copying": _times(_copying(device), device)})
        if place.board is None or place.size == 1:
            break
        results = place.board.gather(f"speed/{number}", facts[-1], 6.0)
        if None in results or not _suspects(results, place):
            break
    return CheckResult([], {"rounds": facts, "device": str(device)})


def _suspects(results: Sequence[Mapping[str, Sequence[float]] | None], place: CheckContext) -> list[tuple[int, str]]:
    """Find (rank, kind) of those that look slow.

    CPUs of one machine share its memory, so only its best rank counts.
    """
    by_rank = {}
    for rank, result in enumerate(results):
        if result:
            by_rank[rank] = result
    suspects = []
    for operation in next(iter(by_rank.values())) if by_rank else ():
        rounds = {rank: result[operation] for rank, result in by_rank.items()}
        if operation == "copying" and not place.devices:
            best: dict[str, int] = {}
            for rank in sorted(rounds, key=lambda rank: min(rounds[rank])):
                best.setdefault(place.hosts[rank] if rank < len(place.hosts) else "", rank)
            rounds = {rank: rounds[rank] for rank in best.values()}
        suspects += [(rank, operation) for rank in slower(rounds)]
    return suspects


def judge_speed(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Report the ranks that were slow in every measurement."""
    by_rank = {}
    for rank, fact in enumerate(facts):
        if fact:
            by_rank[rank] = fact["rounds"]
    if not by_rank:
        return []
    times = min(len(fact) for fact in by_rank.values())
    every = []
    for n in range(times):
        every.append([by_rank[rank][n] if rank in by_rank else None for rank in range(len(facts))])
    suspects = [_suspects(results, place) for results in every]
    slow = []
    for suspect in suspects[0]:
        if times == _REPEATS and all(suspect in fact for fact in suspects):
            slow.append(suspect)
    findings = []
    for rank, operation in slow:
        best = {}
        for r, fact in by_rank.items():
            best[r] = min(min(fact[n][operation]) for n in range(times))
        usual = statistics.median(seconds for r, seconds in best.items() if r != rank)
        text = f"{place.who(rank)} is slow at {operation}: {1e3 * best[rank]:.3g} ms, the others {1e3 * usual:.3g} ms"
        mend = "check other load, clocks, cooling and power there; --shares auto gives it less work"
        findings.append(warn("speed", text, mend))
    first_rounds = next(iter(by_rank.values()))[0]
    product = statistics.median(first_rounds["multiplying"])
    copy = statistics.median(first_rounds["copying"])
    if facts[min(by_rank)]["device"].startswith("cuda"):
        operation = "cuda"
    else:
        operation = "cpu"
    rates = f"{2 * _SIDE[operation] ** 3 / product / 1e9:.3g} GFLOP/s in matrix products"
    rates += f", {2 * _BYTES[operation] / copy / 1e9:.3g} GB/s in copies"
    return findings or [ok("speed", rates + (" on rank 0; no rank is slower" if len(by_rank) > 1 else ""))]


# Seconds to connect.
_CONNECT = 4.0
# Seconds between two clocks.
_MAX_OFFSET = 1.0
# Round trips; the shortest one counts.
_PINGS = 5
_TIME = struct.Struct("<d")
# Number of ranks up to which each connects to each.
_FULL_MESH = 32


def names(place: CheckContext) -> CheckResult:
    """Resolve the master's name and this machine's own."""
    master = place.environ.get("MASTER_ADDR", "")
    address, interface = gloo_address(place.environ, place.host)
    facts = {
        "master": master,
        "master loops": bool(master) and is_loopback(master),
        "gloo": address,
        "gloo loops": not address or is_loopback(address),
        "interface": interface,
        "machine": f"{place.text('proc/sys/kernel/random/boot_id') or place.host}/{_namespace()}",
    }
    if master:
        try:
            socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
        except OSError as error:
            text = f"MASTER_ADDR {master} does not resolve: {error.strerror or error}"
            return CheckResult([fail("names", text, "give node 0's IP address, or add its name to /etc/hosts")], facts)
    return CheckResult([], facts)


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""


def judge_names(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Report loopback addresses, which are right on one machine only."""
    by_rank = {}
    for rank, fact in enumerate(facts):
        if fact is not None:
            by_rank[rank] = fact
    if place.size == 1 or not by_rank:
        return []
    findings = []
    one_machine = len(by_rank) == place.size and len({fact["machine"] for fact in by_rank.values()}) == 1
    for rank, fact in by_rank.items():
        if one_machine or (len(by_rank) < place.size and not place.several_nodes):
            continue
        if fact["master loops"]:
            text = f"MASTER_ADDR {fact['master']} is the loopback on {place.who(rank)}, which would connect to itself"
            findings.append(fail("names", text, "set node 0's network address (`hostname -I` there) on all nodes"))
        if fact["gloo loops"]:
            at = fact["gloo"] or "no address"
            text = f"{place.who(rank)}: its host name resolves to {at}, where no other rank reaches gloo"
            mend = "set GLOO_SOCKET_IFNAME to the interface between the nodes (`ip -br addr`), or fix /etc/hosts"
            findings.append(fail("names", text, mend))
    return findings or [
        ok("names", f"gloo uses {by_rank[min(by_rank)]['gloo']} ({by_rank[min(by_rank)]['interface'] or 'unknown'})")
    ]


def _reason(error: OSError) -> str:
    """Explain why a connection failed."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(error, TimeoutError):
        return "no answer: a firewall drops the packets, or no machine has this address"
    return f"{error.strerror or error}"


def to_master(host: str, port: int, seconds: float) -> str:
    """Wait until the master's address accepts connections; return "" or the reason after `seconds`."""
    deadline = time.monotonic() + seconds
    why = "no time"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(max(remaining, 1.0), _CONNECT)):
                return ""
        except OSError as error:
            why = _reason(error)
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    return why


def _listen(address: str) -> socket.socket:
    """Start a server that answers each byte with the time, until it is closed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=512)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while connection.recv(1):
                connection.sendall(_TIME.pack(time.time()))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, name="lockstep-doctor-listener", daemon=True).start()
    return server


def _close(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Closing alone would leave it open, because the accepting thread waits on it.
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def _ping(address: str, port: int) -> tuple[str, float, float]:
    """Return (reason of failure or "", shortest round trip in seconds, lead of its clock)."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT) as connection:
            best = (float("inf"), 0.0)
            for _ in range(_PINGS):
                before = time.time()
                began = time.perf_counter()
                connection.sendall(b"?")
                reply = b""
                while len(reply) < _TIME.size:
                    piece = connection.recv(_TIME.size - len(reply))
                    if not piece:
                        return "it closed the connection", 0.0, 0.0
                    reply += piece
                trip = time.perf_counter() - began
                # The reply's time is that of the middle of the shortest round trip.
                best = min(best, (trip, _TIME.unpack(reply)[0] - (before + trip / 2)))
            return "", *best
    except OSError as error:
        return _reason(error), 0.0, 0.0


def peers(rank: int, size: int) -> list[int]:
    """Return the ranks to connect to: all others, or a few of many.

    The few are rank 0 and those 1, 2, 4, ... after this one.
    """
    if size <= _FULL_MESH:
        return [peer for peer in range(size) if peer != rank]
    subset = {0, *((rank + (1 << power)) % size for power in range(size.bit_length()))}
    return sorted(subset - {rank})


def between(place: CheckContext) -> CheckResult:
    """Connect to the other ranks on the addresses that gloo would use."""
    board = place.board
    if board is None or place.size == 1 or place.alone:
        return CheckResult()
    address, _ = gloo_address(place.environ, place.host)
    own_address = None
    try:
        server = _listen(address)
        place.closing.append(lambda: _close(server))
        own_address = [address, server.getsockname()[1]]
    except OSError as error:
        why = (
            f"{place.who(place.rank)} cannot listen on {address or 'an address of its own'}: {error.strerror or error}"
        )
        board.gather("tcp", ["", 0], 3.0)
        return CheckResult(
            [fail("tcp", why, "set GLOO_SOCKET_IFNAME to an interface with an address (`ip -br addr`)")], {}
        )
    addresses = board.gather("tcp", own_address, 6.0)
    targets = []
    for peer in peers(place.rank, place.size):
        if addresses[peer] and addresses[peer][1]:
            targets.append(peer)
    with ThreadPoolExecutor(max_workers=min(16, max(1, len(targets)))) as pool:
        results = dict(zip(targets, pool.map(lambda other: _ping(*addresses[other]), targets), strict=True))
    return CheckResult(
        [],
        {
            "failed": {str(peer): why for peer, (why, _, _) in results.items() if why},
            "at": f"{own_address[0]}:{own_address[1]}",
            "trip": max((trip for why, trip, _ in results.values() if not why), default=0.0),
            # The lead of rank 0's clock.
            "ahead": results[0][2] if 0 in results and not results[0][0] else None,
        },
    )


def judge_between(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Report unreachable ranks, and ranks with a wrong clock."""
    by_rank = {}
    for rank, fact in enumerate(facts):
        if fact:
            by_rank[rank] = fact
    if place.size == 1 or not by_rank:
        return []
    findings = _unreachable(by_rank, place)
    if not findings:
        slowest = max(fact["trip"] for fact in by_rank.values())
        findings = [ok("tcp", f"every rank reaches the others, in {1e3 * slowest:.2g} ms at most")]
    offsets = {}
    for rank, fact in by_rank.items():
        if fact["ahead"] is not None:
            offsets[rank] = -fact["ahead"]
    odd = {}
    for rank, by in offsets.items():
        if abs(by) > _MAX_OFFSET:
            odd[rank] = by
    for rank, by in odd.items():
        text = f"the clock of {place.who(rank)} is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} that of rank 0"
        mend = "synchronise the clocks of the nodes (chronyc tracking, timedatectl): logs and deadlines rely on them"
        findings.append(warn("clocks", text, mend))
    if offsets and not odd:
        findings.append(ok("clocks", f"they agree within {1e3 * max(map(abs, offsets.values())):.2g} ms"))
    return findings


def _unreachable(by_rank: dict[int, Any], place: CheckContext) -> list[Finding]:
    mend = "open all TCP ports between the nodes (gloo and NCCL use any), or set another interface in "
    mend += "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    wrong: dict[int, dict[int, str]] = {}
    for rank, fact in by_rank.items():
        for peer, why in fact["failed"].items():
            wrong.setdefault(int(peer), {})[rank] = why
    findings = []
    for peer, by in sorted(wrong.items()):
        if len(by) >= len(by_rank) - 1 and len(by_rank) > 2:
            source = "no rank"
        else:
            source = place.who(min(by))
        verb = "reaches" if source == "no rank" else "cannot reach"
        at = by_rank[peer]["at"] if peer in by_rank else "its address"
        findings.append(fail("tcp", f"{source} {verb} {place.who(peer)} at {at}: {by[min(by)]}", mend))
    return findings
