"""Parse the tables of arguments, one row a line.

ARGUMENTS = rows("max_steps | becomes | max_steps")
"""

from typing import NamedTuple

__all__ = [
    "rows",
]


class Row(NamedTuple):
    """The treatment of an argument.

    Attributes:
        kind: "becomes" (a field of the Config), "task" (the task, or a method that it calls, reads it), "idle" (no
            meaning here, or lockstep always does it), "refused" (an error if it is set).
        what: which field; what reads it; or why it is refused, and the way out.
    """

    kind: str
    what: str


def rows(lines: str) -> dict[str, Row]:
    """Parse the lines `name | kind | what` into a table."""
    cells = ([cell.strip() for cell in line.split("|")] for line in lines.strip().splitlines())
    return {name: Row(treatment, what) for name, treatment, what in cells}
