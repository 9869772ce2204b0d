"""Is it the sum of the gradients that is wrong, or the clipping of it?

Seen are a step's gradients as the optimizer gets them, clipped, and the norm that the engine reports. Wrong gradients
point elsewhere. Gradients that point right but are too long or short were clipped wrongly where their length is not
what clipping makes of the reported norm; where it is, the norm, and so the sum, is wrong.
"""

import math
from collections.abc import Iterator
from typing import Any

from lockstep.diagnose.tolerance import unit_roundoff
from lockstep.diagnose.values import Difference, Traces, of_tensors

__all__ = ["clipping", "reduction"]

_PARALLEL = 1e-3  # sine of the largest angle between gradients that differ in length alone
_LENGTH = 1e-3  # share by which a norm may miss what clipping makes of it
_UNDONE = 1e-6  # share of the whole norm below which a difference may come from undoing the clipping
_ROUNDINGS = 4.0  # of the norm and the factor, which have the gradients' dtype


def reduction(traces: Traces, step: int) -> Iterator[Difference]:
    """Differences of the gradients that clipping does not explain."""
    if not _badly_clipped(traces, step):
        yield from _behind_the_clipping(traces, step)
        yield from _gradients(traces, step, "reduction")
        yield from _norms(traces, step)


def clipping(traces: Traces, step: int) -> Iterator[Difference]:
    """Gradients whose length is not what clipping makes of their norm."""
    bad = _badly_clipped(traces, step)
    if bad:
        rank, norm, length, wanted = bad
        made = f"clipping to {traces.clip:g} leaves {wanted:.6g}" if traces.clip else "it is not clipped"
        text = f"the norm is {norm:.6g}, so {made}, but the length is {length:.6g}"
        yield Difference(step, "clipping", "all gradients", rank, text)
        yield from _gradients(traces, step, "clipping")


def _gradients(traces: Traces, step: int, stage: str) -> Iterator[Difference]:
    yield from of_tensors(traces, step, "gradient", stage)


def _behind_the_clipping(traces: Traces, step: int) -> Iterator[Difference]:
    """The first tensor that still differs with the clipping undone on both sides.

    One wrong gradient changes the norm, and with it the clipping of all the others.
    """
    norm = traces.reference["steps"][step]["norm"]
    for rank, record in traces.records(step):
        part = record.get("gradient")
        if not part or not part["first"] or not traces.clip or not math.isfinite(norm * record["norm"]):
            continue
        by = _shortened(traces, record["norm"]) / _shortened(traces, norm)
        least = (_UNDONE + traces.allowance.relative(step)) * math.sqrt(part["sums"][2])
        for name, (own, wanted, product) in part["parts"].items():
            error = math.sqrt(max(0.0, own / by**2 - 2.0 * product / by + wanted))
            if error > least:
                if name != part["first"]["name"]:
                    share = error / math.sqrt(wanted) if wanted else math.inf
                    text = f"before the clipping it is off by {share:.2g} of itself; the ones above it only in length"
                    yield Difference(step, "reduction", name, rank, text)
                break


def _shortened(traces: Traces, norm: float) -> float:
    """What clipping multiplies gradients of this norm by."""
    return min(1.0, traces.clip / (norm + 1e-6))


def _norms(traces: Traces, step: int) -> Iterator[Difference]:
    wanted = traces.reference["steps"][step]["norm"]
    for rank, record in traces.records(step):
        if not traces.allowance.close(step, record["norm"], wanted):
            text = f"the gradient's norm is {record['norm']!r} instead of {wanted!r}"
            yield Difference(step, "reduction", "norm", rank, text)


def _badly_clipped(traces: Traces, step: int) -> tuple[int, float, float, float] | None:
    """(rank, reported norm, length found, length expected) of the first rank whose clipping is wrong; else None."""
    for rank, record in traces.records(step):
        if "gradient" not in record:
            continue
        mine, wanted, product = _lengths(traces, step, record["gradient"])
        norm = record["norm"]
        expected = norm * _shortened(traces, norm) if traces.clip else norm
        if not (mine and wanted and math.isfinite(mine * wanted * expected)):
            continue
        sine = math.sqrt(max(0.0, 1.0 - (product / (mine * wanted)) ** 2))
        missed = _LENGTH + _ROUNDINGS * unit_roundoff(record["gradient_dtype"])
        if sine < _PARALLEL and abs(mine - expected) > missed * expected:
            return rank, norm, mine, expected
    return None


def _lengths(traces: Traces, step: int, own: dict[str, Any]) -> tuple[float, float, float]:
    """Norm of the whole gradient as a rank has it, of the reference's, and their product: sharded parts added up."""
    square, whole, wanted, product = own["sums"]
    if whole == square:
        return math.sqrt(square), math.sqrt(wanted), product
    parts = [record["gradient"]["sums"] for _, record in traces.records(step)]
    total = [math.fsum(column) for column in zip(*parts, strict=True)]
    return math.sqrt(total[0]), math.sqrt(total[2]), total[3]
