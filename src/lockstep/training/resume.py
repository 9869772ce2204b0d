"""Choose a checkpoint, check that a resume fits its plan, and load its weights.

    found = chosen(Path("outputs/mine"), "best")
    fill(found, model)

A resume is refused in `check_plan`, by the differences between the checkpoint's plan and this start's. The plan's
division into epochs and steps is here too.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint.read import AVERAGE, averages_of, open_tensors
from lockstep.config import cli
from lockstep.config.fields import in_batches, is_span
from lockstep.config.schema import Config, flag, is_auto, lookup
from lockstep.config.task_options import IMAGE_OPTIONS
from lockstep.data.batches import Origin, StepPlan
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import CheckpointError, ConfigError, ResumeError
from lockstep.run_state import Position, RunState
from lockstep.task import Task, user_task
from lockstep.training.run_dir import RunFolder
from lockstep.training.selection import judged_by

__all__ = [
    "RunPlan",
    "check_extends",
    "check_longer",
    "check_plan",
    "chosen",
    "described",
    "fill",
    "in_epoch",
    "plan_before",
    "plan_of",
    "weights_in",
]


def check_extends(config: Config, *, resumes: bool) -> None:
    """Raise ConfigError if `--extend-to` has no run to extend."""
    if config.extend_to and not resumes:
        raise ConfigError(
            f"--extend-to {config.extend_to} goes on with a run that is there, and there is none: use --max-steps"
        )


def plan_before(state: RunState, now: dict[str, Any]) -> dict[str, Any] | None:
    """Return the checkpoint's plan, with the length of its extension, to compare with `now`."""
    before = state.plan
    if state.extended and before and before["steps"] == state.extended.before:
        return before | {name: now[name] for name in ("steps", "optim.period")}  # the period may be a share of the plan
    return before or None


def check_longer(config: Config, state: RunState, steps: int) -> None:
    """Raise ResumeError if an extension does not make the plan longer."""
    known = state.extended
    if known and steps <= known.before:
        raise ResumeError(
            f"--extend-to {known.asked} makes a plan of {steps} steps, and the run's has {known.before}: give more"
        )


def described(state: RunState, steps: int, rate: float) -> str:
    """Describe how an extension changes the schedule, at its first step; else "".

    Args:
        steps: of the longer plan.
        rate: of the next step.
    """
    known = state.extended
    if not known or known.at != state.global_step:
        return ""
    return (
        f"extended after step {known.at} from {known.before} to {steps} steps: the schedule is stretched, as "
        f"if the plan had been so long from the start, and goes on at a rate of {rate:.3g}"
    )


# --- plan

# Options that change what is computed from which data; the others may change between starts.
_FIXED = (
    *("batch_size", "micro_batch_size", "seed", "seq_len", "lr"),
    *("precision", "residual_dtype", "weight_copies", "grad_dtype", "fused_kernels", "batchnorm"),
    *("model_name", "dataset_name", "model.dropout"),
    *IMAGE_OPTIONS,
)
# And these, if the learning rate depends on evaluations.
_JUDGING = ("eval_freq", "best_metric", "limit_eval_batches", "eval_micro_batch_size")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The steps of a run, and their position in the epochs.

    Attributes:
        samples: in an epoch: of the training set or of the task's order, or what --limit-train-batches leaves.
        config: number of epochs or steps, and the size of a step.
        origin: step and sample position from which on steps have this size.
        least: minimum samples of a micro-batch: 2 with trainable BatchNorm, which fails on one alone.
        whole: samples of the training set.
    """

    samples: int
    config: Config
    origin: Origin
    least: int
    whole: int

    @property
    def step_plan(self) -> StepPlan:
        """The sample positions divided into steps.

        With --max-steps each step is full; otherwise the last ends with the last epoch. Dropped at that end: with
        --data.drop-last what is short of a step, and what is short of `least` samples.
        """
        config, origin, micro_size = self.config, self.origin, self.config.micro_size
        if config.max_steps:
            coming = max(0, config.max_steps - origin.step) * config.batch_size
        else:
            coming = max(0, config.num_epochs * self.samples - origin.position)
            last = config.batch_size if config.data.drop_last else micro_size
            if config.data.drop_last or coming % last < min(self.least, micro_size):
                coming -= coming % last
        return StepPlan(config.batch_size, micro_size, origin.position + coming, origin)

    def place(self, done: int) -> Position:
        """Return the run's position after `done` steps.

        Epochs are counted in samples, so a step may span two.
        """
        size = self.config.batch_size
        position = self.step_plan.start(done)
        epoch, within = divmod(position, self.samples)
        if (
            within == 0 and position == self.step_plan.total and epoch
        ):  # the end of the last epoch, not the start of the next
            epoch, within = epoch - 1, self.samples
        left = self.samples - within
        if not self.config.max_steps:
            left = min(left, self.step_plan.total - position)  # less than the epoch's if its end is dropped
        return Position(
            global_step=done,
            epoch=epoch,
            epoch_step=-(-within // size),
            epoch_progress=within / self.samples,
            num_batches_remaining=-(-left // size),
            position=position,
        )


def in_epoch(config: Config, samples: int) -> int:
    """Return the samples of an epoch under --limit-train-batches: whole steps, or all."""
    if not config.limit_train_batches:
        return samples
    return min(samples, in_batches(config.limit_train_batches, samples / config.batch_size) * config.batch_size)


def plan_of(config: Config, run_plan: RunPlan, task: Task, model: nn.Module, *, own_task: bool) -> dict[str, Any]:
    """Return what a resume must find unchanged.

    The model is identified by its tensors' names and shapes, the data by its content.

    Args:
        own_task: the task is the user's: options of built-in tasks are left out at their defaults.
    """
    said = cli.flatten(config, own_task=own_task)
    shapes = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    optim = config.optim
    judged: dict[str, Any] = {}
    if optim.schedule == "plateau":  # the delta of --best-metric, which --min-delta may not be
        judged = {name: getattr(config, name) for name in _JUDGING} | {"min_delta": judged_by(config).delta}
    return {
        **{name: said[name] for name in _FIXED if name in said},
        "steps": run_plan.step_plan.steps,
        "samples": run_plan.samples,
        "dataset_samples": run_plan.whole,
        "data": task.fingerprint,
        "task": type(user_task(task)).__qualname__,
        **({name: said[name] for name in said if name.startswith("lora.")} if config.lora.rank else {}),
        **({name: said[name] for name in said if name.startswith("fp16.")} if config.precision == "fp16" else {}),
        "model": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        **judged,
        **{f"optim.{name}": getattr(optim, name) for name in type(optim).__dataclass_fields__},
    }


class PlanDifference(NamedTuple):
    """A value of the plan that changed since the checkpoint."""

    key: str
    before: Any
    now: Any


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[PlanDifference]:
    """Compare the plans of a checkpoint and of this start.

    Missing values of an older plan are compared as their defaults.
    """
    plain, kept = Config(), cli.flatten(Config(), own_task=True)
    left_out = {name: lookup(plain, name) for name in _FIXED if name not in kept}
    younger = ("optim.", "fp16.", "weight_copies", "grad_dtype")
    added = {name: value for name, value in kept.items() if name.startswith(younger) and value != "auto"}
    everything = {"dataset_samples": before.get("samples")}  # missing in older checkpoints
    before, now = left_out | added | everything | before, left_out | now
    return [PlanDifference(key, before.get(key), now[key]) for key in now if before.get(key) != now[key]]


# Value -> the settings that it follows from: an option if it is "auto" or a share, these five always.
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
    """Refuse a resume whose plan differs from the checkpoint's.

    Args:
        path: the run's folder.
        before: the checkpoint's plan; None: a new run.
        now: the plan of this start.
        config: of this start, without any "auto".
        asked: the same as the user gave it.

    Returns:
        A line for each change that --resume-anyway accepts.

    Raises:
        ResumeError: the plans differ without --resume-anyway, or some samples would be trained on twice.
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


def _given(found: list[PlanDifference], asked: Config) -> list[PlanDifference]:
    """Drop the differences that follow from others."""
    keys = {each.key for each in found}

    def follows(key: str) -> bool:
        if key not in _FOLLOWS or keys.isdisjoint(_FOLLOWS[key]):
            return False
        if key in _DERIVED:
            return not (key == "steps" and asked.max_steps)
        return is_auto(asked, key) or is_span(lookup(asked, key))

    return [each for each in found if not follows(each.key)]


def _described(difference: PlanDifference, asked: Config) -> str:
    """Format a difference as it is typed, with both values: `--seed 0 (now 1)`."""
    key, before, now = difference
    if key == "data":
        return "training data of other content"
    if key == "model":
        return "a model of other tensors"
    if key == "task":
        return f"the task {before} (now {now})"
    if key == "steps":
        return f"{before} steps (now {now} with {_count_steps(asked)})"
    if key == "samples":
        limit = _typed("limit_train_batches", asked.limit_train_batches)
        return f"{before} samples in an epoch (now {now} with {limit})"
    if key == "dataset_samples":
        return f"{before} samples in the training set (now {now})"
    return f"{_typed(key, before)} (now {_value(now)})"


def _ways_out(found: list[PlanDifference], asked: Config) -> Iterator[str]:
    steps = next((each for each in found if each.key == "steps"), None)
    if steps and steps.now > (steps.before or 0):
        target = asked.max_steps or f"{asked.num_epochs}epochs"
        yield f"to train longer, give --extend-to {target} in place of {_count_steps(asked)}"
    elif steps:
        yield f"to end earlier, give the length as before and --stop-at {steps.now}"
    flags = [_typed(*each[:2]) for each in found if each.key not in _NO_FLAG]
    if any(each.key in ("data", "dataset_samples", "model", "task") for each in found):
        flags.append("the task, the model and the data as they were")
    if flags:
        yield f"to resume, give {' '.join(flags)}"
    yield "to start a new run, use another --experiment-name"
    yield "to go on with the change, add --resume-anyway"


def _count_steps(asked: Config) -> str:
    return _typed("max_steps", asked.max_steps) if asked.max_steps else _typed("num_epochs", asked.num_epochs)


def _typed(name: str, value: Any) -> str:
    """Format a setting as it is typed: `--lr 0.1`, `--no-exact`."""
    if isinstance(value, bool):
        return flag(name) if value else flag(name).replace("--", "--no-", 1)
    return f"{flag(name)} {_value(value)}"


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value == "" else str(value)


def _check_epoch(before: dict[str, Any], now: dict[str, Any], config: Config) -> None:
    """Refuse another number of samples in an epoch of the same data.

    Raises:
        ResumeError: positions map to samples by that number, so some samples would come twice.
    """
    then = before.get("samples", now["samples"])
    if then == now["samples"] or before.get("dataset_samples", then) != now["dataset_samples"]:
        return
    raise ResumeError(
        f"an epoch had {then} samples, and has {now['samples']} with --limit-train-batches "
        f"{config.limit_train_batches} and --batch-size {config.batch_size}: some would come twice; give a limit that "
        "leaves as many, or use another --experiment-name"
    )


# --- weights of a checkpoint

_LOG = logging.getLogger("lockstep")


def fill(
    found: Path,
    model: nn.Module,
    own: Mapping[str, Tensor] | None = None,
    *,
    without: Collection[str] = (),
    ema: bool = False,
) -> None:
    """Load a checkpoint's weights into a model, and the task's own tensors into `own`.

    Args:
        found: the checkpoint's folder.
        without: `model/NAME` of tensors to leave as they are: the base of adapters.
        ema: load averages for the parameters that have one.

    Raises:
        CheckpointError: it is damaged, of another model, or has no averaged weights although `ema` asks for them.
    """
    state = {f"model/{name}": tensor for name, tensor in model.state_dict(keep_vars=False).items()}
    state = {name: tensor for name, tensor in state.items() if name not in without}
    state |= {f"task/{name}": tensor for name, tensor in (own or {}).items()}
    with torch.no_grad():
        checkpoint.load(found, state, None)
        if ema:
            _fill_averages(found, model)


def _fill_averages(found: Path, model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    with open_tensors(found) as whole:
        for name in averages_of(found, whole.contents):
            parameters[name.removeprefix(AVERAGE)].copy_(whole.read(name))


def chosen(path: Path, which: str | int) -> Path:
    """Return the checkpoint that `lockstep.load` loads. Raises CheckpointError if there is none.

    Args:
        path: a run's folder, or a checkpoint's.
        which: "best", "last", or a step.
    """
    if (path / "manifest.json").is_file():
        return path
    steps = checkpoint.list_steps(path) if path.is_dir() else []
    if not steps:
        raise CheckpointError(f"{path}: no checkpoint there; give a run's folder or a checkpoint's")
    if which == "best":
        folder = RunFolder(str(path.parent), path.name)
        _, selection = folder.read_evaluated()
        which = selection.best.step if selection.best else "last"
    step = _last(path, steps) if which == "last" else int(which)
    if step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return checkpoint.path_of(path, step)


def _last(path: Path, steps: list[int]) -> int:
    """Return the newest step whose tensors are finite; if there is none, the newest."""
    for step in reversed(steps):
        if not checkpoint.is_marked(checkpoint.path_of(path, step)):
            return step
        _LOG.warning("skipped checkpoint %s: it has tensors that are not finite", checkpoint.path_of(path, step))
    return steps[-1]


def weights_in(path: Path, world: World, say: Callable[[str], None]) -> tuple[Path, bool]:
    """Find the checkpoint that --init-from names. Collective.

    Returns:
        The checkpoint itself, or the newest complete one of a run; and whether it was verified.
    """
    if any(world.gather(on_all_ranks(world, (path / "manifest.json").exists))):  # collective
        return path, False
    found = checkpoint.find_newest(path, world, say)  # collective
    if found is None:
        raise CheckpointError(f"--init-from {path}: no whole checkpoint there; give a run's folder or a checkpoint's")
    return found, True
