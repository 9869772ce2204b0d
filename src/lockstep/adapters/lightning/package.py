"""Recognise the classes and methods of `lightning` and `pytorch_lightning` without importing them.

    kind_of(module, "LightningModule")          # the class of that name that it derives from; None if it does not
    written(module, "on_train_start")           # whether the user wrote the method

Whoever passes a module has imported the package already.
"""

import inspect
import sys
from functools import cache
from typing import Any

__all__ = [
    "PACKAGES",
    "calls",
    "class_beside",
    "kind_of",
    "own_methods",
    "takes",
    "written",
]


PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")


def kind_of(what: Any, name: str) -> type | None:
    """Return an object's base class `name` from one of the packages, or None."""
    return next((kind for kind in type(what).__mro__ if kind.__name__ == name and _is_theirs(kind)), None)


def written(what: Any, method: str) -> bool:
    """Whether the user, not the package, wrote a method of the class or object."""
    if what is None:
        return False
    return method in getattr(what, "__dict__", {}) or _in_class(what.__class__, method)


def own_methods(what: Any) -> frozenset[str]:
    """Return the names of an object's methods that the user wrote."""
    own = {name for name, value in getattr(what, "__dict__", {}).items() if callable(value)}
    return _of_class(what.__class__) | own


@cache
def _of_class(kind: Any) -> frozenset[str]:
    names = {name for each in kind.__mro__ for name in vars(each)}
    return frozenset(name for name in names if _in_class(kind, name))


@cache
def _in_class(kind: Any, method: str) -> bool:
    owner = next((each for each in kind.__mro__ if method in vars(each)), None)
    if owner is None or _is_theirs(owner):
        return False
    return not f"{getattr(vars(owner)[method], '__module__', '')}.".startswith(PACKAGES)


def class_beside(what: Any, module: str, name: str) -> Any:
    """Return a class of the package that a LightningModule comes from, by module and name.

    The module is relative to the package, such as `core.optimizer`.
    """
    base = kind_of(what, "LightningModule")
    assert base is not None
    package = base.__module__.removesuffix(".core.module")
    return getattr(sys.modules[f"{package}.{module}"], name)


def takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def calls(function: Any, *given: Any) -> tuple[Any, ...]:
    """Return as many of the first arguments as the function takes by position."""
    own = getattr(function, "__func__", None)  # a bound method is another object each time
    most = _places(own) - 1 if own is not None else _places(function)
    return given[:most] if most < len(given) else given


@cache
def _places(function: Any) -> int:
    """The number of positional arguments of a function; `sys.maxsize` with `*args`."""
    known = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in known):
        return sys.maxsize
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in known)


def _is_theirs(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(PACKAGES)
