"""Find a micro-batch size by trying sizes.

    search = lockstep.find_micro_batch(config, task)    # writes nothing
    print(search)                                       # the cost of each size, and the size to train with

The search only suggests a value of `--micro-batch-size`, which is then the same on every device and at every world
size.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.config.engine_options import ENGINES
from lockstep.config.schema import Config
from lockstep.data.batches import MicroBatch
from lockstep.distributed.world import World
from lockstep.engines.memory import explained
from lockstep.engines.registry import name_of
from lockstep.errors import ConfigError, LockstepError, name_settings
from lockstep.files import bytes_text
from lockstep.logging.console import waiting
from lockstep.loop import loss_of, seeder
from lockstep.run_state import RunState
from lockstep.training.inference import join_world
from lockstep.training.start.build import build
from lockstep.training.start.training_batches import build_batches
from lockstep.training.state.parts import RunParts

__all__ = [
    "find_micro_batch",
    "print_sizes",
]


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
    stream, _ = build_batches(config, built.task, built.setup.training, run_plan, built.world, RunState())
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
