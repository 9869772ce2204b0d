"""Which values are means over the ranks: sums of the ranks' values that are divided by the number of ranks."""

import ast

from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, dotted, idents, last, walk
from lockstep_lint.analysis.rankwords import COUNT

__all__ = ["JOINS", "by_ranks", "divided_after", "mean_after", "means_given"]

# What makes one list of the ranks' lists.
JOINS = {"cat", "concat", "concatenate", "extend", "chain", "from_iterable"}
# Functions that take the mean, of a list or of a list of dictionaries.
MEAN = Words(r"^(mean|fmean)$|^_?(dict|dicts|metrics)_(mean|average|avg)$|^_?(mean|average|avg)_(of_)?(dict|metric)s?$")
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try)


def mean_after(site: Site) -> bool:
    """Whether the list into which the ranks' values are gathered is averaged as it is."""
    name = dotted(site.call.args[0]) if site.call.args else None
    after = [stmt for stmt in site.scope.stmts if stmt.lineno > site.line and not isinstance(stmt, BLOCKS)]
    names = {name} if name is not None else set()
    for stmt in after:
        if any(means(node, each) for each in names for node in walk(stmt)):
            return True
        stacked = isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Call) and last(stmt.value) == "stack"
        if stacked and names & set(idents(stmt)):
            names |= {bind.key for bind in site.scope.bound(stmt)}
    return False


def means_given(site: Site) -> bool:
    """Whether the list of the ranks' values that a call gives is averaged as it is (`sum(losses) / len(losses)`)."""
    names = {bind.key for bind in site.scope.bound(site.stmt) if bind.value is site.call}
    after = [stmt for stmt in site.scope.stmts if stmt.lineno > site.line and not isinstance(stmt, BLOCKS)]
    return any(means(node, name) for stmt in after[:3] for name in names for node in walk(stmt))


def means(node: ast.AST, name: str) -> bool:
    """Whether an expression is the mean of a list (`sum(parts) / world_size`, `torch.stack(parts).mean()`)."""
    if isinstance(node, ast.Call) and MEAN.search(last(node)):
        joined = any(isinstance(part, ast.Call) and last(part) in JOINS for part in walk(node))
        return name in {*idents(node)} and not joined
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and last(node.left) == "sum":
        return name in {*idents(node.left)} and (is_count(node.right) or name in {*idents(node.right)})
    return False


def by_ranks(stmt: ast.stmt, function: Scope) -> bool:
    """Whether a statement divides by the number of ranks."""
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Div):
        return is_count(stmt.value)
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and is_count(node.right) for node in walk(stmt)
    )


def is_count(node: ast.expr) -> bool:
    """Whether a value is the number of ranks."""
    return last(node) == "gpus" or any(COUNT.search(name) for name in idents(node))


def divided_after(site: Site) -> bool:
    """Whether the reduced value itself is divided by the number of ranks, on the way in or later in the function."""
    first = site.call.args[0] if site.call.args else None
    if isinstance(first, ast.Call) and last(first) in ("div", "div_") and first.args and is_count(first.args[0]):
        return True
    name = dotted(first)
    names = {name} if name is not None else set()
    for stmt in site.scope.stmts if names else ():
        if stmt.lineno < site.line:
            continue
        call = stmt.value if isinstance(stmt, ast.Expr) else None
        if isinstance(call, ast.Call) and last(call) == "div_" and names & set(idents(call.func)):
            return bool(call.args) and is_count(call.args[0])
        if divides(stmt, names):
            return True
        if isinstance(stmt, ast.Assign) and taken_out(stmt.value) in names:
            names |= {bind.key for bind in site.scope.bound(stmt)}
    return False


def divides(stmt: ast.stmt, names: set[str]) -> bool:
    """Whether a statement divides one of the names by the number of ranks."""
    if isinstance(stmt, ast.AugAssign):
        return dotted(stmt.target) in names and isinstance(stmt.op, ast.Div) and is_count(stmt.value)
    if not isinstance(stmt, ast.Assign | ast.Return | ast.Expr):
        return False
    quotients = (node for node in walk(stmt) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
    return any(names & set(idents(node.left)) and is_count(node.right) for node in quotients)


def taken_out(value: ast.expr) -> str | None:
    """The name of the tensor whose parts a value is (`loss, right = sums[:2].tolist()`)."""
    while True:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
            value = value.func.value
        elif isinstance(value, ast.Subscript):
            value = value.value
        else:
            return dotted(value)
