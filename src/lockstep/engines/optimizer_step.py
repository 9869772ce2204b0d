"""End a step in any engine: the norm, clipping, the optimizer's step, float16's loss scale.

`OptimizerStep` does it all. `LossScale` and `DeviceLossScale` scale the loss, the latter without waiting for the
device. `total_norm`, `norms_of` and `combine_norms` compute norms.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.config.sections import Fp16
from lockstep.engines.base import NOTHING, Evaluate, Penalty, StepResult
from lockstep.engines.closure import (
    Alone,
    Closure,
    blame_optimizer,
    check_dense,
    step_of,
    takes_closure,
    uniform_groups,
)
from lockstep.engines.fused_step import fused_step
from lockstep.engines.group_settings import settings_of
from lockstep.engines.request import EngineRequest
from lockstep.engines.state_dict import Snapshot, drop_states, materialise, named_state, restore_state
from lockstep.errors import ConfigError, LockstepError

__all__ = [
    "LossScale",
    "OptimizerStep",
    "UpdateSpec",
    "combine_norms",
    "list_trained",
    "norms_of",
    "total_norm",
]


class LossScale:
    """Dynamic loss scaling for float16.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2. A step whose gradients
    overflow is skipped and halves the scale; `loss_scale_window` good steps double it. It is always a power of two, so
    scaling and unscaling do not round. With `hysteresis` only the last of that many overflows halves the scale, as in
    DeepSpeed's DynamicLossScaler (deepspeed/runtime/fp16/loss_scaler.py). The gradient's global norm decides, which is
    the same on every rank, so the ranks agree without an exchange. A step skipped with a finite norm does not change
    the scale.

    Args:
        options: see `Config.fp16`.
    """

    def __init__(self, options: Fp16) -> None:
        self._options = options
        self.scale = 2.0**options.initial_scale_power
        self._good_steps = 0
        # Overflows that may still come before one halves the scale.
        self._hysteresis = options.hysteresis - 1

    def learn(self, norm: Tensor, applied: bool) -> None:
        """Update the scale from a step's norm, and whether the step was applied."""
        options = self._options
        if not applied:
            # A finite norm: a guard skipped the step, not an overflow. Does not wait, since the caller has read the
            # norm.
            if norm.isfinite():
                return
            self._good_steps = 0
            if self._hysteresis:
                self._hysteresis -= 1
                return
            if self.scale <= options.min_loss_scale:
                raise _overflow_error(self.scale)
            self.scale /= 2
            return
        self._good_steps += 1
        grows = self._good_steps == options.loss_scale_window
        if grows:
            self.scale = self.scale * 2
            self._good_steps = 0
        if grows or options.consecutive_hysteresis:
            self._hysteresis = options.hysteresis - 1

    def state_dict(self) -> dict[str, Tensor]:
        values = {"scaler/scale": self.scale, "scaler/good_steps": float(self._good_steps)}
        if self._options.hysteresis > 1:
            values["scaler/spared"] = float(self._hysteresis)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.scale = float(state["scaler/scale"])
        self._good_steps = int(state["scaler/good_steps"])
        if self._options.hysteresis > 1:
            self._hysteresis = int(state["scaler/spared"])


class _HostCopy(NamedTuple):
    """A scale being copied to the host."""

    scale: Tensor
    event: Any


class DeviceLossScale:
    """`LossScale` with its values on the device, so that no step waits for an overflow.

    Follows the same rule, value for value. An overflow at the minimum scale is raised one step late, when the scale
    has reached the host, or when the state is requested. The scale is the same on every rank, so all raise in the same
    step.

    Args:
        options: see `Config.fp16`.
        device: the gradients' device.

    Attributes:
        scale: 0-dim float64, like a Python float; a new tensor after each step.
    """

    def __init__(self, options: Fp16, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._floor = options.min_loss_scale
        self.scale = self._number(2.0**options.initial_scale_power)
        self._good_steps = self._number(0.0)
        self._hysteresis = self._full_hysteresis = self._number(options.hysteresis - 1)
        self._half = self._number(0.5)
        self._one = self._number(1.0)
        self._pending: deque[_HostCopy] = deque()

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def learn(self, norm: Tensor, applied: Tensor) -> None:
        """Update the scale from a step's norm and `applied` (0-dim bool).

        Raises:
            LockstepError: an earlier step overflowed at the minimum scale.
        """
        # False for NaN too. A norm is never negative.
        finite = norm < math.inf
        good = self._good_steps + applied
        grows = good == self._options.loss_scale_window
        shrinks = self._half
        if self._options.hysteresis > 1:
            tolerant = self._hysteresis > 0
            # Select by arithmetic: a Python condition on these tensors would wait for the device.
            shrinks = torch.where(tolerant, self._one, self._half)
            hysteresis = self._hysteresis - (tolerant & ~finite).to(torch.float64)
            resets = applied if self._options.consecutive_hysteresis else grows
            self._hysteresis = torch.where(resets, self._full_hysteresis, hysteresis)
        self.scale = self.scale * torch.where(finite, self._one + grows, shrinks)
        self._good_steps = good * (finite > grows)
        self._send()
        # Keep one copy in flight: by now the step before has long finished on the device.
        while len(self._pending) > 1:
            self._check_oldest()

    def _send(self) -> None:
        event = None
        if self.scale.is_cuda:
            # torch gives the constructor no types.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pending.append(_HostCopy(self.scale.to("cpu", non_blocking=True), event))
        if event:
            event.record()

    def _check_oldest(self) -> None:
        copy = self._pending.popleft()
        if copy.event:
            # Waits for the device, one step behind. It is busy with the next step, so nothing is lost.
            copy.event.synchronize()
        if float(copy.scale.numpy()) < self._floor:
            raise _overflow_error(self._floor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as LossScale does, on the device.

        Waits for the device, which costs nothing at a save: it has waited for the step's norm already.
        """
        while self._pending:
            self._check_oldest()
        state = {"scaler/scale": self.scale, "scaler/good_steps": self._good_steps}
        state |= {"scaler/spared": self._hysteresis} if self._options.hysteresis > 1 else {}
        # Copies, because a resume writes into the tensors of a state.
        return {name: value.clone() for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._pending.clear()
        # Waits for the device, once, at a resume.
        scale = float(state["scaler/scale"])
        self._floor = min(self._options.min_loss_scale, scale)
        self.scale = self._number(scale)
        self._good_steps = self._to_device(state["scaler/good_steps"])
        if self._options.hysteresis > 1:
            self._hysteresis = self._to_device(state["scaler/spared"])

    def _to_device(self, value: Tensor) -> Tensor:
        return value.detach().to(self._device, torch.float64, copy=True)


def _cast_like(scale: float | Tensor, tensor: Tensor) -> float | Tensor:
    """Cast the scale to the dtype of `tensor`, to multiply or divide by it."""
    if isinstance(scale, Tensor):
        return scale.to(tensor.dtype)
    return scale


def _overflow_error(scale: float) -> LockstepError:
    return LockstepError(
        f"--precision fp16: gradients are not finite even at loss scale {scale:g} (--fp16.min-loss-scale), so this is "
        "no overflow; lower --lr, or find its source with --precision bf16"
    )


_IS_SPARSE = attrgetter("is_sparse")


Norm = Callable[[list[Tensor]], Tensor]
Norms = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """Settings of an update: how gradients are stored, and what it supports.

    Attributes:
        parameters: their gradients are cleared after a step, besides the optimizer's, see `list_trained`.
        is_fixed: only gradients of `parameters` are exchanged, so a group added later may have no other ones.
        norm: computes the 2-norm of the whole gradient from this rank's gradients; the same on every rank. None:
            gradients are whole.
        norms: computes the norm of each gradient, the same on every rank; None: gradients are whole.
        local: returns the plain tensor behind a gradient; None: gradients are plain.
        exchange: sums `.grad` over the ranks after a pass that an optimizer repeats. Collective.
        has_peers: other ranks take part in such a pass, so a failed one restores the parameters.
        single_pass_flag: the flag that rules out repeating a pass; "": none does.
        dense_flag: the flag that requires dense gradients; "": none does.
    """

    parameters: Sequence[Tensor] = ()
    is_fixed: bool = False
    norm: Norm | None = None
    norms: Norms | None = None
    local: Callable[[Tensor], Tensor] | None = None
    exchange: Callable[[], None] = lambda: None
    has_peers: bool = False
    single_pass_flag: str = ""
    dense_flag: str = ""


class OptimizerStep:
    """Clipping and the optimizer's step, prepared once so that each step does little besides computing.

    A parameter group added to the optimizer later joins at the next step.

    Args:
        model: the plain module.
        optimizer: its groups' `lr` are the base rates, see `GroupSettings`.
        request: gives clip, loss scaling, penalty and gradient norms.
        spec: what the engine decides.

    Attributes:
        parameters: the optimizer's, in the order of the norm, which decides its bits: see `_in_model_order`.
        blank: the optimizer's state was created only to be loaded into; the first step drops it and creates its own.
        is_mixed: some parameters are sharded and some are whole.
        scale: the factor of the loss; 1 without loss scaling; 0-dim where the device decides.
        on_device: whether the device decides to skip a step; None: if every parameter is on a CUDA device. Setting it
            requires fused optimizers.
    """

    on_device: ClassVar[bool | None] = None

    def __init__(self, model: nn.Module, optimizer: Optimizer, request: EngineRequest, spec: UpdateSpec) -> None:
        self.model = model
        self._exchange = spec.exchange
        self._has_peers = spec.has_peers
        self._single_pass_flag = spec.single_pass_flag or request.single_pass_flag
        if request.loss_scaling and not self._single_pass_flag:
            self._single_pass_flag = "the loss scaling of --precision fp16"
        self._dense_flag = spec.dense_flag
        self._penalty = Penalty(request.penalty, model) if request.penalty else None
        self.optimizer = optimizer
        self._clip = request.clip
        self._norm = spec.norm or total_norm
        self._local = spec.local
        self._by_block = request.gradients
        self._norms = spec.norms or norms_of
        # torch's fused optimizers skip an update where `found_inf` is 1, as with its GradScaler.
        # ZeroRedundancyOptimizer has the optimizer inside.
        self._kernel: Any = getattr(optimizer, "optim", optimizer)
        self._evaluates = takes_closure(self._kernel)
        # Number of steps in which the optimizer's writes were checked by value.
        self._write_checks = 0
        # The optimizer writes parameters without incrementing torch's version counter.
        self._silent_writes = False
        # The optimizer repeats a pass; None while that is not known yet.
        self._repeats: bool | None = None
        self.blank = self._by_kernel = self.is_mixed = False
        self._group_settings = settings_of(optimizer)
        self._groups: list[dict[str, Any]] = []
        self.parameters: list[Tensor] = []
        self._cleared = dict.fromkeys(spec.parameters)
        self._is_fixed = spec.is_fixed
        self._take_groups()
        self._scaler: LossScale | DeviceLossScale | None = None
        if request.loss_scaling and self._device_decides():
            self._scaler = DeviceLossScale(request.loss_scaling, self.parameters[0].device)
        elif request.loss_scaling:
            self._scaler = LossScale(request.loss_scaling)

    def _device_decides(self) -> bool:
        """Whether the device decides: not for parameters offloaded to the host, or on both."""
        on_gpu = bool(self.parameters) and all(parameter.is_cuda for parameter in self.parameters)
        if self.on_device is None:
            return on_gpu
        return self.on_device

    def _take_groups(self) -> None:
        """Add the optimizer's new groups."""
        fresh = self.optimizer.param_groups[len(self._groups) :]
        # The order decides the bits of the norm, so every engine uses the model's.
        held = _in_model_order(self.model, self.optimizer)
        if self._is_fixed and not self._cleared.keys() >= set(held):
            raise LockstepError(
                "a parameter group was added whose parameters did not require gradients when the engine was built, so "
                "their gradients are not exchanged; unfreeze them, then rebuild the engine"
            )
        self._groups += fresh
        self.parameters = held
        self._cleared |= dict.fromkeys(self.parameters)
        before = self._by_kernel
        self._on_device = self._device_decides()
        self._by_kernel = self._on_device and not self._evaluates and _skips_on_device(self._kernel, self._groups)
        if before and not self._by_kernel:
            self._kernel.found_inf = self._kernel.grad_scale = None

    def __call__(
        self, factor: float | None, limit: float, momentum: float | None = None, evaluate: Evaluate | None = None
    ) -> StepResult:
        """Update once at base rate times `factor`, or skip unless the norm is below `limit`.

        A `factor` of None uses the groups' own `lr`. On a CPU `applied` is known. With a fused optimizer on a device
        only the device knows, and nothing here waits; an unfused optimizer on a device waits for it.
        """
        if len(self.optimizer.param_groups) != len(self._groups):
            self._take_groups()
        self._group_settings.write(factor, momentum)
        if self.blank:
            # The states were created only to be compared with a checkpoint's names.
            self.blank = False
            drop_states(self._kernel)
        penalty = self._penalty.add(self.scale) if self._penalty else None
        gradients, norm = self._measure()
        if self._by_block.due:
            parameters = [p for p in self.parameters if p.grad is not None]
            scale = _cast_like(self._scaler.scale, norm) if self._scaler else 1.0
            # All ranks of fsdp take part, in the steps that log norms.
            self._by_block.take(parameters, self._norms(gradients), scale)  # collective under fsdp
        # Waits for the device unless the device decides: without a fused kernel the host needs the norm.
        size: Any = norm if self._on_device else float(norm)
        # False for NaN, so such a step is skipped.
        below = size < limit
        # Waits for the device, if the parameters are on one and no fused kernel can skip the update.
        applied = None if self._by_kernel else bool(below)
        if applied is not False:
            if self._by_kernel:
                self._configure_kernel(gradients, norm, below)
            else:
                self._scale_gradients(gradients, norm, size)
            self._step(evaluate, penalty)
        if isinstance(self._scaler, DeviceLossScale):
            self._scaler.learn(norm, below)
        elif self._scaler:
            self._scaler.learn(norm, bool(applied))
        for parameter in self._cleared:
            parameter.grad = None
        return StepResult(norm, applied, penalty)

    @property
    def scale(self) -> float | Tensor:
        if self._scaler:
            return self._scaler.scale
        return 1.0

    def _measure(self) -> tuple[list[Tensor], Tensor]:
        """Return the gradients (values of sparse ones) and their norm without the loss scale."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if any(map(_IS_SPARSE, gradients)):
            gradients = [_values(p) for p in self.parameters if p.grad is not None]
        norm = self._norm(gradients)
        return gradients, norm / _cast_like(self._scaler.scale, norm) if self._scaler else norm

    def _step(self, evaluate: Evaluate | None, penalty: Tensor | None) -> None:
        """Take the optimizer's step, with a closure if it may call one."""
        if not self._evaluates or evaluate is None:
            with uniform_groups(self.optimizer) if self.is_mixed else NOTHING:
                if not fused_step(self.optimizer):
                    self.optimizer.step()
            return

        def first() -> Tensor:
            # All ranks: the loss is the step's, over all of them.
            return _add_penalty(evaluate.loss(), penalty)  # collective

        def repeat() -> Tensor:
            # All ranks repeat their micro-batches and exchange the gradients again.
            return self._repeat_pass(evaluate)  # collective

        # The first two steps detect parameters that the optimizer writes before it evaluates, see `Closure`.
        closure = Closure(
            self.parameters, repeat if self._silent_writes else first, repeat, suspicious=self._write_checks < 2
        )
        # If another rank fails within a repeated pass, this rank leaves its step in the middle and must undo it.
        if self._has_peers and self._repeats is not False:
            snapshot = Snapshot(self.optimizer, self.parameters)
        else:
            snapshot = None
        try:
            step_of(self.optimizer, closure)
        except BaseException:
            if snapshot:
                snapshot.put_back()
            raise
        self._write_checks += 1
        self._silent_writes |= closure.silent
        self._repeats = bool(self._repeats or closure.repeated)

    def _repeat_pass(self, evaluate: Evaluate) -> Tensor:
        """Repeat the step's pass; return the loss. Collective.

        Afterwards `.grad` is as after the first pass.
        """
        if self._single_pass_flag:
            raise ConfigError(
                f"{type(self._kernel).__name__} evaluates the loss several times a step, which does not work "
                f"with {self._single_pass_flag}: use --engine single or ddp in float32 or bf16, or an optimizer that "
                "evaluates it once"
            )
        for parameter in self._cleared:
            parameter.grad = None
        # All ranks; also in the exchange below.
        loss = evaluate.again()  # collective
        self._exchange()  # collective
        penalty = self._penalty.add(1.0) if self._penalty else None
        self._scale_gradients(*self._measure())
        return _add_penalty(loss, penalty)

    def rehearse(self, evaluate: Alone | None) -> None:
        """Try one update and restore everything, see `Engine.rehearse`; None: with zero gradients."""
        snapshot = Snapshot(self.optimizer, self.parameters, on_host=True)
        before = (self.blank, self._repeats)
        exchange = self._exchange
        self._exchange = lambda: None
        try:
            if self.blank:
                drop_states(self._kernel)
            if evaluate:
                evaluate.again()
                check_dense(self.model, self._dense_flag)
            else:
                for parameter in self.parameters:
                    parameter.grad = torch.zeros_like(parameter)
            penalty = self._penalty.add(self.scale) if self._penalty else None
            gradients, norm = self._measure()
            # Waits for the device, once before step 1. Such a step would be skipped, and would test nothing.
            if not norm.isfinite():
                # Private to torch: zeroes all gradients in one kernel.
                torch._foreach_zero_(gradients)
                norm = torch.zeros_like(norm)
            if self._by_kernel:
                self._configure_kernel(gradients, norm, norm < math.inf)
            else:
                self._scale_gradients(gradients, norm)
            with blame_optimizer(self._kernel):
                self._step(evaluate or _Zeros(), penalty)
            before = (before[0], self._repeats)
        finally:
            self._exchange = exchange
            snapshot.put_back()
            self.blank, self._repeats = before
            for parameter in self._cleared:
                parameter.grad = None

    def _configure_kernel(self, gradients: list[Tensor], norm: Tensor, below: Tensor) -> None:
        """Give the fused kernel its skip flag and the divisor of gradients.

        The kernel reads the gradients anyway, so dividing there is free. Hooks of the optimizer see gradients that are
        neither clipped nor unscaled.
        """
        kernel = self._kernel
        kernel.found_inf = (~below).to(torch.float32)
        if isinstance(kernel, SGD):
            _init_momentum(kernel)
        # The kernel's divisor is float32, which would round a float64 norm.
        if norm.dtype is torch.float64:
            self._scale_gradients(gradients, norm)
        elif self._clip:
            # 1e-6 as in torch's `clip_grad_norm_`, so that clipping is bitwise identical to it.
            over = torch.clamp((norm + 1e-6) / self._clip, min=1.0)
            if self._scaler:
                kernel.grad_scale = over * _cast_like(self._scaler.scale, over)
            else:
                kernel.grad_scale = over
        elif self._scaler:
            kernel.grad_scale = torch.as_tensor(_cast_like(self._scaler.scale, norm))

    def _scale_gradients(self, gradients: list[Tensor], norm: Tensor, size: Tensor | float | None = None) -> None:
        """Divide by the loss scale and clip, in one multiplication.

        Args:
            size: the norm, as a number if the host knows it.
        """
        if not gradients or not (self._clip or self._scaler):
            return
        # 0.99: far enough from the limit that rounding cannot matter. The multiplication by 1 is saved.
        if not self._scaler and type(size) is float and size + 1e-6 < 0.99 * self._clip:
            return
        # On a device always multiply: asking whether the norm is too large would wait for it.
        if self._clip:
            factor = (norm + 1e-6).reciprocal_().mul_(self._clip).clamp_(max=1.0)
        else:
            factor = torch.ones_like(norm)
        if self._scaler:
            factor = factor / _cast_like(self._scaler.scale, factor)
        if self._local:
            gradients = [self._local(gradient) for gradient in gradients]
        # Private to torch: scales all gradients in one kernel.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return `named_state` and the loss scale; creates missing optimizer state."""
        self.blank = materialise(self.optimizer) or self.blank
        return named_state(model, self.optimizer) | self.scaling()

    def scaling(self) -> dict[str, Tensor]:
        """Return the loss scale's state as 0-dim float64 tensors; {} without loss scaling."""
        if self._scaler:
            return self._scaler.state_dict()
        return {}

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load a state returned by `state_dict`."""
        self.blank = False
        restore_state(model, self.optimizer, self.restore_scaling(state))

    def restore_scaling(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Load the loss scale from a state, and return the rest."""
        if self._scaler:
            self._scaler.load_state_dict(state)
        return {name: tensor for name, tensor in state.items() if not name.startswith("scaler/")}


class _Zeros:
    """The loss of a rehearsal without a forward."""

    def loss(self) -> Tensor:
        return torch.zeros(())

    def again(self) -> Tensor:
        return self.loss()


def _add_penalty(loss: Tensor, penalty: Tensor | None) -> Tensor:
    if penalty is None:
        return loss
    return loss + penalty.to(loss)


def _values(parameter: Tensor) -> Tensor:
    """Return a gradient as a dense tensor sharing its memory; coalesces a sparse one."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad._values()


def _skips_on_device(optimizer: Any, groups: list[dict[str, Any]]) -> bool:
    """Whether the optimizer can skip a step on the device, as torch's fused ones can.

    Not SGD with dampening, because its first step differs from the rest.
    """
    # Private to torch: the mark of optimizers that read `found_inf` and `grad_scale`.
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") and not (group.get("momentum") and group.get("dampening")) for group in groups)


def _init_momentum(optimizer: SGD) -> None:
    """Create missing momentum as zeros.

    The kernel leaves it unset if the first step is skipped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def _in_model_order(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters in the model's order, in which `clip_grad_norm_(model.parameters())` adds."""
    held = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    members = dict.fromkeys(p for p in model.parameters() if p in held)
    return [*members, *(p for p in held if p not in members)]


def list_trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters, then the model's others that require gradients now."""
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    members = set(parameters)
    return parameters + [p for p in model.parameters() if p.requires_grad and p not in members]


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """Return each gradient's 2-norm, 0-dim; float32, or float64 where a gradient is."""
    # Private to torch: norms of all gradients in few kernels.
    norms = list(torch._foreach_norm(gradients)) if gradients else []
    return [norm.float() if norm.dtype in (torch.bfloat16, torch.float16) else norm for norm in norms]


def combine_norms(norms: list[Tensor]) -> Tensor:
    """Combine norms into the 2-norm of all together, 0-dim, in the given order."""
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, 0-dim, in the given order.

    float32, or float64 where a gradient is.
    """
    return combine_norms(norms_of(gradients))
