"""Fit a step's time as a sum of few terms, and extrapolate with an interval.

    sizes = [(1, 1.0, (100.0, 101.0)), (2, 0.5, (53.0, 54.0)), (4, 0.25, (30.0, 31.0))]
    fit = Fit([SizeMeasurement(*size) for size in sizes])
    fit.predict(8, 0.125)           # TimeEstimate(value=19.1, low=16.8, high=22.3): milliseconds, as the times were
    fit.terms(8, 0.125)             # {"compute": 12.1, "bandwidth": 4.0, ...}, which add up to the value

The time of a step on n ranks, if the busiest rank has the work w (1: as much as at the smallest size):

    t(n, w) = compute w + serial + latency log2 n + latency' (n - 1) + bandwidth 2 (n - 1) / n + imbalance w e(n)

A ring moves 2 (n - 1) / n of the bytes over each link in 2 (n - 1) hops, a tree needs log2 n (Thakur et al.,
"Optimization of Collective Communication Operations in MPICH", 2005). If nodes are known, the term in 2 (n - 1) / n is
two: within a node, and 2 (m - 1) / m between m nodes. e(n) is the expected maximum of n standard normal draws: all wait
for the slowest. No term is negative.

A few sizes cannot separate these terms, so every sum of at most three of them plus the compute is fitted, and those
without a negative coefficient are averaged by Akaike's weights (Burnham & Anderson, "Model Selection and Multimodel
Inference", 2002, 2.9). The interval is over these sums, over the rounds (bootstrap) and a noise of at least 1 % with
heavy tails. bench/scaling/score.py scores it on published tables.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.diagnose.scale.runs import STRONG, Machine, RunSample, ScaleRequest, Setting

__all__ = [
    "GOOD",
    "Fit",
    "Further",
    "ScaleRow",
    "SizeMeasurement",
    "carried",
    "rows_of",
]


# Ranks -> the efficiency relative to one rank that the source document expects of well-tuned training on GPUs
# ("Scaling Efficiency Analysis").
_BANDS = {2: (0.90, 0.95), 4: (0.85, 0.95), 8: (0.80, 0.90), 16: (0.75, 0.90)}
# Below this efficiency the same document advises to check where the time goes.
GOOD = 0.80


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One size in one mode.

    Attributes:
        mode: "strong" or "weak".
        ranks, batch_size, micro_batches: of the setting; micro-batches of a whole step.
        rate: items a second over all ranks, median over the rounds.
        step_ms: milliseconds of a step, from `rate`, so that time between two steps counts too.
        rounds: step_ms of each round, in order.
        speedup: `rate` relative to that of the smallest size, median of the rounds' own ratios.
        efficiency: speedup relative to the growth in ranks.
        low, high: the lowest and the highest efficiency of the rounds.
        allowed: the largest speed-up that the cores allow; None if each rank has its own.
        full: share of a step's slots with a micro-batch; below 1 some rank has fewer than another.
        band: the range that the source expects; None if it does not cover this size.
        error: why there is no measurement; else "".
    """

    mode: str
    ranks: int
    batch_size: int
    micro_batches: int
    rate: float = math.nan
    step_ms: float = math.nan
    rounds: tuple[float, ...] = ()
    speedup: float = math.nan
    efficiency: float = math.nan
    low: float = math.nan
    high: float = math.nan
    allowed: float | None = None
    full: float = 1.0
    band: tuple[float, float] | None = None
    error: str = ""

    @property
    def of_cores(self) -> float:
        """The speed-up relative to the cores' limit.

        It is the efficiency itself if each rank has its own.
        """
        if self.allowed is None:
            return self.efficiency
        return self.speedup / self.allowed

    @property
    def work(self) -> int:
        """Micro-batches of the busiest rank."""
        return -(-self.micro_batches // self.ranks)


def rows_of(
    request: ScaleRequest,
    machine: Machine,
    samples: Sequence[RunSample],
    failures: Mapping[Setting, str],
    micro_batch_size: int,
) -> list[ScaleRow]:
    """Return a row for each mode and size; a failed size has its error."""
    rows = []
    for mode in request.modes:
        settings = request.settings(mode)
        base_rates = _rates(samples, settings[0])
        for setting in settings:
            parts = setting.batch_size // micro_batch_size
            shell = ScaleRow(mode, setting.ranks, setting.batch_size, parts, error=failures.get(setting, ""))
            rates = _rates(samples, setting)
            if shell.error or not rates or not base_rates:
                rows.append(shell)
                continue
            rows.append(_fill_row(shell, request, machine, rates, base_rates, _items(samples, settings[0])))
    return rows


def _fill_row(
    row: ScaleRow,
    request: ScaleRequest,
    machine: Machine,
    rates: dict[int, float],
    first: dict[int, float],
    items: float,
) -> ScaleRow:
    """Fill in the numbers of `row`.

    Args:
        rates, first: items a second by round, of this setting and of the smallest size.
        items: of a step of the smallest size.
    """
    growth = row.ranks / request.base
    in_step = items * row.batch_size / request.settings(row.mode)[0].batch_size
    # Rounds alternate, so ratios within a round cancel a drift of the machine.
    ratios = [rate / first[number] for number, rate in rates.items() if number in first]
    ratios = ratios or [statistics.median(rates.values()) / statistics.median(first.values())]
    speedup = statistics.median(ratios)
    rate = statistics.median(rates.values())
    shared = machine.shared(row.ranks)
    return ScaleRow(
        row.mode,
        row.ranks,
        row.batch_size,
        row.micro_batches,
        rate=rate,
        step_ms=1e3 * in_step / rate,
        rounds=tuple(1e3 * in_step / round_rate for _, round_rate in sorted(rates.items())),
        speedup=speedup,
        efficiency=speedup / growth,
        low=min(ratios) / growth,
        high=max(ratios) / growth,
        allowed=machine.allowed(row.ranks) / machine.allowed(request.base) if shared else None,
        full=row.micro_batches / (row.work * row.ranks),
        band=_BANDS.get(row.ranks) if request.base == 1 else None,
    )


def _rates(samples: Sequence[RunSample], setting: Setting) -> dict[int, float]:
    """Return items a second by round."""
    return {sample.round: sample.rate for sample in samples if sample.setting == setting}


def _items(samples: Sequence[RunSample], setting: Setting) -> float:
    """Return the items of a step of the smallest size, from rate and time.

    The records do not count items.
    """
    return statistics.median(1e-3 * sample.total * sample.rate for sample in samples if sample.setting == setting)


_Array = NDArray[np.float64]
# Least relative noise between two measurements of the same thing.
_NOISE = 0.01
# Bootstrap samples of a fit.
_DRAWS = 200
# Terms of a sum in addition to the compute.
_MOST = 3
# Coverage of the interval.
_COVERAGE = 0.9
# Power of the weights for the interval, as if the noise were three times as large.
_FLAT = 1 / 9
# Degrees of freedom of the interval's noise, which is estimated from few sizes.
_TAILS = 2
# Shrinkage of terms to 0, as a share of a time: of two equal fits the smaller one wins.
_SHRINKAGE = 0.02


@dataclass(frozen=True, slots=True)
class SizeMeasurement:
    """A measured size.

    Attributes:
        ranks: n.
        work: of the busiest rank, relative to its work at the smallest size; weak scaling: 1.
        times: of a step, one for each round, in any unit.
        crowd: ranks to a core's worth of compute, if they share cores; else 1.
    """

    ranks: int
    work: float
    times: tuple[float, ...]
    crowd: float = 1.0


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """A time with its 90% interval."""

    value: float
    low: float
    high: float


class Fit:
    """The fit of some measured sizes.

    Args:
        points: at least two sizes.
        ranks_per_node: 0: all on one node.
        most_imbalance: upper bound of the imbalance's coefficient, in the times' unit; None: no bound.
    """

    def __init__(
        self, points: Sequence[SizeMeasurement], ranks_per_node: int = 0, most_imbalance: float | None = None
    ) -> None:
        if len({point.ranks for point in points}) < 2:
            raise ValueError("a fit needs two sizes at least")
        self._per_node = ranks_per_node
        self._middle = np.array([float(np.median(point.times)) for point in points])
        self._noise = max(_NOISE, float(np.median([_error(point.times) for point in points])))
        columns = {}
        for name in _columns(2, 1.0, 1.0, ranks_per_node):
            columns[name] = np.array(
                [_columns(entry.ranks, entry.work, entry.crowd, ranks_per_node)[name] for entry in points]
            )
        draws = _bootstrap(points)
        self._sums = [
            candidate
            for names in _supports(columns)
            if (candidate := _fit_sum(names, columns, self._middle, draws, self._noise, most_imbalance)) is not None
        ]
        weights = np.array([entry.weight for entry in self._sums])
        # Subtract the largest logarithm first, or exp would underflow for all.
        weights = np.exp(weights - weights.max())
        self._weights = weights / weights.sum()

    def predict(self, ranks: int, work: float) -> TimeEstimate:
        """Predict the time of a step on `ranks`, the busiest with `work`.

        Each has a core or device of its own.
        """
        columns = _columns(ranks, work, 1.0, self._per_node)
        # A geometric mean, since the errors of times are relative.
        value = float(np.exp(sum(w * math.log(candidate.at(columns)) for w, candidate in self._each())))
        # The seed is the number of ranks, so the same call gives the same interval.
        spread = np.random.default_rng(ranks).standard_t(_TAILS, size=_DRAWS)
        flat = self._weights**_FLAT
        times = []
        weights = []
        for weight, candidate in zip(flat.tolist(), self._sums, strict=True):
            samples = candidate.sample(columns)
            noise = np.exp(math.hypot(self._noise, candidate.misfit) * spread[: len(samples)])
            times.append(samples * noise)
            weights.append(np.full(len(samples), weight / len(samples)))
        low, high = _quantiles(np.concatenate(times), np.concatenate(weights))
        return TimeEstimate(value, min(low, value), max(high, value))

    def terms(self, ranks: int, work: float) -> dict[str, float]:
        """Return each term's contribution to `predict(ranks, work).value`, without zero terms."""
        columns = _columns(ranks, work, 1.0, self._per_node)
        parts = dict.fromkeys(columns, 0.0)
        for weight, candidate in self._each():
            for name, factor in zip(candidate.names, candidate.factors, strict=True):
                parts[name] += weight * float(factor) * columns[name]
        ratio = self.predict(ranks, work).value / sum(parts.values())
        return {name: value * ratio for name, value in parts.items() if value > 0}

    def _each(self) -> list[tuple[float, "_Sum"]]:
        return list(zip(self._weights.tolist(), self._sums, strict=True))


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of terms.

    Attributes:
        factors: of the measured medians.
        draws: factors of each bootstrap sample without a negative one, [draws, terms].
        weight: the logarithm of Akaike's, up to a constant.
        misfit: relative, per degree of freedom.
    """

    names: tuple[str, ...]
    factors: _Array
    draws: _Array
    weight: float
    misfit: float

    def at(self, columns: dict[str, float]) -> float:
        return float(self.factors @ np.array([columns[name] for name in self.names]))

    def sample(self, columns: dict[str, float]) -> _Array:
        times: _Array = self.draws @ np.array([columns[name] for name in self.names])
        return times


def _columns(ranks: int, work: float, crowd: float, per_node: int) -> dict[str, float]:
    """Return the multiplier of each term's coefficient."""
    nodes = -(-ranks // per_node) if per_node else 1
    inside = min(ranks, per_node) if per_node else ranks
    columns = {
        "compute": work * crowd,
        "serial": crowd,
        "latency of a tree": math.log2(ranks),
        "latency of a ring": ranks - 1.0,
        "bandwidth": 2.0 * (inside - 1) / inside,
        "imbalance": work * crowd * expected_maximum(ranks),
    }
    if per_node:
        columns["bandwidth between nodes"] = 2.0 * (nodes - 1) / nodes
    return columns


def _supports(columns: dict[str, _Array]) -> list[tuple[str, ...]]:
    """Return the sums that the sizes can determine.

    A sum is the compute and at most three independent terms.
    There cannot be more terms than sizes.
    """
    compute = columns["compute"]
    candidates = []
    for name, column in columns.items():
        if name != "compute" and column.any() and not np.allclose(column, column[0] * compute / compute[0]):
            candidates.append(name)
    most = min(_MOST, len(compute) - 1)
    return [("compute", *names) for size in range(most + 1) for names in itertools.combinations(candidates, size)]


def _fit_sum(
    names: tuple[str, ...],
    columns: dict[str, _Array],
    middle: _Array,
    draws: _Array,
    noise: float,
    most_imbalance: float | None,
) -> _Sum | None:
    """Fit the relative errors by least squares with shrinkage; None if a coefficient is negative."""
    matrix = np.stack([columns[name] for name in names], axis=1) / middle[:, None]
    # Shrink all terms but the compute.
    pull = np.diag(_SHRINKAGE * np.abs(matrix).max(axis=0))[1:]
    solve = np.linalg.pinv(np.concatenate([matrix, pull]))[:, : len(middle)]
    factors = solve @ np.ones(len(middle))
    if not _valid_rows(names, factors[None], most_imbalance)[0]:
        return None
    samples = (solve @ (draws / middle).T).T
    samples = samples[_valid_rows(names, samples, most_imbalance)]
    error = float(((matrix @ factors - 1.0) ** 2).sum())
    free = max(1, len(middle) - len(names))
    weight = -0.5 * (error / noise**2 + 2.0 * len(names))
    return _Sum(names, factors, samples if len(samples) else factors[None], weight, math.sqrt(error / free))


def _valid_rows(names: tuple[str, ...], factors: _Array, most_imbalance: float | None) -> NDArray[np.bool_]:
    """Return which rows of factors are valid.

    Valid: none negative, compute positive, imbalance within its bound.
    """
    valid: NDArray[np.bool_] = (factors >= 0).all(axis=1) & (factors[:, 0] > 0)
    if most_imbalance is not None and "imbalance" in names:
        valid &= factors[:, names.index("imbalance")] <= most_imbalance
    return valid


def _bootstrap(points: Sequence[SizeMeasurement]) -> _Array:
    """Bootstrap times of each point [draws, points]: medians of resampled rounds, with the least noise."""
    chance = np.random.default_rng(0)
    medians = np.empty((_DRAWS, len(points)))
    for index, point in enumerate(points):
        times = np.array(point.times)
        picked = chance.integers(len(times), size=(_DRAWS, len(times)))
        medians[:, index] = np.median(times[picked], axis=1) * np.exp(_NOISE * chance.normal(size=_DRAWS))
    return medians


def _error(times: tuple[float, ...]) -> float:
    """Return the relative standard error of the mean; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    return float(np.std(times, ddof=1) / np.mean(times) / math.sqrt(len(times)))


def _quantiles(values: _Array, weights: _Array) -> tuple[float, float]:
    """Return the values between which `_COVERAGE` of the weight is."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    edge = (1 - _COVERAGE) / 2
    low, high = (values[order][min(int(np.searchsorted(below, at)), len(order) - 1)] for at in (edge, 1 - edge))
    return float(low), float(high)


@lru_cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` standard normal draws.

    It is the integral of x d(Phi(x)^n): 0 of one, 0.56 of two, 1.03 of four.
    """
    if count == 1:
        return 0.0
    x = np.linspace(0.0, 9.0, 1801)
    # The probability beyond x, which is also that below -x.
    tail = np.array([0.5 * math.erfc(point / math.sqrt(2.0)) for point in x])
    heights = 1.0 - (1.0 - tail) ** count - tail**count
    return float((heights[1:] + heights[:-1]).sum() / 2 * (x[1] - x[0]))


# The largest plausible imbalance, as a multiple of the spread of the steps.
_SLACK = 3.0


@dataclass(frozen=True, slots=True)
class Further:
    """One size in one mode, extrapolated.

    Attributes:
        step_ms: milliseconds of a step, with the 90% interval `step_low` to `step_high`.
        speedup, efficiency: relative to the smallest measured size.
        low, high: the efficiency's interval.
        terms: the terms of `step_ms`.
        idle: there are more ranks than micro-batches.
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


def carried(
    request: ScaleRequest, machine: Machine, rows: Sequence[ScaleRow], samples: Sequence[RunSample]
) -> list[Further]:
    """Extrapolate to the sizes of `request.extrapolate`; [] if fewer than two were measured."""
    measured = {(row.ranks, row.batch_size): row for row in rows if row.rounds}
    base = next((row for row in rows if row.rounds and row.ranks == request.base), None)
    if not request.extrapolate or base is None or len({ranks for ranks, _ in measured}) < 2:
        return []
    points = []
    for row in measured.values():
        points.append(
            SizeMeasurement(row.ranks, row.work / base.work, row.rounds, row.ranks / machine.allowed(row.ranks))
        )
    spread = _step_spread(samples, base, request.window)
    fit = Fit(points, request.ranks_per_node, most_imbalance=_SLACK * spread)
    return [_extrapolate(fit, request, mode, size, base) for mode in request.modes for size in request.extrapolate]


def _extrapolate(fit: Fit, request: ScaleRequest, mode: str, size: int, base: ScaleRow) -> Further:
    growth = size / request.base
    strong = mode == STRONG
    batch = base.batch_size if strong else round(base.batch_size * growth)
    work = -(-base.micro_batches // size) / base.work if strong else 1.0
    estimate = fit.predict(size, work)
    # Speed-up times step_ms.
    most = (1.0 if strong else growth) * base.step_ms
    return Further(
        mode,
        size,
        batch,
        estimate.value,
        estimate.low,
        estimate.high,
        speedup=most / estimate.value,
        efficiency=most / estimate.value / growth,
        low=most / estimate.high / growth,
        high=most / estimate.low / growth,
        terms=fit.terms(size, work),
        idle=strong and size > base.micro_batches,
    )


def _step_spread(samples: Sequence[RunSample], base: ScaleRow, window: int) -> float:
    """Return the standard deviation of the smallest size's step, in milliseconds.

    It is estimated from records of `window` steps each. A rank's steps vary about as ranks vary in a step, if they have
    the same devices and work.
    """
    base_samples = [sample for sample in samples if sample.setting == Setting(base.ranks, base.batch_size)]
    means = []
    for sample in base_samples:
        for rate in sample.rates:
            means.append(statistics.median(sample.rates) / rate)
    if len(means) < 2:
        return base.step_ms
    return base.step_ms * statistics.stdev(means) * math.sqrt(window)
