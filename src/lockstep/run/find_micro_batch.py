"""How many samples a forward takes best on this device: sizes are tried, each with a forward and a backward.

    found = lockstep.find_micro_batch(config, task)     # nothing is written, and nothing kept
    print(found)                                        # what each size takes, and the one to train with

A size is a number of the run like any other (`--micro-batch-size`), the same on every device and at every world size:
what is found here is proposed, and given to a run by hand.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.config.config import Config
from lockstep.data.batches import MicroBatch
from lockstep.distributed.world import World
from lockstep.engines.make import SHARING, name_of
from lockstep.engines.shared.oom import explained
from lockstep.errors import ConfigError, LockstepError, said
from lockstep.loop import loss_of, seeder
from lockstep.run.build import Built, build
from lockstep.run.joined import joined
from lockstep.run.stream import stream_of
from lockstep.sinks.waiting import waiting
from lockstep.units import bytes_text

__all__ = ["FoundSizes", "Took", "find_micro_batch", "show"]

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
        return _found(config, task, ranks, measure, total)


def show(config: Config) -> None:
    """`lockstep train --find-micro-batch`: prints what was found, on rank 0."""
    with joined(config) as world:
        found = find_micro_batch(config, None, world)
        if world.is_main:
            print(found, flush=True)


def _found(config: Config, task: Any, world: World, measure: Measure | None, total: int) -> FoundSizes:
    if measure is None and world.device.type != "cuda":
        raise ConfigError("--find-micro-batch measures a CUDA device, and this run has none: leave it out")
    if name_of(config.engine, world) not in SHARING:
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
