"""What a test in a loop goes back to: the names, the calls and the tests that decide how it comes out."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.lint.analysis.budget import WORK
from lockstep.lint.analysis.context import Loop, guards, inside
from lockstep.lint.analysis.index import Scope, Site
from lockstep.lint.analysis.nodes import dotted, walk

__all__ = ["Slice", "made_of"]

# A test that goes back to more names than this decides on everything.
MAX_NAMES = 60


@dataclass
class Slice:
    """The part of a loop that decides a test: its statements, the calls in them, the names that they bind."""

    stmts: list[ast.stmt] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


def made_of(tests: list[ast.expr], loop: Loop, scope: Scope) -> Slice:
    """What the loop computes for some tests in it, by its values and by the tests around them."""
    found = Slice()
    asked = {name for test in tests for name in _names(test)}
    queue = list(asked)
    sites = [site for site in scope.sites if inside(site.stmt, loop, scope.module)]
    while queue and len(found.names) < MAX_NAMES:
        name = queue.pop()
        if name in found.names:
            continue
        found.names.add(name)
        for stmt in (*_bound(name, loop, scope), *(_fed(name, sites) if name in asked else ())):
            WORK.spend(4)
            if not any(stmt is seen for seen in found.stmts):
                found.stmts.append(stmt)
                queue.extend(_names(stmt) if not isinstance(stmt, ast.For | ast.AsyncFor) else _names(stmt.iter))
                queue.extend(name for guard in guards(stmt, scope.module, loop) for name in _names(guard.test))
    found.sites = [site for site in sites if any(site.stmt is stmt for stmt in found.stmts)]
    return found


def _bound(name: str, loop: Loop, scope: Scope) -> Iterator[ast.stmt]:
    """The statements of a loop that give a name its value."""
    return (bind.stmt for bind in scope.binds.get(name, []) if inside(bind.stmt, loop, scope.module))


def _fed(name: str, sites: list[Site]) -> Iterator[ast.stmt]:
    """The calls that give an object something to decide on: `stopper(loss)` for a test of `stopper.stop`.

    Only of the tests' own objects: whatever else is called with arguments, a model say, does not decide by them.
    """
    for site in sites:
        receiver = site.receiver if site.receiver is not None else site.call.func
        if site.call.args and dotted(receiver) in (name, name.split(".")[0]):
            yield site.stmt


def _names(node: ast.AST) -> Iterator[str]:
    """The names and attributes that are read in an expression or a statement, `a.b` besides `a`."""
    for item in walk(node):
        if isinstance(item, ast.Name | ast.Attribute):
            key = dotted(item)
            if key is not None:
                yield key
