"""Find a learning rate and a micro-batch size by trying them.

    search = lockstep.find_micro_batch(config, task)    # writes nothing
    print(search)                                       # the cost of each size, and the size to train with

`find_lr` trains with a rising rate, and finds where the loss falls fastest. Both only suggest a value for the
configuration, such as `--micro-batch-size`, which is then the same on every device and at every world size.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.clock import make_clock
from lockstep.config.engine_options import ENGINES
from lockstep.config.schema import Config
from lockstep.data.batches import MicroBatch
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.engines.memory import explained
from lockstep.engines.registry import name_of
from lockstep.errors import ConfigError, LockstepError, name_settings
from lockstep.files import bytes_text
from lockstep.logging.console import waiting
from lockstep.logging.plots import curve, rates_picture
from lockstep.loop import StepControl, loss_of, seeder, steps
from lockstep.run_state import RunState
from lockstep.task import items_of_a_sample
from lockstep.training.build import RunParts, build, build_batches
from lockstep.training.build_engine import choose_kernels
from lockstep.training.inference import join_world
from lockstep.training.open_run import load_state

__all__ = [
    "find_lr",
    "find_micro_batch",
    "print_rates",
    "print_sizes",
    "suggest_rate",
]


# --- learning rate

# The range of rates, and the steps over which they rise.
LOWEST = 1e-7
HIGHEST = 10.0
STEPS = 100
# Steps to average, since a single batch may be hard.
_WINDOW = 5
# A loss above these multiples of the lowest loss and of the first losses has diverged.
_RISE_FROM_LOWEST = 4.0
_RISE_FROM_START = 2.0
# Steps: standard deviation of the Gaussian that smooths the losses.
_SIGMA = 2.5
# The rates of these steps are too low to learn.
_FIRST_STEPS = 10
# A fall of the loss counts above this many standard deviations of its noise,
_MIN_FALL_SIGMAS = 1.5
# And above this share of the loss.
_MIN_FALL_SHARE = 0.005
# The descent starts at this share of the whole fall.
_DESCENT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class RateSearch:
    """Result of `find_lr`, the same on every rank.

    Attributes:
        rates: of the optimizer's first group, one per step; the other groups keep their ratio to it.
        losses: mean over the items of each step, before its update. The last may be infinite or NaN.
        smoothed: the finite losses, smoothed.
        lr: the rate at which the loss falls fastest; None if it never clearly falls.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    lr: float | None

    def __str__(self) -> str:
        """Format the curve and the suggestion.

        Losses that rose further than they had fallen are left out: a diverging end would flatten the curve.
        """
        pairs = list(zip(self.rates, self.smoothed, strict=False))
        if self.lr is not None:
            top = 2 * self.smoothed[0] - min(self.smoothed)
            fastest = self.lr
            pairs = [(rate, loss) for rate, loss in pairs if loss <= top or rate <= fastest]
        points = [(math.log10(rate), loss) for rate, loss in pairs]
        lines = curve(points, label=lambda x: f"{10**x:.0e}")
        return "\n".join([f"loss by learning rate, {len(self.rates)} steps", *lines, "", self.suggestion])

    @property
    def suggestion(self) -> str:
        """The suggested rate, in a line."""
        if self.lr is None:
            if self.rates:
                span = f"from {self.rates[0]:.0e} to {self.rates[-1]:.0e}"
            else:
                span = "at all"
            return f"the loss falls at no rate {span}, so none is suggested: check the data, the labels and the loss"
        lowest = self.rates[int(np.argmin(self.smoothed))]
        rates = f"fastest at {self.lr:.1e} and is lowest at {lowest:.1e}"
        return name_settings(f"the loss falls {rates}: begin with --lr {self.lr:.1e}")

    def save(self, path: str | Path) -> None:
        """Write the curve as a picture, in the format of the file's suffix.

        Raises:
            ConfigError: matplotlib is missing.
            OSError: the file cannot be written.
        """
        rates_picture(Path(path), self.rates, self.losses, self.smoothed, self.lr)


def find_lr(config: Config, task: Any = None, world: World | None = None) -> RateSearch:
    """Find a learning rate in up to 100 steps with a rising rate. Collective.

    Trains from new weights (or `init_from`) with the run's optimizer, groups, engine and data, but without its
    schedule, until the loss diverges. The result is discarded.

    Args:
        config, task, world: as for `lockstep.train`.

    Raises:
        UsageError: the configuration cannot be run.
        LockstepError: the steps failed.
    """
    with join_world(config, world) as ranks:
        return _search_rates(config, task, ranks)


def print_rates(config: Config) -> None:
    """Print the rates and write a picture next to the run's folder: `lockstep train --find-lr`."""
    with join_world(config) as world:
        search = find_lr(config, None, world)
        if world.is_main:
            print(search, flush=True)
            _write_picture(search, config)


def _write_picture(search: RateSearch, config: Config) -> None:
    path = Path(config.local_dir).expanduser() / f"{config.experiment_name}-find-lr.svg"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        search.save(path)
        print(f"the curve as a picture: {path}")
    except (ConfigError, OSError) as error:
        print(f"no picture: {error}")


def _search_rates(config: Config, task: Any, world: World) -> RateSearch:
    with explained(None, world):
        built = build(config, task, world, resume=False, steps=STEPS)
    if not built.lr:
        raise ConfigError("--lr is 0, so there is no rate to raise: give a number above 0, or leave it out")
    initial = {name: tensor.detach().clone() for name, tensor in built.own_tensors.items()}
    # The weights of --init-from.
    load_state(built)
    try:
        with explained(built.engine, world):
            losses = _train_losses(built)
    finally:
        _restore_own_tensors(built, initial)
    rates = [rate_at(step) for step in range(len(losses))]
    return RateSearch(rates, losses, *suggest_rate(rates, losses))


def rate_at(step: int) -> float:
    """Return the rate of a step (from 0), between LOWEST and HIGHEST."""
    return float(LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1)))


def _train_losses(built: RunParts) -> list[float]:
    """Train, and return the losses until they diverge, the same on every rank. Collective."""
    world = built.world
    step_plan = built.run_plan.step_plan
    step_loader = built.batches.from_step(0)
    constant = built.batches.known_items(items_of_a_sample(built.task))
    exchange = StepExchange(world, step_loader.items, constant, step_plan.steps)
    exchange.take_turns(step_loader.turns)
    exchange.limit_reading(step_loader.readable_before)
    seed = seeder(built.config.seed, "micro", world.device)
    kernels = choose_kernels(built.config.compile, step_plan)
    clock = make_clock(world.device)
    control = StepControl(lambda step: rate_at(step) / built.lr, seed, clock, kernels=kernels)
    built.groups.settings.overrules = True
    losses: list[float] = []
    with closing(step_loader), closing(exchange), waiting("trying rates", shown=world.is_main) as progress:
        for record in steps(built.engine, built.task, step_loader, exchange, control):
            # Waits for the device, once for each step of the search.
            rank_losses = [float(loss) for loss in record.losses]
            gathered = []
            # Every rank needs the loss of the whole step, so that all of them end at the same one.
            for values in world.gather(rank_losses):
                gathered.extend(values)
            losses.append(_mean(gathered, record.items))
            progress(len(losses), STEPS)
            if not math.isfinite(losses[-1]) or _diverges(losses):
                break
    return losses


def _mean(losses: list[float], items: float) -> float:
    if all(map(math.isfinite, losses)):
        return math.fsum(losses) / (items or 1)
    return math.nan


def _diverges(losses: list[float]) -> bool:
    """Whether the last losses are far above the lowest average and the first losses."""
    if len(losses) <= _FIRST_STEPS:
        return False
    means = np.convolve(losses, np.full(_WINDOW, 1 / _WINDOW), "valid")
    return bool(
        means[-1] > max(_RISE_FROM_LOWEST * means.min(), _RISE_FROM_START * np.mean(losses[:_FIRST_STEPS]))
        and means.min() > 0
    )


def _restore_own_tensors(built: RunParts, first: dict[str, torch.Tensor]) -> None:
    """Restore the task's own tensors."""
    tensors = built.own_tensors
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(first[name])
    built.load_state_dict(tensors)


def suggest_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[list[float], float | None]:
    """Smooth the losses, and find the rate at which they fall fastest.

    The Gaussian is centred on each step, so that the curve is not shifted to higher rates. Only the descent to the
    lowest point counts, from a tenth of its fall on: before, only the batches differ.

    Args:
        rates: one per step, rising by a constant factor.
        losses: one per step; the first that is not finite and those after it are dropped.

    Returns:
        The smoothed losses, and the rate; None if they never clearly fall.
    """
    # Leave out what follows the first loss that is not finite.
    finite = [math.isfinite(loss) for loss in losses]
    values = np.array(losses[: finite.index(False) if False in finite else None], dtype=np.float64)
    if not len(values):
        return [], None
    index = np.arange(len(values))
    # A Gaussian smooths the noise of single batches.
    kernel = np.exp(-0.5 * ((index[:, None] - index[None, :]) / _SIGMA) ** 2)
    smoothed = kernel @ values / kernel.sum(1)
    start = values[:_FIRST_STEPS]
    lowest = int(np.argmin(smoothed))
    fall = start.mean() - smoothed[lowest]
    noise = (values - smoothed)[: max(lowest + 1, _FIRST_STEPS)].std()
    if lowest < 2 or fall <= max(_MIN_FALL_SIGMAS * noise, _MIN_FALL_SHARE * abs(start.mean())):
        return smoothed.tolist(), None
    # The steepest slope counts only after the loss has begun to fall.
    high = np.flatnonzero(smoothed[:lowest] >= start.mean() - _DESCENT_SHARE * fall)
    begin = int(high[-1]) if len(high) else 0
    slope = np.gradient(smoothed)[begin : lowest + 1]
    return smoothed.tolist(), float(rates[begin + int(np.argmin(slope))])


# --- micro-batch size

# Share of the device's memory to use: batches differ, and memory fragments.
_MARGIN = 0.9
# A size is slower if a sample takes more than this multiple of a smaller size's time.
_SLOWER = 1.02


class SizeCost(NamedTuple):
    """Cost of a micro-batch size, on the slowest and fullest ranks.

    Attributes:
        size: samples in a forward.
        peak: bytes of the device, with parameters, gradients and optimizer states; 0: it did not fit.
        seconds: of forward and backward, per sample.
    """

    size: int
    peak: int
    seconds: float


MeasureCost = Callable[[Callable[[], None]], tuple[int, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class SizeSearch:
    """Result of `find_micro_batch`, the same on every rank.

    Attributes:
        costs: by size, from the smallest; the last may be one that did not fit.
        total: bytes of the smallest device.
        size: the largest that leaves a tenth of the device free and is no slower than a smaller one; 0: none fits.
    """

    costs: list[SizeCost]
    total: int
    size: int

    def __str__(self) -> str:
        lines = []
        for cost in self.costs:
            lines.append(
                f"{cost.size:6d}  "
                + (f"{bytes_text(cost.peak)}, {cost.seconds * 1e3:.3g} ms a sample" if cost.peak else "-")
            )
        if self.size:
            end = f"train with --micro-batch-size {self.size}"
        else:
            end = "no size fits: split the model, --engine fsdp"
        return "\n".join(
            [f"samples in a forward, on a device of {bytes_text(self.total)}:", *lines, name_settings(end)]
        )


def find_micro_batch(
    config: Config, task: Any = None, world: World | None = None, measure: MeasureCost | None = None, total: int = 0
) -> SizeSearch:
    """Find the largest micro-batch size that fits and is fast. Collective.

    Tries the powers of two that divide the batch, from 1 on, until one does not fit on some rank, and discards the
    results. The first micro-batch of the data is measured: if samples differ much in length, leave more than a tenth
    free.

    Args:
        config, task, world: as for `lockstep.train`.
        measure: calls its argument, and returns the peak in bytes and the seconds of one call; None: for a CUDA
            device.
        total: bytes of the device; 0: as CUDA reports.

    Raises:
        UsageError: the configuration cannot be run; there is no CUDA device; or the engine's forward needs all ranks.
        LockstepError: the model failed.
    """
    with join_world(config, world) as ranks:
        return _search_sizes(config, task, ranks, measure, total)


def print_sizes(config: Config) -> None:
    """Print the sizes on rank 0: `lockstep train --find-micro-batch`."""
    with join_world(config) as world:
        search = find_micro_batch(config, None, world)
        if world.is_main:
            print(search, flush=True)


def _search_sizes(config: Config, task: Any, world: World, measure: MeasureCost | None, total: int) -> SizeSearch:
    if measure is None and world.device.type != "cuda":
        raise ConfigError("--find-micro-batch measures a CUDA device, and this run has none: leave it out")
    if not ENGINES[name_of(config.engine, world)].shares:
        raise ConfigError(
            f"--find-micro-batch does not go with --engine {config.engine}: its forward needs all ranks, and would "
            "hang if one runs out of memory; give --micro-batch-size"
        )
    config = dataclasses.replace(config, shares="equal")
    with explained(None, world):
        built = build(config, task, world, resume=False)
    if built.run_plan.grouped:
        raise ConfigError(
            "--find-micro-batch looks for a number of samples, but groups have different ones: leave it out"
        )
    initial = [(tensor, tensor.detach().clone()) for tensor in built.own_tensors.values()]
    with explained(built.engine, world):
        # Collective. This allocates the optimizer's states, as in training.
        built.engine.state_dict()
        try:
            costs = _measure_sizes(built, measure or _cuda_measure(world.device))
        finally:
            for tensor, before in initial:
                tensor.detach().copy_(before)
            built.task.load_state_dict(built.task.state_dict())
    # The device with the least memory decides for all ranks.
    total = min(world.gather(total or torch.cuda.mem_get_info(world.device)[1]))
    return SizeSearch(costs, total, choose_size(costs, total, _exact_sum_bytes(built)))


def choose_size(costs: list[SizeCost], total: int, extra: int = 0) -> int:
    """Return the largest size that fits and is not slower; 0: none fits.

    A size fits if its peak and `extra` are at most nine tenths of `total`.

    Args:
        extra: bytes needed in addition to each peak.
    """
    best = 0
    fastest = float("inf")
    for cost in costs:
        fastest = min(fastest, cost.seconds) if cost.peak else fastest
        if cost.peak and cost.peak + extra <= _MARGIN * total and cost.seconds <= _SLOWER * fastest:
            best = cost.size
    return best


def _exact_sum_bytes(built: RunParts) -> int:
    """Return the most bytes that exact sums need in addition to a gradient."""
    if not built.config.exact:
        return 0
    trained = sum(p.nbytes for p in built.model.parameters() if p.requires_grad)
    return trained * built.config.batch_size.bit_length()


def _measure_sizes(built: RunParts, measure: MeasureCost) -> list[SizeCost]:
    """Try each size until one does not fit on some rank. Collective."""
    world = built.world
    batch_size = built.config.batch_size
    costs = list[SizeCost]()
    sizes = []
    for power in range(batch_size.bit_length()):
        if batch_size % (1 << power) == 0:
            sizes.append(1 << power)
    with waiting("trying sizes", shown=world.is_main) as progress:
        for index, size in enumerate(sizes):
            cost, error = _measure_on_rank(built, size, measure)
            # Any error but a lack of memory ends the search on every rank.
            world.check(error)
            # A size must fit every rank, and the slowest rank decides its speed.
            peaks, seconds = zip(*world.gather(list(cost)), strict=True)
            fits = all(peaks)
            costs.append(SizeCost(size, max(peaks) * fits, max(seconds) / size))
            progress(index + 1, len(sizes))
            if not fits:
                break
    return costs


def _measure_on_rank(
    built: RunParts, size: int, measure: MeasureCost
) -> tuple[tuple[int, float], LockstepError | None]:
    """Return (peak, seconds) on this rank, and any error but a lack of memory."""
    try:
        batch = _first_batch(built, size)
        return measure(lambda: _forward_and_backward(built, batch)), None
    except torch.OutOfMemoryError:
        return (0, 0.0), None
    except LockstepError as error:
        return (0, 0.0), error
    finally:
        for parameter in built.model.parameters():
            parameter.grad = None
        if built.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _first_batch(built: RunParts, size: int) -> MicroBatch:
    config = dataclasses.replace(built.config, micro_batch_size=size)
    run_plan = dataclasses.replace(built.run_plan, config=config)
    stream, _ = build_batches(config, built.task, built.training, run_plan, built.world, RunState())
    ((batch, _),) = stream.parts(0, [(0, stream.own_samples(0))])
    return batch


def _forward_and_backward(built: RunParts, batch: MicroBatch) -> None:
    """Run a forward and a backward without the engine, whose exchange needs all ranks."""
    loss_sum: Callable[[nn.Module, MicroBatch], Tensor] = loss_of(built.task)
    seeder(built.config.seed, "micro", built.world.device)(0, batch.index)
    # torch's `backward` has no annotations.
    loss_sum(built.model, batch).backward()  # type: ignore[no-untyped-call]


def _cuda_measure(device: torch.device) -> MeasureCost:
    """Return a function that measures a call on a CUDA device."""

    def measure(once: Callable[[], None]) -> tuple[int, float]:
        # The first call chooses kernels, and allocates gradients.
        once()
        # Waits for the device: earlier work must not count.
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        once()
        # Waits for the device, whose work must be over.
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        return torch.cuda.max_memory_reserved(device), seconds

    return measure
