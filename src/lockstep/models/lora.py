"""Add low-rank adapters (LoRA) to a model's linear layers. Only this file needs `peft`.

    whole = chosen_modules(model, "classifier")             # trained in full, as a new head must be
    targets = chosen_targets(model, "q_proj, v_proj", whole)        # "": every linear layer but the heads
    inject(model, Adapters(16, 32.0, 0.0, targets.said, targets.turned, tuple(whole)), torch.float32)
    trained_names(model, whole), base_names(model, whole)

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685: the W x of a layer becomes
W x + alpha / rank * B A x, with A [rank, inputs] random and B [outputs, rank] zero, so the model starts unchanged. W is
frozen, and keeps its dtype. The module tree is the model's own, each adapted layer one level deeper: `fc.weight` is
`fc.base_layer.weight`, next to `fc.lora_A.default.weight` and `fc.lora_B.default.weight`.
"""

import difflib
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

# A private module of torch; nothing public maps the tensors of nested arguments.
from torch.utils._pytree import tree_map_only

from lockstep.errors import ConfigError
from lockstep.extras import install_extra
from lockstep.models.quantized import dequantize, is_transposed, quantized_layers, quiet, scales
from lockstep.run_state import AdapterState
from lockstep.tensors import reaches
from lockstep.transforms.determinism import keep_fastpath_off

__all__ = [
    "Adapters",
    "base_names",
    "chosen_modules",
    "chosen_targets",
    "exported_name",
    "inject",
    "is_within",
    "merge",
    "write_config",
]

# Ends of the names that peft gives to the adapters' parameters.
_ADAPTER = re.compile(r"\.lora_[AB]\.default\.(weight|bias)$", re.ASCII)
# peft keeps an adapted layer inside its wrapper, one level deeper.
_INSIDE = ".base_layer."


class Adapters(NamedTuple):
    """Settings of the adapters.

    Attributes:
        rank, alpha, dropout: of the flags of `--lora`, with `alpha` resolved.
        targets: the adapted layers as peft's `target_modules`: last parts of their names, or one regular expression.
        turned: their weights are transposed, [inputs, outputs], as GPT-2's.
        whole: the modules that are trained in full, peft's `modules_to_save`.
    """

    rank: int
    alpha: float
    dropout: float
    targets: list[str] | str
    turned: bool
    whole: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: AdapterState) -> Self:
        """Return the settings that a checkpoint's adapters have."""
        whole = tuple(state.modules_to_save)
        return cls(state.rank, float(state.alpha), state.dropout, state.targets, state.turned, whole)


class Targets(NamedTuple):
    """Layers to adapt.

    Attributes:
        names: of the layers.
        said: the same as peft's `target_modules`.
        turned: whether any has a transposed weight.
    """

    names: list[str]
    said: list[str] | str
    turned: bool


def chosen_modules(model: nn.Module, patterns: str) -> list[str]:
    """Return the modules of `--lora.modules-to-save`, in the model's order, outermost only.

    Args:
        patterns: names or patterns, as for `chosen_targets`.

    Raises:
        ConfigError: one matches no module with parameters (the nearest is named), or one that shares a parameter with a
            module outside of it.
    """
    modules = {}
    for name, module in model.named_modules():
        if name and any(True for _ in module.parameters()):
            modules[name] = module
    reached = set()
    for pattern in _parts(patterns):
        names = _find_reached(modules, pattern)
        if not names:
            close = difflib.get_close_matches(pattern, sorted({*modules, *_lasts(modules)}), n=1, cutoff=0.5)
            if close:
                hint = f"did you mean {close[0]}?"
            else:
                hint = f"the model's are {', '.join(_lasts(modules)[:8])}"
            raise ConfigError(f"--lora.modules-to-save: '{pattern}' matches no module; {hint}")
        reached.update(names)
    outer = []
    for name in modules:
        if name in reached and not is_within(name.rpartition(".")[0], reached):
            outer.append(name)
    for name in outer:
        _check_own(model, name)
    return outer


def _check_own(model: nn.Module, name: str) -> None:
    owned = {id(parameter) for parameter in model.get_submodule(name).parameters()}
    for base_name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owned and not is_within(base_name, {name}):
            raise ConfigError(
                f"--lora.modules-to-save: '{name}' shares its weight with '{base_name}' of the base; remove '{name}'"
            )


def is_within(name: str, modules: Collection[str]) -> bool:
    """Whether the module or parameter is one of these modules, or inside one."""
    parts = name.split(".")
    return any(".".join(parts[:k]) in modules for k in range(1, len(parts) + 1))


def chosen_targets(model: nn.Module, patterns: str, full: Collection[str] = ()) -> Targets:
    """Return the layers of `--lora.targets`, in the model's order.

    Args:
        patterns: comma-separated names or patterns with `*`, `?`, `[...]`; a name of one part means each layer whose
            name ends with it. "" means all linear layers but the head: the output table of a `transformers` model,
            and layers that share their weight with another module.
        full: the modules that are trained in full, and have no adapters.

    Raises:
        ConfigError: one matches no linear layer (the nearest is named), or there are none.
    """
    linear = {}
    for name, module in _linear(model).items():
        if not is_within(name, full):
            linear[name] = module
    names = list(dict.fromkeys(name for pattern in _parts(patterns) for name in _match(model, pattern, linear)))
    if not patterns.strip():
        heads = _heads(model)
        names = [name for name in linear if name not in heads]
    if not names:
        raise ConfigError("--lora.rank: the model has no torch.nn.Linear to adapt; drop the flag")
    ordered = [name for name in linear if name in set(names)]
    turned = any(not isinstance(linear[name], nn.Linear) for name in ordered)
    return Targets(ordered, _as_peft(ordered, [name for name, _ in model.named_modules()]), turned)


def _parts(patterns: str) -> list[str]:
    parts = []
    for pattern in patterns.split(","):
        if pattern.strip():
            parts.append(pattern.strip())
    return parts


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can be adapted.

    Layers of nn.MultiheadAttention are left out: it reads their weights without calling them.
    """
    within = set()
    for attention in model.modules():
        if isinstance(attention, nn.MultiheadAttention):
            for inner in attention.modules():
                within.add(id(inner))
    modules = {}
    for name, module in model.named_modules():
        if name and id(module) not in within and (isinstance(module, nn.Linear) or _is_turned(module)):
            modules[name] = module
    return modules


def _is_turned(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer of `transformers`, which need not be imported for this."""
    layer_class = type(module)
    return layer_class.__name__ == "Conv1D" and layer_class.__module__.startswith("transformers.")


def _heads(model: nn.Module) -> set[str]:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    owners: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            # A weight with two owners is tied, as an output head to the token table.
            owners[parameter] = owners.get(parameter, 0) + 1
    names = set()
    for name, module in model.named_modules():
        if module is head or any(owners[parameter] > 1 for parameter in module.parameters(recurse=False)):
            names.add(name)
    return names


def _match(model: nn.Module, pattern: str, linear: dict[str, nn.Module]) -> list[str]:
    layers = _find_reached(linear, pattern)
    if layers:
        return layers
    modules = _find_reached(dict(model.named_modules()), pattern)
    if modules:
        class_name = type(model.get_submodule(modules[0])).__name__
        raise ConfigError(
            f"--lora.targets: '{pattern}' is {modules[0]}, a {class_name}, but only linear layers take adapters; "
            "remove it"
        )
    close = difflib.get_close_matches(pattern, sorted({*_lasts(linear), *linear}), n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"the model's are {', '.join(_lasts(linear)[:8]) or 'none'}"
    raise ConfigError(f"--lora.targets: '{pattern}' matches no linear layer; {hint}")


def _lasts(names: Iterable[str]) -> list[str]:
    """Return the last component of each name, sorted."""
    return sorted({name.rpartition(".")[2] for name in names})


def _find_reached(names: Iterable[str], pattern: str) -> list[str]:
    return [name for name in names if name and reaches(pattern, name)]


def _as_peft(names: list[str], modules: list[str]) -> list[str] | str:
    """Return the layers as peft's `target_modules`: last parts of names, or a regular expression.

    The parts are used if they mean the same layers to peft.
    """
    lasts = _lasts(names)
    if [name for name in modules if name.rpartition(".")[2] in lasts] == names:
        return lasts
    return "|".join(re.escape(name) for name in names)


def inject(model: nn.Module, adapters: Adapters, dtype: torch.dtype) -> None:
    """Insert the adapters in place, initialised from torch's default generator, and freeze the base.

    Args:
        dtype: of the trained parameters: the adapters', and those of the modules that are trained in full.

    Raises:
        ConfigError: peft is not installed, or refuses.
    """
    peft = _peft()
    try:
        with warnings.catch_warnings():
            # peft warns if linear layers of both orientations are adapted, which works.
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(_config(peft, adapters), model)
    except ValueError as error:
        raise ConfigError(f"--lora.targets: peft rejects them: {' '.join(str(error).split())[:200]}") from error
    for name in adapters.whole:
        _compute_in(model.get_submodule(name), dtype)
    for name in trained_names(model, adapters.whole):
        parameter = model.get_parameter(name).requires_grad_(True)
        parameter.data = parameter.data.to(dtype)
    fast = []
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            fast.append(layer)
    # In evaluation the fast path of this layer reads the base's weights and skips the adapters.
    if any(True for layer in fast for _ in _layers(layer)):
        keep_fastpath_off()


def _compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the module's inputs to `dtype` and its outputs to the base's, if these differ."""
    base = next(parameter.dtype for parameter in module.parameters())
    if base is dtype:
        return
    module.register_forward_pre_hook(partial(_inputs_as, dtype), with_kwargs=True)
    module.register_forward_hook(partial(_outputs_as, base))


def _inputs_as(dtype: torch.dtype, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
    return _as(dtype, (inputs, kwargs))


def _outputs_as(dtype: torch.dtype, module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return _as(dtype, outputs)


def _as(dtype: torch.dtype, values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def trained_names(model: nn.Module, full: Collection[str]) -> list[str]:
    """Return the names of the adapters' parameters and of modules trained in full."""
    names = []
    for name, _ in model.named_parameters():
        if _is_trained(name, full):
            names.append(name)
    return names


def base_names(model: nn.Module, full: Collection[str]) -> list[str]:
    """Return the names of all other parameters, including second names of tied ones."""
    names = []
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not _is_trained(name, full):
            names.append(name)
    return names


def _is_trained(name: str, full: Collection[str]) -> bool:
    return bool(_ADAPTER.search(name)) or is_within(name, full)


def plain_name(name: str) -> str:
    """Return the name that a base parameter had before the adapters."""
    return name.replace(_INSIDE, ".")


def exported_name(name: str, full: Collection[str]) -> str:
    """Return a trained tensor's name in a file of peft; "" for the base."""
    if is_within(name, full):
        return f"base_model.model.{name}"
    if _ADAPTER.search(name):
        return f"base_model.model.{name.replace('.default.', '.')}"
    return ""


@torch.no_grad()
def merge(model: nn.Module) -> dict[str, Tensor]:
    """Return the base's tensors by plain name, with the adapters added, in the base's dtype.

    The sum is taken in the adapter's dtype if that is wider. Quantized weights are returned in the dtype that the rest
    of the base has. The model itself stays unchanged.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _layers(model)}
    quantized = {f"{name}.weight": layer for name, layer in quantized_layers(model)}
    dtype = _dtype_of(model)
    left_out = scales(model)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if _ADAPTER.search(name) or name in left_out:
            continue
        layer = layers.get(name)
        # A quantized weight is stored packed, not as a matrix.
        base = quantized.get(name)
        tensor = tensor if base is None else dequantize(base, dtype)
        if layer is not None:
            change = layer.get_delta_weight("default")
            tensor = (tensor.to(torch.promote_types(tensor.dtype, change.dtype)) + change).to(tensor.dtype)
        tensors[plain_name(name)] = tensor.t() if base is not None and is_transposed(base) else tensor
    return tensors


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the base's parameters that are not quantized; float32 without any."""
    kept = (p.dtype for name, p in model.named_parameters() if p.is_floating_point() and not _ADAPTER.search(name))
    return next(kept, torch.float32)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight"):
            yield name, module


def write_config(adapters: Adapters, folder: Path, base: str, kind: str) -> None:
    """Write `folder`/adapter_config.json for `peft.PeftModel.from_pretrained`.

    Args:
        base: the public name of the adapted model, else "".
        kind: a task type of peft, or "" for none.
    """
    config = _config(_peft(), adapters, inference_mode=True, modules_to_save=list(adapters.whole) or None)
    config.base_model_name_or_path = base or None
    config.task_type = kind or None
    config.save_pretrained(str(folder))


def _config(peft: Any, adapters: Adapters, **more: Any) -> Any:
    alpha = int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha
    return peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=alpha,
        lora_dropout=adapters.dropout,
        target_modules=adapters.targets,
        fan_in_fan_out=adapters.turned,
        bias="none",
        **more,
    )


def _peft() -> Any:
    # peft imports bitsandbytes if it is installed, which logs warnings.
    quiet()
    try:
        with warnings.catch_warnings():
            # The package's own imports warn of things that a user cannot change.
            warnings.simplefilter("ignore")
            import peft
    except ImportError as error:
        raise ConfigError(
            f"--lora.rank needs the package peft ({error.name} is missing): {install_extra('peft')}"
        ) from error
    return peft
