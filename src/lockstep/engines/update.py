"""What every engine does at the end of a step: the norm, clipping, the optimizer's step, float16's loss scale."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engines.base import Settings, StepResult
from lockstep.engines.names import named_state, restore_state
from lockstep.errors import LockstepError

__all__ = ["LossScale", "Update", "combined", "norms_of", "total_norm"]

Norm = Callable[[list[Tensor]], Tensor]


class Update:
    """Clipping and the optimizer's step, resolved once so that a step does little besides computing.

    Args:
        optimizer: its groups' `lr` are the base rates.
        settings: clip, and whether the loss is scaled.
        norm: 2-norm of the whole gradient from this rank's gradients; it is the same on every rank.
        local: the plain tensor behind a gradient; None where gradients are plain.
        order: of the parameters in the norm, whose bits it decides; None: the optimizer's.

    Attributes:
        scale: what a loss must be multiplied by; 1 without loss scaling.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Settings,
        norm: Norm | None = None,
        local: Callable[[Tensor], Tensor] | None = None,
        order: list[Tensor] | None = None,
    ) -> None:
        self.optimizer, self._clip = optimizer, settings.clip
        self._groups = [(group, float(group["lr"])) for group in optimizer.param_groups]
        self.parameters: list[Tensor] = order or [p for group in optimizer.param_groups for p in group["params"]]
        self._norm, self._local = norm or total_norm, local
        self._scaler = LossScale() if settings.loss_scaling else None
        self._limit = settings.limit
        on_device = any(parameter.is_cuda for parameter in self.parameters)
        fused = all(group.get("fused") for group in optimizer.param_groups)
        # torch's fused optimizers leave an update out on the device where `found_inf` is 1, as its GradScaler has it.
        self._kernel: Any = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has one inside
        self._by_kernel = on_device and fused and not settings.loss_scaling

    def __call__(self, factor: float) -> StepResult:
        """One update at base rate times `factor`, left out where the norm is not finite or above the limit.

        On a CPU `applied` says so; with a fused optimizer on a device the device alone knows, the norm says it later,
        and nothing here waits. Loss scaling and an unfused optimizer on a device wait for it.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = self._norm(gradients)
        if self._scaler:
            norm = norm / self._scaler.scale
        if self._by_kernel:
            # Compared on the device: 1.0 where it must be left out, also for a NaN, which is below nothing.
            self._kernel.found_inf = (~(norm < self._limit.value)).to(torch.float32)
            applied = True
        elif self._scaler:
            applied = self._scaler.accepts(norm)
        else:
            applied = bool(norm < self._limit.value)  # waits for the device, where it is one
        if applied:
            self._shrink(gradients, norm)
            for group, rate in self._groups:
                group["lr"] = rate * factor
            self.optimizer.step()
        if self._scaler:
            self._scaler.learn(applied)
        for parameter in self.parameters:
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

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """`named_state`, and the loss's scale where there is one."""
        return named_state(model, self.optimizer) | self.scaling()

    def scaling(self) -> dict[str, Tensor]:
        """The loss's scale and the steps since it last changed, as 0-dim float64 tensors; {} without loss scaling."""
        return self._scaler.state() if self._scaler else {}

    def restore(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Takes what `state` gave."""
        restore_state(model, self.optimizer, self.restore_scaling(state))

    def restore_scaling(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes the loss's scale out of a state, and returns the rest."""
        if self._scaler:
            self._scaler.restore(state)
        return {name: tensor for name, tensor in state.items() if not name.startswith("scaler/")}


class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, 3.2).

    The scale is halved by a step whose gradients overflow, which is skipped, and doubled after 2000 good ones. It
    begins at 2**16; powers of two, so that scaling and unscaling round nothing. What decides is the gradient's global
    norm, which every rank has alike, so the ranks agree without an exchange.
    """

    _GROWTH = 2000
    _LEAST = 2.0**-14

    def __init__(self) -> None:
        self.scale, self._good = 2.0**16, 0

    def accepts(self, norm: Tensor) -> bool:
        return bool(norm.isfinite())  # waits for the device

    def learn(self, applied: bool) -> None:
        self._good = self._good + 1 if applied else 0
        if not applied:
            self.scale /= 2
            if self.scale < self._LEAST:
                raise LockstepError(
                    f"--precision fp16: gradients are not finite even with the loss divided by {1 / self._LEAST:g}, so "
                    "this is no overflow; lower --lr, or use --precision bf16 to see where it begins"
                )
        elif self._good == self._GROWTH:
            self.scale, self._good = self.scale * 2, 0

    def state(self) -> dict[str, Tensor]:
        values = {"scaler/scale": self.scale, "scaler/good_steps": float(self._good)}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.scale, self._good = float(state["scaler/scale"]), int(state["scaler/good_steps"])


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
