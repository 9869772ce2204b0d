"""Recognise gradient accumulation, and parameters that DDP does not reduce."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import Guard
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, idents, last, walk
from lockstep_lint.analysis.view import View

__all__ = [
    "is_micro_loop",
    "modulo",
    "periodic",
    "told_when",
]


# What the parts of a batch are called.
PARTS = ("micro", "accum", "chunk")
# What cuts a batch.
CUTS = ("split", "chunk", "tensor_split")


def is_micro_loop(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether an inner loop with a backward runs over parts of a batch (not over samples, tasks or models)."""
    if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range":
        if len(loop.iter.args) == 1 and is_one(view, loop.iter.args[0], scope):
            return False
        text = ast.unparse(loop).lower()
        return any(word in text for word in ("accum", "micro", "grad_acc"))
    if any(isinstance(node, ast.Call) and last(node) in CUTS and not is_text(node) for node in walk(loop.iter)):
        return True
    return any(word in name.lower() for name in idents(loop.iter) for word in PARTS)


def is_text(call: ast.Call) -> bool:
    """Check whether a call divides a text."""
    return not call.args or isinstance(constant(call.args[0]), str)


def told_when(view: View, site: Site) -> Guard | None:
    """Return the test that a scaler's helper gets for its step (`update_grad=(i + 1) % n == 0`)."""
    tests = (part.value for part in site.call.keywords if rarely(view, part.value, site.scope))
    return next((Guard(test, True, site.stmt) for test in tests), None)


def rarely(view: View, test: ast.expr, scope: Scope) -> bool:
    """Check whether a test asks for the remainder of a count, by another number than 1."""
    found = modulo(test, scope)
    return found is not None and not is_one(view, found[0].right, scope)


def is_one(view: View, count: ast.expr, scope: Scope) -> bool:
    """Check whether a number of micro-batches certainly is 1 (`accum_steps = 1`); an option may change."""
    option = isinstance(count, ast.Attribute) and last(count.value) != "self"
    return not option and all(constant(origin.node) == 1 for origin in view.origins.of(count, scope))


def periodic(view: View, guard: Guard, scope: Scope) -> bool:
    """Check whether a test, or the value of its name, holds in every n-th turn."""
    if modulo(guard.test, scope) is not None:
        return rarely(view, guard.test, scope)
    if handed(view, guard.test, scope):
        return True
    counts = any("accum" in name and "loss" not in name for name in idents(guard.test))
    return counts and not asks_whether(guard.test)  # an `accum_loss` is asked whether it is finite


def handed(view: View, test: ast.expr, scope: Scope) -> bool:
    """Check whether a test is of a parameter for which the callers pass what holds in every n-th turn."""
    if not isinstance(test, ast.Name) or test.id not in scope.params or test.id in scope.binds:
        return False
    given = [(passed(site, scope, test.id), site.scope) for site in view.calls.callers(scope)]
    return any(value is not None and rarely(view, value, home) for value, home in given)


def asks_whether(test: ast.expr) -> bool:
    """Check whether a test asks if anything is accumulated at all (`steps > 1`), the same in every turn."""
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and constant(test.comparators[0]) == 1


def modulo(test: ast.expr, scope: Scope) -> tuple[ast.BinOp, ast.expr] | None:
    """Return the `a % b` in a test, with the test itself or with what a name in it was given."""
    found = _remainder(test)
    if found is not None:
        return found, test
    for node in without_order(test):
        for bind in scope.binds.get(dotted(node) or "", []):
            if bind.value is not None and bind.stmt.lineno < test.lineno and bind.how == "assign":
                found = _remainder(bind.value)
                if found is not None:
                    return found, bind.value
    return None


def without_order(test: ast.expr) -> Iterator[ast.AST]:
    """Yield the parts of a test, without what it only compares by size (`step < resume_step`)."""
    operands = test.values if isinstance(test, ast.BoolOp) else [test]
    for operand in operands:
        if not (isinstance(operand, ast.Compare) and isinstance(operand.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)):
            yield from walk(operand)


def _remainder(value: ast.expr) -> ast.BinOp | None:
    for node in walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            return None if isinstance(node.left, ast.JoinedStr) else node
    return None
