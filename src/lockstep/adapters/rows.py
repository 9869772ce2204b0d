"""A row of a table, and how one is written.

ARGUMENTS = rows("max_steps | becomes | max_steps")
"""

from typing import NamedTuple

__all__ = [
    "Row",
    "rows",
]


class Row(NamedTuple):
    """What an argument comes to.

    Attributes:
        kind: "becomes" (a field of the Config), "task" (the task reads it, or the methods that it calls), "idle" (it
            has no meaning here, or lockstep does it anyway), "refused" (where it is set).
        what: which field; what reads it; why, and the way out.
    """

    kind: str
    what: str


def rows(lines: str) -> dict[str, Row]:
    """The table of `name | kind | what`, a row a line."""
    parts = ([part.strip() for part in line.split("|")] for line in lines.strip().splitlines())
    return {name: Row(kind, what) for name, kind, what in parts}
