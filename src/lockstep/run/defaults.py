"""What "auto" stands for: the values of a run that depend on its task, its model and its plan, chosen in one place.

    run_plan = settled(config, task, model, samples, origin)     # run_plan.config has every value
    for line in warnings(run_plan, model): ...

A task says which work it is with an attribute: `defaults = "language-model"`, "fine-tuning" (weights that are trained
already) or "general", which is meant where it says nothing. The choice depends on nothing that differs by rank.
"""

import dataclasses
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config import options
from lockstep.config.config import SPANS, Config, default_micro_batch_size, is_auto, lookup
from lockstep.config.spans import in_steps, is_span
from lockstep.data.batches import START, Origin
from lockstep.errors import ConfigError, DataError
from lockstep.run.plan import RunPlan, in_epoch
from lockstep.task import Task

__all__ = [
    "ADAM",
    "KINDS",
    "SGD",
    "described_loss",
    "described_optimizer",
    "described_step",
    "idle",
    "settled",
    "warm_up",
    "warnings",
]

# Adapters: 2e-4 for GPT-2 and GPT-3 (Hu et al., arXiv 2106.09685, tables 11 and 12); about ten times what the whole
# model takes (Schulman et al., "LoRA Without Regret", https://thinkingmachines.ai/blog/lora, 2025).
LORA: dict[str, float] = {"lr": 2e-4, "optim.beta2": 0.999, "optim.weight_decay": 0.0}
_LORA_RATES = (5e-5, 5e-3)  # outside of these a warning

# From scratch: the betas and the decay that GPT-3 and its successors are trained with (Brown et al., arXiv 2005.14165,
# appendix B). Pretrained weights: the defaults of the HF Trainer. Else torch's own AdamW: lr 1e-3, decay 0.01; images
# have the better of 1e-3 and 3e-3 for the built-in ResNet on the digits (docs/tasks/images.md).
KINDS: dict[str, dict[str, float]] = {
    "language-model": {"lr": 2e-3, "optim.beta2": 0.95, "optim.weight_decay": 0.1},
    "fine-tuning": {"lr": 5e-5, "optim.beta2": 0.999, "optim.weight_decay": 0.0},
    "images": {"lr": 3e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
    "general": {"lr": 1e-3, "optim.beta2": 0.999, "optim.weight_decay": 0.01},
}
ADAM: dict[str, float] = {"optim.weight_decay": 0.0}  # torch's own: added to the gradient, a decay is another thing
SGD: dict[str, float] = {"lr": 1e-2, "optim.weight_decay": 1e-4}  # He et al., arXiv 1512.03385, at a batch of 16 to 32

_SHARE, _MOST = 20, 50  # warm-up: one step of 20, and no more than 50
_RISE = 0.3  # one-cycle: share of the plan in which the rate rises, torch's pct_start
_FLOOR = 0.1
_FLOORS = {
    "one-cycle": 4e-6,
    "inverse-sqrt": 0.0,
    "step": 0.0,
    "plateau": 0.0,
}  # torch's final rate of a cycle; no bound
_FEW = 16  # samples below which BatchNorm's statistics cost quality (Wu & He, arXiv 1803.08494, figure 1)


def settled(
    config: Config, task: Task, model: nn.Module, samples: int, origin: Origin = START, epoch: int = 0
) -> RunPlan:
    """The plan, its `config` without any "auto". The same on every rank, and in every world.

    Args:
        task: its attribute `defaults` names one of KINDS.
        model: as it is trained; whether BatchNorm is in it decides how a step is cut.
        samples: of the training set.
        origin: see `RunPlan`.
        epoch: samples of an epoch, where the task's order has more or less than the training set; 0: as many.

    Raises:
        ConfigError: the task names no known kind.
        DataError: all samples are left out.
    """
    norms = _norms(model)
    least = _FEW if norms else 1
    by_itself = config.batch_size if task.reduction == "micro-batch" else 0  # the cut matters to such a loss
    size = config.micro_batch_size or by_itself or default_micro_batch_size(config.batch_size, least)
    config = dataclasses.replace(config, micro_batch_size=size)
    run_plan = RunPlan(in_epoch(config, epoch or samples), config, origin, 2 if norms else 1, samples)
    steps = run_plan.step_plan.steps
    if not steps:
        _refuse(run_plan)
    shape = config.optim.schedule
    chosen: dict[str, Any] = {
        **_suited(config, task),
        "optim.warmup_steps": warm_up(steps, shape),
        "optim.floor": _FLOORS.get(shape, _FLOOR),
        "eval_micro_batch_size": size,
        "eval_workers": config.data.workers,
        "compile": False,  # this, and the precision, where no device has settled them: see run/device_defaults.py
    }
    values = {name: value for name, value in chosen.items() if is_auto(config, name)}
    values |= {"precision": "float32"} if config.precision == "auto" else {}
    values |= _in_steps(run_plan)
    return dataclasses.replace(run_plan, config=options.build({**options.flat(run_plan.config), **values}))


def _in_steps(run_plan: RunPlan) -> dict[str, int]:
    """The lengths that are said in epochs or as a share of the plan, as steps."""
    config = run_plan.config
    known = {"steps": run_plan.step_plan.steps, "samples": run_plan.samples, "batch_size": config.batch_size}
    names = sorted(SPANS - {"extend_to"})  # which is the plan's length itself: see run/extending.py
    return {name: in_steps(value, **known) for name in names if is_span(value := lookup(config, name))}


def _suited(config: Config, task: Task) -> dict[str, float]:
    kind = task.defaults
    if kind not in KINDS:
        raise ConfigError(
            f"the task's defaults are {kind!r}: choose one of {', '.join(KINDS)}, or leave the attribute out"
        )
    if config.optim.name == "sgd":
        return SGD
    return (LORA if config.lora.rank else KINDS[kind]) | (ADAM if config.optim.name == "adam" else {})


def warm_up(steps: int, shape: str = "") -> int:
    """The default warm-up of a plan of `steps`: 5%, at most 50, and none where that is less than a step; the rise of a
    cycle is 30%."""
    return round(_RISE * steps) if shape == "one-cycle" else min(_MOST, steps // _SHARE)


def _refuse(run_plan: RunPlan) -> None:
    if run_plan.config.data.drop_last:
        raise DataError(
            f"the training set has {run_plan.samples} samples, less than one step, and --data.drop-last leaves short "
            f"ones out: give a --batch-size below {run_plan.config.batch_size}, or --no-data.drop-last"
        )
    raise DataError("the training set has one sample, which BatchNorm cannot learn from alone: give it more")


def described_step(run_plan: RunPlan, ranks: int) -> str:
    """What a step is: `a step of 64 = 8 forwards of 8, over 2 ranks`."""
    config = run_plan.config
    count, over = config.micro_batches, f", over {ranks} ranks" if ranks > 1 else ""
    over += f" ({config.shares})" if config.shares != "equal" else ""
    drawn = "of" if run_plan.samples < run_plan.whole else "draws from"
    part = f"; an epoch is {run_plan.samples:,} {drawn} {run_plan.whole:,} samples"
    over += part if run_plan.samples != run_plan.whole else ""
    return f"a step of {config.batch_size} = {count} forward{'s' * (count > 1)} of {config.micro_batch_size}{over}"


def described_loss(run_plan: RunPlan, task: Task) -> str:
    """Describe which samples a loss sees where another library's batch is the micro-batch; "" for other tasks."""
    framework, size = task.framework, run_plan.config.micro_size
    if not framework or task.reduction != "micro-batch":
        return ""
    batch = f"a batch of {size} samples" if size > 1 else "a batch"
    return f"{batch} is a micro-batch: its loss is computed by itself, as {framework} does"


def described_optimizer(run_plan: RunPlan) -> str:
    """What the configuration's optimizer is: `adamw: lr 0.001, cosine to 0.1 after 3 of 60 steps of warm-up, ...`."""
    config, optim = run_plan.config, run_plan.config.optim
    to = "" if optim.schedule in ("constant", "inverse-sqrt", "step", "plateau") else f" to {optim.floor:.3g}"
    numbers = f"betas {optim.beta1:g} and {optim.beta2:g}" if optim.name != "sgd" else f"momentum {optim.momentum:g}"
    if optim.name == "muon":
        numbers += f"; matrices: lr {optim.muon_lr or config.lr:g}, momentum {optim.muon_momentum:g}"
    return (
        f"{optim.name}: lr {config.lr:g}, {optim.schedule}{to} after {optim.warmup_steps} of "
        f"{run_plan.step_plan.steps} steps of warm-up, weight decay {optim.weight_decay:g}, {numbers}"
    )


def warnings(run_plan: RunPlan, model: nn.Module) -> list[str]:
    """What a person should know before step 1, a line each: about the warm-up, and about BatchNorm."""
    config, steps = run_plan.config, run_plan.step_plan.steps
    found = []
    if config.optim.warmup_steps >= steps:
        found.append(
            f"--optim.warmup-steps {config.optim.warmup_steps} is longer than the plan of {steps} "
            f"step{'s' * (steps > 1)}, so the rate never reaches --lr {config.lr:g}; leave it out for "
            f"{warm_up(steps, config.optim.schedule)}"
        )
    least, most = _LORA_RATES
    if config.lora.rank and config.optim.name != "sgd" and not least <= config.lr <= most:
        found.append(
            f"--lr {config.lr:g} is {'low' if config.lr < least else 'high'} for adapters, which take about ten times "
            f"the rate of the whole model: leave it out for {LORA['lr']:g}"
        )
    norms, micro_size = _norms(model), config.micro_batch_size
    if norms and micro_size < _FEW and config.batchnorm != "sync":
        size = default_micro_batch_size(max(config.batch_size, _FEW), _FEW)
        more = f"--batch-size {_FEW} and " if config.batch_size < _FEW else ""
        which = norms[0] + (f" and {len(norms) - 1} more" if len(norms) > 1 else "")
        found.append(
            f"BatchNorm ({which}) normalises over the {micro_size} sample{'s' * (micro_size > 1)} of a forward, and "
            f"{_FEW} or more train better: give {more}--micro-batch-size {size}"
        )
    missing = config.num_epochs * run_plan.samples - run_plan.step_plan.total
    if norms and not (config.max_steps or config.data.drop_last) and missing == 1:
        found.append("the last sample of the last epoch is left out: BatchNorm cannot learn from one alone")
    return found


def idle(config: Config, ranks: int) -> str:
    """Said where a step has fewer micro-batches than ranks: most often a batch per device was meant."""
    batch, micro, held = config.batch_size, config.micro_batch_size, config.micro_batches
    return (
        f"--batch-size {batch} is the whole step's, over all ranks: {held} micro-batch{'es' * (held > 1)} of {micro} "
        f"for {ranks} ranks leave{'s' * (held == 1)} {ranks - held} of them without work; for {batch} on each device: "
        f"--batch-size {batch * ranks} and --micro-batch-size {batch}"
    )


def _norms(model: nn.Module) -> list[str]:
    """The names of the BatchNorm layers that normalise by the batch: those in training mode."""
    layers = model.named_modules()
    return [name or type(layer).__name__ for name, layer in layers if isinstance(layer, _BatchNorm) and layer.training]
