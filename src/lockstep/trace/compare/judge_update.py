"""Compare weights, updates and evaluations of two runs, and count what was compared.

`initial_difference`, `changed_weights` and `update_difference` judge the weights, `rate_difference` the rates and
settings, `state_difference` the optimizer's state, `evaluation_difference` the evaluations. `list_gaps` lists what a
proof lacks; `TrainedSoFar` notes runs that train nothing.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.trace.compare.causes import TraceFinding, TraceVerdict
from lockstep.trace.compare.pairing import (
    FIRST,
    GROWTH,
    SECOND,
    Spot,
    StepPair,
    TracePair,
    TraceSide,
    Use,
    count_contents,
    every,
    finite,
    finite_in_some,
    list_samples,
    match_names,
    readers,
    share,
    unlike,
)
from lockstep.trace.compare.reading import WholeTensor, distance
from lockstep.trace.compare.rounding import ROUNDOFF

__all__ = [
    "TrainedSoFar",
    "begin_state",
    "buffer_difference",
    "changed_weights",
    "count_data",
    "count_numbers",
    "evaluation_difference",
    "initial_difference",
    "list_gaps",
    "list_unended",
    "losses_of",
    "norm_of",
    "rate_difference",
    "state_difference",
    "update_count",
    "update_difference",
]


def count_data(step: StepPair, compared: Counter[str]) -> None:
    """Count the samples of a step that both runs read."""
    first_samples, second_samples = list_samples(
        *(side.find_samples(spot).at(spot.at, 0) for side, spot in _sides(step))
    )
    compared["samples"] += (count_contents(readers(first_samples)) & count_contents(readers(second_samples))).total()


def count_numbers(step: StepPair, compared: Counter[str]) -> None:
    """Count the tensors and losses of a step that were compared."""
    for section, name in (("grad", "gradients"), ("weights", "weights"), ("buffers", "buffers"), ("state", "states")):
        compared[name] += len(
            _finite_in_both(step.one.tensors(section), step.two.tensors(section), masks=section == "buffers")
        )
    weights = _finite_in_both(step.one.tensors("weights"), step.two.tensors("weights"))
    compared["updates"] += len(match_names(weights, _finite_in_both(step.one.before(), step.two.before())).both)
    norms = []
    for _, spot in _sides(step):
        if spot.hidden:
            norms.append(norm_of(spot))
    compared["gradient norms"] += bool(norms) and None not in norms and every(math.isfinite(norm) for norm in norms)
    first_losses, second_losses = (losses_of(spot) for _, spot in _sides(step))
    if first_losses and second_losses:
        first_loss, second_loss = (sum(map(math.fsum, side)) / len(side) for side in (first_losses, second_losses))
        if (
            abs(first_loss - second_loss) <= max(1e-5, step.limit) * max(abs(first_loss), abs(second_loss))
            or first_loss == second_loss
        ):
            compared["losses"] += min(sum(map(len, first_losses)), sum(map(len, second_losses)))


def list_unended(pair: TracePair) -> list[str]:
    """List the runs that were not recorded to their end, or not on all ranks."""
    sides = (pair.one, pair.two)
    runs = []
    for side in sides:
        if side.stop:
            runs.append(f"{side.name} {side.stop} after step {len(side.spots)}")
    for side in sides:
        trace_part = side.spots[0].part
        if len(trace_part.ranks) < trace_part.world:
            text = f"{side.name} has {len(trace_part.ranks)} of {trace_part.world} ranks"
            runs.append(f"{text}: copy the files rank*.jsonl of all nodes into one folder")
    return runs


def list_gaps(pair: TracePair, verdict: TraceVerdict) -> list[str]:
    """List what a proof needs and the compared steps lack."""
    if not verdict.judged:
        return ["they have no step in common"]
    if verdict.unproven:
        return []
    sides = (pair.one, pair.two)
    kinds = [("weights",), ("updates",), ("gradients", "gradient norms")]
    gaps = []
    for section in kinds:
        if not any(verdict.compared[key] for key in section):
            gaps.append(f"no {section[0]} were compared")
    checks = [("losses", _has_losses), ("samples", _has_samples)]
    checks += [("states", _has_state)] * (not any(side.spots[0].hidden for side in sides))
    for name, has in checks:
        in_first = any(has(sides[0], first) for first, _ in pair.steps)
        in_second = any(has(sides[1], second) for _, second in pair.steps)
        if in_first != in_second:
            gaps.append(f"only {verdict.two if in_second else verdict.one} has {name}")
    return gaps


def _finite_in_both(one: dict[str, WholeTensor], two: dict[str, WholeTensor], *, masks: bool = False) -> list[str]:
    """List the names with finite values in both; with `masks` also equal infinite ones."""
    pairs = ((name, one[name], two[name]) for name in match_names(one, two).both)
    names = []
    for name, first_tensor, second_tensor in pairs:
        if (finite(first_tensor) and finite(second_tensor)) or (
            masks and first_tensor.digest == second_tensor.digest and math.isinf(first_tensor.square)
        ):
            names.append(name)
    return names


def _sides(step: StepPair) -> tuple[tuple[TraceSide, Spot], tuple[TraceSide, Spot]]:
    return (step.pair.one, step.one), (step.pair.two, step.two)


def norm_of(spot: Spot) -> Any:
    """Return the norm that a step's first rank reports, or None."""
    return next(iter(spot.part.records(spot.at).values())).get("norm")


def losses_of(spot: Spot) -> list[list[float]]:
    """Return the losses of each rank; empty if a rank has none."""
    records = spot.part.records(spot.at).values()
    losses = []
    for record in records:
        losses.append([entry["v"][0] for entry in record["loss"] if entry["v"]])
    if [] not in losses:
        return losses
    return []


def _has_losses(side: TraceSide, at: int) -> bool:
    spot = side.spots[at]
    return any(record["loss"] for record in spot.part.records(spot.at).values())


def _has_samples(side: TraceSide, at: int) -> bool:
    spot = side.spots[at]
    return any(use.inputs or use.samples for use in side.find_samples(spot).at(spot.at, 0).values())


def _has_state(side: TraceSide, at: int) -> bool:
    return bool(side.spots[at].tensors("state"))


def evaluation_difference(step: StepPair, tail: bool) -> TraceFinding | None:
    """Find the first difference of the evaluations before a step, or after the last (`tail`)."""
    if tail:
        spots = (step.pair.one.tail, step.pair.two.tail)
    else:
        spots = (step.one, step.two)
    if spots[0] is None or spots[1] is None or any(spot is not None and spot.begins for spot in spots):
        return None
    if not tail and step.pair.shift and not step.number:
        return None
    if not tail and not step.number and "lightning" in " ".join(step.pair.one.frameworks):
        # Lightning's sanity check takes a few batches, so more samples with more processes.
        return None
    uses = [
        {rank: use for rank, use in side.find_samples(spot).at(spot.at, 1).items() if use.forwards}
        for side, spot in ((step.pair.one, spots[0]), (step.pair.two, spots[1]))
    ]
    training = _in_training_mode(step, spots, uses)
    if training is not None or not uses[0] or not uses[1]:
        return training
    widths = [_values(entry, "p") for entry in uses]
    first_samples, second_samples = list_samples(*uses)
    first_counts = count_contents(readers(first_samples))
    second_counts = count_contents(readers(second_samples))
    if first_counts == second_counts:
        return _uncombined_scores(step, spots[1], second_samples) or _uncombined_scores(step, spots[0], first_samples)
    names = {s.content: s.name for side in (first_samples, second_samples) for entry in side.values() for s in entry}
    for name, counts, expected, samples, spot in (
        (SECOND, second_counts, first_counts, second_samples, spots[1]),
        (FIRST, first_counts, second_counts, first_samples, spots[0]),
    ):
        more = counts - expected
        less = expected - counts
        if more and not less and set(more) <= set(expected):
            if _has_event(spot, "gather_for_metrics"):
                return None
            content = next(iter(more))
            rank = [rank for rank, entry in samples.items() if any(s.content == content for s in entry)][-1]
            text = f"in {name} {names[content]} is counted {counts[content]} times instead of {expected[content]}"
            return step.finding("evaluation", "padded-evaluation", text, f"{sum(counts.values())} samples", rank)
    less = first_counts - second_counts
    more = second_counts - first_counts
    # They may be the same samples, padded to other lengths.
    if less and more and widths[0] != widths[1]:
        return _other_number(step, spots[1], first_counts.total(), second_counts.total())
    if less and not more:
        text = (
            f"{sum(second_counts.values())} samples instead of {sum(first_counts.values())}: "
            f"{names[next(iter(less))]} is missing"
        )
        return step.finding("evaluation", "lost-evaluation", text, "samples")
    text = f"{sum(more.values())} of {sum(second_counts.values())} samples are different"
    return step.finding("evaluation", "evaluation", text, "samples")


def _in_training_mode(
    step: StepPair, spots: tuple[Spot | None, Spot | None], uses: list[dict[int, Use]]
) -> TraceFinding | None:
    """Report that one run evaluates in training mode.

    It runs forwards without gradients, or forwards that no backward follows.
    """
    training = [bool(use) and 1 in _values(use, "mode") for use in uses]
    if bool(uses[0]) != bool(uses[1]):
        idle = []
        for side, spot in zip((step.pair.one, step.pair.two), spots, strict=True):
            idle.append(_without_backward(side, spot))
        training = []
        for count, use in zip(idle, uses, strict=True):
            training.append(bool(count) and not use)
        training = [False, False] if every(map(bool, idle)) else training
    if training[0] == training[1]:
        return None
    text = f"in {SECOND if training[1] else FIRST} the model evaluates in training mode"
    return step.finding("evaluation", "train-mode", text, "model.training")


def _without_backward(side: TraceSide, spot: Spot | None) -> int:
    """Count a step's training forwards without a backward."""
    uses = side.find_samples(spot).at(spot.at, 0).values() if spot is not None else ()
    return sum(not forward.get("backwards") for use in uses for forward in use.forwards)


def _values(uses: dict[int, Use], name: str) -> set[int]:
    """Return what the forwards recorded under a name; 0: nothing."""
    return {int(forward.get(name, 0)) for use in uses.values() for forward in use.forwards}


def _other_number(step: StepPair, spot: Spot, expected: int, count: int) -> TraceFinding | None:
    """Report an evaluation of more samples, or of fewer.

    Padding that is dropped does not count.
    """
    if count == expected or _has_event(spot, "gather_for_metrics"):
        return None
    cause = "padded-evaluation" if count > expected else "lost-evaluation"
    return step.finding("evaluation", cause, f"{count} samples instead of {expected}", "samples")


def _uncombined_scores(step: StepPair, spot: Spot, samples: dict[int, Any]) -> TraceFinding | None:
    """Report ranks that evaluate a part each without a collective that could combine the scores."""
    sets = []
    for rank_samples in samples.values():
        if rank_samples:
            sets.append({sample.content for sample in rank_samples})
    if len(sets) < 2 or any(one & two for index, one in enumerate(sets) for two in sets[:index]):
        return None
    if _has_event(spot, "gather_for_metrics") or _has_event(spot, "collective"):
        return None
    counts = ", ".join(f"{len(rank_samples)} on rank {rank}" for rank, rank_samples in samples.items())
    return step.finding("evaluation", "rank-evaluation", f"{counts}, and no collective follows", "samples")


def _has_event(spot: Spot, kind: str) -> bool:
    """Whether an event occurred between an evaluation's first forward and the next training."""
    for rank in spot.part.ranks.values():
        record = rank.steps[spot.at] if spot.at < len(rank.steps) else rank.end
        if record is None:
            # The record was cut off, so the event may have occurred.
            return True
        begin = min((f["at"] for f in record["fwd"] if not f["train"]), default=0)
        end = min((f["at"] for f in record["fwd"] if f["train"] and f["at"] > begin), default=1 << 60)
        for event in record["ev"]:
            if begin < event[0] < end and event[1] == kind and (kind != "collective" or _may_carry_scores(event)):
                return True
    return False


def _may_carry_scores(event: list[Any]) -> bool:
    """Whether a collective may carry scores.

    A barrier does not, nor does the single integer of a decision to stop.
    """
    _, _, name, count, dtype = event[:5]
    if name in ("barrier", "broadcast", "broadcast_object_list", "scatter"):
        return False
    return name.endswith("_object") or "float" in str(dtype) or count > 1


@dataclass
class TrainedSoFar:
    """Whether the steps of a run have trained anything so far.

    Attributes:
        got: there was a gradient.
        counts: a gradient was not 0.
        moved: a weight changed.
        rate: the largest learning rate.
    """

    got: bool = False
    counts: bool = False
    moved: bool = False
    rate: float = 0.0

    def look(self, spot: Spot) -> None:
        """Update the state by a step."""
        gradients = spot.tensors("grad").values()
        record = next(iter(spot.part.records(spot.at).values()))
        # DeepSpeed's engine reports only the norm of its gradients.
        hidden = record["kind"] == "DeepSpeedEngine"
        self.got |= hidden or bool(gradients)
        self.counts |= (hidden and record.get("norm") != 0) or any(tensor.square for tensor in gradients)
        old = spot.before()
        self.moved |= any(
            name not in old or old[name].digest != tensor.digest for name, tensor in spot.tensors("weights").items()
        )
        rates = (group.get("lr", 0.0) for group in record["groups"])
        self.rate = max(self.rate, *(float(rate[0] if isinstance(rate, list) else rate) for rate in rates), 0.0)

    def note(self, steps: int) -> list[str]:
        """Return a note after `steps` steps, if no gradient was nonzero or no weight moved."""
        if not steps or (self.counts and self.moved):
            return []
        if not self.got:
            return [f"no tensor of the optimizer has a gradient in any of the {steps} steps: nothing is trained"]
        if not self.counts:
            moves = "; weight decay alone moves the weights" if self.moved else ""
            return [f"every gradient is 0 in all {steps} steps: nothing is trained{moves}"]
        return [f"the weights never change in {steps} steps: nothing is trained (largest learning rate: {self.rate:g})"]


# Share of itself by which a gradient may differ while its update is still comparable.
_MOST_OFF = 1e-2
# Share by which the updates of bitwise equal gradients may differ.
_SAME = 1e-3
# Share by which updates may differ, in addition to rounding of their gradients.
_UPDATE = 0.1
# No correct update differs by this share.
_NEVER_ROUNDING = 0.8


def update_count(step: StepPair) -> TraceFinding | None:
    """Report updates without a backward before them."""
    updates = {}
    for name, spot in step.sides():
        records = spot.part.records(spot.at)
        updates[name] = {rank: record.get("again", 0) for rank, record in records.items()}
    first_updates = updates[FIRST]
    second_updates = updates[SECOND]
    if set(first_updates.values()) == set(second_updates.values()):
        return None
    for name, counts in ((SECOND, second_updates), (FIRST, first_updates)):
        rank = next(
            (
                rank
                for rank, count in counts.items()
                if count > min([*first_updates.values(), *second_updates.values()])
            ),
            None,
        )
        if rank is not None:
            everywhere = len(set(counts.values())) == 1 and len(counts) > 1
            text = (
                f"in {name} {1 + counts[rank]} updates instead of "
                f"{1 + min([*first_updates.values(), *second_updates.values()])}"
            )
            return step.finding("optimizer", "extra-step", text, "update", -1 if everywhere else rank)
    return None


def rate_difference(step: StepPair) -> TraceFinding | None:
    """Compare the rates and settings of the parameter groups."""
    for name, spot in step.sides():
        records = spot.part.records(spot.at)
        reference = records[min(records)]["groups"]
        for rank, record in records.items():
            for number, (group, expected) in enumerate(zip(record["groups"], reference, strict=False)):
                key = _unequal_setting(group, expected)
                if key:
                    text = f"in {name} {key} is {group[key]} instead of {expected[key]} on rank {min(records)}"
                    return step.finding(
                        "optimizer", "rank-rate" if key == "lr" else "settings", text, f"group {number}", rank
                    )
    first_groups, second_groups = (
        next(iter(spot.part.records(spot.at).values()))["groups"] for spot in (step.one, step.two)
    )
    for number, (group, expected) in enumerate(zip(second_groups, first_groups, strict=False)):
        key = _unequal_setting(group, expected)
        if key == "lr":
            return _rate(step, number, _number(group["lr"]), _number(expected["lr"]))
        if key:
            return step.finding(
                "optimizer", "settings", f"{key} is {group[key]} instead of {expected[key]}", f"group {number}"
            )
    return None


def _rate(step: StepPair, number: int, rate: float, expected: float) -> TraceFinding:
    text = f"the learning rate is {rate:.6g} instead of {expected:.6g}"
    group = f"group {number}"
    worlds = step.pair.one.world, step.pair.two.world
    if not step.number and not step.pair.shift:
        ratio = rate / expected if expected else math.inf
        scaled = worlds[0] != worlds[1] and math.isclose(ratio, worlds[1] / worlds[0], rel_tol=1e-6)
        scheduled = any(_schedules(step, side) for side in (0, 1))
        if not scheduled or scaled:
            return step.finding("optimizer", "world-rate" if scaled else "other-rate", text, group)
    if step.pair.shift > 0 and math.isclose(_rate_at(step.pair.one.spots[step.at[1]], number), rate, rel_tol=1e-9):
        return step.finding("schedule", "schedule-resume", text, group)
    counts = _schedules(step, 0), _schedules(step, 1)
    if counts[0] != counts[1]:
        text += f"; so far the schedule stepped {counts[1]} times instead of {counts[0]}"
        more = (counts[1] > counts[0]) == (worlds[1] > worlds[0]) and worlds[0] != worlds[1]
        return step.finding("schedule", "schedule-ranks" if more else "schedule", text, group)
    return step.finding("schedule", "schedule", text, group)


def _rate_at(spot: Spot, number: int) -> float:
    groups = next(iter(spot.part.records(spot.at).values()))["groups"]
    if number < len(groups):
        return _number(groups[number]["lr"])
    return math.nan


def _schedules(step: StepPair, side: int) -> int:
    """Count the steps of a run's schedules up to this step, on its first rank."""
    spots = (step.pair.one, step.pair.two)[side].spots[: step.at[side] + 1]
    records: Iterator[dict[str, Any]] = (next(iter(spot.part.records(spot.at).values())) for spot in spots)
    return sum(event[1] == "schedule" for record in records for event in record["ev"])


def _number(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def _unequal_setting(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return the first setting in which two groups differ; else "".

    The rate comes before the others."""
    for key in sorted(first.keys() & second.keys(), key=lambda name: (name != "lr", name)):
        # These do not change an update, or are compared elsewhere.
        if key in ("fused", "foreach", "initial_lr", "n") or first[key] == second[key]:
            continue
        numbers = []
        for value in (first[key], second[key]):
            if isinstance(value, list) and len(value) == 1:
                numbers.append(value[0])
            else:
                numbers.append(value)
        if every(isinstance(value, int | float) for value in numbers) and math.isclose(
            *numbers, rel_tol=1e-6, abs_tol=1e-30
        ):
            continue
        return key
    return ""


def update_difference(step: StepPair) -> TraceFinding | None:
    """Report weights that the same gradient moved differently."""
    for name, spot in step.sides():
        wrong = None
        for n, w in spot.tensors("weights").items():
            if unlike(w) and w.other:
                wrong = (n, w)
                break
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} after the update it differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer", "update", text, wrong[0], rank)
    return _unexplained_update(step)


def _unexplained_update(step: StepPair) -> TraceFinding | None:
    """Report updates that the gradients do not explain.

    A tensor is judged alone if its gradient is bitwise equal. Otherwise all are judged together: for an element with a
    gradient of rounding noise, Adam takes a step of full length in a random direction, and a tensor may have many.
    """
    grads = step.one.tensors("grad")
    weights = step.one.tensors("weights")
    their_grads = step.two.tensors("grad")
    their_weights = step.two.tensors("weights")
    before = step.one.before()
    their_before = step.two.before()
    # An engine that does not show its gradients.
    hidden = not grads or not their_grads
    noise = signal = error = way = rounding = 0.0
    worst = ""
    most = 0.0
    for name in [n for n in weights if n in their_weights and n in before and n in their_before]:
        if not hidden:
            if name not in grads or name not in their_grads:
                continue
            off = distance(grads[name].sketch, their_grads[name].sketch)
            if off > _MOST_OFF * grads[name].norm:
                continue
            noise = math.hypot(noise, off)
            signal = math.hypot(signal, grads[name].norm)
        first_move = _difference(weights[name], before[name])
        second_move = _difference(their_weights[name], their_before[name])
        zero = (0.0,) * len(first_move)
        gap = distance(first_move, second_move)
        length = max(distance(first_move, zero), distance(second_move, zero))
        # A move is a difference of rounded sums of the weights.
        unit = 64 * ROUNDOFF.get(weights[name].kind, 2.0**-24) * weights[name].norm
        same = not hidden and not step.off and grads[name].digest == their_grads[name].digest
        if same and before[name].digest == their_before[name].digest and gap > _SAME * length + unit:
            text = f"its update differs by {share(gap, length)}, although its gradient has the same bits"
            return step.finding("optimizer", "update", text, name)
        error = math.hypot(error, gap)
        way = math.hypot(way, length)
        rounding = math.hypot(rounding, unit)
        if gap > most:
            worst = name
            most = gap
    if hidden:
        rough = step.limit
    else:
        rough = noise / signal if signal else 0.0
    if error > min(_NEVER_ROUNDING, _UPDATE + 4 * math.sqrt(rough) + GROWTH * step.off) * way + rounding:
        text = f"the update of all weights differs by {share(error, way)}, although the gradients agree"
        return step.finding("optimizer", "update", text, worst)
    return None


def buffer_difference(step: StepPair) -> TraceFinding | None:
    """Compare the buffers of the ranks in each run, and those of the two runs."""
    # Buffers that differ between a run's own ranks.
    sides = {}
    for name, spot in step.sides():
        sides[name] = [entry for entry in spot.tensors("buffers").items() if unlike(entry[1])]
    if bool(sides[FIRST]) != bool(sides[SECOND]):
        run = FIRST if sides[FIRST] else SECOND
        name, tensor = sides[run][0]
        assert tensor.other is not None
        text = f"in {run} it differs from rank 0's by {share(tensor.other[1], tensor.norm)}"
        return step.finding("buffers", "diverging-buffers", text, name, tensor.other[0])
    first_buffers = step.one.tensors("buffers")
    second_buffers = step.two.tensors("buffers")
    for name in first_buffers:
        if name not in second_buffers or first_buffers[name].digest == second_buffers[name].digest:
            continue
        error = distance(first_buffers[name].sketch, second_buffers[name].sketch)
        norm = max(first_buffers[name].norm, second_buffers[name].norm)
        if not error <= max(1e-4, step.limit, 10 * step.off) * norm and finite_in_some(
            first_buffers[name], second_buffers[name]
        ):
            statistics = name.rpartition(".")[2] in ("running_mean", "running_var")
            text = f"it differs by {share(error, norm)}"
            return step.finding("buffers", "batchnorm" if statistics else "forward", text, name)
    return None


def begin_state(step: StepPair) -> TraceFinding | None:
    """Compare the optimizer state at a resume: over the ranks, and with the other run's."""
    sides = ((SECOND, step.two, step.one), (FIRST, step.one, step.two))
    for name, spot, other_spot in sides:
        initial = spot.tensors("initial state")
        wrong = None
        for n, w in initial.items():
            if unlike(w) and w.other:
                wrong = (n, w)
                break
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} the state at its start differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer state", "state", text, wrong[0], rank)
        if spot.at == 0 and other_spot.at and spot.part is not other_spot.part and not step.number:
            before = other_spot.part.tensors(other_spot.at - 1, "state")
            if before and not initial:
                text = f"{name} starts without a state, the other with one"
                return step.finding("optimizer state", "state", text)
            finding = _states_off(step, before, initial)
            if finding is not None:
                return finding
    return None


def state_difference(step: StepPair) -> TraceFinding | None:
    """Compare the optimizer states, given that the weights agree."""
    for name, spot in step.sides():
        wrong = None
        for n, w in spot.tensors("state").items():
            if unlike(w) and w.other:
                wrong = (n, w)
                break
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} it differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer state", "state", text, wrong[0], rank)
    return _states_off(step, step.one.tensors("state"), step.two.tensors("state"))


def _states_off(step: StepPair, first: dict[str, WholeTensor], second: dict[str, WholeTensor]) -> TraceFinding | None:
    norms: dict[str, float] = {}
    for name in first.keys() & second.keys():
        key = name.rpartition("/")[2]
        norms[key] = math.hypot(norms.get(key, 0.0), first[name].norm)
    for name in [n for n in first if n in second]:
        error = distance(first[name].sketch, second[name].sketch)
        bound = max(4 * step.limit, 1e-4) * norms[name.rpartition("/")[2]]
        if (
            first[name].digest != second[name].digest
            and not error <= bound
            and finite_in_some(first[name], second[name])
        ):
            text = f"it differs by {share(error, first[name].norm)}"
            return step.finding("optimizer state", "state", text, name)
    return None


# Units in the last place by which restored weights may be off: w + e - e.
_LAST_PLACES = 8.0
# Share by which the same change may differ between the runs.
_MOVE_SHARE = 0.1


def initial_difference(step: StepPair) -> TraceFinding | None:
    """Compare the weights before the first step, over the ranks and between the runs."""
    if step.number:
        return None
    for name, spot in step.sides():
        for tensor, value in spot.tensors("initial").items():
            if value.other and not value.other[1] <= 1e-30:
                rank, error = value.other
                text = f"in {name} it differs from rank 0's by {share(error, value.norm)}"
                return step.finding("initial weights", "rank-weights", text, tensor, rank)
    if step.pair.shift:
        return None
    first_weights = step.one.tensors("initial")
    second_weights = step.two.tensors("initial")
    for name in [name for name in first_weights if name in second_weights]:
        error = distance(first_weights[name].sketch, second_weights[name].sketch)
        near = error <= 1e-6 * (first_weights[name].norm + second_weights[name].norm) or not finite_in_some(
            first_weights[name], second_weights[name]
        )
        if first_weights[name].digest != second_weights[name].digest and not near:
            text = f"it differs by {share(error, first_weights[name].norm)}"
            return step.finding("initial weights", "other-weights", text, name)
    return None


def changed_weights(step: StepPair) -> TraceFinding | None:
    """Report weights that changed outside the updates, on one rank or in one run."""
    for name, spot in step.sides():
        if spot.begins:
            continue
        previous = spot.find_previous_weights()
        for tensor, value in spot.tensors("begin").items():
            if value.other and tensor in previous and previous[tensor].other is None:
                rank, error = value.other
                text = f"in {name} its bits changed {_describe_time(spot)}, by {share(error, value.norm)}"
                return step.finding("weights", "changed-weights", text, tensor, rank)
    if step.one.begins or step.two.begins:
        return None
    return _further_moves(step)


def _further_moves(step: StepPair) -> TraceFinding | None:
    """Report weights that moved further in one run than in the other.

    A perturbation that is undone leaves a few units in the last place of the weights' norm. If the other run moved
    nothing, it had no perturbation, and each bit counts.
    """
    first_weights = step.one.tensors("begin")
    second_weights = step.two.tensors("begin")
    if not first_weights or not second_weights:
        # For large models they are recorded only now and then.
        return None
    first_moves = _moves(step.one)
    second_moves = _moves(step.two)
    norm = math.sqrt(max(sum(value.square for value in side.values()) for side in (first_weights, second_weights)))
    unit = max((ROUNDOFF.get(value.kind, 2.0**-24) for value in second_weights.values()), default=0.0)
    if first_moves and second_moves:
        back = _LAST_PLACES * unit * norm
    else:
        back = 0.0
    for tensor in sorted((first_moves.keys() | second_moves.keys()) & first_weights.keys() & second_weights.keys()):
        zero = (0.0,) * len(first_weights[tensor].sketch)
        a = first_moves.get(tensor, zero)
        b = second_moves.get(tensor, zero)
        far = distance(b, zero)
        near = distance(a, zero)
        if tensor in first_moves and tensor in second_moves and not math.isfinite(far + near):
            # Both are not finite.
            continue
        alone = (tensor in first_moves) != (tensor in second_moves)
        error = distance(a, b)
        if (alone and not back) or not error <= back + (_MOVE_SHARE + GROWTH * step.off) * max(far, near):
            name, spot, way = (SECOND, step.two, far) if not far < near else (FIRST, step.one, near)
            text = f"in {name} its bits changed {_describe_time(spot)}, by {share(way, first_weights[tensor].norm)}"
            return step.finding("weights", "changed-weights", text, tensor)
    return None


def _describe_time(spot: Spot) -> str:
    if spot.at:
        return f"since step {spot.at} ended"
    return "between the first forward and the update"


def _moves(spot: Spot) -> dict[str, tuple[float, ...]]:
    """Return the moves of the tensors that changed since the previous update."""
    previous = spot.find_previous_weights()
    moves = {}
    for name, tensor in spot.tensors("begin").items():
        if name in previous and previous[name].digest != tensor.digest:
            moves[name] = _difference(tensor, previous[name])
    return moves


def _difference(tensor: WholeTensor, other: WholeTensor) -> tuple[float, ...]:
    """Return the difference of two tensors' sketches."""
    return tuple(a - b for a, b in zip(tensor.sketch, other.sketch, strict=True))
