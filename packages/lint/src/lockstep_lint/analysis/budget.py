"""Limit the work on a file, and cache answers for one run of the linter."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["WORK", "TooIntricate", "cache_answers", "forget"]


F = TypeVar("F", bound=Callable[..., Any])
_CACHES: list[Any] = []


def cache_answers(function: F) -> F:
    """Cache a function's answers by its arguments, until `forget`."""
    cached = functools.cache(function)
    _CACHES.append(cached)
    return cast(F, cached)


def forget() -> None:
    """Clear all caches, and with them the files that the answers are about."""
    for cached in _CACHES:
        cached.cache_clear()


# Steps up a syntax tree, calls looked at, values followed: about 2 s of them. Training scripts use a hundredth.
LIMIT = 1_000_000


class TooIntricate(Exception):
    """Raised when a file has used up its work; findings made until then are kept."""


class Work:
    """The work that is left for the file being checked."""

    def __init__(self) -> None:
        self.left = LIMIT

    def start(self) -> None:
        """Give the next file its share."""
        self.left = LIMIT

    def spend(self, amount: int = 1) -> None:
        """Take away some work; raises TooIntricate when none is left."""
        self.left -= amount
        if self.left < 0:
            raise TooIntricate


# One for the process: files are checked one after the other, and every question of every rule draws on it.
WORK = Work()
