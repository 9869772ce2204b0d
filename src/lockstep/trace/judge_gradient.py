"""Why a gradient differs although the weights and the samples are the same: forward, loss, reduction or clipping."""

import math
from typing import Any

from lockstep.trace.coverage import every
from lockstep.trace.judge_normalisation import normalisation_difference
from lockstep.trace.limits import outputs_of
from lockstep.trace.pairing import Spot
from lockstep.trace.reading import distance, words
from lockstep.trace.step import FIRST, SECOND, Step, share, unlike
from lockstep.trace.verdict import Finding

__all__ = ["first_module", "gradient_difference", "own_statistics"]

_PARALLEL = 1e-3  # sine of the largest angle between gradients that differ in length alone
_LENGTH = 1e-2  # share by which a length may miss what clipping leaves
_ALIKE = 1e-4  # share by which numbers of the ranks may differ that are one number
_STATISTICS = ("running_mean", "running_var")
_OUTPUT = 1e-3  # share by which a sample's output may differ


def gradient_difference(step: Step) -> Finding:
    """The first stage that differs, from the forward to the clipping."""
    return (
        _scaled_before(step)
        or _unreduced(step)
        or _clipped_apart(step)
        or _changed_after(step)
        or own_statistics(step)
        or _forward(step)
        or normalisation_difference(step)
        or _clipping(step)
        or _reduction(step)
    )


def _records(spot: Spot) -> dict[int, dict[str, Any]]:
    return spot.part.records(spot.at)


def _clips(record: dict[str, Any]) -> list[list[Any]]:
    """The clippings of a step: [when, "clip", which, limit, [norm]]."""
    return [event for event in record["ev"] if event[1] == "clip"]


def _scaled_before(step: Step) -> Finding | None:
    for name, spot in step.sides():
        for rank, record in _records(spot).items():
            unscaled = [event[0] for event in record["ev"] if event[1] == "unscale"]
            clips = _clips(record)
            if clips and unscaled and clips[-1][0] < min(unscaled):
                text = (
                    f"in {name} the norm is {_norm(clips[-1])} when it is clipped; the scale is divided out afterwards"
                )
                return step.finding(
                    "clipping", "clip-before-unscale", text, "all gradients", -1 if len(_records(spot)) > 1 else rank
                )
    return None


def _norm(clip: list[Any]) -> float:
    return float(clip[4][0]) if len(clip) > 4 and clip[4] else math.nan


def _clipped_apart(step: Step) -> Finding | None:
    """Ranks that clip by norms of their own, although what they update by is one gradient."""
    for name, spot in step.sides():
        norms = {rank: _norm(clips[-1]) for rank, record in _records(spot).items() if (clips := _clips(record))}
        known = {rank: norm for rank, norm in norms.items() if math.isfinite(norm)}
        if len(known) < 2:
            continue
        first = known[min(known)]
        wrong = next((rank for rank, norm in known.items() if abs(norm - first) > _ALIKE * max(norm, first)), None)
        same = every(
            whole.other is None or whole.other[1] <= _ALIKE * whole.norm for whole in spot.tensors("grad").values()
        )
        if wrong is not None and same:
            shown = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in known.items())
            return step.finding(
                "clipping", "clip-before-reduce", f"in {name} the norm is {shown}", "all gradients", wrong
            )
    return None


def _changed_after(step: Step) -> Finding | None:
    """Gradients that are not as long, when the optimizer gets them, as clipping made them; in one run alone."""
    found: dict[str, tuple[int, float, float]] = {}
    for name, spot in step.sides():
        for rank, record in _records(spot).items():
            clips = [clip for clip in _clips(record) if clip[2] == "clip_grad_norm_" and clip[3]]
            if len(clips) == 1 and math.isfinite(_norm(clips[0])) and spot.tensors("grad"):
                length = math.sqrt(sum(whole.square for whole in spot.tensors("grad").values()))
                clipped = min(_norm(clips[0]), float(clips[0][3]))
                if abs(length - clipped) > _LENGTH * clipped:
                    found.setdefault(name, (rank, clipped, length))
    if len(found) != 1:
        return None
    name, (_, clipped, length) = next(iter(found.items()))
    text = f"in {name} clipping leaves a length of {clipped:.6g}, and the optimizer gets {length:.6g}"
    return step.finding("clipping", "clip-before-unscale", text, "all gradients")


def _unreduced(step: Step) -> Finding | None:
    for name, spot in step.sides():
        grads = spot.tensors("grad")
        apart = {n: w for n, w in grads.items() if w.other is not None and not w.other[1] <= _ALIKE * w.norm}
        if not apart:
            continue
        tensor, whole = next(iter(apart.items()))
        assert whole.other is not None
        text = f"in {name} it differs from rank 0's by {share(whole.other[1], whole.norm)}"
        part = len(apart) < len(grads)
        cause = "part-unreduced" if part else "unreduced"
        return step.finding(
            "reduction", cause, f"{text} ({len(apart)} of {len(grads)} tensors)", tensor, whole.other[0]
        )
    return None


def own_statistics(step: Step) -> Finding | None:
    """Find BatchNorm statistics that each rank has of its own in one run alone.

    Ranks that normalise by all samples end a step with the same bits, in any dtype.
    """
    found = []
    for name, spot in step.sides():
        statistics = {n: w for n, w in spot.tensors("buffers").items() if n.rpartition(".")[2] in _STATISTICS}
        found += [(name, *each) for each in statistics.items() if unlike(each[1])][:1]
    if len(found) != 1:
        return None
    run, name, whole = found[0]
    assert whole.other is not None
    rank, error = whole.other
    text = f"in {run} rank {rank}'s {name} differs from rank 0's by {share(error, whole.norm)} behind the step"
    return step.finding("buffers", "batchnorm", text, name.rpartition(".")[0])


def _forward(step: Step) -> Finding | None:
    """A sample for which the model computes another output."""
    outputs = [outputs_of(spot) for spot in (step.one, step.two)]
    least = max(_OUTPUT, 2 * step.limit)
    off: dict[int, int] = {}
    shown = ""
    for key, (_, mine) in outputs[0].items():
        if key not in outputs[1]:
            continue
        rank, theirs = outputs[1][key]
        error = abs(mine[0] - theirs[0]) + abs(math.sqrt(abs(mine[1])) - math.sqrt(abs(theirs[1])))
        if not error <= least * math.sqrt(max(mine[1], theirs[1])):
            off[rank] = off.get(rank, 0) + 1
            shown = (
                shown or f"a sample's output differs by {error / math.sqrt(max(mine[1], theirs[1]) or 1):.2g} of itself"
            )
    if not off:
        return None
    rank = next(iter(off)) if len(off) == 1 else -1
    both = outputs[0].keys() & outputs[1].keys()
    text = f"{shown} ({sum(off.values())} of {len(both)} samples)"
    sizes = [
        {f["n"] for record in _records(spot).values() for f in record["fwd"] if f["train"]}
        for spot in (step.one, step.two)
    ]
    statistics = next((n for n in step.two.tensors("buffers") if n.endswith("running_mean")), "")
    if statistics and sizes[0] != sizes[1]:
        return step.finding("buffers", "batchnorm", text, statistics.removesuffix(".running_mean"), rank)
    return step.finding("forward", "forward", text, first_module(step) or "output", rank)


def first_module(step: Step) -> str:
    """The first module whose output has other bits, where both runs cut the step alike and recorded it; else ""."""
    if step.one.part.world != step.two.part.world:
        return ""
    for rank, record in _records(step.one).items():
        other = _records(step.two).get(rank)
        if other is None:
            continue
        for mine, theirs in zip(record["fwd"], other["fwd"], strict=False):
            names = zip(
                mine.get("mn", ()), theirs.get("mn", ()), mine.get("mv", ()), theirs.get("mv", ()), strict=False
            )
            for name, their, one, two in names:
                if name == their and words(one)[0] != words(two)[0]:
                    return str(name)
    return ""


def _sketches(step: Step) -> tuple[list[float], list[float]]:
    one, two = step.one.tensors("grad"), step.two.tensors("grad")
    names = [name for name in one if name in two]
    return [x for name in names for x in one[name].sketch], [x for name in names for x in two[name].sketch]


def _ratio(step: Step) -> float:
    """How many times the first run's gradient the second's is; NaN where they do not point the same way."""
    mine, theirs = _sketches(step)
    square = sum(x * x for x in mine)
    if not square or not math.isfinite(square):
        return math.nan
    ratio = sum(x * y for x, y in zip(mine, theirs, strict=True)) / square
    rest = sum((y - ratio * x) ** 2 for x, y in zip(mine, theirs, strict=True))
    return ratio if math.sqrt(rest) <= max(_PARALLEL, step.limit) * abs(ratio) * math.sqrt(square) else math.nan


def _clipping(step: Step) -> Finding | None:
    """Gradients that point the same way and differ in length where one is clipped."""
    ratio = _ratio(step)
    clips = [_clips(next(iter(_records(spot).values()))) for spot in (step.one, step.two)]
    if math.isnan(ratio) or not any(clips):
        return None
    limits = [each[-1][3] if each else None for each in clips]
    norms = [_norm(each[-1]) if each else math.nan for each in clips]
    if limits[0] != limits[1]:
        return step.finding("clipping", "clipping", f"clipped to {limits[1]} instead of {limits[0]}", "all gradients")
    if abs(norms[0] - norms[1]) > _ALIKE * max(norms):
        return None  # the norm is wrong, and so the sum
    return step.finding(
        "clipping", "clipping", f"the length is {ratio:.6g} times the other, at the same norm", "all gradients"
    )


def _reduction(step: Step) -> Finding:
    ratio = _ratio(step)
    if not math.isnan(ratio):
        worlds = step.pair.two.world / step.pair.one.world
        cause = "summed" if worlds != 1 and abs(ratio - worlds) < 1e-3 * worlds else "reduction"
        return step.finding("reduction", cause, f"the gradient is {ratio:.6g} times the other", "all gradients")
    one, two = step.one.tensors("grad"), step.two.tensors("grad")
    if not one or not two:
        return step.finding(
            "reduction", "reduction", "its norm differs, which is all that the engine says of it", "norm"
        )
    name = step.flagged[0] if step.flagged else next(iter(two), "gradient")
    if name not in one or name not in two:
        side = SECOND if name in one else FIRST
        return step.finding("reduction", "part-unreduced", f"{side} has no gradient of it", name)
    off = share(distance(one[name].sketch, two[name].sketch), one[name].norm)
    text = f"it is off by {off} ({len(step.flagged)} of {len(one)} tensors)"
    part = len(step.flagged) < len(one) / 2
    return step.finding("reduction", "part-unreduced" if part else "reduction", text, name)
