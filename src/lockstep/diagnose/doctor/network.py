"""Plain sockets between the ranks, on the addresses that gloo would take: who reaches whom, and what time it is.

found = between(place)                      # facts: by rank that was tried, what went wrong; the clock's distance
"""

import contextlib
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.diagnose.doctor.addresses import gloo_address, is_loopback
from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok, warn

__all__ = ["between", "judge_between", "judge_names", "names", "reason", "to_master"]

_CONNECT = 4.0  # seconds
_APART = 1.0  # seconds between two clocks
_ASKS = 5
_TIME = struct.Struct("<d")
_ALL = 32  # ranks up to which each tries each


def names(place: Place) -> Found:
    """What the master's and this machine's own name lead to."""
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
            return Found(
                [fail("names", text, "give node 0's address as a number, or put its name into /etc/hosts")], facts
            )
    return Found([], facts)


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""


def judge_names(facts: list[Any], place: Place) -> list[Finding]:
    """Loopback is right on one machine, and leads nowhere on several."""
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


def reason(error: OSError) -> str:
    """Why a connection was not made, and what that means."""
    if isinstance(error, ConnectionRefusedError):
        return "refused: the machine answers, and nobody listens there"
    if isinstance(error, TimeoutError):
        return "no answer: a firewall drops it, or the address is of no machine"
    return f"{error.strerror or error}"


def to_master(host: str, port: int, seconds: float) -> str:
    """ "" once somebody listens at the master's address; else why not, after `seconds`."""
    deadline, why = time.monotonic() + seconds, "no time"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(max(left, 1.0), _CONNECT)):
                return ""
        except OSError as error:
            why = reason(error)
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    return why


def _listen(address: str) -> socket.socket:
    """Answers each byte with the time, until it is closed."""
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
        server.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would keep it open
    server.close()


def _asked(address: str, port: int) -> tuple[str, float, float]:
    """Why it is not reached ("" where it is), the shortest round trip in seconds, and how far its clock is ahead."""
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
        return reason(error), 0.0, 0.0


def peers(rank: int, size: int) -> list[int]:
    """Whom a rank tries: all others, or of many rank 0 and those 1, 2, 4, ... behind it."""
    if size <= _ALL:
        return [other for other in range(size) if other != rank]
    found = {0, *((rank + (1 << power)) % size for power in range(size.bit_length()))}
    return sorted(found - {rank})


def between(place: Place) -> Found:
    """Connects to the other ranks on the addresses that gloo would take."""
    board = place.board
    if board is None or place.size == 1 or place.alone:
        return Found()
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
        return Found([fail("tcp", why, "set GLOO_SOCKET_IFNAME to an interface with an address (`ip -br addr`)")], {})
    where = board.gather("tcp", told, 6.0)
    tried = [other for other in peers(place.rank, place.size) if where[other] and where[other][1]]
    with ThreadPoolExecutor(max_workers=min(16, max(1, len(tried)))) as pool:
        found = dict(zip(tried, pool.map(lambda other: _asked(*where[other]), tried), strict=True))
    return Found(
        [],
        {
            "failed": {str(other): why for other, (why, _, _) in found.items() if why},
            "at": f"{told[0]}:{told[1]}",
            "trip": max((trip for why, trip, _ in found.values() if not why), default=0.0),
            "ahead": found[0][2] if 0 in found and not found[0][0] else None,  # rank 0's clock, before this one
        },
    )


def judge_between(facts: list[Any], place: Place) -> list[Finding]:
    """Names who cannot be reached, and whose clock goes another way."""
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


def _unreached(there: dict[int, Any], place: Place) -> list[Finding]:
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
