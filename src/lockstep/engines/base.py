"""What an engine is: the protocol, what it is made from, and what its step reports.

An engine holds a model and an optimizer and knows how both are split over the ranks. It knows no data, loop or files.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.engine_options import EngineOptions
from lockstep.config.sections import Fp16
from lockstep.data.loader import failure
from lockstep.distributed.balance import Sharing
from lockstep.engines.optimizers import NO_NORMS, GradientNorms
from lockstep.errors import DataError, LockstepError, said
from lockstep.tensors import is_dtensor

__all__ = [
    "NOTHING",
    "Engine",
    "Evaluate",
    "MakeOptimizer",
    "MakePenalty",
    "Penalty",
    "ScaledBackward",
    "Settings",
    "StepResult",
    "at_rest",
    "set_extra",
    "set_momentum",
]


def set_extra(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Hands each module with an extra state the tensor `model/NAME._extra_state` of `state`.

    To copy into what `get_extra_state` returned is not enough: that may have been made for the call.
    """
    for name, module in model.named_modules():
        found = state.get(f"model/{name}._extra_state" if name else "model/_extra_state")
        if found is not None:
            module.set_extra_state(found)


MakeOptimizer = Callable[[nn.Module], Optimizer]
# The model as its engine holds it -> what is added to the step's loss once: 0-dim.
MakePenalty = Callable[[nn.Module], Tensor | None]

_OWN = "own_momentum"  # a group's key
NOTHING: AbstractContextManager[None] = nullcontext()


class _NormAndApplied(NamedTuple):
    norm: Tensor
    applied: bool | None


class StepResult(_NormAndApplied):
    """The result of an update: `norm, applied = engine.step()`.

    Attributes:
        norm: the gradient's 2-norm before clipping; 0-dim, unread.
        applied: whether it was applied; None where the device alone knows: it is where `norm` < the step's limit.
        penalty: what was added to the loss once for the step, 0-dim, unread; None: nothing was.
    """

    penalty: Tensor | None = None


class Evaluate(Protocol):
    """The loss of a step, for an optimizer that evaluates it several times. Without the penalty. Collective."""

    def loss(self) -> Tensor:
        """Give the loss of the pass that filled `.grad`, over all ranks: 0-dim. Waits for the device."""

    def again(self) -> Tensor:
        """Repeat the pass at the present parameters, and give the step's loss over all ranks, 0-dim.

        `.grad` is cleared before it; this rank's backwards fill it, and the engine is to exchange it. Waits for the
        device.
        """


def _log(line: str) -> None:
    logging.getLogger("lockstep").info(said(line))


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine is to work; the same for all.

    Attributes:
        clip: largest 2-norm of the gradient; 0 does not clip.
        exact: M, the micro-batches of the fixed tree (see engines/exact.py); 0: gradients are summed as the
            backend does.
        sharing: which micro-batches each rank computes in the present step; None: all as many, in as many slots.
        loss_scaling: how to scale the loss, and skip a step whose gradients overflow: for float16; None: not.
        blocks: the model's repeated blocks, in order, where the caller knows them.
        options: the engine's own.
        say: one line for the person, on every rank; the receiver prints rank 0's.
        gradients: takes norms of the gradient by block, in the steps that ask for them.
        penalty: what is added to the loss once a step, of the parameters alone; None: nothing.
        once: the flag under which an optimizer cannot have a step's pass repeated; "": there is none.
        wrapper: what an engine of before had put around the model, which the caller may hold, to be used again.
    """

    clip: float
    exact: int
    sharing: Sharing | None
    loss_scaling: Fp16 | None
    blocks: tuple[nn.Module, ...]
    options: EngineOptions
    say: Callable[[str], None] = _log
    gradients: GradientNorms = NO_NORMS
    penalty: MakePenalty | None = None
    once: str = ""
    wrapper: nn.Module | None = None


class Engine(Protocol):
    """How the model is split and stepped.

    Attributes:
        model: call this for the forward.
    """

    model: nn.Module

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        """Surround forward and backward of one micro-batch; gradients are exchanged in a pass's last, where they can.

        Args:
            last: it is this rank's last of the pass.
            counts: keep what the forward moves in buffers; False: a pass that is repeated, which leaves no trace.
        """

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Adds the gradient of `weight * loss`. After the last micro-batch the gradients are SUMMED over the ranks.

        A weight of 0 is an empty slot, which is there only so that collectives line up.
        """

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        """Ends the step: clips, updates, clears the gradients and whatever else was gathered over the step.

        Args:
            factor: of each parameter group's base rate; None leaves the groups' `lr` as they are.
            limit: a norm that is not finite or not below it is not applied: parameters, optimizer states and buffers
                stay as they were before the step. -inf leaves the step out whatever its norm.
            momentum: of every parameter group, adam's first beta; None: each group's own, as before the first number.
            evaluate: for an optimizer that evaluates several times in a step; None: it cannot.
        """

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """Try backward, penalty, norm, clip and the optimizer's step, and put everything back. Collective.

        Parameters (copies of which lie on the host), the optimizer's states and numbers, gradients and what the engine
        counts are as before; buffers, the task's tensors and generators are the caller's. A rank works alone on its
        own gradients. In `fsdp` under exact mode the gradients are zeros and `loss` is not computed, since a backward
        of one micro-batch has no place in the tree; `deepspeed` and a task with own steps do nothing, since neither
        can take a step back.

        Args:
            loss: computes the loss of one micro-batch with `model`, with a graph.

        Raises:
            DataError: the backward or the optimizer's `step` failed; it names the line.
            ConfigError: what the optimizer asks for does not go with the engine.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resume needs, by plain names: `model/NAME`, `optimizer/NAME/KEY`. Not copies."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes a state over; tensors that `state_dict()` itself handed out are in place already."""


def set_momentum(group: dict[str, Any], momentum: float | None) -> None:
    """Gives a parameter group its momentum, under the name that torch's optimizers have for it, where it has one.

    None: the one that it had before the first call with a number. So what a step has depends on that step alone.
    """
    name = next((name for name in ("betas", "momentum") if name in group), None)
    if name is None or (momentum is None and _OWN not in group):
        return
    own = group.setdefault(_OWN, group[name])
    if momentum is None:
        group[name] = own
    else:
        group[name] = (momentum, *own[1:]) if name == "betas" else momentum


def at_rest(model: nn.Module) -> None:
    """After forwards that no backward follows: fsdp keeps its outermost unit gathered for one, and splits it here.

    Who looks at the parameters then finds them as the optimizer has them.
    """
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


class ScaledBackward:
    """`loss.backward(roots(loss, factor))` has the gradients of `factor * loss`; the factors' tensors are made once.

    Where the loss is NaN or infinite the root is NaN, and so is every gradient, on every rank that it is summed with:
    the update is left out then, though the loss's own gradient may be finite. No device is waited for.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, float], Tensor] = {}

    def __call__(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """A 0-dim tensor like the loss; a factor that is a tensor, 0-dim, is on its device."""
        if isinstance(factor, Tensor):
            return torch.add(factor.to(loss.dtype), loss.detach(), alpha=0)
        found = self._made.get((loss.dtype, factor))
        if found is None:
            if len(self._made) > 16:  # loss scales that are over
                self._made.clear()
            found = self._made[loss.dtype, factor] = torch.full_like(loss, factor, requires_grad=False).detach()
        return torch.add(found, loss.detach(), alpha=0)  # 0 * inf is NaN; else nothing is added


@final
class Penalty:
    """Every rank computes it of the parameters that it holds, so that it counts once whatever the ranks.

    Args:
        compute: the task's.
        model: without what an engine puts around it, so that no hook of a reducer sees the gradient.
    """

    def __init__(self, compute: MakePenalty, model: nn.Module) -> None:
        self._compute, self._model = compute, model
        self._roots = ScaledBackward()
        self._first = True

    def add(self, scale: float | Tensor) -> Tensor:
        """Add its gradient to the parameters' `.grad`.

        Where it is not finite, every gradient is NaN, as with a loss.

        Args:
            scale: of the loss.

        Returns:
            its value: 0-dim, without a graph, alike on all ranks.

        Raises:
            DataError: it failed, or is no 0-dim tensor of the parameters; or the first one is not finite.
        """
        with torch.enable_grad():
            value = self._value()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        root = self._roots(value, scale)
        for parameter, found in zip(trained, torch.autograd.grad(value, trained, root, allow_unused=True), strict=True):
            if found is None:
                continue
            if is_dtensor(parameter) and is_dtensor(found):
                found = found.redistribute(parameter.device_mesh, parameter.placements)
            if parameter.grad is None:
                parameter.grad = found
            elif parameter.grad.is_sparse:
                parameter.grad = found + parameter.grad
            else:
                parameter.grad.add_(found)
        return value.detach()

    def _value(self) -> Tensor:
        try:
            found = self._compute(self._model)
            if is_dtensor(found):  # type: ignore[arg-type]
                found = found.full_tensor()  # collective
        except LockstepError:
            raise
        except Exception as error:
            raise DataError(f"the task's `penalty` failed: {failure(error)}; mend it there") from error
        if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
            raise DataError(
                f"the task's `penalty` returned {_described(found)}: it must return one number, a 0-dim float tensor"
            )
        if not found.requires_grad:
            raise DataError(
                "the task's `penalty` returned a tensor without a graph, so it changes nothing: compute it from the "
                "model's trained parameters, without detach() and .data"
            )
        if self._first:
            self._first = False
            if not bool(found.isfinite()):  # waits for the device, in the first step
                raise DataError(f"the task's `penalty` is {found.item()} at the first parameters: it must be finite")
        return found


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
