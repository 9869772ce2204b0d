"""What a comparison covered: the names that both runs have, and what one has alone.

match = matched(one, two)                   # of two dicts by name
match.both, match.first, match.second
every(one[name] == two[name] for name in match.both)        # False where there is none
"""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Matched", "every", "matched"]


@dataclass(frozen=True)
class Matched:
    """Two sets of names.

    Attributes:
        both: what is in both; `first`, `second`: what is in one of them alone.
    """

    both: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether both sets have names, and the same ones."""
        return bool(self.both) and not self.first and not self.second


def matched(one: Iterable[str], two: Iterable[str]) -> Matched:
    """Match two sets of names, each in its own order."""
    mine, theirs = dict.fromkeys(one), dict.fromkeys(two)
    return Matched(
        tuple(name for name in mine if name in theirs),
        tuple(name for name in mine if name not in theirs),
        tuple(name for name in theirs if name not in mine),
    )


def every(tests: Iterable[bool]) -> bool:
    """Return whether there are tests and none fails.

    `all` holds over nothing, so that a verdict by it may come of two runs that have nothing in common.
    """
    some = False
    for test in tests:
        if not test:
            return False
        some = True
    return some
