"""From the samples of all rounds to rows: speed-up and efficiency with their spread, beside what may be expected.

rows = rows_of(request, machine, samples, failures, micro_batch_size=4)         # one a mode and size
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.diagnose.scale.machine import Machine
from lockstep.diagnose.scale.request import Request, Setting
from lockstep.diagnose.scale.runs import Sample

__all__ = ["BANDS", "GOOD", "Row", "rows_of"]

# Ranks -> the efficiency that the source document expects of well-set-up training on GPUs ("Scaling Efficiency
# Analysis"), beside one rank.
BANDS = {2: (0.90, 0.95), 4: (0.85, 0.95), 8: (0.80, 0.90), 16: (0.75, 0.90)}
GOOD = 0.80  # below it the same document says: check what takes the time


@dataclass(frozen=True, slots=True)
class Row:
    """One size in one mode.

    Attributes:
        mode: "strong" or "weak".
        ranks, batch_size, micro_batches: of the setting; micro-batches of a whole step.
        rate: items a second over all ranks, median over the rounds.
        step_ms: milliseconds of a step, from `rate`, so that what lies between two steps counts too.
        rounds: step_ms of each round, in the order of the rounds.
        speedup: `rate` beside that of the smallest size, median of the rounds' own ratios.
        efficiency: the same beside the growth in ranks; `low`, `high`: the least and the largest of the rounds.
        allowed: the largest speed-up that the cores allow; None where each rank has its own.
        full: share of the slots of a step that hold a micro-batch; below 1 some rank has fewer than another.
        band: what the source expects; None where it says nothing of this size.
        error: why there is no measurement; "" else.
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
        """The speed-up beside what the cores allow; the efficiency itself where each rank has its own."""
        return self.efficiency if self.allowed is None else self.speedup / self.allowed

    @property
    def work(self) -> int:
        """Micro-batches of the rank that has most."""
        return -(-self.micro_batches // self.ranks)


def rows_of(
    request: Request,
    machine: Machine,
    samples: Sequence[Sample],
    failures: Mapping[Setting, str],
    micro_batch_size: int,
) -> list[Row]:
    """A row for each mode and size, by mode and then by ranks; a size whose run failed has its error."""
    found = []
    for mode in request.modes:
        settings = request.settings(mode)
        first = _rates(samples, settings[0])
        for setting in settings:
            parts = setting.batch_size // micro_batch_size
            shell = Row(mode, setting.ranks, setting.batch_size, parts, error=failures.get(setting, ""))
            rates = _rates(samples, setting)
            if shell.error or not rates or not first:
                found.append(shell)
                continue
            found.append(_measured(shell, request, machine, rates, first, _items(samples, settings[0])))
    return found


def _measured(
    row: Row, request: Request, machine: Machine, rates: dict[int, float], first: dict[int, float], items: float
) -> Row:
    """`row` with its numbers.

    Args:
        rates, first: items a second by round, of this setting and of the smallest size.
        items: of a step of the smallest size.
    """
    growth = row.ranks / request.base
    in_step = items * row.batch_size / request.settings(row.mode)[0].batch_size
    ratios = [rate / first[number] for number, rate in rates.items() if number in first]
    ratios = ratios or [statistics.median(rates.values()) / statistics.median(first.values())]
    speedup, rate = statistics.median(ratios), statistics.median(rates.values())
    shared = machine.shared(row.ranks)
    return Row(
        row.mode,
        row.ranks,
        row.batch_size,
        row.micro_batches,
        rate=rate,
        step_ms=1e3 * in_step / rate,
        rounds=tuple(1e3 * in_step / each for _, each in sorted(rates.items())),
        speedup=speedup,
        efficiency=speedup / growth,
        low=min(ratios) / growth,
        high=max(ratios) / growth,
        allowed=machine.allowed(row.ranks) / machine.allowed(request.base) if shared else None,
        full=row.micro_batches / (row.work * row.ranks),
        band=BANDS.get(row.ranks) if request.base == 1 else None,
    )


def _rates(samples: Sequence[Sample], setting: Setting) -> dict[int, float]:
    """Items a second by round."""
    return {sample.round: sample.rate for sample in samples if sample.setting == setting}


def _items(samples: Sequence[Sample], setting: Setting) -> float:
    """Items of a step, as rate and time of the smallest size say: the records count no items."""
    return statistics.median(1e-3 * each.total * each.rate for each in samples if each.setting == setting)
