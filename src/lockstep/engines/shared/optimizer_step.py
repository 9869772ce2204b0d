"""What every engine does at the end of a step: the norm, clipping, the optimizer's step, float16's loss scale."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.sections import Fp16
from lockstep.engines.base import Settings, StepResult, set_momentum
from lockstep.engines.shared.state_dict import materialise, named_state, restore_state
from lockstep.errors import LockstepError

__all__ = ["LossScale", "OptimizerStep", "combined", "norms_of", "total_norm", "trained"]

Norm = Callable[[list[Tensor]], Tensor]


class OptimizerStep:
    """Clipping and the optimizer's step, resolved once so that a step does little besides computing.

    A group that is added to the optimizer later is taken in at the next step.

    Args:
        optimizer: its groups' `lr` are the base rates.
        settings: clip, and whether the loss is scaled.
        norm: 2-norm of the whole gradient from this rank's gradients; it is the same on every rank.
        local: the plain tensor behind a gradient; None where gradients are plain.
        order: of the parameters in the norm, whose bits it decides; None: the optimizer's.
        cleared: the parameters whose gradients a step clears, see `trained`; None: the optimizer's.
        fixed: their gradients alone are exchanged, so no others may come with a group that is added later.

    Attributes:
        parameters: those that the optimizer has, in the order of the norm.
        blank: the optimizer's state was made only to be loaded into; a first step drops it and makes its own.
        scale: what a loss must be multiplied by; 1 without loss scaling.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Settings,
        norm: Norm | None = None,
        local: Callable[[Tensor], Tensor] | None = None,
        order: list[Tensor] | None = None,
        cleared: list[Tensor] | None = None,
        fixed: bool = False,
    ) -> None:
        self.optimizer, self._clip = optimizer, settings.clip
        self._norm, self._local = norm or total_norm, local
        self._scaler = LossScale(settings.loss_scaling) if settings.loss_scaling else None
        # torch's fused optimizers leave an update out on the device where `found_inf` is 1, as its GradScaler has it.
        self._kernel: Any = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has one inside
        self.blank = False
        self._groups: list[tuple[dict[str, Any], float]] = []
        self.parameters: list[Tensor] = list(order or [])
        self._cleared, self._fixed = dict.fromkeys(cleared or ()), fixed
        self._take_groups()

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
        fused = all(group.get("fused") for group, _ in self._groups)
        self._by_kernel = fused and not self._scaler and any(parameter.is_cuda for parameter in self.parameters)

    def __call__(self, factor: float | None, limit: float, momentum: float | None = None) -> StepResult:
        """One update at base rate times `factor` (None: at the groups' own), left out unless the norm is below `limit`.

        On a CPU `applied` says so; with a fused optimizer on a device the device alone knows, and nothing here waits.
        Loss scaling and an unfused optimizer on a device wait for it.
        """
        if len(self.optimizer.param_groups) != len(self._groups):
            self._take_groups()
        if self.blank:
            self.blank = False
            self._kernel.state.clear()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = self._norm(gradients)
        if self._scaler:
            norm = norm / self._scaler.scale
        applied: bool | None = None
        if self._by_kernel:
            # Compared on the device: 1.0 where it must be left out, also for a NaN, which is below nothing.
            self._kernel.found_inf = (~(norm < limit)).to(torch.float32)
        else:
            applied = bool(norm < limit)  # waits for the device, where it is one
        if applied is not False:
            self._shrink(gradients, norm)
            if factor is not None:
                for group, rate in self._groups:
                    group["lr"] = rate * factor
            for group, _ in self._groups:
                set_momentum(group, momentum)
            self.optimizer.step()
        if self._scaler:
            self._scaler.learn(norm, bool(applied))
        for parameter in self._cleared:
            parameter.grad = None
        return StepResult(norm, applied)

    @property
    def scale(self) -> float:
        return self._scaler.scale if self._scaler else 1.0

    def _shrink(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Divides by the loss's scale and clips, in one multiplication."""
        if not gradients or not (self._clip or self._scaler):
            return
        # Always multiplied: to ask whether the norm is too large would wait for the device.
        by = torch.clamp(self._clip / (norm + 1e-6), max=1.0) if self._clip else torch.ones_like(norm)
        if self._scaler:
            by = by / self._scaler.scale
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
                raise LockstepError(
                    f"--precision fp16: gradients are not finite even with the loss multiplied by {self.scale:g} "
                    "(--fp16.min-loss-scale), so this is no overflow; lower --lr, or use --precision bf16 to see where "
                    "it begins"
                )
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
