"""Whether the generators that a forward draws from agree, and whether they can."""

from lockstep.trace.pairing import Spot
from lockstep.trace.step import FIRST, SECOND, Step
from lockstep.trace.verdict import Finding

__all__ = ["random_difference"]

_COMMON = ("torch", "cuda", "python", "numpy")  # generators that every process has; others are the model's own

Forward = tuple[tuple[int, int], dict[str, str], dict[str, str]]


def random_difference(step: Step) -> tuple[str, Finding | None]:
    """(why random numbers differ by construction, or a mistake in them), of the generators that forwards draw from."""
    found = {name: _states(spot) for name, spot in step.sides()}
    drawn = {
        key
        for ranks in found.values()
        for forwards in ranks.values()
        for _, before, after in forwards
        for key in before
        if before[key] != after.get(key)
    }
    if not drawn:
        return "", None
    key = min(drawn, key=lambda each: (each in _COMMON, each))
    for name, ranks in found.items():
        wrong = _seeded_by_rank(step, name, key, {rank: each for rank, each in ranks.items() if each})
        if wrong is not None:
            return "", wrong
    mine, theirs = found[FIRST], found[SECOND]
    shapes = [{rank: [size for size, _, _ in each] for rank, each in ranks.items()} for ranks in (mine, theirs)]
    if shapes[0] == shapes[1]:
        for rank, forwards in theirs.items():
            if [before.get(key) for _, before, _ in forwards] != [before.get(key) for _, before, _ in mine[rank]]:
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
    """rank -> (shape, states before, states behind) of each forward of the training.

    Its shape is the samples and the numbers of each one's output: batches that are padded otherwise draw more or less.
    """
    return {
        rank: [((f["n"], f.get("w", 0)), *f["rng"]) for f in record["fwd"] if f["train"] and len(f.get("rng", ())) == 2]
        for rank, record in spot.part.records(spot.at).items()
    }


def _seeded_by_rank(step: Step, name: str, key: str, ranks: dict[int, list[Forward]]) -> Finding | None:
    """A generator whose state depends on the rank, before a step's first forward or only behind it."""
    if not ranks:
        return None
    least = min(ranks)
    size, before, after = ranks[least][0]
    for rank, ((mine, begin, end), *_) in ranks.items():
        if begin.get(key) != before.get(key):
            if step.number and key in _COMMON:
                return None  # forwards of other lengths draw more or less
            text = f"in {name} the {key} generator is not as on rank {least}, and the forward draws from it"
            cause = "rank-seed" if key in _COMMON else "own-generator"
            return step.finding("randomness", cause, text, key, rank)
        if mine == size and end.get(key) != after.get(key):
            text = f"in {name} the {key} generator is as on rank {least} before the forward, and not behind it"
            return step.finding("randomness", "own-generator", text, key, rank)
    return None
