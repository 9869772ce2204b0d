"""Resolve a configuration: every "auto" and every length in epochs, from the facts of the run.

    start = StartFacts(fast=True, checkpoint=checkpoint_facts(state))   # before the task is made
    draft = draft_of(config, start)                                     # what task and model are made from
    found = resolve(config, Facts.of(task, model, samples, start=start))
    found.config, found.run_plan, found.extension

All functions here are pure: no collectives, no output, no changes of their arguments. `training/build.py: build`
collects the facts. The numbers that defaults are chosen from are in `training/defaults.py`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import nn

from lockstep.config import cli
from lockstep.config.fields import in_steps, is_span
from lockstep.config.schema import SPANS, Config, default_micro_batch_size, is_auto, lookup
from lockstep.data.batches import START, Origin
from lockstep.errors import ConfigError, DataError
from lockstep.run_state import Extension, RunState
from lockstep.task import Task
from lockstep.training.defaults import ADAM, FEW, FLOOR, FLOORS, KINDS, LORA, SGD, batchnorms, is_open, warm_up
from lockstep.training.resume import RunPlan, samples_in_epoch

__all__ = [
    "Facts",
    "StartFacts",
    "checkpoint_facts",
    "draft_of",
    "resolve",
]


# --- facts


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Settings of the checkpoint that a run resumes from.

    Attributes:
        step, position: steps trained, and position of the next sample.
        plan: what a resume must find unchanged, see `resume.plan_of`; {} in a checkpoint without it.
        compiled: the run was compiled.
        origin: start of its division into steps.
        extension: its `--extend-to`, as in the run's state; None if it was never extended.
    """

    step: int = 0
    position: int = 0
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiled: bool = False
    origin: Origin = START
    extension: Extension | None = None


def checkpoint_facts(state: RunState) -> CheckpointFacts | None:
    """Read a checkpoint's facts from its state; None for a new run."""
    if state.place is None:
        return None
    return CheckpointFacts(
        state.place.global_step,
        state.place.position,
        state.plan,
        bool(state.compile),
        Origin(*(state.origin or START)),
        state.extended,
    )


@dataclass(frozen=True, slots=True)
class StartFacts:
    """What is known before the task is made; the same on every rank.

    Attributes:
        fast: bf16 and compilation suit the devices of all ranks and the engine.
        largest: samples of the largest micro-batch that fits the devices; 0: the default fits, or none is known to.
        checkpoint: of the run to resume; None: a new run.
        steps: length of the plan in place of the configuration's; 0: the configuration's.
        least: minimum length of the plan in steps.
    """

    fast: bool = False
    largest: int = 0
    checkpoint: CheckpointFacts | None = None
    steps: int = 0
    least: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What a configuration is resolved from; the same on every rank and in every world.

    Attributes:
        start: what is known before the task is made.
        kind: of the task's defaults, one of `defaults.KINDS`.
        undivided: the loss of a micro-batch depends on which samples it has, so by default a step is one of them.
        batchnorm: the model normalises by the batch.
        samples: of the training set.
        epoch: samples of an epoch in the task's order.
    """

    start: StartFacts
    kind: str
    undivided: bool
    batchnorm: bool
    samples: int
    epoch: int

    @classmethod
    def of(cls, task: Task, model: nn.Module, samples: int, epoch: int = 0, start: StartFacts | None = None) -> Self:
        """Collect the facts of a task and its model.

        Args:
            model: as it is trained; BatchNorm layers decide how a step is cut.
            samples: of the training set.
            epoch: samples of an epoch, if the task's order has more or fewer; 0: the same number.
        """
        undivided, batchnorm = task.reduction == "micro-batch", bool(batchnorms(model))
        return cls(start or StartFacts(), task.defaults, undivided, batchnorm, samples, epoch or samples)


# --- before the task is made


class Draft(NamedTuple):
    """A configuration with what devices and checkpoint decide.

    Attributes:
        config: from which task and model are made. What depends on these is still "auto".
        notices: lines for the user.
    """

    config: Config
    notices: list[str]


def draft_of(config: Config, facts: StartFacts) -> Draft:
    """Resolve what does not depend on the task: precision, compile, micro-batch, the plan's length."""
    if facts.steps:
        config = dataclasses.replace(config, max_steps=facts.steps, stop_at=0)
    suited, notices = _device_defaults(config, facts)
    values = {"micro_batch_size": _micro_batch_size(config, facts), **suited}
    config = dataclasses.replace(config, **values)
    extension = _extension(config, facts.checkpoint)
    return Draft(_apply_extension(config, facts.checkpoint, extension) if extension else config, notices)


def _device_defaults(config: Config, facts: StartFacts) -> tuple[dict[str, Any], list[str]]:
    """Choose precision and compile by the weakest device; a checkpoint's settings win."""
    open_ones = [name for name in ("precision", "compile") if is_open(config, name)]
    before, fast = facts.checkpoint, facts.fast
    suited = {"precision": "bf16" if fast else "float32", "compile": fast}
    begun = suited
    if before and before.plan:  # a run from before these defaults existed used float32 without compile
        begun = {"precision": before.plan.get("precision", "float32"), "compile": before.compiled}
    values = _select(begun, open_ones)
    if values != _select(suited, open_ones):
        default = _format_flags(_select(suited, open_ones))
        return values, [f"as the run was begun: {_format_flags(values)}; the default of this device is {default}"]
    if open_ones and fast:
        other = _format_flags(_select({"precision": "float32", "compile": False}, open_ones))
        return values, [f"device default: {_format_flags(values)}; {other} for the other"]
    return values, []


def _select(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _format_flags(values: Mapping[str, Any]) -> str:
    """Format as flags: `--precision bf16 --compile`."""
    switch = {True: "--compile", False: "--no-compile"}
    return " ".join(switch[value] if name == "compile" else f"--{name} {value}" for name, value in values.items())


def _micro_batch_size(config: Config, facts: StartFacts) -> int:
    """Return the micro-batch size that is given, was used before, or fits the devices; 0 if none decides."""
    before = facts.checkpoint.plan if facts.checkpoint else {}
    if not is_auto(config, "micro_batch_size"):
        return config.micro_batch_size
    if before:
        return int(before["micro_batch_size"]) if before.get("batch_size") == config.batch_size else 0
    return facts.largest


def _extension(config: Config, before: CheckpointFacts | None) -> Extension | None:
    """Return the extension by `--extend-to`, of this start or of an earlier one; None: the plan is as it was."""
    if before is None:
        return None
    known, asked = before.extension, config.extend_to
    if not asked or (known and known.asked == asked):
        return known
    epochs = int(str(asked).rstrip(" epochs")) if is_span(asked) else 0
    return Extension(asked, before.step, before.plan["steps"], 0 if epochs else int(asked), epochs)


def _apply_extension(config: Config, before: CheckpointFacts | None, extension: Extension) -> Config:
    """Apply an extension to the plan's length. Steps of warm-up stay as they were chosen: they are done."""
    optim = config.optim
    if before and is_auto(config, "optim.warmup_steps"):
        optim = dataclasses.replace(optim, warmup_steps=before.plan.get("optim.warmup_steps", optim.warmup_steps))
    epochs = extension.num_epochs or config.num_epochs
    return dataclasses.replace(config, max_steps=extension.max_steps, num_epochs=epochs, optim=optim)


# --- once task and model are made


@dataclass(frozen=True, slots=True)
class Resolution:
    """What follows from a configuration and the facts.

    Attributes:
        run_plan: the steps, with the resolved configuration.
        extension: of `--extend-to`, for the run's state; None if it was never extended.
    """

    run_plan: RunPlan
    extension: Extension | None

    @property
    def config(self) -> Config:
        """The configuration, without any "auto" that has a default."""
        return self.run_plan.config

    def record(self, state: RunState) -> None:
        """Store in the run's state where its division into steps begins, and its extension."""
        state.origin, state.extended = self.run_plan.origin, self.extension

    def eager(self) -> Self:
        """Return the same without compilation, where a trial shows that the model cannot be compiled."""
        config = dataclasses.replace(self.config, compile=False)
        return dataclasses.replace(self, run_plan=dataclasses.replace(self.run_plan, config=config))


def resolve(config: Config, facts: Facts) -> Resolution:
    """Resolve every "auto" of a configuration, and make its plan. Pure.

    A resolved configuration is returned as it is.

    Args:
        config: as the user gave it.

    Raises:
        ConfigError: the task names no known kind of defaults.
        DataError: no step is left.
    """
    before, draft = facts.start.checkpoint, draft_of(config, facts.start).config
    extension = _extension(config, before)
    origin = _origin(draft, before, extension)
    run_plan = _make_plan(draft, facts, origin)
    if run_plan.step_plan.steps < facts.start.least:
        run_plan = _make_plan(dataclasses.replace(draft, max_steps=facts.start.least), facts, origin)
    return Resolution(run_plan, extension)


def _origin(config: Config, before: CheckpointFacts | None, extension: Extension | None) -> Origin:
    """Return where the current division into steps begins.

    With another batch size (--resume-anyway) it begins at the position that was reached: no sample is left out and none
    comes twice (`check_plan` refuses what would break that). A new extension begins there too, since the last step may
    have been short. Otherwise it stays.
    """
    if before is None:
        return START
    other_size = before.plan.get("batch_size", config.batch_size) != config.batch_size
    return Origin(before.step, before.position) if other_size or extension != before.extension else before.origin


def _make_plan(config: Config, facts: Facts, origin: Origin) -> RunPlan:
    """Resolve what depends on task, model and number of steps."""
    undivided = config.batch_size if facts.undivided else 0
    default = default_micro_batch_size(config.batch_size, FEW if facts.batchnorm else 1)
    size = config.micro_batch_size or undivided or default
    config = dataclasses.replace(config, micro_batch_size=size)
    epoch = samples_in_epoch(config, facts.epoch)
    run_plan = RunPlan(epoch, config, origin, 2 if facts.batchnorm else 1, facts.samples)
    steps, shape = run_plan.step_plan.steps, config.optim.schedule
    if not steps:
        _refuse_empty_plan(run_plan)
    defaults: dict[str, Any] = {
        **_optimizer_defaults(config, facts.kind),
        "optim.warmup_steps": warm_up(steps, shape),
        "optim.floor": FLOORS.get(shape, FLOOR),
        "eval_micro_batch_size": size,
        "eval_workers": config.data.workers,
    }
    values = {name: value for name, value in defaults.items() if is_auto(config, name)} | _spans_in_steps(run_plan)
    return dataclasses.replace(run_plan, config=cli.build({**cli.flat(config), **values}))


def _spans_in_steps(run_plan: RunPlan) -> dict[str, int]:
    """Convert lengths in epochs or shares of the plan to steps."""
    config = run_plan.config
    known = {"steps": run_plan.step_plan.steps, "samples": run_plan.samples, "batch_size": config.batch_size}
    names = sorted(SPANS - {"extend_to"})  # that is the plan's length itself
    return {name: in_steps(value, **known) for name in names if is_span(value := lookup(config, name))}


def _optimizer_defaults(config: Config, kind: str) -> dict[str, float]:
    """Return the optimizer's defaults for a kind of task."""
    if kind not in KINDS:
        raise ConfigError(
            f"the task's defaults are {kind!r}: choose one of {', '.join(KINDS)}, or leave the attribute out"
        )
    if config.optim.name == "sgd":
        return SGD
    return (LORA if config.lora.rank else KINDS[kind]) | (ADAM if config.optim.name == "adam" else {})


def _refuse_empty_plan(run_plan: RunPlan) -> None:
    """Raise DataError for a plan of no steps."""
    if run_plan.config.data.drop_last:
        raise DataError(
            f"the training set has {run_plan.samples} samples, less than one step, and --data.drop-last leaves short "
            f"ones out: give a --batch-size below {run_plan.config.batch_size}, or --no-data.drop-last"
        )
    raise DataError("the training set has one sample, which BatchNorm cannot learn from alone: give it more")
