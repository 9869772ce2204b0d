"""The engine protocol and the result of an engine's step.

An engine owns a model and an optimizer, and knows how both are split over the ranks. It knows nothing of data, the
loop or files. Shared by the engines: `ScaledBackward` (a backward of a scaled loss), `Penalty` (a term of the loss
that is added once a step) and `set_extra`.
"""

import importlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.overrides import has_torch_function_unary

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.membership import translate_errors
from lockstep.distributed.world import World
from lockstep.engines.request import EngineRequest, MakeOptimizer, MakePenalty
from lockstep.errors import DataError, LockstepError, error_line
from lockstep.tensors import is_dtensor

__all__ = [
    "NOTHING",
    "BareEngine",
    "Engine",
    "Evaluate",
    "ForwardingEngine",
    "Masters",
    "Penalty",
    "ScaledBackward",
    "StepResult",
    "at_rest",
    "bare_engine",
    "set_extra",
]


def set_extra(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Pass each module with an extra state its tensor `model/NAME._extra_state` from `state`.

    Copying into the tensor that `get_extra_state` returned is not enough: a module may build it for each call.
    """
    for name, module in model.named_modules():
        tensor = state.get(f"model/{name}._extra_state" if name else "model/_extra_state")
        if tensor is not None:
            module.set_extra_state(tensor)


NOTHING: AbstractContextManager[None] = nullcontext()


# Not frozen: every step makes one, and making a frozen one takes twice as long.
@dataclass(slots=True)
class StepResult:
    """The result of an update: `norm, applied = engine.step()`.

    Attributes:
        norm: 2-norm of the gradient before clipping; 0-dim, not read from the device.
        applied: whether the update was applied; None where only the device knows: it was if `norm` < the step's limit.
        penalty: the value added to the loss once for the step, 0-dim, not read; None: no penalty.
    """

    norm: Tensor
    applied: bool | None
    penalty: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        """Unpack the norm and whether the update was applied."""
        return iter((self.norm, self.applied))


class Evaluate(Protocol):
    """Evaluate a step's loss again, for optimizers with a closure. Excludes the penalty. Collective."""

    def loss(self) -> Tensor:
        """Return the loss of the pass that filled `.grad`, over all ranks.

        0-dim. Waits for the device.
        """

    def again(self) -> Tensor:
        """Repeat the pass at the current parameters; return the loss over all ranks, 0-dim.

        The caller clears `.grad` first. The pass fills it with this rank's gradients; the engine then exchanges them.
        Waits for the device.
        """


class Engine(Protocol):
    """A model and its optimizer, split over the ranks and updated once a step.

    Attributes:
        model: call this for the forward.
    """

    model: nn.Module

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        """Wrap the forward and backward of one micro-batch.

        Gradients are exchanged in the last micro-batch of a pass, by engines that can defer the exchange.

        Args:
            last: this is the rank's last micro-batch of the pass.
            counts: keep the forward's changes to buffers; False for a repeated pass, which must leave no trace.
        """

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add the gradient of `weight * loss`.

        After the last micro-batch the gradients are SUMMED over the ranks, not averaged. A weight of 0 marks an empty
        slot, which only keeps the collectives of the ranks aligned.
        """

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        """End the step: clip, update, and clear gradients and other per-step state.

        Args:
            factor: multiplies each parameter group's base rate; None leaves the groups' `lr` unchanged.
            limit: an update whose norm is not finite, or not below the limit, is skipped: parameters, optimizer states
                and buffers stay as they were before the step. -inf always skips.
            momentum: for every parameter group (Adam's first beta); None: each group's own, from before the first
                override.
            evaluate: evaluates the loss again, for optimizers with a closure; None: not possible.
        """

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """Try a backward, penalty, norm, clip and optimizer step, then restore everything. Collective.

        Restores the parameters (from copies in host memory), the optimizer's states and settings, gradients, and the
        engine's counters. The caller restores buffers, the task's tensors and random generators. Each rank steps on
        its own gradients, without an exchange. `fsdp` in exact mode uses zero gradients and does not compute `loss`,
        because the backward of a single micro-batch has no place in the tree. `deepspeed`, and a task with its own
        steps, do nothing: neither can undo a step.

        Args:
            loss: computes the loss of one micro-batch with `model`, with a graph.

        Raises:
            DataError: the backward or the optimizer's `step` failed; names the line.
            ConfigError: the optimizer needs something that the engine does not support.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything a resume needs, by plain name: `model/NAME`, `optimizer/NAME/KEY`. Not copies."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state; tensors that `state_dict()` itself returned are already in place."""


class Masters(Protocol):
    """The master weights that an optimizer updates, where they are not the model's parameters."""

    def parts(self) -> list[Tensor]:
        """Return this rank's parts, which the optimizer updates in place."""

    def copy_weights(self) -> dict[str, Tensor]:
        """Return copies of the trained weights by parameter name, as in `state_dict()`. Collective."""

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `copy_weights`, or plain tensors that every rank holds whole. Collective."""

    def show(self) -> None:
        """Copy the master weights into the model's parameters. Collective."""


class BareEngine(Engine):
    """The base of the engines: a model split over the ranks, without wrappers.

    The static methods answer for an engine that is not built yet. The defaults are those of whole replicas of the
    model.

    Args:
        model: the plain module.
        optimizer: builds the optimizer from the model as the engine holds it.
        world: the ranks.
        request: checked by `registry.make_engine`.

    Attributes:
        masters: the weights that the optimizer updates, where they are not the model's parameters.
    """

    masters: Masters | None = None

    @abstractmethod
    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None: ...

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return NOTHING

    def apart(self) -> AbstractContextManager[Callable[[Tensor, float], None]]:
        """Return a context with a backward (loss, weight) outside of steps, which leaves no trace but `.grad`.

        With sharded parameters it is collective, and sums over the ranks; else it is of this rank's plain module.
        """
        return nullcontext(_backward)

    def copies(self) -> dict[str, Tensor]:
        """Return totals of the copies that updates have replaced, by parameter; {}: its updates replace none."""
        return {}

    @staticmethod
    def check_optimizer(optimizer: Optimizer, *, exact: bool) -> None:
        """Raise ConfigError if the optimizer does not work with this engine.

        Args:
            exact: exact mode with several ranks.
        """

    @staticmethod
    def check_planned(options: EngineOptions) -> None:
        """Raise ConfigError if the engine's memory cannot be estimated without its devices."""

    @staticmethod
    def explain_no_backward(*, exact: bool) -> str:
        """Return why it has no backward outside of a step; "": see `apart`.

        Args:
            exact: it sums the gradients of several ranks in the fixed tree.
        """
        return ""

    @staticmethod
    def replica_size(options: EngineOptions, world: World) -> int:
        """Return the number of ranks that together have one copy of the states."""
        return 1

    @staticmethod
    def has_replicas(options: EngineOptions) -> bool:
        """Whether the options leave more than one copy of the states, if the engine survives the loss of a rank."""
        return True

    @staticmethod
    def explain_no_undo(optimizer: Optimizer | None) -> str:
        """Return why it cannot leave a step in the middle after a rank failed; "": it can."""
        return ""

    @staticmethod
    def leave_groups(model: nn.Module) -> list[ProcessGroup]:
        """Discard what the engine left in its model after a rank failed; return the groups to leave."""
        return []

    @staticmethod
    def count_exchanged(options: EngineOptions, parameters: float, trained: float) -> tuple[float, float]:
        """Return the bytes that a rank gathers per micro-batch and sums per step.

        Args:
            options: the engine's.
            parameters: bytes of the model's parameters.
            trained: bytes of those that are trained.
        """
        return 0.0, trained

    @staticmethod
    def least_held(options: EngineOptions, size: int, totals: tuple[float, float, float]) -> float:
        """Return a lower bound of a rank's bytes at the end of a backward.

        Args:
            options: the engine's.
            size: the number of ranks.
            totals: bytes of parameters, gradients and optimizer states of the whole model.
        """
        return sum(totals)


def _backward(loss: Tensor, weight: float) -> None:
    # torch gives `backward` no types.
    loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]


class ForwardingEngine:
    """An engine around another one, to which it passes every call; a subclass overrides what it changes.

    Attributes:
        inner: the engine inside it.
        model: that of `inner`.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.model: nn.Module = inner.model

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self.inner.accumulate(last, counts)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self.inner.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        return self.inner.step(factor, limit, momentum, evaluate)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self.inner.rehearse(loss)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_state_dict(state)

    def undo_step(self) -> None:
        """Undo an unfinished step, except changes to parameters."""
        if isinstance(self.inner, ForwardingEngine):
            self.inner.undo_step()

    def kinds(self) -> dict[str, str]:
        """Map the state's name to a description, for tensors that forwards write and unfrozen parameters."""
        if isinstance(self.inner, ForwardingEngine):
            return self.inner.kinds()
        return {}


def bare_engine(engine: Engine) -> Engine:
    """Return the engine inside all wrappers."""
    while isinstance(engine, ForwardingEngine):
        engine = engine.inner
    return engine


def at_rest(model: nn.Module) -> None:
    """Reshard parameters after forwards without a backward.

    fsdp keeps its outermost unit gathered for the backward. Afterwards parameters are again those that the optimizer
    has.
    """
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


class ScaledBackward:
    """Scaled backwards: `roots.run(loss, factor)` computes gradients of `factor * loss`.

    Where the loss is NaN or infinite, the root is NaN. So is every gradient, on every rank that sums it, and the
    update is skipped even if the loss's own gradient would be finite. Factor tensors are cached. Does not wait for the
    device.
    """

    def __init__(self) -> None:
        self._cache: dict[tuple[torch.dtype, float], Tensor] = {}

    def run(self, loss: Tensor, factor: float | Tensor) -> None:
        """Add the gradients of `factor * loss` to `.grad`."""
        root = self(loss, factor)
        if type(loss) is not Tensor or has_torch_function_unary(loss) or _backward_is_replaced():
            # The public call serves subclasses of Tensor and tools that replace it. torch gives it no types.
            loss.backward(root)  # type: ignore[no-untyped-call]
            return
        # Private to torch. `Tensor.backward` first checks that the root fits, which takes a tenth of a small model's
        # backward.
        _engine_run_backward((loss,), (root,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def __call__(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """Return the root of a backward: a 0-dim tensor of the loss's dtype.

        A tensor `factor` is 0-dim, on the loss's device.
        """
        if isinstance(factor, Tensor):
            return torch.add(factor.to(loss.dtype), loss.detach(), alpha=0)
        root = self._cache.get((loss.dtype, factor))
        if root is None:
            # Dynamic loss scaling leaves behind scales that never return.
            if len(self._cache) > 16:
                self._cache.clear()
            root = self._cache[loss.dtype, factor] = torch.full_like(loss, factor, requires_grad=False).detach()
        # 0 * inf is NaN, so a loss that is not finite makes the root NaN. For a finite loss nothing is added.
        return torch.add(root, loss.detach(), alpha=0)


def _backward_is_replaced() -> bool:
    """Whether a tool wraps torch's backward, as a recorder of what a program calls does."""
    # The names of the modules in which torch defines these functions; a replacement comes from another one.
    public = (Tensor.backward, "torch._tensor"), (torch.autograd.backward, "torch.autograd")
    return any(getattr(call, "__globals__", {}).get("__name__") != module for call, module in public)


def _replicating(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let shards meet tensors that every rank holds, such as a penalty's first weights: torch refuses to mix them."""
    if not any(is_dtensor(parameter) for parameter in parameters):
        return NOTHING
    # Imported late: it takes long, and most runs have no shards.
    tensors = importlib.import_module("torch.distributed.tensor.experimental")
    context: AbstractContextManager[None] = tensors.implicit_replication()
    return context


@final
class Penalty:
    """A term of the loss that depends on the parameters alone, added once a step.

    Every rank computes it from the parameters that it holds, so it counts once for any number of ranks.

    Args:
        compute: the task's function.
        model: without the engine's wrapper, so that no reducer hook sees this gradient.
    """

    def __init__(self, compute: MakePenalty, model: nn.Module) -> None:
        self._compute = compute
        self._model = model
        self._roots = ScaledBackward()
        self._first = True

    def add(self, scale: float | Tensor) -> Tensor | None:
        """Add the penalty's gradient to the parameters' `.grad`.

        If the penalty is not finite, every gradient becomes NaN, as with a loss.

        Args:
            scale: scale of the loss.

        Returns:
            The value: 0-dim, without a graph, the same on all ranks; None: this step has no penalty.

        Raises:
            DataError: the penalty failed, is not a 0-dim tensor that depends on the parameters, or is not finite the
                first time.
        """
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        with _replicating(parameters):
            with torch.enable_grad():
                value = self._value()
            if value is None:
                return None
            root = self._roots(value, scale)
            gradients = torch.autograd.grad(value, parameters, root, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            if is_dtensor(gradient) and is_dtensor(parameter):
                # A parameter that fsdp keeps whole needs the whole gradient. All ranks of its mesh take part, in one
                # order.
                gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
            elif is_dtensor(gradient):  # of a parameter that fsdp holds whole
                gradient = collectives.full_tensor(gradient)  # collective
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad.is_sparse:
                parameter.grad = gradient + parameter.grad
            else:
                parameter.grad.add_(gradient)
        return value.detach()

    def _value(self) -> Tensor | None:
        try:
            with translate_errors():
                value = self._compute(self._model)
            if value is None:
                return None
            if is_dtensor(value):
                # The task computed the penalty from shards. All ranks of the mesh need its value.
                value = collectives.full_tensor(value)  # collective
        except LockstepError:
            raise
        except Exception as error:
            raise DataError(f"the task's `penalty` failed: {error_line(error)}; fix it there") from error
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            raise DataError(
                f"the task's `penalty` returned {_describe(value)}: it must return one number, a 0-dim float tensor"
            )
        if not value.requires_grad:
            raise DataError(
                "the task's `penalty` returned a tensor without a graph, so it changes nothing: compute it from the "
                "model's trained parameters, without detach() and .data"
            )
        if self._first:
            self._first = False
            # Waits for the device, in the first step only.
            if not bool(value.isfinite()):
                raise DataError(f"the task's `penalty` is {value.item()} at the first parameters: it must be finite")
        return value


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
