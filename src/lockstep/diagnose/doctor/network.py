"""Check speed and connections between ranks: names, plain sockets, clocks, NCCL's choices.

found = between(place)                     # facts: by tried rank, what went wrong; the clock's distance

The sockets use the addresses that gloo would take.
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
    "multiplying",
    "names",
    "parse",
    "read_log",
    "slower",
    "speed",
    "to_master",
]


_LIMIT = 8 << 20  # bytes that are read
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
        said = (
            f"{self.version or 'of an unknown version'} meets at {self.interface or '?'}, network {self.network or '?'}"
        )
        return f"{said}{through}" + (f", channels by {ways}" if ways else "")

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
        devices = [found] if (found := _first(_SOCKET, text)) else []
    elif (ports := re.search(_IB.pattern, text, re.MULTILINE)) is not None:
        devices = _PORT.findall(ports[1])
    ways: dict[str, int] = {}
    for way in _VIA.findall(text):
        ways[way] = ways.get(way, 0) + 1
    return NcclChoice(version, _first(_BOOTSTRAP, text), network, devices, ways)


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


_SLOWER = 1.10
_ROUNDS, _ROUND = 25, 0.008  # seconds that a round should take: less than a process is given at a time
_LEAST, _ENOUGH = 5, 1.0  # rounds, and seconds after which no more are begun: a machine may be busy
_AGAIN = 3  # times that a rank must be found slow, or it was something that passed
_SIDE, _BYTES = {"cpu": 256, "cuda": 4096}, {"cpu": 32 << 20, "cuda": 256 << 20}


def multiplying(device: torch.device) -> Callable[[], None]:
    """Return a product of two square matrices to time.

    It is in float32 on a CPU, in bfloat16 on a CUDA device.
    """
    side = _SIDE[device.type]
    one = torch.full((side, side), 0.5, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    into = torch.empty_like(one)

    def work() -> None:
        torch.mm(one, one, out=into)

    return work


def _copying(device: torch.device) -> Callable[[], None]:
    """Return a copy within the device's memory to time."""
    one = torch.zeros(_BYTES[device.type] // 4, device=device)
    into = torch.empty_like(one)

    def work() -> None:
        into.copy_(one)

    return work


def _times(work: Callable[[], None], device: torch.device) -> list[float]:
    """Time one call, in each of up to 25 rounds, in seconds."""

    def round_of(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # waits for the device
        return (time.perf_counter() - began) / calls

    round_of(1)
    calls = max(1, min(200, int(_ROUND / max(round_of(2), 1e-6))))
    found, ended = list[float](), time.monotonic() + _ENOUGH
    while len(found) < _ROUNDS and (len(found) < _LEAST or time.monotonic() < ended):
        found.append(round_of(calls))
    return found


def slower(rounds: Mapping[int, Sequence[float]]) -> list[int]:
    """Find ranks that are more than a tenth slower than the others.

    A rank is slow if its best round exceeds 1.1 times the median of every other rank's rounds, and three quarters of
    them: the rest may have been disturbed.

    Args:
        rounds: by rank, the seconds of each round.
    """
    found = []
    for rank, own in rounds.items():
        others = [sorted(each) for other, each in rounds.items() if other != rank]
        if others and len(rounds) > 2:  # compare with the faster others only: slow ones would hide this rank
            others = sorted(others, key=statistics.median)[: max(1, len(others) * 3 // 4)]
        if others and all(
            min(own) > max(_SLOWER * statistics.median(each), each[3 * len(each) // 4]) for each in others
        ):
            found.append(rank)
    return found


def speed(place: CheckContext) -> CheckResult:
    """Measure both kinds; if a rank looks slow, repeat on all ranks alike."""
    device = place.world.device if place.world else torch.device("cpu")
    facts: list[dict[str, list[float]]] = []
    for number in range(_AGAIN):
        facts.append({"multiplying": _times(multiplying(device), device), "copying": _times(_copying(device), device)})
        if place.board is None or place.size == 1:
            break
        told = place.board.gather(f"speed/{number}", facts[-1], 6.0)
        if None in told or not _suspects(told, place):
            break
    return CheckResult([], {"rounds": facts, "device": str(device)})


def _suspects(told: Sequence[Mapping[str, Sequence[float]] | None], place: CheckContext) -> list[tuple[int, str]]:
    """(rank, kind) of those that look slow.

    CPUs of one machine share its memory, so only its best rank counts.
    """
    there = {rank: each for rank, each in enumerate(told) if each}
    found = []
    for kind in next(iter(there.values())) if there else ():
        rounds = {rank: each[kind] for rank, each in there.items()}
        if kind == "copying" and not place.devices:
            best: dict[str, int] = {}
            for rank in sorted(rounds, key=lambda rank: min(rounds[rank])):
                best.setdefault(place.hosts[rank] if rank < len(place.hosts) else "", rank)
            rounds = {rank: rounds[rank] for rank in best.values()}
        found += [(rank, kind) for rank in slower(rounds)]
    return found


def judge_speed(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Name the ranks that were slow each time."""
    there = {rank: each["rounds"] for rank, each in enumerate(facts) if each}
    if not there:
        return []
    times = min(len(each) for each in there.values())
    every = [[there[rank][n] if rank in there else None for rank in range(len(facts))] for n in range(times)]
    asked = [_suspects(told, place) for told in every]
    slow = [suspect for suspect in asked[0] if times == _AGAIN and all(suspect in each for each in asked)]
    found = []
    for rank, kind in slow:
        last = {r: min(min(each[n][kind]) for n in range(times)) for r, each in there.items()}
        others = statistics.median(seconds for r, seconds in last.items() if r != rank)
        text = f"{place.who(rank)} is slow at {kind}: {1e3 * last[rank]:.3g} ms, the others {1e3 * others:.3g} ms"
        mend = "look at what else runs there, its clocks, cooling and power; --shares auto gives it less to do"
        found.append(warn("speed", text, mend))
    first = next(iter(there.values()))[0]
    product, copy = statistics.median(first["multiplying"]), statistics.median(first["copying"])
    kind = "cuda" if facts[min(there)]["device"].startswith("cuda") else "cpu"
    rates = f"{2 * _SIDE[kind] ** 3 / product / 1e9:.3g} GFLOP/s in products"
    rates += f", {2 * _BYTES[kind] / copy / 1e9:.3g} GB/s in copies"
    return found or [ok("speed", rates + (" on rank 0, and no rank is slower" if len(there) > 1 else ""))]


_CONNECT = 4.0  # seconds
_APART = 1.0  # seconds between two clocks
_ASKS = 5
_TIME = struct.Struct("<d")
_ALL = 32  # ranks up to which each tries each


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
            return CheckResult(
                [fail("names", text, "give node 0's address as a number, or put its name into /etc/hosts")], facts
            )
    return CheckResult([], facts)


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""


def judge_names(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Report loopback addresses, which are right on one machine only."""
    there = {rank: each for rank, each in enumerate(facts) if each is not None}
    if place.size == 1 or not there:
        return []
    found = []
    one_machine = len(there) == place.size and len({each["machine"] for each in there.values()}) == 1
    for rank, each in there.items():
        if one_machine or (len(there) < place.size and not place.several_nodes):
            continue
        if each["master loops"]:
            text = (
                f"MASTER_ADDR {each['master']} is the loopback on {place.who(rank)}, which looks for rank 0 at itself"
            )
            found.append(
                fail("names", text, "give node 0's address on the network (`hostname -I` there), on all nodes")
            )
        if each["gloo loops"]:
            at = each["gloo"] or "no address"
            text = f"{place.who(rank)}: its host name leads to {at}, where gloo would be met by nobody"
            mend = "set GLOO_SOCKET_IFNAME to the interface between the nodes (`ip -br addr`), or mend /etc/hosts"
            found.append(fail("names", text, mend))
    return found or [
        ok("names", f"gloo takes {there[min(there)]['gloo']} ({there[min(there)]['interface'] or 'unknown'})")
    ]


def _reason(error: OSError) -> str:
    """Explain why a connection failed."""
    if isinstance(error, ConnectionRefusedError):
        return "refused: the machine answers, and nobody listens there"
    if isinstance(error, TimeoutError):
        return "no answer: a firewall drops it, or the address is of no machine"
    return f"{error.strerror or error}"


def to_master(host: str, port: int, seconds: float) -> str:
    """Wait until the master's address accepts connections; return "" or the reason after `seconds`."""
    deadline, why = time.monotonic() + seconds, "no time"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(max(left, 1.0), _CONNECT)):
                return ""
        except OSError as error:
            why = _reason(error)
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    return why


def _listen(address: str) -> socket.socket:
    """Start a server that answers each byte with the time, until it is closed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=512)

    def answer(asked: socket.socket) -> None:
        with asked, contextlib.suppress(OSError):
            while asked.recv(1):
                asked.sendall(_TIME.pack(time.time()))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                asked, _ = server.accept()
                threading.Thread(target=answer, args=(asked,), daemon=True).start()

    threading.Thread(target=accept, name="lockstep-doctor-listener", daemon=True).start()
    return server


def _close(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)  # else the accepting thread would keep it open
    server.close()


def _asked(address: str, port: int) -> tuple[str, float, float]:
    """Return (reason of failure or "", shortest round trip in seconds, lead of its clock)."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT) as asked:
            best = (float("inf"), 0.0)
            for _ in range(_ASKS):
                before = time.time()
                began = time.perf_counter()
                asked.sendall(b"?")
                held = b""
                while len(held) < _TIME.size:
                    piece = asked.recv(_TIME.size - len(held))
                    if not piece:
                        return "it closed the connection", 0.0, 0.0
                    held += piece
                trip = time.perf_counter() - began
                best = min(best, (trip, _TIME.unpack(held)[0] - (before + trip / 2)))
            return "", *best
    except OSError as error:
        return _reason(error), 0.0, 0.0


def peers(rank: int, size: int) -> list[int]:
    """Return the ranks to try: all others, or of many a few.

    Of many they are rank 0 and those 1, 2, 4, ... after this one.
    """
    if size <= _ALL:
        return [other for other in range(size) if other != rank]
    found = {0, *((rank + (1 << power)) % size for power in range(size.bit_length()))}
    return sorted(found - {rank})


def between(place: CheckContext) -> CheckResult:
    """Connect to the other ranks on the addresses that gloo would take."""
    board = place.board
    if board is None or place.size == 1 or place.alone:
        return CheckResult()
    address, _ = gloo_address(place.environ, place.host)
    told = None
    try:
        server = _listen(address)
        place.closing.append(lambda: _close(server))
        told = [address, server.getsockname()[1]]
    except OSError as error:
        why = (
            f"{place.who(place.rank)} cannot listen on {address or 'an address of its own'}: {error.strerror or error}"
        )
        board.gather("tcp", ["", 0], 3.0)
        return CheckResult(
            [fail("tcp", why, "set GLOO_SOCKET_IFNAME to an interface with an address (`ip -br addr`)")], {}
        )
    where = board.gather("tcp", told, 6.0)
    tried = [other for other in peers(place.rank, place.size) if where[other] and where[other][1]]
    with ThreadPoolExecutor(max_workers=min(16, max(1, len(tried)))) as pool:
        found = dict(zip(tried, pool.map(lambda other: _asked(*where[other]), tried), strict=True))
    return CheckResult(
        [],
        {
            "failed": {str(other): why for other, (why, _, _) in found.items() if why},
            "at": f"{told[0]}:{told[1]}",
            "trip": max((trip for why, trip, _ in found.values() if not why), default=0.0),
            "ahead": found[0][2] if 0 in found and not found[0][0] else None,  # rank 0's clock, before this one
        },
    )


def judge_between(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Name the ranks that cannot be reached, and those with a wrong clock."""
    there = {rank: each for rank, each in enumerate(facts) if each}
    if place.size == 1 or not there:
        return []
    found = _unreached(there, place)
    if not found:
        slowest = max(each["trip"] for each in there.values())
        found = [ok("tcp", f"every rank reaches the others, in {1e3 * slowest:.2g} ms at most")]
    apart = {rank: -each["ahead"] for rank, each in there.items() if each["ahead"] is not None}
    odd = {rank: by for rank, by in apart.items() if abs(by) > _APART}
    for rank, by in odd.items():
        text = f"the clock of {place.who(rank)} is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} that of rank 0"
        mend = "have the nodes keep time (chronyc tracking, timedatectl): logs and deadlines are compared"
        found.append(warn("clocks", text, mend))
    if apart and not odd:
        found.append(ok("clocks", f"they agree to {1e3 * max(map(abs, apart.values())):.2g} ms"))
    return found


def _unreached(there: dict[int, Any], place: CheckContext) -> list[Finding]:
    mend = "open the ports between the nodes for all TCP (gloo and NCCL take any), or name another interface in "
    mend += "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    wrong: dict[int, dict[int, str]] = {}
    for rank, each in there.items():
        for other, why in each["failed"].items():
            wrong.setdefault(int(other), {})[rank] = why
    found = []
    for other, by in sorted(wrong.items()):
        who = "nobody" if len(by) >= len(there) - 1 and len(there) > 2 else place.who(min(by))
        verb = "reaches" if who == "nobody" else "cannot reach"
        at = there[other]["at"] if other in there else "its address"
        found.append(fail("tcp", f"{who} {verb} {place.who(other)} at {at}: {by[min(by)]}", mend))
    return found
