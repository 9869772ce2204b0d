"""Compare weights, updates and evaluations of two runs, and count what was compared.

`initial_difference`, `changed_weights` and `update_difference` judge the weights, `rate_difference` the rates and
settings, `state_difference` the optimizer's state, `evaluation_difference` the evaluations. `uncovered` lists what a
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
    ROUNDOFF,
    SECOND,
    Spot,
    StepPair,
    TracePair,
    TraceSide,
    counted,
    every,
    finite,
    finite_in_some,
    matched,
    readers,
    share,
    trained,
    unlike,
)
from lockstep.trace.compare.reading import WholeTensor, distance

__all__ = [
    "TrainedSoFar",
    "begin_state",
    "buffer_difference",
    "changed_weights",
    "count_data",
    "count_numbers",
    "evaluation_difference",
    "initial_difference",
    "losses_of",
    "norm_of",
    "rate_difference",
    "state_difference",
    "uncovered",
    "unended",
    "update_count",
    "update_difference",
]


def count_data(step: StepPair, compared: Counter[str]) -> None:
    """Count the samples of a step that both runs read."""
    one, two = trained(*(side.used(spot).at(spot.at, 0) for side, spot in _sides(step)))
    compared["samples"] += (counted(readers(one)) & counted(readers(two))).total()


def count_numbers(step: StepPair, compared: Counter[str]) -> None:
    """Count the tensors and losses of a step that were compared."""
    for kind, name in (("grad", "gradients"), ("weights", "weights"), ("buffers", "buffers"), ("state", "states")):
        compared[name] += len(_both(step.one.tensors(kind), step.two.tensors(kind), masks=kind == "buffers"))
    weights = _both(step.one.tensors("weights"), step.two.tensors("weights"))
    compared["updates"] += len(matched(weights, _both(step.one.before(), step.two.before())).both)
    norms = [norm_of(spot) for _, spot in _sides(step) if spot.hidden]
    compared["gradient norms"] += bool(norms) and None not in norms and every(math.isfinite(norm) for norm in norms)
    one, two = (losses_of(spot) for _, spot in _sides(step))
    if one and two:
        mine, theirs = (sum(map(math.fsum, side)) / len(side) for side in (one, two))
        if abs(mine - theirs) <= max(1e-5, step.limit) * max(abs(mine), abs(theirs)) or mine == theirs:
            compared["losses"] += min(sum(map(len, one)), sum(map(len, two)))


def unended(pair: TracePair) -> list[str]:
    """List the runs that were not recorded to their end, or not on all ranks."""
    sides = (pair.one, pair.two)
    found = [f"{side.name} {side.stop} after step {len(side.spots) - 1}" for side in sides if side.stop]
    for side in sides:
        part = side.spots[0].part
        if len(part.ranks) < part.world:
            text = f"of {part.world} ranks of {side.name} {len(part.ranks)} are recorded"
            found.append(f"{text}: of several nodes copy the files rank*.jsonl of all into one folder")
    return found


def uncovered(pair: TracePair, verdict: TraceVerdict) -> list[str]:
    """List what a proof needs and the compared steps lack."""
    if not verdict.judged:
        return ["they have no step in common"]
    if verdict.unproven:
        return []
    sides = (pair.one, pair.two)
    kinds = [("weights",), ("updates",), ("gradients", "gradient norms")]
    found = [f"no {kind[0]} were compared" for kind in kinds if not any(verdict.compared[each] for each in kind)]
    checks = [("losses", _has_losses), ("samples", _has_samples)]
    checks += [("states", _has_state)] * (not any(side.spots[0].hidden for side in sides))
    for name, has in checks:
        one, two = (any(has(side, place[number]) for place in pair.steps) for number, side in enumerate(sides))
        if one != two:
            found.append(f"{name} are in {verdict.two if two else verdict.one} alone")
    return found


def _both(one: dict[str, WholeTensor], two: dict[str, WholeTensor], *, masks: bool = False) -> list[str]:
    """The names in both with finite values; with `masks` also equal infinite ones."""
    pairs = ((name, one[name], two[name]) for name in matched(one, two).both)
    return [
        name
        for name, mine, theirs in pairs
        if (finite(mine) and finite(theirs)) or (masks and mine.digest == theirs.digest and math.isinf(mine.square))
    ]


def _sides(step: StepPair) -> tuple[tuple[TraceSide, Spot], tuple[TraceSide, Spot]]:
    return (step.pair.one, step.one), (step.pair.two, step.two)


def norm_of(spot: Spot) -> Any:
    """Return the norm that a step's first rank reports, or None."""
    return next(iter(spot.part.records(spot.at).values())).get("norm")


def losses_of(spot: Spot) -> list[list[float]]:
    """Return the losses of each rank; empty if a rank has none."""
    records = spot.part.records(spot.at).values()
    found = [[entry["v"][0] for entry in record["loss"] if entry["v"]] for record in records]
    return found if [] not in found else []


def _has_losses(side: TraceSide, at: int) -> bool:
    spot = side.spots[at]
    return any(record["loss"] for record in spot.part.records(spot.at).values())


def _has_samples(side: TraceSide, at: int) -> bool:
    spot = side.spots[at]
    return any(use.inputs or use.samples for use in side.used(spot).at(spot.at, 0).values())


def _has_state(side: TraceSide, at: int) -> bool:
    return bool(side.spots[at].tensors("state"))


def evaluation_difference(step: StepPair, tail: bool) -> TraceFinding | None:
    """Find the first difference of the evaluations before a step, or after the last (`tail`)."""
    spots = (step.pair.one.tail, step.pair.two.tail) if tail else (step.one, step.two)
    if spots[0] is None or spots[1] is None or any(spot is not None and spot.begins for spot in spots):
        return None
    if not tail and step.pair.shift and not step.number:
        return None
    if not tail and not step.number and "lightning" in " ".join(step.pair.one.frameworks):
        return None  # Lightning's sanity check takes a few batches, so more samples with more processes
    uses = [
        {rank: use for rank, use in side.used(spot).at(spot.at, 1).items() if use.forwards}
        for side, spot in ((step.pair.one, spots[0]), (step.pair.two, spots[1]))
    ]
    if not uses[0] or not uses[1]:
        return None
    one, two = trained(*uses)
    mine, theirs = counted(readers(one)), counted(readers(two))
    if mine == theirs:
        return _alone(step, spots[1], two) or _alone(step, spots[0], one)
    names = {s.content: s.name for side in (one, two) for each in side.values() for s in each}
    for name, counts, expected, samples, spot in (
        (SECOND, theirs, mine, two, spots[1]),
        (FIRST, mine, theirs, one, spots[0]),
    ):
        more, less = counts - expected, expected - counts
        if more and not less and set(more) <= set(expected):
            if _heard(spot, "gather_for_metrics"):
                return None
            content = next(iter(more))
            rank = [rank for rank, each in samples.items() if any(s.content == content for s in each)][-1]
            text = f"in {name} {names[content]} is counted {counts[content]} times instead of {expected[content]}"
            return step.finding("evaluation", "padded-evaluation", text, f"{sum(counts.values())} samples", rank)
    less, more = mine - theirs, theirs - mine
    if less and not more:
        text = f"{sum(theirs.values())} samples instead of {sum(mine.values())}: {names[next(iter(less))]} is missing"
        return step.finding("evaluation", "lost-evaluation", text, "samples")
    text = f"{sum(more.values())} of {sum(theirs.values())} samples are other ones"
    return step.finding("evaluation", "evaluation", text, "samples")


def _alone(step: StepPair, spot: Spot, samples: dict[int, Any]) -> TraceFinding | None:
    """Report ranks that evaluate a part each without a collective that could combine the scores."""
    sets = [{sample.content for sample in each} for each in samples.values() if each]
    if len(sets) < 2 or any(one & two for place, one in enumerate(sets) for two in sets[:place]):
        return None
    if _heard(spot, "gather_for_metrics") or _heard(spot, "collective"):
        return None
    counts = ", ".join(f"{len(each)} on rank {rank}" for rank, each in samples.items())
    return step.finding("evaluation", "rank-evaluation", f"{counts}, and no collective follows", "samples")


def _heard(spot: Spot, kind: str) -> bool:
    """Whether an event occurred between an evaluation's first forward and the next training."""
    for rank in spot.part.ranks.values():
        record = rank.steps[spot.at] if spot.at < len(rank.steps) else rank.end
        if record is None:
            return True  # was cut off: unknown
        begin = min((f["at"] for f in record["fwd"] if not f["train"]), default=0)
        end = min((f["at"] for f in record["fwd"] if f["train"] and f["at"] > begin), default=1 << 60)
        for event in record["ev"]:
            if begin < event[0] < end and event[1] == kind and (kind != "collective" or _of_scores(event)):
                return True
    return False


def _of_scores(event: list[Any]) -> bool:
    """Whether a collective may carry scores.

    A barrier does not, nor does the single integer of a decision to stop.
    """
    _, _, name, count, kind = event[:5]
    if name in ("barrier", "broadcast", "broadcast_object_list", "scatter"):
        return False
    return name.endswith("_object") or "float" in str(kind) or count > 1


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
        hidden = record["kind"] == "DeepSpeedEngine"  # it reports only the norm
        self.got |= hidden or bool(gradients)
        self.counts |= (hidden and record.get("norm") != 0) or any(whole.square for whole in gradients)
        old = spot.before()
        self.moved |= any(
            name not in old or old[name].digest != whole.digest for name, whole in spot.tensors("weights").items()
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


_OWN = 1e-2  # share of itself by which a gradient may differ while its update is still comparable
_SAME = 1e-3  # share by which the updates of bitwise equal gradients may differ
_UPDATE = 0.1  # share by which updates may differ, in addition to rounding of their gradients
_FAR = 0.8  # no healthy update differs by this share


def update_count(step: StepPair) -> TraceFinding | None:
    """Report updates without a backward before them."""
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


def rate_difference(step: StepPair) -> TraceFinding | None:
    """Compare the rates and settings of the parameter groups."""
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


def _rate(step: StepPair, number: int, rate: float, expected: float) -> TraceFinding:
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


def _schedules(step: StepPair, side: int) -> int:
    """Count the steps of a run's schedules up to this step, on its first rank."""
    spots = (step.pair.one, step.pair.two)[side].spots[: step.at[side] + 1]
    records: Iterator[dict[str, Any]] = (next(iter(spot.part.records(spot.at).values())) for spot in spots)
    return sum(event[1] == "schedule" for record in records for event in record["ev"])


def _number(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def _unequal(one: dict[str, Any], two: dict[str, Any]) -> str:
    """The first setting in which two groups differ; the rate before the others."""
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


def update_difference(step: StepPair) -> TraceFinding | None:
    """Report weights that the same gradient moved differently."""
    for name, spot in step.sides():
        wrong = next(((n, w) for n, w in spot.tensors("weights").items() if unlike(w) and w.other), None)
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} after the update it differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer", "update", text, wrong[0], rank)
    return _moved_otherwise(step)


def _moved_otherwise(step: StepPair) -> TraceFinding | None:
    """Report updates that the gradients do not explain.

    A tensor is judged alone if its gradient is bitwise equal. Otherwise all are judged together: for an element with a
    gradient of rounding noise, Adam takes a step of full length in a random direction, and a tensor may have many.
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


def buffer_difference(step: StepPair) -> TraceFinding | None:
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


def begin_state(step: StepPair) -> TraceFinding | None:
    """Compare the optimizer state at a resume: over the ranks, and with the other run's."""
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


def state_difference(step: StepPair) -> TraceFinding | None:
    """Compare the optimizer states, given that the weights agree."""
    for name, spot in step.sides():
        wrong = next(((n, w) for n, w in spot.tensors("state").items() if unlike(w) and w.other), None)
        if wrong and wrong[1].other:
            rank, error = wrong[1].other
            text = f"in {name} it differs from rank 0's by {share(error, wrong[1].norm)}"
            return step.finding("optimizer state", "state", text, wrong[0], rank)
    return _states_off(step, step.one.tensors("state"), step.two.tensors("state"))


def _states_off(step: StepPair, mine: dict[str, WholeTensor], theirs: dict[str, WholeTensor]) -> TraceFinding | None:
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


_LAST_PLACES = 8.0  # units in the last place by which restored weights may be off: w + e - e
_ALIKE = 0.1  # share by which the same change may differ between the runs


def initial_difference(step: StepPair) -> TraceFinding | None:
    """Compare the weights before the first step, over the ranks and between the runs."""
    if step.number:
        return None
    for name, spot in step.sides():
        for tensor, whole in spot.tensors("initial").items():
            if whole.other and not whole.other[1] <= 1e-30:
                rank, error = whole.other
                text = f"in {name} it differs from rank 0's by {share(error, whole.norm)}"
                return step.finding("initial weights", "rank-weights", text, tensor, rank)
    if step.pair.shift:
        return None
    mine, theirs = step.one.tensors("initial"), step.two.tensors("initial")
    for name in [name for name in mine if name in theirs]:
        error = distance(mine[name].sketch, theirs[name].sketch)
        near = error <= 1e-6 * (mine[name].norm + theirs[name].norm) or not finite_in_some(mine[name], theirs[name])
        if mine[name].digest != theirs[name].digest and not near:
            text = f"it differs by {share(error, mine[name].norm)}"
            return step.finding("initial weights", "other-weights", text, name)
    return None


def changed_weights(step: StepPair) -> TraceFinding | None:
    """Report weights that changed outside the updates, on one rank or in one run."""
    for name, spot in step.sides():
        if spot.begins:
            continue
        left = spot.left()
        for tensor, whole in spot.tensors("begin").items():
            if whole.other and tensor in left and left[tensor].other is None:
                rank, error = whole.other
                text = f"in {name} its bits changed {_since(spot)}, by {share(error, whole.norm)}"
                return step.finding("weights", "changed-weights", text, tensor, rank)
    if step.one.begins or step.two.begins:
        return None
    return _moved_alone(step)


def _moved_alone(step: StepPair) -> TraceFinding | None:
    """Report weights that moved further in one run than in the other.

    A perturbation that is undone leaves a few units in the last place of the weights' norm. If the other run moved
    nothing, it had no perturbation, and each bit counts.
    """
    mine, theirs = step.one.tensors("begin"), step.two.tensors("begin")
    if not mine or not theirs:
        return None  # of large models they are recorded now and then
    moved, others = _moved(step.one), _moved(step.two)
    norm = math.sqrt(max(sum(whole.square for whole in side.values()) for side in (mine, theirs)))
    unit = max((ROUNDOFF.get(whole.kind, 2.0**-24) for whole in theirs.values()), default=0.0)
    back = _LAST_PLACES * unit * norm if moved and others else 0.0
    for tensor in sorted((moved.keys() | others.keys()) & mine.keys() & theirs.keys()):
        zero = (0.0,) * len(mine[tensor].sketch)
        one, two = moved.get(tensor, zero), others.get(tensor, zero)
        far, near = distance(two, zero), distance(one, zero)
        if tensor in moved and tensor in others and not math.isfinite(far + near):
            continue  # both are not finite
        alone = (tensor in moved) != (tensor in others)
        error = distance(one, two)
        if (alone and not back) or not error <= back + (_ALIKE + GROWTH * step.off) * max(far, near):
            name, spot, way = (SECOND, step.two, far) if not far < near else (FIRST, step.one, near)
            text = f"in {name} its bits changed {_since(spot)}, by {share(way, mine[tensor].norm)}"
            return step.finding("weights", "changed-weights", text, tensor)
    return None


def _since(spot: Spot) -> str:
    return f"since step {spot.at - 1} ended" if spot.at else "between the first forward and the update"


def _moved(spot: Spot) -> dict[str, tuple[float, ...]]:
    """The moves of the tensors that changed since the previous update."""
    left = spot.left()
    return {
        name: tuple(a - b for a, b in zip(whole.sketch, left[name].sketch, strict=True))
        for name, whole in spot.tensors("begin").items()
        if name in left and left[name].digest != whole.digest
    }
