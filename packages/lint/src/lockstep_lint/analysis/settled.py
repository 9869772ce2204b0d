"""What comes out alike in every turn of a loop: options, and names that nothing changes there."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import loops
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.kinds import MODEL
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, last, walk

__all__ = ["held_names", "is_fixed", "is_option", "of_a_name", "parts"]

# Where a program keeps its options, and what is no option though it is kept there.
OPTIONS = Words(r"(^|_)(args|opts?|params|cfg|conf|config|hparams|FLAGS)$")
COUNTS = Words(r"step|epoch|(?<![wc]r)(?<!lim)iter|count|current|best|batch_idx", re.IGNORECASE)


def parts(test: ast.expr) -> Iterator[ast.expr]:
    """What a test compares and joins, without literals."""
    stack = [test]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.BoolOp):
            stack.extend(node.values)
        elif isinstance(node, ast.UnaryOp):
            stack.append(node.operand)
        elif isinstance(node, ast.Compare):
            stack.extend((node.left, *node.comparators))
        elif not isinstance(node, ast.Constant):
            yield node


def of_a_name(node: ast.AST) -> bool:
    """Whether a part of a test asks whether a value is there, or what a key is called (`"loss" in key`)."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return isinstance(constant(node.left), str)
    return isinstance(node, ast.Constant) and node.value is None


def held_names(test: ast.expr) -> Iterator[str]:
    """The names in a test, without those of flags that must not hold (`not validating`)."""
    off = {
        id(node)
        for part in walk(test)
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
        for node in walk(part.operand)
    }
    yield from (name for node in walk(test) if id(node) not in off for name in _own(node))


def _own(node: ast.AST) -> Iterator[str]:
    """The name that a node itself is."""
    name = getattr(node, "id", getattr(node, "attr", None))
    if isinstance(name, str):
        yield name


def is_option(node: ast.expr) -> bool:
    """Whether an expression is an option of the command line or of a configuration, the same in every step."""
    if isinstance(node, ast.Subscript) and isinstance(constant(node.slice), str):
        return any(map(OPTIONS.search, idents(node.value))) and not COUNTS.search(str(constant(node.slice)))
    if not isinstance(node, ast.Attribute) or COUNTS.search(node.attr):
        return False
    return any(map(OPTIONS.search, (dotted(node.value) or "").split(".")))


def is_fixed(node: ast.expr, scope: Scope, within: ast.stmt | None) -> bool:
    """Whether a name is bound before the loop and the loops around that, an attribute by its object's `__init__`
    alone, or an attribute says how a model is built (`model.n_classes == 1`).
    """
    key = dotted(node)
    if key is None:
        return False
    if key.startswith("self.") and key.count(".") == 1 and scope.owner is not None:
        methods = [method for method in scope.owner.defs.values() if key in method.binds]
        return [method.name for method in methods] == ["__init__"]
    if isinstance(node, ast.Attribute):
        return MODEL.search(last(node.value)) and not COUNTS.search(node.attr)
    if COUNTS.search(key):
        return False
    binds = scope.binds.get(key, [])
    if key in scope.params or binds:
        if within is None or any(bind.how != "assign" for bind in binds):
            return False
        once = len(binds) + (key in scope.params) == 1
        start = within if once else min((within, *loops(within, scope.module)), key=lambda loop: loop.lineno)
        return all(bind.stmt.lineno < start.lineno for bind in binds)
    top = scope.module.top.binds.get(key, [])
    return len(top) == 1 and top[0].how == "assign"
