"""Compare two runs step by step and find the first difference.

verdict = compare_runs(read(one), read(two))

A step is examined in detail only if something that matters differs: gradients, rates, weights, buffers, values that
ranks should share, the samples of an evaluation. Its stages are then compared in causal order; the first that differs
is the cause. The tolerance is that of docs/inside/verify.md plus the distance of the weights before the step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.trace.compare.causes import TraceFinding, TraceVerdict
from lockstep.trace.compare.judge_data import (
    buffer_sets,
    contents_difference,
    data_difference,
    gradient_sets,
    kept_gradient,
    parameter_sets,
    random_difference,
    state_sets,
    unmatched_gradients,
)
from lockstep.trace.compare.judge_gradient import (
    first_module,
    gradient_difference,
    gradient_limit,
    items_unequal,
    own_statistics,
)
from lockstep.trace.compare.judge_update import (
    TrainedSoFar,
    begin_state,
    buffer_difference,
    changed_weights,
    count_data,
    count_numbers,
    evaluation_difference,
    initial_difference,
    list_gaps,
    list_unended,
    losses_of,
    norm_of,
    rate_difference,
    state_difference,
    update_count,
    update_difference,
)
from lockstep.trace.compare.pairing import (
    FIRST,
    SECOND,
    Spot,
    StepPair,
    TracePair,
    apart,
    apart_from_each_other,
    every,
    finite,
    match_names,
    pair_runs,
    unlike,
)
from lockstep.trace.compare.reading import TracePart, TraceRun, distance

__all__ = [
    "compare_runs",
]


_NAMES = {"initial": "weights", "weights": "weights", "grad": "gradients", "buffers": "buffers", "state": "states"}
# Tensors -> (stage, cause), in causal order.
_STAGES = {
    "begin": ("weights", "changed-weights"),
    "weights": ("optimizer", "update"),
    "buffers": ("buffers", "forward"),
    "state": ("optimizer state", "state"),
}


class Unseen:
    """Counter of the values that are not finite in both runs.

    Attributes:
        counts: by kind, over all steps.
        where: the first step and tensor, in words; "" if all were finite.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.where = ""

    def add(self, step: StepPair) -> None:
        """Count the incomparable values of a step."""
        for category, name in _not_finite(step):
            self.where = self.where or f"from step {step.at[0] + 1} on {name} is not finite in both runs"
            self.counts[category] += 1

    def text(self, compared: Counter[str]) -> list[str]:
        """Describe the first such value, and how much was compared nevertheless."""
        if not self.where:
            return []
        counts = ", ".join(
            f"{compared[category]} of {compared[category] + count} {category}"
            for category, count in sorted(self.counts.items())
        )
        return [f"{self.where}, so it is not compared; compared: {counts}"]


def _finite_in_one(step: StepPair) -> TraceFinding | None:
    """Report tensors and losses that are finite in one run only.

    Gradients are judged with their causes instead.
    """
    for section, (stage, cause) in _STAGES.items():
        first_tensors = step.one.tensors(section)
        second_tensors = step.two.tensors(section)
        for name in match_names(first_tensors, second_tensors).both:
            if finite(first_tensors[name]) != finite(second_tensors[name]):
                side = SECOND if finite(first_tensors[name]) else FIRST
                return step.finding(stage, cause, f"it is not finite in {side} only", name)
    in_first, in_second = (_losses_finite(step, side) for side in (0, 1))
    if None not in (in_first, in_second) and in_first != in_second:
        return step.finding("forward", "forward", f"it is not finite in {SECOND if in_first else FIRST} only", "loss")
    return None


def _not_finite(step: StepPair) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of values that are not finite in both runs.

    A buffer may have infinities by design, such as a mask of -inf: there only NaN counts. A gradient that overflowed
    does not count if the update was skipped, as by a GradScaler.
    """
    for section, plural in _NAMES.items():
        first_tensors = step.one.tensors(section)
        second_tensors = step.two.tensors(section)
        for name in match_names(first_tensors, second_tensors).both:
            if finite(first_tensors[name]) or finite(second_tensors[name]):
                continue
            if section == "grad" and every(_is_skipped(spot, name) for _, spot in step.sides()):
                continue
            if (
                section == "buffers"
                and first_tensors[name].digest == second_tensors[name].digest
                and math.isinf(first_tensors[name].square)
            ):
                continue
            if section == "grad":
                text = f"the gradient of {name}"
            else:
                text = f"the state {name}" if section == "state" else name
            yield plural, text
    sides = [(spot.before(), spot.tensors("weights")) for _, spot in step.sides()]
    names = match_names(*(match_names(before, after).both for before, after in sides)).both
    for name in names:
        if not every(finite(tensors[name]) for side in sides for tensors in side):
            yield "updates", name
    if _losses_finite(step, 0) is _losses_finite(step, 1) is False:
        yield "losses", "the loss"
    norms = [norm_of(spot) for _, spot in step.sides() if spot.hidden]
    if norms and None not in norms and not any(math.isfinite(norm) for norm in norms):
        yield "gradient norms", "the gradient's norm"


def _is_skipped(spot: Spot, name: str) -> bool:
    """Whether an update left a weight unchanged, and finite."""
    before = spot.before().get(name)
    after = spot.tensors("weights").get(name)
    return before is not None and after is not None and before.digest == after.digest and finite(after)


def _losses_finite(step: StepPair, side: int) -> bool | None:
    """Whether all losses of a step are finite; None if a rank has none."""
    losses = losses_of((step.one, step.two)[side])
    if losses:
        return every(math.isfinite(value) for rank in losses for value in rank)
    return None


# A gradient is rounding noise if its share of the whole norm is below the first,
# and its error, relative to itself, is above the second.
_NOISE = 1e-3
_NOISE_OFF = 1e-2
# Vague causes: different contents are a better explanation.
_VAGUE = ("loss", "reduction", "part-unreduced", "gradient")
# Share by which the weights may differ while gradients are still comparable.
_TOO_FAR = 1e-2


def compare_runs(first_run: TraceRun, second_run: TraceRun) -> TraceVerdict:
    """Compare two runs over their common steps."""
    pair = pair_runs(first_run, second_run)
    verdict = TraceVerdict(first_run.name, second_run.name)
    _hide_unplaced(pair, [*first_run.parts, *second_run.parts], verdict)
    _notes(pair, verdict)
    verdict.missing += list_unended(pair)
    names = [side.spots[0].tensors("initial") for side in (pair.one, pair.two)]
    if names[0] and names[1] and not match_names(*names).both:
        text = f"the first trains {next(iter(names[0]))} and others, the second {next(iter(names[1]))} and others"
        verdict.missing.append(f"the runs have no parameter name in common: {text}")
        return verdict
    # The steps in order, up to the first difference.
    state = _Divergence()
    for number, (first_index, second_index) in enumerate(pair.steps):
        step = StepPair(
            pair,
            pair.one.spots[first_index],
            pair.two.spots[second_index],
            (first_index, second_index),
            number,
            state.off,
        )
        step.limit = gradient_limit(step)
        finding = _difference(step, verdict)
        if finding is not None:
            verdict.finding = finding
            return verdict
        verdict.judged += 1
        # Once the numbers prove nothing any more, only data, rates and evaluations are compared.
        if not verdict.unproven:
            verdict.hidden = (verdict.hidden[0] or step.limit, max(verdict.hidden[1], step.limit))
        state.trained.look(step.two)
        count_data(step, verdict.compared)
        if not verdict.unproven:
            state.unseen.add(step)
            state.follow(step, verdict)
    # No step differs: the rest finds out whether this proves anything.
    for side in (pair.one, pair.two):
        if apart_from_each_other(side.spots[0]):
            text = f"{side.name}: its {side.world} processes have no process group of torch: unless something else"
            verdict.notes.append(f"{text} synchronises them, each trains alone")
    verdict.notes += state.trained.note(verdict.judged)
    if state.noise:
        text = f"tensors whose gradients are rounding noise: {len(state.noise)}, such as {min(state.noise)}"
        verdict.notes.append(f"{text}; their distance is not counted")
    verdict.finding = _end(pair)
    verdict.missing += [*state.unseen.text(verdict.compared), *list_gaps(pair, verdict)]
    verdict.not_finite = dict(state.unseen.counts)
    return verdict


@dataclass
class _Divergence:
    """Distance between the two runs so far.

    Attributes:
        off: relative distance of the weights.
        bits: the weights are bitwise equal.
        noise: tensors with gradients that cancel to rounding noise, so that each of their steps is random (the bias of
            attention's keys, a bias before a BatchNorm). The loss does not depend on them.
    """

    off: float = 0.0
    bits: bool = True
    trained: TrainedSoFar = field(default_factory=TrainedSoFar)
    unseen: Unseen = field(default_factory=Unseen)
    noise: set[str] = field(default_factory=set)

    def follow(self, step: StepPair, verdict: TraceVerdict) -> None:
        """Update the distance by a step without a finding."""
        first_weights = step.one.tensors("weights")
        second_weights = step.two.tensors("weights")
        before = self.bits
        self.bits &= every(
            first_weights[name].digest == second_weights[name].digest
            for name in match_names(first_weights, second_weights).both
        )
        count_numbers(step, verdict.compared)
        if before and not self.bits:
            verdict.notes += _first_different_bits(step)
        verdict.bits += self.bits
        grads = step.one.tensors("grad")
        second_grads = step.two.tensors("grad")
        norm = math.sqrt(sum(tensor.square for tensor in grads.values()))
        for name in grads.keys() & second_grads.keys():
            small = grads[name].norm < _NOISE * norm
            if small and distance(grads[name].sketch, second_grads[name].sketch) > _NOISE_OFF * grads[name].norm:
                self.noise.add(name)
        error, length = apart(
            {name: tensor for name, tensor in first_weights.items() if name not in self.noise}, second_weights
        )
        self.off = error / length if length else 0.0
        # False for NaN.
        if self.off == self.off:
            verdict.largest = max(verdict.largest, self.off)
        if self.off > _TOO_FAR:
            verdict.unproven = (
                f"from step {step.at[0] + 1} on rounding has grown to {self.off:.1e} of the weights, which may hide a "
                "mistake in the numbers; data, rates and evaluations were compared to the end"
            )


def _hide_unplaced(pair: TracePair, parts: list[TracePart], verdict: TraceVerdict) -> None:
    """Exclude shards with unknown positions: their sums depend on the number of ranks."""
    sides = (pair.one, pair.two) if pair.one.world != pair.two.world else ()
    for trace_part in parts:
        trace_part.hidden = set()
    hidden = set()
    for side in sides:
        for section in ("initial", "begin", "grad", "weights", "buffers", "state"):
            for name, tensor in side.spots[0].tensors(section).items():
                if tensor.opaque:
                    hidden.add((section, name))
    for trace_part in parts:
        trace_part.hidden = hidden
    names = sorted({name for section, name in hidden if section != "state"})
    if names:
        text = f"tensors with an unknown sharding: {len(names)}, such as {names[0]}"
        unknown = any(section == "weights" for section, _ in hidden)
        (verdict.missing if unknown else verdict.notes).append(f"{text}; they are not compared")


def _first_different_bits(step: StepPair) -> list[str]:
    """Describe where the bits of two runs with the same world size first differ."""
    if step.one.part.world != step.two.part.world:
        return []
    module = first_module(step)
    if module:
        return [f"the bits first differ in step {step.at[0] + 1}, in the output of {module}"]
    for section, name in (("grad", "the gradient of"), ("weights", "the update of")):
        first_tensors = step.one.tensors(section)
        second_tensors = step.two.tensors(section)
        tensor = ""
        for n in first_tensors:
            if n in second_tensors and first_tensors[n].digest != second_tensors[n].digest:
                tensor = n
                break
        if tensor:
            if any(f.get("mn") for f in _first(step.one)["fwd"]):
                more = ""
            else:
                more = "; --modules names the module"
            return [f"the bits first differ in step {step.at[0] + 1}, in {name} {tensor}{more}"]
    return []


def _difference(step: StepPair, verdict: TraceVerdict) -> TraceFinding | None:
    checks: list[Callable[[StepPair], TraceFinding | None]] = [
        initial_difference,
        parameter_sets,
        begin_state,
        partial(evaluation_difference, tail=False),
        update_count,
    ]
    if verdict.unproven:
        checks += [data_difference, rate_difference]
    else:
        checks += [
            changed_weights,
            partial(_gradient_cause, verdict=verdict),
            rate_difference,
            _finite_in_one,
            update_difference,
            buffer_sets,
            buffer_difference,
            state_sets,
            state_difference,
        ]
    for check in checks:
        finding = check(step)
        if finding is not None:
            return finding
        # The draws of this step differ by construction, so only its rates can still be compared.
        if verdict.unproven and isinstance(check, partial) and check.func is _gradient_cause:
            return rate_difference(step)
    return None


def _gradient_cause(step: StepPair, verdict: TraceVerdict) -> TraceFinding | None:
    """Find the cause of a different gradient, in causal order."""
    unequal = next(
        ((name, n, w) for name, spot in step.sides() for n, w in spot.tensors("grad").items() if unlike(w)), None
    )
    step.flagged = _find_differing(step)
    # These need no tolerance, so they are found even if no gradient is flagged.
    exact = items_unequal(step) or own_statistics(step)
    if not step.flagged and unequal is None and exact is None:
        return None
    finding = data_difference(step)
    if finding is not None:
        return finding
    by_design, finding = random_difference(step)
    if finding is not None:
        return finding
    if by_design and unequal is None:
        verdict.unproven = by_design
        return None
    finding = gradient_sets(step) if unequal is None else None
    if finding is not None:
        return finding
    finding = gradient_difference(step)
    if finding.stage == "reduction" and unequal is None:
        if finding.cause == "reduction" and step.one.part.world == step.two.part.world == 1:
            # One process reduces nothing.
            finding = step.finding("gradient", "gradient", finding.text, finding.where)
        finding = kept_gradient(step) or finding
    if finding.cause in _VAGUE and unequal is None:
        other = contents_difference(step)
    else:
        other = None
    return other or finding


def _find_differing(step: StepPair) -> list[str]:
    """List the gradients that differ by more than rounding explains."""
    first_gradients = step.one.tensors("grad")
    second_gradients = step.two.tensors("grad")
    if step.one.hidden or step.two.hidden:
        return _norms_off(step)
    norm = math.sqrt(
        max(sum(tensor.square for tensor in side.values()) for side in (first_gradients, second_gradients))
    )
    names = unmatched_gradients(step)
    for name in match_names(first_gradients, second_gradients).both:
        error = distance(first_gradients[name].sketch, second_gradients[name].sketch)
        finite_sides = finite(first_gradients[name]), finite(second_gradients[name])
        off = not error <= step.limit * norm or finite_sides[0] != finite_sides[1]
        # If neither is finite, there is nothing to compare.
        if first_gradients[name].digest != second_gradients[name].digest and any(finite_sides) and off:
            names.append(name)
    return names


def _first(spot: Spot) -> dict[str, Any]:
    return next(iter(spot.part.records(spot.at).values()))


def _norms_off(step: StepPair) -> list[str]:
    """Compare the gradient norms, for an engine that reports nothing else."""
    norms: list[float] = []
    for spot in (step.one, step.two):
        norm = _first(spot).get("norm")
        if norm is None and not spot.tensors("grad"):
            return []
        if norm is None:
            clips = []
            for event in _first(spot)["ev"]:
                if event[1] == "clip" and event[4]:
                    clips.append(event)
            squares = sum(tensor.square for tensor in spot.tensors("grad").values())
            norm = clips[-1][4][0] if clips else math.sqrt(squares)
        norms.append(float(norm))
    if not math.isfinite(norms[0]) and not math.isfinite(norms[1]):
        # `Unseen` counts it as not compared.
        return []
    if abs(norms[0] - norms[1]) <= step.limit * max(norms):
        return []
    return ["norm"]


def _end(pair: TracePair) -> TraceFinding | None:
    """Compare the ends: the evaluation after the last step, and the number of steps."""
    first_count = len(pair.one.spots)
    second_count = len(pair.two.spots) + pair.shift
    less, more = (pair.one, pair.two) if first_count < second_count else (pair.two, pair.one)
    if not pair.steps or less.window or more.window or less.stop or (first_count == second_count and more.stop):
        return None
    last_pair = pair.steps[-1]
    step = StepPair(pair, pair.one.spots[last_pair[0]], pair.two.spots[last_pair[1]], last_pair, len(pair.steps), 0.0)
    if first_count != second_count:
        text = f"{pair.one.name} makes {first_count} steps and {pair.two.name} {second_count}"
        finding = step.finding("steps", "step-count", text)
        return TraceFinding(
            **{
                **vars(finding),
                "step": min(first_count, second_count),
                "other": min(first_count, second_count) - pair.shift,
            }
        )
    return evaluation_difference(step, tail=True)


def _notes(pair: TracePair, verdict: TraceVerdict) -> None:
    if pair.shift > 0:
        verdict.notes.append(f"{pair.two.name} starts with the weights of {pair.one.name} after step {pair.shift}")
    elif pair.shift < 0:
        verdict.notes.append(f"{pair.one.name} starts with the weights of {pair.two.name} after step {-pair.shift}")
    heads = [side.spots[0].part.first.head for side in (pair.one, pair.two)]
    names = sorted(set(heads[0]["versions"]) | set(heads[1]["versions"]))
    for name in names:
        first_version, second_version = (head["versions"].get(name, "none") for head in heads)
        if first_version != second_version:
            verdict.notes.append(f"{name} is {first_version} in the first and {second_version} in the second")
    if heads[0]["script"] != heads[1]["script"]:
        verdict.notes.append("the scripts differ")
    for side in (pair.one, pair.two):
        if side.full:
            text = f"{side.name}: the recording ended after step {len(side.spots)}"
            verdict.notes.append(f"{text}, at the limit of --max-mb")
