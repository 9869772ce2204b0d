"""Whether a model compiles, found out before step 1: then it is bad input, and not a lost run.

reason = compiled_or_not(config, task, model, engine, batches, world, may_fail=True)     # collective
"""

import importlib
import warnings
from typing import Any

from torch import nn

from lockstep.config.config import Config
from lockstep.data.batches import Batches
from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import Engine
from lockstep.engines.make import undo_step
from lockstep.errors import ConfigError
from lockstep.loop import loss_of, seeder
from lockstep.run.kernels import kernels_of
from lockstep.run.trial import as_it_was
from lockstep.task import Task
from lockstep.transforms.precision import uncompiled

__all__ = ["compiled_or_not"]

_LONGEST = 300  # characters of a reason


def compiled_or_not(
    config: Config, task: Task, plain: nn.Module, engine: Engine, batches: Batches, world: World, *, may_fail: bool
) -> str:
    """Computes the loss of this rank's first micro-batch by compiled code, which step 1 then finds made. Collective.

    Where a rank cannot, and it may fail, the model is as it was before it was compiled, on every rank.

    Returns:
        The reason why it does not compile; "".

    Raises:
        ConfigError: it does not, and must. An error of the task's own is raised as it is.
    """
    if config.engine_options.static_graph:  # whose first forward must be the step's
        return ""

    def attempt() -> str:
        ((batch, _),) = batches.parts(0, [(0, batches.own_samples(0))])
        seeder(config.seed, "check", world.device)(0, batch.index)
        kernels = kernels_of(config.compile, batches.step_plan)
        try:
            with engine.accumulate(False), kernels(0, batch.index), _quiet(), _whole_backwards():
                loss_of(task)(engine.model, batch)
        except _failures() as error:
            return _reason(error)
        finally:
            undo_step(engine)  # else step 1 would go on from what this forward has left
        return ""

    with as_it_was(engine.model, task, world.device, training=True):
        own = on_all_ranks(world, attempt)
    reasons = world.gather(own)  # collective
    found = next((f"{rank_label(rank)}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
    if found and not may_fail:
        raise ConfigError(
            f"--compile: the model cannot be compiled ({found}); leave it out, or --compile auto goes on eager"
        )
    if found:
        uncompiled(plain)
    return found


def _failures() -> tuple[type[BaseException], ...]:
    """What torch raises where it cannot compile."""
    dynamo: Any = importlib.import_module("torch._dynamo.exc")
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(getattr(dynamo, name) for name in names if hasattr(dynamo, name))


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("backend=")]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _quiet() -> Any:
    """Without the compiler's own warnings, which are about itself."""
    return warnings.catch_warnings(action="ignore")


def _whole_backwards() -> Any:
    """Has a backward that cannot be compiled fail with its forward, and not in step 1."""
    config: Any = importlib.import_module("torch._functorch.config")
    return config.patch(force_non_lazy_backward_lowering=True)
