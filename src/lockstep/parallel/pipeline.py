"""Run the micro-batches of a step through the stages of a pipeline, one forward and one backward in turns.

    pipeline = Pipeline(stage, world.part("pp"))
    losses = pipeline.passes(count, loss, backward)     # [] except on the last stage
    pipeline.add_tied(model)                            # after the exchange with other replicas, before the norm
    loss = pipeline.loss(lambda: task.loss(model, batch))   # of one micro-batch, on every stage

The order is that of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv 2104.04473, section 2.2.1 ("1F1B"): a stage holds the activations of at most as many micro-batches
as there are stages from it to the end. Only hidden states and their gradients are sent, in any shape. A header goes
before each hidden state, with its shape, its dtype and the states of the random generators, so that the draws are those
of one process.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# Private: torch has no public way to leave dispatch modes for a while.
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError
from lockstep.parallel.stages import PipelineStage, StageInput, generator_states
from lockstep.records import describe_value, float_of, is_number
from lockstep.tensors import as_bytes, from_bytes, gradient_like, local_of

__all__ = ["Loss", "Pipeline"]


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Most dimensions of a hidden state, as headers have one length.
_DIMENSIONS = 8
# Of a header: dtype, number of dimensions, and the dimensions.
_NUMBERS = 2 + _DIMENSIONS
# In place of a dtype: a neighbour has failed, and nothing follows.
_FAILED = -1
# The same: a gradient follows.
_GRADIENT = -2
# A loss, 0-dim, and the numbers that the task returned with it.
Loss = tuple[Tensor, Mapping[str, Any]]


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and its backward.

    Attributes:
        number: of the micro-batch in the step.
        hidden: what the stage got; None on the first.
        output: what it sent on, or the loss.
    """

    number: int
    hidden: Tensor | None
    output: Tensor


class _FromGradient(torch.autograd.Function):
    """A loss whose backward gives a tensor a gradient that is known already."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, unused: Tensor) -> Any:
        # Weights and scales of the loss are in the gradient already: the last stage applied them.
        return ctx.saved_tensors[0], None


class _ReceivedInput(torch.autograd.Function):
    """A stage's input whose gradient the backward sends to the previous stage."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, pipeline: "Pipeline") -> Tensor:
        ctx.pipeline = pipeline
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.pipeline._send_gradient(gradient.contiguous())
        return None, None, None


class _LossElsewhere(torch.autograd.Function):
    """The last stage's loss on another one, whose backward begins with the gradient of the next stage."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, value: Tensor, pipeline: "Pipeline") -> Tensor:
        ctx.pipeline = pipeline
        ctx.save_for_backward(output)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, unused: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        # The last stage has applied weights and scales.
        gradient = ctx.pipeline._receive_gradient(output)
        return None, gradient if ctx.needs_input_grad[1] else None, None, None


class _NeighbourFailed(Exception):
    """A header that says that neither hidden states nor a gradient follow."""


class Pipeline:
    """The stages of one replica, seen from one of them.

    Args:
        stage: of this rank.
        stages: its ranks are the stages, in order.

    Attributes:
        stages: as above; the caller replaces it by that of the next groups after a rank has failed.
        is_scheduled: `passes` runs, and expects the task's own loss, which ends with the stage.
    """

    def __init__(self, stage: PipelineStage, stages: World) -> None:
        self.stage = stage
        self.stages = stages
        self.is_scheduled = False
        self._shares = True
        # The previous stage waits for the gradient of a `loss`.
        self._owes_gradient = False
        self._index = stage.index
        self._device = stages.device
        self._timeout = timedelta(seconds=stages.timeout)
        self._header_bytes = 8 * _NUMBERS + generator_states(stages.device).numel()
        # Has the graphs begin on every stage, also where nothing is trained.
        self._anchor = torch.zeros((), device=stages.device, requires_grad=True)

    # Asked each time, as `stages` changes.
    @property
    def _group(self) -> ProcessGroup | None:
        return self.stages.group

    @property
    def _control(self) -> ProcessGroup | None:
        return self.stages.control

    def loss(self, compute: Callable[[], Loss]) -> Loss:
        """Return the task's loss of a micro-batch, one stage after the other. Collective over the stages.

        Its backward, on every stage, exchanges gradients with the neighbours. For trials and evaluations; a step's
        passes overlap, see `passes`.

        Args:
            compute: calls the task's loss with this stage's model; returns the loss, 0-dim, and the task's numbers.

        Raises:
            PeerError: another stage failed.
        """
        output, values = self._compute(compute, _values_of)  # collective
        if self._index.is_last:
            own: Loss = output
            return own
        if values is None:
            return torch.zeros((), device=self._device), {}
        value, dtype, numbers = values
        loss = torch.tensor(value, dtype=getattr(torch, dtype), device=self._device)
        if torch.is_grad_enabled():
            loss = _LossElsewhere.apply(self._anchor, output, loss, self)  # type: ignore[no-untyped-call]
        return loss, numbers

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Let the previous stage know if the backward of a `loss` fails, which runs in this context."""
        self._owes_gradient = not self._index.is_first
        try:
            yield
        except Exception:
            # What fails after the gradient is this stage's alone.
            if self._owes_gradient:
                self._send_code(_FAILED, self._index.index - 1)
            raise
        finally:
            self._owes_gradient = False

    def _send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of this stage's input, in the backward of a `loss`."""
        self._owes_gradient = False
        self._send_code(_GRADIENT, self._index.index - 1)
        # Blocks until the previous stage has it, which waits for it.
        self._transfer(gradient=gradient)

    def _receive_gradient(self, output: Tensor) -> Tensor:
        """Receive the gradient of this stage's output, in the backward of a `loss`."""
        try:
            # Blocks, as there is no backward without the gradient.
            self._receive_header(self._index.index + 1)
        except _NeighbourFailed as failure:
            error = LockstepError("a later stage of the pipeline failed; its own error says why")
            error.relayed = True
            raise error from failure
        gradient = self._transfer(backward_of=_InFlight(0, None, output))[1]
        assert gradient is not None
        return gradient

    def metrics(self, compute: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what a task computes from the model's output, as `loss` does. Collective over the stages.

        Args:
            compute: calls the task's method with this stage's model; returns name -> a number or (sum, count).

        Returns:
            Before the last stage, numbers; {} if the stages do not share values.
        """
        with torch.no_grad():
            metrics, values = self._compute(compute, _numbers_of)  # collective
        if self._index.is_last:
            own: Mapping[str, Any] = metrics
            return own
        return {} if values is None else values

    @contextmanager
    def without_sharing(self) -> Iterator[None]:
        """Leave losses and metrics on the last stage, so that no stage waits for it. Others get 0 and {}."""
        self._shares = False
        try:
            yield
        finally:
            self._shares = True

    def _compute(self, compute: Callable[[], Any], encode: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Run one micro-batch through the stages. Collective over them.

        Args:
            compute: of this stage's model.
            encode: what the last stage's `compute` returned -> JSON values.

        Returns:
            This stage's output, and the last stage's values; None if they are not shared.

        Raises:
            PeerError: another stage failed.
        """
        output: Any = None
        values: Any = None
        error: Exception | None = None
        try:
            output = self._run_stage(compute)
            if self._shares and self._index.is_last:
                values = encode(output)
        except _NeighbourFailed as failure:
            self._send_failure()
            if not self._shares:
                raise LockstepError("an earlier stage of the pipeline failed; its own error says why") from failure
        except Exception as failure:
            self._send_failure()
            if not self._shares:
                raise
            error = failure
        if not self._shares:
            return output, None
        with _disable_current_modes():
            # Every stage returns the same numbers, and learns of an error. On the host.
            rows = self.stages.gather_checked(values, error)  # collective
        return output, rows[-1]

    def _run_stage(self, compute: Callable[[], Any]) -> Any:
        """Receive, compute this stage, send; return its output."""
        # A trial watches the loss by a mode, for which these transfers are not the task's.
        with _disable_current_modes():
            # Blocks until the previous stage has computed the micro-batch.
            arrival = self._transfer(receives_next=True)[0]
        if arrival is not None and torch.is_grad_enabled():
            hidden = _ReceivedInput.apply(  # type: ignore[no-untyped-call]
                self._anchor, arrival.hidden.detach(), self
            )
            arrival = arrival._replace(hidden=hidden)
        output, generators = self.stage.forward(compute, arrival)
        with _disable_current_modes():
            # Blocks until the next stage is ready for it.
            self._transfer(output=output, generators=generators)
        return output

    def _send_failure(self) -> None:
        """Tell the next stage that nothing follows."""
        if not self._index.is_last:
            self._send_code(_FAILED, self._index.index + 1)

    def _send_code(self, code: int, rank: int) -> None:
        """Send a header without hidden states."""
        header = torch.zeros(self._header_bytes, dtype=torch.uint8, device="cpu")
        header[:8] = as_bytes(torch.tensor([code], device="cpu"))
        # Blocks until the other stage has read it, which does nothing else before.
        with _disable_current_modes():
            collectives.wait(collectives.isend(header, rank, group=self._control), self._timeout)

    def passes(
        self, count: int, loss: Callable[[int], Tensor], backward: Callable[[int, Tensor], None]
    ) -> list[Tensor]:
        """Run forward and backward of a step's micro-batches. Collective over the stages.

        Args:
            count: of micro-batches, the same on every stage.
            loss: number of a micro-batch -> its loss; seeds the generators first.
            backward: (number, loss) -> None; accumulates gradients. Before the last stage the loss is a number whose
                backward continues with the gradient from the next stage, whatever it is multiplied by.

        Returns:
            The losses, detached, on the last stage; [] on the others.
        """
        self.is_scheduled = True
        try:
            return self._one_forward_one_backward(count, loss, backward)
        finally:
            self.is_scheduled = False

    def _one_forward_one_backward(
        self, count: int, loss: Callable[[int], Tensor], backward: Callable[[int, Tensor], None]
    ) -> list[Tensor]:
        warmup = min(count, self._index.stages - 1 - self._index.index)
        flights: deque[_InFlight] = deque()
        losses: list[Tensor] = []
        arrival: StageInput | None = None
        for number in range(count):
            if number <= warmup:
                # Blocks: there is nothing else to do before the first micro-batches arrive.
                arrival = self._transfer(receives_next=True)[0]
            flight, generators = self._forward(number, loss, arrival)
            flights.append(flight)
            arrival = None
            if number < warmup:
                # Blocks until the next stage, which does nothing else yet, has it.
                self._transfer(output=flight.output, generators=generators)
                continue
            # Blocks for the gradient, without which there is no backward.
            gradient = self._transfer(output=flight.output, generators=generators, backward_of=flights[0])[1]
            done = flights.popleft()
            left = self._backward(done, gradient, backward, losses)
            # Blocks until the previous stage has the gradient and has sent its next micro-batch.
            arrival = self._transfer(gradient=left, receives_next=number + 1 < count)[0]
        while flights:
            # Blocks for the gradient: what is left are backwards.
            gradient = self._transfer(backward_of=flights[0])[1]
            left = self._backward(flights.popleft(), gradient, backward, losses)
            # Blocks until the previous stage has it, which waits for it.
            self._transfer(gradient=left)
        return losses

    def _forward(
        self, number: int, loss: Callable[[int], Tensor], arrival: StageInput | None
    ) -> tuple[_InFlight, Tensor | None]:
        """Run a micro-batch's forward; return it with the generators' states."""
        output, generators = self.stage.forward(lambda: loss(number), arrival)
        hidden = None if arrival is None else arrival.hidden
        return _InFlight(number, hidden, output), generators

    def _backward(
        self, flight: _InFlight, gradient: Tensor | None, backward: Callable[[int, Tensor], None], losses: list[Tensor]
    ) -> Tensor | None:
        """Run a micro-batch's backward; return the gradient for the previous stage."""
        if gradient is None:
            loss = flight.output
            losses.append(loss.detach())
        else:
            loss = _FromGradient.apply(flight.output, gradient)  # type: ignore[no-untyped-call]
        # Nothing before the end of a frozen first stage is trained.
        if loss.requires_grad:
            backward(flight.number, loss)
        if flight.hidden is None:
            return None
        if flight.hidden.grad is None:
            return torch.zeros_like(flight.hidden)
        return flight.hidden.grad.contiguous()

    def _transfer(
        self,
        *,
        output: Tensor | None = None,
        generators: Tensor | None = None,
        gradient: Tensor | None = None,
        backward_of: _InFlight | None = None,
        receives_next: bool = False,
    ) -> tuple[StageInput | None, Tensor | None]:
        """Exchange tensors with the neighbours, as far as there are any.

        Args:
            output, generators: hidden states and generator states, for the next stage.
            gradient: for the previous stage.
            backward_of: receive the gradient of its output from the next stage.
            receives_next: receive a micro-batch from the previous stage.

        Returns:
            The micro-batch and the gradient.
        """
        index, first, last = self._index.index, self._index.is_first, self._index.is_last
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        sent_header = None
        if output is not None and generators is not None and not last:
            hidden = output.detach().contiguous()
            header = _write_header(hidden, generators)
            # On the host's group and before the tensors, so that the receiver knows what to prepare.
            sent_header = collectives.isend(header, index + 1, group=self._control)
            sends.append((hidden, index + 1))
        if gradient is not None:
            sends.append((gradient, index - 1))
        received = None
        if backward_of is not None and not last:
            received = torch.empty_like(backward_of.output, memory_format=torch.contiguous_format)
            receives.append((received, index + 1))
        arrival = None
        if receives_next and not first:
            arrival = self._prepare_arrival()
            receives.append((arrival.hidden, index - 1))
        # Blocks, see the callers: each of them needs what it receives for the next thing that it computes.
        collectives.exchange(sends, receives, self._timeout, group=self._group)
        if sent_header is not None:
            # Does not block: the receiver read it before it took the tensors.
            collectives.wait(sent_header, self._timeout)
        if arrival is not None and torch.is_grad_enabled():
            arrival.hidden.requires_grad_()
        return arrival, received

    def _prepare_arrival(self) -> StageInput:
        """Receive a micro-batch's header, and return the states in it with memory for the hidden states."""
        # Blocks until the previous stage has issued its forward; without the header the shape is not known.
        header = self._receive_header(self._index.index - 1)
        code, dimensions, *sizes = _numbers_in(header)
        hidden = torch.empty(sizes[:dimensions], dtype=_DTYPES[code], device=self._device)
        return StageInput(hidden, header[8 * _NUMBERS :])

    def _receive_header(self, rank: int) -> Tensor:
        """Receive a header from a neighbour. Raises _NeighbourFailed. Blocks until it is sent."""
        header = torch.empty(self._header_bytes, dtype=torch.uint8)
        collectives.recv(header, rank, self._timeout, group=self._control)
        if _numbers_in(header)[0] == _FAILED:
            raise _NeighbourFailed
        return header

    def add_tied(self, model: nn.Module) -> None:
        """Add the gradients of weights that both ends hold, on both. Collective over the two.

        Once a step: a sum over the replicas and one over the ends may follow each other in any order but rounding.
        """
        ends = {0: self._index.stages - 1, self._index.stages - 1: 0}
        if self._index.index not in ends:
            return
        parameters = dict(model.named_parameters())
        for name in self.stage.tied:
            parameter = parameters[name]
            gradient = None if parameter.grad is None else local_of(parameter.grad)
            own = torch.zeros_like(local_of(parameter)) if gradient is None else gradient.contiguous()
            other = torch.empty_like(own)
            peer = ends[self._index.index]
            # Blocks until the other end has finished its backwards; the update needs the sum.
            collectives.exchange([(own, peer)], [(other, peer)], self._timeout, group=self._group)
            # The first stage's first on both, so that both get the same bits.
            total = own + other if self._index.is_first else other + own
            if gradient is None:
                parameter.grad = gradient_like(parameter, total)
            else:
                gradient.copy_(total)


def _numbers_in(header: Tensor) -> list[int]:
    """Return a header's dtype or code, number of dimensions, and dimensions."""
    numbers: list[int] = from_bytes(header[: 8 * _NUMBERS], torch.int64, [_NUMBERS]).tolist()
    return numbers


def _values_of(output: Loss) -> tuple[float, str, Mapping[str, Any]]:
    """Return a loss, its dtype and its numbers as JSON values. Waits for the device."""
    loss, numbers = output
    return float_of(loss.detach()), str(loss.dtype).removeprefix("torch."), _numbers_of(numbers)


def _numbers_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and (sum, count) as JSON values. Waits for the device.

    Raises:
        ConfigError: one of them is neither.
    """
    values: dict[str, Any] = {}
    for name, value in numbers.items():
        parts = list(value) if isinstance(value, tuple | list) else [value]
        if not all(map(is_number, parts)):
            raise ConfigError(
                f"--parallel.pipeline: the task's metric '{name}' is {describe_value(value)}, which the last stage "
                "cannot send to the others; return (sum, count)"
            )
        values[name] = [float_of(part) for part in parts] if len(parts) > 1 else float_of(parts[0])
    return values


def _write_header(hidden: Tensor, generators: Tensor) -> Tensor:
    """Return dtype, shape and the generators' states as bytes on the host."""
    if hidden.dtype not in _DTYPES or hidden.ndim > _DIMENSIONS:
        raise LockstepError(
            f"a pipeline's hidden states are {hidden.dtype} with {hidden.ndim} dimensions; it sends "
            f"float32, float64, bfloat16 and float16 with at most {_DIMENSIONS}"
        )
    sizes = [*hidden.shape, *[0] * (_DIMENSIONS - hidden.ndim)]
    numbers = torch.tensor([_DTYPES.index(hidden.dtype), hidden.ndim, *sizes], device="cpu")
    return torch.cat([as_bytes(numbers), generators])
