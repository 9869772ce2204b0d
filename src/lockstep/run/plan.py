"""What a run is, apart from who computes it: the numbers that a resume must find unchanged, and where a step stands.

run_plan = settled(config, task, model, samples=len(dataset))   # see run/defaults.py
run_plan.step_plan.steps, run_plan.place(done)
"""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lockstep.config import options
from lockstep.config.config import Config, lookup
from lockstep.config.spans import in_batches
from lockstep.data.batches import START, Origin, StepPlan
from lockstep.run.best import judged_by
from lockstep.task import Task, written
from lockstep.tasks.options import FIXED

__all__ = ["Difference", "RunPlan", "differences", "in_epoch", "origin_of", "plan_of"]

# Options that change what is computed from which data; the rest may change between one start and the next.
_FIXED = (
    *("batch_size", "micro_batch_size", "seed", "seq_len", "lr"),
    *("precision", "residual_dtype", "weight_copies", "grad_dtype", "fused_kernels", "batchnorm"),
    *("model_name", "dataset_name", "model.dropout"),
    *FIXED,
)
# And these, where the rate follows the evaluations.
_JUDGING = ("eval_freq", "best_metric", "limit_eval_batches", "eval_micro_batch_size")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The steps of the plan, and the place of a step among the epochs.

    Attributes:
        samples: n, in an epoch: of the training set or of the task's order, or what --limit-train-batches leaves.
        config: how many epochs or steps, and how large a step is.
        origin: the step, and the position in the stream of samples, from which on a step is as large as that.
        least: samples that a micro-batch must have: 2 where BatchNorm, which one alone would stop, is trained.
        whole: samples of the training set.
    """

    samples: int
    config: Config
    origin: Origin
    least: int
    whole: int

    @property
    def step_plan(self) -> StepPlan:
        """The stream of positions as steps. With --max-steps each is full; else the last ends with the last epoch.

        Left out at that end: with --data.drop-last what is short of a step, and what is short of `least` samples.
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

    def place(self, done: int) -> dict[str, Any]:
        """Where the run stands after `done` steps: epochs are counted in samples, so a step may lie across two."""
        size = self.config.batch_size
        position = self.step_plan.start(done)
        epoch, within = divmod(position, self.samples)
        if (
            within == 0 and position == self.step_plan.total and epoch
        ):  # the end of the last epoch, not the start of another
            epoch, within = epoch - 1, self.samples
        left = self.samples - within
        if not self.config.max_steps:
            left = min(left, self.step_plan.total - position)  # less than the epoch's where its end is left out
        return {
            "global_step": done,
            "epoch": epoch,
            "epoch_step": -(-within // size),
            "epoch_progress": within / self.samples,
            "num_batches_remaining": -(-left // size),
            "position": position,
        }


def in_epoch(config: Config, samples: int) -> int:
    """Samples of an epoch of a training set of `samples`, by --limit-train-batches: whole steps, or all of them."""
    if not config.limit_train_batches:
        return samples
    return min(samples, in_batches(config.limit_train_batches, samples / config.batch_size) * config.batch_size)


def origin_of(state: dict[str, Any], config: Config) -> Origin:
    """Where the run's present cut into steps begins, from the state of the checkpoint to resume from.

    With another batch size than before (--resume-anyway) it begins here, at the position that was reached: no sample is
    left out and none comes twice (`check_plan` refuses what would break that). Else where it began before.
    """
    before = state.get("plan", {}).get("batch_size", config.batch_size)
    if before != config.batch_size:
        return Origin(int(state["global_step"]), int(state["position"]))
    return Origin(*state.get("origin", START))


def plan_of(config: Config, run_plan: RunPlan, task: Task, model: nn.Module, *, own_task: bool) -> dict[str, Any]:
    """What a resume must find unchanged: the model by its tensors' names and shapes, the data by its content.

    Args:
        own_task: the task is the user's: without the built-in ones' options that stand at their default.
    """
    said = options.flat(config, own_task=own_task)
    shapes = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    optim = config.optim
    judged: dict[str, Any] = {}
    if optim.schedule == "plateau":  # of the best, which --min-delta may not be
        judged = {name: getattr(config, name) for name in _JUDGING} | {"min_delta": judged_by(config).delta}
    return {
        **{name: said[name] for name in _FIXED if name in said},
        "steps": run_plan.step_plan.steps,
        "samples": run_plan.samples,
        "dataset_samples": run_plan.whole,
        "data": task.fingerprint,
        "task": type(written(task)).__qualname__,
        **({name: said[name] for name in said if name.startswith("lora.")} if config.lora.rank else {}),
        **({name: said[name] for name in said if name.startswith("fp16.")} if config.precision == "fp16" else {}),
        "model": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        **judged,
        **{f"optim.{name}": getattr(optim, name) for name in type(optim).__dataclass_fields__},
    }


class Difference(NamedTuple):
    """A number of the plan that a resume finds changed."""

    key: str
    before: Any
    now: Any


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """Compare the plans of a checkpoint and of this start.

    What a plan leaves out is at its default, and so is an option that is younger than the run.
    """
    plain, kept = Config(), options.flat(Config(), own_task=True)
    left_out = {name: lookup(plain, name) for name in _FIXED if name not in kept}
    younger = ("optim.", "fp16.", "weight_copies", "grad_dtype")
    added = {name: value for name, value in kept.items() if name.startswith(younger) and value != "auto"}
    everything = {"dataset_samples": before.get("samples")}  # of a checkpoint that is older than the limit
    before, now = left_out | added | everything | before, left_out | now
    return [Difference(key, before.get(key), now[key]) for key in now if before.get(key) != now[key]]
