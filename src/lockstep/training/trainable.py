"""Track which parameters a run trains: adapters, unfreezing, freezing, added groups.

    begin_as_made(model, state)         # before an engine is made: what the checkpoint's tensors fit
    train_now(model, state)             # once they are loaded: what is trained now
    note(engine, state)                 # before the state is kept

From the first change on, every checkpoint has a `run_state.TrainedSet`. The loop's body may change the set
after its step's checkpoint is begun: `checkpoints/trained.json` records these changes by step.
"""

import dataclasses
import zlib
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.checkpoint.check import contents
from lockstep.checkpoint.format import read_manifest
from lockstep.config.schema import Config
from lockstep.config.secrets import printable
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import Engine
from lockstep.engines.ddp import listed
from lockstep.engines.registry import trained_set
from lockstep.engines.wrappers import set_trained
from lockstep.errors import CheckpointError, ConfigError, ResumeError
from lockstep.models.lora import Adapters, base_names, chosen_modules, chosen_targets, inject
from lockstep.run_state import AdapterState, RunState, TrainedSet
from lockstep.seeds import derive
from lockstep.task import Task
from lockstep.training.resume import find_weights, load_weights
from lockstep.training.run_dir import RunFolder
from lockstep.transforms.precision import AUTOCAST, PARAMETERS

__all__ = [
    "add_adapters",
    "add_empty_adapters",
    "apply_body_changes",
    "base_tensor_names",
    "check_in_optimizer",
    "load_with_adapters",
    "record_body_change",
    "restore_initial_set",
    "restore_trained_set",
    "store_trained_set",
    "trained_digest",
]


# --- adapters

Say = Callable[[str], None]


def base_tensor_names(model: nn.Module, state: RunState) -> frozenset[str]:
    """Return the names that a checkpoint of adapters leaves out: `model/NAME` of the base."""
    known = state.lora
    return frozenset(f"model/{name}" for name in base_names(model, known.modules_to_save)) if known else frozenset()


def add_adapters(config: Config, task: Task, model: nn.Module, world: World, state: RunState, say: Say) -> bool:
    """Load the base's weights and add adapters in place, by --lora.rank. Collective.

    Args:
        model: as the task made it. Under `meta_init` only rank 0 has values.
        state: of the checkpoint to resume from, or a new one; its `lora` is filled in.

    Returns:
        Whether there are adapters.

    Raises:
        ConfigError: nothing to adapt, no trained base, or peft is not installed.
        ResumeError: the checkpoint's adapters are for another base.
    """
    known = state.lora
    if not config.lora.rank:
        if known:
            raise ResumeError(
                f"the run holds adapters of rank {known.rank}: give --lora.rank {known.rank}, or another "
                "--experiment-name"
            )
        return False
    first = known or _find_base(config, world, say)  # where the base comes from, and perhaps its digest
    begun = first.base_from
    if not first.base:
        _check_trained(config, task, begun, say)
    if begun:
        on_all_ranks(world, lambda: _load_base(model, Path(begun)))
    on_all_ranks(world, lambda: _check_half_precision(config, model))
    found = on_all_ranks(world, lambda: _resolve_adapters(config, task, model, first))
    digest = on_all_ranks(world, lambda: _digest(model, found.modules_to_save) if world.is_main else "")
    found = dataclasses.replace(found, base=world.gather(digest)[0], base_from=begun)  # collective
    if first.base:
        _check_same_base(first.base, found.base, ResumeError)
    torch.manual_seed(derive(config.seed, "lora"))
    on_all_ranks(world, lambda: inject(model, Adapters.of(found), getattr(torch, found.dtype)))
    state.lora = found
    return True


def add_empty_adapters(config: Config, task: Task, model: nn.Module) -> bool:
    """Add adapters to a model whose values do not matter. Not collective.

    Nothing is read or compared.

    Returns:
        Whether there are adapters.
    """
    if not config.lora.rank:
        return False
    _check_half_precision(config, model)
    found = _resolve_adapters(config, task, model, AdapterState())
    inject(model, Adapters.of(found), getattr(torch, found.dtype))
    return True


def load_with_adapters(model: nn.Module, known: AdapterState) -> nn.Module:
    """Load the base and add empty adapters, as a checkpoint describes them.

    Raises:
        CheckpointError: the base is another one.
    """
    if known.base_from:
        _load_base(model, Path(known.base_from))
    _check_same_base(known.base, _digest(model, known.modules_to_save), CheckpointError)
    inject(model, Adapters.of(known), getattr(torch, known.dtype))
    return model


def _check_same_base(known: str, found: str, kind: type[Exception]) -> None:
    """Raise `kind` if the adapters' base and this model's base have different digests."""
    if known != found:
        raise kind(
            f"these are adapters for another base: its weights have the digest {known[:19]}..., and this "
            f"model's {found[:19]}...; give the model and the revision that they were trained on"
        )


def _resolve_adapters(config: Config, task: Task, model: nn.Module, first: AdapterState) -> AdapterState:
    lora, wanted = config.lora, config.lora.modules_to_save or ", ".join(task.untrained())
    whole = first.modules_to_save if first.base else chosen_modules(model, wanted)
    targets = chosen_targets(model, lora.targets, whole)
    return AdapterState(
        rank=lora.rank,
        alpha=lora.alpha or 2.0 * lora.rank,
        dropout=lora.dropout,
        targets=targets.said,
        turned=targets.turned,
        modules_to_save=whole,
        dtype=str(PARAMETERS[config.precision]).removeprefix("torch."),
    )


def _check_half_precision(config: Config, model: nn.Module) -> None:
    """Raise ConfigError if autocast would mix float16 and bfloat16 with the base.

    torch's norms refuse the mixture.
    """
    wanted = AUTOCAST.get(config.precision)
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(wanted) if wanted else None
    if other and any(parameter.dtype is other for parameter in model.parameters()):
        name = str(other).removeprefix("torch.")
        raise ConfigError(
            f"--precision {config.precision} beside a base in {name}: torch does not take the two together; use "
            "--precision float32, which leaves the base as it is"
        )


def _check_trained(config: Config, task: Task, begun: str, say: Say) -> None:
    """Refuse adapters on random weights: they change little, so they would learn almost nothing."""
    if begun or task.defaults == "fine-tuning":
        return
    if task.defaults == "language-model":
        raise ConfigError(
            "--lora.rank adapts a model that is trained already, and this one is drawn: give --init-from RUN, or a "
            "hub's --model-name with --model.pretrained"
        )
    say(
        "--lora.rank: the base is what the task's model() returns; if its weights are drawn there, adapters learn "
        "little: give --init-from RUN, or say defaults = 'fine-tuning' in the task"
    )


def _find_base(config: Config, world: World, say: Say) -> AdapterState:
    """Return where a new run's base comes from. Collective.

    It is the checkpoint of --init-from; if that has adapters, their own base. Rank 0 reads, and sends it to all.
    """
    if not config.init_from:
        return AdapterState()
    source, _ = find_weights(Path(config.init_from).expanduser(), world, say)  # collective
    state = on_all_ranks(world, lambda: checkpoint.read_run_state(source) if world.is_main else RunState())
    theirs = state.lora or AdapterState(base_from=str(source.resolve()))
    base, base_from, whole = world.gather([theirs.base, theirs.base_from, theirs.modules_to_save])[0]  # collective
    return AdapterState(base, base_from, whole)


def _load_base(model: nn.Module, source: Path) -> None:
    """Load the base's weights, in the dtypes stored there.

    Under `meta_init` only rank 0 loads; its weights are broadcast later.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    if not (source / "manifest.json").is_file():
        raise CheckpointError(f"the adapters' base was in {printable(str(source))}, which is gone; put it back")
    stored = contents(source, read_manifest(source))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if f"model/{name}" in stored:
            tensor.data = tensor.data.to(getattr(torch, stored[f"model/{name}"].dtype))
    load_weights(source, model)


def _digest(model: nn.Module, whole: Collection[str]) -> str:
    """Hash the base's parameters by their plain names, before the adapters are added."""
    return checkpoint.fingerprint_of({name: model.get_parameter(name).detach() for name in base_names(model, whole)})


# --- trained set


def trained_digest(trained: TrainedSet | None) -> int:
    """Return a hash of the trained set; 0 if it never changed."""
    return zlib.crc32("\n".join(sorted(trained.now)).encode()) if trained else 0


def store_trained_set(engine: Engine, state: RunState) -> None:
    """Store the current trained set in the state, if it ever changed."""
    state.trained = trained_set(engine) or state.trained


def restore_initial_set(model: nn.Module, state: RunState) -> list[str]:
    """Make the model train what the checkpoint's engine was made for.

    Returns:
        The names of parameters that it would not train by itself.
    """
    known = state.trained
    if known is None:
        return []
    first = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    set_trained(model, {*known.made})
    return [name for name in known.made if name not in first]


def check_in_optimizer(model: nn.Module, optimizer: Optimizer | None, names: Collection[str]) -> None:
    """Raise ResumeError if the optimizer lacks some of these unfrozen parameters."""
    held = {id(p) for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]}
    named = dict(model.named_parameters())
    left = [name for name in names if name in named and id(named[name]) not in held]
    if left:
        raise ResumeError(
            f"the run unfroze {listed(left)} on the way, and the task's `optimizer` has these in no group: let it take "
            "whatever requires gradients"
        )


def restore_trained_set(model: nn.Module, state: RunState) -> None:
    """Make the model train what the run trained when its state was stored."""
    if state.trained is not None:
        set_trained(model, {*state.trained.now})


def record_body_change(engine: Engine, state: RunState, folder: RunFolder, done: int, world: World) -> None:
    """Record what the loop's body changed after the checkpoint of `done` steps was begun."""
    found = trained_set(engine)
    if found is None or found == state.trained:
        return
    state.trained = found
    if world.is_main:
        folder.write_trained({**folder.read_trained(), str(done): found.to_json()})


def apply_body_changes(folder: RunFolder, state: RunState, world: World) -> None:
    """Apply the body's recorded changes to the checkpoint's state. Collective."""
    found = world.gather(folder.read_trained() if world.is_main else {})[0]  # collective
    changed = found.get(str(state.global_step))
    if changed:
        state.trained = TrainedSet.from_json(changed, "trained.json")
