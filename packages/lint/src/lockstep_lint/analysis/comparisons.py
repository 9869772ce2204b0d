"""What is asked of a rank, without what stands around it."""

import ast

from lockstep_lint.analysis.nodes import last, strings

__all__ = ["bare", "may_be_number"]


def bare(node: ast.expr) -> ast.expr:
    """An expression without what changes neither its truth nor what it names: `bool(x)`, `int(x == y)`, `(x := y)`."""
    while isinstance(node, ast.NamedExpr) or keeps_truth(node):
        node = node.value if isinstance(node, ast.NamedExpr) else node.args[0] if isinstance(node, ast.Call) else node
    return node


def keeps_truth(node: ast.expr) -> bool:
    """Whether a call gives back the truth of its only argument."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or not isinstance(node.func, ast.Name):
        return False
    return node.func.id == "bool" or (node.func.id == "int" and isinstance(node.args[0], ast.Compare | ast.BoolOp))


def may_be_number(node: ast.expr) -> bool:
    """Whether an expression whose truth is asked may be a rank by its words, not an option or the ranks of a group
    (`if rank: return`).
    """
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return False
    words = " ".join((last(node), *strings(node))).lower()
    return ("rank" in words or "procid" in words) and not words.startswith("is_") and not last(node).endswith("ranks")
