"""Bound what two orders of the same additions may differ by, for `lockstep verify` and `lockstep compare`.

order_bound(terms=10, unit=2**-53, step=0)        of a gradient, as a share of the whole gradient's norm

docs/inside/verify.md derives the bounds. This file needs no torch, like all that compares traces.
"""

__all__ = ["CEILING", "INNER", "LEAST", "ROUNDOFF", "order_bound"]

# Unit roundoff of each dtype: half the spacing of its numbers at 1.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Growth of an error through model and optimizer from step to step: the one assumption.
_SAFETY = 32.0
# Roundings of products and sums inside the model, once its weights differ in their last digits: at most, and those
# that are always allowed.
INNER = 16.0
LEAST = 4.0
# A larger difference is never rounding.
CEILING = 0.25


def order_bound(terms: int, unit: float, step: int) -> float:
    """Return the 2-norm by which `terms` terms, added in another order, may be off after `step` updates.

    Args:
        unit: unit roundoff of the gradients' dtype.
    """
    return _SAFETY * terms * unit * (step + 1)
