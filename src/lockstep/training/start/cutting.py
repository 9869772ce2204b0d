"""Decide whether and how a run's micro-batches can be cut in half: `--on-oom smaller`.

    check_cuttable(config, task, model, is_stream=False, is_grouped=False)      # before anything is written
    with cut_trial(config, world, is_open=False):   # out of memory: the error has the size for the next build
        ...
    size = smaller_size(config)                     # 0: a micro-batch has one sample already

`training/recovery/out_of_memory.py` does so in a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.config.schema import Config, nearest_divisor
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError
from lockstep.task import Task, has_step_loss
from lockstep.training.start.defaults import batchnorm_names

__all__ = [
    "check_cuttable",
    "cut_trial",
    "explain_smallest",
    "is_additive",
    "smaller_size",
]


def is_additive(task: Task, model: nn.Module) -> bool:
    """Whether a smaller micro-batch computes the same step, up to rounding and random numbers.

    False while the trial has not detected the loss's reduction.
    """
    return task.reduction in ("sum", "mean", "total") and not batchnorm_names(model)


def check_cuttable(config: Config, task: Task, model: nn.Module, *, is_stream: bool, is_grouped: bool) -> None:
    """Refuse `--on-oom smaller` where smaller micro-batches are another training.

    A reduction that is not detected yet passes.

    Raises:
        ConfigError: the loss does not add up, or the data decide the micro-batches.
    """
    if config.on_oom != "smaller":
        return
    if layers := batchnorm_names(model):
        why = f"BatchNorm ({layers[0]}), whose statistics are those of a micro-batch"
    elif task.reduction == "micro-batch" and not has_step_loss(task):
        why = "a loss that does not add up (reduction = 'micro-batch')"
    elif task.own_steps is not None:
        why = "a task that steps its optimizers itself, whose step cannot be undone"
    elif is_stream:
        why = "a stream, whose micro-batches read lanes of their own; lower --micro-batch-size"
    elif is_grouped:
        why = "a batch sampler, whose lists are the micro-batches; make them shorter"
    else:
        return
    raise ConfigError(f"--on-oom smaller does not go with {why}, or remove it")


def smaller_size(config: Config) -> int:
    """Return the next smaller size of a micro-batch; 0: it has one sample.

    That is half of the samples, or the next smaller divisor of the batch.
    """
    if config.micro_size > 1:
        return nearest_divisor(config.batch_size, config.micro_size // 2)
    return 0


def explain_smallest(rank: int) -> str:
    """Explain that a micro-batch cannot be cut."""
    return (
        f"{rank_label(rank)} ran out of memory with --micro-batch-size 1, which --on-oom smaller cannot cut: use "
        "--activation-checkpointing full, --engine fsdp, or a lower --seq-len"
    )


@contextmanager
def cut_trial(config: Config, world: World, *, is_open: bool) -> Iterator[None]:
    """Turn a trial without enough memory into an error that requests smaller micro-batches.

    Args:
        is_open: the configuration leaves the cut of a step open, so memory decides it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if config.on_oom != "smaller" and not (is_open and smaller_size(config)):
            raise
        size = smaller_size(config)
        if not size:
            raise LockstepError(explain_smallest(world.rank)) from error
        if config.on_oom == "smaller":
            chooser = "--on-oom smaller starts"
        else:
            chooser = "the run starts"
        request = LockstepError(
            f"the trial ran out of memory with --micro-batch-size {config.micro_size}; {chooser} with {size}"
        )
        request.smaller = size
        raise request from error
