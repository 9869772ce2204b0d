"""LS064: a sum of the batches' means, divided by the number of samples."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import loops
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import constant, dotted, keyword, last, mentions, walk
from lockstep_lint.analysis.training import LOSSES
from lockstep_lint.analysis.view import View
from lockstep_lint.events.marks import summed
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

MESSAGE = "divides a sum of the batches' means by the number of samples, not of batches: the mean is far too small"
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try)
READS = ("item", "detach", "cpu", "float", "mean")


def check(view: View) -> Iterator[Found]:
    """Find sums of losses over a loader's batches that are divided by the length of its data set."""
    if "len(" not in view.module.text:
        return
    for scope in view.scopes:
        for stmt in scope.stmts if scope.kind != "class" else ():
            for node, name, bottom in quotients(stmt):
                if counts_samples(bottom) and sums_means(view, name, stmt, scope):
                    yield Found(node, MESSAGE)


def quotients(stmt: ast.stmt) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Yield the divisions of names in a statement, with the name and the divisor."""
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Div):
        yield stmt, dotted(stmt.target) or "", stmt.value
    for node in walk(stmt) if not isinstance(stmt, BLOCKS) else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node, dotted(node.left) or "", node.right


def counts_samples(bottom: ast.expr) -> bool:
    """Check whether a divisor is `len(loader.dataset)`."""
    inner = bottom.args[0] if isinstance(bottom, ast.Call) and last(bottom) == "len" and bottom.args else None
    return isinstance(inner, ast.Attribute) and inner.attr == "dataset"


def sums_means(view: View, name: str, stmt: ast.stmt, scope: Scope) -> bool:
    """Check whether a name adds up, over a loader, nothing but losses that are means of a batch."""
    binds = [b for b in scope.binds.get(name, []) if b.stmt is not stmt and b.stmt.lineno <= stmt.lineno]
    added = [b.stmt for b in binds if loops(b.stmt, scope.module) and summed(b.stmt)[1] is not None]
    rest = [b for b in binds if b.stmt not in added and not isinstance(constant(b.value), int | float)]
    if not added or rest:
        return False
    for each in added:
        loop, value = loops(each, scope.module)[0], summed(each)[1]
        over_loader = isinstance(loop, ast.For) and view.kinds.is_loader(view.kinds.iterated(loop.iter, scope), scope)
        if not over_loader or value is None or not is_mean(view, value, scope):
            return False
    return True


def is_mean(view: View, value: ast.expr, scope: Scope) -> bool:
    """Check whether a value is a loss that a criterion of torch, or `F.cross_entropy`, means over a batch."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in READS:
        value = value.func.value
    made = view.origins.of(value, scope)
    return bool(made) and all(
        origin.call is not None and is_criterion(view, origin.call, origin.scope) for origin in made
    )


def is_criterion(view: View, call: ast.Call, scope: Scope) -> bool:
    """Check whether a call is a loss of torch without a `reduction`."""
    if keyword(call, "reduction") is not None:
        return False
    full = view.names.qualify(call.func, scope)
    if full.startswith("torch.nn.functional."):
        return LOSSES.search(last(call)) or "entropy" in full
    makers = list(view.origins.calls_of(call.func, scope))
    return (
        bool(makers)
        and all(
            name.startswith("torch.nn.") and name.endswith("Loss") and keyword(maker, "reduction") is None
            for maker, _, name in makers
        )
        and not any(mentions(arg, "None") for arg in call.args)
    )


RULE = Rule("LS064", Severity.ERROR, Confidence.HIGH, check)
