"""Answers that are kept for the length of a run, and forgotten together."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["forget", "kept"]

F = TypeVar("F", bound=Callable[..., Any])
_CACHES: list[Any] = []


def kept(function: F) -> F:
    """Remembers a function's answers, for the same arguments, until `forget`."""
    cached = functools.cache(function)
    _CACHES.append(cached)
    return cast(F, cached)


def forget() -> None:
    """Drops all answers that are kept, and with them the files that they are about."""
    for cached in _CACHES:
        cached.cache_clear()
