"""Check that a resume fits the plan that its checkpoint has.

    plan = plan_of(config, run_plan, task, model, own_task=True)    # what a resume must not change
    check_plan(path, checkpoint_plan(state, plan), plan, config, user_config)

`check_plan` refuses a resume by the differences between the checkpoint's plan and this start's.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lockstep.config import cli
from lockstep.config.fields import is_span
from lockstep.config.schema import DEFAULTS, Config, flag, is_auto, lookup
from lockstep.config.task_options import IMAGE_OPTIONS
from lockstep.errors import ConfigError, ResumeError
from lockstep.guards.contents import first_difference
from lockstep.run_state import RunState
from lockstep.task import Task, user_task
from lockstep.training.state.plan import BY_RANKS, FIXED, RunPlan
from lockstep.training.state.selection import criterion_of

__all__ = [
    "accept_contents",
    "check_extension",
    "check_longer",
    "check_plan",
    "checkpoint_plan",
    "describe_extension",
    "plan_of",
]


def check_extension(config: Config, *, resumes: bool) -> None:
    """Raise ConfigError if `--extend-to` has no run to extend."""
    if config.extend_to and not resumes:
        raise ConfigError(
            f"--extend-to {config.extend_to} extends an existing run, and this one is new: use --max-steps"
        )


def checkpoint_plan(state: RunState, now: dict[str, Any]) -> dict[str, Any] | None:
    """Return the checkpoint's plan to compare with `now`; None for a new run.

    If the run is being extended, its length is taken from `now`.
    """
    before = state.plan
    if state.extended and before and before["steps"] == state.extended.before:
        # The period may be a share of the plan's steps.
        return before | {name: now[name] for name in ("steps", "optim.period")}
    return before or None


def check_longer(config: Config, state: RunState, steps: int) -> None:
    """Raise ResumeError if an extension does not make the plan longer."""
    extension = state.extended
    if extension and steps <= extension.before:
        raise ResumeError(
            f"--extend-to {extension.asked} is a plan of {steps} steps, and the run has {extension.before} already: "
            "give more"
        )


def describe_extension(state: RunState, steps: int, rate: float) -> str:
    """Describe at its first step how an extension changes the schedule; "" otherwise.

    Args:
        steps: length of the longer plan.
        rate: learning rate of the next step.
    """
    extension = state.extended
    if not extension or extension.at != state.global_step:
        return ""
    return (
        f"extended after step {extension.at} from {extension.before} to {steps} steps: the schedule is stretched to "
        f"the new length, and continues at a learning rate of {rate:.3g}"
    )


# --- plan

# Options that decide what is computed from which data. The others may change between starts.
_FIXED_OPTIONS = (
    *("batch_size", "micro_batch_size", "batch_tokens", "micro_batch_tokens", "seed", "seq_len", "lr"),
    *("precision", "residual_dtype", "weight_copies", "grad_dtype", "batchnorm"),
    *("model_name", "dataset_name", "model.dropout", "data.shuffle_shards"),
    *IMAGE_OPTIONS,
)
# Options that do so if the learning rate depends on evaluations.
_EVALUATION_OPTIONS = ("eval_freq", "best_metric", "limit_eval_batches", "eval_micro_batch_size")


def plan_of(config: Config, run_plan: RunPlan, task: Task, model: nn.Module, *, own_task: bool) -> dict[str, Any]:
    """Return the values that must be unchanged at a resume.

    The model is identified by its tensors' names and shapes, the data by its content.

    Args:
        own_task: the task is the user's: options of built-in tasks at their defaults are left out.
    """
    options = cli.flatten(config, own_task=own_task)
    shapes = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    optim = config.optim
    evaluation: dict[str, Any] = {}
    # The delta of --best-metric may differ from --min-delta.
    if optim.schedule == "plateau":
        evaluation = {name: getattr(config, name) for name in _EVALUATION_OPTIONS} | {
            "min_delta": criterion_of(config).delta
        }
    return {
        **{name: options[name] for name in _FIXED_OPTIONS if name in options},
        "cut": run_plan.cut,
        "steps": run_plan.step_plan.steps,
        "samples": run_plan.samples,
        "geometry": list(run_plan.geometry),
        "dataset_samples": run_plan.dataset_samples,
        "data": task.fingerprint,
        "task": type(user_task(task)).__qualname__,
        **({"scheduler": task.scheduler} if task.scheduler else {}),
        **({name: options[name] for name in options if name.startswith("lora.")} if config.lora.rank else {}),
        **({"model.load_in": config.model.load_in} if config.lora.rank else {}),
        **({name: options[name] for name in options if name.startswith("fp16.")} if config.precision == "fp16" else {}),
        "model": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        **evaluation,
        **{f"optim.{name}": getattr(optim, name) for name in type(optim).__dataclass_fields__},
    }


class PlanDifference(NamedTuple):
    """A value of the plan that changed since the checkpoint."""

    key: str
    before: Any
    now: Any


def compare_plans(before: dict[str, Any], now: dict[str, Any]) -> list[PlanDifference]:
    """Compare the plans of a checkpoint and of this start.

    Values that an older plan lacks are compared as their defaults.
    """
    flat = cli.flatten(DEFAULTS, own_task=True)
    defaults = {name: lookup(DEFAULTS, name) for name in _FIXED_OPTIONS if name not in flat}
    newer = ("optim.", "fp16.", "weight_copies", "grad_dtype", "batch_tokens", "micro_batch_tokens")
    added = {}
    for name, value in flat.items():
        if name.startswith(newer) and value != "auto":
            added[name] = value
    added |= {"data.shuffle_shards": 0, "model.load_in": "full", "scheduler": {}, "cut": FIXED}
    added["dataset_samples"] = before.get("samples")
    # Older checkpoints have no geometry.
    before = {"geometry": now.get("geometry")} | before
    before = defaults | added | before
    now = defaults | now
    return [PlanDifference(key, before.get(key), now[key]) for key in now if before.get(key) != now[key]]


# Value -> the settings that decide it: an option only if it is "auto" or a share, `_DERIVED` always.
_DERIVED = ("steps", "samples", "dataset_samples", "data", "model")
_OPTIMIZER_SOURCES = ("optim.name", "lora.rank", "task")
_DATA_SOURCES = ("task", "dataset_name", "seq_len")
_FOLLOWS_FROM = {
    # Not with --max-steps.
    "steps": ("batch_size", "samples", "dataset_samples"),
    "batch_size": ("batch_tokens", "micro_batch_tokens"),
    "samples": ("dataset_samples", "micro_batch_tokens"),
    "dataset_samples": ("data", *_DATA_SOURCES),
    "data": _DATA_SOURCES,
    "model": ("task", "model_name", "model.load_in", "lora.rank", "seq_len"),
    "micro_batch_size": ("batch_size", "model"),
    "eval_micro_batch_size": ("batch_size", "micro_batch_size", "model"),
    "eval_freq": ("steps", "batch_size", "samples"),
    "optim.warmup_steps": ("steps", "optim.schedule"),
    "optim.period": ("steps", "batch_size", "samples"),
    "optim.floor": ("optim.schedule",),
    **dict.fromkeys(
        ("lr", "optim.beta1", "optim.beta2", "optim.eps", "optim.weight_decay", "optim.momentum"), _OPTIMIZER_SOURCES
    ),
}
_NO_FLAG = (*_DERIVED, "task", "scheduler", "stream_parts")


def check_plan(
    path: Path,
    before: dict[str, Any] | None,
    now: dict[str, Any],
    config: Config,
    user_config: Config,
    *,
    is_additive: bool = False,
) -> list[str]:
    """Refuse a resume whose plan differs from the checkpoint's.

    Args:
        path: the run's folder.
        before: the checkpoint's plan; None: a new run.
        now: the plan of this start.
        config: the resolved configuration of this start.
        user_config: the same as the user gave it.
        is_additive: a smaller micro-batch computes the same step, up to rounding and random numbers.

    Returns:
        A line for each change that is accepted.

    Raises:
        ResumeError: the plans differ without --resume-anyway, or some samples would be trained on twice.
    """
    if before is None:
        return []
    differences = compare_plans(before, now)
    lines = list[str]()
    if before.get("cut", FIXED) == BY_RANKS:
        line = _describe_cut(differences)
        differences = [entry for entry in differences if entry.key not in ("micro_batch_size", "cut")]
        lines += [line] if line else []
    if is_additive and not config.exact:
        # In any task an evaluation adds up its numbers over micro-batches of any size.
        sizes = ("micro_batch_size", "eval_micro_batch_size")
        smaller = [entry for entry in differences if entry.key in sizes and entry.now < entry.before]
        differences = [entry for entry in differences if entry not in smaller]
        lines += [
            f"--micro-batch-size {entry.now} in place of {entry.before}: the loss adds up, so a step is the same up to "
            "rounding and the random numbers of the model"
            for entry in smaller
            # Otherwise the code that cut the micro-batches reports it.
            if entry.key == sizes[0] and config.on_oom == "stop"
        ]
    if differences and not config.resume_anyway:
        roots = _root_differences(differences, user_config)
        settings = ", ".join(_format_difference(entry, user_config) for entry in roots)
        raise ResumeError(f"{path} was started with {settings}: {'; '.join(_suggest_fixes(roots, user_config))}")
    _check_epoch(before, now, config)
    _check_stream(before, now)
    changes = [_format_difference(entry, user_config) for entry in differences]
    return lines + [f"--resume-anyway continues with another setting: {change}" for change in changes]


def accept_contents(
    path: Path, state: RunState, config: Config, digests: Mapping[str, Any], *, compares: bool
) -> list[str]:
    """Compare samples with those of earlier starts, and store their digests in `state`.

    Args:
        path: the run's folder.
        digests: of this start, by label; see `guards.contents`.
        compares: False: only store the digests that the state lacks.

    Returns:
        A line if a change is accepted.

    Raises:
        ResumeError: a sample has changed, without --resume-anyway.
    """
    before = state.contents or {}
    steady = {label: digest for label, digest in digests.items() if digest is not None}
    if not compares:
        state.contents = steady | before
        return []
    changed = first_difference(before, digests)
    if changed and not config.resume_anyway:
        raise ResumeError(
            f"{path} was started with another {changed}: the data are as many as before, but reordered or replaced, so "
            "samples would be lost or repeated; to resume, give the data as they were (sort what lists files); to "
            "start a new run, use another --experiment-name; to resume with the change, add --resume-anyway"
        )
    state.contents = before | steady
    if changed:
        return [f"--resume-anyway continues with other data: another {changed}"]
    return []


def _describe_cut(differences: list[PlanDifference]) -> str:
    """Describe how an unfixed cut of a step has changed; "" if it has not."""
    sizes = next((entry for entry in differences if entry.key == "micro_batch_size"), None)
    if sizes is None:
        return ""
    return (
        f"a step is cut into forwards of {sizes.now} samples in place of {sizes.before}: samples, items and rates stay "
        "as they were, random draws do not (--micro-batch-size and --exact fix the cut)"
    )


def _root_differences(differences: list[PlanDifference], user_config: Config) -> list[PlanDifference]:
    """Drop the differences that follow from others."""
    keys = {entry.key for entry in differences}

    def follows(key: str) -> bool:
        if key not in _FOLLOWS_FROM or keys.isdisjoint(_FOLLOWS_FROM[key]):
            return False
        if key in _DERIVED:
            return not (key == "steps" and user_config.max_steps)
        return is_auto(user_config, key) or is_span(lookup(user_config, key))

    return [entry for entry in differences if not follows(entry.key)]


def _format_difference(difference: PlanDifference, user_config: Config) -> str:
    """Format a difference as flags, with both values: `--seed 0 (now 1)`."""
    key, before, current = difference
    if key == "data":
        return "other training data"
    if key == "model":
        return "a model with other tensors"
    if key == "task":
        return f"the task {before} (now {current})"
    if key == "scheduler":
        return _format_scheduler(before, current)
    if key == "steps":
        return f"{before} steps (now {current} with {_format_length(user_config)})"
    if key == "samples":
        limit = _format_flag("limit_train_batches", user_config.limit_train_batches)
        return f"{before} samples in an epoch (now {current} with {limit})"
    if key == "stream_parts":
        return f"a training set of {before or 'no'} parts (now {current})"
    if key == "dataset_samples":
        return f"{before} samples in the training set (now {current})"
    return f"{_format_flag(key, before)} (now {_format_value(current)})"


def _format_scheduler(before: dict[str, Any], now: dict[str, Any]) -> str:
    old_class, new_class = (plan.get("class", "no scheduler given by hand") for plan in (before, now))
    if old_class != new_class:
        return f"{old_class} (now {new_class})"
    changed = [name for name in before if before[name] != now.get(name)]
    return "; ".join(f"{old_class}: {name} {before[name]} (now {now.get(name)})" for name in changed[:3])


def _suggest_fixes(differences: list[PlanDifference], user_config: Config) -> Iterator[str]:
    steps = next((entry for entry in differences if entry.key == "steps"), None)
    if steps and steps.now > (steps.before or 0):
        target = user_config.max_steps or f"{user_config.num_epochs}epochs"
        yield f"to train longer, give --extend-to {target} in place of {_format_length(user_config)}"
    elif steps:
        yield f"to end earlier, give the length as before and --stop-at {steps.now}"
    flags = [_format_flag(*entry[:2]) for entry in differences if entry.key not in _NO_FLAG]
    if any(entry.key in ("data", "dataset_samples", "stream_parts", "model", "task") for entry in differences):
        flags.append("the task, the model and the data as they were")
    if flags:
        yield f"to resume, give {' '.join(flags)}"
    yield "to start a new run, use another --experiment-name"
    yield "to resume with the change, add --resume-anyway"


def _format_length(user_config: Config) -> str:
    name = "max_steps" if user_config.max_steps else "num_epochs"
    return _format_flag(name, getattr(user_config, name))


def _format_flag(name: str, value: Any) -> str:
    """Format a setting as a flag: `--lr 0.1`, `--no-exact`."""
    if isinstance(value, bool):
        if value:
            return flag(name)
        return flag(name).replace("--", "--no-", 1)
    return f"{flag(name)} {_format_value(value)}"


def _format_value(value: Any) -> str:
    if isinstance(value, bool) or value == "":
        return json.dumps(value)
    return str(value)


def _check_epoch(before: dict[str, Any], now: dict[str, Any], config: Config) -> None:
    """Refuse another number of samples in an epoch of the same data.

    Raises:
        ResumeError: positions map to samples by that number, so some samples would be trained on twice.
    """
    samples = before.get("samples", now["samples"])
    if samples == now["samples"] or before.get("dataset_samples", samples) != now["dataset_samples"]:
        return
    raise ResumeError(
        f"an epoch had {samples} samples, and has {now['samples']} with --limit-train-batches "
        f"{config.limit_train_batches} and --batch-size {config.batch_size}, which would train on some twice; give a "
        f"limit of {samples} samples, or use another --experiment-name"
    )


# Options that decide which samples a lane of the stream has.
_STREAM_OPTIONS = ("stream_parts", "batch_size", "micro_batch_size", "seed")


def _check_stream(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume a stream that is divided in another way.

    Raises:
        ResumeError: its place would be another, so some samples would be trained on twice, and others never.
    """
    if "stream_parts" not in before and "stream_parts" not in now:
        return
    other = [name for name in _STREAM_OPTIONS if before.get(name) != now.get(name)]
    if other:
        values = ", ".join(f"{_stream_option(name)} {before.get(name)} (now {now.get(name)})" for name in other)
        raise ResumeError(
            f"the position in a stream is known for {values}: a resume would lose and repeat samples; give the values "
            "as they were, or use another --experiment-name with --init-from"
        )


def _stream_option(name: str) -> str:
    if name == "stream_parts":
        return "parts"
    return flag(name)
