"""Whether an evaluation counts every sample once."""

from typing import Any

from lockstep.trace.pairing import Spot
from lockstep.trace.samples_used import counted, readers, trained
from lockstep.trace.step import FIRST, SECOND, Step
from lockstep.trace.verdict import Finding

__all__ = ["evaluation_difference"]


def evaluation_difference(step: Step, tail: bool) -> Finding | None:
    """The first difference of the evaluations before a step, or behind the last one."""
    spots = (step.pair.one.tail, step.pair.two.tail) if tail else (step.one, step.two)
    if spots[0] is None or spots[1] is None or any(spot is not None and spot.begins for spot in spots):
        return None
    if not tail and step.pair.shift and not step.number:
        return None
    if not tail and not step.number and "lightning" in " ".join(step.pair.one.frameworks):
        return None  # its check of a few batches before training, which are more samples on more processes
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


def _alone(step: Step, spot: Spot, samples: dict[int, Any]) -> Finding | None:
    """Ranks that have a part each, and nothing that could bring their scores together."""
    sets = [{sample.content for sample in each} for each in samples.values() if each]
    if len(sets) < 2 or any(one & two for place, one in enumerate(sets) for two in sets[:place]):
        return None
    if _heard(spot, "gather_for_metrics") or _heard(spot, "collective"):
        return None
    counts = ", ".join(f"{len(each)} on rank {rank}" for rank, each in samples.items())
    return step.finding("evaluation", "rank-evaluation", f"{counts}, and no collective follows", "samples")


def _heard(spot: Spot, kind: str) -> bool:
    """Whether an event came between an evaluation's first forward and the training that follows it."""
    for rank in spot.part.ranks.values():
        record = rank.steps[spot.at] if spot.at < len(rank.steps) else rank.end
        if record is None:
            return True  # was cut off: nothing can be said
        begin = min((f["at"] for f in record["fwd"] if not f["train"]), default=0)
        end = min((f["at"] for f in record["fwd"] if f["train"] and f["at"] > begin), default=1 << 60)
        for event in record["ev"]:
            if begin < event[0] < end and event[1] == kind and (kind != "collective" or _of_scores(event)):
                return True
    return False


def _of_scores(event: list[Any]) -> bool:
    """Whether a collective may carry scores: not a barrier, nor the one whole number of a decision to stop."""
    _, _, name, count, kind = event[:5]
    if name in ("barrier", "broadcast", "broadcast_object_list", "scatter"):
        return False
    return name.endswith("_object") or "float" in str(kind) or count > 1
