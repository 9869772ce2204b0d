"""`--shares`: how many of a step's micro-batches each rank computes.

counts_of("5,3")        # (5, 3); () for "equal"
"""

import re

from lockstep.config.fields import FieldError, FieldName

__all__ = ["counts_of"]


def counts_of(text: str) -> tuple[int, ...]:
    """The number of each rank; () where all have as many. Raises FieldError for anything else."""
    if text == "equal":
        return ()
    if not re.fullmatch(r"[1-9][0-9]{0,5}( ?, ?[1-9][0-9]{0,5})*", text):
        raise FieldError(
            FieldName("shares"), f" is '{text}': it must be equal, or a number from 1 for each process: 5,3"
        )
    return tuple(int(part) for part in text.split(","))
