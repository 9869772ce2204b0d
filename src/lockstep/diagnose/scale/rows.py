"""Turn the samples of a measurement into a row for each size: rate, step, speed-up and efficiency."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.diagnose.scale.runs import Machine, RunSample, ScaleRequest, Setting

__all__ = [
    "GOOD",
    "ScaleRow",
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
    shared = machine.shares_cores(row.ranks)
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
        allowed=machine.count_concurrent(row.ranks) / machine.count_concurrent(request.base) if shared else None,
        full=row.micro_batches / (row.work * row.ranks),
        band=_BANDS.get(row.ranks) if request.base == 1 else None,
    )


def _rates(samples: Sequence[RunSample], setting: Setting) -> dict[int, float]:
    """Return items a second by round."""
    rates = {}
    for sample in samples:
        if sample.setting == setting:
            rates[sample.round] = sample.rate
    return rates


def _items(samples: Sequence[RunSample], setting: Setting) -> float:
    """Return the items of a step of the smallest size, from rate and time.

    The records do not count items.
    """
    return statistics.median(1e-3 * sample.total * sample.rate for sample in samples if sample.setting == setting)
