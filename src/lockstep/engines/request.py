"""Describe the engine that a run needs by one `EngineRequest`, passed whole to the engine.

    request = EngineRequest(clip=1.0, options=EngineOptions(bucket_cap_mb=50))
    engine = make_engine("ddp", model, lambda model: AdamW(model.parameters()), world, request)

`lockstep.engine` fills it from its arguments, a run from its configuration and task. `Changes` and `OwnState` are parts
of it.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.engine_options import EngineOptions
from lockstep.config.sections import Fp16
from lockstep.distributed.balance import ShareSchedule
from lockstep.engines.gradient_norms import NO_NORMS, GradientNorms
from lockstep.errors import name_settings
from lockstep.hooks import Hooks, OwnSteps
from lockstep.parallel.pipeline import Pipeline
from lockstep.run_state import TrainedSet

__all__ = [
    "Changes",
    "EngineRequest",
    "MakeOptimizer",
    "MakePenalty",
    "Own",
    "OwnState",
]


MakeOptimizer = Callable[[nn.Module], Optimizer]
# The model as its engine holds it -> a 0-dim term that is added to the step's loss once.
MakePenalty = Callable[[nn.Module], Tensor | None]
# (model as the engine holds it, the former optimizer) -> optimizer
MakeAgain = Callable[[nn.Module, Optimizer], Optimizer]
# -> the task's tensors by name
Own = Callable[[], Mapping[str, Tensor]]


class OwnState(NamedTuple):
    """Tensors of a task that forwards may write.

    Attributes:
        tensors: returns the task's own tensors by name; None: it has none.
        alike: what is written to them is the same on every rank, as by `step_loss`.
        by_sample: names of them, and of the model's buffers, that have rows by sample or stream.
    """

    tensors: Own | None = None
    alike: bool = False
    by_sample: Collection[str] = ()


class Changes(NamedTuple):
    """A run's settings for changes to its trained parameters.

    Attributes:
        again: builds the optimizer for the changed set; None: the function that built the first one, if needed.
        fixed: name -> why this parameter must stay frozen, with the way out.
        known: the set from a checkpoint; None: what requires gradients now.
        done: number of steps taken before.
        changed: called with the new set after a change.
    """

    again: MakeAgain | None = None
    fixed: Mapping[str, str] = {}
    known: TrainedSet | None = None
    done: int = 0
    changed: Callable[[TrainedSet], None] = lambda trained: None


def _log(line: str) -> None:
    logging.getLogger("lockstep").info(name_settings(line))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Request for an engine, from the configuration and the task.

    Attributes:
        clip: largest 2-norm of the gradient; 0 does not clip.
        exact: M, the number of micro-batches in the fixed tree (see engines/exact.py); 0: sum gradients as the backend
            does.
        sharing: which micro-batches each rank computes in the current step; None: the same number on every rank.
        loss_scaling: how to scale the loss for float16, and skip a step whose gradients overflow; None: no scaling.
        blocks: the model's repeated blocks, in order, where the caller knows them.
        options: options of this engine.
        say: reports one line to the user; called on every rank, printed on rank 0.
        ema: decay of an average of the weights; 0: none.
        batchnorm: how running statistics are kept: "local" or "replay".
        hooks: called after each backward and each update; None: none.
        own_steps: of a task that steps its optimizers itself; None: the engine steps.
        gradients: takes gradient norms by block, in the steps that log them.
        penalty: computes a term of the loss from the parameters, added once a step; None: no penalty.
        own: the task's tensors that forwards may write.
        changes: settings for changes to the trained parameters.
        single_pass_flag: the flag that rules out an optimizer that repeats a step's pass; "": none does.
        wrapper: the wrapper that a former engine put around the model, reused because the caller may hold it.
        pipeline: of which the model is one stage; None: it is the whole model.
    """

    clip: float = 0.0
    exact: int = 0
    sharing: ShareSchedule | None = None
    loss_scaling: Fp16 | None = None
    blocks: tuple[nn.Module, ...] = ()
    options: EngineOptions = field(default_factory=EngineOptions)
    say: Callable[[str], None] = _log
    ema: float = 0.0
    batchnorm: str = "local"
    hooks: Hooks | None = None
    own_steps: OwnSteps | None = None
    gradients: GradientNorms = NO_NORMS
    penalty: MakePenalty | None = None
    own: OwnState = field(default_factory=OwnState)
    changes: Changes = field(default_factory=Changes)
    single_pass_flag: str = ""
    wrapper: nn.Module | None = None
    pipeline: Pipeline | None = None
