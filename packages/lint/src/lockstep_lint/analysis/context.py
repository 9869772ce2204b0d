"""Find the loops, guards, `with` and `try` blocks around a statement."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.budget import WORK, cache_answers
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, idents, last, walk

__all__ = [
    "TURN",
    "Guard",
    "Loop",
    "above",
    "apart",
    "are_in_two_arms",
    "choices",
    "each_update",
    "every_so_often",
    "guards",
    "in_most_turns",
    "in_turn",
    "inside",
    "loops",
    "now_and_then",
    "withs",
]


Loop = ast.For | ast.AsyncFor | ast.While
# An `elif` chain is a tower of statements; nothing that matters stands higher than this.
MAX_CLIMB = 150


@dataclass(eq=False, slots=True)
class Guard:
    """A test with the outcome `when` that the statement needs to run."""

    test: ast.expr
    when: bool
    stmt: ast.stmt


def above(stmt: ast.stmt, module: Module) -> tuple[tuple[ast.stmt, str], ...]:
    """Return the statements around `stmt` in its scope, innermost first, each with its block."""
    found = _chain(stmt, module)
    WORK.spend(len(found))
    return found


@cache_answers
def _chain(stmt: ast.stmt, module: Module) -> tuple[tuple[ast.stmt, str], ...]:
    found: list[tuple[ast.stmt, str]] = []
    current = module.up.get(stmt)
    while current is not None and len(found) < MAX_CLIMB:
        found.append(current)
        current = module.up.get(current[0])
    return tuple(found)


def loops(stmt: ast.stmt, module: Module) -> list[Loop]:
    """Return the loops around `stmt` in its scope, innermost first. A loop does not contain itself."""
    return [node for node, place in above(stmt, module) if isinstance(node, Loop) and place == "body"]


def apart(site: Site, other: Site) -> bool:
    """Check whether two calls are in two arms of one `if`."""
    return are_in_two_arms(site, other.stmt)


def are_in_two_arms(site: Site, stmt: ast.stmt) -> bool:
    """Check whether a call and a statement are in two arms of one `if`."""
    arms = dict(above(stmt, site.module))
    around = above(site.stmt, site.module)
    return any(isinstance(node, ast.If) and {place, arms.get(node)} == {"body", "orelse"} for node, place in around)


def inside(stmt: ast.stmt, outer: ast.stmt, module: Module) -> bool:
    """Check whether `stmt` is in the body of `outer`."""
    return any(node is outer and place == "body" for node, place in above(stmt, module))


def withs(stmt: ast.stmt, module: Module) -> Iterator[ast.expr]:
    """Yield the context expressions of the `with` blocks around `stmt`, its own included."""
    if isinstance(stmt, ast.With | ast.AsyncWith):
        yield from (item.context_expr for item in stmt.items)
    for node, _ in above(stmt, module):
        if isinstance(node, ast.With | ast.AsyncWith):
            yield from (item.context_expr for item in node.items)


def guards(stmt: ast.stmt, module: Module, within: ast.stmt | None = None) -> tuple[Guard, ...]:
    """Return the tests that decide whether `stmt` runs: `if`s around it, early exits before it.

    With `within`, only the tests between that statement and `stmt`.
    """
    return _guards(stmt, module, within)


@cache_answers
def _guards(stmt: ast.stmt, module: Module, within: ast.stmt | None) -> tuple[Guard, ...]:
    return tuple(_tests(stmt, module, within))


def _tests(stmt: ast.stmt, module: Module, within: ast.stmt | None) -> Iterator[Guard]:
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
    """Yield the tests in a call's own statement that decide it (`test and f()`)."""
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
    """Yield the guards of early exits (`if test: return`) before a statement."""
    if not isinstance(block, list):
        return
    try:
        end = block.index(stop)
    except ValueError:
        return
    WORK.spend(end // 8)
    for stmt in block[max(0, end - MAX_CLIMB) : end]:
        if isinstance(stmt, ast.If) and not stmt.orelse and _leaves(stmt.body[-1]):
            yield Guard(stmt.test, False, stmt)


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


# What counts the turns of a loop.
TURN = Words(r"^(i|j|it|ii|idx|n)$|step|iter|batch_?(idx|i|id|num)$|epoch", re.IGNORECASE)
# How many batches make one step of the optimizer.
ACCUMULATES = Words(r"accum", re.IGNORECASE)
# How far apart the turns are in which something is done.
APART = re.compile(r"freq|interval|every", re.IGNORECASE)
# What somebody turns on to look at a run.
LOOKS = re.compile(r"debug|verbose|dry_run|profil", re.IGNORECASE)
# They ask for it by themselves.
ASKS = ("every", "should_log", "is_last_step")


def every_so_often(test: ast.expr) -> bool:
    """Check whether a test asks for every n-th step."""
    for node in walk(test):
        if turns_left(node) is not None or (isinstance(node, ast.Call) and last(node) in ASKS):
            return True
    return any(APART.search(name) or LOOKS.search(name) for name in idents(test))


def now_and_then(test: ast.expr, when: bool) -> bool:
    """Check whether a test comes out `when` in every n-th step only."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return now_and_then(test.operand, not when)
    if isinstance(test, ast.BoolOp):
        found = [now_and_then(value, when) for value in test.values]
        return all(found) if isinstance(test.op, ast.And) and not when else any(found)
    divided = in_turn(test)
    if divided is not None:
        return divided is when
    if not when and not any(APART.search(name) for name in idents(test)):
        looks = any(LOOKS.search(name) for name in idents(test))
        return every_so_often(test) and not looks  # `if args.debug: break`
    return every_so_often(test)


def in_most_turns(guard: Guard) -> bool:
    """Check whether a statement runs in all iterations but one or every n-th."""
    test, when = guard.test, guard.when
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, when = test.operand, not when
    if isinstance(test, ast.BoolOp) and not when:
        return any(in_turn(value) for value in test.values)  # with the last turn besides, most often
    if in_turn(test) is not None:
        return in_turn(test) is not when
    counts = isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and TURN.search(test.left.id)
    if not counts or not isinstance(test, ast.Compare) or not isinstance(constant(test.comparators[0]), int):
        return False
    return isinstance(test.ops[0], ast.NotEq | ast.Gt) if when else isinstance(test.ops[0], ast.Eq)


def each_update(guard: Guard) -> bool:
    """Check whether a statement runs once per optimizer step (`if step % accumulation_steps == 0:`)."""
    tests = guard.test.values if isinstance(guard.test, ast.BoolOp) else [guard.test]
    if isinstance(guard.test, ast.BoolOp) and not isinstance(guard.test.op, ast.Or):
        return False
    return any(
        in_turn(test) is guard.when
        and any(ACCUMULATES.search(last(by)) for node in walk(test) if (by := turns_left(node)) is not None)
        for test in tests
    )


def in_turn(test: ast.expr) -> bool | None:
    """Return True for a test of every n-th turn, False for the others, else None."""
    if turns_left(test) is not None:
        return False
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.NotEq):
        return None
    counts = any(turns_left(side) is not None for side in (test.left, test.comparators[0]))
    return isinstance(test.ops[0], ast.Eq) if counts else None


def turns_left(node: ast.AST) -> ast.expr | None:
    """Return the divisor of an iteration counter (`step % 50`). A rank is no counter."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return None
    return node.right if not any("rank" in name for name in idents(node.left)) else None
