"""Build the model, the optimizer and the engine of a run.

    groups = Groups()
    made = engine_of(config, task, model, world, groups, stream, say, state)

If the ranks change, the engine is rebuilt around the same model and optimizer. The trial of `--compile` and the calls
of a task's own `optimizer` and `schedule` are here too.
"""

import dataclasses
import importlib
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.config.schema import Config
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.loader import blamed
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import NOTHING, Engine
from lockstep.engines.blocks import find_blocks, repeated_layers
from lockstep.engines.optimizers import NO_NORMS, GradientNorms
from lockstep.engines.registry import check_copies, engine, model_init, name_of, undo_step
from lockstep.engines.wrappers import Changes
from lockstep.errors import ConfigError, LockstepError
from lockstep.loop import loss_of, seeder
from lockstep.models.gpt import GPT
from lockstep.optim.groups import freeze
from lockstep.optim.optimizers import make_optimizer, rules_of
from lockstep.run_state import RunState, TrainedSet
from lockstep.seeds import derive
from lockstep.task import Task, has_own
from lockstep.training.agreement import align, watch_new_modules
from lockstep.training.loss_check import preserve_state
from lockstep.training.trainable import add_adapters, add_empty_adapters, base_tensor_names
from lockstep.transforms import Transforms, prepare
from lockstep.transforms.precision import eager, uncompiled

__all__ = [
    "Groups",
    "compiled_or_not",
    "engine_of",
    "kernels_of",
    "model_of",
    "optimizer_of",
    "own_factor",
    "own_momentum",
]


Kernels = Callable[[int, int], AbstractContextManager[Any]]

_ANY: AbstractContextManager[None] = nullcontext()


def kernels_of(compiled: bool, step_plan: StepPlan) -> Kernels:
    """Return (step, micro-batch) -> the context manager of its forward: compiled or eager.

    A micro-batch that is short of samples, at the end of a run, runs eager: it would be compiled for that one forward.
    The plan alone decides, so that every rank and every resume chooses the same.
    """

    def chosen(step: int, index: int) -> AbstractContextManager[Any]:
        start, stop = step_plan.positions(step, index)
        return _ANY if stop - start == step_plan.micro_size else eager()

    return chosen if compiled else lambda step, index: _ANY


# --- compile

_LONGEST = 300  # characters of a reason that is shown


def compiled_or_not(
    config: Config, task: Task, plain: nn.Module, engine: Engine, batches: Batches, world: World, *, may_fail: bool
) -> str:
    """Try to compile the model on this rank's first micro-batch. Collective.

    Step 1 then finds the compiled code ready. If a rank cannot compile and `may_fail` is set, every rank gets back the
    model that it had before.

    Returns:
        The reason why it does not compile; "" if it does.

    Raises:
        ConfigError: it does not compile, and `may_fail` is False. An error of the task's own is raised unchanged.
    """
    if config.engine_options.static_graph:  # a static graph is recorded in the first forward, which must be a step's
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
            undo_step(engine)  # so that step 1 does not continue from this forward's state
        return ""

    with preserve_state(engine.model, task, world.device, training=True):
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
    """Return the exceptions that torch raises if it cannot compile."""
    dynamo: Any = importlib.import_module("torch._dynamo.exc")
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(getattr(dynamo, name) for name in names if hasattr(dynamo, name))


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("backend=")]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _quiet() -> Any:
    """Silence the compiler's warnings about itself."""
    return warnings.catch_warnings(action="ignore")


def _whole_backwards() -> Any:
    """Compile the backward with its forward, so that it fails in the trial, not later."""
    config: Any = importlib.import_module("torch._functorch.config")
    return config.patch(force_non_lazy_backward_lowering=True)


# --- model

Say = Callable[[str], None]


def model_of(config: Config, task: Task, world: World, state: RunState, say: Say, planned: bool = False) -> nn.Module:
    """Make the model and prepare it for training. Collective.

    Its weights are drawn under a seed of their own, so they are the same on every rank of any world. If the task made
    the model before the run, every rank gets rank 0's weights.

    Args:
        state: of the checkpoint whose weights it will load; for adapters it names their base, see `adapt`. What later
            checkpoints must record of the model is added to it.
        say: called with a line for the user.
        planned: only sizes matter, as in `lockstep plan` (see `lockstep.diagnose`); no weights are read.
    """
    if config.weight_copies == "step":
        _check_copies(config, task, world)
    torch.manual_seed(derive(config.seed, "model"))
    where, moves = model_init(config.engine, world, config.engine_options)

    def make() -> nn.Module:
        with where:
            made: nn.Module = task.model()
        if where is NOTHING and not planned:
            check_valued(made)
        return made

    with watch_new_modules() as new:
        model = on_all_ranks(world, make)
    check_initialised(model)
    differed = 0 if planned else align(model, new, world)  # collective
    if differed and state.place is None:
        more = f"{differed} tensors differ" if differed > 1 else "a tensor differs"
        say(f"the model was made before the run and {more} between the ranks: all begin with rank 0's values")
    if isinstance(model, GPT):
        state.gpt = dataclasses.asdict(model.config)  # the shapes of its tensors do not give the number of heads
    _check_residual(config, model)
    _fuse(config, model, world.device, planned)
    has_base = (
        add_empty_adapters(config, task, model) if planned else add_adapters(config, task, model, world, state, say)
    )
    base = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)] if has_base else []
    frozen = on_all_ranks(world, lambda: freeze(model, rules_of(config)))
    if frozen:
        more = f" and {len(frozen) - 1} more parameters" if len(frozen) > 1 else ""
        say(f"frozen by --optim.groups: {frozen[0]}{more}")
    named = task.blocks(model)
    return prepare(
        model,
        precision=config.precision,
        compile_model=config.compile,
        device=world.device,
        move=moves,
        chosen=Transforms(
            *(config.batchnorm, config.attention, config.activation_checkpointing, config.compile_scope, config.exact),
            masked=task.attention_mask,
            weight_copies=config.weight_copies,
            grad_dtype=config.grad_dtype,
        ),
        blocks=find_blocks(model).modules if named is None else list(named),
        from_task=named is not None,
        keep_dtype=base,
        say=say,
    )


def check_initialised(model: nn.Module) -> None:
    """Refuse a lazy module whose shapes no forward has set yet.

    Raises:
        ConfigError: names the first such parameter or buffer.
    """
    lazy = next((name for name, p in [*model.named_parameters(), *model.named_buffers()] if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigError(
            f"the task's `model` returned a lazy module, whose {lazy} has no shape yet: make one forward in `model()`, "
            "such as made(torch.zeros(1, 8)), and return it then"
        )


def check_valued(model: nn.Module) -> None:
    """Refuse a parameter or buffer on the meta device, which has no values.

    Raises:
        ConfigError: names the first one.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    name = next((name for name, tensor in named if tensor.is_meta), None)
    if name is not None:
        raise ConfigError(
            f"the task's `model` returned '{name}' on the meta device, without values: make it on a real device, or "
            "call model.to_empty(device='cpu') and draw or load every value in `model()`"
        )


def _check_copies(config: Config, task: Task, world: World) -> None:
    """Raise ConfigError if --weight-copies step does not fit the precision, engine or task."""
    if config.precision != "bf16":
        raise ConfigError(f"--weight-copies step needs --precision bf16, and it is {config.precision}: leave it out")
    check_copies(
        name_of(config.engine, world),
        narrow=config.grad_dtype == "bf16",
        exact=config.exact,
        hooked=task.hooks is not None,
        own_steps=task.own_steps is not None,
    )


def _check_residual(config: Config, model: nn.Module) -> None:
    """Set the built-in GPT's residual dtype; ConfigError for any other model."""
    if config.residual_dtype == "float32":
        return
    if not isinstance(model, GPT) or config.precision != "bf16":
        raise ConfigError(
            f"--residual-dtype {config.residual_dtype} is of the built-in GPT with --precision bf16, and this is "
            f"{type(model).__name__} with {config.precision}; leave it out"
        )
    model.residual = torch.bfloat16


def _fuse(config: Config, model: nn.Module, device: torch.device, planned: bool) -> None:
    """Replace layers of the built-in GPT, by --fused-kernels.

    Args:
        planned: the model is only traced, on any device.

    Raises:
        ConfigError: another model, adapters, or a device without Triton.
    """
    wanted = f"--fused-kernels {config.fused_kernels}"
    if config.fused_kernels == "none":
        return
    if not isinstance(model, GPT):
        raise ConfigError(f"{wanted} is of the built-in GPT, and this is {type(model).__name__}; leave it out")
    if config.lora.rank:
        raise ConfigError(f"{wanted} does not go with --lora.rank, whose adapters wrap the same layers; drop one")
    if not planned and device.type != "cpu" and (device.type != "cuda" or not find_spec("triton")):
        missing = "has no such kernels" if device.type != "cuda" else "needs the package triton (pip install triton)"
        raise ConfigError(f"{wanted}: {device.type} {missing}; leave it out")
    model.fuse(epilogue=config.fused_kernels == "all")


# --- schedule, optimizer and engine


def own_factor(task: Task, step: int, steps: int, otherwise: Callable[[int], float]) -> float:
    """Return the task's own schedule factor, or `otherwise(step)` if that is None.

    Raises:
        ConfigError: the factor is not a finite number of 0 or more.
        DataError: the method failed.
    """
    said = _said(task, step, steps)
    if said is None:
        return otherwise(step)
    try:
        factor = float(said)
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"the task's `schedule` returned {said!r} for step {step} of {steps}: it must return what the base rates "
            "are multiplied by, a finite number from 0, or None for what --optim.schedule says"
        )
    return factor


def own_momentum(task: Task, step: int, steps: int, otherwise: Callable[[int], float | None]) -> float | None:
    """Return `otherwise(step)` if the task's `schedule` returns None for the step, else None.

    None leaves the momentum of the groups as it is.

    Raises:
        DataError: the method failed.
    """
    return otherwise(step) if _said(task, step, steps) is None else None


def _said(task: Task, step: int, steps: int) -> Any:
    try:
        return task.schedule(step, steps)
    except LockstepError:
        raise
    except Exception as error:
        raise blamed("schedule", error, f"step {step} of {steps}") from error


def optimizer_of(config: Config, task: Task, model: nn.Module) -> Optimizer:
    """Make the task's own optimizer, or else the configured one, over the engine's model."""
    named = task.blocks(model)
    layers = repeated_layers(model) if named is None else list(named)
    return _own_optimizer(config, task, model) or make_optimizer(model, config, layers)


def _own_optimizer(config: Config, task: Task, model: nn.Module) -> Optimizer | None:
    """Call the task's `optimizer`. Raises ConfigError if the result does not fit this model."""
    try:
        made = task.optimizer(model, config)
    except LockstepError:
        raise
    except Exception as error:
        raise blamed("optimizer", error, "the start, before step 1") from error
    if made is None:
        return None
    if config.optim.groups or config.optim.layer_decay != 1.0:
        what = "--optim.groups" if config.optim.groups else "--optim.layer-decay"
        raise ConfigError(f"{what} makes groups for lockstep's optimizer, and the task has its own: leave one out")
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"the task's `optimizer` returned {type(made).__name__}: it must return a torch.optim.Optimizer over the "
            "parameters of the model that it is given, or None for the one that --optim says"
        )
    held = set(model.parameters())
    others = sum(parameter not in held for group in made.param_groups for parameter in group["params"])
    if others:
        raise ConfigError(
            f"the task's `optimizer` has {others} parameters that are not of the model that it was given, and an "
            "engine may hold others than task.model() made: take those of the argument `model`"
        )
    return made


_OF_THE_BASE = (
    "it is of the adapters' base, which their checkpoints leave out; name it with --lora.modules-to-save from the "
    "start, or train on from the merged model (lockstep export --format hf --merge)"
)


@dataclass
class Groups:
    """An engine's optimizer, the base learning rates of its groups, and its gradient norms."""

    optimizer: Optimizer | None = None
    rates: list[float] = field(default_factory=list)
    gradients: GradientNorms = NO_NORMS

    def begun(self, optimizer: Optimizer) -> Optimizer:
        """Record a new optimizer and its rates as the base rates."""
        self.optimizer, self.rates = optimizer, [float(group["lr"]) for group in optimizer.param_groups]
        return optimizer

    def again(self, optimizer: Optimizer) -> Optimizer:
        """Restore the base rates of the same optimizer, for a new engine that reads them."""
        self.rates += [float(group["lr"]) for group in optimizer.param_groups[len(self.rates) :]]
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        return optimizer

    def renewed(self, optimizer: Optimizer) -> None:
        """Replace the optimizer by another over the same model, and copy its states."""
        before = self.optimizer
        self.begun(optimizer)
        if before is not None:
            optimizer.state.update(before.state)


def check_own_steps(config: Config) -> None:
    """Refuse settings that need the whole step, for a task with manual optimization.

    Such a task's steps are applied before the whole step is known, and each has its own gradients.

    Raises:
        ConfigError: names the flag and the way out.
    """
    for asked, flag, out in (
        (config.optim.clip, "--optim.clip", "clip in the task's own steps, as by clip_gradients, and set it to 0"),
        (config.optim.ema, "--optim.ema", "average the weights in the loop of lockstep.Run"),
        (config.guards.nonfinite == "skip", "--guards.nonfinite skip", "use stop or rollback"),
        (config.guards.spike == "skip", "--guards.spike skip", "use warn or rollback"),
    ):
        if asked:
            raise ConfigError(f"{flag} does not go with a task that takes its optimizers' steps itself: {out}")


def engine_of(
    config: Config,
    task: Task,
    model: nn.Module,
    world: World,
    groups: Groups,
    stream: Batches,
    say: Callable[[str], None],
    state: RunState,
) -> Engine:
    """Make the engine around the model. An optimizer in `groups` is reused with its states.

    Args:
        say: called with a line for the user.
        state: the run's; it is updated when the set of trained parameters changes.
    """

    if task.own_steps:
        check_own_steps(config)

    def make(held: nn.Module) -> Optimizer:
        if groups.optimizer is not None:
            return groups.again(groups.optimizer)
        return groups.begun(optimizer_of(config, task, held))

    def again(held: nn.Module, before: Optimizer) -> Optimizer:
        trained = {id(p) for p in held.parameters() if p.requires_grad}
        if has_own(task, "optimizer") and trained <= {id(p) for group in before.param_groups for p in group["params"]}:
            groups.rates += [float(group["lr"]) for group in before.param_groups[len(groups.rates) :]]
            return before
        return groups.begun(optimizer_of(config, task, held))

    def changed(trained: TrainedSet) -> None:
        state.trained = trained

    fixed = {name.removeprefix("model/"): _OF_THE_BASE for name in base_tensor_names(model, state)}
    return engine(
        config.engine,
        model,
        make,
        world,
        clip=config.optim.clip,
        exact_micro_batches=config.micro_batches if config.exact else 0,
        shares=stream.sharing if config.shares != "equal" and world.size > 1 else None,
        loss_scaling=config.precision == "fp16" and config.fp16,
        blocks=task.blocks(model) or (),
        options=config.engine_options,
        say=say,
        ema=config.optim.ema,
        hooks=task.hooks,
        own_steps=task.own_steps,
        gradients=groups.gradients,
        penalty=task.penalty if has_own(task, "penalty") else None,
        own=task.state_dict if has_own(task, "state_dict") else None,
        changes=Changes(again, fixed, state.trained, state.global_step, changed),
    )
