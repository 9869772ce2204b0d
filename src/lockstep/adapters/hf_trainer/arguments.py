"""Convert the `TrainingArguments` of a Hugging Face Trainer to a Config.

    check_arguments(trainer)                        # refuses, by name, an argument that is set and not served
    config = config_of(trainer, devices=4)

The table in `refusals` maps each argument. Arguments of kind "task" are read by the rest of the adapter.
docs/hf-trainer.md has the table for users.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from lockstep.adapters.hf_trainer.refusals import ARGUMENTS, SAMPLING, SINKS
from lockstep.config.schema import Config
from lockstep.errors import ConfigError

__all__ = [
    "check_arguments",
    "config_of",
    "value",
]


_PARAMETERS = {torch.float32: "float32", torch.bfloat16: "bf16-true", torch.float64: "float64"}
_ALL_KEPT = 10**6


def value(setting: Any) -> Any:
    """Return the value of an enum member, and anything else unchanged."""
    return getattr(setting, "value", setting)


def check_arguments(trainer: Any) -> None:
    """Check that every argument that is set is served.

    Raises:
        ConfigError: an argument is set and not served; one line that names it.
    """
    args = trainer.args
    for spec in _theirs(args):
        given = getattr(args, spec.name, None)
        row = ARGUMENTS.get(spec.name)
        if row and row.kind != "refused":
            continue
        if _is_set(spec, given):
            why = row.what if row else "lockstep does not know it: leave it out"
            raise _refused(spec.name, given, why)
    sampling = getattr(args, "train_sampling_strategy", "random")
    if sampling not in SAMPLING:
        raise _refused("train_sampling_strategy", sampling, "batches by length would depend on the data: use random")
    unknown = [name for name in getattr(args, "report_to", None) or [] if name not in SINKS]
    if unknown:
        raise _refused(
            "report_to", unknown, "the sinks are tensorboard and wandb: log to others in the loop of lockstep.Run"
        )


def _step_size(trainer: Any, devices: int) -> int:
    """Samples of a step on `devices` devices; 0: on the Trainer's own number."""
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
    batch_size, samples = _step_size(trainer, devices), len(trainer.train_dataset)
    fields: dict[str, Any] = {
        **_name(args.output_dir),
        **_length(args, samples, batch_size),
        "seed": args.seed,
        "lr": float(args.learning_rate),
        "batch_size": batch_size,
        "micro_batch_size": args.per_device_train_batch_size,
        "eval_micro_batch_size": args.per_device_eval_batch_size,
        **_frequencies(args),
        **_judged(trainer),
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
    fields |= {"data": data, "optim": optim, "checkpoint": {"keep": args.save_total_limit or _ALL_KEPT}}
    return Config(**fields)


def _theirs(args: Any) -> list[Any]:
    """The fields of TrainingArguments itself, plus the known fields of classes derived from it."""
    base = next((kind for kind in type(args).__mro__ if kind.__name__ == "TrainingArguments"), type(args))
    own = {spec.name for spec in dataclasses.fields(base)}
    return [spec for spec in dataclasses.fields(args) if spec.name in own or spec.name in ARGUMENTS]


def _is_set(spec: Any, given: Any) -> bool:
    if spec.name == "accelerator_config":
        return _accelerates(given)
    if spec.name == "torch_compile_backend":
        return given not in (None, "inductor")
    if spec.name == "torch_compile_mode":
        return given not in (None, "default")
    default = spec.default
    if default is dataclasses.MISSING:
        default = None if spec.default_factory is dataclasses.MISSING else spec.default_factory()
    return bool(given) and value(given) != value(default)


def _accelerates(given: Any) -> bool:
    """Whether accelerate is configured to split batches in another way than lockstep."""
    cuts = ("split_batches", "dispatch_batches", "gradient_accumulation_kwargs")
    return any(getattr(given, name, None) for name in cuts) or not getattr(given, "use_seedable_sampler", True)


def _refused(name: str, given: Any, why: str) -> ConfigError:
    shown = repr(value(given))
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ConfigError(f"from_trainer: TrainingArguments({name}={shown}) is not served: {why}")


def _name(output_dir: str) -> dict[str, Any]:
    path = Path(output_dir)
    if not path.name or path.name.startswith("."):
        raise _refused("output_dir", output_dir, "give it a name of its own, which the run's folder has")
    return {"save_dir": str(path.parent), "experiment_name": path.name}


def _length(args: Any, samples: int, batch_size: int) -> dict[str, Any]:
    """The Config fields for the length: epochs or steps, and an epoch's used share."""
    limit = samples // batch_size if args.dataloader_drop_last else 0
    found = {"limit_train_batches": limit} if limit and limit * batch_size != samples else {}
    if args.max_steps > 0:
        return {**found, "max_steps": args.max_steps}
    epochs = args.num_train_epochs
    if float(epochs).is_integer():
        return {**found, "num_epochs": int(epochs)}
    return {**found, "max_steps": max(1, math.ceil(epochs * (limit or samples / batch_size)))}


def _frequencies(args: Any) -> dict[str, Any]:
    logging, evaluating = value(args.logging_strategy), value(args.eval_strategy)
    saving = value(args.save_strategy)
    evaluations = {"no": 0, "epoch": "1epoch"}.get(evaluating) if evaluating != "steps" else _span(args.eval_steps)
    saves = {"no": 0, "epoch": "1epoch", "best": evaluations}.get(saving) if saving != "steps" else None
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


def _judged(trainer: Any) -> dict[str, Any]:
    """The Config field for the best metric.

    The Trainer's name starts with `eval_`, and with the name of the set if there are several.
    """
    args, name = trainer.args, trainer.args.metric_for_best_model
    if not name:
        return {}
    name = name.removeprefix("eval_")
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {}
    for each in sets:
        if name.startswith(f"{each}_"):
            name = f"{each}/{name.removeprefix(f'{each}_')}"
            break
    more = bool(args.greater_is_better)
    if name == "loss" and not more:
        return {"best_metric": "loss"}
    if name == "loss":
        raise _refused("greater_is_better", True, "the best loss is the least: leave it out")
    return {"best_metric": f"{name}:{'max' if more else 'min'}"}


def _precision(trainer: Any) -> str:
    args = trainer.args
    dtypes = {p.dtype for p in trainer.model.parameters() if p.is_floating_point()} or {torch.float32}
    half = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
    if dtypes == {torch.float32}:
        return half or "float32"
    shown = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if len(dtypes) > 1 or half == "fp16" or dtypes - _PARAMETERS.keys():
        raise ConfigError(
            f"from_trainer: the model's parameters are {shown}{' with fp16=True' if half == 'fp16' else ''}, which is "
            "not served: load it with dtype=torch.float32"
        )
    return _PARAMETERS[dtypes.pop()]


def _checkpointing(args: Any) -> str:
    if not (getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing):
        return "none"
    more = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    if more.get("offload"):
        raise _refused("activation_checkpointing_kwargs", more, "activations are not offloaded: leave offload out")
    every = int(more.get("every_n_layers", 1))
    return "full" if every == 1 else f"every:{every}"


def _plateau(args: Any) -> dict[str, Any]:
    """The `optim` section for a plateau schedule.

    It is the only schedule that depends on the evaluations, so the task cannot compute it from the step.
    """
    kind = value(args.lr_scheduler_type)
    if kind == "greedy":
        raise _refused("lr_scheduler_type", kind, "use another, or dataclasses.replace(config, optim=...)")
    if kind != "reduce_lr_on_plateau":
        return {}
    given = dict(args.lr_scheduler_kwargs or {})
    relative = given.pop("threshold_mode", "rel") == "rel" and given.get("threshold", 1e-4)
    known = {"factor", "patience", "cooldown", "mode", "threshold", "min_lr", "eps"}
    if relative or given.keys() - known or not isinstance(given.get("min_lr", 0.0), int | float):
        raise _refused(
            *("lr_scheduler_kwargs", given),
            "of a plateau factor, patience, cooldown and min_lr are, with threshold=0, or threshold_mode='abs' and "
            "the threshold of the EarlyStoppingCallback",
        )
    return {
        "schedule": "plateau",
        "gamma": float(given.get("factor", 0.1)),
        "plateau_patience": int(given.get("patience", 10)),
        "plateau_cooldown": int(given.get("cooldown", 0)),
        "floor": float(given.get("min_lr", 0.0)) / (args.learning_rate or 1.0),
        "warmup_steps": 0,
    }
