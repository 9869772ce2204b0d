"""Compare the inputs of a step: samples, random generators, and the sets of tensors.

`data_difference` compares the samples over all ranks, `random_difference` the generators around forwards. The
`*_sets` functions name parameters, gradients, buffers and optimizer states that one run lacks. An empty set, or one
that lacks an element of the other, never counts as the same. `kept_gradient` recognises gradients that were not
cleared.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from lockstep.trace.compare.causes import TraceFinding
from lockstep.trace.compare.judge_gradient import same_effect
from lockstep.trace.compare.pairing import (
    FIRST,
    SECOND,
    Matched,
    Spot,
    StepPair,
    TracedSample,
    TraceSide,
    Use,
    counted,
    every,
    matched,
    readers,
    trained,
)
from lockstep.trace.compare.reading import WholeTensor

__all__ = [
    "buffer_sets",
    "data_difference",
    "gradient_sets",
    "kept_gradient",
    "parameter_sets",
    "random_difference",
    "state_sets",
    "unmatched_gradients",
]


_SHOWN = 6


def data_difference(step: StepPair) -> TraceFinding | None:
    """Find the first difference in the samples of a step, over all ranks."""
    one, two = trained(_uses(step.pair.one, step.at[0]), _uses(step.pair.two, step.at[1]))
    mine, theirs = counted(one), counted(two)
    if mine == theirs or not mine or not theirs or counted(readers(one)) == counted(readers(two)):
        return None
    for name, samples in ((SECOND, two), (FIRST, one)):
        parts = [Counter(sample.content for sample in each) for each in samples.values() if each]
        if len(parts) > 1 and every(part == parts[0] for part in parts):
            return step.finding(
                "data", "overlapping", f"in {name} all ranks hold {_listed(samples[min(samples)])}", "samples", 1
            )
    count, expected = sum(theirs.values()), sum(mine.values())
    if max(count, expected) >= 1.5 * min(count, expected):
        cause = "batch-size" if count > expected else "batch-share"
        return step.finding("data", cause, f"{count} samples instead of {expected}", "samples")
    indices = [Counter(s.index for each in side.values() for s in each) for side in (one, two)]
    if indices[0] == indices[1] and -1 not in indices[0]:
        if same_effect(step):  # different padding, or samples that the loss ignores
            return None
        wrong = next(iter((theirs - mine).keys()))
        rank, sample = next((rank, s) for rank, each in two.items() for s in each if s.content == wrong)
        return step.finding("data", "other-contents", f"{sample.name} has other contents", "samples", rank)
    return (
        _repeated(step, one, two) or _overlap(step, one, two) or _elsewhere(step, one, two) or _ordered(step, one, two)
    )


def _uses(side: TraceSide, at: int) -> dict[int, Use]:
    spot = side.spots[at]
    return dict(side.used(spot).at(spot.at, 0))


def _repeated(
    step: StepPair, one: dict[int, list[TracedSample]], two: dict[int, list[TracedSample]]
) -> TraceFinding | None:
    """Report an epoch with the order of an earlier one."""
    for side, at, samples in ((step.pair.two, step.at[1], two), (step.pair.one, step.at[0], one)):
        epoch = max((sample.epoch for each in samples.values() for sample in each), default=-1)
        if epoch < 1:
            continue
        for before in range(at - 1, -1, -1):
            found, _ = trained(_uses(side, before), {})
            earlier = max((sample.epoch for each in found.values() for sample in each), default=-1)
            if earlier < epoch and counted(found) == counted(samples):
                text = f"epoch {epoch + 1} reads what epoch {earlier + 1} read in step {before}"
                return step.finding("data", "set-epoch", text, "samples")
    return None


def _elsewhere(
    step: StepPair, one: dict[int, list[TracedSample]], two: dict[int, list[TracedSample]]
) -> TraceFinding | None:
    """Report samples that the first run has in other steps.

    That is a resume that starts too late or too early, or a lost sample.
    """
    mine, theirs = counted(one), counted(two)
    new, lost = theirs - mine, mine - theirs
    names = {s.content: s.name for side in (one, two) for each in side.values() for s in each}
    resumed = step.pair.shift or step.one.begins or step.two.begins
    text = (
        f"{_named(lost, names)} missing, {_named(new, names)} in {'its' if sum(lost.values()) == 1 else 'their'} place"
    )
    epochs = [max((s.epoch for each in side.values() for s in each), default=0) for side in (one, two)]
    for away in (1, -1, 2, -2, *(-each for each in range(3, step.at[0] + 1)), *range(3, 50)):
        at = step.at[0] + away
        if not 0 <= at < len(step.pair.one.spots):
            continue
        found, _ = trained(_uses(step.pair.one, at), {})
        there = counted(found)
        whole = there == theirs
        part = abs(away) == 1 and sum(lost.values()) < sum(mine.values()) and not new - there
        if (whole and (resumed or abs(away) <= 2)) or (part and resumed):
            text = f"it reads what the first run reads in step {at}" if whole else text
            if away > 0:
                return step.finding("data", "late-resume" if resumed else "lost-samples", text, "samples")
            return step.finding("data", "early-resume" if resumed else "repeated-samples", text, "samples")
    if (
        sum(lost.values()) < sum(mine.values())
        and epochs[0] == epochs[1]
        and sum(new.values()) * 2 <= sum(mine.values())
    ):
        repeated = [content for content in new if theirs[content] > 1 or content in _before(step)]
        cause = "repeated-samples" if repeated or not lost else "lost-samples"
        return step.finding("data", cause, text, "samples", _rank(two, new))
    return None


def _before(step: StepPair) -> set[int]:
    """The samples that the second run read in the last 200 steps."""
    found: set[int] = set()
    for at in range(max(0, step.at[1] - 200), step.at[1]):
        samples, _ = trained(_uses(step.pair.two, at), {})
        found |= set(counted(samples))
    return found


def _epochs(
    step: StepPair, one: dict[int, list[TracedSample]], two: dict[int, list[TracedSample]]
) -> list[dict[int, Counter[int]]]:
    """Return rank -> samples of this step's epoch, for both runs, over the common steps."""
    found: list[dict[int, Counter[int]]] = []
    for side, place, first in ((step.pair.one, 0, one), (step.pair.two, 1, two)):
        epoch = next((s.epoch for each in first.values() for s in each), -1)
        ranks: dict[int, Counter[int]] = {}
        for pair in step.pair.steps:
            samples, _ = trained(_uses(side, pair[place]), {})
            for rank, each in samples.items():
                ranks.setdefault(rank, Counter()).update(s.content for s in each if s.epoch == epoch)
        found.append(ranks)
    return found


def _overlap(
    step: StepPair, one: dict[int, list[TracedSample]], two: dict[int, list[TracedSample]]
) -> TraceFinding | None:
    """Report ranks that share more samples of an epoch than padding explains."""
    mine, theirs = _epochs(step, one, two)
    if len(theirs) < 2 or step.two.begins:
        return None
    total = sum(theirs.values(), Counter())
    several = [content for content in total if sum(content in part for part in theirs.values()) > 1]
    expected = sum(mine.values(), Counter())
    if len(several) > max(2, len(total) // 10) and max(expected.values(), default=1) == 1:
        text = f"in {SECOND} {len(several)} of {len(total)} samples of the epoch come on more than one rank"
        return step.finding("data", "other-shuffle", text, "samples")
    return None


def _ordered(step: StepPair, one: dict[int, list[TracedSample]], two: dict[int, list[TracedSample]]) -> TraceFinding:
    """Report the same samples in another order, or other samples."""
    mine, theirs = (sum(ranks.values(), Counter()) for ranks in _epochs(step, one, two))
    common = sum((mine & theirs).values())
    if 2 * common >= min(sum(mine.values()), sum(theirs.values())):
        text = f"the epoch has the same samples ({common} in what was recorded of it), but not in the same steps"
        return step.finding("data", "other-order", text, "samples")
    return step.finding("data", "other-samples", f"{_listed(two[min(two)])} on rank {min(two)}", "samples")


def _rank(samples: dict[int, list[TracedSample]], new: Counter[int]) -> int:
    return next((rank for rank, each in samples.items() if any(s.content in new for s in each)), -1)


def _named(contents: Counter[int], names: dict[int, str]) -> str:
    shown = [names.get(content, "a sample") for content in contents]
    if not shown:
        return "none"
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _listed(samples: list[TracedSample]) -> str:
    return _named(Counter(dict.fromkeys((s.content for s in samples), 1)), {s.content: s.name for s in samples})


_COMMON = ("torch", "cuda", "python", "numpy")  # generators that every process has; others are the model's own


class Forward(NamedTuple):
    """A training forward: its sizes, and digests of the generators around it.

    Attributes:
        size: samples, and elements of each one's output. Differently padded batches draw more or less.
        seeds: digests of the seeds after it, if it drew; a draw itself leaves the seed unchanged.
    """

    size: tuple[int, int]
    before: dict[str, str]
    after: dict[str, str]
    seeds: dict[str, str]


def random_difference(step: StepPair) -> tuple[str, TraceFinding | None]:
    """Compare the generators that the forwards draw from.

    Returns:
        (why random numbers differ by construction or "", a mistake in them or None).
    """
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
    """List each rank's training forwards."""
    return {
        rank: [
            Forward((f["n"], f.get("w", 0)), f["rng"][0], f["rng"][1], f.get("seeds", {}))
            for f in record["fwd"]
            if f["train"] and len(f.get("rng", ())) == 2
        ]
        for rank, record in spot.part.records(spot.at).items()
    }


def _seeded_by_rank(step: StepPair, name: str, key: str, ranks: dict[int, list[Forward]]) -> TraceFinding | None:
    """Report a generator with a rank-dependent state.

    It may differ before a step's first forward, or only after it.
    """
    if not ranks:
        return None
    least = min(ranks)
    first = ranks[least][0]
    for rank, (forward, *_) in ranks.items():
        if forward.before.get(key) != first.before.get(key):
            if step.number and key in _COMMON:
                return None  # forwards of other lengths draw different amounts
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


_FIT = 1e-3  # share of a gradient that the sum of the two may leave unexplained
_PART = 0.05  # smallest share of a kept gradient


def parameter_sets(step: StepPair) -> TraceFinding | None:
    """Compare the tensors of the two optimizers, and the parameters of the two models."""
    if not step.number and not step.pair.shift:
        models = matched(_model(step.one), _model(step.two))
        for name, only in ((SECOND, models.first), (FIRST, models.second)):
            if only:
                return step.finding("initial weights", "other-model", f"{name} has no {_list_names(only)}", only[0])
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
            return step.finding("parameters", "frozen", f"{name} does not train {_list_names(frozen)}", frozen[0])
    return None


def _alone(step: StepPair, sets: Matched) -> TraceFinding | None:
    """Report tensors that only one optimizer has and trains."""
    sides = (
        (SECOND, step.two, step.one, sets.second, sets.first),
        (FIRST, step.one, step.two, sets.first, sets.second),
    )
    for name, spot, _, own, lacks in sides:
        if own and not set(own) & set(_model(spot)):
            text = f"{name} updates {_list_names(own)} in place of {_list_names(lacks or ['none'])}"
            return step.finding("parameters", "stale-optimizer", text, (lacks or own)[0])
    for name, spot, other, _, lacks in sides:
        model = _model(spot)
        only = [each for each in lacks if each in _trained(other) or each not in model]
        if only:
            cause = "frozen" if set(only) <= spot.part.names(spot.at, "frozen") else "outside-optimizer"
            cause = cause if set(only) <= set(model) else "other-model"
            return step.finding("parameters", cause, f"{name} does not update {_list_names(only)}", only[0])
    return None


def _trained(spot: Spot) -> set[str]:
    """Names of the tensors that the step trains."""
    if spot.hidden:
        return spot.tensors("weights").keys() - spot.part.names(spot.at, "frozen")
    return set(spot.tensors("grad"))


def _model(spot: Spot) -> list[str]:
    """The names of the model's parameters, without positions in an optimizer's group."""
    return [name for name in spot.part.tensors(0, "initial") if not _numbered(name)]


def _numbered(name: str) -> bool:
    """Whether the name is a position in a group, of a tensor outside the model."""
    head, _, tail = name.partition(".")
    return head.startswith("group") and head[5:].isdigit() and tail.isdigit()


def unmatched_gradients(step: StepPair) -> list[str]:
    """List the gradients that only one run has and that are not all zero."""
    if step.one.hidden or step.two.hidden:
        return []
    mine, theirs = step.one.tensors("grad"), step.two.tensors("grad")
    sets = matched(mine, theirs)
    return [name for name in chain(sets.first, sets.second) if (mine.get(name) or theirs[name]).square != 0]


def gradient_sets(step: StepPair) -> TraceFinding | None:
    """Compare the sets of tensors with a gradient."""
    only = unmatched_gradients(step)
    if not only:
        return None
    side = SECOND if only[0] in step.one.tensors("grad") else FIRST
    return step.finding("gradient", "no-gradient", f"{side} has no gradient of {_list_names(only)}", only[0])


def buffer_sets(step: StepPair) -> TraceFinding | None:
    """Compare the sets of the two models' buffers."""
    sets = matched(step.one.tensors("buffers"), step.two.tensors("buffers"))
    for name, only in ((SECOND, sets.first), (FIRST, sets.second)):
        if only:
            return step.finding("buffers", "other-model", f"{name} has no {_list_names(only)}", only[0])
    return None


def state_sets(step: StepPair) -> TraceFinding | None:
    """Compare the two optimizers' states for tensors that both train."""
    mine, theirs = step.one.tensors("state"), step.two.tensors("state")
    trained = step.one.tensors("grad").keys() & step.two.tensors("grad").keys()
    sets = matched(mine, theirs)
    for name, only in ((SECOND, sets.first), (FIRST, sets.second)):
        known = [each for each in only if each.rpartition("/")[0] in trained]
        if known and mine and theirs:  # of large models they are recorded now and then
            return step.finding("optimizer state", "state", f"{name} has no {_list_names(known)}", known[0])
    return None


def kept_gradient(step: StepPair) -> TraceFinding | None:
    """Report a gradient that still contains the previous update's, which was not cleared.

    It is then a sum of this step's gradient and the same optimizer's last one, up to clipping.
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
        for a, b in ((1.0, 1.0), _shares(found, here, before)):  # unclipped, and clipped
            left = math.dist(found, [a * x + b * y for x, y in zip(here, before, strict=True)])
            part = b * math.hypot(*before) / length if length else 0.0
            if a > 0 and part > _PART and left <= max(_FIT, step.limit) * length:
                text = f"in {name} {part:.2g} of its length are the gradient of the update before"
                return step.finding("gradient", "kept-gradient", text, "all gradients")
    return None


def _earlier(spot: Spot) -> Iterator[dict[str, WholeTensor]]:
    """Yield the gradients of the same optimizer's previous update, if there is one."""
    number = next(iter(spot.part.records(spot.at).values()))["opt"]
    for at in range(spot.at - 1, -1, -1):
        if next(iter(spot.part.records(at).values()))["opt"] == number:
            yield spot.part.tensors(at, "grad")
            return


def _shares(found: list[float], one: list[float], two: list[float]) -> tuple[float, float]:
    """Fit a vector by two others in least squares; (0, 0) if these are parallel."""
    a, b, c = _dot(one, one), _dot(one, two), _dot(two, two)
    determinant = a * c - b * b
    if not determinant > 1e-6 * a * c:
        return 0.0, 0.0
    d, e = _dot(found, one), _dot(found, two)
    return (c * d - b * e) / determinant, (a * e - b * d) / determinant


def _dot(one: list[float], two: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(one, two, strict=True))


def _list_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}"
