"""Run forward and backward of each micro-batch of a step.

    passes = Passes(engine, task, control)
    losses = passes.first(step, micro, items)
    engine.step(..., evaluate=passes.evaluation(step, micro, items, losses))

Afterwards `.grad` has the step's gradient. A step is one or more passes over the same micro-batches, then one update.
One pass is enough if the loss is a sum or a mean over its items, or if the step has one micro-batch. A loss over the
whole step takes two forwards (see `lockstep.whole_step`); an optimizer that evaluates the loss several times takes a
pass for each.
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
from lockstep.distributed.balance import ShareSchedule
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.gradient_norms import NO_NORMS, GradientNorms
from lockstep.errors import ConfigError
from lockstep.guards.loss_parameters import LossParameters
from lockstep.parallel.pipeline import Pipeline
from lockstep.records import Number, NumberCollector, check_numbers, describe_value, is_number, number_of
from lockstep.seeds import derive
from lockstep.task import AVERAGED, UNDIVIDED, Task, set_step
from lockstep.transforms.batchnorm import empty_slot

__all__ = [
    "NO_AUDIT",
    "SURROGATE",
    "Audits",
    "Passes",
    "StepControl",
    "StepOutOfMemory",
    "check_scalar",
    "describe_value",
    "loss_of",
    "seeder",
    "split_loss",
]


class Audits(Protocol):
    """Observer of how micro-batches are computed; see `lockstep.guards.audit`."""

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Return a context around forward and backward of a micro-batch.

        It yields a function to call with the loss between the two, which returns the loss.
        """

    def compare(self, step: int) -> None:
        """Compare the micro-batches before the update; an error prevents the update."""

    def close(self) -> None:
        """End the audit after the last step."""


class _NoAudit:
    """Null audit: checks nothing."""

    _context: AbstractContextManager[Callable[[Tensor], Tensor]] = nullcontext(lambda loss: loss)

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        return self._context

    def compare(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class StepOutOfMemory(torch.OutOfMemoryError):
    """A first pass that did not fit into memory.

    Parameters and optimizer states are as they were before the step.
    """


NO_AUDIT = _NoAudit()
_NO_CONTEXT: AbstractContextManager[None] = nullcontext()
_NO_NUMBERS: Mapping[str, Any] = {}
# (model, micro-batch) -> its loss and the task's own numbers; None: the numbers are collected elsewhere.
LossFunction = Callable[[nn.Module, MicroBatch], tuple[Tensor, Mapping[str, Any] | None]]


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Factors by which the losses of a step's micro-batches become the loss of the step.

    Attributes:
        reduction: of the task; see `Task.reduction`.
        items: of the step, over all ranks.
    """

    reduction: str
    items: float

    def share(self, batch: MicroBatch) -> float:
        """Return the factor of a micro-batch's loss: exactly 1 if a step has only one."""
        if self.reduction in UNDIVIDED:
            return 1.0
        if self.reduction in AVERAGED:
            return batch.items / (self.items or 1)
        return 1 / (self.items or 1)

    def in_items(self, loss: Tensor, batch: MicroBatch) -> Tensor:
        """Return a loss times the step's items and its share, as records add losses up."""
        if self.reduction in UNDIVIDED:
            return loss.double() * self.items
        if self.reduction in AVERAGED:
            return loss.double() * batch.items
        return loss

    def number(self, value: Any, batch: MicroBatch) -> Number:
        """Return a micro-batch's part of a number that the task returns with its loss."""
        if self.reduction == "total":
            return number_of(value, batch.items, self.items)
        factor = 1 if self.reduction == "sum" else batch.items
        return number_of(value, batch.items, factor)


SURROGATE = LossWeights("total", 0.0)  # of the parts of a loss over the whole step, whose gradients are added


@dataclass(frozen=True, slots=True)
class StepControl:
    """Settings of the loop, most of them per step.

    Attributes:
        factor: step -> factor of the base learning rate; None: the rates are not lockstep's to set.
        seed: (step, micro-batch) -> None; seeds every generator that the model may draw from.
        clock: measures the parts of a step.
        limit: step -> its update is applied if the gradient's norm is below this; -inf skips the step.
        momentum: step -> momentum of every parameter group; None: unchanged.
        audit: observes each micro-batch's loss and backward.
        kernels: (step, micro-batch) -> the context of its forward, compiled or eager; see
            `training.trial.compilation.choose_kernels`.
        before_passes: (step, this rank's micro-batches) -> None; called at the start of a step.
        before_update: called before the engine's update changes anything.
        check_empty: (step, micro-batch) -> None; checks the batch without items that a micro-batch replaces.
        world: the ranks.
        micro_batches: M, per step over all ranks; for a loss over the whole step.
        sharing: which of them each rank computes; None: the same number each.
        gradients: norms of the gradient by block, computed in steps with a record.
        rate: returns the first group's learning rate in the step, after the update.
        after_update: called with the number of updates so far, after each.
        pipeline: runs the micro-batches, where this rank has a stage of the model; None: it has the whole model.
    """

    factor: Callable[[int], float | None]
    seed: Callable[[int, int], None]
    clock: Clock
    limit: Callable[[int], float] = lambda step: math.inf
    momentum: Callable[[int], float | None] = lambda step: None
    audit: Audits = NO_AUDIT
    kernels: Callable[[int, int], AbstractContextManager[Any]] = lambda step, index: _NO_CONTEXT
    before_passes: Callable[[int, list[MicroBatch]], None] = lambda step, micro: None
    before_update: Callable[[], None] = lambda: None
    check_empty: Callable[[int, MicroBatch], None] = lambda step, batch: None
    world: World = field(default_factory=World)
    micro_batches: int = 1
    sharing: ShareSchedule | None = None
    gradients: GradientNorms = NO_NORMS
    rate: Callable[[], float] = lambda: math.nan
    after_update: Callable[[int], None] = lambda done: None
    pipeline: Pipeline | None = None


class Passes:
    """Passes over a rank's micro-batches, for a loss that sums over its items."""

    def __init__(self, engine: Engine, task: Task, control: StepControl) -> None:
        self._engine = engine
        self._control = control
        self._hooks = task.hooks
        self._task = task
        self._loss = _loss_function(task)
        self._reduction = task.reduction
        self._numbers = NumberCollector(control.world)
        # `LossParameters` inspects the graph of the first loss. With `own_steps` the task computes its gradients
        # itself.
        if task.own_steps:
            self._parameters = None
        else:
            self._parameters = LossParameters(engine.model, task)

    def first(self, step: int, micro: list[MicroBatch], items: float) -> list[Tensor]:
        """Compute forward and backward of each micro-batch, at the start of a step.

        Args:
            step: 0-based.
            micro: this rank's micro-batches.
            items: of the step, over all ranks.

        Returns:
            The losses of those with weight, each summed over its items, 0-dim.
        """
        set_step(self._task, step)
        return self._pass(step, micro, items, counts=True)

    def numbers(self, step: int) -> dict[str, list[Number]]:
        """Return the task's own numbers of the first pass, see `StepRecord`.

        Collective in the first step.

        Raises:
            LockstepError: the ranks' numbers have different names.
        """
        return self._numbers.end(step)

    def again(self, step: int, micro: list[MicroBatch], items: float) -> Tensor:
        """Repeat the pass with the current parameters, without changing buffers. Collective.

        Returns:
            The step's loss over all ranks, 0-dim, the same on each.
        """
        return self.total(self._pass(step, micro, items, counts=False), items)

    def total(self, losses: list[Tensor], items: float) -> Tensor:
        """Return the step's loss over all ranks, 0-dim, the same on each. Collective."""
        # Waits for the device. Only optimizers with a closure come here, once per evaluation.
        local_losses = torch.stack(losses).tolist() if losses else []
        # All ranks take part, since each must return the same loss to its optimizer. `fsum` makes the sum independent
        # of their order.
        all_losses = []
        for losses_of_rank in self._control.world.gather_counted(local_losses, losses=True):
            all_losses.extend(losses_of_rank)
        if losses:
            reference = losses[0]
        else:
            reference = next(p for p in self._engine.model.parameters() if p.is_floating_point())
        return torch.tensor(math.fsum(all_losses) / (items or 1), dtype=reference.dtype, device=reference.device)

    def evaluation(self, step: int, micro: list[MicroBatch], items: float, losses: list[Tensor]) -> "Evaluation":
        """Return the loss of this step, for optimizers that evaluate it themselves.

        Args:
            step, micro, items: of the step.
            losses: this rank's losses of the first pass.
        """
        return Evaluation(self, step, micro, items, losses)

    def _pass(self, step: int, micro: list[MicroBatch], items: float, *, counts: bool) -> list[Tensor]:
        return self._backwards(step, micro, self._loss, LossWeights(self._reduction, items), counts=counts)

    def _backwards(
        self,
        step: int,
        micro: list[MicroBatch],
        loss_function: LossFunction,
        weights: LossWeights,
        *,
        counts: bool,
    ) -> list[Tensor]:
        """Run forward and backward of each micro-batch.

        Args:
            step, micro: of the step.
            loss_function: of a micro-batch.
            weights: of each loss.
            counts: this is the first pass, which is audited and whose numbers are collected.

        Returns:
            The losses of the micro-batches with weight, as records add them up.
        """
        control = self._control
        if control.pipeline is not None:
            return self._through_stages(step, micro, loss_function, weights, control.pipeline, counts=counts)
        engine = self._engine
        clock = self._control.clock
        audit = control.audit if counts else NO_AUDIT
        losses = []
        for slot, batch in enumerate(micro):
            if self._hooks:
                self._hooks.before_batch(
                    step, batch.index, slot, len(micro), counts=bool(batch.weight) and control.world.counts
                )
            if batch.replaced is not None and counts:
                control.check_empty(step, batch)
            control.seed(step, batch.index)
            is_last = batch is micro[-1]
            with engine.accumulate(is_last, counts), empty_slot(not batch.weight), audit.watch(step, batch) as observe:
                # Only the first micro-batch of a run is inspected.
                parameters = self._parameters
                self._parameters = None
                with control.kernels(step, batch.index), parameters.forward() if parameters else nullcontext():
                    loss, numbers = loss_function(engine.model, batch)
                    loss = observe(loss)
                if parameters:
                    parameters.look(loss, batch.held)
                clock.lap("forward")
                engine.backward(loss, batch.weight * weights.share(batch))
                # DDP and FSDP exchange gradients during the last backward, so it gets its own name.
                clock.lap("backward" if is_last else "backward/alone")
            if counts and numbers is not None:
                self._collect(step, batch, numbers, weights)
            if batch.weight:
                losses.append(weights.in_items(loss.detach(), batch))
            if parameters:
                # Drop the graph first: an error must not keep the activations in memory.
                del loss, numbers
                parameters.refuse()
        return losses

    def _collect(self, step: int, batch: MicroBatch, numbers: Mapping[str, Any], weights: LossWeights) -> None:
        """Collect the numbers that the task returned with the loss of a micro-batch."""
        numbers_by_name = {}
        for name, value in numbers.items():
            numbers_by_name[name] = weights.number(value, batch)
        self._numbers.add(step, batch.index, numbers_by_name, counts=bool(batch.weight))

    def _through_stages(
        self,
        step: int,
        micro: list[MicroBatch],
        loss_function: LossFunction,
        weights: LossWeights,
        pipeline: Pipeline,
        *,
        counts: bool,
    ) -> list[Tensor]:
        """Run the micro-batches through the stages of a pipeline. Collective over the stages.

        Returns:
            As `_backwards`; zeros before the last stage, whose replica the last one counts for.
        """
        control = self._control
        engine = self._engine
        clock = control.clock
        parameters = self._parameters
        self._parameters = None

        def forward(slot: int) -> Tensor:
            batch = micro[slot]
            control.seed(step, batch.index)
            with engine.accumulate(slot + 1 == len(micro), counts), empty_slot(not batch.weight):
                # Before the last stage it ends with the stage's last block, by an exception.
                loss, numbers = loss_function(engine.model, batch)
            if counts and numbers is not None:
                self._collect(step, batch, numbers, weights)
            clock.lap("forward")
            return loss

        def backward(slot: int, loss: Tensor) -> None:
            batch = micro[slot]
            if parameters and slot == 0:
                parameters.look(loss, batch.held)
            # A stage's forwards and backwards alternate between micro-batches, so no context holds both of one.
            with empty_slot(not batch.weight):
                engine.backward(loss, batch.weight * weights.share(batch))
            clock.lap("backward")

        found = pipeline.passes(len(micro), forward, backward)  # collective
        if parameters:
            parameters.refuse()
        losses = []
        for slot, batch in enumerate(micro):
            if batch.weight:
                loss = found[slot] if found else torch.zeros((), device=control.world.device)
                losses.append(weights.in_items(loss, batch))
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
    """Return the task's loss of a micro-batch, as `Task.loss` computes it; 0-dim."""
    loss_and_numbers = _loss_function(task)
    return lambda model, batch: loss_and_numbers(model, batch)[0]


def _loss_function(task: Task) -> LossFunction:
    """Return the loss as `loss_of`, with the task's own numbers."""

    def loss_and_numbers(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Any]]:
        loss = task.loss(model, batch.data)
        if type(loss) is Tensor and not loss.ndim and loss.requires_grad:
            return loss, _NO_NUMBERS
        return split_loss(loss)

    return loss_and_numbers


def split_loss(returned: Any, method: str = "loss") -> tuple[Tensor, Mapping[str, Any]]:
    """Check the result of a task's method, and split it into loss and numbers.

    Returns:
        The 0-dim loss, and the numbers: name -> a number or (sum, count).

    Raises:
        ConfigError: as `check_scalar` and `check_numbers`.
    """
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return check_scalar(returned[0], method), check_numbers(returned[1], method)
    return check_scalar(returned, method), _NO_NUMBERS


def check_scalar(loss: Any, method: str = "loss") -> Tensor:
    """Check a loss, and return it as a 0-dim tensor; shape [1] is accepted.

    Args:
        loss: the result of the task's `method`.
        method: its name, for errors.

    Raises:
        ConfigError: it is not a tensor of one floating-point number, or has no graph although a backward follows.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.itemsize < 2 or not is_number(loss):
        raise ConfigError(
            f"the task's `{method}` returned {describe_value(loss)}: it must return one number, a 0-dim float tensor"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            f"the task's `{method}` returned a tensor without a graph, so nothing is learned; compute it from the "
            "model's output, without detach() and no_grad()"
        )
    if loss.ndim:
        return loss.reshape(())
    return loss


def seeder(seed: int, purpose: str, device: torch.device) -> Callable[[int, int], None]:
    """Return (step, micro-batch) -> None, which seeds the generators of CPU and device."""
    if device.type != "cuda":
        return lambda step, index: seed_everything(derive(seed, purpose, step, index))
    generator = torch.cuda.default_generators[device.index]

    def reseed(step: int, index: int) -> None:
        key = derive(seed, purpose, step, index)
        seed_everything(key)
        generator.manual_seed(key)

    return reseed
