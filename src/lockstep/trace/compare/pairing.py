"""Match the steps, samples and tensors of two runs.

`pair_runs` matches steps by the weights that they start with; a restarted part replaces the steps that it repeats.
`TracedSamples` matches forwards with the loaders' batches. `StepPair` is one step of both runs as the judges see it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.trace.compare.causes import TraceFinding, explain_cause
from lockstep.trace.compare.reading import RankTrace, TracePart, TraceRun, WholeTensor, distance, words

__all__ = [
    "FIRST",
    "GROWTH",
    "SECOND",
    "Matched",
    "Spot",
    "StepPair",
    "TracePair",
    "TraceSide",
    "TracedSample",
    "Use",
    "apart",
    "apart_from_each_other",
    "count_contents",
    "every",
    "finite",
    "finite_in_some",
    "list_forwards",
    "list_samples",
    "match_names",
    "pair_runs",
    "readers",
    "share",
    "unlike",
]


@dataclass(frozen=True)
class Matched:
    """Two sets of names, compared.

    Attributes:
        both: names in both.
        first, second: names in one of them only.
    """

    both: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether the sets are equal and not empty."""
        return bool(self.both) and not self.first and not self.second


def match_names(one: Iterable[str], two: Iterable[str]) -> Matched:
    """Match two sets of names, each in its own order."""
    first_names = dict.fromkeys(one)
    second_names = dict.fromkeys(two)
    common = []
    first_only = []
    for name in first_names:
        if name in second_names:
            common.append(name)
        else:
            first_only.append(name)
    second_only = []
    for name in second_names:
        if name not in first_names:
            second_only.append(name)
    return Matched(tuple(common), tuple(first_only), tuple(second_only))


def every(tests: Iterable[bool]) -> bool:
    """Whether there are tests and all pass.

    `all` is true of nothing, which would let two runs with nothing in common pass as equal.
    """
    tested = False
    for test in tests:
        if not test:
            return False
        tested = True
    return tested


@dataclass(frozen=True)
class TracedSample:
    """A sample: content digest, index in the dataset (-1: unknown), epoch of its loader."""

    content: int
    index: int = -1
    epoch: int = -1

    @property
    def name(self) -> str:
        if self.index >= 0:
            return f"sample {self.index}"
        return f"the sample {self.content & 0xFFFFFFFFFFFFFFFF:016x}"


@dataclass
class Use:
    """The batches and forwards of a rank in one record.

    Attributes:
        samples: from the loaders' batches, if every forward was matched with one.
        inputs: samples of the model's inputs.
        loads: the batches.
        forwards: the model's forwards.
        sources: the batch of each forward.
    """

    samples: list[TracedSample] = field(default_factory=list)
    inputs: list[TracedSample] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    forwards: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, Any] | None] = field(default_factory=list)
    matched: bool = True

    @property
    def whole(self) -> bool:
        """Whether each forward computes one batch as it was loaded."""
        pairs = zip(self.sources, self.forwards, strict=True)
        return len(self.loads) == len(self.forwards) and every(
            load is not None and load["n"] == forward["n"] for load, forward in pairs
        )


def _uses(rank: RankTrace) -> list[tuple[Use, Use]]:
    """Return (training, evaluation) of each of a rank's records, the end included."""
    waiting: list[dict[str, Any]] = []
    kinds: dict[int, int] = {}
    uses: list[tuple[Use, Use]] = []
    for record in [*rank.steps, *([rank.end] if rank.end else [])]:
        both = (Use(), Use())
        events = sorted([*record["loads"], *record["fwd"]], key=lambda event: int(event["at"]))
        matched_loads: list[dict[str, Any]] = []
        for event in events:
            if "l" in event:
                waiting.append(event)
                continue
            if event["m"]:
                continue
            use = both[0] if event["train"] else both[1]
            use.forwards.append(event)
            for content in words(event.get("s")):
                use.inputs.append(TracedSample(content))
            load = _match(event, waiting, matched_loads, kinds)
            use.sources.append(load)
            if load is None:
                use.matched = False
            elif not any(load is earlier for earlier in use.loads):
                use.loads.append(load)
                use.samples += _samples(load)
        uses.append(both)
    return uses


def _match(
    forward: dict[str, Any], waiting: list[dict[str, Any]], earlier: list[dict[str, Any]], kinds: dict[int, int]
) -> dict[str, Any] | None:
    """Find the batch that a forward computes, and remove it from those that wait.

    A batch that is split over several forwards is found again.
    """
    # A tensor of zeros has the digest 0, which identifies nothing.
    inputs = set(words(forward.get("leaf"))) - {0}
    best = None
    most = 0
    for load in [*waiting, *earlier]:
        common = len(inputs & set(words(load.get("leaf"))))
        if common > most:
            best = load
            most = common
    if best is None:
        # Without common contents: the oldest waiting batch of a loader that feeds such forwards.
        best = None
        for load in waiting:
            if kinds.get(load["l"], forward["train"]) == forward["train"]:
                best = load
                break
    if best is None:
        latest = earlier[-1] if earlier else None
        if latest is not None and kinds.get(latest["l"]) == forward["train"]:
            return latest
        return None
    if any(best is load for load in waiting):
        kinds.setdefault(best["l"], forward["train"])
        # Batches from earlier epochs of the loader will not be computed any more.
        older = []
        for load in waiting:
            if load["l"] == best["l"] and load["e"] < best["e"]:
                older.append(load)
        # By identity: two loads may be equal.
        passed = {id(best), *map(id, older)}
        waiting[:] = [load for load in waiting if id(load) not in passed]
        earlier.append(best)
    return best


def _samples(load: dict[str, Any]) -> list[TracedSample]:
    contents = words(load.get("s"))
    indices = load.get("i") or []
    if len(indices) != len(contents):
        indices = [-1] * len(contents)
    samples = []
    for content, index in zip(contents, indices, strict=True):
        samples.append(TracedSample(content, index, load["e"]))
    return samples


class TracedSamples:
    """The samples of a part's ranks, read once."""

    def __init__(self, part: TracePart) -> None:
        self.of = {number: _uses(rank) for number, rank in part.ranks.items()}

    def at(self, step: int, kind: int) -> dict[int, Use]:
        """Return rank -> its use; kind 0: training, 1: evaluation."""
        uses_at_step = {}
        for number, uses in self.of.items():
            if step < len(uses):
                uses_at_step[number] = uses[step][kind]
        return uses_at_step


def _by_loader(first: Iterable[Use], second: Iterable[Use]) -> bool:
    """Whether both runs can be compared by the loaders' batches."""
    return every(use.matched for use in (*first, *second))


def list_samples(first: dict[int, Use], second: dict[int, Use]) -> Iterator[dict[int, list[TracedSample]]]:
    """Yield rank -> samples of each run.

    They are from the loaders' batches if both runs have them, else from the inputs.
    """
    by_load = _by_loader(first.values(), second.values())
    for side in (first, second):
        yield {rank: use.samples if by_load else use.inputs for rank, use in side.items()}


def list_forwards(first: dict[int, Use], second: dict[int, Use]) -> Iterator[dict[int, list[list[int]]]]:
    """Yield rank -> sample keys of each forward, for each run.

    The keys are dataset indices if both runs have them, else digests.
    """
    uses = [*first.values(), *second.values()]
    by_load = every(use.whole for use in uses)
    by_index = by_load and every(len(load.get("i") or ()) == load["n"] for use in uses for load in use.loads)
    for side in (first, second):
        batches_by_rank: dict[int, list[list[int]]] = {}
        for rank, use in side.items():
            batches = []
            for batch in use.sources if by_load else use.forwards:
                if batch is not None:
                    batches.append(batch)
            batches_by_rank[rank] = [list(batch["i"]) if by_index else words(batch.get("s")) for batch in batches]
        yield batches_by_rank


def readers(samples: dict[int, list[TracedSample]]) -> dict[int, list[TracedSample]]:
    """Return the ranks that read samples of their own.

    If equally large groups of ranks have the same samples, this is one of each group: so with tensor parallelism, and
    for all ranks if each evaluates everything.
    """
    groups: dict[frozenset[tuple[int, int]], list[int]] = {}
    for rank, rank_samples in samples.items():
        groups.setdefault(frozenset(Counter(sample.content for sample in rank_samples).items()), []).append(rank)
    if len({len(ranks) for ranks in groups.values()}) > 1:
        return samples
    return {ranks[0]: samples[ranks[0]] for ranks in groups.values()}


def count_contents(samples: dict[int, list[TracedSample]]) -> Counter[int]:
    """Count each content, over all ranks."""
    return Counter(sample.content for rank_samples in samples.values() for sample in rank_samples)


# Share of a step's own move within which weights belong to that step; 0.5 is between two steps.
_NEAR = 0.45
# Updates within which each of several optimizers steps.
_MOST_UPDATES_BACK = 16


@dataclass(frozen=True)
class Spot:
    """A step of a run: its part, and its index there.

    Attributes:
        begins: it is the first of a later part.
    """

    part: TracePart
    at: int
    begins: bool = False

    def tensors(self, kind: str) -> dict[str, WholeTensor]:
        return self.part.tensors(self.at, kind)

    @property
    def hidden(self) -> bool:
        """Whether its engine reports only the norm of the gradients."""
        return bool(next(iter(self.part.records(self.at).values()))["kind"] == "DeepSpeedEngine")

    def find_previous_weights(self) -> dict[str, WholeTensor]:
        """Return this optimizer's weights as the previous updates left them, or the initial ones."""
        names = self.tensors("weights").keys()
        weights = dict[str, WholeTensor]()
        for at in range(self.at, max(-1, self.at - _MOST_UPDATES_BACK), -1):
            earlier = self.part.tensors(at, "weights") if at != self.at else {}
            for tensors in (earlier, self.part.tensors(at, "initial")):
                weights.update({name: tensors[name] for name in names - weights.keys() if name in tensors})
            if not names - weights.keys():
                break
        return weights

    def before(self) -> dict[str, WholeTensor]:
        """Return the weights at the start of the update."""
        return {**self.find_previous_weights(), **self.tensors("begin")}


@dataclass
class TraceSide:
    """One run in its effective order: a restart replaces the steps that it repeats.

    Attributes:
        tail: what follows the last step, if it was recorded.
        window: only some steps were recorded, because of `--steps` or `--max-mb`.
        stop: how it stopped before its end; "" if it ended by itself or reached the end of `--steps`.
        full: the recording ended at the limit of `--max-mb`.
    """

    name: str
    spots: list[Spot]
    tail: Spot | None
    window: bool = False
    stop: str = ""
    full: bool = False
    samples: dict[int, TracedSamples] = field(default_factory=dict)

    @property
    def frameworks(self) -> list[str]:
        return list(self.spots[0].part.first.head["frameworks"])

    @property
    def world(self) -> int:
        return self.spots[0].part.world

    def find_samples(self, spot: Spot) -> TracedSamples:
        if id(spot.part) not in self.samples:
            self.samples[id(spot.part)] = TracedSamples(spot.part)
        return self.samples[id(spot.part)]


@dataclass
class TracePair:
    """Two runs with matched steps.

    Attributes:
        shift: the step of the first run at which the second starts; negative: the other way round.
        indexed: equal indices of the dataset are the same sample in both runs; None: not known yet.
        places: each run's contents of samples -> (epoch, step) of every occurrence; []: not known yet.
    """

    one: TraceSide
    two: TraceSide
    shift: int
    indexed: bool | None = None
    places: list[dict[int, set[tuple[int, int]]]] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(index in one, index in two) of each common step."""
        start = max(0, self.shift)
        pairs = []
        for index in range(start, min(len(self.one.spots), len(self.two.spots) + self.shift)):
            pairs.append((index, index - self.shift))
        return pairs


def pair_runs(one: TraceRun, two: TraceRun) -> TracePair:
    """Match the steps of two runs by the weights that they start with."""
    first_side = _side(one)
    second_side = _side(two)
    begins = []
    for side in (first_side, second_side):
        begins.append(int(side.spots[0].part.first.steps[0]["k"]))
    if max(begins):
        return TracePair(first_side, second_side, begins[1] - begins[0])
    shift = _steps_before(second_side.spots[0], first_side.spots)
    if shift is None:
        shift = -(_steps_before(first_side.spots[0], second_side.spots) or 0)
    return TracePair(first_side, second_side, shift)


def _side(run: TraceRun) -> TraceSide:
    spots: list[Spot] = []
    for trace_part in run.parts:
        fresh = [Spot(trace_part, at) for at in range(trace_part.count)]
        at = _steps_before(fresh[0], spots) if spots else 0
        # A start with the initial weights is no resume.
        first_spot = Spot(trace_part, 0, begins=at != 0)
        spots = [*spots[:at], first_spot, *fresh[1:]]
    last_part = run.parts[-1]
    window = any(_is_window(rank) for trace_part in run.parts for rank in trace_part.ranks.values())
    full = any(rank.full for rank in last_part.ranks.values())
    ended = every(rank.end is not None and not rank.full for rank in last_part.ranks.values())
    tail = Spot(last_part, last_part.count) if ended and not window else None
    return TraceSide(run.name, spots, tail, window or full, _stop(run, last_part), full)


def _stop(run: TraceRun, last: TracePart) -> str:
    """Describe how the last start of a run stopped before its end."""
    _, _, behind = str(run.info.get("steps") or "").partition(":")
    if behind and every(_next_step(rank) >= int(behind) for rank in last.ranks.values()):
        # All requested steps were recorded.
        return ""
    for number, rank in last.ranks.items():
        if rank.failed:
            return f"stopped recording ({rank.failed})"
        if rank.end is not None and rank.end.get("error"):
            return f"ended by {rank.end['error']} on rank {number}"
        if rank.end is None and not rank.full:
            return f"was cut off on rank {number}"
    code = run.info.get("code") or 0
    if code:
        return f"ended with exit code {code}"
    return ""


def _is_window(rank: RankTrace) -> bool:
    """Whether `--steps` excluded some steps, at the start or at the end."""
    total = rank.end["k"] if rank.end else 0
    return bool(rank.steps[0]["k"]) or total > _next_step(rank)


def _next_step(rank: RankTrace) -> int:
    """Return the step after the last recorded one."""
    last_record = rank.steps[-1]
    return int(last_record["k"]) + 1 + int(last_record.get("again", 0))


def _steps_before(spot: Spot, steps: list[Spot]) -> int | None:
    """Count the steps after which the weights are those of `spot`'s start; None if unknown."""
    start = spot.tensors("initial")
    previous = steps[0].tensors("initial")
    if not start or not previous:
        return None
    if _equal(start, previous):
        return 0
    best = 0
    closest = apart(start, previous)[0]
    move = 0.0
    for count, step in enumerate(steps, 1):
        after = {**previous, **step.tensors("weights")}
        if _equal(start, after):
            return count
        far = apart(start, after)[0]
        # The first step's move is also the yardstick for nearness to the start.
        if far < closest or count == 1:
            move = apart(previous, after)[0]
        if far < closest:
            best = count
            closest = far
        previous = after
    if closest <= _NEAR * move:
        return best
    return None


def _equal(first: dict[str, WholeTensor], second: dict[str, WholeTensor]) -> bool:
    common = match_names(first, second).both
    return any(first[name].square for name in common) and every(
        first[name].digest == second[name].digest for name in common
    )


def apart(first: dict[str, WholeTensor], second: dict[str, WholeTensor]) -> tuple[float, float]:
    """Return (2-norm of the difference, larger 2-norm) over all common tensors."""
    common = first.keys() & second.keys()
    square = sum(
        distance(first[n].sketch, second[n].sketch) ** 2 for n in common if first[n].digest != second[n].digest
    )
    return math.sqrt(square), math.sqrt(max(sum(side[name].square for name in common) for side in (first, second)))


FIRST = "the first run"
SECOND = "the second run"
# Factor by which a gradient may be off more than its weights.
GROWTH = 50.0
# Share by which values that ranks share may differ.
_ALIKE = 1e-5


@dataclass
class StepPair:
    """One step of both runs.

    Attributes:
        number: steps compared before it.
        off: relative distance of the weights at its start.
        limit: share of the whole gradient's norm by which a gradient may differ.
    """

    pair: TracePair
    one: Spot
    two: Spot
    at: tuple[int, int]
    number: int
    off: float
    limit: float = 0.0
    flagged: list[str] = field(default_factory=list)

    def finding(self, stage: str, cause: str, text: str, where: str = "", rank: int = -1) -> TraceFinding:
        if cause in ("rank-weights", "unreduced", "overlapping") and any(
            apart_from_each_other(spot) for _, spot in self.sides()
        ):
            cause = "alone"
        names = dict.fromkeys([*self.pair.two.frameworks, *self.pair.one.frameworks])
        return TraceFinding(*self.at, stage, where, rank, cause, text, explain_cause(cause, names))

    def sides(self) -> Iterator[tuple[str, Spot]]:
        """Yield (name, spot) of each run, the second first: it is the one in question."""
        yield SECOND, self.two
        yield FIRST, self.one


def apart_from_each_other(spot: Spot) -> bool:
    """Whether there were several processes, but no process group before the first step."""
    ranks = spot.part.ranks.values()
    return spot.part.world > 1 and not any(rank.head["initialized"] for rank in ranks)


def finite(tensor: WholeTensor) -> bool:
    """Whether all elements of a tensor are finite."""
    return math.isfinite(tensor.square) and every(map(math.isfinite, tensor.sketch))


def finite_in_some(first: WholeTensor, second: WholeTensor) -> bool:
    """Whether at least one of two tensors is finite: else there is nothing to compare."""
    return finite(first) or finite(second)


def unlike(tensor: WholeTensor) -> bool:
    """Whether ranks differ in a tensor that they should share."""
    return tensor.other is not None and not tensor.other[1] <= _ALIKE * tensor.norm


def share(error: float, norm: float) -> str:
    """Format an error as a share of the norm."""
    if error <= 1e-7 * norm:
        return "its last bits only"
    if norm and math.isfinite(error):
        return f"{error / norm:.2g} of itself"
    return f"{error:.3g}"
