"""Select a checkpoint, check that a resume fits its plan, and load its weights.

    source = select_checkpoint(Path("outputs/mine"), "best")
    load_weights(source, model)

`check_plan` refuses a resume by the differences between the checkpoint's plan and this start's. `RunPlan` divides a run
into epochs and steps.
"""

import dataclasses
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
from lockstep.checkpoint.check import read_contents
from lockstep.checkpoint.format import read_manifest
from lockstep.checkpoint.read import AVERAGE, averages_of, evaluated_of, open_tensors
from lockstep.checkpoint.remote import RemoteRun
from lockstep.config import cli
from lockstep.config.fields import in_batches, is_span, is_url, local_dir
from lockstep.config.schema import Config, flag, is_auto, lookup
from lockstep.config.task_options import IMAGE_OPTIONS
from lockstep.data.batches import Origin, StepPlan
from lockstep.data.shard_order import ONE_LANE, Geometry
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.model_init import unexpanded
from lockstep.errors import CheckpointError, ConfigError, ResumeError
from lockstep.guards.contents import first_difference
from lockstep.run_state import Position, RunState
from lockstep.task import Task, user_task
from lockstep.training.agreement import find_folders
from lockstep.training.run_dir import RunFolder
from lockstep.training.selection import criterion_of

__all__ = [
    "BY_RANKS",
    "FIXED",
    "RunPlan",
    "accept_contents",
    "check_extension",
    "check_longer",
    "check_plan",
    "checkpoint_plan",
    "describe_extension",
    "find_weights",
    "load_weights",
    "plan_of",
    "samples_in_epoch",
    "select_checkpoint",
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
        f"the new length, and continues at a rate of {rate:.3g}"
    )


# --- plan

# How a step is cut: into the same micro-batches on any number of ranks, or one for each rank.
FIXED = "fixed"
BY_RANKS = "by ranks"

# Options that decide what is computed from which data. The others may change between starts.
_FIXED_OPTIONS = (
    *("batch_size", "micro_batch_size", "batch_tokens", "micro_batch_tokens", "seed", "seq_len", "lr"),
    *("precision", "residual_dtype", "weight_copies", "grad_dtype", "batchnorm"),
    *("model_name", "dataset_name", "model.dropout", "data.shuffle_shards"),
    *IMAGE_OPTIONS,
)
# Options that do so if the learning rate depends on evaluations.
_EVALUATION_OPTIONS = ("eval_freq", "best_metric", "limit_eval_batches", "eval_micro_batch_size")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The steps of a run, and their position in the epochs.

    Attributes:
        samples: of an epoch: those of the training set or of the task's order, limited by --limit-train-batches; 0 for
            a stream.
        config: number of epochs or steps, and the size of a step.
        origin: step and sample position at which steps of this size begin.
        min_samples: of a micro-batch: 2 with trainable BatchNorm, which fails on one sample.
        dataset_samples: of the training set.
        geometry: of the run's first start, for orders that depend on it.
        grouped: the task's order is a batch sampler; samples and sizes count its lists.
        cut: FIXED, or BY_RANKS.
    """

    samples: int
    config: Config
    origin: Origin
    min_samples: int
    dataset_samples: int
    geometry: Geometry = ONE_LANE
    grouped: bool = False
    cut: str = FIXED

    @property
    def step_plan(self) -> StepPlan:
        """The division of the sample positions into steps.

        With --max-steps each step is full; otherwise the last step ends with the last epoch. A last step that is short
        is dropped with --data.drop-last, and a last micro-batch of less than `min_samples` is dropped always.
        """
        config = self.config
        origin = self.origin
        micro_size = self.config.micro_size
        if config.max_steps:
            remaining = max(0, config.max_steps - origin.step) * config.batch_size
        else:
            remaining = max(0, config.num_epochs * self.samples - origin.position)
            # A cut by ranks must not decide which samples are left out.
            if self.cut == FIXED and not config.data.drop_last:
                unit = micro_size
            else:
                unit = config.batch_size
            if config.data.drop_last or remaining % unit < min(self.min_samples, unit):
                remaining -= remaining % unit
        return StepPlan(config.batch_size, micro_size, origin.position + remaining, origin)

    def place(self, done: int) -> Position:
        """Return the run's position after `done` steps.

        Epochs are counted in samples, so a step may span two.
        """
        size = self.config.batch_size
        position = self.step_plan.start(done)
        # The batches of a stream know the epoch.
        if not self.samples:
            return Position(done, position=position)
        epoch, within = divmod(position, self.samples)
        is_end = within == 0 and position == self.step_plan.total
        # The end of a run is the end of its last epoch, not the start of another.
        if is_end and epoch:
            epoch = epoch - 1
            within = self.samples
        remaining = self.samples - within
        if not self.config.max_steps:
            # A last incomplete step may be dropped.
            remaining = min(remaining, self.step_plan.total - position)
        return Position(
            global_step=done,
            epoch=epoch,
            epoch_step=-(-within // size),
            epoch_progress=within / self.samples,
            num_batches_remaining=-(-remaining // size),
            position=position,
        )


def samples_in_epoch(config: Config, samples: int) -> int:
    """Return the samples of an epoch under --limit-train-batches: whole steps, or all."""
    if not config.limit_train_batches:
        return samples
    return min(samples, in_batches(config.limit_train_batches, samples / config.batch_size) * config.batch_size)


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
    plain = Config()
    flat = cli.flatten(Config(), own_task=True)
    defaults = {name: lookup(plain, name) for name in _FIXED_OPTIONS if name not in flat}
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
            f"the place in a stream is known for {values}: a resume would lose and repeat samples; give the values as "
            "they were, or use another --experiment-name with --init-from"
        )


def _stream_option(name: str) -> str:
    if name == "stream_parts":
        return "parts"
    return flag(name)


# --- weights of a checkpoint

_LOG = logging.getLogger("lockstep")


def load_weights(
    source: Path,
    model: nn.Module,
    own: Mapping[str, Tensor] | None = None,
    *,
    without: Collection[str] = (),
    leave: Callable[[str], bool] = lambda name: False,
    ema: bool = False,
) -> None:
    """Load a checkpoint's weights into a model, and the task's own tensors into `own`.

    Args:
        source: the checkpoint's folder.
        without: `model/NAME` of tensors to leave as they are: the base of adapters.
        leave: whether to leave a tensor as it is that the checkpoint may have, by its name.
        ema: load averages for the parameters that have one.

    Raises:
        CheckpointError: it is damaged, of another model, or lacks the averaged weights of `ema`.
    """
    unexpanded(model)
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=False).items() if not leave(name)}
    state = {f"model/{name}": tensor for name, tensor in tensors.items() if f"model/{name}" not in without}
    state |= {f"task/{name}": tensor for name, tensor in (own or {}).items()}
    with torch.no_grad():
        checkpoint.load(source, state, None, leave=lambda name: leave(name.removeprefix("model/")))
        if ema:
            _load_averages(source, model)
        elif replaced := evaluated_of(read_contents(source, read_manifest(source))):
            _load_evaluated(source, model, replaced)


def _load_averages(source: Path, model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    with open_tensors(source) as tensors:
        for name in averages_of(source, tensors.contents):
            parameters[name.removeprefix(AVERAGE)].copy_(tensors.read(name))


def _load_evaluated(source: Path, model: nn.Module, names: Mapping[str, str]) -> None:
    """Load the weights for evaluation of an optimizer that has others for training."""
    parameters = dict(model.named_parameters())
    with open_tensors(source) as tensors:
        for name, stored in names.items():
            parameters[name.removeprefix("model/")].copy_(tensors.read(stored))


def select_checkpoint(path: Path, which: str | int) -> Path:
    """Return the checkpoint that `lockstep.load` loads.

    Args:
        path: a run's folder, or a checkpoint's.
        which: "best", "last", or a step.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if (path / "manifest.json").is_file():
        return path
    steps = checkpoint.list_steps(path) if path.is_dir() else []
    if not steps:
        raise CheckpointError(f"{path} has no checkpoint; give the folder of a run or of a checkpoint")
    if which == "best":
        folder = RunFolder(str(path.parent), path.name)
        _, selection = folder.read_evaluated()
        which = selection.best.step if selection.best else "last"
    step = _newest_finite(path, steps) if which == "last" else int(which)
    if step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return checkpoint.path_of(path, step)


def _newest_finite(path: Path, steps: list[int]) -> int:
    """Return the newest step with finite tensors, or the newest step if there is none."""
    for step in reversed(steps):
        if not checkpoint.is_marked(checkpoint.path_of(path, step)):
            return step
        _LOG.warning("skipped checkpoint %s: it has tensors that are not finite", checkpoint.path_of(path, step))
    return steps[-1]


def find_weights(config: Config, world: World, say: Callable[[str], None]) -> tuple[Path, bool]:
    """Find the checkpoint that --init-from names. Collective.

    Returns:
        The checkpoint, or the newest complete one of a run; and whether it was verified.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    name = config.init_from
    remote = None
    path = Path(local_dir(name, config.checkpoint.local_dir)).expanduser()
    if is_url(name):
        remote = RemoteRun(name, "", "--init-from")
        world = dataclasses.replace(world)
        find_folders(RunFolder(str(path.parent), path.name), world)  # collective
    # The file may be visible on some ranks only, so all ranks decide together.
    elif any(world.gather(on_all_ranks(world, (path / "manifest.json").exists))):
        return path, False
    newest = checkpoint.find_newest(path, world, say, remote)  # collective
    if newest is None:
        raise CheckpointError(
            f"--init-from {name}: it has no complete checkpoint; give the folder of a run or of a checkpoint"
        )
    return newest, True
