"""Find the class that all candidates of a look-up at run time share: of a table, a module or a registry."""

import ast
from collections.abc import Iterable, Iterator
from typing import Protocol

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.names import Names
from lockstep_lint.analysis.nodes import constant, dotted, last

__all__ = ["Values", "shared_class"]

# Methods of a registry that make an object, and of a table that give a class.
BUILDS, GETS = ("build", "create"), ("get",)
MAX_CANDIDATES = 40


class Values(Protocol):
    """Says what a name may be given."""

    names: Names

    def values(self, key: str, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the values of a name in its own or an enclosing scope."""

    def imported(self, key: str, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the values of an imported name."""


def shared_class(calls: Values, func: ast.expr, scope: Scope) -> Scope | None:
    """Return the class whose methods all candidates for a called expression have; None if one is not known.

    `TABLE[name](...)`, `TABLE.get(name)(...)`, `getattr(module, "Name")(...)`, `REGISTRY.build(cfg)`.
    """
    found = list(candidates(calls, func, scope))
    if not found or len(found) > MAX_CANDIDATES or any(each is None or each.kind != "class" for each in found):
        return None
    known = [each for each in found if each is not None]
    lines = [[each, *calls.names.parents(each)] for each in known]
    for place, base in enumerate(lines[0]):
        methods = {name for owner in lines[0][place:] for name in owner.defs} - {"__init__"}
        if all(base in line and not overrides(line[: line.index(base)], methods) for line in lines):
            return base
    return None


def overrides(line: list[Scope], methods: set[str]) -> bool:
    """Check whether a class, before the one that it is taken for, has one of some methods of its own."""
    return any(not methods.isdisjoint(owner.defs) for owner in line)


def candidates(calls: Values, func: ast.expr, scope: Scope) -> Iterable[Scope | None]:
    """Return the classes that a called expression may stand for; None stands for what is not known."""
    if isinstance(func, ast.Subscript):
        return in_table(calls, func.value, scope, constant(func.slice))
    if isinstance(func, ast.Attribute) and func.attr in BUILDS:
        return registered(calls, func.value, scope)
    if isinstance(func, ast.Call) and last(func) == "getattr" and len(func.args) == 2:
        name = constant(func.args[1])
        of = ast.copy_location(ast.Attribute(func.args[0], str(name), ast.Load()), func)
        return [calls.names.definition(of, scope)] if isinstance(name, str) else []
    if isinstance(func, ast.Call) and isinstance(func.func, ast.Attribute) and func.func.attr in GETS and func.args:
        table = func.func.value
        found = in_table(calls, table, scope, constant(func.args[0]))
        return found or registered(calls, table, scope)
    return []


def in_table(calls: Values, node: ast.expr, scope: Scope, key: object) -> list[Scope | None]:
    """Return the entries of a written dictionary, under one key where that is written out."""
    name = dotted(node)
    tables = [(node, scope)] if name is None else [*calls.values(name, scope), *calls.imported(name, scope)]
    if len(tables) != 1 or not isinstance(tables[0][0], ast.Dict):
        return registered(calls, node, scope) if not tables or name is not None else []
    table, home = tables[0]
    pairs = zip(table.keys, table.values, strict=True)  # type: ignore[attr-defined]
    found = [value for each, value in pairs if key is None or constant(each) == key]
    return [calls.names.definition(value, home) for value in found]


def registered(calls: Values, node: ast.expr, scope: Scope) -> list[Scope | None]:
    """Return the classes with a decorator of a registry (`@MODELS.register()`)."""
    name = last(node)
    members = calls.names.project.family(scope.module) if name.isupper() else ()
    scopes = (each for member in members if name in member.text for each in member.top.defs.values())
    return [each for each in scopes if any(of_registry(item, name) for item in each.decorators)]


def of_registry(decorator: ast.expr, name: str) -> bool:
    """Check whether a decorator is a method of a registry of a name."""
    func = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(func, ast.Attribute) and last(func.value) == name and func.attr.startswith("register")
