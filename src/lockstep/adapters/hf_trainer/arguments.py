"""Convert the `TrainingArguments` of a Hugging Face Trainer to a Config.

    check_arguments(trainer)                        # refuses, by name, an argument that is set and not served
    config = config_of(trainer, devices=4)

The table in `refusals` maps each argument. Arguments of kind "task" are read by the rest of the adapter.
docs/inside/hf-trainer.md has the table for users.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from lockstep.adapters.hf_trainer.refusals import ARGUMENTS, SAMPLING, SINKS, TRL
from lockstep.config.schema import Config
from lockstep.errors import ConfigError

__all__ = [
    "best_metric",
    "check_arguments",
    "config_of",
    "value",
]


# Dtype of the model's parameters -> --precision.
_PARAMETERS = {torch.float32: "float32", torch.bfloat16: "bf16-true", torch.float64: "float64"}
# Checkpoints to keep if the Trainer keeps all.
_NO_LIMIT = 10**6


def value(setting: Any) -> Any:
    """Return the value of an enum member, and anything else unchanged."""
    return getattr(setting, "value", setting)


def check_arguments(trainer: Any) -> None:
    """Check that every argument that is set is served.

    Raises:
        ConfigError: an argument is set and not served; one line that names it.
    """
    args = trainer.args
    for spec in _argument_fields(args):
        setting = getattr(args, spec.name, None)
        row = ARGUMENTS.get(spec.name) or TRL.get(spec.name)
        if row and row.kind != "refused":
            continue
        if _is_set(spec, setting):
            why = row.what if row else "it is unknown to lockstep: leave it out"
            raise _build_error(spec.name, setting, why)
    sampling = getattr(args, "train_sampling_strategy", "random")
    if sampling not in SAMPLING:
        raise _build_error(
            "train_sampling_strategy", sampling, "its lists are made for one number of ranks: use group_by_length"
        )
    unknown = []
    for name in getattr(args, "report_to", None) or []:
        if name not in SINKS:
            unknown.append(name)
    if unknown:
        raise _build_error(
            "report_to", unknown, f"the sinks are {', '.join(SINKS)}: log to others in the loop of lockstep.Run"
        )


def _step_size(trainer: Any, devices: int) -> int:
    """Return the samples of a step on `devices` devices; 0: on the Trainer's own number."""
    args = trainer.args
    if devices:
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * devices)
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def config_of(trainer: Any, devices: int = 0) -> Config:
    """Build the Config that trains as the Trainer would.

    Raises:
        ConfigError: a setting that no Config field can express.
    """
    args = trainer.args
    batch_size = _step_size(trainer, devices)
    samples = len(trainer.train_dataset)
    fields: dict[str, Any] = {
        **_name(args.output_dir),
        **_length(args, samples, batch_size),
        "seed": args.seed,
        "lr": float(args.learning_rate),
        "batch_size": batch_size,
        "micro_batch_size": args.per_device_train_batch_size,
        "eval_micro_batch_size": args.per_device_eval_batch_size,
        **_frequencies(args),
        **best_metric(trainer),
        "precision": _precision(trainer),
        "matmul_precision": "high" if args.tf32 else "highest",
        "activation_checkpointing": _checkpointing(args),
        "compile": bool(args.torch_compile),
        "exact": bool(args.full_determinism),
        "device": "cpu" if args.use_cpu else "auto",
        "timeout": float(args.ddp_timeout),
        **{name: name in (args.report_to or []) for name in SINKS},
    }
    data: dict[str, Any] = {"workers": args.dataloader_num_workers}
    if args.dataloader_prefetch_factor:
        data["prefetch"] = args.dataloader_prefetch_factor
    optim: dict[str, Any] = {
        "weight_decay": float(args.weight_decay),
        "beta1": float(args.adam_beta1),
        "beta2": float(args.adam_beta2),
        "eps": float(args.adam_epsilon),
        "clip": float(args.max_grad_norm or 0.0),
        **_plateau(args),
    }
    fields |= {"data": data, "optim": optim, "checkpoint": {"keep": args.save_total_limit or _NO_LIMIT}}
    return Config(**fields)


def _argument_fields(args: Any) -> list[Any]:
    """Return the fields of the library's own class, and known ones of derived classes.

    The class is TrainingArguments, or trl's config.
    """
    bases = []
    for base in type(args).__mro__:
        if base.__module__.startswith("trl."):
            bases.append(base)
    for base in type(args).__mro__:
        if base.__name__ == "TrainingArguments":
            bases.append(base)
    names = {spec.name for spec in dataclasses.fields(next(iter(bases), type(args)))}
    specs = []
    for spec in dataclasses.fields(args):
        if spec.name in names or spec.name in ARGUMENTS:
            specs.append(spec)
    return specs


def _is_set(spec: Any, setting: Any) -> bool:
    if spec.name == "accelerator_config":
        return _changes_batching(setting)
    # torch.compile's own defaults count as not set.
    if spec.name == "torch_compile_backend":
        return setting not in (None, "inductor")
    if spec.name == "torch_compile_mode":
        return setting not in (None, "default")
    default = spec.default
    if default is dataclasses.MISSING:
        if spec.default_factory is dataclasses.MISSING:
            default = None
        else:
            default = spec.default_factory()
    return bool(setting) and value(setting) != value(default)


def _changes_batching(accelerator: Any) -> bool:
    """Whether accelerate is configured to split batches in another way than lockstep."""
    cuts = ("split_batches", "dispatch_batches", "gradient_accumulation_kwargs")
    return any(getattr(accelerator, name, None) for name in cuts) or not getattr(
        accelerator, "use_seedable_sampler", True
    )


def _build_error(name: str, setting: Any, why: str) -> ConfigError:
    text = repr(value(setting))
    text = text if len(text) <= 60 else text[:57] + "..."
    return ConfigError(f"from_trainer: TrainingArguments({name}={text}) is not supported: {why}")


def _name(output_dir: str) -> dict[str, Any]:
    path = Path(output_dir)
    if not path.name or path.name.startswith("."):
        raise _build_error("output_dir", output_dir, "give a folder with a name, which becomes the run's")
    return {"save_dir": str(path.parent), "experiment_name": path.name}


def _length(args: Any, samples: int, batch_size: int) -> dict[str, Any]:
    """Return the Config fields for the length: epochs or steps, and an epoch's used share."""
    limit = samples // batch_size if args.dataloader_drop_last else 0
    if limit and limit * batch_size != samples:
        limits = {"limit_train_batches": limit}
    else:
        limits = {}
    if args.max_steps > 0:
        return {**limits, "max_steps": args.max_steps}
    epochs = args.num_train_epochs
    if float(epochs).is_integer():
        return {**limits, "num_epochs": int(epochs)}
    return {**limits, "max_steps": max(1, math.ceil(epochs * (limit or samples / batch_size)))}


def _frequencies(args: Any) -> dict[str, Any]:
    logging = value(args.logging_strategy)
    evaluating = value(args.eval_strategy)
    saving = value(args.save_strategy)
    if evaluating != "steps":
        evaluations = {"no": 0, "epoch": "1epoch"}.get(evaluating)
    else:
        evaluations = _span(args.eval_steps)
    if saving != "steps":
        saves = {"no": 0, "epoch": "1epoch", "best": evaluations}.get(saving)
    else:
        saves = None
    return {
        "log_freq": _span(args.logging_steps) if logging == "steps" else "1epoch",
        "eval_freq": evaluations,
        "ckpt_freq": _span(args.save_steps) if saving == "steps" else saves,
    }


def _span(steps: float) -> int | str:
    """Convert an interval to steps, or to a percentage of the run if below 1."""
    if steps >= 1:
        return int(steps)
    return f"{100 * steps:.6f}".rstrip("0").rstrip(".") + "%"


def best_metric(trainer: Any) -> dict[str, Any]:
    """Return the Config field for the best metric.

    The Trainer's name starts with `eval_`, and with the name of the set if there are several.
    """
    args = trainer.args
    name = trainer.args.metric_for_best_model
    if not name:
        return {}
    name = name.removeprefix("eval_")
    if isinstance(trainer.eval_dataset, dict):
        sets = trainer.eval_dataset
    else:
        sets = {}
    for set_name in sets:
        if name.startswith(f"{set_name}_"):
            name = f"{set_name}/{name.removeprefix(f'{set_name}_')}"
            break
    more = bool(args.greater_is_better)
    if name == "loss" and not more:
        return {"best_metric": "loss"}
    if name == "loss":
        raise _build_error("greater_is_better", True, "the best loss is the lowest: leave it out")
    return {"best_metric": f"{name}:{'max' if more else 'min'}"}


def _precision(trainer: Any) -> str:
    args = trainer.args
    dtypes = {p.dtype for p in trainer.model.parameters() if p.is_floating_point()} or {torch.float32}
    if args.bf16:
        half = "bf16"
    else:
        half = "fp16" if args.fp16 else ""
    if dtypes == {torch.float32}:
        return half or "float32"
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if len(dtypes) > 1 or half == "fp16" or dtypes - _PARAMETERS.keys():
        raise ConfigError(
            f"from_trainer: the model's parameters are {names}{' with fp16=True' if half == 'fp16' else ''}, which is "
            "not served: load it with dtype=torch.float32"
        )
    return _PARAMETERS[dtypes.pop()]


def _checkpointing(args: Any) -> str:
    if not (getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing):
        return "none"
    more = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    if more.get("offload"):
        raise _build_error("activation_checkpointing_kwargs", more, "activations are not offloaded: leave offload out")
    every = int(more.get("every_n_layers", 1))
    if every == 1:
        return "full"
    return f"every:{every}"


def _plateau(args: Any) -> dict[str, Any]:
    """Return the `optim` section for a plateau schedule.

    It is the only schedule that depends on the evaluations, so the task cannot compute it from the step.
    """
    scheduler_type = value(args.lr_scheduler_type)
    if scheduler_type == "greedy":
        raise _build_error(
            "lr_scheduler_type", scheduler_type, "use another, or dataclasses.replace(config, optim=...)"
        )
    if scheduler_type != "reduce_lr_on_plateau":
        return {}
    options = dict(args.lr_scheduler_kwargs or {})
    # "rel" and 1e-4 are torch's defaults.
    relative = options.pop("threshold_mode", "rel") == "rel" and options.get("threshold", 1e-4)
    keys = {"factor", "patience", "cooldown", "mode", "threshold", "min_lr", "eps"}
    if relative or options.keys() - keys or not isinstance(options.get("min_lr", 0.0), int | float):
        raise _build_error(
            *("lr_scheduler_kwargs", options),
            "a plateau takes factor, patience, cooldown and min_lr, with threshold=0, or threshold_mode='abs' and the "
            "threshold of the EarlyStoppingCallback",
        )
    return {
        "schedule": "plateau",
        "gamma": float(options.get("factor", 0.1)),
        "plateau_patience": int(options.get("patience", 10)),
        "plateau_cooldown": int(options.get("cooldown", 0)),
        "floor": float(options.get("min_lr", 0.0)) / (args.learning_rate or 1.0),
        "warmup_steps": 0,
    }
