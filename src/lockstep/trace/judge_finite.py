"""Values that are not finite: on one side alone a difference, on both sides nothing that was compared."""

import math
from collections import Counter
from collections.abc import Iterator

from lockstep.trace.coverage import every, matched
from lockstep.trace.judge_coverage import losses_of, norm_of
from lockstep.trace.pairing import Spot
from lockstep.trace.step import FIRST, SECOND, Step, finite
from lockstep.trace.verdict import Finding

__all__ = ["Unseen", "finite_in_one"]

_NAMES = {"initial": "weights", "weights": "weights", "grad": "gradients", "buffers": "buffers", "state": "states"}
_STAGES = {  # in causal order
    "begin": ("weights", "changed-weights"),
    "weights": ("optimizer", "update"),
    "buffers": ("buffers", "forward"),
    "state": ("optimizer state", "state"),
}


class Unseen:
    """Count the values that are not finite in both runs.

    Attributes:
        counts: by kind, over all steps.
        where: the first step and tensor, in words; "" where all were finite.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.where = ""

    def add(self, step: Step) -> None:
        """Add what cannot be compared in a step."""
        for kind, name in _not_finite(step):
            self.where = self.where or f"from step {step.at[0]} on {name} is not finite in both runs"
            self.counts[kind] += 1

    def text(self, compared: Counter[str]) -> list[str]:
        """Say where it began, and how much was compared all the same."""
        if not self.where:
            return []
        counts = ", ".join(
            f"{compared[kind]} of {compared[kind] + count} {kind}" for kind, count in sorted(self.counts.items())
        )
        return [f"{self.where}, which compares nothing: compared were {counts}"]


def finite_in_one(step: Step) -> Finding | None:
    """Judge tensors and losses that are finite in one run alone; gradients are judged with their causes."""
    for kind, (stage, cause) in _STAGES.items():
        mine, theirs = step.one.tensors(kind), step.two.tensors(kind)
        for name in matched(mine, theirs).both:
            if finite(mine[name]) != finite(theirs[name]):
                side = SECOND if finite(mine[name]) else FIRST
                return step.finding(stage, cause, f"it is not finite in {side} alone", name)
    one, two = (_losses_finite(step, side) for side in (0, 1))
    if None not in (one, two) and one != two:
        return step.finding("forward", "forward", f"it is not finite in {SECOND if one else FIRST} alone", "loss")
    return None


def _not_finite(step: Step) -> Iterator[tuple[str, str]]:
    """(kind, name) of what is not finite in both runs.

    A buffer may hold infinities for good, such as a mask of -inf: there only NaN counts. A gradient that overflowed
    counts for nothing where the update was skipped, as a GradScaler does.
    """
    for kind, shown in _NAMES.items():
        mine, theirs = step.one.tensors(kind), step.two.tensors(kind)
        for name in matched(mine, theirs).both:
            if finite(mine[name]) or finite(theirs[name]):
                continue
            if kind == "grad" and every(_skipped(spot, name) for _, spot in step.sides()):
                continue
            if kind == "buffers" and mine[name].digest == theirs[name].digest and math.isinf(mine[name].square):
                continue
            what = f"the gradient of {name}" if kind == "grad" else f"the state {name}" if kind == "state" else name
            yield shown, what
    sides = [(spot.before(), spot.tensors("weights")) for _, spot in step.sides()]
    names = matched(*(matched(before, after).both for before, after in sides)).both
    for name in names:
        if not every(finite(each[name]) for side in sides for each in side):
            yield "updates", name
    if _losses_finite(step, 0) is _losses_finite(step, 1) is False:
        yield "losses", "the loss"
    norms = [norm_of(spot) for _, spot in step.sides() if spot.hidden]
    if norms and None not in norms and not any(math.isfinite(norm) for norm in norms):
        yield "gradient norms", "the gradient's norm"


def _skipped(spot: Spot, name: str) -> bool:
    """Return whether an update left a weight as it was, and finite."""
    before, after = spot.before().get(name), spot.tensors("weights").get(name)
    return before is not None and after is not None and before.digest == after.digest and finite(after)


def _losses_finite(step: Step, side: int) -> bool | None:
    """Whether all losses of a step are finite; None where a rank has none."""
    found = losses_of((step.one, step.two)[side])
    return every(math.isfinite(value) for rank in found for value in rank) if found else None
