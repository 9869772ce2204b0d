"""Read a DeepSpeed configuration (`--engine.config ds_config.json`), check it and complete it.

    given = read_config("ds_config.json")                        {} for ""
    check_batches("ds_config.json", batch_size=64, micro_batch_size=4, ranks=8)
    config = merged(given, wanted)                               what `deepspeed.initialize` gets

The file's optimizer, schedule, precision and batch became the run's settings when flags were read (see
`lockstep.config.deepspeed`). Here the file is compared with them: a number that contradicts a flag is refused by name,
so that a run's config.toml matches what was trained. Does not need the package deepspeed.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lockstep.config.deepspeed import optimizer_named, read_json, scale_of
from lockstep.config.sections import Fp16
from lockstep.errors import ConfigError

__all__ = ["DeepSpeedSettings", "check_batches", "merged", "read_config"]

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys that go to DeepSpeed as they are.
_PASSED = (
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
_KINDS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}  # --optim.name -> of torch.optim
_HELD = (*_BATCHES, *_OPTIMIZER, "gradient_clipping", "optimizer", "scheduler", "bf16", "fp16")
# Not supported, but allowed if switched off: sections by their "enabled", numbers by DeepSpeed's default.
_OFF_SECTIONS = (
    *("amp", "tensorboard", "wandb", "comet", "csv_monitor", "elasticity", "autotuning", "eigenvalue"),
    *("progressive_layer_drop", "curriculum_learning", "data_efficiency", "hybrid_engine"),
)
_OFF_VALUES = {"prescale_gradients": False, "sparse_gradients": False, "gradient_predivide_factor": 1.0}
_KNOWN = (*_PASSED, *_HELD, *_OFF_SECTIONS, *_OFF_VALUES)


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
    found = read_json(path)
    for key, value in found.items():
        if key == "amp" and not _is_off(key, value):
            raise ConfigError("--engine.config: take out 'amp': Apex is not served: --precision bf16 or fp16")
        if key not in _KNOWN:
            close = difflib.get_close_matches(key, _KNOWN, n=1)
            hint = f"did you mean '{close[0]}'?" if close else "take it out"
            raise ConfigError(f"--engine.config: '{key}' is unknown to this engine: {hint}")
        if key not in (*_PASSED, *_HELD) and not _is_off(key, value):
            raise ConfigError(f"--engine.config: '{key}' is not served by this engine: switch it off, or take it out")
    return found


def _is_off(key: str, value: Any) -> bool:
    if value in (None, "auto", _OFF_VALUES.get(key)):
        return True
    return key in _OFF_SECTIONS and isinstance(value, dict) and value.get("enabled", False) in (False, "auto")


def check_batches(path: str, *, batch_size: int, micro_batch_size: int, ranks: int) -> None:
    """Raise ConfigError if the file's batch sizes contradict the flags on this many ranks."""
    given = read_config(path)
    each = -(-batch_size // (micro_batch_size * ranks))
    for key, value, source in (
        (_BATCHES[0], batch_size, f"--batch-size {batch_size}"),
        (_BATCHES[1], micro_batch_size, f"--micro-batch-size {micro_batch_size}"),
        (_BATCHES[2], each, f"--batch-size {batch_size} and --micro-batch-size {micro_batch_size} on {ranks} ranks"),
    ):
        _hold(given, key, value, source)


def _hold(section: Mapping[str, Any], key: str, value: Any, source: str, within: str = "") -> None:
    found = section.get(key, "auto")
    if found != "auto" and found != value:
        raise ConfigError(
            f"--engine.config: {within}{key} is {json.dumps(found)}, and {source} makes it {json.dumps(value)}; "
            'take it out, or write "auto"'
        )


def merged(given: Mapping[str, Any], wanted: DeepSpeedSettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Raises ConfigError if the file contradicts a flag."""
    _hold(given, "gradient_clipping", wanted.clip, f"--optim.clip {wanted.clip:g}")
    _check_precision(given, wanted)
    for key, value in _OPTIMIZER.items():
        _hold(given, key, value, "--engine deepspeed, whose optimizer is torch's,")
    if "optimizer" in given:
        _check_optimizer(given["optimizer"], wanted.optimizer)
    zero = _zero(given, wanted)
    return {
        **{key: given[key] for key in _PASSED if key in given},
        "zero_optimization": zero,
        # One micro-batch a step as DeepSpeed counts; the engine marks the step's last one.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": wanted.clip if zero["stage"] else 0.0,
        "bf16": {"enabled": wanted.halved},
        **_OPTIMIZER,
    }


def _zero(given: Mapping[str, Any], wanted: DeepSpeedSettings) -> dict[str, Any]:
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError('--engine.config: zero_optimization is no object; write {"stage": 2}')
    zero = {key: value for key, value in zero.items() if value != "auto"}
    if wanted.stage >= 0:
        _hold(zero, "stage", wanted.stage, f"--engine.zero-stage {wanted.stage}", "zero_optimization.")
    stage = wanted.stage if wanted.stage >= 0 else zero.get("stage", 2)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"--engine.config: zero_optimization.stage is {json.dumps(stage)}: give 0, 1, 2 or 3")
    if wanted.offload:
        if not stage:
            raise ConfigError("--engine.cpu-offload needs --engine.zero-stage 1, 2 or 3; stage 0 splits nothing")
        zero.setdefault("offload_optimizer", {"device": "cpu"})
    if wanted.halved and stage < 2:
        raise ConfigError(
            f"--engine.zero-stage {stage} with --precision bf16-true: DeepSpeed keeps no float32 copy in a way that "
            "checkpoints can read; use stage 2 or 3, or --precision bf16"
        )
    return {**zero, "stage": stage}


def _check_precision(given: Mapping[str, Any], wanted: DeepSpeedSettings) -> None:
    for key, on, flag in (("bf16", wanted.halved, "bf16-true"), ("fp16", bool(wanted.scaled), "fp16")):
        section = given.get(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f'--engine.config: {key} is no object; write {{"enabled": "auto"}}, or take it out')
        found = section.get("enabled", "auto")
        if found not in ("auto", on):
            raise ConfigError(
                f"--engine.config: {key}.enabled is {json.dumps(found)}, and --precision {'is' if on else 'is not'} "
                f'{flag}; set --precision {flag if found else "float32"}, or write "auto"'
            )
        if key == "bf16" and on and section.keys() - {"enabled"}:
            raise ConfigError(f"--engine.config: take out bf16.{min(section.keys() - {'enabled'})}: it is not served")
    if wanted.scaled:
        for name, (key, value) in scale_of(given).items():
            if key and value != (ours := getattr(wanted.scaled, name.removeprefix("fp16."))):
                _hold(given["fp16"], key.removeprefix("fp16."), ours, f"--{name.replace('_', '-')}", "fp16.")


def _check_optimizer(section: Any, optimizer: Optimizer) -> None:
    if not isinstance(section, dict):
        raise ConfigError("--engine.config: optimizer is no object; take it out, since the flags say what it is")
    params = section.get("params", {})
    kind = type(optimizer).__name__
    if not isinstance(params, dict):
        raise ConfigError("--engine.config: optimizer.params is no object; take it out, since the flags say what it is")
    if "type" in section and _KINDS.get(optimizer_named(section["type"], params)) != kind:
        _hold(section, "type", kind, "the run's optimizer", "optimizer.")
    stray = [key for key in section if key not in ("type", "params")]
    if stray:
        raise ConfigError(f"--engine.config: 'optimizer.{stray[0]}' is unknown to this engine: take it out")
    groups = optimizer.param_groups
    for key, value in params.items():
        if key in ("adam_w_mode", "torch_adam", "bias_correction"):  # checked when the file was read
            continue
        if key not in optimizer.defaults:
            raise ConfigError(f"--engine.config: 'optimizer.params.{key}' is unknown to {type(optimizer).__name__}")
        # Compare with the optimizer's defaults: --optim.groups, --optim.layer-decay and weights without decay change
        # groups. An optimizer of the task's own may set a value in its groups alone.
        found, default, *own = map(_plain, (value, optimizer.defaults[key], *(group[key] for group in groups)))
        if found not in ("auto", default) and (default in own or found not in own):
            ours = default if default in own else own[0]
            raise ConfigError(
                f"--engine.config: optimizer.params.{key} is {json.dumps(value)}, and the flags make it "
                f'{json.dumps(ours)}; take it out, or write "auto"'
            )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
