"""Bound the difference of two runs that add the same numbers in another order.

tolerance = Tolerance(terms=10, sums=2**-53, inner=2**-53)
tolerance.relative(step)        of a gradient, as a share of the whole gradient's norm

docs/inside/verify.md derives the bounds; `trace/compare/rounding.py` has what `lockstep compare` needs of them, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lockstep.config.schema import Config
from lockstep.trace.compare.rounding import CEILING, INNER, LEAST, order_bound
from lockstep.transforms.precision import PARAMETERS

__all__ = [
    "EXACT",
    "FINE",
    "Scales",
    "Tolerance",
    "tolerance_of",
    "unit_roundoff",
]


# Times the measured distance, since another order rounds differently.
MEASURED = 4.0
# Share of a gradient below which a measurement is useless: one activation that changes its sign may move as much.
FINE = 1e-4
# Share of the norm by which an element may be off whatever its tensor's size, because gradients may cancel.
_SPREAD = 4.0
# Terms of the longest sum inside a model, which another compiler or machine may reorder.
_KERNEL_TERMS = 4096
# Terms of a divided model's sums: each layer adds up its ranks' parts, in kernels of other shapes.
_DIVIDED_TERMS = 256
# Largest Adam update, in learning rates, of an element whose gradient is all rounding.
_TRAVEL = 2.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences between two runs.

    Attributes:
        terms: number of terms that are added in another order: micro-batches and ranks; with another compiler also
            the longest sum inside the model. 0: no bit may differ.
        sums: unit roundoff of the gradients' dtype.
        inner: unit roundoff of the coarsest dtype that the model computes in.
        compiled: another compiler than the reference's, or a divided model, so even the first forward differs.
        measured: for each step, how far the single process's gradient moved when its sums were rounded differently, as
            a share of the gradient's norm; (): not measured.
    """

    terms: int
    sums: float = 0.0
    inner: float = 0.0
    compiled: bool = False
    measured: tuple[float, ...] = ()

    @property
    def exact(self) -> bool:
        return self.terms == 0

    def relative(self, step: int) -> float:
        """Return the allowed 2-norm of a gradient's error after `step` updates, relative to its norm."""
        most = max(self.measured[: step + 1], default=0.0)
        if most > 0.0:
            # A few elements round the other way, and Adam may move them by a whole update. One run may show
            # some of them and another none.
            return min(self.bound(step), max(MEASURED * most, FINE + (LEAST * self.inner if step else 0.0)))
        return self.bound(step)

    def bound(self, step: int) -> float:
        """Return the bound that follows from the dtypes alone; no measurement may exceed it."""
        if self.exact:
            return 0.0
        disturbed = INNER * self.inner if step or self.compiled else 0.0
        return min(CEILING, order_bound(self.terms, self.sums, step) + disturbed)

    def close(self, step: int, actual: float, expected: float, share: float | None = None) -> bool:
        """Whether two sums of losses or weights in `step` agree within `share` of themselves."""
        if actual == expected or (actual != actual and expected != expected):
            return True
        limit = self.bound(step) if share is None else share
        return abs(actual - expected) <= limit * max(abs(actual), abs(expected))

    def weights(
        self, step: int, expected: Tensor, second: Tensor | None, scales: "Scales"
    ) -> Callable[[slice], Tensor]:
        """Return a function: slice -> largest allowed error of its elements after `step`.

        The error is in float64.

        It uses the bound: Adam divides an element's error by the element's size, which the gradient's norm does not
        determine.

        Args:
            expected: the reference's parameter.
            second: the reference's running mean of squared gradients, if the optimizer has one.
            scales: of this step.
        """
        flat = expected.reshape(-1)
        moments = None if second is None else second.reshape(-1)
        unbiased = 1.0 - scales.beta2 ** (step + 1)
        if moments is None:
            typical = 0.0
        else:
            typical = math.sqrt(max(0.0, _mean(moments) / unbiased))
        error = self.bound(step) * typical + self._noise(step) * scales.norm

        def largest(place: slice) -> Tensor:
            rounding = 4.0 * (step + 2) * self.sums * flat[place].double().abs()
            if moments is None:
                return rounding + self.bound(step) * scales.travel
            root = (moments[place].double() / unbiased).clamp(min=0.0).sqrt()
            return rounding + scales.travel * (2.0 * error / (root + scales.eps)).clamp(max=_TRAVEL)

        return largest

    def drift(self, step: int, scales: "Scales") -> float:
        """Return the allowed error of a weight whose gradient cancels.

        Such as a bias before a BatchNorm.
        The loss does not depend on it, but the running mean, and so the evaluation, does.
        """
        if self.terms:
            return scales.travel * min(_TRAVEL, 2.0 * self._noise(step) * scales.norm / scales.eps)
        return 0.0

    def _noise(self, step: int) -> float:
        """Return a gradient element's error by rounding, relative to the gradient's norm."""
        return _SPREAD * self.terms * self.sums + (self.inner / 64.0 if step or self.compiled else 0.0)


@dataclass(frozen=True, slots=True)
class Scales:
    """Magnitudes that a step's errors are relative to.

    Attributes:
        norm: largest 2-norm of a gradient so far, after clipping.
        travel: sum of the learning rates of all updates so far.
        beta2, eps: of AdamW; beta2 is 0 for an optimizer without.
    """

    norm: float
    travel: float
    beta2: float
    eps: float

    @classmethod
    def of(cls, steps: list[dict[str, Any]], config: Config) -> list[Self]:
        """Compute the scales of each step from the reference's records."""
        scales: list[Self] = []
        norm = travel = 0.0
        for step in steps:
            norm = max(norm, math.sqrt(step.get("gradient", {}).get("square", 0.0)))
            travel += max(step["rates"], default=0.0)
            scales.append(cls(norm, travel, step.get("beta2", 0.0), config.optim.eps or 1e-300))
        return scales


EXACT = Tolerance(0)


def tolerance_of(
    config: Config,
    world_size: int,
    coarsest: str,
    *,
    other_kernels: bool,
    measured: tuple[float, ...] = (),
    divided: bool = False,
) -> Tolerance:
    """Return the tolerance of a run.

    It is zero with --exact and the same kernels. Otherwise it follows from the dtypes and the number of terms.

    Args:
        coarsest: the coarsest dtype that the model computes in.
        other_kernels: the run has another compiler or machine than the reference.
        measured: see Tolerance; it does not apply to other kernels.
        divided: several ranks hold one model.
    """
    if config.exact and not other_kernels and not divided:
        return EXACT
    inner = unit_roundoff(coarsest)
    if config.matmul_precision != "highest" and config.device != "cpu":
        # TF32 has 10 bits after the point, and so this unit roundoff.
        inner = max(inner, 2.0**-11)
    terms = config.micro_batches + world_size + _KERNEL_TERMS * other_kernels + _DIVIDED_TERMS * divided
    # See VerifyRequest.resolved: "auto" means float32 here.
    if config.precision == "auto":
        precision = "float32"
    else:
        precision = config.precision
    sums = unit_roundoff(str(PARAMETERS[precision]))
    other = other_kernels or divided
    return Tolerance(terms, sums, inner, other, () if other else measured)


def unit_roundoff(name: str) -> float:
    """Return half the spacing of a dtype's numbers at 1.

    That is 2**-53 for "float64", 2**-24 for "float32" and 2**-8 for "bfloat16".
    """
    return float(torch.finfo(getattr(torch, name.removeprefix("torch."))).eps) / 2


def _mean(flat: Tensor) -> float:
    """Return the mean in float64, without a float64 copy of the tensor."""
    return math.fsum(float(piece.double().sum()) for piece in torch.split(flat, 2**18)) / max(1, flat.numel())
