"""The arms of tests in a training step, and the functions that make one."""

import ast
import re

from lockstep_lint.analysis.context import Guard
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, is_none, last
from lockstep_lint.analysis.project import unit_test

__all__ = ["chooses", "evaluates", "given_by", "leaves", "once", "sites_in"]

# A flag that says that a run trains.
TRAINS = Words(r"^(is_)?train(ing)?$")
# What names a part of the data or of the training.
NAMED = Words(r"val|test|eval|train|phase|split|stage|subset|infer|predict", re.IGNORECASE)


def leaves(guard: Guard, stmt: ast.stmt) -> bool:
    """Whether a test ends the turn, in the other case: before a statement, or in the arm beside it (`if not boxes:
    continue`, then `else: ...`).
    """
    if guard.stmt.lineno <= stmt.lineno and (guard.stmt.end_lineno or 0) < stmt.lineno:
        return True
    ends = isinstance(guard.stmt, ast.If) and isinstance(guard.stmt.body[-1], ast.Continue | ast.Break | ast.Raise)
    return ends and not guard.when


def once(caller: Site) -> bool:
    """Whether a call runs once, as far as can be seen: in a script's own lines, its `main`, or a unit test."""
    return caller.scope.kind != "function" or caller.scope.name == "main" or unit_test(caller.module)


def given_by(function: Scope) -> bool:
    """Whether a function is what the one around it gives back (`def make(model): def step(x): ... return step`)."""
    maker = function.parent
    if maker is None or maker.kind != "function":
        return False
    return any(dotted(value) == function.name for value in maker.returns())


def chooses(test: ast.Compare, scope: Scope) -> bool:
    """Whether a parameter that nothing changes is compared with the name of a way to compute (`kind == "focal"`)."""
    name = dotted(test.left)
    words = (name or "", str(constant(test.comparators[0])))
    return name in scope.params and name not in scope.binds and not any(map(NAMED.search, words))


def sites_in(arm: list[ast.stmt], scope: Scope) -> list[Site]:
    """The calls in some statements of a function."""
    start, end = arm[0].lineno, arm[-1].end_lineno or arm[-1].lineno
    return [site for site in scope.sites if start <= site.stmt.lineno <= end]


def evaluates(guard: Guard) -> bool:
    """Whether a statement stands in the arm where a flag like `is_train` does not hold, or where there is no
    optimizer.
    """
    test, when = guard.test, guard.when
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, when = test.operand, not when
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and when else [test]
    for part in parts:
        if isinstance(part, ast.Compare) and is_none(part.comparators[0]) and "optim" in last(part.left):
            return isinstance(part.ops[0], ast.Is | ast.Eq) is when
    return not when and TRAINS.search(last(test) if isinstance(test, ast.Name | ast.Attribute) else "")
