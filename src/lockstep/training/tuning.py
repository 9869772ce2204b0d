"""How many samples a forward takes best on this device: sizes are tried, each with a forward and a backward.

    found = lockstep.find_micro_batch(config, task)     # nothing is written, and nothing kept
    print(found)                                        # what each size takes, and the one to train with

A size is a number of the run like any other (`--micro-batch-size`), the same on every device and at every world size:
what is found here is proposed, and given to a run by hand.
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
from lockstep.errors import ConfigError, LockstepError, said
from lockstep.files import bytes_text
from lockstep.logging.console import waiting
from lockstep.logging.plots import curve, rates_picture
from lockstep.loop import StepControl, loss_of, seeder, steps
from lockstep.task import items_of_a_sample
from lockstep.training.build import Built, build, stream_of
from lockstep.training.build_engine import kernels_of
from lockstep.training.inference import joined
from lockstep.training.open_run import load_state

__all__ = [
    "FoundRates",
    "FoundSizes",
    "Took",
    "find_lr",
    "find_micro_batch",
    "judged",
    "show_rates",
    "show_sizes",
]


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
        return _summarize_rates(config, task, ranks)


def show_rates(config: Config) -> None:
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


def _summarize_rates(config: Config, task: Any, world: World) -> FoundRates:
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


_MARGIN = 0.9  # share of the device that may be taken: batches differ, and memory is cut into pieces
_SLOWER = 1.02  # times the seconds a sample of a smaller size, up to which a larger one is no slower


class Took(NamedTuple):
    """What a size took, on the rank that had it worst.

    Attributes:
        size: samples in a forward.
        peak: bytes of the device, with parameters, gradients and the optimizer's states; 0: it did not fit.
        seconds: a sample, forward and backward.
    """

    size: int
    peak: int
    seconds: float


Measure = Callable[[Callable[[], None]], tuple[int, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class FoundSizes:
    """The same on every rank.

    Attributes:
        took: by size, from the smallest; the last may be one that did not fit.
        total: bytes of the smallest device.
        size: the largest that leaves a tenth of the device free and is no slower than a smaller one; 0: none fits.
    """

    took: list[Took]
    total: int
    size: int

    def __str__(self) -> str:
        lines = [
            f"{each.size:6d}  "
            + (f"{bytes_text(each.peak)}, {each.seconds * 1e3:.3g} ms a sample" if each.peak else "-")
            for each in self.took
        ]
        end = (
            f"train with --micro-batch-size {self.size}"
            if self.size
            else "no size fits: split the model, --engine fsdp"
        )
        return "\n".join([f"samples in a forward, on a device of {bytes_text(self.total)}:", *lines, said(end)])


def find_micro_batch(
    config: Config, task: Any = None, world: World | None = None, measure: Measure | None = None, total: int = 0
) -> FoundSizes:
    """Tries the powers of two that divide the batch, from 1 on, until one does not fit. Nothing of it is kept.

    Each rank computes micro-batches of its own; the worst counts. What is measured is the stream's first micro-batch:
    where samples differ much in length, leave more free than the tenth.

    Args:
        config, task, world: as for `lockstep.train`.
        measure: calls what it is given, and says the peak in bytes and the seconds of one call; None: on a CUDA device.
        total: bytes of the device; 0: as CUDA says.

    Raises:
        UsageError: what was asked for cannot be done; no CUDA device; an engine whose forward takes all ranks.
        LockstepError: the model failed.
    """
    with joined(config, world) as ranks:
        return _summarize_sizes(config, task, ranks, measure, total)


def show_sizes(config: Config) -> None:
    """`lockstep train --find-micro-batch`: prints what was found, on rank 0."""
    with joined(config) as world:
        found = find_micro_batch(config, None, world)
        if world.is_main:
            print(found, flush=True)


def _summarize_sizes(config: Config, task: Any, world: World, measure: Measure | None, total: int) -> FoundSizes:
    if measure is None and world.device.type != "cuda":
        raise ConfigError("--find-micro-batch measures a CUDA device, and this run has none: leave it out")
    if not ENGINES[name_of(config.engine, world)].shares:
        raise ConfigError(
            f"--find-micro-batch does not go with --engine {config.engine}, where every forward takes all ranks, which "
            "would wait for one that has run out of memory: give --micro-batch-size"
        )
    config = dataclasses.replace(config, shares="equal")
    with explained(None, world):
        built = build(config, task, world, resume=False)
    first = [(tensor, tensor.detach().clone()) for tensor in built.own.values()]
    with explained(built.engine, world):
        built.engine.state_dict()  # collective; the optimizer's states are there, as in training
        try:
            took = _tried(built, measure or _on_cuda(world.device))
        finally:
            for tensor, before in first:
                tensor.detach().copy_(before)
            built.task.load_state_dict(built.task.state_dict())
    total = min(world.gather(total or torch.cuda.mem_get_info(world.device)[1]))  # collective
    return FoundSizes(took, total, chosen(took, total, _trees(built)))


def chosen(took: list[Took], total: int, more: int = 0) -> int:
    """The largest size that takes, with `more`, up to nine tenths of `total`, and is no slower than a smaller; or 0."""
    best, fastest = 0, float("inf")
    for each in took:
        fastest = min(fastest, each.seconds) if each.peak else fastest
        if each.peak and each.peak + more <= _MARGIN * total and each.seconds <= _SLOWER * fastest:
            best = each.size
    return best


def _trees(built: Built) -> int:
    """Bytes of the sums of micro-batches that exact mode holds beside a gradient, at most."""
    if not built.config.exact:
        return 0
    trained = sum(p.nbytes for p in built.model.parameters() if p.requires_grad)
    return trained * built.config.batch_size.bit_length()


def _tried(built: Built, measure: Measure) -> list[Took]:
    """Collective."""
    world, batch_size, found = built.world, built.config.batch_size, list[Took]()
    sizes = [1 << power for power in range(batch_size.bit_length()) if batch_size % (1 << power) == 0]
    with waiting("trying sizes", shown=world.is_main) as progress:
        for place, size in enumerate(sizes):
            mine, error = _tried_here(built, size, measure)
            world.check(error)  # collective
            every = world.gather(list(mine))  # collective
            fits = all(peak for peak, _ in every)
            found.append(Took(size, max(peak for peak, _ in every) * fits, max(seconds for _, seconds in every) / size))
            progress(place + 1, len(sizes))
            if not fits:
                break
    return found


def _tried_here(built: Built, size: int, measure: Measure) -> tuple[tuple[int, float], LockstepError | None]:
    """(peak, seconds) on this rank, and what went wrong besides memory. Not collective."""
    try:
        batch = _first_batch(built, size)
        return measure(lambda: _once(built, batch)), None
    except torch.OutOfMemoryError:
        return (0, 0.0), None
    except LockstepError as error:
        return (0, 0.0), error
    finally:
        for parameter in built.model.parameters():
            parameter.grad = None
        if built.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _first_batch(built: Built, size: int) -> MicroBatch:
    config = dataclasses.replace(built.config, micro_batch_size=size)
    run_plan = dataclasses.replace(built.run_plan, config=config)
    stream, _ = stream_of(config, built.task, built.training, run_plan, built.world, {})
    with closing(stream.from_step(0)) as step_loader:
        _, micro = next(iter(step_loader))
        first: MicroBatch = micro[0]
        return first


def _once(built: Built, batch: MicroBatch) -> None:
    """A forward and a backward beside the engine, whose exchange takes all ranks."""
    loss_sum: Callable[[nn.Module, MicroBatch], Tensor] = loss_of(built.task)
    seeder(built.config.seed, "micro", built.world.device)(0, batch.index)
    loss_sum(built.model, batch).backward()  # type: ignore[no-untyped-call]


def _on_cuda(device: torch.device) -> Measure:
    def measure(once: Callable[[], None]) -> tuple[int, float]:
        once()  # which chooses kernels, and leaves gradients
        torch.cuda.synchronize(device)  # waits for the device
        torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        once()
        torch.cuda.synchronize(device)  # waits for the device
        seconds = time.perf_counter() - began
        return torch.cuda.max_memory_reserved(device), seconds

    return measure
