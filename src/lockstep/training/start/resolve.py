"""Resolve each "auto" and each length in epochs of a configuration, by a run's facts.

    start = StartFacts(fast=True, checkpoint=checkpoint_facts(state))       # known before the task is made
    draft = draft_of(config, start)                                         # to make task and model from
    resolution = resolve(config, Facts.of(task, model, samples, start=start))
    resolution.config, resolution.run_plan, resolution.extension

A step is cut into one micro-batch per rank, unless the configuration, the data or a checkpoint fixes the cut.

All functions here are pure: no collectives, no output, no changes of their arguments. `training/start/build.py: build`
collects the facts. The numbers behind the defaults are in `training/start/defaults.py`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import nn

from lockstep.config import cli
from lockstep.config.fields import in_steps, is_span
from lockstep.config.schema import (
    SPANS,
    Config,
    choose_micro_batch_size,
    default_micro_batch_size,
    has_fixed_cut,
    is_auto,
    lookup,
    nearest_divisor,
)
from lockstep.data.batches import START, Origin
from lockstep.data.shard_order import Geometry
from lockstep.errors import ConfigError, DataError
from lockstep.run_state import Extension, RunState
from lockstep.task import DataFacts, Task
from lockstep.training.start.defaults import (
    ADAM_DEFAULTS,
    LORA_DEFAULTS,
    LR_FLOOR,
    LR_FLOORS,
    MIN_BATCHNORM_SAMPLES,
    SGD_DEFAULTS,
    TASK_DEFAULTS,
    batchnorm_names,
    default_log_freq,
    default_warmup,
    fine_tuning_rate,
    is_device_default,
    prompt_defaults,
)
from lockstep.training.state.plan import BY_RANKS, FIXED, RunPlan, samples_in_epoch, samples_in_evaluation

__all__ = [
    "Facts",
    "StartFacts",
    "checkpoint_facts",
    "draft_of",
    "resolve",
    "with_micro_batch_size",
]


# --- facts


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Settings of the checkpoint that a run resumes from.

    Attributes:
        step, position: steps trained, and position of the next sample.
        plan: values that must be unchanged, see `resume.plan_of`; {} in a checkpoint without them.
        compiled: the run was compiled.
        origin: step and sample position at which the current division into steps begins.
        extension: its `--extend-to`, as in the run's state; None: the run was never extended.
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
    """Facts that are known before the task is made; the same on every rank.

    Attributes:
        fast: the devices of all ranks and the engine suit bf16 and compilation.
        max_micro_batch: samples of the largest micro-batch that fits the devices; 0: the default fits, or unknown.
        checkpoint: of the run to resume; None: a new run.
        min_steps: minimum length of the plan.
        micro_batch: the size that the run's folder records, with `--on-oom smaller`; 0: none.
        ranks: that share a step; a cut that nothing fixes has a micro-batch for each.
        cut: BY_RANKS: an earlier build of this run chose the micro-batch size; FIXED: cut as with `--exact`; "": the
            configuration decides.
        double: the task made its whole model in double precision.
    """

    fast: bool = False
    max_micro_batch: int = 0
    checkpoint: CheckpointFacts | None = None
    min_steps: int = 0
    micro_batch: int = 0
    ranks: int = 1
    cut: str = ""
    double: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a configuration is resolved by; the same on all ranks.

    Attributes:
        start: facts that are known before the task is made.
        kind: of the task's defaults, one of `defaults.TASK_DEFAULTS`.
        per_micro_batch: the loss depends on the division into micro-batches, so by default a step has one.
        batchnorm: the model has BatchNorm layers.
        samples: of the training set.
        epoch: samples of an epoch in the task's order.
        grouped: micro-batches are groups of samples: a batch size counts these.
        longest: tokens of the longest sample, if they are made by tokens; else 0.
        is_stream: the training set has no index; the cut decides what a step contains, so it is fixed.
        data: of a language model's data; None: of another task.
        evaluation: samples of each evaluation set.
    """

    start: StartFacts
    kind: str
    per_micro_batch: bool
    batchnorm: bool
    samples: int
    epoch: int
    grouped: bool = False
    longest: int = 0
    is_stream: bool = False
    data: DataFacts | None = None
    evaluation: tuple[int, ...] = ()

    @classmethod
    def of(cls, task: Task, model: nn.Module, samples: int, epoch: int = 0, start: StartFacts | None = None) -> Self:
        """Collect the facts of a task and its model.

        Args:
            model: the model to train; its BatchNorm layers decide the default micro-batch.
            samples: of the training set.
            epoch: samples of an epoch, if the task's order has another number; 0: the same number.
        """
        per_micro_batch = task.reduction == "micro-batch"
        batchnorm = bool(batchnorm_names(model))
        sizes = samples, epoch or samples
        stream = not samples
        defaults = task.defaults
        return cls(
            start or StartFacts(), defaults, per_micro_batch, batchnorm, *sizes, is_stream=stream, data=task.data_facts
        )


# --- before the task is made


class Draft(NamedTuple):
    """A configuration in which devices and checkpoint have decided their part.

    Attributes:
        config: to make task and model from. Values that depend on these are still "auto".
        notices: lines for the user.
    """

    config: Config
    notices: list[str]


def draft_of(config: Config, facts: StartFacts) -> Draft:
    """Resolve precision, compile, known micro-batch size and plan length, which need no task."""
    stored = facts.checkpoint.plan if facts.checkpoint else {}
    if "batch_size" in stored and is_auto(config, "batch_size") and not config.batch_tokens:
        config = dataclasses.replace(config, batch_size=stored["batch_size"])
    # A resumed run keeps the BatchNorm that it was started with.
    if config.batchnorm == "auto" and "batchnorm" in stored:
        config = dataclasses.replace(config, batchnorm=stored["batchnorm"])
    # With batches of tokens the positions of a plan are micro-batches (data/groups.py).
    if config.batch_tokens:
        size = config.micro_batch_tokens or default_micro_batch_size(config.batch_tokens)
        count = config.batch_tokens // size
        config = dataclasses.replace(config, micro_batch_tokens=size, batch_size=count, micro_batch_size=1)
    values, notices = _device_defaults(config, facts)
    config = _limit(
        dataclasses.replace(config, **{"micro_batch_size": _micro_batch_size(config, facts), **values}), facts
    )
    extension = _extension(config, facts.checkpoint)
    return Draft(_apply_extension(config, facts.checkpoint, extension) if extension else config, notices)


def _device_defaults(config: Config, facts: StartFacts) -> tuple[dict[str, Any], list[str]]:
    """Choose precision and compile by the weakest device, the checkpoint or the model."""
    names = [name for name in ("precision", "compile") if is_device_default(config, name)]
    before = facts.checkpoint
    fast = facts.fast
    defaults = {"precision": "bf16" if fast else "float32", "compile": fast and config.parallel.size == 1}
    if facts.double:
        defaults["precision"] = "float64"
    values = _select(defaults, names)
    # A run from before these defaults existed used float32 without compile.
    if before and before.plan:
        stored = {"precision": before.plan.get("precision", "float32"), "compile": before.compiled}
        values = _select(stored, names)
    if values != _select(defaults, names):
        default = _format_flags(_select(defaults, names))
        return values, [f"as the run was started: {_format_flags(values)}; the default of this device is {default}"]
    if names and fast:
        other = _format_flags(_select({"precision": "float32", "compile": False}, names))
        return values, [f"device default: {_format_flags(values)}; to turn it off: {other}"]
    return values, []


def _select(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _format_flags(values: Mapping[str, Any]) -> str:
    """Format as flags: `--precision bf16 --compile`."""
    switch = {True: "--compile", False: "--no-compile"}
    return " ".join(switch[value] if name == "compile" else f"--{name} {value}" for name, value in values.items())


def _micro_batch_size(config: Config, facts: StartFacts) -> int:
    """Return the size from the configuration, the checkpoint or the devices; 0: still open."""
    before = facts.checkpoint.plan if facts.checkpoint else {}
    if not is_auto(config, "micro_batch_size"):
        return config.micro_batch_size
    if before.get("cut", FIXED) == FIXED and "micro_batch_size" in before:
        if before.get("batch_size") == config.batch_size:
            return int(before["micro_batch_size"])
        return 0
    return facts.max_micro_batch


def _limit(config: Config, facts: StartFacts) -> Config:
    """Apply what memory allowed before, with `--on-oom smaller`: the checkpoint's size, and the recorded one."""
    before = facts.checkpoint.plan if facts.checkpoint else {}
    is_kept = before.get("cut", FIXED) == FIXED and before.get("batch_size") == config.batch_size
    stored = before.get("micro_batch_size", 0) if is_kept else 0
    sizes = [size for size in (stored, facts.micro_batch) if size]
    if config.on_oom != "smaller" or not sizes or 0 < config.micro_batch_size <= min(sizes):
        return config
    if not config.micro_batch_size:
        sizes.append(choose_micro_batch_size(config, facts.ranks))
    return with_micro_batch_size(config, nearest_divisor(config.batch_size, min(sizes)))


def with_micro_batch_size(config: Config, size: int) -> Config:
    """Return the configuration with another micro-batch size, which evaluations follow if they had the same."""
    follows = config.eval_micro_batch_size and config.eval_micro_batch_size == config.micro_batch_size
    evaluation = size if follows else config.eval_micro_batch_size
    return dataclasses.replace(config, micro_batch_size=size, eval_micro_batch_size=evaluation)


def _extension(config: Config, before: CheckpointFacts | None) -> Extension | None:
    """Return the extension by `--extend-to`, of this start or an earlier one; None: none."""
    if before is None:
        return None
    earlier = before.extension
    target = config.extend_to
    if not target or (earlier and earlier.asked == target):
        return earlier
    epochs = int(str(target).rstrip(" epochs")) if is_span(target) else 0
    return Extension(target, before.step, before.plan["steps"], 0 if epochs else int(target), epochs)


def _apply_extension(config: Config, before: CheckpointFacts | None, extension: Extension) -> Config:
    """Apply an extension to the plan's length; the warm-up is over, and stays."""
    optim = config.optim
    if before and is_auto(config, "optim.warmup_steps"):
        optim = dataclasses.replace(optim, warmup_steps=before.plan.get("optim.warmup_steps", optim.warmup_steps))
    epochs = extension.num_epochs or config.num_epochs
    return dataclasses.replace(config, max_steps=extension.max_steps, num_epochs=epochs, optim=optim)


# --- once task and model are made


@dataclass(frozen=True, slots=True)
class Resolution:
    """A resolved configuration and its plan.

    Attributes:
        run_plan: the steps, with the resolved configuration.
        extension: of `--extend-to`, for the run's state; None: the run was never extended.
    """

    run_plan: RunPlan
    extension: Extension | None

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.run_plan.config

    def record(self, state: RunState) -> None:
        """Store the origin of the steps and the extension in the run's state."""
        state.origin = self.run_plan.origin
        state.extended = self.extension

    def without_compile(self) -> Self:
        """Return the same without `--compile`, for a model that a trial could not compile."""
        config = dataclasses.replace(self.config, compile=False)
        return dataclasses.replace(self, run_plan=dataclasses.replace(self.run_plan, config=config))


def resolve(config: Config, facts: Facts) -> Resolution:
    """Resolve each "auto" of a configuration, and make the run's plan.

    A resolved configuration stays as it is.

    Args:
        config: as the user gave it.

    Raises:
        ConfigError: the task's `defaults` are no known kind.
        DataError: the plan has no steps.
    """
    before = facts.start.checkpoint
    draft = _with_data_defaults(config, draft_of(config, facts.start).config, facts)
    # An extension or a minimum length may count in other units than the user did.
    if is_auto(config, "eval_freq") and (config.max_steps or facts.is_stream):
        draft = dataclasses.replace(draft, eval_freq=0)
    extension = _extension(config, before)
    origin = _origin(draft, before, extension)
    run_plan = _make_plan(draft, facts, origin)
    if run_plan.step_plan.steps < facts.start.min_steps:
        run_plan = _make_plan(dataclasses.replace(draft, max_steps=facts.start.min_steps), facts, origin)
    return Resolution(run_plan, extension)


# The values of AutoInt fields that the data do not decide.
_PLAIN_DEFAULTS = {"batch_size": 16, "num_epochs": 1, "seq_len": 128}


def _with_data_defaults(config: Config, draft: Config, facts: Facts) -> Config:
    """Resolve what the data decide.

    Args:
        config: as the user gave it.
        draft: the same, as `draft_of` returns it.
    """
    values: dict[str, Any] = dict(_PLAIN_DEFAULTS)
    if facts.data:
        values |= {**facts.data.options, **(prompt_defaults(facts.samples) if facts.data.has_prompts else {})}
    values = {key: value for key, value in values.items() if is_auto(draft, key) or lookup(draft, key) == "auto"}
    size = values.get("batch_size", draft.batch_size)
    micro_size = draft.micro_batch_size
    if micro_size and size % micro_size:
        # The devices chose it for another batch size.
        if is_auto(config, "micro_batch_size"):
            values["micro_batch_size"] = nearest_divisor(size, micro_size)
        else:
            values["batch_size"] = int(draft.batch_size)
    return cli.build({**cli.flatten(draft), **values})


def _origin(config: Config, before: CheckpointFacts | None, extension: Extension | None) -> Origin:
    """Return the step and sample position at which the current division into steps begins.

    With another batch size (--resume-anyway) that is the checkpoint's position: no sample is left out and none comes
    twice (`check_plan` refuses what would break that). The same holds for a new extension, since the last step may have
    been short. Otherwise the origin stays.
    """
    if before is None:
        return START
    other_size = before.plan.get("batch_size", config.batch_size) != config.batch_size
    if other_size or extension != before.extension:
        return Origin(before.step, before.position)
    return before.origin


def _make_plan(config: Config, facts: Facts, origin: Origin) -> RunPlan:
    """Resolve the values that depend on task, model and number of steps."""
    least = MIN_BATCHNORM_SAMPLES if facts.batchnorm else 1
    if facts.per_micro_batch:
        regular = config.batch_size
    else:
        regular = default_micro_batch_size(config.batch_size, least)
    # A checkpoint's cut and one that memory chose are in `micro_batch_size` already.
    is_open = facts.start.cut == BY_RANKS or not (has_fixed_cut(config) or facts.start.cut == FIXED)
    if is_open and not facts.is_stream and not facts.grouped:
        cut = BY_RANKS
    else:
        cut = FIXED
    if cut == FIXED:
        default = regular
    else:
        default = choose_micro_batch_size(config, facts.start.ranks)
    if facts.grouped and config.micro_batch_size > 1:
        raise ConfigError(
            f"--micro-batch-size is {config.micro_batch_size}, but the task's `order` is a batch sampler, whose lists "
            "are the micro-batches; drop the flag: --batch-size counts lists"
        )
    size = 1 if facts.grouped else config.micro_batch_size or default
    config = dataclasses.replace(config, micro_batch_size=size)
    epoch = samples_in_epoch(config, facts.epoch)
    if facts.start.checkpoint:
        stored = facts.start.checkpoint.plan.get("geometry")
    else:
        stored = None
    # The order of samples must not depend on the ranks.
    geometry = Geometry(*(stored or (config.batch_size, size if cut == FIXED else regular)))
    run_plan = RunPlan(
        epoch,
        config,
        origin,
        2 if facts.batchnorm else 1,
        facts.samples,
        geometry=geometry,
        grouped=facts.grouped,
        cut=cut,
    )
    steps = run_plan.step_plan.steps
    shape = config.optim.schedule
    if not steps:
        _refuse_empty_plan(run_plan)
    defaults: dict[str, Any] = {
        **_optimizer_defaults(config, facts.kind, facts.data),
        "optim.warmup_steps": default_warmup(steps, shape),
        "optim.floor": LR_FLOORS.get(shape, LR_FLOOR),
        "eval_micro_batch_size": _evaluation_size(config, facts, size if cut == FIXED else 0),
        "eval_workers": config.data.workers,
        "log_freq": default_log_freq(steps),
    }
    values = {name: value for name, value in defaults.items() if is_auto(config, name)} | _spans_in_steps(run_plan)
    run_plan = dataclasses.replace(run_plan, config=cli.build({**cli.flatten(config), **values}))
    if is_auto(config, "eval_freq"):
        return _with_evaluations(run_plan, facts)
    return run_plan


# Steps between two evaluations: each may save a checkpoint, as the best.
_MIN_INTERVAL = 10


def _with_evaluations(run_plan: RunPlan, facts: Facts) -> RunPlan:
    """Evaluate every few epochs: the fewest that have enough steps, and as many samples as an evaluation.

    Raises:
        ConfigError: only the end is evaluated, and --patience or a schedule needs more.
    """
    config = run_plan.config
    evaluated = sum(samples_in_evaluation(config, samples) for samples in facts.evaluation)
    trained: float = run_plan.samples
    # An epoch counts groups of samples.
    if run_plan.grouped:
        trained *= facts.samples / facts.epoch
    least = max(evaluated / trained, _MIN_INTERVAL * config.batch_size / run_plan.samples)
    epochs = max(1, math.ceil(least))
    # Rounded up, so that the end of the last epoch is not evaluated twice.
    interval = math.ceil(epochs * run_plan.samples / config.batch_size)
    if interval >= run_plan.step_plan.steps:
        interval = 0
    return dataclasses.replace(run_plan, config=dataclasses.replace(config, eval_freq=interval))


def _evaluation_size(config: Config, facts: Facts, fixed: int) -> int:
    """Choose the samples of an evaluation's forward, the same on any number of ranks.

    Args:
        fixed: samples of a micro-batch in training, where the cut is fixed; else 0.
    """
    if facts.longest:
        return max(1, config.micro_batch_tokens // facts.longest)
    if fixed:
        return fixed
    # The logits of a whole step may not fit into memory.
    if facts.kind in ("language-model", "fine-tuning"):
        return default_micro_batch_size(config.batch_size)
    return config.batch_size


def _spans_in_steps(run_plan: RunPlan) -> dict[str, int]:
    """Convert lengths in epochs or shares of the plan to steps."""
    config = run_plan.config
    lengths = {"steps": run_plan.step_plan.steps, "samples": run_plan.samples, "batch_size": config.batch_size}
    # extend_to is the length of the plan itself.
    names = sorted(SPANS - {"extend_to"})
    return {name: in_steps(value, **lengths) for name in names if is_span(value := lookup(config, name))}


def _optimizer_defaults(config: Config, kind: str, data: DataFacts | None) -> dict[str, float]:
    """Return the optimizer's defaults for a kind of task."""
    if kind not in TASK_DEFAULTS:
        raise ConfigError(
            f"the task's defaults = {kind!r} is unknown: choose one of {', '.join(TASK_DEFAULTS)}, or leave the "
            "attribute out"
        )
    if config.optim.name == "sgd":
        return SGD_DEFAULTS
    defaults = LORA_DEFAULTS if config.lora.rank else TASK_DEFAULTS[kind]
    if data and data.has_prompts and data.width:
        defaults = defaults | {"lr": fine_tuning_rate(data.width, lora=bool(config.lora.rank))}
    return defaults | (ADAM_DEFAULTS if config.optim.name == "adam" else {})


def _refuse_empty_plan(run_plan: RunPlan) -> None:
    """Raise DataError for a plan of no steps."""
    if run_plan.config.data.drop_last:
        raise DataError(
            f"the training set has {run_plan.samples} samples, less than one step, and --data.drop-last leaves short "
            f"ones out: give a --batch-size below {run_plan.config.batch_size}, or --no-data.drop-last"
        )
    raise DataError("the training set has one sample, which BatchNorm cannot learn from alone: give it more")
