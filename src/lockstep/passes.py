"""Run forward and backward of each micro-batch of a step.

    passes = Passes(engine, task, control)
    losses = passes.first(step, micro, items)
    engine.step(..., evaluate=passes.evaluation(step, micro, items, losses))

Afterwards `.grad` holds the step's gradient. A step is one or more passes over the same micro-batches, then one update.
One pass is enough if the loss is a sum over its items; a loss over the whole step takes two forwards (see
`lockstep.whole_step`), and an optimizer that evaluates several times in a step takes as many passes.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from lockstep.clock import Clock
from lockstep.data.batches import MicroBatch, seed_everything
from lockstep.distributed.balance import Sharing
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.optimizers import NO_NORMS, GradientNorms
from lockstep.errors import ConfigError
from lockstep.records import Gathered, Number, checked_numbers, described, number_of
from lockstep.seeds import derive
from lockstep.task import Task, averages

__all__ = [
    "UNAUDITED",
    "Audits",
    "Passes",
    "StepControl",
    "described",
    "loss_of",
    "scalar",
    "seeder",
    "unpacked",
]


class Audits(Protocol):
    """Observer of how micro-batches are computed; see `lockstep.guards.audit`."""

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Return a context around forward and backward of a micro-batch.

        It yields a function that is called with the loss between the two, and returns it.
        """

    def compare(self, step: int) -> None:
        """Compare after the last micro-batch, before the update. An error prevents the update."""

    def close(self) -> None:
        """End; no step follows."""


class _Unaudited:
    """Null audit: checks nothing."""

    _seen: AbstractContextManager[Callable[[Tensor], Tensor]] = nullcontext(lambda loss: loss)

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        return self._seen

    def compare(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


UNAUDITED = _Unaudited()
_ANY: AbstractContextManager[None] = nullcontext()
_NO_NUMBERS: Mapping[str, Any] = {}
# The loss of a micro-batch, and the task's own numbers; None: they are collected elsewhere.
Measured = Callable[[nn.Module, MicroBatch], tuple[Tensor, Mapping[str, Number] | None]]


@dataclass(frozen=True, slots=True)
class StepControl:
    """Settings of the loop, most of them by step.

    Attributes:
        factor: step -> factor of the base learning rate.
        seed: (step, micro-batch) -> None; seeds every generator that the model may draw from.
        clock: measures where the time goes.
        limit: step -> its update is applied if the gradient's norm is below this; -inf skips the step.
        momentum: step -> momentum of every parameter group; None: unchanged.
        audit: observes each micro-batch's loss and backward.
        kernels: (step, micro-batch) -> the context of its forward, compiled or eager; see
            `training.build_engine.choose_kernels`.
        before_update: called before the engine's update changes anything.
        world: the ranks that take part.
        micro_batches: M, of each step over all ranks; needed for a loss over the whole step.
        sharing: which of them each rank computes; None: the same number each.
        gradients: norms of the gradient by block, which the engine computes in steps with a record.
    """

    factor: Callable[[int], float]
    seed: Callable[[int, int], None]
    clock: Clock
    limit: Callable[[int], float] = lambda step: math.inf
    momentum: Callable[[int], float | None] = lambda step: None
    audit: Audits = UNAUDITED
    kernels: Callable[[int, int], AbstractContextManager[Any]] = lambda step, index: _ANY
    before_update: Callable[[], None] = lambda: None
    world: World = field(default_factory=World)
    micro_batches: int = 1
    sharing: Sharing | None = None
    gradients: GradientNorms = NO_NORMS


class Passes:
    """Passes over a rank's micro-batches, for a loss that sums over its items."""

    def __init__(self, engine: Engine, task: Task, control: StepControl) -> None:
        self._engine, self._control, self._hooks = engine, control, task.hooks
        self._measured = _measured_of(task)
        self._gathered = Gathered(control.world)

    def first(self, step: int, micro: list[MicroBatch], items: float) -> list[Tensor]:
        """Compute forward and backward of each micro-batch, at the start of a step.

        Args:
            micro: this rank's micro-batches of `step`.
            items: of the step, over all ranks.

        Returns:
            The losses of those that count, each summed over its items: 0-dim.
        """
        return self._pass(step, micro, items, counts=True)

    def numbers(self, step: int) -> dict[str, list[Number]]:
        """Return the task's own numbers of the first pass. Collective in a start's first step.

        See `StepRecord`.

        Raises:
            LockstepError: the ranks' numbers have different names.
        """
        return self._gathered.end(step)

    def again(self, step: int, micro: list[MicroBatch], items: float) -> Tensor:
        """Repeat the pass at the current parameters. Collective.

        Changes that its forwards make in buffers are dropped.

        Returns:
            The step's loss over all ranks, 0-dim: the same on each.
        """
        return self.total(self._pass(step, micro, items, counts=False), items)

    def total(self, losses: list[Tensor], items: float) -> Tensor:
        """Return the step's loss over all ranks, 0-dim, the same on each. Collective."""
        own = torch.stack(losses).tolist() if losses else []  # waits for the device
        every = [loss for part in self._control.world.gather(own) for loss in part]  # collective
        like = losses[0] if losses else next(p for p in self._engine.model.parameters() if p.is_floating_point())
        return torch.tensor(math.fsum(every) / (items or 1), dtype=like.dtype, device=like.device)

    def evaluation(self, step: int, micro: list[MicroBatch], items: float, losses: list[Tensor]) -> "Evaluation":
        """Return the evaluation that an optimizer may call in this step.

        Args:
            losses: this rank's, of the first pass.
        """
        return Evaluation(self, step, micro, items, losses)

    def _pass(self, step: int, micro: list[MicroBatch], items: float, *, counts: bool) -> list[Tensor]:
        return self._backwards(step, micro, self._measured, 1 / (items or 1), counts=counts)

    def _backwards(
        self,
        step: int,
        micro: list[MicroBatch],
        measured: Measured,
        share: float,
        *,
        counts: bool,
    ) -> list[Tensor]:
        """Run forward and backward of each micro-batch.

        Args:
            share: factor of each loss.
            counts: this is the first pass: it is audited, and its numbers are collected.

        Returns:
            The losses of the micro-batches that count.
        """
        control, engine, clock = self._control, self._engine, self._control.clock
        audit = control.audit if counts else UNAUDITED
        losses = []
        for slot, batch in enumerate(micro):
            if self._hooks:
                self._hooks.before_batch(step, batch.index, slot, len(micro), counts=bool(batch.weight))
            control.seed(step, batch.index)
            last = batch is micro[-1]
            with engine.accumulate(last, counts), audit.watch(step, batch) as seen:
                with control.kernels(step, batch.index):
                    loss, numbers = measured(engine.model, batch)
                    loss = seen(loss)
                clock.lap("forward")
                engine.backward(loss, batch.weight * share)
                clock.lap("backward" if last else "backward/alone")  # the last backward contains the all-reduce
            if counts and numbers is not None:
                self._gathered.add(step, batch.index, numbers, counts=bool(batch.weight))
            if batch.weight:
                losses.append(loss.detach())
        return losses


@final
@dataclass(slots=True)
class Evaluation:
    """The loss of one step, on demand; see `lockstep.engines.base.Evaluate`."""

    passes: Passes
    step: int
    micro: list[MicroBatch]
    items: float
    losses: list[Tensor]

    def loss(self) -> Tensor:
        return self.passes.total(self.losses, self.items)

    def again(self) -> Tensor:
        return self.passes.again(self.step, self.micro, self.items)


def loss_of(task: Task) -> Callable[[nn.Module, MicroBatch], Tensor]:
    """Return the task's loss as a sum over a micro-batch's items, 0-dim.

    It is a sum whatever the task's `reduction`.
    """
    measured = _measured_of(task)
    return lambda model, batch: measured(model, batch)[0]


def _measured_of(task: Task) -> Measured:
    """Return the loss as `loss_of`, together with the numbers that the task's `loss` returns."""
    mean = averages(task)

    def measured(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Number]]:
        loss = task.loss(model, batch.data)
        if type(loss) is Tensor and not loss.ndim and loss.requires_grad:
            return loss * batch.items if mean else loss, _NO_NUMBERS
        loss, found = unpacked(loss)
        factor = batch.items if mean else 1
        parts = {name: number_of(value, batch.items, factor) for name, value in found.items()}
        return loss * batch.items if mean else loss, parts

    return measured


def unpacked(returned: Any, method: str = "loss") -> tuple[Tensor, Mapping[str, Any]]:
    """Check what a task's method returned, and split it into loss and numbers.

    Returns:
        (loss, name -> a number or (sum, count)); the loss is 0-dim, and the numbers are {} if it came alone.

    Raises:
        ConfigError: as `scalar`, and as `checked_numbers`.
    """
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return scalar(returned[0], method), checked_numbers(returned[1], method)
    return scalar(returned, method), _NO_NUMBERS


def scalar(loss: Any, method: str = "loss") -> Tensor:
    """Check a loss, and return it as a 0-dim tensor.

    A tensor of a single number, such as [1], is accepted.

    Args:
        loss: what the task's `method` returned.

    Raises:
        ConfigError: it is not a tensor of one floating-point number, or has no graph although a backward follows.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        raise ConfigError(
            f"the task's `{method}` returned {described(loss)}: it must return one number, a 0-dim float tensor"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            f"the task's `{method}` returned a tensor without a graph, so nothing is learnt: compute it from the "
            "model's output, without detach() and no_grad()"
        )
    return loss.reshape(()) if loss.ndim else loss


def seeder(seed: int, purpose: str, device: torch.device) -> Callable[[int, int], None]:
    """Return (step, micro-batch) -> None, which seeds the CPU's and the device's generators.

    The seed depends on these numbers only.
    """
    if device.type != "cuda":
        return lambda step, index: seed_everything(derive(seed, purpose, step, index))
    generator = torch.cuda.default_generators[device.index]

    def reseed(step: int, index: int) -> None:
        key = derive(seed, purpose, step, index)
        seed_everything(key)
        generator.manual_seed(key)

    return reseed
