"""What the literal arguments of a call decide in the function that it runs."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import has_star

__all__ = ["Entry", "default", "excluded", "returned", "truth"]

# The call through which a search came into a function: its arguments are the parameters, not those of other calls.
Entry = tuple[ast.Call, Scope]


def returned(function: Scope, entry: Entry) -> Iterator[ast.expr]:
    """What a function returns to a call, without the returns that the call's own literal arguments rule out."""
    for stmt in function.stmts:
        if isinstance(stmt, ast.Return) and stmt.value is not None and not excluded(stmt, function, entry):
            yield stmt.value


def excluded(stmt: ast.stmt, function: Scope, entry: Entry | None) -> bool:
    """Whether a statement of a function cannot run in a call, by the tests of its parameters."""
    if entry is None:
        return False
    return any(truth(g.test, function, entry) is (not g.when) for g in guards(stmt, function.module))


def truth(test: ast.expr, function: Scope, entry: Entry | None) -> bool | None:
    """How a test comes out in a call, where its literal arguments alone decide; None where that is not known."""
    if entry is None:
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(test.operand, function, entry)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        found = [truth(value, function, entry) for value in test.values]
        ends = isinstance(test.op, ast.Or)
        if ends in found:
            return ends
        return None if None in found else not ends
    if (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot)
    ):
        left, right = literal(test.left, function, entry), test.comparators[0]
        if left is None or not isinstance(right, ast.Constant):
            return None
        return (left.value == right.value) is isinstance(test.ops[0], ast.Eq | ast.Is)
    value = literal(test, function, entry)
    return None if value is None else bool(value.value)


def literal(node: ast.expr, function: Scope, entry: Entry) -> ast.Constant | None:
    """The literal that a call gives for a parameter that is never bound anew."""
    if not isinstance(node, ast.Name) or node.id not in function.params or node.id in function.binds:
        return None
    value = given(entry[0], function, node.id) or default(function, node.id, entry[0])
    return value if isinstance(value, ast.Constant) else None


def default(function: Scope, name: str, call: ast.Call) -> ast.expr | None:
    """The default of a parameter that a call certainly leaves out."""
    node = function.node
    if has_star(call) or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    plain = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(reversed(plain), reversed(node.args.defaults), strict=False)]
    found: list[ast.expr | None] = [value for arg, value in pairs if arg.arg == name]
    found += [value for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if arg.arg == name]
    return found[0] if found else None
