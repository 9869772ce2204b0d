"""What one run has alone: parameters, gradients, buffers and states, named for what they are.

A set that is empty, or that lacks what the other has, is never the same.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from lockstep.trace.coverage import Matched, matched
from lockstep.trace.pairing import Spot
from lockstep.trace.reading import Whole
from lockstep.trace.step import FIRST, SECOND, Step
from lockstep.trace.verdict import Finding

__all__ = ["buffer_sets", "gradient_sets", "kept_gradient", "parameter_sets", "state_sets", "unmatched_gradients"]

_FIT = 1e-3  # share of a gradient that the sum of two may leave unexplained
_PART = 0.05  # least share that a kept gradient has in it


def parameter_sets(step: Step) -> Finding | None:
    """Judge which tensors the two optimizers have, and which parameters the two models."""
    if not step.number and not step.pair.shift:
        models = matched(_model(step.one), _model(step.two))
        for name, only in ((SECOND, models.first), (FIRST, models.second)):
            if only:
                return step.finding("initial weights", "other-model", f"{name} has no {_listed(only)}", only[0])
    for kind in ("weights", "begin"):
        mine, theirs = step.one.tensors(kind), step.two.tensors(kind)
        if kind == "begin" and not (mine and theirs):
            continue  # of large models it is recorded now and then
        found = _alone(step, matched(mine, theirs))
        if found is not None:
            return found
    for name, spot, other in ((SECOND, step.two, step.one), (FIRST, step.one, step.two)):
        frozen = sorted((spot.part.names(spot.at, "frozen") - _trained(spot)) & _trained(other))
        if frozen:
            return step.finding("parameters", "frozen", f"{name} does not train {_listed(frozen)}", frozen[0])
    return None


def _alone(step: Step, sets: Matched) -> Finding | None:
    """What one optimizer has alone and trains."""
    sides = (
        (SECOND, step.two, step.one, sets.second, sets.first),
        (FIRST, step.one, step.two, sets.first, sets.second),
    )
    for name, spot, _, own, lacks in sides:
        if own and not set(own) & set(_model(spot)):
            text = f"{name} updates {_listed(own)} in place of {_listed(lacks or ['none'])}"
            return step.finding("parameters", "stale-optimizer", text, (lacks or own)[0])
    for name, spot, other, _, lacks in sides:
        model = _model(spot)
        only = [each for each in lacks if each in _trained(other) or each not in model]
        if only:
            cause = "frozen" if set(only) <= spot.part.names(spot.at, "frozen") else "outside-optimizer"
            cause = cause if set(only) <= set(model) else "other-model"
            return step.finding("parameters", cause, f"{name} does not update {_listed(only)}", only[0])
    return None


def _trained(spot: Spot) -> set[str]:
    """Tensors that the step trains."""
    if spot.hidden:
        return spot.tensors("weights").keys() - spot.part.names(spot.at, "frozen")
    return set(spot.tensors("grad"))


def _model(spot: Spot) -> list[str]:
    """The names of the model's parameters: those that are no place in an optimizer's group."""
    return [name for name in spot.part.tensors(0, "initial") if not _numbered(name)]


def _numbered(name: str) -> bool:
    """Whether it is a place in an optimizer's group, since no model has the tensor."""
    head, _, tail = name.partition(".")
    return head.startswith("group") and head[5:].isdigit() and tail.isdigit()


def unmatched_gradients(step: Step) -> list[str]:
    """List gradients that one run has alone and that are not all zero."""
    if step.one.hidden or step.two.hidden:
        return []
    mine, theirs = step.one.tensors("grad"), step.two.tensors("grad")
    sets = matched(mine, theirs)
    return [name for name in chain(sets.first, sets.second) if (mine.get(name) or theirs[name]).square != 0]


def gradient_sets(step: Step) -> Finding | None:
    """Judge which tensors have a gradient."""
    only = unmatched_gradients(step)
    if not only:
        return None
    side = SECOND if only[0] in step.one.tensors("grad") else FIRST
    return step.finding("gradient", "no-gradient", f"{side} has no gradient of {_listed(only)}", only[0])


def buffer_sets(step: Step) -> Finding | None:
    """Judge which buffers the two models have."""
    sets = matched(step.one.tensors("buffers"), step.two.tensors("buffers"))
    for name, only in ((SECOND, sets.first), (FIRST, sets.second)):
        if only:
            return step.finding("buffers", "other-model", f"{name} has no {_listed(only)}", only[0])
    return None


def state_sets(step: Step) -> Finding | None:
    """Judge which states the two optimizers have of tensors that both train."""
    mine, theirs = step.one.tensors("state"), step.two.tensors("state")
    trained = step.one.tensors("grad").keys() & step.two.tensors("grad").keys()
    sets = matched(mine, theirs)
    for name, only in ((SECOND, sets.first), (FIRST, sets.second)):
        known = [each for each in only if each.rpartition("/")[0] in trained]
        if known and mine and theirs:  # of large models they are recorded now and then
            return step.finding("optimizer state", "state", f"{name} has no {_listed(known)}", known[0])
    return None


def kept_gradient(step: Step) -> Finding | None:
    """A gradient to which one run added this step's, since nothing cleared it after the update before.

    It is then a sum of this step's gradient and of what the same optimizer had in its last step, whatever clipping
    made of the two.
    """
    for name, spot, other in ((SECOND, step.two, step.one), (FIRST, step.one, step.two)):
        grads, fresh = spot.tensors("grad"), other.tensors("grad")
        kept = next((known for known in _earlier(spot) if known.keys() == grads.keys()), None)
        if kept is None or not grads or not matched(grads, fresh).whole:
            continue
        found, here, before = ([x for each in grads for x in side[each].sketch] for side in (grads, fresh, kept))
        length = math.hypot(*found, *here, *before)
        if not math.isfinite(length):
            continue
        length = math.hypot(*found)
        for a, b in ((1.0, 1.0), _shares(found, here, before)):  # as it is, and as clipping leaves it
            left = math.dist(found, [a * x + b * y for x, y in zip(here, before, strict=True)])
            part = b * math.hypot(*before) / length if length else 0.0
            if a > 0 and part > _PART and left <= max(_FIT, step.limit) * length:
                text = f"in {name} {part:.2g} of its length are the gradient of the update before"
                return step.finding("gradient", "kept-gradient", text, "all gradients")
    return None


def _earlier(spot: Spot) -> Iterator[dict[str, Whole]]:
    """The gradients of the updates before, the last first."""
    number = next(iter(spot.part.records(spot.at).values()))["opt"]
    for at in range(spot.at - 1, -1, -1):
        if next(iter(spot.part.records(at).values()))["opt"] == number:
            yield spot.part.tensors(at, "grad")
            return


def _shares(found: list[float], one: list[float], two: list[float]) -> tuple[float, float]:
    """How much of each of two others is in a vector, by least squares; nothing where the two point the same way."""
    a, b, c = _dot(one, one), _dot(one, two), _dot(two, two)
    determinant = a * c - b * b
    if not determinant > 1e-6 * a * c:
        return 0.0, 0.0
    d, e = _dot(found, one), _dot(found, two)
    return (c * d - b * e) / determinant, (a * e - b * d) / determinant


def _dot(one: list[float], two: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(one, two, strict=True))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}"
