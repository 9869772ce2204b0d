"""Which samples each step and each evaluation used, on which rank.

What a loader handed out may be used later (Accelerate and Lightning read one batch ahead), so each forward is matched
with the batch that one of its inputs came from; where none matches, with the oldest that no forward had yet.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.trace.coverage import every
from lockstep.trace.reading import Part, Rank, words

__all__ = ["Sample", "Use", "computed", "counted", "evaluated", "readers", "trained", "used"]


@dataclass(frozen=True)
class Sample:
    """One sample: the digest of what is in it, its index in the data set (-1: unknown), the loader's epoch."""

    content: int
    index: int = -1
    epoch: int = -1

    @property
    def name(self) -> str:
        return f"sample {self.index}" if self.index >= 0 else f"the sample {self.content & 0xFFFFFFFFFFFFFFFF:016x}"


@dataclass
class Use:
    """What a rank used in one record.

    Attributes:
        samples: from the loaders' batches, where every forward was matched with one.
        inputs: what the model was given.
        loads: the batches.
        forwards: the model's forwards; sources: of each the batch that it computes.
    """

    samples: list[Sample] = field(default_factory=list)
    inputs: list[Sample] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    forwards: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, Any] | None] = field(default_factory=list)
    matched: bool = True

    @property
    def whole(self) -> bool:
        """Whether each forward computes one batch as it was loaded."""
        pairs = zip(self.sources, self.forwards, strict=True)
        return len(self.loads) == len(self.forwards) and every(
            load is not None and load["n"] == each["n"] for load, each in pairs
        )


def used(rank: Rank) -> list[tuple[Use, Use]]:
    """(training, evaluation) of each of a rank's records, the last behind its last step."""
    waiting: list[dict[str, Any]] = []
    kinds: dict[int, int] = {}
    found: list[tuple[Use, Use]] = []
    for record in [*rank.steps, *([rank.end] if rank.end else [])]:
        both = (Use(), Use())
        events = sorted([*record["loads"], *record["fwd"]], key=lambda event: int(event["at"]))
        seen: list[dict[str, Any]] = []
        for event in events:
            if "l" in event:
                waiting.append(event)
                continue
            if event["m"]:
                continue
            use = both[0] if event["train"] else both[1]
            use.forwards.append(event)
            use.inputs += [Sample(content) for content in words(event.get("s"))]
            load = _match(event, waiting, seen, kinds)
            use.sources.append(load)
            if load is None:
                use.matched = False
            elif not any(load is known for known in use.loads):
                use.loads.append(load)
                use.samples += _samples(load)
        found.append(both)
    return found


def _match(
    forward: dict[str, Any], waiting: list[dict[str, Any]], seen: list[dict[str, Any]], kinds: dict[int, int]
) -> dict[str, Any] | None:
    """The batch that a forward computes; it is taken from those that wait, unless it is cut into several forwards."""
    inputs = set(words(forward.get("leaf"))) - {0}
    best, most = None, 0
    for load in [*waiting, *seen]:
        common = len(inputs & set(words(load.get("leaf"))))
        if common > most:
            best, most = load, common
    if best is None:
        best = next((load for load in waiting if kinds.get(load["l"], forward["train"]) == forward["train"]), None)
    if best is None:
        last = seen[-1] if seen else None
        return last if last is not None and kinds.get(last["l"]) == forward["train"] else None
    if any(best is load for load in waiting):
        kinds.setdefault(best["l"], forward["train"])
        older = [load for load in waiting if load["l"] == best["l"] and load["e"] < best["e"]]
        waiting[:] = [load for load in waiting if load is not best and not any(load is old for old in older)]
        seen.append(best)
    return best


def _samples(load: dict[str, Any]) -> list[Sample]:
    contents = words(load.get("s"))
    indices = load.get("i") or []
    if len(indices) != len(contents):
        indices = [-1] * len(contents)
    return [Sample(content, index, load["e"]) for content, index in zip(contents, indices, strict=True)]


class Samples:
    """The samples of a part's ranks, read once."""

    def __init__(self, part: Part) -> None:
        self.of = {number: used(rank) for number, rank in part.ranks.items()}

    def at(self, step: int, kind: int) -> dict[int, Use]:
        """rank -> what it used: kind 0 in training, 1 in evaluation."""
        return {number: uses[step][kind] for number, uses in self.of.items() if step < len(uses)}


def _chosen(one: Iterable[Use], two: Iterable[Use]) -> bool:
    """Whether both sides can be compared by the loaders' batches."""
    return every(use.matched for use in (*one, *two))


def trained(one: dict[int, Use], two: dict[int, Use]) -> Iterator[dict[int, list[Sample]]]:
    """Of each side: rank -> samples, as both sides can tell them."""
    by_load = _chosen(one.values(), two.values())
    for side in (one, two):
        yield {rank: use.samples if by_load else use.inputs for rank, use in side.items()}


evaluated = trained


def computed(one: dict[int, Use], two: dict[int, Use]) -> Iterator[dict[int, list[list[int]]]]:
    """Of each side: rank -> what names the samples of each forward, as both sides can: their indices, else contents."""
    uses = [*one.values(), *two.values()]
    by_load = every(use.whole for use in uses)
    by_index = by_load and every(len(load.get("i") or ()) == load["n"] for use in uses for load in use.loads)
    for side in (one, two):
        found: dict[int, list[list[int]]] = {}
        for rank, use in side.items():
            batches = [each for each in (use.sources if by_load else use.forwards) if each is not None]
            found[rank] = [list(each["i"]) if by_index else words(each.get("s")) for each in batches]
        yield found


def readers(samples: dict[int, list[Sample]]) -> dict[int, list[Sample]]:
    """The ranks that read for themselves: one of each group where groups of as many ranks hold the same samples.

    So do the ranks of tensor parallelism, and all ranks where each evaluates everything.
    """
    groups: dict[frozenset[tuple[int, int]], list[int]] = {}
    for rank, each in samples.items():
        groups.setdefault(frozenset(Counter(sample.content for sample in each).items()), []).append(rank)
    if len({len(ranks) for ranks in groups.values()}) > 1:
        return samples
    return {ranks[0]: samples[ranks[0]] for ranks in groups.values()}


def counted(samples: dict[int, list[Sample]]) -> Counter[int]:
    """How often each content is there, over all ranks."""
    return Counter(sample.content for each in samples.values() for sample in each)
