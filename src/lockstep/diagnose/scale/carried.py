"""The measured sizes carried on to sizes that were not: the fit of all rows, both modes together.

further = carried(request, machine, rows, samples)      # [Further("strong", 8, ...), ...]; [] where nothing is asked
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.diagnose.scale.findings import Row
from lockstep.diagnose.scale.fit import Fit, Measured
from lockstep.diagnose.scale.machine import Machine
from lockstep.diagnose.scale.request import STRONG, Request, Setting
from lockstep.diagnose.scale.runs import Sample

__all__ = ["Further", "carried"]

_SLACK = 3.0  # times the spread of the steps: the imbalance that ranks are believed to have at most


@dataclass(frozen=True, slots=True)
class Further:
    """One size in one mode, extrapolated.

    Attributes:
        step_ms: milliseconds of a step; nine of ten should lie between `step_low` and `step_high`.
        speedup, efficiency: beside the smallest measured size; `low`, `high`: the efficiency's interval.
        terms: what `step_ms` is made of.
        idle: whether there are more ranks than micro-batches.
    """

    mode: str
    ranks: int
    batch_size: int
    step_ms: float
    step_low: float
    step_high: float
    speedup: float
    efficiency: float
    low: float
    high: float
    terms: dict[str, float] = field(default_factory=dict)
    idle: bool = False


def carried(request: Request, machine: Machine, rows: Sequence[Row], samples: Sequence[Sample]) -> list[Further]:
    """What the fit says of the sizes that `request.extrapolate` names; [] where fewer than two were measured."""
    measured = {(row.ranks, row.batch_size): row for row in rows if row.rounds}
    base = next((row for row in rows if row.rounds and row.ranks == request.base), None)
    if not request.extrapolate or base is None or len({ranks for ranks, _ in measured}) < 2:
        return []
    points = [
        Measured(row.ranks, row.work / base.work, row.rounds, row.ranks / machine.allowed(row.ranks))
        for row in measured.values()
    ]
    spread = _step_spread(samples, base, request.window)
    fit = Fit(points, request.ranks_per_node, most_imbalance=_SLACK * spread)
    return [_further(fit, request, mode, size, base) for mode in request.modes for size in request.extrapolate]


def _further(fit: Fit, request: Request, mode: str, size: int, base: Row) -> Further:
    growth = size / request.base
    strong = mode == STRONG
    batch = base.batch_size if strong else round(base.batch_size * growth)
    work = -(-base.micro_batches // size) / base.work if strong else 1.0
    found = fit.predict(size, work)
    most = (1.0 if strong else growth) * base.step_ms  # speed-up times step_ms
    return Further(
        mode,
        size,
        batch,
        found.value,
        found.low,
        found.high,
        speedup=most / found.value,
        efficiency=most / found.value / growth,
        low=most / found.high / growth,
        high=most / found.low / growth,
        terms=fit.terms(size, work),
        idle=strong and size > base.micro_batches,
    )


def _step_spread(samples: Sequence[Sample], base: Row, window: int) -> float:
    """Standard deviation of a step of the smallest size, in milliseconds, from its records of `window` steps each.

    A rank's steps differ in time about as ranks differ in a step, as far as they have the same devices and work.
    """
    mine = [each for each in samples if each.setting == Setting(base.ranks, base.batch_size)]
    means = [statistics.median(each.rates) / rate for each in mine for rate in each.rates]
    if len(means) < 2:
        return base.step_ms
    return base.step_ms * statistics.stdev(means) * math.sqrt(window)
