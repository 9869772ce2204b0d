"""What every engine does at the end of a step: the norm, clipping, the optimizer's step, float16's loss scale."""

import math
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.config.sections import Fp16
from lockstep.engines.base import Evaluate, Penalty, Settings, StepResult, set_momentum
from lockstep.engines.closure import Alone, Closure, blame_optimizer, check_dense, step_of, takes_closure
from lockstep.engines.state_dict import Snapshot, drop_states, materialise, named_state, restore_state
from lockstep.errors import ConfigError, LockstepError

__all__ = [
    "DeviceLossScale",
    "LossScale",
    "OptimizerStep",
    "combined",
    "norms_of",
    "total_norm",
    "trained",
]


class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, 3.2).

    The scale is halved by a step whose gradients overflow, which is skipped, and doubled after `loss_scale_window` good
    ones; powers of two, so that scaling and unscaling round nothing. Of `hysteresis` overflows the last alone halves
    it, as DeepSpeed's DynamicLossScaler has it (deepspeed/runtime/fp16/loss_scaler.py). What decides is the gradient's
    global norm, which every rank has alike, so the ranks agree without an exchange. A step that is left out with a
    finite norm says nothing about the scale.

    Args:
        how: see `Config.fp16`.
    """

    def __init__(self, how: Fp16) -> None:
        self._how, self.scale, self._good = how, 2.0**how.initial_scale_power, 0
        self._spared = how.hysteresis - 1  # overflows that leave the scale as it is

    def learn(self, norm: Tensor, applied: bool) -> None:
        """Takes a step's norm, and whether the step was applied."""
        how = self._how
        if not applied:
            if norm.isfinite():  # waits for the device, which the caller did already
                return
            self._good = 0
            if self._spared:
                self._spared -= 1
                return
            if self.scale <= how.min_loss_scale:
                raise _stuck(self.scale)
            self.scale /= 2
            return
        self._good += 1
        grows = self._good == how.loss_scale_window
        if grows:
            self.scale, self._good = self.scale * 2, 0
        if grows or how.consecutive_hysteresis:
            self._spared = how.hysteresis - 1

    def state_dict(self) -> dict[str, Tensor]:
        values = {"scaler/scale": self.scale, "scaler/good_steps": float(self._good)}
        if self._how.hysteresis > 1:
            values["scaler/spared"] = float(self._spared)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.scale, self._good = float(state["scaler/scale"]), int(state["scaler/good_steps"])
        if self._how.hysteresis > 1:
            self._spared = int(state["scaler/spared"])


class _Sent(NamedTuple):
    """A scale on its way to the host."""

    scale: Tensor
    event: Any


class DeviceLossScale:
    """The same rule, value for value, with numbers that stay on the device, so that no step waits for an overflow.

    An overflow at the least scale is raised one step late, when the scale has come to the host, or when the state is
    asked for; the scale is the same on every rank, and so the step in which it is raised.

    Args:
        how: see `Config.fp16`.
        device: where gradients are.

    Attributes:
        scale: 0-dim float64, as Python's numbers are; another tensor after each step.
    """

    def __init__(self, how: Fp16, device: torch.device) -> None:
        self._how, self._device, self._floor = how, device, how.min_loss_scale
        self.scale, self._good = self._number(2.0**how.initial_scale_power), self._number(0.0)
        self._spared = self._full = self._number(how.hysteresis - 1)
        self._half, self._one = self._number(0.5), self._number(1.0)
        self._flying: deque[_Sent] = deque()

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def learn(self, norm: Tensor, applied: Tensor) -> None:
        """Takes a step's norm, and whether the step was applied (0-dim bool). Raises for the step before, see above."""
        finite = norm < math.inf  # a norm is no number, or not below 0
        good = self._good + applied
        grows = good == self._how.loss_scale_window
        shrinks = self._half
        if self._how.hysteresis > 1:
            left = self._spared > 0
            shrinks = torch.where(left, self._one, self._half)
            rest = self._spared - (left & ~finite).to(torch.float64)
            refilled = applied if self._how.consecutive_hysteresis else grows
            self._spared = torch.where(refilled, self._full, rest)
        self.scale = self.scale * torch.where(finite, self._one + grows, shrinks)
        self._good = good * (finite > grows)
        self._send()
        while len(self._flying) > 1:
            self._land()

    def _send(self) -> None:
        event = None
        if self.scale.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._flying.append(_Sent(self.scale.to("cpu", non_blocking=True), event))
        if event:
            event.record()

    def _land(self) -> None:
        sent = self._flying.popleft()
        if sent.event:
            sent.event.synchronize()  # waits for the device, one step behind: it has the next one to do
        if float(sent.scale.numpy()) < self._floor:
            raise _stuck(self._floor)

    def state_dict(self) -> dict[str, Tensor]:
        """As LossScale has it, on the device. Waits for the device: a save has waited for the step's norm already."""
        while self._flying:
            self._land()
        found = {"scaler/scale": self.scale, "scaler/good_steps": self._good}
        found |= {"scaler/spared": self._spared} if self._how.hysteresis > 1 else {}
        return {name: value.clone() for name, value in found.items()}  # which a resume fills

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._flying.clear()
        scale = float(state["scaler/scale"])  # waits for the device, once
        self._floor = min(self._how.min_loss_scale, scale)
        self.scale, self._good = self._number(scale), self._taken(state["scaler/good_steps"])
        if self._how.hysteresis > 1:
            self._spared = self._taken(state["scaler/spared"])

    def _taken(self, value: Tensor) -> Tensor:
        return value.detach().to(self._device, torch.float64, copy=True)


def _like(scale: float | Tensor, other: Tensor) -> float | Tensor:
    """The scale as what `other` can be multiplied by, or divided: of its dtype."""
    return scale.to(other.dtype) if isinstance(scale, Tensor) else scale


def _stuck(scale: float) -> LockstepError:
    return LockstepError(
        f"--precision fp16: gradients are not finite even with the loss multiplied by {scale:g} "
        "(--fp16.min-loss-scale), so this is no overflow; lower --lr, or use --precision bf16 to see where "
        "it begins"
    )


Norm = Callable[[list[Tensor]], Tensor]
_IS_SPARSE = attrgetter("is_sparse")


class OptimizerStep:
    """Clipping and the optimizer's step, resolved once so that a step does little besides computing.

    A group that is added to the optimizer later is taken in at the next step.

    Args:
        model: the plain module.
        optimizer: its groups' `lr` are the base rates.
        settings: clip, and whether the loss is scaled.
        norm: 2-norm of the whole gradient from this rank's gradients; it is the same on every rank.
        norms: that of each gradient by itself, on every rank; None: gradients are whole.
        local: the plain tensor behind a gradient; None where gradients are plain.
        order: of the parameters in the norm, whose bits it decides; None: the optimizer's.
        cleared: the parameters whose gradients a step clears, see `trained`; None: the optimizer's.
        fixed: their gradients alone are exchanged, so no others may come with a group that is added later.
        exchange: sums `.grad` over the ranks after a pass that an optimizer repeats. Collective.
        shared: other ranks take part in such a pass, so one that fails leaves the parameters as before the step.
        once: the flag under which an optimizer cannot have a pass repeated; "": there is none.
        dense: the flag under which gradients must be dense; "": there is none.

    Attributes:
        parameters: those that the optimizer has, in the order of the norm.
        blank: the optimizer's state was made only to be loaded into; a first step drops it and makes its own.
        scale: what a loss must be multiplied by; 1 without loss scaling; 0-dim where the device decides it.
        on_device: whether the device decides what becomes of a step; None: where every parameter is on a CUDA device.
            Whoever sets it must have fused optimizers.
    """

    on_device: ClassVar[bool | None] = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Settings,
        norm: Norm | None = None,
        local: Callable[[Tensor], Tensor] | None = None,
        order: list[Tensor] | None = None,
        cleared: list[Tensor] | None = None,
        fixed: bool = False,
        norms: Callable[[list[Tensor]], list[Tensor]] | None = None,
        exchange: Callable[[], None] = lambda: None,
        shared: bool = False,
        once: str = "",
        dense: str = "",
    ) -> None:
        self.model, self._exchange, self._shared = model, exchange, shared
        fp16 = "the loss scaling of --precision fp16" if settings.loss_scaling else ""
        self._once, self._dense = once or settings.once or fp16, dense
        self._penalty = Penalty(settings.penalty, model) if settings.penalty else None
        self.optimizer, self._clip = optimizer, settings.clip
        self._norm, self._local = norm or total_norm, local
        self._by_block, self._norms = settings.gradients, norms or norms_of
        # torch's fused optimizers leave an update out on the device where `found_inf` is 1, as its GradScaler has it.
        self._kernel: Any = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has one inside
        self._evaluates = takes_closure(self._kernel)
        self._looked = 0  # steps in which the optimizer's writes were looked at closely
        self._silent = False  # it writes parameters without torch's count knowing
        self._repeats: bool | None = None  # it has a pass repeated; None: not known yet
        self.blank = self._by_kernel = False
        self._groups: list[tuple[dict[str, Any], float]] = []
        self.parameters: list[Tensor] = list(order or [])
        self._cleared, self._fixed = dict.fromkeys(cleared or ()), fixed
        self._take_groups()
        self._scaler: LossScale | DeviceLossScale | None = None
        if settings.loss_scaling and self._decides():
            self._scaler = DeviceLossScale(settings.loss_scaling, self.parameters[0].device)
        elif settings.loss_scaling:
            self._scaler = LossScale(settings.loss_scaling)

    def _decides(self) -> bool:
        """Whether the device decides: not where parameters are offloaded to the host, or spread over both."""
        found = bool(self.parameters) and all(parameter.is_cuda for parameter in self.parameters)
        return found if self.on_device is None else self.on_device

    def _take_groups(self) -> None:
        """Takes in the optimizer's groups that are not known yet, each with its present rate as the base."""
        fresh = self.optimizer.param_groups[len(self._groups) :]
        known = set(self.parameters)
        added = [p for group in fresh for p in group["params"] if p not in known]
        if self._fixed and not self._cleared.keys() >= set(added):
            raise LockstepError(
                "a parameter group was added with parameters that did not require gradients when the engine was made, "
                "so theirs are not exchanged; make the engine anew after unfreezing them"
            )
        self._groups += [(group, float(group["lr"])) for group in fresh]
        self.parameters += added
        self._cleared |= dict.fromkeys(self.parameters)
        before = self._by_kernel
        self._by_kernel = (
            self._decides() and not self._evaluates and _leaves_out(self._kernel, [group for group, _ in self._groups])
        )
        if before and not self._by_kernel:
            self._kernel.found_inf = self._kernel.grad_scale = None

    def __call__(
        self, factor: float | None, limit: float, momentum: float | None = None, evaluate: Evaluate | None = None
    ) -> StepResult:
        """One update at base rate times `factor` (None: at the groups' own), left out unless the norm is below `limit`.

        On a CPU `applied` says so; with a fused optimizer on a device the device alone knows, and nothing here waits.
        An unfused optimizer on a device waits for it.
        """
        if len(self.optimizer.param_groups) != len(self._groups):
            self._take_groups()
        if self.blank:
            self.blank = False
            drop_states(self._kernel)
        penalty = self._penalty.add(self.scale) if self._penalty else None
        gradients, norm = self._measured()
        if self._by_block.due:
            held = [p for p in self.parameters if p.grad is not None]
            scale = _like(self._scaler.scale, norm) if self._scaler else 1.0
            self._by_block.take(held, self._norms(gradients), scale)  # collective under fsdp
        below = norm < limit  # not for a NaN
        applied = None if self._by_kernel else bool(below)  # waits for the device, where it is one
        if applied is not False:
            if self._by_kernel:
                self._tell_kernel(gradients, norm, below)
            else:
                self._shrink(gradients, norm)
            if factor is not None:
                for group, rate in self._groups:
                    group["lr"] = rate * factor
            for group, _ in self._groups:
                set_momentum(group, momentum)
            self._step(evaluate, penalty)
        if isinstance(self._scaler, DeviceLossScale):
            self._scaler.learn(norm, below)
        elif self._scaler:
            self._scaler.learn(norm, bool(applied))
        for parameter in self._cleared:
            parameter.grad = None
        result = StepResult(norm, applied)
        if penalty is not None:
            result.penalty = penalty
        return result

    @property
    def scale(self) -> float | Tensor:
        return self._scaler.scale if self._scaler else 1.0

    def _measured(self) -> tuple[list[Tensor], Tensor]:
        """The gradients, a sparse one as its values, and their norm without the loss's scale."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if any(map(_IS_SPARSE, gradients)):
            gradients = [_values(p) for p in self.parameters if p.grad is not None]
        norm = self._norm(gradients)
        return gradients, norm / _like(self._scaler.scale, norm) if self._scaler else norm

    def _step(self, evaluate: Evaluate | None, penalty: Tensor | None) -> None:
        """The optimizer's step, with a closure where it may call one."""
        if not self._evaluates or evaluate is None:
            self.optimizer.step()
            return

        def first() -> Tensor:
            return _both(evaluate.loss(), penalty)  # collective

        def again() -> Tensor:
            return self._again(evaluate)  # collective

        # Which parameters a step writes before it evaluates is found out in the first two, see `Closure`.
        closure = Closure(self.parameters, again if self._silent else first, again, suspicious=self._looked < 2)
        # A rank that is lost within a repeated pass leaves this one in the midst of its step.
        kept = Snapshot(self.optimizer, self.parameters) if self._shared and self._repeats is not False else None
        try:
            step_of(self.optimizer, closure)
        except BaseException:
            if kept:
                kept.put_back()
            raise
        self._looked += 1
        self._silent |= closure.silent
        self._repeats = bool(self._repeats or closure.repeated)

    def _again(self, evaluate: Evaluate) -> Tensor:
        """Repeats the step's pass, so that `.grad` is as after the first one; the loss. Collective."""
        if self._once:
            raise ConfigError(
                f"{type(self._kernel).__name__} evaluates the loss several times a step, which does not go with "
                f"{self._once}: use --engine single or ddp in float32 or bf16, or an optimizer that evaluates it once"
            )
        for parameter in self._cleared:
            parameter.grad = None
        loss = evaluate.again()  # collective
        self._exchange()  # collective
        penalty = self._penalty.add(1.0) if self._penalty else None
        self._shrink(*self._measured())
        return _both(loss, penalty)

    def rehearse(self, evaluate: Alone | None) -> None:
        """One update on copied state, see `lockstep.engines.closure`; None: with gradients of zeros."""
        kept = Snapshot(self.optimizer, self.parameters, on_host=True)
        before, exchange = (self.blank, self._repeats), self._exchange
        self._exchange = lambda: None
        try:
            if self.blank:
                drop_states(self._kernel)
            if evaluate:
                evaluate.again()
                check_dense(self.model, self._dense)
            else:
                for parameter in self.parameters:
                    parameter.grad = torch.zeros_like(parameter)
            penalty = self._penalty.add(self.scale) if self._penalty else None
            gradients, norm = self._measured()
            if not norm.isfinite():  # waits for the device; step 1 would be left out
                torch._foreach_zero_(gradients)
                norm = torch.zeros_like(norm)
            if self._by_kernel:
                self._tell_kernel(gradients, norm, norm < math.inf)
            else:
                self._shrink(gradients, norm)
            with blame_optimizer(self._kernel):
                self._step(evaluate or _Zeros(), penalty)
            before = (before[0], self._repeats)
        finally:
            self._exchange = exchange
            kept.put_back()
            self.blank, self._repeats = before
            for parameter in self._cleared:
                parameter.grad = None

    def _tell_kernel(self, gradients: list[Tensor], norm: Tensor, below: Tensor) -> None:
        """Whether to leave the update out, and what the kernel divides gradients by, while it reads them anyway.

        Hooks of the optimizer see gradients that are neither clipped nor unscaled.
        """
        kernel = self._kernel
        kernel.found_inf = (~below).to(torch.float32)
        if isinstance(kernel, SGD):
            _begin_momentum(kernel)
        if norm.dtype is torch.float64:  # the kernel's divisor is float32
            self._shrink(gradients, norm)
        elif self._clip:
            over = torch.clamp((norm + 1e-6) / self._clip, min=1.0)
            kernel.grad_scale = over * _like(self._scaler.scale, over) if self._scaler else over
        elif self._scaler:
            kernel.grad_scale = torch.as_tensor(_like(self._scaler.scale, norm))

    def _shrink(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Divides by the loss's scale and clips, in one multiplication."""
        if not gradients or not (self._clip or self._scaler):
            return
        # Always multiplied: to ask whether the norm is too large would wait for the device.
        by = torch.clamp(self._clip / (norm + 1e-6), max=1.0) if self._clip else torch.ones_like(norm)
        if self._scaler:
            by = by / _like(self._scaler.scale, by)
        if self._local:
            gradients = [self._local(gradient) for gradient in gradients]
        torch._foreach_mul_(gradients, by.to(gradients[0].device))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """`named_state`, and the loss's scale where there is one. Optimizer state that is not there yet is made."""
        self.blank = materialise(self.optimizer) or self.blank
        return named_state(model, self.optimizer) | self.scaling()

    def scaling(self) -> dict[str, Tensor]:
        """The loss's scale and the steps since it last changed, as 0-dim float64 tensors; {} without loss scaling."""
        return self._scaler.state_dict() if self._scaler else {}

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Takes what `state` gave."""
        self.blank = False
        restore_state(model, self.optimizer, self.restore_scaling(state))

    def restore_scaling(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes the loss's scale out of a state, and returns the rest."""
        if self._scaler:
            self._scaler.load_state_dict(state)
        return {name: tensor for name, tensor in state.items() if not name.startswith("scaler/")}


class _Zeros:
    """The loss of a rehearsal without a forward."""

    def loss(self) -> Tensor:
        return torch.zeros(())

    def again(self) -> Tensor:
        return self.loss()


def _both(loss: Tensor, penalty: Tensor | None) -> Tensor:
    return loss if penalty is None else loss + penalty.to(loss)


def _values(parameter: Tensor) -> Tensor:
    """A gradient as a dense tensor that shares its memory; a sparse one is coalesced for it."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad._values()


def _leaves_out(optimizer: Any, groups: list[dict[str, Any]]) -> bool:
    """Whether the optimizer can leave a step out on the device, as torch's fused ones can.

    Not SGD with a dampening, whose first step is another than the rest.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") and not (group.get("momentum") and group.get("dampening")) for group in groups)


def _begin_momentum(optimizer: SGD) -> None:
    """Makes momentum that is not there yet, as zeros: the kernel leaves it unset where the first step is left out."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, in its order, then the model's others that require gradients now."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    known = set(own)
    return own + [p for p in model.parameters() if p.requires_grad and p not in known]


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """Each gradient's 2-norm, 0-dim; float32, or float64 where a gradient is."""
    norms = list(torch._foreach_norm(gradients)) if gradients else []
    return [norm.float() if norm.dtype in (torch.bfloat16, torch.float16) else norm for norm in norms]


def combined(norms: list[Tensor]) -> Tensor:
    """The 2-norm of all together, 0-dim, from the norms in the order given."""
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def total_norm(gradients: list[Tensor]) -> Tensor:
    """2-norm of all gradients together, 0-dim, in the order given; float32, or float64 where a gradient is."""
    return combined(norms_of(gradients))
