"""Lengths of training as people say them: `500` steps, `2epochs`, `5%` of the plan; `10%` of an epoch's batches.

is_span("5%")                                           # True
in_steps("5%", steps=2000, samples=64000, batch_size=32)      # 100
in_batches("10%", 42.5)                                 # 4
"""

import math
import re

__all__ = ["SPAN", "in_batches", "in_steps", "is_share", "is_span"]

SPAN = "a length such as 5% or 2epochs"
_SPAN = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(%|epochs?)")


def is_span(value: object) -> bool:
    """Whether it is a share of the plan or a number of epochs."""
    return isinstance(value, str) and _SPAN.fullmatch(value) is not None


def in_steps(value: int | str, *, steps: int, samples: int, batch_size: int) -> int:
    """The steps that `value` is: itself where it is a number, else the nearest number, and not 0 but for a length of 0.

    Args:
        steps: of the whole plan.
        samples: of an epoch.
        batch_size: samples of a step.
    """
    found = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return int(value)
    number = float(found[1])
    exact = number / 100 * steps if found[2] == "%" else number * samples / batch_size
    return max(1, round(exact)) if number else 0


def is_share(value: object) -> bool:
    """Whether it is a share above 0% and up to 100%."""
    found = _SPAN.fullmatch(value) if isinstance(value, str) else None
    return found is not None and found[2] == "%" and 0 < float(found[1]) <= 100


def in_batches(value: int | str, whole: float) -> int:
    """The batches that a limit leaves: itself, or of a share the nearest number, and not 0; 0 leaves all.

    Args:
        whole: batches without the limit, which need not be a whole number.
    """
    number = max(1, round(float(value[:-1]) / 100 * whole)) if isinstance(value, str) else value
    return number or math.ceil(whole)
