"""`--profile`: which steps are traced.

range_of("100:110")     # (100, 110): from the 100th to the 110th; None for ""
"""

import re

from lockstep.config.fields import FieldError, FieldName

__all__ = ["LONGEST", "range_of"]

LONGEST = 1000  # steps: a trace of as many is gigabytes


def range_of(text: str) -> tuple[int, int] | None:
    """First and last step, counted from 1 as in metrics.jsonl. Raises FieldError for anything else."""
    if not text:
        return None
    found = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last:
        raise FieldError(FieldName("profile"), f" is '{text}': it must be FIRST:LAST, two steps from 1, as 100:110")
    if last - first >= LONGEST:
        raise FieldError(
            FieldName("profile"), f" is '{text}', more than {LONGEST} steps: ten show what there is to see"
        )
    return first, last
