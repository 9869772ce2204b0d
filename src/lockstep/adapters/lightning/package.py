"""Recognise the classes and methods of `lightning` and `pytorch_lightning` without importing them.

    kind_of(module, "LightningModule")          # the class of that name that it derives from; None if it does not
    is_user_defined(module, "on_train_start")           # whether the user wrote the method

A user who passes a module has imported the package already.
"""

import inspect
import sys
from functools import cache
from typing import Any

__all__ = [
    "PACKAGES",
    "calls",
    "class_beside",
    "is_user_defined",
    "kind_of",
    "own_methods",
    "takes",
]


PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")


def kind_of(value: Any, name: str) -> type | None:
    """Return an object's base class `name` from one of the packages, or None."""
    for base in type(value).__mro__:
        if base.__name__ == name and _in_packages(base):
            return base
    return None


def is_user_defined(owner: Any, method: str) -> bool:
    """Whether the user, not the package, wrote a method of the class or object."""
    if owner is None:
        return False
    return method in getattr(owner, "__dict__", {}) or _in_class(owner.__class__, method)


def own_methods(owner: Any) -> frozenset[str]:
    """Return the names of an object's methods that the user wrote."""
    names = set()
    for name, value in getattr(owner, "__dict__", {}).items():
        if callable(value):
            names.add(name)
    return _of_class(owner.__class__) | names


@cache
def _of_class(kind: Any) -> frozenset[str]:
    names = set()
    for base in kind.__mro__:
        names.update(vars(base))
    return frozenset(name for name in names if _in_class(kind, name))


@cache
def _in_class(kind: Any, method: str) -> bool:
    owner = None
    for base in kind.__mro__:
        if method in vars(base):
            owner = base
            break
    if owner is None or _in_packages(owner):
        return False
    return not f"{getattr(vars(owner)[method], '__module__', '')}.".startswith(PACKAGES)


def class_beside(instance: Any, module: str, name: str) -> Any:
    """Return a class of a LightningModule's package, by module and name.

    The module is relative to the package, such as `core.optimizer`.
    """
    base = kind_of(instance, "LightningModule")
    assert base is not None
    package = base.__module__.removesuffix(".core.module")
    return getattr(sys.modules[f"{package}.{module}"], name)


def takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def calls(function: Any, *args: Any) -> tuple[Any, ...]:
    """Return as many of the first arguments as the function takes by position."""
    # A bound method is a new object at each access, so its function is the cache's key.
    underlying = getattr(function, "__func__", None)
    if underlying is not None:
        most = _max_positional(underlying) - 1
    else:
        most = _max_positional(function)
    if most < len(args):
        return args[:most]
    return args


@cache
def _max_positional(function: Any) -> int:
    """Return how many positional arguments a function takes; `sys.maxsize` with `*args`."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return sys.maxsize
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )


def _in_packages(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(PACKAGES)
