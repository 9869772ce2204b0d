"""The learning rate as a pure function of the step: base rate times factor.

    rate = base * factor(step, horizon, warmup, floor)

Nothing is stepped and nothing is saved, so a resume, a skipped step or another world size cannot shift it.
`torch_schedule` turns a scheduler of torch into such a function.
"""

import math
import warnings
from array import array
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.errors import ConfigError

__all__ = [
    "NONE",
    "cycled_momentum",
    "factor",
    "torch_schedule",
]


Make = Callable[[Optimizer, int], Any]

# Momentum of the dummy optimizer: some schedulers need one.
_DUMMY_MOMENTUM = 0.9


@final
class TorchSchedule:
    """A schedule from torch's scheduler: (step, steps) -> factor of the base rates.

    See `torch_schedule`.
    """

    def __init__(self, make: Make, lr: float) -> None:
        self._make = make
        self._lr = lr
        self._table = array("d")
        self._steps = 0

    def __call__(self, step: int, steps: int) -> float:
        """Return the factor of `step` (0-based) in a plan of `steps`.

        After the plan's end it is that of the last step. The whole plan is tabulated at the first call for its number
        of steps, which takes some ten microseconds a step.

        Raises:
            ConfigError: `make` failed, returned no scheduler, or one that depends on more than the step.
        """
        if steps != self._steps:
            self._table = _tabulate(self._make, self._lr, steps)
            self._steps = steps
        return self._table[min(step, steps - 1)]


def torch_schedule(make: Make, lr: float = 1.0) -> TorchSchedule:
    """Wrap a scheduler of `torch.optim.lr_scheduler` for a task's `schedule`.

    Args:
        make: (optimizer, steps) -> the optimizer's scheduler, an LRScheduler, for a plan of that many steps. The
            optimizer is a dummy with one group: the factor applies to all groups, whose rates keep their ratio.
        lr: the optimizer's rate, to which rates that the scheduler names (`eta_min`, OneCycleLR's `max_lr`) are
            compared: with 1 they are fractions of the base rate, with --lr they are rates.

    Raises:
        ConfigError: `lr` is not above 0.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"torch_schedule: lr is {lr}; it must be a finite rate above 0")
    return TorchSchedule(make, lr)


def _tabulate(make: Make, lr: float, steps: int) -> "array[float]":
    optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=lr, momentum=_DUMMY_MOMENTUM)
    (group,) = optimizer.param_groups
    table = array("d")
    try:
        with warnings.catch_warnings():
            # torch's own SequentialLR causes warnings.
            warnings.simplefilter("ignore")
            scheduler = make(optimizer, steps)
            _check(scheduler, optimizer)
            for step in range(steps):
                if step:
                    # torch requires the optimizer's step before the scheduler's.
                    optimizer.step()
                    scheduler.step()
                table.append(float(group["lr"]) / lr)
                if group["momentum"] != _DUMMY_MOMENTUM:
                    raise ConfigError(
                        f"torch_schedule: {type(scheduler).__name__} cycles the momentum too, which a task's "
                        "`schedule` cannot; pass cycle_momentum=False, or use --optim.schedule one-cycle, which "
                        "cycles both"
                    )
    except ConfigError:
        raise
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ConfigError(
            f"torch_schedule: the scheduler failed in step {len(table) + 1} of {steps}: {type(error).__name__}: {line}"
        ) from error
    return table


def _check(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise ConfigError unless it is a scheduler of `optimizer` that depends on the step alone."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "torch_schedule: ReduceLROnPlateau depends on evaluations, not on the step; use --optim.schedule plateau, "
            "and remove the task's `schedule`"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"torch_schedule: the function returned {type(scheduler).__name__}; return a scheduler of "
            "torch.optim.lr_scheduler for the given optimizer"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError("torch_schedule: the scheduler belongs to another optimizer; build it with the given one")


SHAPES = (
    *("cosine", "cosine-periodic", "linear", "polynomial", "wsd", "constant"),
    *("inverse-sqrt", "step", "one-cycle", "plateau"),
)
# Writes no rate.
NONE = "none"
# one-cycle: the first rate as a fraction of the peak, 1 / torch's `div_factor` of 25.
_CYCLE_START = 0.04
# one-cycle: torch's momentum at the peak of the rate, and at both ends.
_MOMENTUM = (0.85, 0.95)


# PLR0913: a pure function of the flags of --optim, without an object to hold them.
def factor(  # noqa: PLR0913
    step: int,
    horizon: int,
    warmup: int,
    floor: float,
    shape: str = "cosine",
    *,
    cooldown: float = 0.2,
    power: float = 1.0,
    period: int = 0,
    gamma: float = 0.1,
    drops: int = 0,
) -> float:
    """Return the factor of the base learning rate in `step` (0-based).

    Linear warm-up over `warmup` steps, reaching 1 at step `warmup`, then `shape`:

    - "cosine" to `floor` at `horizon` (Loshchilov & Hutter, "SGDR", arXiv 1608.03983, without restarts);
    - "linear" to `floor` at `horizon` (Devlin et al., "BERT", arXiv 1810.04805; the default of the HF Trainer, to 0);
    - "polynomial" to `floor` at `horizon` as (1 - x) ** `power`; torch's PolynomialLR without a warm-up;
    - "wsd", warm-up, stable, decay (Hu et al., "MiniCPM", arXiv 2404.06395): 1, then over the last `cooldown` fraction
      of `horizon` down to `floor` as 1 - sqrt(x) (Haegele et al., arXiv 2405.18392, section 3);
    - "constant";
    - "inverse-sqrt", 1 / sqrt(step / warmup) (Vaswani et al., arXiv 1706.03762, section 5.3), never below `floor`;
    - "step", times `gamma` after every `period` steps (0: a third of `horizon`), torch's StepLR, never below `floor`;
    - "plateau", times `gamma` for each of the `drops` times that evaluations stopped improving, as torch's
      ReduceLROnPlateau, never below `floor`; the step itself only matters in the warm-up;
    - "cosine-periodic", which rises again after `horizon`, the closed form of torch's CosineAnnealingLR;
    - "one-cycle" (Smith & Topin, "Super-Convergence", arXiv 1708.07120), torch's OneCycleLR: over `warmup` steps half
      a cosine from 0.04 to 1, then half a cosine down to `floor` in the last step.

    From `horizon` on the factor is `floor`, except for "constant" (1), for "inverse-sqrt", "step" and "plateau", which
    continue, and for "cosine-periodic".
    """
    if shape == "one-cycle":
        height, falling = _in_cycle(step, horizon, warmup)
        low = floor if falling else _CYCLE_START
        return low + (1.0 - low) * height
    share = max(floor, gamma**drops) if shape == "plateau" else 1.0
    if step < warmup:
        return share * (step + 1) / (warmup + 1)
    if shape == "plateau":
        return share
    if shape == "constant":
        return 1.0
    if shape == "inverse-sqrt":
        return max(floor, math.sqrt(max(warmup, 1) / max(step, 1)))
    if shape == "step":
        return max(floor, gamma ** ((step - warmup) // (period or max(1, horizon // 3))))
    if step >= horizon and shape != "cosine-periodic":
        return floor
    if shape == "wsd":
        begin = max(warmup, horizon - round(cooldown * horizon))
    else:
        begin = warmup
    progress = max(0.0, (step - begin) / max(1, horizon - begin))
    if shape == "linear":
        share = 1.0 - progress
    elif shape == "polynomial":
        share = (1.0 - progress) ** power
    elif shape == "wsd":
        share = 1.0 - math.sqrt(progress)
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * share


def cycled_momentum(step: int, horizon: int, warmup: int) -> float:
    """Return the momentum (adamw: beta1) of "one-cycle" in `step`.

    Lowest at the highest rate, as in torch's OneCycleLR.
    """
    low, high = _MOMENTUM
    return high + (low - high) * _in_cycle(step, horizon, warmup)[0]


def _in_cycle(step: int, horizon: int, warmup: int) -> tuple[float, bool]:
    """Return a step's height in the cycle, and whether it is falling.

    The height goes from 0 to 1 and back along half cosines.
    """
    # The step of the highest rate.
    peak = warmup - 1
    if step <= peak:
        return 0.5 * (1.0 - math.cos(math.pi * step / peak)) if peak else 1.0, False
    progress = min(1.0, (step - peak) / max(1, horizon - 1 - peak))
    return 0.5 * (1.0 + math.cos(math.pi * progress)), True
