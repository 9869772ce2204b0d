"""Load the base of adapters, and add them to a run's model: `--lora.rank`.

has_adapters = add_adapters(config, task, model, world, state, say)
model = load_with_adapters(model, state.lora)       # by the description in a checkpoint
base_tensor_names(model, state)                     # what a checkpoint of adapters leaves out
"""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn

from lockstep import checkpoint
from lockstep.checkpoint.check import read_contents
from lockstep.checkpoint.foreign import is_foreign
from lockstep.checkpoint.format import read_manifest
from lockstep.checkpoint.read import check_fits
from lockstep.config.fields import is_url
from lockstep.config.schema import Config
from lockstep.config.secrets import printable
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.world import World
from lockstep.engines.ddp import shorten
from lockstep.errors import CheckpointError, ConfigError, ResumeError
from lockstep.models.lora import Adapters, base_names, chosen_modules, chosen_targets, inject, is_within
from lockstep.models.quantized import quantized_layers, scales
from lockstep.run_state import AdapterState, RunState
from lockstep.seeds import derive
from lockstep.task import Task
from lockstep.training.start.init_drop import init_drop
from lockstep.training.start.weights import find_weights, load_model
from lockstep.transforms.precision import AUTOCAST, PARAMETERS

__all__ = [
    "add_adapters",
    "add_empty_adapters",
    "base_tensor_names",
    "load_with_adapters",
]


Say = Callable[[str], None]


def base_tensor_names(model: nn.Module, state: RunState) -> frozenset[str]:
    """Return `model/NAME` of the base's tensors, which a checkpoint of adapters leaves out."""
    if state.lora is None:
        return frozenset()
    return frozenset(f"model/{name}" for name in (*base_names(model, state.lora.modules_to_save), *scales(model)))


def add_adapters(config: Config, task: Task, model: nn.Module, world: World, state: RunState, say: Say) -> bool:
    """Load the base's weights and add adapters in place, by --lora.rank. Collective.

    Args:
        model: as the task made it. Under `meta_init` only rank 0 has values.
        state: of the checkpoint to resume from, or of a new run; gets `lora`.

    Returns:
        Whether there are adapters.

    Raises:
        ConfigError: nothing to adapt, no trained base, or peft is not installed.
        ResumeError: the checkpoint's adapters are for another base, or for its weights in other bits.
    """
    stored = state.lora
    if not config.lora.rank:
        if stored:
            raise ResumeError(
                f"the run has adapters of rank {stored.rank}: give --lora.rank {stored.rank}, or another "
                "--experiment-name"
            )
        return False
    if stored:
        _check_same_bits(config, state)
    # The base of a new run has no digest yet, unless it has adapters itself.
    base = stored or _find_base(config, world, say)
    source = base.base_from
    if not base.base:
        _check_trained(config, task, source, say)
    if source:
        modules = base.modules_to_save
        drop = init_drop(config, task)
        # Modules that an earlier start trained are in its checkpoint.
        leave = lambda name: is_within(name, modules) or (not stored and drop.matches(name))  # noqa: E731
        label = "" if stored else f"--init-from {config.init_from}"
        on_all_ranks(world, lambda: _load_base(model, Path(source), leave, label))
    on_all_ranks(world, lambda: _check_half_precision(config, model))
    adapters = on_all_ranks(world, lambda: _resolve_adapters(config, task, model, base))
    on_all_ranks(world, lambda: _check_left(config, task, model, adapters))
    digest = on_all_ranks(world, lambda: _digest(model, adapters.modules_to_save) if world.is_main else "")
    # Only rank 0 has hashed the base; every rank stores the digest.
    adapters = dataclasses.replace(adapters, base=world.gather(digest)[0], base_from=source)
    if base.base:
        _check_same_base(base.base, adapters.base, ResumeError)
    torch.manual_seed(derive(config.seed, "lora"))
    on_all_ranks(world, lambda: inject(model, Adapters.of(adapters), getattr(torch, adapters.dtype)))
    state.lora = adapters
    return True


def add_empty_adapters(config: Config, task: Task, model: nn.Module) -> bool:
    """Add adapters to a model whose values do not matter, without loading a base.

    Returns:
        Whether there are adapters.
    """
    if not config.lora.rank:
        return False
    _check_half_precision(config, model)
    adapters = _resolve_adapters(config, task, model, AdapterState())
    inject(model, Adapters.of(adapters), getattr(torch, adapters.dtype))
    return True


def load_with_adapters(model: nn.Module, adapters: AdapterState) -> nn.Module:
    """Load the base and add empty adapters, by the description in a checkpoint.

    Raises:
        CheckpointError: the model has another base.
    """
    if adapters.base_from:
        _load_base(model, Path(adapters.base_from), lambda name: is_within(name, adapters.modules_to_save))
    _check_same_base(adapters.base, _digest(model, adapters.modules_to_save), CheckpointError)
    inject(model, Adapters.of(adapters), getattr(torch, adapters.dtype))
    return model


def _check_same_bits(config: Config, state: RunState) -> None:
    """Raise ResumeError if the base of the adapters had another number of bits."""
    before = state.plan.get("model.load_in", "full")
    bits = config.model.load_in
    if before != bits:
        raise ResumeError(
            f"the adapters were trained with --model.load-in {before}, not {bits}: give --model.load-in {before}, or "
            "another --experiment-name"
        )


def _check_same_base(expected: str, actual: str, kind: type[Exception]) -> None:
    """Raise `kind` if the adapters' base and this model's base have different digests."""
    if expected != actual:
        raise kind(
            f"the adapters are for another base: its weights have the digest {expected[:19]}..., and this model's "
            f"{actual[:19]}...; give the model and the revision that they were trained on"
        )


def _resolve_adapters(config: Config, task: Task, model: nn.Module, base: AdapterState) -> AdapterState:
    """Return the adapters of this run: rank, layers, and modules to train whole."""
    lora = config.lora
    names = lora.modules_to_save or ", ".join(task.untrained())
    if base.base:
        modules = base.modules_to_save
    else:
        modules = chosen_modules(model, names)
    targets = chosen_targets(model, lora.targets, modules)
    return AdapterState(
        rank=lora.rank,
        alpha=lora.alpha or 2.0 * lora.rank,
        dropout=lora.dropout,
        targets=targets.said,
        turned=targets.turned,
        modules_to_save=modules,
        dtype=str(PARAMETERS[config.precision]).removeprefix("torch."),
    )


def _check_half_precision(config: Config, model: nn.Module) -> None:
    """Raise ConfigError if autocast would mix float16 and bfloat16, which torch's norms refuse."""
    autocast = AUTOCAST.get(config.precision)
    if autocast:
        other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(autocast)
    else:
        other = None
    if other and any(parameter.dtype is other for parameter in model.parameters()):
        name = str(other).removeprefix("torch.")
        raise ConfigError(
            f"--precision {config.precision} does not go with a base in {name}, since torch cannot mix them; use "
            "--precision float32, which leaves the base as it is"
        )


def _check_trained(config: Config, task: Task, source: str, say: Say) -> None:
    """Refuse adapters on random weights: they change little, so they would learn almost nothing.

    Args:
        source: the base's checkpoint; "": none.
    """
    if source or task.defaults == "fine-tuning":
        return
    if task.defaults == "language-model":
        raise ConfigError(
            "--lora.rank adapts a trained model, and this one has random weights: give --init-from RUN, or a hub's "
            "--model-name with --model.pretrained"
        )
    say(
        "--lora.rank: the base is what the task's model() returns; if its weights are random, adapters learn little: "
        "give --init-from RUN, or set defaults = 'fine-tuning' in the task"
    )


def _find_base(config: Config, world: World, say: Say) -> AdapterState:
    """Return a new run's base: --init-from, or its adapters' base. Collective."""
    if not config.init_from:
        return AdapterState()
    if is_foreign(Path(config.init_from).expanduser()):
        raise ConfigError(
            f"--init-from {config.init_from} is in another format, and adapters store which checkpoint they belong to: "
            f"run `lockstep "
            "checkpoint import` on it, and give the folder that it writes"
        )
    if is_url(config.init_from) and world.leads:
        raise ConfigError(
            f"--init-from {config.init_from}: adapters keep their base's folder, and these nodes share none; set "
            "--checkpoint.local-dir to a folder that all nodes share, or copy the base to each"
        )
    source, _ = find_weights(config, world, say)  # collective
    state = on_all_ranks(world, lambda: checkpoint.read_run_state(source) if world.is_main else RunState())
    lora = state.lora or AdapterState(base_from=str(source.resolve()))
    # Only rank 0 has read the checkpoint's state; every rank needs the answer.
    base, base_from, modules = world.gather([lora.base, lora.base_from, lora.modules_to_save])[0]
    return AdapterState(base, base_from, modules)


def _check_left(config: Config, task: Task, model: nn.Module, adapters: AdapterState) -> None:
    """Raise ConfigError if --init-drop leaves a layer as initialised that nothing trains."""
    drop = init_drop(config, task)
    names = []
    for name, _ in model.named_parameters():
        if config.init_from and drop.matches(name):
            names.append(name)
    lost = [name for name in names if not is_within(name, adapters.modules_to_save)]
    if lost:
        raise ConfigError(
            f"{drop.origin}: {shorten(lost)} would keep their initial values, since adapters leave the base unchanged: "
            "name their module in --lora.modules-to-save too"
        )


def _load_base(model: nn.Module, source: Path, leave: Callable[[str], bool], label: str = "") -> None:
    """Load the base's weights in their stored dtypes; under `meta_init` on rank 0 alone.

    Args:
        leave: whether a tensor keeps its value, by its name.
        label: of a new run, for an error.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    if any(True for _ in quantized_layers(model)):
        raise ConfigError(
            "--model.load-in does not go with --init-from of a whole model: run `lockstep export --format hf` on it, "
            "and give that folder as --model-name"
        )
    if not (source / "manifest.json").is_file():
        raise CheckpointError(f"the adapters' base is missing: {printable(str(source))}; restore that checkpoint")
    tensors = read_contents(source, read_manifest(source))
    wanted = {f"model/{name}": value for name, value in model.state_dict(keep_vars=True).items() if not leave(name)}
    for name, tensor in wanted.items():
        if name in tensors:
            tensor.data = tensor.data.to(getattr(torch, tensors[name].dtype))
    if label:
        check_fits(label, wanted, tensors, lambda name: leave(name.removeprefix("model/")))
    load_model(source, model, leave=leave)


def _digest(model: nn.Module, modules: Collection[str]) -> str:
    """Hash the base's parameters, and the scales of quantized ones, before adapters are added."""
    tensors = {}
    for name in base_names(model, modules):
        tensors[name] = model.get_parameter(name).detach()
    # Quantization settings are JSON that a newer package may extend, so they are not hashed.
    described = {name for name in scales(model) if ".quant_state." in name}
    return checkpoint.fingerprint_of(tensors | {n: t for n, t in scales(model).items() if n not in described})
