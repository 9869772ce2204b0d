"""Whether the generators that a forward draws from agree, and whether they can."""

from typing import NamedTuple

from lockstep.trace.pairing import Spot
from lockstep.trace.step import FIRST, SECOND, Step
from lockstep.trace.verdict import Finding

__all__ = ["random_difference"]

_COMMON = ("torch", "cuda", "python", "numpy")  # generators that every process has; others are the model's own


class Forward(NamedTuple):
    """A forward of the training: what it computed, and the digests of the generators around it.

    Attributes:
        size: samples, and the numbers of each one's output. Batches that are padded otherwise draw more or less.
        seeds: digests behind it, where it drew; a draw leaves the seed as it is.
    """

    size: tuple[int, int]
    before: dict[str, str]
    after: dict[str, str]
    seeds: dict[str, str]


def random_difference(step: Step) -> tuple[str, Finding | None]:
    """(why random numbers differ by construction, or a mistake in them), of the generators that forwards draw from."""
    found = {name: _states(spot) for name, spot in step.sides()}
    drawn = {
        key
        for ranks in found.values()
        for forwards in ranks.values()
        for each in forwards
        for key in each.before
        if each.before[key] != each.after.get(key)
    }
    if not drawn:
        return "", None
    key = min(drawn, key=lambda each: (each in _COMMON, each))
    for name, ranks in found.items():
        wrong = _seeded_by_rank(step, name, key, {rank: each for rank, each in ranks.items() if each})
        if wrong is not None:
            return "", wrong
    mine, theirs = found[FIRST], found[SECOND]
    shapes = [{rank: [forward.size for forward in each] for rank, each in ranks.items()} for ranks in (mine, theirs)]
    if shapes[0] == shapes[1]:
        for rank, forwards in theirs.items():
            if [each.before.get(key) for each in forwards] != [each.before.get(key) for each in mine[rank]]:
                text = f"the state of the {key} generator differs before the forward, which draws from it"
                return "", step.finding("randomness", "random", text, key, rank)
        return "", None
    why = (
        f"the forward of step {step.at[0]} draws random numbers ({key} generator: dropout or the like), which "
        "cannot agree where a step is cut otherwise; switch it off to prove the rest. Data, rates and "
        "evaluations were compared to the end"
    )
    return why, None


def _states(spot: Spot) -> dict[int, list[Forward]]:
    """List each rank's forwards of the training."""
    return {
        rank: [
            Forward((f["n"], f.get("w", 0)), f["rng"][0], f["rng"][1], f.get("seeds", {}))
            for f in record["fwd"]
            if f["train"] and len(f.get("rng", ())) == 2
        ]
        for rank, record in spot.part.records(spot.at).items()
    }


def _seeded_by_rank(step: Step, name: str, key: str, ranks: dict[int, list[Forward]]) -> Finding | None:
    """A generator whose state depends on the rank, before a step's first forward or only behind it."""
    if not ranks:
        return None
    least = min(ranks)
    first = ranks[least][0]
    for rank, (forward, *_) in ranks.items():
        if forward.before.get(key) != first.before.get(key):
            if step.number and key in _COMMON:
                return None  # forwards of other lengths draw more or less
            text = f"in {name} the {key} generator is not as on rank {least}, and the forward draws from it"
            cause = "rank-seed" if key in _COMMON else "own-generator"
            return step.finding("randomness", cause, text, key, rank)
        if forward.size == first.size and forward.after.get(key) != first.after.get(key):
            text = f"in {name} the {key} generator is as on rank {least} before the forward, and not behind it"
            return step.finding("randomness", "own-generator", text, key, rank)
        if forward.seeds.get(key) != first.seeds.get(key) and forward.seeds and first.seeds:
            text = f"in {name} the {key} generator is as on rank {least} before the forward, which seeds it otherwise"
            return step.finding("randomness", "own-generator", text, key, rank)
    return None
