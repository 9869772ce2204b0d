"""Convert a DeepSpeed JSON file to options: optimizer, scheduler, batch size, precision, clipping.

    options = merge_settings(options, content, ranks)   # {"optim.name": "adamw", "lr": 1.5e-4, "batch_size": 8, ...}
    check_settings(content, value_of, ranks)            # that a configuration agrees with the file

A flag may repeat a value of the file but not contradict it. DeepSpeed's defaults hold if neither sets the option.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

__all__ = [
    "check_settings",
    "merge_settings",
    "optimizer_name",
    "read_json",
    "scale_settings",
]


# option -> (key of the file, "" for a default of DeepSpeed; value)
Settings = dict[str, tuple[str, Any]]

# optimizer.params -> (option, DeepSpeed's default), see deepspeed/ops/adam and torch.optim
_ADAM = {"lr": ("lr", 1e-3), "eps": ("optim.eps", 1e-8), "weight_decay": ("optim.weight_decay", 0.0)}
_SGD = {
    "lr": ("lr", 1e-3),
    "momentum": ("optim.momentum", 0.0),
    "nesterov": ("optim.nesterov", False),
    "weight_decay": ("optim.weight_decay", 0.0),
}
# Accepted with their defaults only.
_IGNORED = ("torch_adam", "bias_correction", "amsgrad")
# fp16 -> DeepSpeed's default, see deepspeed/runtime/precision_config.py; the options have the same names
_SCALE = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
_SCALE |= {"consecutive_hysteresis": False}
# Accepted with these values only.
_SCALE_OFF = {
    "loss_scale": 0,
    "auto_cast": False,
    "fp16_master_weights_and_grads": False,
}


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object; {} for an empty path.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--engine.config {path}: {error.strerror or error}; give a DeepSpeed JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--engine.config {path} is not a JSON file: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--engine.config {path} is not a JSON object; give a DeepSpeed configuration")
    return content


def merge_settings(values: Mapping[str, Any], content: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Add the settings of the file to options that are unset or "auto".

    Args:
        values: options that flags and --config set, by dotted name.
        content: the file's object.
        ranks: the world size.

    Raises:
        ConfigError: an option contradicts the file, or a part of the file is not supported.
    """
    check_settings(content, lambda name: values.get(name, "auto"), ranks)
    settings = _settings(content, ranks, str(values.get("precision", "")))
    return {**values, **{name: value for name, (_, value) in settings.items() if values.get(name, "auto") == "auto"}}


def check_settings(content: Mapping[str, Any], value_of: Callable[[str], Any], ranks: int) -> None:
    """Check that no option contradicts the file; "auto" does not.

    Args:
        content: the file's object.
        value_of: an option's dotted name -> its value.
        ranks: the world size.

    Raises:
        ConfigError: an option contradicts the file, or a part of the file is not supported.
    """
    for name, (key, value) in _settings(content, ranks, str(value_of("precision"))).items():
        current = value_of(name)
        if key and current != "auto" and current != value:
            raise ConfigError(
                f"--engine.config: {key} {json.dumps(_value_at(content, key))} sets {_flag(name)} {value}, but it is "
                f"{current}; remove one"
            )


def _settings(content: Mapping[str, Any], ranks: int, precision: str = "") -> Settings:
    """Convert the file to settings.

    Flags set what is "auto" or missing; in an optimizer, and in fp16 if that is on, DeepSpeed's defaults do. Its
    "Adam" decouples the decay unless `adam_w_mode` is false: it is adamw here.

    Args:
        content: the file's object.
        ranks: the world size.
        precision: of --precision; it decides on an fp16 that is "auto".

    Raises:
        ConfigError: an optimizer, a scheduler or a parameter that is not supported.
    """
    settings: Settings = {}
    optimizer = _section(content, "optimizer")
    scheduler = _section(content, "scheduler")
    if "type" in optimizer:
        settings |= _optimizer(str(optimizer["type"]), _section(optimizer, "params", "optimizer."))
    if "type" in scheduler:
        rates = _scheduler(str(scheduler["type"]), _section(scheduler, "params", "scheduler."))
        if "lr" in rates and settings.get("lr", ("",))[0] and rates["lr"][1] != settings["lr"][1]:
            raise ConfigError(
                f"--engine.config: {rates['lr'][0]} is {rates['lr'][1]}, but {settings['lr'][0]} is "
                f"{settings['lr'][1]}; make them equal"
            )
        settings |= rates
    for key, name in (("train_batch_size", "batch_size"), ("train_micro_batch_size_per_gpu", "micro_batch_size")):
        if _is_set(content, key):
            settings[name] = (key, content[key])
    accumulation = content.get("gradient_accumulation_steps")
    if (
        "batch_size" in settings
        and "micro_batch_size" not in settings
        and type(accumulation) is int
        and accumulation > 0
    ):
        size, rest = divmod(int(settings["batch_size"][1]), accumulation * ranks)
        if size and not rest:
            # The engine's `check_batches` compares it with the file.
            settings["micro_batch_size"] = ("", size)
    if _is_set(content, "gradient_clipping"):
        settings["optim.clip"] = ("gradient_clipping", float(content["gradient_clipping"]))
    for key, value in (("fp16", "fp16"), ("bf16", "bf16-true")):
        if _section(content, key).get("enabled") is True:
            settings["precision"] = (f"{key}.enabled", value)
    on = _section(content, "fp16").get("enabled", "auto")
    if "fp16" in content and (on is True or (on == "auto" and precision == "fp16")):
        settings |= scale_settings(content)
    return settings


def scale_settings(content: Mapping[str, Any]) -> Settings:
    """Convert the section fp16 to settings of the loss scale.

    Raises:
        ConfigError: a fixed scale, or a key that is not supported.
    """
    section = _section(content, "fp16")
    for key, value in section.items():
        if value == "auto" or key in ("enabled", *_SCALE) or (key in _SCALE_OFF and value == _SCALE_OFF[key]):
            continue
        if key == "loss_scale":
            raise ConfigError(
                f"--engine.config: fp16.loss_scale {json.dumps(value)}: a fixed loss scale is not supported; remove "
                "it, or set 0 for a dynamic scale"
            )
        problem = "is not supported" if key in _SCALE_OFF else "is unknown"
        raise ConfigError(f"--engine.config: fp16.{key} {json.dumps(value)} {problem}; remove it")
    settings = {}
    for key in _SCALE:
        settings[f"fp16.{key}"] = (f"fp16.{key}" * (key in section), section.get(key, _SCALE[key]))
    used = {}
    for name, setting in settings.items():
        if setting[1] != "auto":
            used[name] = setting
    return used


def _value_at(content: Mapping[str, Any], key: str) -> Any:
    value: Any = content
    for name in key.split("."):
        value = value[name]
    return value


def _is_set(section: Mapping[str, Any], key: str) -> bool:
    return bool(section.get(key, "auto") != "auto")


def _section(content: Mapping[str, Any], key: str, within: str = "") -> Mapping[str, Any]:
    section = content.get(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f"--engine.config: {within}{key} is not an object; write {{...}}, or remove it")
    return section


def optimizer_name(kind: Any, params: Mapping[str, Any]) -> str:
    """Convert `optimizer.type`, in any case, to an --optim.name; "" if it is not supported."""
    name = str(kind).lower()
    if name == "adam" and params.get("adam_w_mode") is not False:
        return "adamw"
    if name in ("adam", "adamw", "sgd"):
        return name
    return ""


def _optimizer(kind: str, params: Mapping[str, Any]) -> Settings:
    name = optimizer_name(kind, params)
    if not name:
        raise ConfigError(f"--engine.config: optimizer.type {kind} is not supported; use Adam, AdamW or SGD")
    known = _SGD if name == "sgd" else _ADAM
    settings: Settings = {"optim.name": ("optimizer.type", name)}
    for key, value in params.items():
        where = f"optimizer.params.{key}"
        if key == "betas" and name != "sgd" and value != "auto":
            settings |= {"optim.beta1": (where, float(value[0])), "optim.beta2": (where, float(value[1]))}
        elif key not in (*known, "betas", "adam_w_mode", *_IGNORED):
            raise ConfigError(f"--engine.config: {where} is unknown to {kind}; remove it")
        elif key in ("torch_adam", "bias_correction", "amsgrad") and value is (key == "amsgrad"):
            raise ConfigError(f"--engine.config: {where} {json.dumps(value)} is not supported; remove it")
    for key, (option, default) in known.items():
        value = params.get(key, default)
        if value != "auto":
            settings[option] = (f"optimizer.params.{key}" if key in params else "", type(default)(value))
    if name != "sgd" and "betas" not in params:
        settings |= {"optim.beta1": ("", 0.9), "optim.beta2": ("", 0.999)}
    return settings


_SCHEDULES = {
    "WarmupLR": ("constant", None),
    "WarmupDecayLR": ("linear", 0.0),
    "WarmupCosineLR": ("cosine", 1e-4),
}


def _scheduler(kind: str, params: Mapping[str, Any]) -> Settings:
    """Convert a scheduler of deepspeed/runtime/lr_schedules.py. The warm-up is lockstep's: linear, not from 0."""
    if kind not in _SCHEDULES:
        raise ConfigError(
            f"--engine.config: scheduler.type {kind} is not supported; use {', '.join(_SCHEDULES)}, or remove it and "
            "set --optim.schedule"
        )
    shape, floor = _SCHEDULES[kind]
    settings: Settings = {"optim.schedule": ("scheduler.type", shape)}
    known = {"warmup_num_steps", "total_num_steps", "cos_min_ratio", "warmup_max_lr", "warmup_min_lr", "warmup_type"}
    known |= {"warmup_min_ratio", "last_batch_iteration"}
    for key, value in params.items():
        if key not in known:
            raise ConfigError(f"--engine.config: scheduler.params.{key} is unknown to {kind}; remove it")
        if key in ("warmup_min_lr", "warmup_min_ratio") and value not in (0, "auto"):
            raise ConfigError(
                f"--engine.config: scheduler.params.{key} is {value}, but the warm-up starts near 0; set 0"
            )
    if (
        kind != "WarmupCosineLR"
        and params.get("warmup_type", "log") != "linear"
        and params.get("warmup_num_steps") != 0
    ):
        raise ConfigError(
            "--engine.config: scheduler.params.warmup_type is log, DeepSpeed's default, but the warm-up is linear; "
            'set "linear"'
        )
    if kind == "WarmupCosineLR":
        floor = params.get("cos_min_ratio", floor)
    for key, name, value in (
        ("warmup_num_steps", "optim.warmup_steps", params.get("warmup_num_steps", 1000)),
        ("total_num_steps", "max_steps", params.get("total_num_steps", "auto")),
        ("warmup_max_lr", "lr", params.get("warmup_max_lr", "auto")),
        ("cos_min_ratio", "optim.floor", "auto" if floor is None else float(floor)),
    ):
        if value != "auto" and not (name == "max_steps" and shape == "constant"):
            settings[name] = (f"scheduler.params.{key}" if key in params else "", value)
    return settings


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
