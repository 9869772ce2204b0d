"""The operations that take most of a step: of a CPU by their own time, of a CUDA device by kernel.

times = own_times([("aten::linear", 0.0, 9.0), ("aten::addmm", 1.0, 8.0)])      # {"aten::linear": [1, 2.0], ...}
for operation in top([trace.operations for trace in traces], steps=10, step_ms=43.1): print(operation)
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["HEADING", "Operation", "Times", "own_times", "top"]

Times = dict[str, list[float]]  # name -> calls, and microseconds in all of them
_MOST = 10
_WIDTH = 52
HEADING = f"  {'operation':<{_WIDTH}} {'time a step':>12} {'share':>5} {'calls':>8}"


class Operation(NamedTuple):
    """An operation or kernel, in a step of the mean rank.

    Attributes:
        name: as torch or the kernel has it.
        ms: milliseconds, without the operations that it calls.
        share: of the step.
        calls: how often it ran.
    """

    name: str
    ms: float
    share: float
    calls: float

    def __str__(self) -> str:
        name = self.name if len(self.name) <= _WIDTH else f"{self.name[: _WIDTH - 3]}..."
        return f"  {name:<{_WIDTH}} {self.ms:>9.3f} ms {self.share:>5.0%} {self.calls:>8.4g}"

    def as_json(self) -> dict[str, Any]:
        """Give what verdict.json holds."""
        numbers = {"ms": self.ms, "share": self.share, "calls": self.calls}
        return {"name": self.name} | {name: round(number, 4) for name, number in numbers.items()}


def own_times(spans: Iterable[tuple[str, float, float]]) -> Times:
    """Add up calls and times by name, each without what lies within it.

    Args:
        spans: name, begin and end in microseconds, of one thread: they lie in each other, or apart.
    """
    found: Times = {}
    around: list[tuple[str, float]] = []  # what is still open, with its end
    for name, begin, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while around and around[-1][1] <= begin:
            around.pop()
        if around:
            found[around[-1][0]][1] -= end - begin
        entry = found.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += end - begin
        around.append((name, end))
    return found


def top(ranks: Sequence[Times], steps: int, step_ms: float) -> list[Operation]:
    """Choose the operations that take most time.

    Args:
        ranks: the times of each rank, over all traced steps.
        steps: traced.
        step_ms: milliseconds of a step.
    """
    whole: Times = {}
    for times in ranks:
        for name, (calls, spent) in times.items():
            entry = whole.setdefault(name, [0, 0.0])
            entry[0] += calls
            entry[1] += spent
    count = len(ranks) * steps
    found = heapq.nlargest(_MOST, whole.items(), key=lambda item: item[1][1])
    return [
        Operation(name, spent / count / 1e3, spent / count / 1e3 / max(step_ms, 1e-9), calls / count)
        for name, (calls, spent) in found
        if spent > 0
    ]
