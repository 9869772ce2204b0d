"""Build the model, the optimizer and the engine of a run.

    model = build_model(config, task, world, state, say)
    engine = build_engine(config, task, model, world, OptimizerGroups(), batches, say, state)

If the ranks change, the engine is rebuilt around the same model and optimizer. The calls of a task's own `optimizer`
are here too.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.checkpoint import check_storable
from lockstep.config.engine_options import check_quantized
from lockstep.config.fields import FieldError
from lockstep.config.schema import Config
from lockstep.config.schema import flag as flag_of
from lockstep.data.batches import Batches
from lockstep.data.loader import blame
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, Engine
from lockstep.engines.blocks import find_blocks, repeated_layers
from lockstep.engines.registry import check_copies, make_engine, model_init, name_of
from lockstep.engines.request import Changes, EngineRequest, OwnState
from lockstep.errors import ConfigError, LockstepError
from lockstep.models.gpt import GPT
from lockstep.models.quantized import bits_of, keep_unchanged, quantized_layers
from lockstep.optim.groups import freeze
from lockstep.optim.optimizers import make_optimizer, rules_of
from lockstep.parallel.pipeline import Pipeline
from lockstep.run_state import RunState, TrainedSet
from lockstep.task import Task, current_step, has_own, has_step_loss
from lockstep.tensors import is_dtensor, is_expanded
from lockstep.training.start.consistency import collect_new_modules, copy_from_rank0
from lockstep.training.start.defaults import batchnorm_names
from lockstep.training.start.lora_base import add_adapters, add_empty_adapters, base_tensor_names
from lockstep.training.start.replicas import divide_model
from lockstep.training.state.optimizer_groups import OptimizerGroups, set_groups
from lockstep.transforms import Transforms, prepare
from lockstep.transforms.batchnorm import resolve_batchnorm
from lockstep.transforms.precision import is_double

__all__ = [
    "build_engine",
    "build_model",
    "build_optimizer",
]


# --- model

Say = Callable[[str], None]


# Each argument is a fact that the model depends on.
def build_model(  # noqa: PLR0913
    config: Config,
    task: Task,
    world: World,
    state: RunState,
    say: Say,
    sizes_only: bool = False,
    note: Say | None = None,
    fixed_cut: bool = True,
    keeps_double: bool = False,
) -> nn.Module:
    """Make the model and prepare it for training. Collective.

    Its weights are drawn under `torch.manual_seed(config.seed)`, the same on every rank of any world. If the task made
    the model before the run, every rank gets rank 0's weights.

    Args:
        state: of the checkpoint to load, which names the adapters' base. What checkpoints record of a model is added.
        say: called with a line for the user.
        sizes_only: do not read weights, as in `lockstep plan`.
        note: called with a line for the log alone; None: `say`.
        fixed_cut: the number of ranks does not decide how a step is cut; see `resolve_batchnorm`.
        keeps_double: a model that is in double precision stays so, whatever the configuration's precision is.

    Raises:
        ConfigError: the model does not fit the configuration, or has lazy, meta or distributed tensors.
    """
    if config.weight_copies == "step":
        _check_weight_copies(config, task, world)
    # Seed as a plain script does, so that the first loss is the same.
    torch.manual_seed(config.seed)
    init_context, move = model_init(config.engine, world, config.engine_options)
    with collect_new_modules() as new:
        model = on_all_ranks(world, lambda: _make_module(task, init_context, sizes_only=sizes_only))
    check_not_lazy(model)
    check_not_parallel(model)
    check_writable(model)
    if keeps_double and is_double(model):
        config = dataclasses.replace(config, precision="float64")
    if not sizes_only:
        _check_quantized(config, model, world)
        _share_weights(model, new, world, state, say)  # collective
    if isinstance(model, GPT):
        # The shapes of the tensors do not give the number of heads.
        state.gpt = dataclasses.asdict(model.config)
    _set_residual_dtype(config, model)
    base = _add_adapters(config, task, model, world, state, say, sizes_only=sizes_only)
    _freeze_by_rules(config, model, world, say)
    divide_model(config, task, model, world)
    task_blocks = task.blocks(model)
    batchnorm = resolve_batchnorm(config, world.data_parallel.size, bool(batchnorm_names(model)), fixed_cut=fixed_cut)
    if batchnorm.kind == "sync" and world.replica.size > 1:
        raise ConfigError("--batchnorm sync does not work with replicas of several ranks: use --batchnorm replay")
    if batchnorm.reason:
        say(batchnorm.reason)
    return prepare(
        model,
        precision=config.precision,
        compile_model=config.compile,
        device=world.device,
        move=move,
        chosen=_transforms_of(config, task, batchnorm.kind),
        blocks=find_blocks(model).modules if task_blocks is None else list(task_blocks),
        from_task=task_blocks is not None,
        float32_outputs=task.autocast_scope == "float32 outputs",
        keep_dtype=base,
        say=say,
        note=note,
    )


def _make_module(task: Task, init_context: AbstractContextManager[object], *, sizes_only: bool) -> nn.Module:
    """Call the task's `model`, and check that its tensors can be stored."""
    with init_context:
        module: nn.Module = task.model()
    if init_context is NOTHING and not sizes_only:
        check_not_meta(module)
        check_storable(module.state_dict())
    return module


def _share_weights(model: nn.Module, new: list[nn.Module], world: World, state: RunState, say: Say) -> None:
    """Give every rank rank 0's weights of a model that was made before the run. Collective."""
    differing = copy_from_rank0(model, new, world)  # collective
    if differing and state.place is None:
        count = f"{differing} tensors differ" if differing > 1 else "a tensor differs"
        say(f"the model was made before the run and {count} between the ranks: every rank gets rank 0's values")


def _add_adapters(
    config: Config, task: Task, model: nn.Module, world: World, state: RunState, say: Say, *, sizes_only: bool
) -> list[Tensor]:
    """Add adapters by --lora.rank, and return the tensors of their base, whose dtypes stay. Collective."""
    if sizes_only:
        has_base = add_empty_adapters(config, task, model)
    else:
        has_base = add_adapters(config, task, model, world, state, say)
    if not has_base:
        return []
    return [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]


def _freeze_by_rules(config: Config, model: nn.Module, world: World, say: Say) -> None:
    """Freeze the parameters that --optim.groups names."""
    frozen = on_all_ranks(world, lambda: freeze(model, rules_of(config)))
    if frozen:
        more = f" and {len(frozen) - 1} more parameters" if len(frozen) > 1 else ""
        say(f"frozen by --optim.groups: {frozen[0]}{more}")


def _transforms_of(config: Config, task: Task, batchnorm: str) -> Transforms:
    return Transforms(
        batchnorm=batchnorm,
        attention=config.attention,
        activation_checkpointing=config.activation_checkpointing,
        compile_scope=config.compile_scope,
        exact=config.exact,
        masked=task.attention_mask,
        weight_copies=config.weight_copies,
        grad_dtype=config.grad_dtype,
    )


def check_not_lazy(model: nn.Module) -> None:
    """Refuse a lazy module that has not run a forward, and so has no shapes.

    Raises:
        ConfigError: names the first such parameter or buffer.
    """
    lazy = next((name for name, p in [*model.named_parameters(), *model.named_buffers()] if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigError(
            f"the task's `model` returned a lazy module, whose {lazy} has no shape yet: run one forward in `model()` "
            "before returning it, such as module(torch.zeros(1, 8))"
        )


def check_not_parallel(model: nn.Module) -> None:
    """Refuse a model that is already sharded or parallel, whose tensors are DTensors.

    Raises:
        ConfigError: names the first such parameter or buffer.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_dtensor(tensor):
            raise ConfigError(
                f"the task's `model` returned '{name}' as a DTensor: make a new, plain model there, without "
                "fully_shard or parallelize_module; --engine fsdp shards it, and --parallel.tensor divides its layers "
                "(the task's parallelize)"
            )


def check_writable(model: nn.Module) -> None:
    """Refuse a parameter that torch cannot write, or a trained one that it cannot update.

    Raises:
        ConfigError: names the first one.
    """
    for name, parameter in model.named_parameters():
        is_lazily_changed = parameter.requires_grad and (parameter.is_conj() or parameter.is_neg())
        if is_expanded(parameter) or is_lazily_changed:
            raise ConfigError(
                f"the task's `model` returned the parameter '{name}' as an expanded, conjugated or negated view, which "
                "torch cannot update: register a copy, as nn.Parameter(view.resolve_conj().resolve_neg().contiguous())"
            )


def check_not_meta(model: nn.Module) -> None:
    """Refuse parameters and buffers on the meta device, and nested ones without a shape.

    Raises:
        ConfigError: names the first one.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    nested = next((name for name, tensor in tensors if tensor.is_nested), None)
    if nested is not None:
        raise ConfigError(
            f"the task's `model` returned '{nested}' as a nested tensor, which has no shape: register a padded one, or "
            "keep it in a plain attribute"
        )
    name = next((name for name, tensor in tensors if tensor.is_meta), None)
    if name is not None:
        raise ConfigError(
            f"the task's `model` returned '{name}' on the meta device, without values: create it on a real device, or "
            "call model.to_empty(device='cpu') and initialise or load every value in `model()`"
        )


def _check_quantized(config: Config, model: nn.Module, world: World) -> None:
    """Check that quantized layers can be trained with adapters, and keep them unchanged.

    Raises:
        ConfigError: names the flag and the way out.
    """
    bits = config.model.load_in
    quantized: dict[str, str] = {}
    for name, layer in quantized_layers(model):
        quantized.setdefault(bits_of(layer), name)
    if not quantized:
        if bits != "full":
            raise ConfigError(
                f"--model.load-in {bits} needs a --model-name of transformers: give one, or quantize the model in the "
                "task's model() (transformers.BitsAndBytesConfig) and leave the flag out"
            )
        return
    for bits, name in quantized.items():
        try:
            check_quantized(bits, name_of(config.engine, world), config.engine_options)
        except FieldError as error:
            # The quantized layers come from the task's own model.
            raise ConfigError(f"{name} of the model is quantized: {error.message(flag_of)}") from None
        if not config.lora.rank and not any(hasattr(module, "lora_A") for module in model.modules()):
            raise ConfigError(f"{name} of the model is quantized and cannot be trained: set --lora.rank, such as 16")
    keep_unchanged(model, world.device)


def _check_weight_copies(config: Config, task: Task, world: World) -> None:
    """Refuse --weight-copies step with a precision, engine or task that does not support it.

    Raises:
        ConfigError: names the flag and the way out.
    """
    if config.precision != "bf16":
        raise ConfigError(f"--weight-copies step needs --precision bf16, not {config.precision}: leave it out")
    check_copies(
        name_of(config.engine, world),
        narrow=config.grad_dtype == "bf16",
        exact=config.exact,
        hooked=task.hooks is not None,
        own_steps=task.own_steps is not None,
    )


def _set_residual_dtype(config: Config, model: nn.Module) -> None:
    """Set the built-in GPT's residual dtype, by --residual-dtype.

    Raises:
        ConfigError: another model or precision.
    """
    if config.residual_dtype == "float32":
        return
    if not isinstance(model, GPT) or config.precision != "bf16":
        raise ConfigError(
            f"--residual-dtype {config.residual_dtype} needs the built-in GPT and --precision bf16, not "
            f"{type(model).__name__} and {config.precision}; leave it out"
        )
    model.residual = torch.bfloat16


# --- schedule, optimizer and engine


def _set_groups(task: Task, steps: int, groups: list[dict[str, Any]]) -> None:
    set_groups(task, groups, current_step(task), steps)


def build_optimizer(config: Config, task: Task, model: nn.Module, pipeline: Pipeline | None = None) -> Optimizer:
    """Make the task's own optimizer, or the configured one, over the engine's model."""
    task_blocks = task.blocks(model)
    if pipeline:
        # Those of other stages count for the depth of a layer.
        layers = list(pipeline.stage.blocks)
    elif task_blocks is None:
        layers = repeated_layers(model)
    else:
        layers = list(task_blocks)
    # A rule of --optim.groups may name parameters of one stage alone.
    elsewhere = pipeline.stage.parameters_elsewhere if pipeline else ()
    return _task_optimizer(config, task, model, pipeline) or make_optimizer(model, config, layers, elsewhere)


def _task_optimizer(config: Config, task: Task, model: nn.Module, pipeline: Pipeline | None) -> Optimizer | None:
    """Call the task's `optimizer`, and check its result.

    Raises:
        ConfigError: it is no optimizer of this model, or flags ask for groups too.
        DataError: the method failed.
    """
    try:
        optimizer = task.optimizer(model, config)
    except LockstepError:
        raise
    except Exception as error:
        raise blame("optimizer", error, "the start, before step 1") from error
    if optimizer is None:
        return None
    if config.optim.groups or config.optim.layer_decay != 1.0:
        if config.optim.groups:
            flag = "--optim.groups"
        else:
            flag = "--optim.layer-decay"
        raise ConfigError(f"{flag} sets groups of lockstep's optimizer, but the task has its own: leave one out")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the task's `optimizer` returned {type(optimizer).__name__}: return a torch.optim.Optimizer over the "
            "parameters of its argument `model`, or None to use --optim"
        )
    known = set(model.parameters())
    foreign = sum(parameter not in known for group in optimizer.param_groups for parameter in group["params"])
    if foreign and pipeline:
        raise ConfigError(
            f"--parallel.pipeline {pipeline.stages.size}: the task's `optimizer` has {foreign} tensors that are no "
            "parameters of this stage; make its groups from `model.named_parameters()`"
        )
    if foreign:
        raise ConfigError(
            f"the task's `optimizer` has {foreign} parameters of another model than its argument `model`: use that "
            "one's, because an engine may replace those of task.model(); return parameters of the loss from model(), "
            "as a part of the module"
        )
    return optimizer


_BASE_MESSAGE = (
    "it belongs to the adapters' base, which their checkpoints leave out; name it in --lora.modules-to-save from the "
    "start, or continue from the merged model (lockstep export --format hf --merge)"
)


def check_own_steps(config: Config) -> None:
    """Refuse settings that need the whole step, for a task with manual optimization.

    Such a task updates the weights before the whole step is known, and each update has its own gradients.

    Raises:
        ConfigError: names the flag and the way out.
    """
    for is_set, flag, advice in (
        (config.optim.clip, "--optim.clip", "clip in the task's own steps, as by clip_gradients, and set it to 0"),
        (config.optim.ema, "--optim.ema", "average the weights in the loop of lockstep.Run"),
        (config.guards.nonfinite == "skip", "--guards.nonfinite skip", "use stop or rollback"),
        (config.guards.spike == "skip", "--guards.spike skip", "use warn or rollback"),
    ):
        if is_set:
            raise ConfigError(f"{flag} does not work with a task that steps its optimizers itself: {advice}")


# Each argument is a part of the run that the engine depends on.
def build_engine(  # noqa: PLR0913
    config: Config,
    task: Task,
    model: nn.Module,
    world: World,
    groups: OptimizerGroups,
    batches: Batches,
    say: Callable[[str], None],
    state: RunState,
    pipeline: Pipeline | None = None,
) -> Engine:
    """Make the engine around the model.

    Args:
        groups: an optimizer in it is reused with its states.
        say: called with a line for the user.
        state: the run's; updated when the set of trained parameters changes.
        pipeline: of which the model is one stage; None: it is the whole model.

    Raises:
        ConfigError: the engine, task and configuration do not fit together.
    """
    if task.own_steps:
        check_own_steps(config)
    if has_own(task, "set_groups"):
        groups.change = partial(_set_groups, task, batches.step_plan.steps)

    def make(engine_model: nn.Module) -> Optimizer:
        if groups.optimizer is not None:
            return groups.optimizer
        return groups.set_optimizer(build_optimizer(config, task, engine_model, pipeline))

    def remake(engine_model: nn.Module, before: Optimizer) -> Optimizer:
        # An optimizer of the task stays while it has all trained parameters.
        trained = {id(p) for p in engine_model.parameters() if p.requires_grad}
        if has_own(task, "optimizer") and trained <= {id(p) for group in before.param_groups for p in group["params"]}:
            return before
        return groups.set_optimizer(build_optimizer(config, task, engine_model, pipeline))

    def store_trained(trained: TrainedSet) -> None:
        state.trained = trained

    # Checkpoints of adapters leave out the base, so it must stay frozen.
    fixed_names = {}
    for name in base_tensor_names(model, state):
        fixed_names[name.removeprefix("model/")] = _BASE_MESSAGE
    request = EngineRequest(
        clip=config.optim.clip,
        exact=config.micro_batches if config.exact else 0,
        sharing=batches.sharing if config.shares != "equal" and world.data_parallel.size > 1 else None,
        loss_scaling=config.fp16 if config.precision == "fp16" else None,
        blocks=tuple(task.blocks(model) or ()),
        options=config.engine_options,
        say=say,
        ema=config.optim.ema,
        hooks=task.hooks,
        own_steps=task.own_steps,
        gradients=groups.gradients,
        penalty=task.penalty if has_own(task, "penalty") else None,
        own=OwnState(
            tensors=task.state_dict if has_own(task, "state_dict") else None,
            alike=has_step_loss(task),
            by_sample=task.sample_state,
        ),
        changes=Changes(remake, fixed_names, state.trained, state.global_step, store_trained),
        pipeline=pipeline,
    )
    return make_engine(config.engine, model, make, world, request)
