"""What an update makes of a gradient: how often, at which rate, of weights, buffers and the optimizer's state."""

import math
from collections.abc import Iterator
from typing import Any

from lockstep.trace.coverage import every
from lockstep.trace.pairing import Spot
from lockstep.trace.reading import Whole, distance
from lockstep.trace.step import FIRST, GROWTH, ROUNDOFF, SECOND, Step, finite_in_some, share, unlike
from lockstep.trace.verdict import Finding

__all__ = [
    "begin_state",
    "buffer_difference",
    "rate_difference",
    "state_difference",
    "update_count",
    "update_difference",
]

_OWN = 1e-2  # share of itself by which a gradient may differ while its update still tells something
_SAME = 1e-3  # share by which the update of a gradient with the same bits may differ
_UPDATE = 0.1  # share by which updates may differ, besides what rounding makes of their gradients
_FAR = 0.8  # a share by which no healthy update differs


def update_count(step: Step) -> Finding | None:
    """Updates without a backward before them."""
    found = {}
    for name, spot in step.sides():
        records = spot.part.records(spot.at)
        found[name] = {rank: record.get("again", 0) for rank, record in records.items()}
    one, two = found[FIRST], found[SECOND]
    if set(one.values()) == set(two.values()):
        return None
    for name, counts in ((SECOND, two), (FIRST, one)):
        rank = next((rank for rank, count in counts.items() if count > min([*one.values(), *two.values()])), None)
        if rank is not None:
            everywhere = len(set(counts.values())) == 1 and len(counts) > 1
            text = f"in {name} {1 + counts[rank]} updates instead of {1 + min([*one.values(), *two.values()])}"
            return step.finding("optimizer", "extra-step", text, "update", -1 if everywhere else rank)
    return None


def rate_difference(step: Step) -> Finding | None:
    """Rates and settings of the groups."""
    for name, spot in step.sides():
        records = spot.part.records(spot.at)
        first = records[min(records)]["groups"]
        for rank, record in records.items():
            for number, (group, expected) in enumerate(zip(record["groups"], first, strict=False)):
                key = _unequal(group, expected)
                if key:
                    text = f"in {name} {key} is {group[key]} instead of {expected[key]} on rank {min(records)}"
                    return step.finding(
                        "optimizer", "rank-rate" if key == "lr" else "settings", text, f"group {number}", rank
                    )
    mine, theirs = (next(iter(spot.part.records(spot.at).values()))["groups"] for spot in (step.one, step.two))
    for number, (group, expected) in enumerate(zip(theirs, mine, strict=False)):
        key = _unequal(group, expected)
        if key == "lr":
            return _rate(step, number, _number(group["lr"]), _number(expected["lr"]))
        if key:
            return step.finding(
                "optimizer", "settings", f"{key} is {group[key]} instead of {expected[key]}", f"group {number}"
            )
    return None


def _rate(step: Step, number: int, rate: float, expected: float) -> Finding:
    text, where = f"the learning rate is {rate:.6g} instead of {expected:.6g}", f"group {number}"
    worlds = step.pair.one.world, step.pair.two.world
    if not step.number and not step.pair.shift:
        ratio = rate / expected if expected else math.inf
        scaled = worlds[0] != worlds[1] and math.isclose(ratio, worlds[1] / worlds[0], rel_tol=1e-6)
        scheduled = any(_schedules(step, side) for side in (0, 1))
        if not scheduled or scaled:
            return step.finding("optimizer", "world-rate" if scaled else "other-rate", text, where)
    if step.pair.shift > 0 and math.isclose(_rate_at(step.pair.one.spots[step.at[1]], number), rate, rel_tol=1e-9):
        return step.finding("schedule", "schedule-resume", text, where)
    counts = _schedules(step, 0), _schedules(step, 1)
    if counts[0] != counts[1]:
        text += f"; the schedule was stepped {counts[1]} times until then instead of {counts[0]}"
        more = (counts[1] > counts[0]) == (worlds[1] > worlds[0]) and worlds[0] != worlds[1]
        return step.finding("schedule", "schedule-ranks" if more else "schedule", text, where)
    return step.finding("schedule", "schedule", text, where)


def _rate_at(spot: Spot, number: int) -> float:
    groups = next(iter(spot.part.records(spot.at).values()))["groups"]
    return _number(groups[number]["lr"]) if number < len(groups) else math.nan


def _schedules(step: Step, side: int) -> int:
    """How often a run has stepped its schedules until this step, on its first rank."""
    spots = (step.pair.one, step.pair.two)[side].spots[: step.at[side] + 1]
    records: Iterator[dict[str, Any]] = (next(iter(spot.part.records(spot.at).values())) for spot in spots)
    return sum(event[1] == "schedule" for record in records for event in record["ev"])


def _number(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def _unequal(one: dict[str, Any], two: dict[str, Any]) -> str:
    """The first setting in which two groups differ, the rate before the others."""
    for key in sorted(one.keys() & two.keys(), key=lambda name: (name != "lr", name)):
        if key in ("fused", "foreach", "initial_lr", "n") or one[key] == two[key]:
            continue
        numbers = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in (one[key], two[key])]
        if every(isinstance(value, int | float) for value in numbers) and math.isclose(
            *numbers, rel_tol=1e-6, abs_tol=1e-30
        ):
            continue
        return key
    return ""


def update_difference(step: Step) -> Finding | None:
    """Weights that the same gradient moved otherwise."""
    for name, spot in step.sides():
        wrong = next(((n, w) for n, w in spot.tensors("weights").items() if unlike(w) and w.other), None)
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} after the update it differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer", "update", text, wrong[0], rank)
    return _moved_otherwise(step)


def _moved_otherwise(step: Step) -> Finding | None:
    """Updates that the gradients do not explain.

    Where a gradient has the same bits its update is judged alone. Else all together: Adam makes of an element whose
    gradient is all rounding a step of full length, and which way it goes is chance; a tensor may have many of these.
    """
    (grads, weights), (their_grads, their_weights) = (
        [spot.tensors(kind) for kind in ("grad", "weights")] for spot in (step.one, step.two)
    )
    before, their_before = step.one.before(), step.two.before()
    hidden = not grads or not their_grads  # an engine that keeps its gradients to itself
    noise = signal = error = way = rounding = 0.0
    worst, most = "", 0.0
    for name in [n for n in weights if n in their_weights and n in before and n in their_before]:
        if not hidden:
            if name not in grads or name not in their_grads:
                continue
            off = distance(grads[name].sketch, their_grads[name].sketch)
            if off > _OWN * grads[name].norm:
                continue
            noise, signal = math.hypot(noise, off), math.hypot(signal, grads[name].norm)
        mine, theirs = (
            tuple(a - b for a, b in zip(after[name].sketch, begin[name].sketch, strict=True))
            for after, begin in ((weights, before), (their_weights, their_before))
        )
        zero = (0.0,) * len(mine)
        apart, length = distance(mine, theirs), max(distance(mine, zero), distance(theirs, zero))
        unit = 64 * ROUNDOFF.get(weights[name].kind, 2.0**-24) * weights[name].norm
        same = not hidden and not step.off and grads[name].digest == their_grads[name].digest
        if same and before[name].digest == their_before[name].digest and apart > _SAME * length + unit:
            text = f"it moves by {share(apart, length)} of its way otherwise, and its gradient has the same bits"
            return step.finding("optimizer", "update", text, name)
        error, way, rounding = math.hypot(error, apart), math.hypot(way, length), math.hypot(rounding, unit)
        if apart > most:
            worst, most = name, apart
    rough = step.limit if hidden else noise / signal if signal else 0.0
    if error > min(_FAR, _UPDATE + 4 * math.sqrt(rough) + GROWTH * step.off) * way + rounding:
        text = f"all weights together move by {share(error, way)} of their way otherwise, and the gradients agree"
        return step.finding("optimizer", "update", text, worst)
    return None


def buffer_difference(step: Step) -> Finding | None:
    mine, theirs = step.one.tensors("buffers"), step.two.tensors("buffers")
    for name in mine:
        if name not in theirs or mine[name].digest == theirs[name].digest:
            continue
        error = distance(mine[name].sketch, theirs[name].sketch)
        norm = max(mine[name].norm, theirs[name].norm)
        if not error <= max(1e-4, step.limit, 10 * step.off) * norm and finite_in_some(mine[name], theirs[name]):
            statistics = name.rpartition(".")[2] in ("running_mean", "running_var")
            text = f"it differs by {share(error, norm)}"
            return step.finding("buffers", "batchnorm" if statistics else "forward", text, name)
    return None


def begin_state(step: Step) -> Finding | None:
    """The state that a resume begins with: the same on all ranks, and what the other run had then."""
    sides = ((SECOND, step.two, step.one), (FIRST, step.one, step.two))
    for name, spot, other in sides:
        began = spot.tensors("initial state")
        wrong = next(((n, w) for n, w in began.items() if unlike(w) and w.other), None)
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} the state that it begins with differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer state", "state", text, wrong[0], rank)
        if spot.at == 0 and other.at and spot.part is not other.part and not step.number:
            before = other.part.tensors(other.at - 1, "state")
            if before and not began:
                text = f"{name} begins with none, and the other has one"
                return step.finding("optimizer state", "state", text)
            found = _states_off(step, before, began)
            if found is not None:
                return found
    return None


def state_difference(step: Step) -> Finding | None:
    """The optimizer's state, where the weights agree."""
    for name, spot in step.sides():
        wrong = next(((n, w) for n, w in spot.tensors("state").items() if unlike(w) and w.other), None)
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} it differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer state", "state", text, wrong[0], rank)
    return _states_off(step, step.one.tensors("state"), step.two.tensors("state"))


def _states_off(step: Step, mine: dict[str, Whole], theirs: dict[str, Whole]) -> Finding | None:
    norms: dict[str, float] = {}
    for name in mine.keys() & theirs.keys():
        key = name.rpartition("/")[2]
        norms[key] = math.hypot(norms.get(key, 0.0), mine[name].norm)
    for name in [n for n in mine if n in theirs]:
        error = distance(mine[name].sketch, theirs[name].sketch)
        bound = max(4 * step.limit, 1e-4) * norms[name.rpartition("/")[2]]
        if mine[name].digest != theirs[name].digest and not error <= bound and finite_in_some(mine[name], theirs[name]):
            text = f"it differs by {share(error, mine[name].norm)}"
            return step.finding("optimizer state", "state", text, name)
    return None
