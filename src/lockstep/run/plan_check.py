"""Refuse a resume whose settings differ from the checkpoint's, by flag and with the way out.

    for line in check_plan(path, plan_before(state, plan), plan, config, asked):    # raises ResumeError
        notify(world)(line)

A setting that nobody gave follows from others: a longer plan has a longer warm-up. The refusal names what was given.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.config import Config, flag, is_auto, lookup
from lockstep.config.spans import is_span
from lockstep.errors import ResumeError
from lockstep.run.plan import Difference, differences

__all__ = ["check_plan"]

# What follows from other settings -> those. Options do where they are "auto" or a share; these five always.
_DERIVED = ("steps", "samples", "dataset_samples", "data", "model")
_SUITED = ("optim.name", "lora.rank", "task")
_SOURCES = ("task", "dataset_name", "seq_len")
_FOLLOWS = {
    "steps": ("batch_size", "samples", "dataset_samples"),  # but not with --max-steps
    "samples": ("dataset_samples",),
    "dataset_samples": ("data", *_SOURCES),
    "data": _SOURCES,
    "model": ("task", "model_name", "lora.rank", "seq_len"),
    "micro_batch_size": ("batch_size", "model"),
    "eval_micro_batch_size": ("batch_size", "micro_batch_size", "model"),
    "eval_freq": ("steps", "batch_size", "samples"),
    "optim.warmup_steps": ("steps", "optim.schedule"),
    "optim.period": ("steps", "batch_size", "samples"),
    "optim.floor": ("optim.schedule",),
    **dict.fromkeys(("lr", "optim.beta1", "optim.beta2", "optim.eps", "optim.weight_decay", "optim.momentum"), _SUITED),
}
_NO_FLAG = (*_DERIVED, "task")


def check_plan(
    path: Path, before: dict[str, Any] | None, now: dict[str, Any], config: Config, asked: Config
) -> list[str]:
    """Compare the plan of this start with the checkpoint's.

    Args:
        path: the run's folder.
        before: the checkpoint's plan; None: a new run.
        now: the plan of this start.
        config: of this start, without any "auto".
        asked: the same as it was given.

    Returns:
        A line for each change that --resume-anyway lets pass.

    Raises:
        ResumeError: the plans differ, and --resume-anyway is off or would train on some samples twice.
    """
    if before is None:
        return []
    found = differences(before, now)
    if found and not config.resume_anyway:
        given = _given(found, asked)
        settings = ", ".join(_described(each, asked) for each in given)
        raise ResumeError(f"{path} was started with {settings}: {'; '.join(_ways_out(given, asked))}")
    _check_epoch(before, now, config)
    return [f"--resume-anyway goes on with another setting: {_described(each, asked)}" for each in found]


def _given(found: list[Difference], asked: Config) -> list[Difference]:
    """Leave out the differences that follow from others."""
    keys = {each.key for each in found}

    def follows(key: str) -> bool:
        if key not in _FOLLOWS or keys.isdisjoint(_FOLLOWS[key]):
            return False
        if key in _DERIVED:
            return not (key == "steps" and asked.max_steps)
        return is_auto(asked, key) or is_span(lookup(asked, key))

    return [each for each in found if not follows(each.key)]


def _described(difference: Difference, asked: Config) -> str:
    """The setting as it is typed, with both values: `--seed 0 (now 1)`."""
    key, before, now = difference
    if key == "data":
        return "training data of other content"
    if key == "model":
        return "a model of other tensors"
    if key == "task":
        return f"the task {before} (now {now})"
    if key == "steps":
        return f"{before} steps (now {now} with {_length(asked)})"
    if key == "samples":
        limit = _typed("limit_train_batches", asked.limit_train_batches)
        return f"{before} samples in an epoch (now {now} with {limit})"
    if key == "dataset_samples":
        return f"{before} samples in the training set (now {now})"
    return f"{_typed(key, before)} (now {_value(now)})"


def _ways_out(found: list[Difference], asked: Config) -> Iterator[str]:
    steps = next((each for each in found if each.key == "steps"), None)
    if steps and steps.now > (steps.before or 0):
        target = asked.max_steps or f"{asked.num_epochs}epochs"
        yield f"to train longer, give --extend-to {target} in place of {_length(asked)}"
    elif steps:
        yield f"to end earlier, give the length as before and --stop-at {steps.now}"
    flags = [_typed(*each[:2]) for each in found if each.key not in _NO_FLAG]
    if any(each.key in ("data", "dataset_samples", "model", "task") for each in found):
        flags.append("the task, the model and the data as they were")
    if flags:
        yield f"to resume, give {' '.join(flags)}"
    yield "to start a new run, use another --experiment-name"
    yield "to go on with the change, add --resume-anyway"


def _length(asked: Config) -> str:
    return _typed("max_steps", asked.max_steps) if asked.max_steps else _typed("num_epochs", asked.num_epochs)


def _typed(name: str, value: Any) -> str:
    """A setting as it is typed: `--lr 0.1`, `--no-exact`."""
    if isinstance(value, bool):
        return flag(name) if value else flag(name).replace("--", "--no-", 1)
    return f"{flag(name)} {_value(value)}"


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value == "" else str(value)


def _check_epoch(before: dict[str, Any], now: dict[str, Any], config: Config) -> None:
    """Raise where a resume has another number of samples in an epoch of the same data, by its limit and batch size.

    Raises:
        ResumeError: which sample stands at a position goes by that number, so samples would come twice.
    """
    then = before.get("samples", now["samples"])
    if then == now["samples"] or before.get("dataset_samples", then) != now["dataset_samples"]:
        return
    raise ResumeError(
        f"an epoch had {then} samples, and has {now['samples']} with --limit-train-batches "
        f"{config.limit_train_batches} and --batch-size {config.batch_size}: some would come twice; give a limit that "
        "leaves as many, or use another --experiment-name"
    )
