"""`--shares`: how many of a step's micro-batches each rank computes.

counts_of("5,3")        # (5, 3); () for "equal" and "auto"
"""

import re

from lockstep.config.fields import FieldError, FieldName

__all__ = ["AUTO", "counts_of"]

AUTO = "auto"  # by measured speed


def counts_of(text: str) -> tuple[int, ...]:
    """The number of each rank; () where none is given. Raises FieldError for anything else."""
    if text in ("equal", AUTO):
        return ()
    if not re.fullmatch(r"[1-9][0-9]{0,5}( ?, ?[1-9][0-9]{0,5})*", text):
        raise FieldError(
            FieldName("shares"), f" is '{text}': it must be equal, auto, or a number from 1 for each process: 5,3"
        )
    return tuple(int(part) for part in text.split(","))
