"""Find why a gradient differs although weights and samples agree: forward, loss, reduction or clipping.

`gradient_difference` returns the first of these stages that differs. `gradient_limit` is the tolerance,
`items_unequal` and `normalisation_difference` check how the losses are normalised.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from lockstep.trace.compare.causes import TraceFinding
from lockstep.trace.compare.pairing import (
    FIRST,
    GROWTH,
    SECOND,
    Spot,
    StepPair,
    Use,
    every,
    list_forwards,
    share,
    unlike,
)
from lockstep.trace.compare.reading import distance, floats, words
from lockstep.trace.compare.rounding import CEILING, INNER, LEAST, ROUNDOFF, order_bound

__all__ = [
    "first_module",
    "gradient_difference",
    "gradient_limit",
    "items_unequal",
    "own_statistics",
    "same_effect",
]


_FINE = ROUNDOFF["float32"]
# Factor on the measured distance of the same samples' outputs.
_DISTANCE_FACTOR = 8.0

# (rank, (signed sum of an output, sum of its squares))
Output = tuple[int, tuple[float, float]]


def gradient_limit(step: StepPair) -> float:
    """Return the tolerance of a gradient tensor, as a share of the whole gradient's norm.

    A float32 gradient may differ by what another summation order explains. With a coarser dtype four roundings are
    allowed; more, up to 16, only if the outputs of the same samples are further apart in the first step.
    """
    unit = _unit(step)
    inner = _coarsest(step)
    count = 0
    for spot in (step.one, step.two):
        losses = sum(len(record["loss"]) for record in spot.part.records(spot.at).values())
        count = max(count, losses + spot.part.world)
    # Coarser roundings go either way, so their sum grows with the root of their number.
    fine = unit <= _FINE
    if fine:
        rounding = order_bound(count, unit, step.number)
    else:
        rounding = LEAST * math.sqrt(count) * unit
    if step.number or step.one.part.world != step.two.part.world:
        gap = _output_distance(step)
        # Rounding does not explain a larger gap, so it does not widen the limit.
        measured = _DISTANCE_FACTOR * gap if gap <= INNER * inner else 0.0
        # Of the coarsest dtype's roundings, between least and most of which the measured distance decides.
        rounding += min(INNER * inner, max(LEAST * inner, measured))
    return min(CEILING, rounding + GROWTH * step.off)


def _coarsest(step: StepPair) -> float:
    """Return the unit roundoff of the modules' coarsest dtype, from the first step."""
    kinds = set()
    for spot in (step.one, step.two):
        for record in spot.part.records(0).values():
            for forward in record["fwd"]:
                kinds.add(forward.get("ac", ""))
    return max([_unit(step), *(ROUNDOFF.get(dtype, 0.0) for dtype in kinds)])


def _unit(step: StepPair) -> float:
    """Return the unit roundoff of the gradients' dtype."""
    kinds = set()
    for spot in (step.one, step.two):
        for tensor in spot.tensors("grad").values():
            kinds.add(tensor.kind)
    return max((ROUNDOFF.get(dtype, 0.0) for dtype in kinds), default=_FINE)


def _output_distance(step: StepPair) -> float:
    """Return the relative distance of the same samples' outputs in the first step."""
    start = max(0, step.pair.shift)
    first_outputs = _outputs_of(step.pair.one.spots[start])
    second_outputs = _outputs_of(step.pair.two.spots[start - step.pair.shift])
    pairs = []
    for key in first_outputs.keys() & second_outputs.keys():
        pairs.append((first_outputs[key][1], second_outputs[key][1]))
    square = sum(a[1] for a, _ in pairs)
    # The signs are random: the mean of these squares is the squared distance.
    error = sum((a[0] - b[0]) ** 2 for a, b in pairs)
    if square > 0 and math.isfinite(error + square):
        return math.sqrt(error / square)
    return 0.0


def _outputs_of(spot: Spot) -> dict[tuple[int, int, int, int], Output]:
    """Return (root, sample digest, elements, earlier occurrences) -> (rank, its output)."""
    outputs: dict[tuple[int, int, int, int], Output] = {}
    for rank, record in spot.part.records(spot.at).items():
        for forward in record["fwd"]:
            values = floats(forward.get("out"))
            samples = words(forward.get("s"))
            if not forward["train"] or len(values) != 2 * len(samples):
                continue
            for index, sample in enumerate(samples):
                count = 0
                while (forward["m"], sample, forward["w"], count) in outputs:
                    count += 1
                outputs[forward["m"], sample, forward["w"], count] = rank, (values[2 * index], values[2 * index + 1])
    return outputs


# Share by which equal factors may differ, at least.
_LEAST = 1e-4
# Roundings of the coarsest dtype by which factors may be off.
_ROUNDINGS = 2.0
# Standard errors by which a mean factor may be off.
_STANDARD_ERRORS = 6.0
# Samples beyond one a forward that are needed to know the error of a mean.
_FREEDOM = 4
# Share by which a ratio may miss a whole number.
_RATIO = 1e-3

# Rank -> items of each of its losses.
Counts = dict[int, list[int]]
# (rank, number of its forward in the step)
Forward = tuple[int, int]


@dataclass(frozen=True)
class _Factor:
    """Factor by which two forwards' common samples weigh more in the second run.

    Attributes:
        mean: its logarithm.
        error: the standard error of `mean`.
        apart: the largest distance of a single sample from it.
    """

    one: Forward
    two: Forward
    mean: float
    error: float
    samples: int
    apart: float


def items_unequal(step: StepPair) -> TraceFinding | None:
    """Report items that weigh more on one rank than on another, in one run only."""
    factors = _factors(step)
    common = _mean([each.mean for each in factors])
    least = _tolerance(step)
    if not factors or every(abs(each.mean - common) <= max(least, _STANDARD_ERRORS * each.error) for each in factors):
        return None
    low, high = (pick(factors, key=lambda each: each.mean) for pick in (min, max))
    times = math.exp(high.mean - low.mean)
    for name, column in _keys(step):
        counts = [_counts(step, side, name, column) for side in (0, 1)]
        for ways in product(("all", "rank", "forward"), repeat=2):
            if _divisors_explain(factors, counts, ways, least):
                return _rank_average(step, times, counts, ways)
    for name, sign, spot, other in ((SECOND, 1.0, step.two, step.one), (FIRST, -1.0, step.one, step.two)):
        if _are_averaged(_forwards(factors, sign), factors, (spot.part.world, other.part.world), least):
            text = (
                f"in {name} each loss is divided by its own items, so one counts {times:.6g} times as much as another"
            )
            return step.finding("normalisation", "rank-average", text, "items")
    if sum(each.samples - 1 for each in factors) < _FREEDOM:
        # Too few samples to know how far such lengths vary by themselves.
        return None
    text = (
        f"an item of rank {high.two[0]} counts {times:.6g} times as much as one of rank {low.two[0]}, unlike the first"
    )
    return step.finding("normalisation", "loss", f"in the second run {text}", "items", high.two[0])


def _forwards(factors: list[_Factor], sign: float) -> dict[Forward, list[float]]:
    """Return the log weights of each forward's samples, relative to the other run.

    Args:
        sign: 1 for the second run, -1 for the first.
    """
    means: dict[Forward, list[float]] = {}
    for factor in factors:
        means.setdefault(factor.two if sign > 0 else factor.one, []).append(sign * factor.mean)
    return means


def _are_averaged(
    means: dict[Forward, list[float]], factors: list[_Factor], worlds: tuple[int, int], least: float
) -> bool:
    """Whether each forward of a run has its own divisor, given only their sum.

    A loss over n items weighs each N / n times as much as one over the N of a step; the sum of n / N is 1. Losses of
    a correct run on W ranks are W times as large, since DDP divides; those of A forwards a rank may be divided by A.

    Args:
        worlds: ranks of the run with `means`, and of the other run.
    """
    spread = [max(values) - min(values) for values in means.values()]
    if len(means) < 2 or max([*spread, *(factor.apart for factor in factors)]) > least:
        return False
    total = sum(math.exp(-_mean(values)) for values in means.values()) / worlds[1]
    return any(abs(total / whole - 1.0) <= least for whole in (1.0, len(means) / worlds[0]))


def same_effect(step: StepPair) -> bool:
    """Whether each sample moves the loss equally in both runs, up to its forward's divisor."""
    factors = _factors(step)
    return any(factor.samples > 1 for factor in factors) and every(
        factor.apart <= _tolerance(step) for factor in factors
    )


def _rank_average(step: StepPair, times: float, counts: list[Counts], ways: tuple[str, ...]) -> TraceFinding:
    name, side, way = next(
        entry
        for entry in zip(("the second run", "the first run"), counts[::-1], ways[::-1], strict=True)
        if entry[2] != "all"
    )
    if way == "rank":
        divisors = _by_rank(side)
    else:
        divisors = []
        for entry in side.values():
            divisors.extend(entry)
    items = " and ".join(map(str, divisors))
    whose = "rank's" if way == "rank" else "micro-batch's"
    text = (
        f"in {name} each loss is divided by the {whose} own items ({items}), so one item counts {times:.6g} times as "
        "much"
    )
    return step.finding("normalisation", "rank-average", f"{text} as another", f"items {items}")


def _tolerance(step: StepPair) -> float:
    """Return the distance below which factors count as equal."""
    return min(CEILING, max(_LEAST, _ROUNDINGS * _coarsest(step)) + GROWTH * step.off)


def _mean(values: list[float]) -> float:
    if values:
        return sum(values) / len(values)
    return 0.0


def _factors(step: StepPair) -> list[_Factor]:
    """Return the factors of all pairs of forwards with common samples."""
    groups: dict[tuple[Forward, Forward], list[tuple[float, float]]] = {}
    sides = _output_gradient_norms(step)
    for key, (forward, first_norm) in sides[0].items():
        if key in sides[1] and first_norm > 0:
            second_forward, second_norm = sides[1][key]
            if second_norm > 0 and math.isfinite(first_norm * second_norm):
                # Weighted by the squared norm: the lengths of small gradients are noisy.
                groups.setdefault((forward, second_forward), []).append(
                    (math.log(second_norm / first_norm), first_norm * first_norm)
                )
    means = {key: _weighted_mean(ratios) for key, ratios in groups.items()}
    count = sum(map(len, groups.values()))
    total = sum(w for ratios in groups.values() for _, w in ratios)
    off = sum(w * (value - means[key]) ** 2 for key, ratios in groups.items() for value, w in ratios)
    # The standard error of a sample's ratio, pooled over all forwards.
    if count > len(groups):
        spread = math.sqrt(off / total * count / (count - len(groups)))
    else:
        spread = 0.0
    factors = []
    for forwards, ratios in groups.items():
        mean = means[forwards]
        weights = [weight for _, weight in ratios]
        # The standard error of a weighted mean.
        error = spread * math.sqrt(sum(weight * weight for weight in weights)) / sum(weights)
        furthest = max(abs(value - mean) for value, _ in ratios)
        factors.append(_Factor(*forwards, mean, error, len(ratios), furthest))
    return factors


def _weighted_mean(values: list[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _output_gradient_norms(step: StepPair) -> list[dict[tuple[int, int], tuple[Forward, float]]]:
    """Return (sample, earlier occurrences) -> (forward, norm) for each run.

    The norm is that of the gradient at the sample's output.
    """
    uses = _uses(step)
    sides: list[dict[tuple[int, int], tuple[Forward, float]]] = []
    for use, contents in zip(uses, list_forwards(*uses), strict=True):
        norms: dict[tuple[int, int], tuple[Forward, float]] = {}
        occurrences: dict[int, int] = {}
        for rank, forwards in contents.items():
            for number, (forward, samples) in enumerate(zip(use[rank].forwards, forwards, strict=False)):
                values = floats(forward.get("og"))
                if forward.get("backwards") != 1 or len(values) != len(samples):
                    continue
                for sample, value in zip(samples, values, strict=True):
                    occurrence = occurrences[sample] = occurrences.get(sample, -1) + 1
                    norms[sample, occurrence] = (rank, number), value
        sides.append(norms)
    return sides


def _divisors_explain(factors: list[_Factor], counts: list[Counts], ways: tuple[str, ...], least: float) -> bool:
    """Whether these integer divisors explain the factors; `ways` is the divisor of each run."""
    residuals: list[float] = []
    for factor in factors:
        below = []
        for side, way, at in zip(counts, ways, (factor.one, factor.two), strict=True):
            below.append(_divisor(side, way, *at))
        if not every(map(bool, below)):
            return False
        residuals.append(factor.mean - math.log(below[0] / below[1]))
    common = _mean(residuals)
    return every(
        abs(value - common) <= max(least, _STANDARD_ERRORS * factor.error)
        for value, factor in zip(residuals, factors, strict=True)
    )


def _divisor(counts: Counts, way: str, rank: int, number: int) -> float:
    items = counts.get(rank, [])
    if way == "all":
        return 1.0
    if way == "rank":
        return float(sum(items))
    if number < len(items):
        return float(items[number])
    return 0.0


def normalisation_difference(step: StepPair) -> TraceFinding | None:
    """Find a difference in the divisor of the losses, given that the outputs agree."""
    finding = items_unequal(step)
    if finding is not None or not step.flagged:
        return finding
    losses = [_losses(spot) for spot in (step.one, step.two)]
    if not every(map(bool, losses)) or not every(any(rank_losses.values()) for rank_losses in losses):
        return None
    first_loss = _total(losses[0])
    second_loss = _total(losses[1])
    least = max(1e-5, step.limit)
    if not math.isfinite(first_loss * second_loss) or abs(first_loss - second_loss) <= least * max(
        abs(first_loss), abs(second_loss)
    ):
        return None
    text = f"the loss of the step is {second_loss:.6g} instead of {first_loss:.6g}"
    for name, column in _keys(step):
        counts = [_counts(step, side, name, column) for side in (0, 1)]
        weighted = []
        for rank_losses, count in zip(losses, counts, strict=True):
            weighted.append(_average(rank_losses, count))
        if None in weighted or weighted[0] is None or weighted[1] is None:
            continue
        if (
            abs(weighted[0] - weighted[1]) <= least * abs(weighted[0])
            and len({*_by_rank(counts[1]), *_by_rank(counts[0])}) > 1
        ):
            if len(counts[1]) > 1 or len(counts[0]) == 1:
                side = counts[1]
            else:
                side = counts[0]
            items = " and ".join(str(count) for count in _by_rank(side))
            label = f"items {items}"
            text += f"; weighted by the items ({items}) they agree"
            return step.finding("normalisation", "rank-average", text, label)
    ratio = second_loss / first_loss if first_loss else math.inf
    worlds = step.pair.two.world / step.pair.one.world
    micro = [max(len(rank_losses) for rank_losses in side.values()) for side in losses]
    near = max(_RATIO, _tolerance(step))
    # Usual mistakes scale the loss by the world size, the accumulation, or a small whole number.
    for factor in (
        worlds,
        1 / worlds,
        micro[1] / micro[0],
        micro[0] / micro[1],
        *range(2, 9),
        *(1 / n for n in range(2, 9)),
    ):
        if factor != 1 and abs(ratio - factor) <= near * factor:
            return step.finding("normalisation", "scaled-loss", f"{text}, {ratio:.6g} times as much", "loss")
    return step.finding("normalisation", "loss", text, "loss")


def _losses(spot: Spot) -> dict[int, list[float]]:
    records = spot.part.records(spot.at)
    losses = {}
    for rank, record in records.items():
        losses[rank] = [entry["v"][0] for entry in record["loss"] if entry["v"]]
    return losses


def _total(losses: dict[int, list[float]]) -> float:
    """Return the loss of the step: DDP's mean over the ranks of their summed losses."""
    return sum(sum(values) for values in losses.values()) / max(1, len(losses))


def _by_rank(counts: Counts) -> list[int]:
    return [sum(items) for items in counts.values()]


def _average(losses: dict[int, list[float]], counts: Counts) -> float | None:
    """Return the mean over all items of a step.

    Each loss must be the mean over its micro-batch's items, divided by the number of micro-batches.
    """
    total = items = 0.0
    for rank, values in losses.items():
        items_of_rank = counts.get(rank, [])
        if len(items_of_rank) != len(values):
            return None
        total += sum(value * len(values) * count for value, count in zip(values, items_of_rank, strict=True))
        items += sum(items_of_rank)
    if items:
        return total / items
    return None


def _uses(step: StepPair) -> list[dict[int, Use]]:
    sides = ((step.pair.one, step.one), (step.pair.two, step.two))
    return [run.find_samples(spot).at(spot.at, 0) for run, spot in sides]


def _keys(step: StepPair) -> Iterator[tuple[str, int]]:
    """Yield the candidates for the items.

    They are integer tensors (0: all elements, 1: after each first), or "" for samples.
    """
    keys: list[tuple[str, int]] = [("", 0)]
    for use in _uses(step)[1].values():
        for batch in [*use.loads, *use.forwards]:
            keys += [(name, column) for name in batch.get("cn", ()) for column in (0, 1)]
    yield from dict.fromkeys(keys)


def _counts(step: StepPair, side: int, name: str, column: int) -> Counts:
    counts: Counts = {}
    for rank, use in _uses(step)[side].items():
        batches: list[dict[str, Any]] = (
            use.loads if use.matched and len(use.loads) == len(use.forwards) else use.forwards
        )
        if name and not any(name in batch.get("cn", ()) for batch in batches):
            batches = use.forwards
        counts[rank] = []
        for batch in batches:
            if not name:
                counts[rank].append(batch["n"])
            elif name in batch.get("cn", ()):
                counts[rank].append(batch["c"][2 * batch["cn"].index(name) + column])
    return counts


# Sine of the largest angle between gradients that differ only in length.
_PARALLEL = 1e-3
# Share by which a length may miss the clipped one.
_LENGTH = 1e-2
# Share by which numbers that ranks share may differ.
_EQUAL = 1e-4
# BatchNorm's running statistics.
_STATISTICS = ("running_mean", "running_var")
# Share by which a sample's output may differ.
_OUTPUT = 1e-3


def gradient_difference(step: StepPair) -> TraceFinding:
    """Return the first stage that differs, from the forward to the reduction."""
    return (
        _clipped_scaled(step)
        or _find_unreduced(step)
        or _unequal_clip_norms(step)
        or _changed_after_clipping(step)
        or own_statistics(step)
        or _forward(step)
        or _find_padding(step)
        or normalisation_difference(step)
        or _clipping(step)
        or _reduction(step)
    )


def _records(spot: Spot) -> dict[int, dict[str, Any]]:
    return spot.part.records(spot.at)


def _clips(record: dict[str, Any]) -> list[list[Any]]:
    """Return the clip events of a step: [when, "clip", which, limit, [norm]]."""
    return [event for event in record["ev"] if event[1] == "clip"]


def _clipped_scaled(step: StepPair) -> TraceFinding | None:
    for name, spot in step.sides():
        for rank, record in _records(spot).items():
            unscaled = []
            for event in record["ev"]:
                if event[1] == "unscale":
                    unscaled.append(event[0])
            clips = _clips(record)
            if clips and unscaled and clips[-1][0] < min(unscaled):
                text = f"in {name} the norm is {_norm(clips[-1])} when it is clipped, and unscaled only afterwards"
                return step.finding(
                    "clipping", "clip-before-unscale", text, "all gradients", -1 if len(_records(spot)) > 1 else rank
                )
    return None


def _norm(clip: list[Any]) -> float:
    if len(clip) > 4 and clip[4]:
        return float(clip[4][0])
    return math.nan


def _unequal_clip_norms(step: StepPair) -> TraceFinding | None:
    """Report ranks that clip by their own norms although they update by one gradient."""
    for name, spot in step.sides():
        norms = {}
        for rank, record in _records(spot).items():
            if clips := _clips(record):
                norms[rank] = _norm(clips[-1])
        finite_norms = {}
        for rank, norm in norms.items():
            if math.isfinite(norm):
                finite_norms[rank] = norm
        if len(finite_norms) < 2:
            continue
        reference = finite_norms[min(finite_norms)]
        wrong = None
        for rank, norm in finite_norms.items():
            if abs(norm - reference) > _EQUAL * max(norm, reference):
                wrong = rank
                break
        same = every(
            tensor.other is None or tensor.other[1] <= _EQUAL * tensor.norm for tensor in spot.tensors("grad").values()
        )
        if wrong is not None and same:
            listed = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in finite_norms.items())
            return step.finding(
                "clipping", "clip-before-reduce", f"in {name} the norm is {listed}", "all gradients", wrong
            )
    return None


def _changed_after_clipping(step: StepPair) -> TraceFinding | None:
    """Report gradients that reach the optimizer with another length than clipping left.

    It must be so in one run only.
    """
    changes: dict[str, tuple[int, float, float]] = {}
    for name, spot in step.sides():
        for rank, record in _records(spot).items():
            clips = []
            for clip in _clips(record):
                if clip[2] == "clip_grad_norm_" and clip[3]:
                    clips.append(clip)
            if len(clips) == 1 and math.isfinite(_norm(clips[0])) and spot.tensors("grad"):
                length = math.sqrt(sum(tensor.square for tensor in spot.tensors("grad").values()))
                clipped = min(_norm(clips[0]), float(clips[0][3]))
                if abs(length - clipped) > _LENGTH * clipped:
                    changes.setdefault(name, (rank, clipped, length))
    if len(changes) != 1:
        return None
    name, (_, clipped, length) = next(iter(changes.items()))
    text = f"in {name} clipping leaves a norm of {clipped:.6g}, but the optimizer gets {length:.6g}"
    return step.finding("clipping", "clip-before-unscale", text, "all gradients")


def _find_unreduced(step: StepPair) -> TraceFinding | None:
    for name, spot in step.sides():
        grads = spot.tensors("grad")
        unequal = {}
        for n, w in grads.items():
            if w.other is not None and not w.other[1] <= _EQUAL * w.norm:
                unequal[n] = w
        if not unequal:
            continue
        tensor, value = next(iter(unequal.items()))
        assert value.other is not None
        text = f"in {name} it differs from rank 0's by {share(value.other[1], value.norm)}"
        is_partial = len(unequal) < len(grads)
        cause = "part-unreduced" if is_partial else "unreduced"
        return step.finding(
            "reduction", cause, f"{text} ({len(unequal)} of {len(grads)} tensors)", tensor, value.other[0]
        )
    return None


def own_statistics(step: StepPair) -> TraceFinding | None:
    """Report BatchNorm statistics that differ between ranks, in one run only.

    Ranks that normalise over all samples end a step with the same bits, in any dtype.
    """
    unequal = []
    for name, spot in step.sides():
        statistics = {}
        for n, w in spot.tensors("buffers").items():
            if n.rpartition(".")[2] in _STATISTICS:
                statistics[n] = w
        unequal += [(name, *entry) for entry in statistics.items() if unlike(entry[1])][:1]
    if len(unequal) != 1:
        return None
    run, name, statistic = unequal[0]
    assert statistic.other is not None
    rank, error = statistic.other
    text = f"in {run} rank {rank}'s {name} differs from rank 0's by {share(error, statistic.norm)} after the step"
    return step.finding("buffers", "batchnorm", text, name.rpartition(".")[0])


def _forward(step: StepPair) -> TraceFinding | None:
    """Report samples with a different output of the model."""
    outputs = [_outputs_of(spot) for spot in (step.one, step.two)]
    least = max(_OUTPUT, 2 * step.limit)
    off: dict[int, int] = {}
    example = ""
    for key, (_, first_sums) in outputs[0].items():
        if key not in outputs[1]:
            continue
        rank, second_sums = outputs[1][key]
        error = abs(first_sums[0] - second_sums[0]) + abs(
            math.sqrt(abs(first_sums[1])) - math.sqrt(abs(second_sums[1]))
        )
        if not error <= least * math.sqrt(max(first_sums[1], second_sums[1])):
            off[rank] = off.get(rank, 0) + 1
            example = (
                example
                or f"a sample's output differs by {error / math.sqrt(max(first_sums[1], second_sums[1]) or 1):.2g} of "
                "itself"
            )
    if not off:
        return None
    rank = next(iter(off)) if len(off) == 1 else -1
    both = outputs[0].keys() & outputs[1].keys()
    text = f"{example} ({sum(off.values())} of {len(both)} samples)"
    sizes = []
    for spot in (step.one, step.two):
        sizes.append({f["n"] for record in _records(spot).values() for f in record["fwd"] if f["train"]})
    statistics = ""
    for n in step.two.tensors("buffers"):
        if n.endswith("running_mean"):
            statistics = n
            break
    if statistics and sizes[0] != sizes[1]:
        return step.finding("buffers", "batchnorm", text, statistics.removesuffix(".running_mean"), rank)
    return step.finding("forward", "forward", text, first_module(step) or "output", rank)


def _find_padding(step: StepPair) -> TraceFinding | None:
    """Report samples whose output depends on how far their batch is padded.

    Their gradients then differ by more than a divisor, but only where the lengths of the batches do.
    """
    first_norms, second_norms = _output_gradient_norms(step)
    uses = _uses(step)
    groups: dict[tuple[Forward, Forward], list[float]] = {}
    for key, (forward, norm) in first_norms.items():
        if key in second_norms and norm > 0 and second_norms[key][1] > 0 and math.isfinite(norm * second_norms[key][1]):
            groups.setdefault((forward, second_norms[key][0]), []).append(math.log(second_norms[key][1] / norm))
    least = 2 * _tolerance(step)
    off = False
    example = ""
    for at, logs in groups.items():
        widths = []
        for use, (rank, number) in zip(uses, at, strict=True):
            widths.append(int(use[rank].forwards[number].get("p", 0)))
        if max(logs) - min(logs) <= least:
            continue
        if widths[0] == widths[1]:
            return None
        off = True
        example = example or f"padded to {widths[1]} instead of {widths[0]}"
    if not off:
        return None
    if any(_is_left_padded(batch) for use in uses for batch in _batches(use)):
        cause = "left-padding"
    else:
        cause = "padding"
    return step.finding("forward", cause, f"the outputs of the same samples differ where they are {example}", "output")


def _batches(uses: dict[int, Use]) -> Iterator[dict[str, Any]]:
    for use in uses.values():
        yield from (*use.loads, *use.forwards)


def _is_left_padded(batch: dict[str, Any]) -> bool:
    """Whether a mask leaves out some samples' first element; without one, the labels."""
    names = batch.get("cn", ())
    masks = []
    for name in names:
        if name.endswith("attention_mask"):
            masks.append(name)
    counts = [batch["c"][2 * names.index(name) :][:2] for name in masks or names]
    return any(whole - behind < batch["n"] for whole, behind in counts)


def first_module(step: StepPair) -> str:
    """Return the first module whose output has different bits; else "".

    It needs the same split of the step in both runs, and recorded modules.
    """
    if step.one.part.world != step.two.part.world:
        return ""
    for rank, record in _records(step.one).items():
        second_record = _records(step.two).get(rank)
        if second_record is None:
            continue
        for first_forward, second_forward in zip(record["fwd"], second_record["fwd"], strict=False):
            names = zip(
                first_forward.get("mn", ()),
                second_forward.get("mn", ()),
                first_forward.get("mv", ()),
                second_forward.get("mv", ()),
                strict=False,
            )
            for name, their, first_words, second_words in names:
                if name == their and words(first_words)[0] != words(second_words)[0]:
                    return str(name)
    return ""


def _sketches(step: StepPair) -> tuple[list[float], list[float]]:
    first_gradients = step.one.tensors("grad")
    second_gradients = step.two.tensors("grad")
    names = []
    for name in first_gradients:
        if name in second_gradients:
            names.append(name)
    first_sketch: list[float] = []
    second_sketch: list[float] = []
    for name in names:
        first_sketch += first_gradients[name].sketch
        second_sketch += second_gradients[name].sketch
    return first_sketch, second_sketch


def _ratio(step: StepPair) -> float:
    """Return the ratio of the second gradient to the first; NaN if not parallel."""
    first_sketch, second_sketch = _sketches(step)
    square = sum(x * x for x in first_sketch)
    if not square or not math.isfinite(square):
        return math.nan
    ratio = sum(x * y for x, y in zip(first_sketch, second_sketch, strict=True)) / square
    residual = sum((y - ratio * x) ** 2 for x, y in zip(first_sketch, second_sketch, strict=True))
    if math.sqrt(residual) <= max(_PARALLEL, step.limit) * abs(ratio) * math.sqrt(square):
        return ratio
    return math.nan


def _clipping(step: StepPair) -> TraceFinding | None:
    """Report parallel gradients of different lengths, at least one of them clipped."""
    ratio = _ratio(step)
    clips = []
    for spot in (step.one, step.two):
        clips.append(_clips(next(iter(_records(spot).values()))))
    if math.isnan(ratio) or not any(clips):
        return None
    limits = []
    for clip_events in clips:
        if clip_events:
            limits.append(clip_events[-1][3])
        else:
            limits.append(None)
    norms = []
    for clip_events in clips:
        if clip_events:
            norms.append(_norm(clip_events[-1]))
        else:
            norms.append(math.nan)
    if limits[0] != limits[1]:
        return step.finding("clipping", "clipping", f"clipped to {limits[1]} instead of {limits[0]}", "all gradients")
    if abs(norms[0] - norms[1]) > _EQUAL * max(norms):
        # The norms differ, so the sum of the gradients is wrong, not the clipping.
        return None
    return step.finding(
        "clipping",
        "clipping",
        f"the clipped gradient is {ratio:.6g} times the other, at the same norm",
        "all gradients",
    )


def _reduction(step: StepPair) -> TraceFinding:
    ratio = _ratio(step)
    if not math.isnan(ratio):
        worlds = step.pair.two.world / step.pair.one.world
        if worlds != 1 and abs(ratio - worlds) < 1e-3 * worlds:
            cause = "summed"
        else:
            cause = "reduction"
        return step.finding("reduction", cause, f"the gradient is {ratio:.6g} times the other", "all gradients")
    first_gradients = step.one.tensors("grad")
    second_gradients = step.two.tensors("grad")
    if not first_gradients or not second_gradients:
        return step.finding("reduction", "reduction", "its norm differs; the engine reports nothing else of it", "norm")
    if step.flagged:
        name = step.flagged[0]
    else:
        name = next(iter(second_gradients), "gradient")
    if name not in first_gradients or name not in second_gradients:
        side = SECOND if name in first_gradients else FIRST
        return step.finding("reduction", "part-unreduced", f"{side} has no gradient of it", name)
    off = share(distance(first_gradients[name].sketch, second_gradients[name].sketch), first_gradients[name].norm)
    text = f"it is off by {off} ({len(step.flagged)} of {len(first_gradients)} tensors)"
    is_partial = len(step.flagged) < len(first_gradients) / 2
    return step.finding("reduction", "part-unreduced" if is_partial else "reduction", text, name)
