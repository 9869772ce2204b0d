"""Find the first difference between a combination and the reference, stage by stage.

difference = first_difference(Traces(reference, ranks, tolerance, clip=1.0))         None: there is none

Within a step the stages are compared in causal order: each computes from the ones before it. The first that differs is
therefore the cause, and not a consequence.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.verify.request import Difference, RunSpec, listed
from lockstep.verify.tolerance import Scales, Tolerance, unit_roundoff

__all__ = ["Traces", "first_difference", "traces_of"]

_ROUNDING = 1e-5  # relative change of an evaluation's loss by other kernels, in float32
_PARALLEL = 1e-3  # sine of the largest angle between gradients that differ only in length
_LENGTH = 1e-3  # share by which a length may miss the clipped norm
_WHOLE = 1e-12  # share by which quotients of the same integers may differ, in float64
_UNDONE = 1e-6  # share of the whole norm below which a difference may come from undoing the clipping
_ROUNDINGS = 4.0  # of the norm and the factor, which have the gradients' dtype


@dataclass(frozen=True)
class Traces:
    """The traces to compare.

    Attributes:
        reference: the single process's trace.
        ranks: the traces of a combination.
        tolerance: the allowed differences.
        clip: largest norm of a gradient; 0: not clipped.
        drift: additional tolerance of an evaluation (see Tolerance.drift).
    """

    reference: dict[str, Any]
    ranks: list[dict[str, Any]]
    tolerance: Tolerance
    clip: float = 0.0
    drift: float = 0.0

    def records(self, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (rank, record of the step)."""
        for trace in self.ranks:
            yield trace["rank"], trace["steps"][step]

    def slots(self, step: int) -> dict[int, dict[str, Any]]:
        """Return the reference's micro-batches of a step that count, by number."""
        return {slot["micro"]: slot for slot in self.reference["steps"][step]["slots"] if slot["weight"]}

    def pairs(self, step: int) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield (rank, its micro-batch, the reference's) for all that count."""
        expected = self.slots(step)
        for rank, record in self.records(step):
            for slot in record["slots"]:
                if slot["weight"]:
                    yield rank, slot, expected[slot["micro"]]


def traces_of(spec: RunSpec, reference: dict[str, Any], ranks: list[dict[str, Any]]) -> Traces:
    """Collect the traces of a finished run for `first_difference`."""
    last, config = len(reference["steps"]) - 1, spec.request.config
    drift = spec.tolerance.drift(last, Scales.of(reference["steps"], config)[last])
    return Traces(reference, ranks, spec.tolerance, config.optim.clip, drift)


def first_difference(traces: Traces) -> Difference | None:
    """Return the first difference in the order of `_COMPARED`; None if all steps agree."""
    for step in range(len(traces.reference["steps"])):
        for check in _COMPARED:
            found = next(check(traces, step), None)
            if found:
                return found
    return next(_evaluation(traces), None)


def _changed(traces: Traces, step: int) -> Iterator[Difference]:
    """State that changed since the last step ended, on the same rank.

    No tolerance applies.
    """
    for rank, record in traces.records(step):
        if record["changed"]:
            kind, name = record["changed"][0]
            stage = {"optimizer": "optimizer state"}.get(kind, kind)
            again = " by the resume" if step in traces.ranks[0]["resumed"] else ", outside the optimizer's update"
            ranks = [other for other, their in traces.records(step) if [kind, name] in their["changed"]]
            count = len({tuple(entry) for entry in record["changed"]})
            more = f" ({count} tensors)" if count > 1 else ""
            text = f"its bits were changed since step {step - 1} ended{again}{more}"
            yield Difference(step, stage, name, rank, text, ranks)


def _data(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.slots(step)
    held: list[int] = []
    for rank, record in traces.records(step):
        for slot in record["slots"]:
            if not slot["weight"]:
                continue
            held.append(slot["micro"])
            theirs = expected.get(slot["micro"])
            if theirs is None or theirs["data"] != slot["data"]:
                yield Difference(step, "data", _leaf(slot, theirs), rank, _whence(traces, slot["data"]))
    if sorted(held) != sorted(expected):
        text = f"the ranks together compute the micro-batches {listed(held)}, not {listed(expected)}"
        yield Difference(step, "data", "micro-batches", 0, text)


def _leaf(slot: dict[str, Any], theirs: dict[str, Any] | None) -> str:
    """Name the micro-batch, and the first tensor of the batch that differs."""
    other = theirs["data"] if theirs else {}
    keys = [key for key in {**slot["data"], **other} if slot["data"].get(key) != other.get(key)]
    return f"micro-batch {slot['micro']}, batch{keys[0] if keys else ''}"


def _whence(traces: Traces, data: dict[str, str]) -> str:
    """Describe where the reference has these samples: a wrong order, or wrong samples."""
    for record in traces.reference["steps"]:
        for slot in record["slots"]:
            if slot["data"] == data:
                return f"it holds what the reference has in step {record['step']}, micro-batch {slot['micro']}"
    return "the reference has this micro-batch in none of its steps: other samples, or collated otherwise"


def _randomness(traces: Traces, step: int) -> Iterator[Difference]:
    for key, when in (("seeded", "before the forward"), ("drawn", "after the forward")):
        for rank, slot, theirs in traces.pairs(step):
            if slot[key] != theirs[key]:
                text = f"the generators' states differ {when}"
                yield Difference(step, "randomness", f"micro-batch {slot['micro']}", rank, text)


def _forward(traces: Traces, step: int) -> Iterator[Difference]:
    for rank, slot, theirs in traces.pairs(step):
        mine, expected = slot["loss"], theirs["loss"]
        if not traces.tolerance.close(step, mine, expected):
            text = f"the loss is {mine!r} instead of {expected!r}"
            yield Difference(step, "forward", f"micro-batch {slot['micro']}, loss", rank, text)


def _normalisation(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.reference["steps"][step]["items"]
    for rank, record in traces.records(step):
        if record["items"] != expected:
            text = f"the loss is divided by {record['items']} items instead of {expected}"
            yield Difference(step, "normalisation", "items", rank, text)
    for rank, slot, theirs in traces.pairs(step):
        if slot["items"] != theirs["items"]:
            text = f"{slot['items']} items instead of {theirs['items']}"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, items", rank, text)
        mine, expected_share = slot.get("share"), theirs.get("share")  # of integers, so equal in any dtype
        if mine is not None and expected_share is not None and not math.isclose(mine, expected_share, rel_tol=_WHOLE):
            times = mine / expected_share if expected_share else math.inf
            text = f"an item counts {times:.6g} times as much as one of the step's {expected} should"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, loss / items", rank, text)
        if not traces.tolerance.close(step, slot["scaled"], theirs["scaled"]):
            share = slot["scaled"] / theirs["scaled"] if theirs["scaled"] else math.inf
            text = f"what is differentiated is {share:.6g} times the loss divided by the {expected} items of the step"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, loss / items", rank, text)
    for rank, record in traces.records(step):
        for slot in record["slots"]:
            if not slot["weight"] and slot["scaled"]:
                yield Difference(step, "normalisation", f"empty slot {slot['micro']}", rank, "its weight is not 0")


def _rates(traces: Traces, step: int) -> Iterator[Difference]:
    """Learning rates that differ although the schedule's factor does not; then the update itself."""
    expected = traces.reference["steps"][step]
    same = True
    for rank, record in traces.records(step):
        if record["factor"] != expected["factor"]:
            same = False
        elif record["updates"] != expected["updates"]:
            text = f"{record['updates']} updates instead of {expected['updates']}"
            yield Difference(step, "optimizer", "update", rank, text)
        elif record["rates"] != expected["rates"]:
            text = f"the rates are {record['rates']} instead of {expected['rates']}; the schedule's factor is the same"
            yield Difference(step, "optimizer", "learning rate", rank, text)
    if same:  # an update at another rate cannot show the optimizer is wrong; the schedule comes next
        yield from _of_tensors(traces, step, "weights", "optimizer")


def _schedule(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.reference["steps"][step]["factor"]
    for rank, record in traces.records(step):
        if record["factor"] != expected:
            text = f"the rate is multiplied by {record['factor']!r} instead of {expected!r}"
            yield Difference(step, "schedule", "factor", rank, text)


def _evaluation(traces: Traces) -> Iterator[Difference]:
    expected = traces.reference.get("evaluation")
    found = [(trace["rank"], trace["evaluation"]) for trace in traces.ranks if "evaluation" in trace]
    if expected is None:
        return
    for name in ("items", "loss", *expected["metrics"]):
        theirs = _number(expected, name)
        wrong = [(rank, _number(own, name)) for rank, own in found]
        wrong = [(rank, mine) for rank, mine in wrong if not _agrees(traces, name, mine, theirs)]
        if wrong:
            rank, mine = wrong[0]
            text = f"{mine!r} instead of {theirs!r}"
            # The items agree, or they would have been named: a lost sample moves the loss by more than rounding.
            rounded = name == "loss" and all(math.isclose(mine, theirs, rel_tol=_ROUNDING) for _, mine in wrong)
            stage = "evaluation kernels" if rounded else "evaluation"
            yield Difference(expected["step"], stage, name, rank, text, [rank for rank, _ in wrong])


def _agrees(traces: Traces, name: str, mine: float, theirs: float) -> bool:
    drift = 0.0 if name == "items" else traces.drift * (1.0 + abs(theirs))
    return traces.tolerance.close(traces.reference["evaluation"]["step"], mine, theirs) or abs(mine - theirs) <= drift


def _number(evaluation: dict[str, Any], name: str) -> float:
    return float(evaluation[name] if name in ("items", "loss") else evaluation["metrics"].get(name, math.nan))


# Recorded are the clipped gradients that the optimizer receives, and the norm that the engine reports. Wrong gradients
# have another direction. Those with the right direction and a wrong length were clipped wrongly if the length is not
# the reported norm after clipping; if it is, the norm, and so the sum, is wrong.


def _reduction(traces: Traces, step: int) -> Iterator[Difference]:
    """Gradient differences that clipping does not explain."""
    if not _badly_clipped(traces, step):
        yield from _behind_the_clipping(traces, step)
        yield from _gradients(traces, step, "reduction")
        yield from _norms(traces, step)


def _clipping(traces: Traces, step: int) -> Iterator[Difference]:
    """Gradients with another length than clipping by their norm gives."""
    bad = _badly_clipped(traces, step)
    if bad:
        rank, norm, length, expected = bad
        made = f"clipping to {traces.clip:g} leaves {expected:.6g}" if traces.clip else "it is not clipped"
        text = f"the norm is {norm:.6g}, so {made}, but the length is {length:.6g}"
        yield Difference(step, "clipping", "all gradients", rank, text)
        yield from _gradients(traces, step, "clipping")


def _gradients(traces: Traces, step: int, stage: str) -> Iterator[Difference]:
    yield from _of_tensors(traces, step, "gradient", stage)


def _behind_the_clipping(traces: Traces, step: int) -> Iterator[Difference]:
    """The first tensor that still differs with the clipping undone on both sides.

    One wrong gradient changes the norm, and with it the clipping of all the others.
    """
    norm = traces.reference["steps"][step]["norm"]
    for rank, record in traces.records(step):
        part = record.get("gradient")
        if not part or not part["first"] or not traces.clip or not math.isfinite(norm * record["norm"]):
            continue
        by = _shortened(traces, record["norm"]) / _shortened(traces, norm)
        least = (_UNDONE + traces.tolerance.relative(step)) * math.sqrt(part["sums"][2])
        for name, (own, expected, product) in part["parts"].items():
            error = math.sqrt(max(0.0, own / by**2 - 2.0 * product / by + expected))
            if error > least:
                if name != part["first"]["name"]:
                    share = error / math.sqrt(expected) if expected else math.inf
                    text = f"before the clipping it is off by {share:.2g} of itself; the ones above it only in length"
                    yield Difference(step, "reduction", name, rank, text)
                break


def _shortened(traces: Traces, norm: float) -> float:
    """The factor by which clipping multiplies gradients of this norm."""
    return min(1.0, traces.clip / (norm + 1e-6))


def _norms(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.reference["steps"][step]["norm"]
    for rank, record in traces.records(step):
        if not traces.tolerance.close(step, record["norm"], expected, traces.tolerance.relative(step)):
            text = f"the gradient's norm is {record['norm']!r} instead of {expected!r}"
            yield Difference(step, "reduction", "norm", rank, text)


def _badly_clipped(traces: Traces, step: int) -> tuple[int, float, float, float] | None:
    """(rank, reported norm, actual length, expected length) of the first rank with wrong clipping."""
    for rank, record in traces.records(step):
        if "gradient" not in record:
            continue
        mine, expected, product = _lengths(traces, step, record["gradient"])
        norm = record["norm"]
        clipped = norm * _shortened(traces, norm) if traces.clip else norm
        if not (mine and expected and math.isfinite(mine * expected * clipped)):
            continue
        sine = math.sqrt(max(0.0, 1.0 - (product / (mine * expected)) ** 2))
        missed = _LENGTH + _ROUNDINGS * unit_roundoff(record["gradient_dtype"])
        if sine < _PARALLEL and abs(mine - clipped) > missed * clipped:
            return rank, norm, mine, clipped
    return None


def _lengths(traces: Traces, step: int, own: dict[str, Any]) -> tuple[float, float, float]:
    """Norms of a rank's and the reference's whole gradient, and their product.

    Shards are added up.
    """
    square, whole, expected, product = own["sums"]
    if whole == square:
        return math.sqrt(square), math.sqrt(expected), product
    parts = [record["gradient"]["sums"] for _, record in traces.records(step)]
    total = [math.fsum(column) for column in zip(*parts, strict=True)]
    return math.sqrt(total[0]), math.sqrt(total[2]), total[3]


def _of_tensors(traces: Traces, step: int, kind: str, stage: str) -> Iterator[Difference]:
    """Tensors of a kind that differ from the reference's or between replicas."""
    found = [(rank, record[kind]) for rank, record in traces.records(step) if kind in record]
    for rank, part in found:
        if part["missing"]:
            text = "it is on one side only"
            yield Difference(step, stage, part["missing"][0], rank, text)
        if part["first"]:
            ranks = [other for other, their in found if their["first"]]
            yield Difference(step, stage, part["first"]["name"], rank, _described(part["first"]), ranks)
    for rank, part in found[1:]:
        first = found[0][1]["digests"]
        names = [name for name, bits in part["digests"].items() if first.get(name, bits) != bits]
        if names:
            text = f"its bits are not those of rank {found[0][0]}, which should hold the same"
            yield Difference(step, stage, names[0], rank, text)


def _described(first: dict[str, Any]) -> str:
    """Describe the largest difference in a tensor."""
    mine, expected = first["values"]
    if isinstance(mine, str):
        return f"it is {mine} instead of {expected}"
    place = f"[{', '.join(str(index) for index in first['at'])}]" if first["at"] else ""
    limit = "no difference" if first["allowed"] <= 0 else f"{first['allowed']:.2g}"
    off = f"off by {first['difference']:.2g} where {limit} is allowed"
    return f"{place} is {mine!r} instead of {expected!r}; {off}".strip()


Check = Callable[[Traces, int], Iterator[Difference]]

_COMPARED: tuple[Check, ...] = (
    partial(_of_tensors, kind="initial", stage="initial weights"),
    _changed,
    _data,
    _randomness,
    _forward,
    _normalisation,
    partial(_of_tensors, kind="buffers", stage="buffers"),
    _reduction,
    _clipping,
    _rates,
    _schedule,
    partial(_of_tensors, kind="optimizer", stage="optimizer state"),
)
