"""What a DeepSpeed JSON file says of the run, as settings of ours: optimizer, scheduler, batch, precision, clipping.

    settings(content, ranks=2)      # {"optim.name": "adamw", "lr": 1.5e-4, "precision": "fp16", "batch_size": 8, ...}
    taken(values, content, ranks)   # with what the flags say; a contradiction names both
    hold(content, value_of, ranks)  # the same for a configuration that is made already

Where a flag says the same number it may stay; where it says another one, that is refused by name. What the file leaves
to DeepSpeed's defaults holds where no flag says otherwise.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

__all__ = [
    "hold",
    "optimizer_named",
    "read_json",
    "scale_of",
    "taken",
]


Said = dict[str, tuple[str, Any]]  # our option -> (the key that says it, "" for a default of DeepSpeed's; its value)

# optimizer.params -> (our option, DeepSpeed's default), see deepspeed/ops/adam and torch.optim
_ADAM = {"lr": ("lr", 1e-3), "eps": ("optim.eps", 1e-8), "weight_decay": ("optim.weight_decay", 0.0)}
_SGD = {
    "lr": ("lr", 1e-3),
    "momentum": ("optim.momentum", 0.0),
    "nesterov": ("optim.nesterov", False),
    "weight_decay": ("optim.weight_decay", 0.0),
}
_IGNORED = ("torch_adam", "bias_correction", "amsgrad")  # at their defaults they change nothing
# fp16 -> DeepSpeed's default, see deepspeed/runtime/precision_config.py; ours are options of the same names
_SCALE = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
_SCALE |= {"consecutive_hysteresis": False}
_SCALE_OFF = {"loss_scale": 0, "auto_cast": False, "fp16_master_weights_and_grads": False}  # not served but as these


def read_json(path: str) -> dict[str, Any]:
    """The file's object; {} for "". Raises ConfigError where it cannot be read or is no JSON object."""
    if not path:
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--engine.config {path}: {error.strerror or error}; give a DeepSpeed JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--engine.config {path} is not a JSON file: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--engine.config {path}: it holds no object; give a DeepSpeed configuration")
    return found


def taken(values: Mapping[str, Any], content: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """`values` (dotted names that flags and --config say) with what the file says.

    Raises:
        ConfigError: a value that they have otherwise, a part that is not served, or one that is no object.
    """
    hold(content, lambda name: values.get(name, "auto"), ranks)
    said = _settings(content, ranks, str(values.get("precision", "")))
    return {**values, **{name: value for name, (_, value) in said.items() if values.get(name, "auto") == "auto"}}


def hold(content: Mapping[str, Any], value_of: Callable[[str], Any], ranks: int) -> None:
    """Raises ConfigError where a setting is another one than the file says; "auto" is none."""
    for name, (key, value) in _settings(content, ranks, str(value_of("precision"))).items():
        given = value_of(name)
        if key and given != "auto" and given != value:
            raise ConfigError(
                f"--engine.config: {key} is {json.dumps(_at(content, key))}, which makes {_flag(name)} {value}, and "
                f"it is {given}; take either out"
            )


def _settings(content: Mapping[str, Any], ranks: int, precision: str = "") -> Said:
    """What the file says. What is "auto" or not there is left to the flags; in an optimizer, and in fp16 where that is
    on, to DeepSpeed's defaults.

    DeepSpeed's "Adam" decouples the decay unless `adam_w_mode` is false: it is adamw here.

    Args:
        precision: what --precision says, on which an fp16 that is "auto" depends.

    Raises:
        ConfigError: an optimizer, a scheduler or a parameter that is not served.
    """
    found: Said = {}
    optimizer, scheduler = _section(content, "optimizer"), _section(content, "scheduler")
    if "type" in optimizer:
        found |= _optimizer(str(optimizer["type"]), _section(optimizer, "params", "optimizer."))
    if "type" in scheduler:
        rates = _scheduler(str(scheduler["type"]), _section(scheduler, "params", "scheduler."))
        if "lr" in rates and found.get("lr", ("",))[0] and rates["lr"][1] != found["lr"][1]:
            raise ConfigError(
                f"--engine.config: {rates['lr'][0]} is {rates['lr'][1]}, and {found['lr'][0]} {found['lr'][1]}; make "
                "them the same"
            )
        found |= rates
    for key, name in (("train_batch_size", "batch_size"), ("train_micro_batch_size_per_gpu", "micro_batch_size")):
        if _said(content, key):
            found[name] = (key, content[key])
    each = content.get("gradient_accumulation_steps")
    if "batch_size" in found and "micro_batch_size" not in found and type(each) is int and each > 0:
        size, rest = divmod(int(found["batch_size"][1]), each * ranks)
        if size and not rest:
            found["micro_batch_size"] = ("", size)  # held by `check_batches`
    if _said(content, "gradient_clipping"):
        found["optim.clip"] = ("gradient_clipping", float(content["gradient_clipping"]))
    for key, made in (("fp16", "fp16"), ("bf16", "bf16-true")):
        if _section(content, key).get("enabled") is True:
            found["precision"] = (f"{key}.enabled", made)
    on = _section(content, "fp16").get("enabled", "auto")
    if "fp16" in content and (on is True or (on == "auto" and precision == "fp16")):
        found |= scale_of(content)
    return found


def scale_of(content: Mapping[str, Any]) -> Said:
    """What the section fp16 says of the loss's scale.

    Raises:
        ConfigError: a fixed scale, or a key that is not served.
    """
    section = _section(content, "fp16")
    for key, value in section.items():
        if value == "auto" or key in ("enabled", *_SCALE) or (key in _SCALE_OFF and value == _SCALE_OFF[key]):
            continue
        if key == "loss_scale":
            raise ConfigError(
                f"--engine.config: take out fp16.loss_scale {json.dumps(value)}: a fixed scale of the loss is not "
                "served; 0, one that follows the gradients, is"
            )
        what = "is not served" if key in _SCALE_OFF else "is unknown to this engine"
        raise ConfigError(f"--engine.config: 'fp16.{key}' {json.dumps(value)} {what}: take it out")
    found = {f"fp16.{key}": (f"fp16.{key}" * (key in section), section.get(key, _SCALE[key])) for key in _SCALE}
    return {name: said for name, said in found.items() if said[1] != "auto"}


def _at(content: Mapping[str, Any], key: str) -> Any:
    found: Any = content
    for part in key.split("."):
        found = found[part]
    return found


def _said(section: Mapping[str, Any], key: str) -> bool:
    return bool(section.get(key, "auto") != "auto")


def _section(content: Mapping[str, Any], key: str, within: str = "") -> Mapping[str, Any]:
    found = content.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"--engine.config: {within}{key} is no object; write {{...}}, or take it out")
    return found


def optimizer_named(kind: Any, params: Mapping[str, Any]) -> str:
    """What `optimizer.type` is as --optim.name, in upper or lower case; "" where it is not served."""
    named = str(kind).lower()
    if named == "adam" and params.get("adam_w_mode") is not False:
        return "adamw"
    return named if named in ("adam", "adamw", "sgd") else ""


def _optimizer(kind: str, params: Mapping[str, Any]) -> Said:
    name = optimizer_named(kind, params)
    if not name:
        raise ConfigError(f"--engine.config: optimizer.type {kind} is not served: Adam, AdamW or SGD")
    known = _SGD if name == "sgd" else _ADAM
    found: Said = {"optim.name": ("optimizer.type", name)}
    for key, value in params.items():
        where = f"optimizer.params.{key}"
        if key == "betas" and name != "sgd" and value != "auto":
            found |= {"optim.beta1": (where, float(value[0])), "optim.beta2": (where, float(value[1]))}
        elif key not in (*known, "betas", "adam_w_mode", *_IGNORED):
            raise ConfigError(f"--engine.config: '{where}' is unknown to {kind}")
        elif key in ("torch_adam", "bias_correction", "amsgrad") and value is (key == "amsgrad"):
            raise ConfigError(f"--engine.config: {where} {json.dumps(value)} is not served; take it out")
    for key, (option, default) in known.items():
        value = params.get(key, default)
        if value != "auto":
            found[option] = (f"optimizer.params.{key}" if key in params else "", type(default)(value))
    if name != "sgd" and "betas" not in params:
        found |= {"optim.beta1": ("", 0.9), "optim.beta2": ("", 0.999)}
    return found


_SCHEDULES = {
    "WarmupLR": ("constant", None),
    "WarmupDecayLR": ("linear", 0.0),
    "WarmupCosineLR": ("cosine", 1e-4),
}


def _scheduler(kind: str, params: Mapping[str, Any]) -> Said:
    """DeepSpeed's warm-ups (deepspeed/runtime/lr_schedules.py). Where they rise is our own: linear, not from 0."""
    if kind not in _SCHEDULES:
        raise ConfigError(
            f"--engine.config: scheduler.type {kind} is not served: {', '.join(_SCHEDULES)}, or take it out and say "
            "--optim.schedule"
        )
    shape, floor = _SCHEDULES[kind]
    found: Said = {"optim.schedule": ("scheduler.type", shape)}
    known = {"warmup_num_steps", "total_num_steps", "cos_min_ratio", "warmup_max_lr", "warmup_min_lr", "warmup_type"}
    known |= {"warmup_min_ratio", "last_batch_iteration"}
    for key, value in params.items():
        if key not in known:
            raise ConfigError(f"--engine.config: 'scheduler.params.{key}' is unknown to {kind}: take it out")
        if key in ("warmup_min_lr", "warmup_min_ratio") and value not in (0, "auto"):
            raise ConfigError(
                f"--engine.config: scheduler.params.{key} is {value}: a warm-up begins near 0 here; write 0"
            )
    if (
        kind != "WarmupCosineLR"
        and params.get("warmup_type", "log") != "linear"
        and params.get("warmup_num_steps") != 0
    ):
        raise ConfigError(
            "--engine.config: scheduler.params.warmup_type is log, DeepSpeed's default, and here it is linear; "
            'write "linear"'
        )
    floor = params.get("cos_min_ratio", floor) if kind == "WarmupCosineLR" else floor
    for key, name, value in (
        ("warmup_num_steps", "optim.warmup_steps", params.get("warmup_num_steps", 1000)),
        ("total_num_steps", "max_steps", params.get("total_num_steps", "auto")),
        ("warmup_max_lr", "lr", params.get("warmup_max_lr", "auto")),
        ("cos_min_ratio", "optim.floor", "auto" if floor is None else float(floor)),
    ):
        if value != "auto" and not (name == "max_steps" and shape == "constant"):
            found[name] = (f"scheduler.params.{key}" if key in params else "", value)
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
