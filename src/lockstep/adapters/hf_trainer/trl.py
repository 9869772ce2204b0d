"""Serve trl's SFTTrainer, DPOTrainer and RewardTrainer, and refuse its other trainers by name.

    check_trl(trainer)                      # refuses, by name, what of trl is not served
    adapted = adapt(trainer, collator)      # the task's class and its batching; None: not a trainer of trl

Their losses and datasets are their own. An SFTTrainer's loss is a mean over labels, that of the others over pairs. What
they log of a batch (`rewards/margins`, `mean_token_accuracy`) is a number of the task: they gather it over the ranks in
each batch, a run sums it with the losses. The module does not import trl.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.adapters.hf_trainer.data import Batching, PairBatching
from lockstep.adapters.hf_trainer.refusals import BATCH_LOSSES, GENERATING, TRL, TRL_TRAINERS
from lockstep.adapters.hf_trainer.task import FINGERPRINT_ARGUMENTS, LabelledTrainerTask, TrainerTask
from lockstep.config.schema import Config
from lockstep.errors import ConfigError

__all__ = [
    "adapt",
    "check_micro_batches",
    "check_trl",
]

_SFT, _DPO, _REWARD = (f"trl.trainer.{name}" for name in ("sft_trainer", "dpo_trainer", "reward_trainer"))
# (module, class), since trl.experimental has classes of the same names.
_SERVED = set(zip((_SFT, _DPO, _REWARD), TRL_TRAINERS, strict=True))
# Totals of the process, not numbers of the batch.
_COUNTED = ("num_tokens",)


def check_trl(trainer: Any) -> None:
    """Check that a trainer of trl is one that is served.

    Raises:
        ConfigError: it is another of trl's trainers, or uses a feature that is not served; one line that names it.
    """
    origin = _origin(trainer)
    if origin is None:
        return
    if (origin.__module__, origin.__name__) not in _SERVED:
        name = origin.__name__
        if name in GENERATING:
            why = ", which generates samples between its steps,"
        else:
            why = f" ({origin.__module__})"
        raise ConfigError(
            f"from_trainer: {name} of trl{why} is not supported: train it with trl alone; "
            f"{', '.join(TRL_TRAINERS)} are supported"
        )
    more = getattr(trainer.args, "gradient_checkpointing_kwargs", None) or {}
    if more.get("selective"):
        raise ConfigError(
            f"from_trainer: {type(trainer.args).__name__}(gradient_checkpointing_kwargs={{'selective': True}}) is not "
            "supported: leave 'selective' out; blocks are recomputed as a whole"
        )


def check_micro_batches(trainer: Any, config: Config) -> None:
    """Check that the loss of a step is that of its micro-batches together.

    Raises:
        ConfigError: it is not: a part of the loss belongs to a whole batch, and the step has several.
    """
    origin = _origin(trainer)
    parts = config.batch_size // config.micro_batch_size
    if origin is None or parts == 1:
        return
    batch_losses = []
    for name in getattr(trainer, "loss_types", ()):
        if name in BATCH_LOSSES:
            batch_losses.append(name)
    setting = f"loss_type='{batch_losses[0]}'" if batch_losses else ""
    if origin.__module__ == _SFT and trainer.aux_loss_enabled:
        setting = f"router_aux_loss_coef={trainer.router_aux_loss_coef}"
    if setting:
        raise ConfigError(
            f"from_trainer: {type(trainer.args).__name__}({setting}) is not supported with {parts} micro-batches a "
            "step (accumulation times devices), since this loss is no sum over their samples: leave it out, or make "
            "a batch a step, with gradient_accumulation_steps=1 and from_trainer(trainer, devices=1)"
        )


def adapt(
    trainer: Any, collator: Callable[[list[Any]], Any]
) -> "tuple[type[TrainerTask], Batching | PairBatching] | None":
    """Return the task's class and batching for a trainer of trl; None for others."""
    origin = _origin(trainer)
    if origin is None:
        return None
    if origin.__module__ != _SFT:
        return _PairsTask, PairBatching(collator)
    is_told = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return _LabelsTask, Batching(collator, bool(trainer._loss_shifts_labels) or not is_told)


def _origin(trainer: Any) -> Any:
    """Return the class of trl that the trainer is or derives from; else None."""
    for base in type(trainer).__mro__:
        if base.__module__.startswith("trl."):
            return base
    return None


class _TrlTask(TrainerTask):
    """Task of a trainer of trl, with the numbers that it logs of a batch."""

    gathers = False
    fingerprint_arguments = (*FINGERPRINT_ARGUMENTS, *(name for name, row in TRL.items() if row.what == "its loss"))

    # Read after the model is made. The base class has a plain attribute of this name.
    @property
    def fixed_models(self) -> dict[str, nn.Module]:  # type: ignore[override]
        """The reference model, which checkpoints lack: the ranks must have made the same one."""
        reference = getattr(self.trainer, "ref_model", None)
        if reference is None:
            return {}
        return {"ref_model": reference}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), self._numbers(batch)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        loss, metrics = super().evaluate(model, batch)
        return loss, {**self._numbers(batch), **metrics}

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        # The run's batch size may differ from the arguments'.
        check_micro_batches(self.trainer, config)
        return super().optimizer(model, config)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Make the trainer gather nothing and log only this batch, in a context."""
        accelerator = self.trainer.accelerator
        self._forget()
        # Read for a router's loss, which is supported only in steps of one batch.
        self.trainer.current_gradient_accumulation_steps = 1
        # trl gathers what it logs over the ranks in each batch; the run sums it with the losses instead.
        accelerator.gather = accelerator.gather_for_metrics = _pass_through
        try:
            with super()._alone():
                yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics

    def _numbers(self, batch: Any) -> dict[str, tuple[float, int]]:
        """Return and clear what trl logged of the batch: name -> (sum, count).

        Sums are over the items of the loss.
        """
        logged = {}
        for kept in self.trainer._metrics.values():
            for name, values in kept.items():
                logged[name] = values[-1]
        self._forget()
        # trl has read its numbers already, so counting does not wait for the device.
        items = self._batching.count(batch)
        numbers = {}
        for name, mean in logged.items():
            if name not in _COUNTED:
                numbers[name] = (float(mean) * items, items)
        return numbers

    def _forget(self) -> None:
        for kept in self.trainer._metrics.values():
            kept.clear()


@final
class _LabelsTask(_TrlTask, LabelledTrainerTask):
    """Task of an SFTTrainer; its loss and its numbers are means over labels."""


@final
class _PairsTask(_TrlTask):
    """Task of a DPOTrainer or RewardTrainer, with means over pairs, one a sample."""

    item_name = "pairs"

    def count(self, batch: Any) -> int:
        return self._batching.count(batch)


def _pass_through(value: Any, *_: Any, **__: Any) -> Any:
    return value
