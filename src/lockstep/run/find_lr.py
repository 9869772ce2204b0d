"""The rate finder: a hundred steps with a rate that grows from step to step, and where the loss falls fastest in them.

    found = lockstep.find_lr(config, task)      # nothing is written, and nothing kept
    print(found)                                # the curve, and the rate to begin with
    found.save("rates.svg")                     # the curve as a picture; needs the extra `plot`

Smith, "Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186, section 3.3; the rate grows by the same
factor in each step, as in most programs that have this.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.clock import make_clock
from lockstep.config.config import Config
from lockstep.distributed.step_exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.engines.shared.oom import explained
from lockstep.errors import ConfigError, said
from lockstep.loop import StepControl, seeder, steps
from lockstep.run.build import Built, build
from lockstep.run.joined import joined
from lockstep.run.kernels import kernels_of
from lockstep.run.opening import load_state
from lockstep.sinks.picture import rates_picture
from lockstep.sinks.plot import curve
from lockstep.sinks.waiting import waiting
from lockstep.task import items_of_a_sample

__all__ = ["FoundRates", "find_lr", "judged", "show"]

LOWEST, HIGHEST, STEPS = 1e-7, 10.0, 100
_LAST = 5  # steps: a single batch may be a hard one
_DIVERGED, _RISEN = 4.0, 2.0  # times the least loss, and times that of the begin, from which on it has diverged
_WIDTH = 2.5  # steps: standard deviation of the bell that the losses are smoothed with
_FLAT = 10  # first steps, whose rates are too low to teach anything
_CLEAR = 1.5  # standard deviations of the scatter that the loss must fall by, at least
_SHARE = 0.005  # and of the loss
_BEGUN = 0.1  # of the whole fall: from there on the descent has begun


@dataclass(frozen=True, slots=True)
class FoundRates:
    """What the steps gave, the same on every rank.

    Attributes:
        rates: of the optimizer's first group, one a step; the others keep their ratio to it.
        losses: of the step with that rate, before its update: mean over its items. The last may be infinite or NaN.
        smoothed: the same without their scatter; of those that are finite.
        lr: where the loss falls fastest; None where it never falls.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    lr: float | None

    def __str__(self) -> str:
        """The curve, as far up again as it came down, and what it says in a line."""
        pairs = list(zip(self.rates, self.smoothed, strict=False))
        if self.lr is not None:  # what diverges would press the rest flat
            top, least = 2 * self.smoothed[0] - min(self.smoothed), self.lr
            pairs = [(rate, loss) for rate, loss in pairs if loss <= top or rate <= least]
        points = [(math.log10(rate), loss) for rate, loss in pairs]
        lines = curve(points, label=lambda x: f"{10**x:.0e}")
        return "\n".join([f"loss by learning rate, {len(self.rates)} steps", *lines, "", self.said])

    @property
    def said(self) -> str:
        """What the curve says, in a line."""
        if self.lr is None:
            span = f"from {self.rates[0]:.0e} to {self.rates[-1]:.0e}" if self.rates else "at all"
            return f"the loss falls at no rate {span}, so none is suggested: look at the data, the labels and the loss"
        lowest = self.rates[int(np.argmin(self.smoothed))]
        where = f"fastest at {self.lr:.1e} and is lowest at {lowest:.1e}"
        return said(f"the loss falls {where}: begin with --lr {self.lr:.1e}")

    def save(self, path: str | Path) -> None:
        """Writes the curve as a picture: an SVG, or what the name ends with.

        Raises:
            ConfigError: matplotlib is missing.
            OSError: the file cannot be written.
        """
        rates_picture(Path(path), self.rates, self.losses, self.smoothed, self.lr)


def find_lr(config: Config, task: Any = None, world: World | None = None) -> FoundRates:
    """Trains for up to 100 steps from a new run's weights (those of `init_from` too), and forgets them.

    Without the run's schedule; with its optimizer, groups, engine and data. It ends where the loss diverges.

    Args:
        config, task, world: as for `lockstep.train`.

    Raises:
        UsageError: what was asked for cannot be done.
        LockstepError: the steps failed.
    """
    with joined(config, world) as ranks:
        return _found(config, task, ranks)


def show(config: Config) -> None:
    """`lockstep train --find-lr`: prints what was found and writes the picture beside the run's folder, on rank 0."""
    with joined(config) as world:
        found = find_lr(config, None, world)
        if world.is_main:
            print(found, flush=True)
            _write(found, config)


def _write(found: FoundRates, config: Config) -> None:
    path = Path(config.save_dir).expanduser() / f"{config.experiment_name}-find-lr.svg"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
        print(f"the curve as a picture: {path}")
    except (ConfigError, OSError) as error:
        print(f"no picture: {error}")


def _found(config: Config, task: Any, world: World) -> FoundRates:
    with explained(None, world):
        built = build(config, task, world, resume=False, steps=STEPS)
    if not built.lr:
        raise ConfigError("--lr is 0, and so is every multiple of it: give it a number above 0, or leave it out")
    first = {name: tensor.detach().clone() for name, tensor in built.own.items()}
    load_state(built)  # --init-from
    try:
        with explained(built.engine, world):
            losses = _losses(built)
    finally:
        _give_back(built, first)
    rates = [rate_of(step) for step in range(len(losses))]
    return FoundRates(rates, losses, *judged(rates, losses))


def rate_of(step: int) -> float:
    """The rate of a step, 0-based: from LOWEST to HIGHEST."""
    return float(LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1)))


def _losses(built: Built) -> list[float]:
    """The loss of each step until it diverges; decided alike on every rank. Collective."""
    world, step_plan, each = built.world, built.run_plan.step_plan, items_of_a_sample(built.task)
    step_loader = built.batches.from_step(0)
    constant = (lambda step: each * step_plan.samples(step)) if each else None
    exchange = StepExchange(world, step_loader.items, constant, step_plan.steps)
    seed = seeder(built.config.seed, "micro", world.device)
    kernels, clock = kernels_of(built.config.compile, step_plan), make_clock(world.device)
    control = StepControl(lambda step: rate_of(step) / built.lr, seed, clock, kernels=kernels)
    losses: list[float] = []
    with closing(step_loader), closing(exchange), waiting("trying rates", shown=world.is_main) as progress:
        for record in steps(built.engine, built.task, step_loader, exchange, control):
            own = [float(loss) for loss in record.losses]  # waits for the device
            every = [loss for part in world.gather(own) for loss in part]  # collective
            losses.append(_mean(every, record.items))
            progress(len(losses), STEPS)
            if not math.isfinite(losses[-1]) or _diverges(losses):
                break
    return losses


def _mean(losses: list[float], items: float) -> float:
    return math.fsum(losses) / (items or 1) if all(map(math.isfinite, losses)) else math.nan


def _diverges(losses: list[float]) -> bool:
    """Whether the last losses are far above the least that as many had, and above those of the begin."""
    if len(losses) <= _FLAT:
        return False
    means = np.convolve(losses, np.full(_LAST, 1 / _LAST), "valid")
    return bool(means[-1] > max(_DIVERGED * means.min(), _RISEN * np.mean(losses[:_FLAT])) and means.min() > 0)


def _give_back(built: Built, first: dict[str, torch.Tensor]) -> None:
    """Gives the task's own tensors what they held before."""
    own = built.own
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(first[name])
    built.load_state_dict(own)


def judged(rates: Sequence[float], losses: Sequence[float]) -> tuple[list[float], float | None]:
    """The losses without their scatter, and the rate at which they fall fastest; None where they never clearly fall.

    Args:
        rates: one a step, rising by the same factor.
        losses: as many; from the first that is not finite on they are left out.

    Smoothed is with a bell that is centred on each step, so that the curve is not moved to higher rates. What counts is
    the descent to the lowest point, once it has come down a tenth of its way: before, only the batches differ.
    """
    finite = [math.isfinite(loss) for loss in losses]
    kept = np.array(losses[: finite.index(False) if False in finite else None], dtype=np.float64)
    if not len(kept):
        return [], None
    apart = np.arange(len(kept))
    bell = np.exp(-0.5 * ((apart[:, None] - apart[None, :]) / _WIDTH) ** 2)
    smoothed = bell @ kept / bell.sum(1)
    start, lowest = kept[:_FLAT], int(np.argmin(smoothed))
    fall = start.mean() - smoothed[lowest]
    scatter = (kept - smoothed)[: max(lowest + 1, _FLAT)].std()
    if lowest < 2 or fall <= max(_CLEAR * scatter, _SHARE * abs(start.mean())):
        return smoothed.tolist(), None
    high = np.flatnonzero(smoothed[:lowest] >= start.mean() - _BEGUN * fall)
    begin = int(high[-1]) if len(high) else 0
    slope = np.gradient(smoothed)[begin : lowest + 1]
    return smoothed.tolist(), float(rates[begin + int(np.argmin(slope))])
