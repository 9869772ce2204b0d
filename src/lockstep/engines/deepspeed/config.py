"""Read a DeepSpeed configuration (`--engine.config ds_config.json`), check it and complete it.

    config = read_config("ds_config.json")                       {} for ""
    check_batches("ds_config.json", batch_size=64, micro_batch_size=4, ranks=8)
    config = merge(config, settings)                            what `deepspeed.initialize` gets

The file's optimizer, schedule, precision and batch became the run's settings when flags were read (see
`lockstep.config.deepspeed`). Here the file is compared with them: a number that contradicts a flag is refused by name,
so that a run's config.toml matches what was trained. Does not need the package deepspeed.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lockstep.config.deepspeed import optimizer_name, read_json, scale_settings
from lockstep.config.sections import Fp16
from lockstep.errors import ConfigError

__all__ = ["DeepSpeedSettings", "check_batches", "merge", "read_config"]

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys that go to DeepSpeed as they are.
_PASSTHROUGH = (
    "zero_optimization",
    "communication_data_type",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "comms_logger",
    "flops_profiler",
    "aio",
)
# The optimizer is torch's own, which needs no compiler; it serves ZeRO, whose updates go element by element.
_OPTIMIZER = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
# --optim.name -> class of torch.optim.
_KINDS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
_CHECKED = (*_BATCHES, *_OPTIMIZER, "gradient_clipping", "optimizer", "scheduler", "bf16", "fp16")
# Not supported, but allowed if switched off: sections by their "enabled", numbers by DeepSpeed's default.
_OFF_SECTIONS = (
    *("amp", "tensorboard", "wandb", "comet", "csv_monitor", "elasticity", "autotuning", "eigenvalue"),
    *("progressive_layer_drop", "curriculum_learning", "data_efficiency", "hybrid_engine"),
)
_OFF_VALUES = {"prescale_gradients": False, "sparse_gradients": False, "gradient_predivide_factor": 1.0}
_KEYS = (*_PASSTHROUGH, *_CHECKED, *_OFF_SECTIONS, *_OFF_VALUES)


class DeepSpeedSettings(NamedTuple):
    """Settings from the flags.

    Attributes:
        stage: of ZeRO; -1: not set.
        offload: keep optimizer states in host memory.
        clip: largest norm of the gradient; 0 does not clip.
        halved: the model's parameters are bfloat16.
        scaled: how to scale the loss for float16; None: not.
        optimizer: built from the flags.
    """

    stage: int
    offload: bool
    clip: float
    halved: bool
    scaled: Fp16 | None
    optimizer: Optimizer


def read_config(path: str) -> dict[str, Any]:
    """Read the file; {} for "".

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, or has a key that this engine does not support.
    """
    config = read_json(path)
    for key, value in config.items():
        if key == "amp" and not _is_off(key, value):
            raise ConfigError(
                "--engine.config: 'amp' (Apex) is not supported; remove it, and set --precision bf16 or fp16"
            )
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else "remove it"
            raise ConfigError(f"--engine.config: '{key}' is unknown to this engine: {hint}")
        if key not in (*_PASSTHROUGH, *_CHECKED) and not _is_off(key, value):
            raise ConfigError(f"--engine.config: '{key}' is not supported by this engine: turn it off, or remove it")
    return config


def _is_off(key: str, value: Any) -> bool:
    if value in (None, "auto", _OFF_VALUES.get(key)):
        return True
    return key in _OFF_SECTIONS and isinstance(value, dict) and value.get("enabled", False) in (False, "auto")


def check_batches(path: str, *, batch_size: int, micro_batch_size: int, ranks: int) -> None:
    """Raise ConfigError if the file's batch sizes contradict the flags on this many ranks."""
    config = read_config(path)
    steps_per_rank = -(-batch_size // (micro_batch_size * ranks))
    for key, value, source in (
        (_BATCHES[0], batch_size, f"--batch-size {batch_size}"),
        (_BATCHES[1], micro_batch_size, f"--micro-batch-size {micro_batch_size}"),
        (
            _BATCHES[2],
            steps_per_rank,
            f"--batch-size {batch_size} and --micro-batch-size {micro_batch_size} on {ranks} ranks",
        ),
    ):
        _check_entry(config, key, value, source)


def _check_entry(section: Mapping[str, Any], key: str, value: Any, source: str, within: str = "") -> None:
    entry = section.get(key, "auto")
    if entry != "auto" and entry != value:
        raise ConfigError(
            f"--engine.config: {within}{key} is {json.dumps(entry)}, but {source} sets {json.dumps(value)}; "
            'remove it, or write "auto"'
        )


def merge(config: Mapping[str, Any], settings: DeepSpeedSettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Raises ConfigError if the file contradicts a flag."""
    _check_entry(config, "gradient_clipping", settings.clip, f"--optim.clip {settings.clip:g}")
    _check_precision(config, settings)
    for key, value in _OPTIMIZER.items():
        _check_entry(config, key, value, "--engine deepspeed, whose optimizer is torch's,")
    if "optimizer" in config:
        _check_optimizer(config["optimizer"], settings.optimizer)
    zero = _zero(config, settings)
    return {
        **{key: config[key] for key in _PASSTHROUGH if key in config},
        "zero_optimization": zero,
        # DeepSpeed sees one micro-batch per step; the engine marks the step's last one itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip if zero["stage"] else 0.0,
        "bf16": {"enabled": settings.halved},
        **_OPTIMIZER,
    }


def _zero(config: Mapping[str, Any], settings: DeepSpeedSettings) -> dict[str, Any]:
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError('--engine.config: zero_optimization must be a JSON object, such as {"stage": 2}')
    zero = {key: value for key, value in zero.items() if value != "auto"}
    if settings.stage >= 0:
        _check_entry(zero, "stage", settings.stage, f"--engine.zero-stage {settings.stage}", "zero_optimization.")
    stage = settings.stage if settings.stage >= 0 else zero.get("stage", 2)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"--engine.config: zero_optimization.stage is {json.dumps(stage)}: give 0, 1, 2 or 3")
    if settings.offload:
        if not stage:
            raise ConfigError("--engine.cpu-offload needs --engine.zero-stage 1, 2 or 3; stage 0 splits nothing")
        zero.setdefault("offload_optimizer", {"device": "cpu"})
    if settings.halved and stage < 2:
        raise ConfigError(
            f"--engine.zero-stage {stage} with --precision bf16-true: DeepSpeed has no float32 copy that checkpoints "
            "can read; use stage 2 or 3, or --precision bf16"
        )
    return {**zero, "stage": stage}


def _check_precision(config: Mapping[str, Any], settings: DeepSpeedSettings) -> None:
    for key, on, flag in (("bf16", settings.halved, "bf16-true"), ("fp16", bool(settings.scaled), "fp16")):
        section = config.get(key, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f'--engine.config: {key} must be a JSON object: write {{"enabled": "auto"}}, or remove it'
            )
        entry = section.get("enabled", "auto")
        if entry not in ("auto", on):
            raise ConfigError(
                f"--engine.config: {key}.enabled is {json.dumps(entry)}, and --precision {'is' if on else 'is not'} "
                f'{flag}; set --precision {flag if entry else "float32"}, or write "auto"'
            )
        if key == "bf16" and on and section.keys() - {"enabled"}:
            raise ConfigError(f"--engine.config: bf16.{min(section.keys() - {'enabled'})} is not supported; remove it")
    if settings.scaled:
        for name, (key, value) in scale_settings(config).items():
            if key and value != (expected := getattr(settings.scaled, name.removeprefix("fp16."))):
                _check_entry(
                    config["fp16"], key.removeprefix("fp16."), expected, f"--{name.replace('_', '-')}", "fp16."
                )


def _check_optimizer(section: Any, optimizer: Optimizer) -> None:
    if not isinstance(section, dict):
        raise ConfigError("--engine.config: optimizer must be a JSON object; remove it, since the flags set it")
    params = section.get("params", {})
    class_name = type(optimizer).__name__
    if not isinstance(params, dict):
        raise ConfigError("--engine.config: optimizer.params must be a JSON object; remove it, since the flags set it")
    if "type" in section and _KINDS.get(optimizer_name(section["type"], params)) != class_name:
        _check_entry(section, "type", class_name, "the run's optimizer", "optimizer.")
    stray = []
    for key in section:
        if key not in ("type", "params"):
            stray.append(key)
    if stray:
        raise ConfigError(f"--engine.config: 'optimizer.{stray[0]}' is unknown to this engine: remove it")
    groups = optimizer.param_groups
    for key, value in params.items():
        # These keys were checked when the file was read.
        if key in ("adam_w_mode", "torch_adam", "bias_correction"):
            continue
        if key not in optimizer.defaults:
            raise ConfigError(f"--engine.config: 'optimizer.params.{key}' is unknown to {type(optimizer).__name__}")
        # Compare with the optimizer's defaults: --optim.groups, --optim.layer-decay and weights without decay change
        # groups. An optimizer of the task's own may set a value in its groups alone.
        entry, default, *group_values = map(_plain, (value, optimizer.defaults[key], *(group[key] for group in groups)))
        if entry not in ("auto", default) and (default in group_values or entry not in group_values):
            expected = default if default in group_values else group_values[0]
            raise ConfigError(
                f"--engine.config: optimizer.params.{key} is {json.dumps(value)}, but the flags set "
                f'{json.dumps(expected)}; remove it, or write "auto"'
            )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value
