"""The scale of the loss under float16: decided on the host, or on the device where that alone knows of an overflow."""

import math
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.config.sections import Fp16
from lockstep.errors import LockstepError

__all__ = ["DeviceLossScale", "LossScale", "like"]


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


def like(scale: float | Tensor, other: Tensor) -> float | Tensor:
    """The scale as what `other` can be multiplied by, or divided: of its dtype."""
    return scale.to(other.dtype) if isinstance(scale, Tensor) else scale


def _stuck(scale: float) -> LockstepError:
    return LockstepError(
        f"--precision fp16: gradients are not finite even with the loss multiplied by {scale:g} "
        "(--fp16.min-loss-scale), so this is no overflow; lower --lr, or use --precision bf16 to see where "
        "it begins"
    )
