"""What surrounds a statement: its loops, the tests that guard it, the `with` blocks and `try`s that it stands in."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.budget import WORK
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import walk

__all__ = [
    "Guard",
    "Loop",
    "above",
    "apart",
    "choices",
    "following",
    "guards",
    "inside",
    "loops",
    "parted",
    "withs",
]

Loop = ast.For | ast.AsyncFor | ast.While
# An `elif` chain is a tower of statements; nothing that matters stands higher than this.
MAX_CLIMB = 150


@dataclass(eq=False, slots=True)
class Guard:
    """A test that must have come out `when` for the statement to run."""

    test: ast.expr
    when: bool
    stmt: ast.stmt


def above(stmt: ast.stmt, module: Module) -> tuple[tuple[ast.stmt, str], ...]:
    """The statements around `stmt`, innermost first, each with the block that holds it; ends at the scope."""
    found = _chain(stmt, module)
    WORK.spend(len(found))
    return found


@kept
def _chain(stmt: ast.stmt, module: Module) -> tuple[tuple[ast.stmt, str], ...]:
    found: list[tuple[ast.stmt, str]] = []
    current = module.up.get(stmt)
    while current is not None and len(found) < MAX_CLIMB:
        found.append(current)
        current = module.up.get(current[0])
    return tuple(found)


def loops(stmt: ast.stmt, module: Module) -> list[Loop]:
    """The loops of the same scope whose body holds `stmt`, innermost first; a loop is not inside itself."""
    return [node for node, place in above(stmt, module) if isinstance(node, Loop) and place == "body"]


def apart(site: Site, other: Site) -> bool:
    """Whether two calls of a scope stand in two arms of one `if`, so that no pass makes both."""
    return parted(site, other.stmt)


def parted(site: Site, stmt: ast.stmt) -> bool:
    """Whether a call and a statement of its scope stand in two arms of one `if`."""
    arms = dict(above(stmt, site.module))
    around = above(site.stmt, site.module)
    return any(isinstance(node, ast.If) and {place, arms.get(node)} == {"body", "orelse"} for node, place in around)


def inside(stmt: ast.stmt, outer: ast.stmt, module: Module) -> bool:
    """Whether `stmt` stands in the body of `outer`."""
    return any(node is outer and place == "body" for node, place in above(stmt, module))


def withs(stmt: ast.stmt, module: Module) -> Iterator[ast.expr]:
    """The context expressions of the `with` blocks around `stmt`, and of `stmt` itself if it is one."""
    if isinstance(stmt, ast.With | ast.AsyncWith):
        yield from (item.context_expr for item in stmt.items)
    for node, _ in above(stmt, module):
        if isinstance(node, ast.With | ast.AsyncWith):
            yield from (item.context_expr for item in node.items)


def guards(stmt: ast.stmt, module: Module, within: ast.stmt | None = None) -> Iterator[Guard]:
    """The tests that decide whether `stmt` runs: the `if`s around it and the early exits before it.

    With `within`, only the tests between that statement and `stmt`.
    """
    current = stmt
    for node, place in above(stmt, module):
        if node is within:
            yield from _exits(getattr(node, place, []), current)
            return
        if isinstance(node, ast.If) and place in ("body", "orelse"):
            yield Guard(node.test, place == "body", node)
        yield from _exits(getattr(node, place, []), current)
        current = node
    yield from _exits(_scope_body(current, module), current)


def choices(site: Site) -> Iterator[Guard]:
    """The tests inside a call's own statement that decide whether it is made: `test and f()`, `f() if test else x`,
    `[f(x) for x in y if test]`.
    """
    for node in walk(site.stmt):
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp) and any(
            item is site.call for item in walk(node.elt)
        ):
            yield from (Guard(test, True, site.stmt) for part in node.generators for test in part.ifs)
        if isinstance(node, ast.IfExp):
            for arm, when in ((node.body, True), (node.orelse, False)):
                if any(item is site.call for item in walk(arm)):
                    yield Guard(node.test, when, site.stmt)
        elif isinstance(node, ast.BoolOp):
            place = next((i for i, v in enumerate(node.values) if any(item is site.call for item in walk(v))), 0)
            yield from (Guard(value, isinstance(node.op, ast.And), site.stmt) for value in node.values[:place])


def _exits(block: object, stop: ast.stmt) -> Iterator[Guard]:
    """`if test: return` before a statement guards it."""
    if not isinstance(block, list) or stop not in block:
        return
    end = block.index(stop)
    WORK.spend(end // 8)
    for stmt in block[max(0, end - MAX_CLIMB) : end]:
        if isinstance(stmt, ast.If) and not stmt.orelse and _leaves(stmt.body[-1]):
            yield Guard(stmt.test, False, stmt)


def following(stmt: ast.stmt, module: Module) -> list[ast.stmt]:
    """The statements after `stmt` in its block."""
    parent, place = module.up.get(stmt, (None, ""))
    block = getattr(parent, place, []) if parent is not None else _scope_body(stmt, module)
    return block[block.index(stmt) + 1 :] if stmt in block else []


def _leaves(stmt: ast.stmt) -> bool:
    if isinstance(stmt, ast.Return | ast.Continue | ast.Break | ast.Raise):
        return True
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        func = stmt.value.func
        return (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")) in ("exit", "_exit", "quit")
    return False


def _scope_body(stmt: ast.stmt, module: Module) -> list[ast.stmt]:
    scope = _home(stmt, module)
    return list(getattr(scope.node, "body", [])) if scope is not None else []


def _home(stmt: ast.stmt, module: Module) -> Scope | None:
    table: dict[ast.stmt, Scope] | None = module.__dict__.get("homes")
    if table is None:
        table = {top: scope for scope in module.scopes for top in getattr(scope.node, "body", [])}
        module.__dict__["homes"] = table
    return table.get(stmt)
