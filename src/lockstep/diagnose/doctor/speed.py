"""How fast each rank's device multiplies and copies, and which one is slower than the others.

found = speed(place)                        # facts: seconds of each round, by kind
slow = slower({0: [1.0, 1.1], 1: [1.5, 1.6], 2: [1.0, 1.05]})       # [1]
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.diagnose.doctor.finding import Finding, Found, Place, ok, warn

__all__ = ["copying", "judge_speed", "multiplying", "slower", "speed", "suspects"]

_SLOWER = 1.10
_ROUNDS, _ROUND = 25, 0.008  # seconds that a round should take: less than a process is given at a time
_LEAST, _ENOUGH = 5, 1.0  # rounds, and seconds after which no more are begun: a machine may be busy
_AGAIN = 3  # times that a rank must be found slow, or it was something that passed
_SIDE, _BYTES = {"cpu": 256, "cuda": 4096}, {"cpu": 32 << 20, "cuda": 256 << 20}


def multiplying(device: torch.device) -> Callable[[], None]:
    """One product of two square matrices: in float32 on a CPU, in bfloat16 on a CUDA device."""
    side = _SIDE[device.type]
    one = torch.full((side, side), 0.5, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    into = torch.empty_like(one)

    def work() -> None:
        torch.mm(one, one, out=into)

    return work


def copying(device: torch.device) -> Callable[[], None]:
    """One copy within the device's memory."""
    one = torch.zeros(_BYTES[device.type] // 4, device=device)
    into = torch.empty_like(one)

    def work() -> None:
        into.copy_(one)

    return work


def _times(work: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds of one call, in each of up to 25 rounds."""

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
    """The ranks that are slower than the others by more than a tenth, and beyond what the others' own rounds differ.

    Args:
        rounds: by rank, the seconds of each round.

    A rank is slow where its best round is above 1.1 times the median of every other rank's rounds, and above three
    quarters of them: the rest something else on the machine may have disturbed.
    """
    found = []
    for rank, own in rounds.items():
        others = [sorted(each) for other, each in rounds.items() if other != rank]
        if others and len(rounds) > 2:  # others that are slow themselves hide nobody
            others = sorted(others, key=statistics.median)[: max(1, len(others) * 3 // 4)]
        if others and all(
            min(own) > max(_SLOWER * statistics.median(each), each[3 * len(each) // 4]) for each in others
        ):
            found.append(rank)
    return found


def speed(place: Place) -> Found:
    """Measures both kinds; where a rank looks slow, again, on all ranks alike."""
    device = place.world.device if place.world else torch.device("cpu")
    facts: list[dict[str, list[float]]] = []
    for number in range(_AGAIN):
        facts.append({"multiplying": _times(multiplying(device), device), "copying": _times(copying(device), device)})
        if place.board is None or place.size == 1:
            break
        told = place.board.gather(f"speed/{number}", facts[-1], 6.0)
        if None in told or not suspects(told, place):
            break
    return Found([], {"rounds": facts, "device": str(device)})


def suspects(told: Sequence[Mapping[str, Sequence[float]] | None], place: Place) -> list[tuple[int, str]]:
    """(rank, kind) of those that look slow. CPUs of one machine share its memory: of each, its best rank counts."""
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


def judge_speed(facts: list[Any], place: Place) -> list[Finding]:
    """Names the ranks that were slow each time."""
    there = {rank: each["rounds"] for rank, each in enumerate(facts) if each}
    if not there:
        return []
    times = min(len(each) for each in there.values())
    every = [[there[rank][n] if rank in there else None for rank in range(len(facts))] for n in range(times)]
    asked = [suspects(told, place) for told in every]
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
