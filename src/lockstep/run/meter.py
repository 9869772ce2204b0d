"""From the steps of a window to one record: what `metrics.jsonl` and the console show.

meter.add(step)                 # of a reader: its numbers are on the host
if (step.record.step + 1) % log_freq == 0:
    sinks.log(meter.read(...))
"""

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.clock import Clock
from lockstep.distributed.step_exchange import StepExchange
from lockstep.guards.reading import ReadStep
from lockstep.numbers import TRAIN, expanded, mean_numbers, merged_sums

__all__ = ["Meter", "memory"]


class _Kept(NamedTuple):
    """What is kept of a step until it is recorded. As tensors it would hold the heap apart."""

    losses: list[float]
    norm: float
    items: float
    numbers: Mapping[str, Sequence[tuple[float, float]]]
    gradients: Mapping[str, float]


class Meter:
    """Keeps the losses of the steps since the last record. It waits for no device.

    Args:
        beat: sums the losses over the ranks.
        clock: where the time went.
        device: whose memory is reported.
        running: the sum of the losses of the window's steps that an earlier process took.
        missed: how many of them had no finite loss, and so are not in the sum.
        numbers: exact sums of these steps' numbers of the task's own, by name.
    """

    def __init__(
        self,
        exchange: StepExchange,
        clock: Clock,
        device: torch.device,
        running: float = 0.0,
        missed: int = 0,
        numbers: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._exchange, self._clock, self._device = exchange, clock, device
        self.running_loss, self.missed = running, missed
        self.numbers = {name: list(sums) for name, sums in (numbers or {}).items()}
        self._kept: list[_Kept] = []
        self.skipped_steps = 0  # since this start
        self._spent: dict[str, float] | None = None  # seconds by part, but for the first window, which holds the start
        self._items, self._since = 0.0, time.perf_counter()

    def add(self, step: ReadStep) -> None:
        """Takes a step whose numbers have been read."""
        self._kept.append(_Kept(step.losses, step.norm, step.record.items, step.numbers, step.gradients))
        self._items += step.record.items
        applied, limit = step.record.applied, step.record.limit
        self.skipped_steps += not (step.norm < limit if applied is None else applied)  # None: the device decided

    def settle(self) -> dict[str, float]:
        """Adds the kept steps to `running_loss` (mean losses, each over all ranks) and to `numbers`.

        Waits for all ranks. Each step's sums are formed in float64, where the order of a few float32 terms does not
        show. A step whose loss is not finite is counted in `missed` instead: the guards name it, and one that is left
        out should not make the window's mean NaN. Its other numbers are left out with it.

        Returns:
            grad_norm of the last step, and gradients/NAME where it took them.
        """
        steps, self._kept = self._kept, []
        if not steps:
            return {"grad_norm": math.nan}
        sums, counted = [math.fsum(step.losses) for step in steps], list[_Kept]()
        for step, total in zip(steps, self._exchange.totals(sums), strict=True):
            loss = total / (step.items or 1)
            if math.isfinite(loss):
                self.running_loss += loss
                counted.append(step)
            else:
                self.missed += 1
        if names := list(dict.fromkeys(name for step in steps for name in step.numbers)):  # on every rank alike
            self._add_numbers(names, counted)
        last = steps[-1]
        return {"grad_norm": last.norm, **{f"gradients/{name}": norm for name, norm in last.gradients.items()}}

    def _add_numbers(self, names: list[str], steps: list[_Kept]) -> None:
        """Add these steps' numbers, over all ranks. Collective."""
        own = [expanded([part for step in steps for part in step.numbers.get(name, ())]) for name in names]
        rows = self._exchange.rows([value for six in own for value in six])  # collective
        for place, name in enumerate(names):
            at = 6 * place
            parts = [self.numbers.get(name, [0.0] * 6), *(row[at : at + 6] for row in rows)]
            self.numbers[name] = merged_sums(parts)

    def read(self, log_freq: int) -> dict[str, Any]:
        """The window's record: running_loss, grad_norm, items_per_second, memory (bytes), time/... (milliseconds).

        Behind them stand train/NAME, the task's own numbers, and gradients/NAME, where there are such.
        """
        norms = self.settle()
        laps = self._clock.read()
        if self._spent is None:
            self._spent = {}
        else:
            self._took("steps", 1e-3 * log_freq * sum(laps.values()))
            for name in ("data", "exchange"):
                self._took(name, 1e-3 * log_freq * laps.get(name, 0.0))
        now = time.perf_counter()
        found = {
            "running_loss": self.running_loss / (log_freq - self.missed) if self.missed < log_freq else math.nan,
            "grad_norm": norms.pop("grad_norm"),
            "items_per_second": self._items / max(now - self._since, 1e-9),
            "memory": memory(self._device),
            **{f"time/{name}": spent for name, spent in laps.items()},
            "time/total": sum(laps.values()),
        }
        if self.skipped_steps:
            found["skipped_steps"] = self.skipped_steps
        found |= {f"{TRAIN}{name}": value for name, value in mean_numbers(self.numbers).items()} | norms
        self.running_loss, self.missed, self._items, self._since = 0.0, 0, 0, now
        self.numbers = {}
        return found

    def pause(self, seconds: float, part: str = "") -> None:
        """Leaves `seconds` of something else out of the throughput; `part` is what it was: "evaluation" or "saves"."""
        self._since += seconds
        self._took(part, seconds)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of `steps`, `data` and `exchange` within them, `evaluation` and `saves`, since the first record."""
        return dict(self._spent or {})

    def _took(self, part: str, seconds: float) -> None:
        if self._spent is not None and part:
            self._spent[part] = self._spent.get(part, 0.0) + seconds


def memory(device: torch.device) -> int:
    """Peak bytes: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, IndexError, ValueError):  # not Linux; and there the peak may be that of the parent
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
