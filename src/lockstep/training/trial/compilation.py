"""Try whether a model can be compiled, and choose which micro-batches are.

reason = try_compile(config, task, model, engine, batches, world, may_fail=True)    # "": it can
kernels = choose_kernels(config.compile, step_plan)
"""

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lockstep.config.schema import Config
from lockstep.data.batches import Batches, StepPlan
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.registry import undo_step
from lockstep.errors import ConfigError
from lockstep.loop import loss_of, seeder
from lockstep.task import Task
from lockstep.training.trial.trial_state import preserve_state
from lockstep.transforms.precision import eager, undo_compile

__all__ = [
    "choose_kernels",
    "try_compile",
]


Kernels = Callable[[int, int], AbstractContextManager[Any]]
_AS_IS: AbstractContextManager[None] = nullcontext()


def choose_kernels(compile_model: bool, step_plan: StepPlan) -> Kernels:
    """Return (step, micro-batch) -> the context of its forward: compiled or eager.

    A short micro-batch at the end of a run is eager: compiling it would serve a single forward. The plan alone decides,
    so every rank and every resume chooses the same.
    """

    def choose(step: int, index: int) -> AbstractContextManager[Any]:
        start, stop = step_plan.positions(step, index)
        if stop - start == step_plan.micro_size:
            return _AS_IS
        return eager()

    return choose if compile_model else lambda step, index: _AS_IS


# Characters of the compiler's message that are printed.
_MAX_REASON = 300


def try_compile(
    config: Config, task: Task, model: nn.Module, engine: Engine, batches: Batches, world: World, *, may_fail: bool
) -> str:
    """Try to compile the model on this rank's first micro-batch. Collective.

    Step 1 then finds the compiled code ready. An error of the task is raised unchanged.

    Args:
        may_fail: if a rank cannot compile, make the model eager on all ranks.

    Returns:
        Why it does not compile; "" if it does.

    Raises:
        ConfigError: it does not compile, and `may_fail` is False.
    """
    # DDP records its static graph in the first forward, which must be a step's.
    if config.engine_options.static_graph:
        return ""

    def attempt() -> str:
        first = batches.step_plan.origin.step
        ((batch, _),) = batches.parts(first, [(0, batches.own_samples(first))])
        seeder(config.seed, "check", world.device)(0, batch.index)
        kernels = choose_kernels(config.compile, batches.step_plan)
        try:
            with engine.accumulate(False), kernels(0, batch.index), _ignore_warnings(), _compile_backward_at_once():
                loss_of(task)(engine.model, batch)
        except _compile_errors() as error:
            return _short_reason(error)
        finally:
            # Step 1 must not continue from the state of this forward.
            undo_step(engine)
        return ""

    with preserve_state(engine.model, task, world.device, training=True):
        own_reason = on_all_ranks(world, attempt)
    # One rank's failure decides for all: every rank trains compiled, or none does.
    reasons = world.gather(own_reason)
    first = ""
    for rank, reason in enumerate(reasons):
        if reason:
            first = f"{rank_label(rank)}: {reason}"
            break
    if first and not may_fail:
        raise ConfigError(
            f"--compile: the model cannot be compiled ({first}); leave it out, or let --compile auto train uncompiled"
        )
    if first:
        undo_compile(model)
    return first


def _compile_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that torch raises if it cannot compile."""
    # Private: torch exports these nowhere else, and older versions lack some.
    dynamo: Any = importlib.import_module("torch._dynamo.exc")
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(getattr(dynamo, name) for name in names if hasattr(dynamo, name))


def _short_reason(error: BaseException) -> str:
    lines = []
    for line in str(error).splitlines():
        if line.strip() and not line.startswith("backend="):
            lines.append(line.strip())
    text = lines[0] if lines else type(error).__name__
    if len(text) <= _MAX_REASON:
        return text
    return text[: _MAX_REASON - 3] + "..."


def _ignore_warnings() -> Any:
    """Ignore the compiler's warnings about itself."""
    return warnings.catch_warnings(action="ignore")


def _compile_backward_at_once() -> Any:
    """Compile the backward with the forward, so that it fails in the trial, not later."""
    # Private: by default torch may compile the backward only in step 1.
    config: Any = importlib.import_module("torch._functorch.config")
    return config.patch(force_non_lazy_backward_lowering=True)
