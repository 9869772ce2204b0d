"""Judges two runs step by step, and names the first difference.

verdict = judged(read(one), read(two))

A step is looked into only where something that counts differs: the gradients, the rates, the weights, the buffers,
what ranks should have alike, an evaluation's samples. Then its stages are compared in causal order, and the first that
differs is the cause. How far numbers may be off is docs/verify.md's tolerance, besides what the weights were
off already.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.trace.judge_data import data_difference
from lockstep.trace.judge_evaluation import evaluation_difference
from lockstep.trace.judge_gradient import first_module, gradient_difference
from lockstep.trace.judge_normalisation import items_unequal
from lockstep.trace.judge_random import random_difference
from lockstep.trace.judge_trained import Trained
from lockstep.trace.judge_update import (
    begin_state,
    buffer_difference,
    rate_difference,
    state_difference,
    update_count,
    update_difference,
)
from lockstep.trace.limits import gradient_limit
from lockstep.trace.pairing import Pair, Spot, apart, paired
from lockstep.trace.reading import Part, Run, TraceError, distance
from lockstep.trace.step import FIRST, SECOND, Step, apart_from_each_other, share, unlike
from lockstep.trace.verdict import Finding, Verdict

__all__ = ["judged"]

_NOISE, _NOISE_OFF = 1e-3, 1e-2  # a gradient this small a share of all, and off by this share of itself, is noise
_LOST = 1e-2  # share by which the weights may differ while gradients still tell something


def judged(one: Run, two: Run) -> Verdict:
    """Compares two runs as far as both go."""
    pair = paired(one, two)
    verdict = Verdict(one.name, two.name)
    _hide_unplaced(pair, [*one.parts, *two.parts], verdict)
    _check_names(pair, verdict)
    _notes(pair, verdict)
    state = _State()
    for number, (first, second) in enumerate(pair.steps):
        step = Step(pair, pair.one.spots[first], pair.two.spots[second], (first, second), number, state.off)
        step.limit = gradient_limit(step)
        found = _difference(step, verdict)
        if found is not None:
            verdict.finding = found
            return verdict
        verdict.judged += 1
        if not verdict.unproven:
            verdict.hidden = (verdict.hidden[0] or step.limit, max(verdict.hidden[1], step.limit))
        state.trained.look(step.two)
        if not verdict.unproven:
            state.follow(step, verdict)
    for side in (pair.one, pair.two):
        if apart_from_each_other(side.spots[0]):
            text = f"{side.name}: its {side.world} processes have no process group of torch: unless something else"
            verdict.notes.append(f"{text} brings them together, each trains by itself")
    verdict.notes += state.trained.note(verdict.judged)
    if state.noise:
        text = f"tensors whose gradients are all rounding: {len(state.noise)}, such as {min(state.noise)}"
        verdict.notes.append(f"{text}; how far these are apart is not counted")
    verdict.finding = _end(pair, verdict)
    return verdict


@dataclass
class _State:
    """How far the two have come apart.

    Attributes:
        off: share by which the weights differ; bits: none do.
        noise: tensors whose gradients cancel to nothing, so that each step of them is chance (the bias of attention's
            keys, one before a BatchNorm). The loss does not depend on them.
    """

    off: float = 0.0
    bits: bool = True
    trained: Trained = field(default_factory=Trained)
    noise: set[str] = field(default_factory=set)

    def follow(self, step: Step, verdict: Verdict) -> None:
        """Takes in a step in which no mistake was found."""
        mine, theirs = step.one.tensors("weights"), step.two.tensors("weights")
        before = self.bits
        self.bits &= all(mine[name].digest == theirs[name].digest for name in mine.keys() & theirs.keys())
        if before and not self.bits:
            verdict.notes += _parting(step)
        verdict.bits += self.bits
        grads, others = step.one.tensors("grad"), step.two.tensors("grad")
        norm = math.sqrt(sum(whole.square for whole in grads.values()))
        for name in grads.keys() & others.keys():
            small = grads[name].norm < _NOISE * norm
            if small and distance(grads[name].sketch, others[name].sketch) > _NOISE_OFF * grads[name].norm:
                self.noise.add(name)
        error, length = apart({name: whole for name, whole in mine.items() if name not in self.noise}, theirs)
        self.off = error / length if length else 0.0
        verdict.largest = max(verdict.largest, self.off) if self.off == self.off else verdict.largest
        if self.off > _LOST:
            verdict.unproven = (
                f"from step {step.at[0]} on rounding has grown to {self.off:.1e} of the weights, too far to tell it "
                "from a mistake in the numbers; data, rates and evaluations were compared to the end"
            )


def _hide_unplaced(pair: Pair, parts: list[Part], verdict: Verdict) -> None:
    """Leaves out tensors whose shards have no known places: those of another number of ranks do not add up alike."""
    sides = (pair.one, pair.two) if pair.one.world != pair.two.world else ()
    for part in parts:
        part.hidden = set()
    found = {
        (kind, name)
        for side in sides
        for kind in ("initial", "begin", "grad", "weights", "buffers", "state")
        for name, whole in side.spots[0].tensors(kind).items()
        if whole.opaque
    }
    for part in parts:
        part.hidden = found
    names = sorted({name for kind, name in found if kind != "state"})
    if names:
        text = f"tensors that are sharded in a way that is not known: {len(names)}, such as {names[0]}"
        verdict.notes.append(f"{text}; they are not compared")


def _check_names(pair: Pair, verdict: Verdict) -> None:
    """Raises TraceError where there is nothing to compare; notes what only one run has."""
    names = [list(side.spots[0].tensors("initial")) for side in (pair.one, pair.two)]
    if all(names) and not set(names[0]) & set(names[1]):
        text = f"the first trains {names[0][0]} and others, the second {names[1][0]} and others"
        raise TraceError(f"{pair.one.name} and {pair.two.name} have no parameter of one name in common: {text}")
    for run, mine, theirs in ((FIRST, names[0], names[1]), (SECOND, names[1], names[0])):
        only = [name for name in mine if name not in theirs]
        if only and theirs:
            verdict.notes.append(f"{len(only)} parameters are in {run} alone, such as {only[0]}")
    for side in (pair.one, pair.two):
        part = side.spots[0].part
        if len(part.ranks) < part.world:
            text = f"{side.name}: {part.world} ranks trained, and {len(part.ranks)} of them are recorded"
            verdict.notes.append(f"{text}; of several nodes copy the files rank*.jsonl of all into one folder")


def _parting(step: Step) -> list[str]:
    """Where the bits of two runs of the same shape part, though within rounding."""
    if step.one.part.world != step.two.part.world:
        return []
    module = first_module(step)
    if module:
        return [f"the bits part in step {step.at[0]}, first in the output of {module}"]
    for kind, name in (("grad", "the gradient of"), ("weights", "the update of")):
        mine, theirs = step.one.tensors(kind), step.two.tensors(kind)
        tensor = next((n for n in mine if n in theirs and mine[n].digest != theirs[n].digest), "")
        if tensor:
            more = "" if any(f.get("mn") for f in _first(step.one)["fwd"]) else "; --modules names the module"
            return [f"the bits part in step {step.at[0]}, first in {name} {tensor}{more}"]
    return []


def _difference(step: Step, verdict: Verdict) -> Finding | None:
    checks: list[Callable[[Step], Finding | None]] = [
        _initial,
        begin_state,
        partial(evaluation_difference, tail=False),
        update_count,
    ]
    if verdict.unproven:
        checks += [data_difference, rate_difference]
    else:
        checks += [
            _changed,
            partial(_computed, verdict=verdict),
            rate_difference,
            update_difference,
            begin_state,
            buffer_difference,
            state_difference,
        ]
    for check in checks:
        found = check(step)
        if found is not None:
            return found
        if verdict.unproven and check not in (_initial, begin_state, update_count, rate_difference):
            return rate_difference(step)
    return None


# Stages, in order.


def _initial(step: Step) -> Finding | None:
    if step.number:
        return None
    for name, spot in step.sides():
        for kind in ("initial", "initial buffers"):
            wrong = next(((n, w) for n, w in spot.tensors(kind).items() if w.other and not w.other[1] <= 1e-30), None)
            if wrong and kind == "initial" and wrong[1].other:
                rank, error = wrong[1].other
                text = f"in {name} it differs from rank 0's by {share(error, wrong[1].norm)}"
                return step.finding("initial weights", "rank-weights", text, wrong[0], rank)
    if step.pair.shift:
        return None
    mine, theirs = step.one.tensors("initial"), step.two.tensors("initial")
    for name in [name for name in mine if name in theirs]:
        error = distance(mine[name].sketch, theirs[name].sketch)
        if mine[name].digest != theirs[name].digest and not error <= 1e-6 * (mine[name].norm + theirs[name].norm):
            text = f"it differs by {share(error, mine[name].norm)}"
            return step.finding("initial weights", "other-weights", text, name)
    return None


def _changed(step: Step) -> Finding | None:
    """Weights whose bits are not those that the last update left, on some ranks alone or in one run alone."""
    if not step.number:
        return None
    for name, spot in step.sides():
        if spot.begins or not spot.at:
            continue
        begin = spot.tensors("begin")
        other = step.one if spot is step.two else step.two
        for tensor, whole in begin.items():
            if whole.other and spot.part.tensors(spot.at - 1, "weights").get(tensor, whole).other is None:
                rank = whole.other[0]
                text = (
                    f"in {name} its bits changed since step {spot.at - 1} ended, by {share(whole.other[1], whole.norm)}"
                )
                return step.finding("weights", "changed-weights", text, tensor, rank)
        if other.begins or not other.at:
            continue
        moved, theirs = (_moved(each) for each in (spot, other))
        only = sorted(moved - theirs)
        if only and other.tensors("begin"):
            text = f"in {name} its bits changed since step {spot.at - 1} ended"
            return step.finding("weights", "changed-weights", text, only[0])
    return None


def _moved(spot: Spot) -> set[str]:
    before = spot.part.tensors(spot.at - 1, "weights")
    return {
        name for name, whole in spot.tensors("begin").items() if name in before and before[name].digest != whole.digest
    }


def _computed(step: Step, verdict: Verdict) -> Finding | None:
    """What leads to the gradient, if the gradient differs."""
    unequal = next(
        ((name, n, w) for name, spot in step.sides() for n, w in spot.tensors("grad").items() if unlike(w)), None
    )
    step.flagged = _flagged(step)
    if not step.flagged and unequal is None and items_unequal(step) is None:
        return None
    found = data_difference(step)
    if found is not None:
        return found
    by_design, found = random_difference(step)
    if found is not None:
        return found
    if by_design and unequal is None:
        verdict.unproven = by_design
        return None
    return gradient_difference(step)


def _flagged(step: Step) -> list[str]:
    """Gradients that are further off than rounding explains."""
    mine, theirs = step.one.tensors("grad"), step.two.tensors("grad")
    if not mine or not theirs:
        return _norms_off(step)
    norm = math.sqrt(max(sum(whole.square for whole in side.values()) for side in (mine, theirs)))
    found = []
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        if name not in mine or name not in theirs:
            absent = (theirs.get(name) or mine[name]).norm
            if absent > step.limit * norm:
                found.append(name)
            continue
        error = distance(mine[name].sketch, theirs[name].sketch)
        in_both = math.isnan(error) and math.isnan(mine[name].square + theirs[name].square)  # not finite
        if mine[name].digest != theirs[name].digest and not in_both and not error <= step.limit * norm:
            found.append(name)
    return found


def _first(spot: Spot) -> dict[str, Any]:
    return next(iter(spot.part.records(spot.at).values()))


def _norms_off(step: Step) -> list[str]:
    """The same where an engine says the norm alone."""
    norms: list[float] = []
    for spot in (step.one, step.two):
        said = _first(spot).get("norm")
        if said is None and not spot.tensors("grad"):
            return []
        if said is None:
            clips = [event for event in _first(spot)["ev"] if event[1] == "clip" and event[4]]
            squares = sum(whole.square for whole in spot.tensors("grad").values())
            said = clips[-1][4][0] if clips else math.sqrt(squares)
        norms.append(float(said))
    return [] if abs(norms[0] - norms[1]) <= step.limit * max(norms) else ["norm"]


def _end(pair: Pair, verdict: Verdict) -> Finding | None:
    """What came after the last step, and whether both made as many."""
    one, two = len(pair.one.spots), len(pair.two.spots) + pair.shift
    last = pair.steps[-1] if pair.steps else (0, 0)
    step = Step(pair, pair.one.spots[last[0]], pair.two.spots[last[1]], last, len(pair.steps), 0.0)
    sides = (pair.one, pair.two)
    less = min(zip((one, two), sides, strict=True), key=lambda each: each[0])[1]
    failed = one != two and less.code != 0 and pair.one.code != pair.two.code
    if failed or not all(side.ended for side in sides):
        for side in sides:
            stopped = f"ended with exit code {side.code}" if failed and side is less else ""
            how = stopped if side.ended else "was cut off"
            if how:
                verdict.notes.append(f"{side.name} {how} after step {len(side.spots) - 1}: compared as far as it goes")
        return None
    if pair.one.window or pair.two.window:
        return None
    if one != two:
        text = f"{pair.one.name} makes {one} steps and {pair.two.name} {two}"
        found = step.finding("steps", "step-count", text)
        return Finding(**{**vars(found), "step": min(one, two), "other": min(one, two) - pair.shift})
    return evaluation_difference(step, tail=True)


def _notes(pair: Pair, verdict: Verdict) -> None:
    if pair.shift > 0:
        verdict.notes.append(
            f"{pair.two.name} begins with the weights that {pair.one.name} has after step {pair.shift - 1}"
        )
    elif pair.shift < 0:
        verdict.notes.append(
            f"{pair.one.name} begins with the weights that {pair.two.name} has after step {-pair.shift - 1}"
        )
    heads = [side.spots[0].part.first.head for side in (pair.one, pair.two)]
    names = sorted(set(heads[0]["versions"]) | set(heads[1]["versions"]))
    for name in names:
        mine, theirs = (head["versions"].get(name, "none") for head in heads)
        if mine != theirs:
            verdict.notes.append(f"{name} is {mine} in the first and {theirs} in the second")
    if heads[0]["script"] != heads[1]["script"]:
        verdict.notes.append("the scripts are not the same file")
    verdict.notes += [side.cut for side in (pair.one, pair.two) if side.cut]
