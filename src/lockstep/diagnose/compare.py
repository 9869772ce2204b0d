"""The first difference between a combination and the reference, found by comparing stage after stage.

difference = first_difference(Traces(reference, ranks, allowance, clip=1.0))         None: there is none

Within a step every stage is compared before the next, since each computes from what the ones before it gave. The first
that differs is therefore the cause, and not a consequence.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.diagnose.gradients import clipping, reduction
from lockstep.diagnose.values import Difference, Traces, listed, of_tensors

__all__ = ["COMPARED", "first_difference"]

_ROUNDING = 1e-5  # of an evaluation's loss: what other kernels make of it, in float32


def first_difference(traces: Traces) -> Difference | None:
    """The first in the order of COMPARED; None where all steps agree."""
    for step in range(len(traces.reference["steps"])):
        for check in COMPARED:
            found = next(check(traces, step), None)
            if found:
                return found
    return next(_evaluation(traces), None)


def _initial(traces: Traces, step: int) -> Iterator[Difference]:
    yield from of_tensors(traces, step, "initial", "initial weights")


def _changed(traces: Traces, step: int) -> Iterator[Difference]:
    """What has other bits than when the last step ended, on the same rank: no tolerance is needed."""
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
    wanted = traces.slots(step)
    held: list[int] = []
    for rank, record in traces.records(step):
        for slot in record["slots"]:
            if not slot["weight"]:
                continue
            held.append(slot["micro"])
            theirs = wanted.get(slot["micro"])
            if theirs is None or theirs["data"] != slot["data"]:
                yield Difference(step, "data", _leaf(slot, theirs), rank, _whence(traces, slot["data"]))
    if sorted(held) != sorted(wanted):
        text = f"the ranks together compute the micro-batches {listed(held)}, not {listed(wanted)}"
        yield Difference(step, "data", "micro-batches", 0, text)


def _leaf(slot: dict[str, Any], theirs: dict[str, Any] | None) -> str:
    """Micro-batch and the first tensor of the batch that differs."""
    other = theirs["data"] if theirs else {}
    keys = [key for key in {**slot["data"], **other} if slot["data"].get(key) != other.get(key)]
    return f"micro-batch {slot['micro']}, batch{keys[0] if keys else ''}"


def _whence(traces: Traces, data: dict[str, str]) -> str:
    """Where the reference has these samples, which tells a wrong order from wrong samples."""
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
        mine, wanted = slot["loss"], theirs["loss"]
        if not traces.allowance.close(step, mine, wanted):
            text = f"the loss is {mine!r} instead of {wanted!r}"
            yield Difference(step, "forward", f"micro-batch {slot['micro']}, loss", rank, text)


def _normalisation(traces: Traces, step: int) -> Iterator[Difference]:
    wanted = traces.reference["steps"][step]["items"]
    for rank, record in traces.records(step):
        if record["items"] != wanted:
            text = f"the loss is divided by {record['items']} items instead of {wanted}"
            yield Difference(step, "normalisation", "items", rank, text)
    for rank, slot, theirs in traces.pairs(step):
        if slot["items"] != theirs["items"]:
            text = f"{slot['items']} items instead of {theirs['items']}"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, items", rank, text)
        if not traces.allowance.close(step, slot["scaled"], theirs["scaled"]):
            share = slot["scaled"] / theirs["scaled"] if theirs["scaled"] else math.inf
            text = f"what is differentiated is {share:.6g} times the loss divided by the {wanted} items of the step"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, loss / items", rank, text)
    for rank, record in traces.records(step):
        for slot in record["slots"]:
            if not slot["weight"] and slot["scaled"]:
                yield Difference(step, "normalisation", f"empty slot {slot['micro']}", rank, "its weight is not 0")


def _buffers(traces: Traces, step: int) -> Iterator[Difference]:
    yield from of_tensors(traces, step, "buffers", "buffers")


def _rates(traces: Traces, step: int) -> Iterator[Difference]:
    """Learning rates that differ although the schedule's factor does not; then the update itself."""
    wanted = traces.reference["steps"][step]
    same = True
    for rank, record in traces.records(step):
        if record["factor"] != wanted["factor"]:
            same = False
        elif record["updates"] != wanted["updates"]:
            text = f"{record['updates']} updates instead of {wanted['updates']}"
            yield Difference(step, "optimizer", "update", rank, text)
        elif record["rates"] != wanted["rates"]:
            text = f"the rates are {record['rates']} instead of {wanted['rates']}; the schedule's factor is the same"
            yield Difference(step, "optimizer", "learning rate", rank, text)
    if same:  # an update at another rate says nothing of the optimizer; the schedule comes next
        yield from of_tensors(traces, step, "weights", "optimizer")


def _schedule(traces: Traces, step: int) -> Iterator[Difference]:
    wanted = traces.reference["steps"][step]["factor"]
    for rank, record in traces.records(step):
        if record["factor"] != wanted:
            text = f"the rate is multiplied by {record['factor']!r} instead of {wanted!r}"
            yield Difference(step, "schedule", "factor", rank, text)


def _state(traces: Traces, step: int) -> Iterator[Difference]:
    yield from of_tensors(traces, step, "optimizer", "optimizer state")


def _evaluation(traces: Traces) -> Iterator[Difference]:
    wanted = traces.reference.get("evaluation")
    found = [(trace["rank"], trace["evaluation"]) for trace in traces.ranks if "evaluation" in trace]
    if wanted is None:
        return
    for name in ("items", "loss", *wanted["metrics"]):
        theirs = _number(wanted, name)
        wrong = [(rank, _number(own, name)) for rank, own in found]
        wrong = [(rank, mine) for rank, mine in wrong if not _agrees(traces, name, mine, theirs)]
        if wrong:
            rank, mine = wrong[0]
            text = f"{mine!r} instead of {theirs!r}"
            # The items agree, or they would have been named: a lost sample moves the loss by more than rounding.
            rounded = name == "loss" and all(math.isclose(mine, theirs, rel_tol=_ROUNDING) for _, mine in wrong)
            stage = "evaluation kernels" if rounded else "evaluation"
            yield Difference(wanted["step"], stage, name, rank, text, [rank for rank, _ in wrong])


def _agrees(traces: Traces, name: str, mine: float, theirs: float) -> bool:
    drift = 0.0 if name == "items" else traces.drift * (1.0 + abs(theirs))
    return traces.allowance.close(traces.reference["evaluation"]["step"], mine, theirs) or abs(mine - theirs) <= drift


def _number(evaluation: dict[str, Any], name: str) -> float:
    return float(evaluation[name] if name in ("items", "loss") else evaluation["metrics"].get(name, math.nan))


Check = Callable[[Traces, int], Iterator[Difference]]

COMPARED: tuple[Check, ...] = (
    _initial,
    _changed,
    _data,
    _randomness,
    _forward,
    _normalisation,
    _buffers,
    reduction,
    clipping,
    _rates,
    _schedule,
    _state,
)
