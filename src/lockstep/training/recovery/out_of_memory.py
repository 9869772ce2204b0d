"""Repeat a step that ran out of memory with smaller micro-batches: `--on-oom smaller`.

    with cut_step(ranks, built, exchange, save):      # around the steps
        ...

The run is built again, as after a rollback, with the size that `micro-batch.json` in its folder records. One process
saves first, so that it loses no step. Of several processes under `lockstep launch` this one leaves its groups and all
meet again; where a lost rank ends the run, it ends and all are restarted. Both go back to the newest checkpoint.
"""

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.progress import rank_label
from lockstep.engines.base import at_rest
from lockstep.engines.registry import undo_step
from lockstep.errors import LockstepError, StorageError
from lockstep.logging import Sinks
from lockstep.loop import StepOutOfMemory
from lockstep.training.start.cutting import explain_smallest, smaller_size
from lockstep.training.state.parts import RunParts
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.state.status import BuildInputs, MicroBatchCut, Rebuild, RunRanks

__all__ = [
    "cut_step",
    "free_frames",
    "record_size",
]


_LOG = logging.getLogger("lockstep")


@contextmanager
def cut_step(ranks: RunRanks, built: RunParts, exchange: StepExchange, save: Callable[[int], None]) -> Iterator[None]:
    """Turn a step that ran out of memory into a request for smaller micro-batches.

    Args:
        save: saves the state after this number of steps.

    Raises:
        MicroBatchCut: of one process.
        Rebuild: of one of several, which all rebuild the run.
        LockstepError: the launcher must restart all; or a micro-batch has one sample.
    """
    try:
        yield
    except StepOutOfMemory as error:
        if built.config.on_oom != "smaller":
            raise
        step = exchange.engine_steps
        world = built.world
        before = built.config.micro_size
        free_frames(error)
        size = smaller_size(built.config)
        if not size:
            raise LockstepError(f"step {step + 1}: {explain_smallest(world.rank)}") from error
        line = (
            f"step {step + 1}: {rank_label(world.rank)} ran out of memory with --micro-batch-size {before}; --on-oom "
            f"smaller computes it again with {size}"
        )
        _record(built.setup.folder, size, line)
        if world.size == 1:
            _save_before(built, save, step)
            raise MicroBatchCut(line) from None
        if ranks.member:
            raise Rebuild(f"{line}, from the newest checkpoint") from None
        failure = LockstepError(
            f"{line}, from the newest checkpoint: all ranks must start again (lockstep launch --max-restarts does so)"
        )
        # With this exit code the same command may be repeated, however often the step fails.
        failure.exit_code = StorageError.exit_code
        raise failure from None


def free_frames(error: BaseException) -> None:
    """Free the activations that the frames of an error hold, and the device's cache."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def record_size(inputs: BuildInputs, sinks: Sinks, built: RunParts) -> None:
    """Record smaller micro-batches of a trial, and log a changed size. On rank 0.

    Once the folder is locked and the sinks are open.
    """
    size = built.config.micro_size
    if inputs.trial_cut:
        _record(built.setup.folder, size, inputs.trial_cut)
        inputs.trial_cut = ""
    changed = built.state.plan.get("micro_batch_size") != size
    if built.config.on_oom == "smaller" and changed and built.setup.folder.read_micro_batch() == size:
        sinks.log({"global_step": built.start, "micro_batch_size": size})


def _record(folder: RunFolder, size: int, line: str) -> None:
    try:
        folder.write_micro_batch(size, line)
    except OSError as problem:
        raise LockstepError(f"{line}, but {folder.path} cannot be written: {problem.strerror}") from problem


def _save_before(built: RunParts, save: Callable[[int], None], step: int) -> None:
    """Save the state before the step, unless a forward may have changed it for good.

    The run then goes back to its newest checkpoint.
    """
    if built.config.checkpoint.mode == "none" or built.task.hooks or built.task.state_dict():
        return
    undo_step(built.engine)
    at_rest(built.engine.model)
    for parameter in built.engine.model.parameters():
        parameter.grad = None
    save(step)
