"""Find how long a schedule is told to be, and of what a length is counted."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.nodes import argument, constant, idents, keyword, last, strings, walk
from lockstep_lint.analysis.view import View

__all__ = ["PARTS", "Counted", "Made", "counted", "horizons", "length", "number"]

# The class of a scheduler, the call that makes it and the scope of that.
Made = tuple[str, ast.Call, Scope]
# What a length is worked out by.
PARTS = (ast.BinOp, ast.UnaryOp, ast.Call)
# Where a scheduler is told its length, and by which name.
LENGTHS = {
    "CosineAnnealingLR": (1, "T_max"),
    "LinearLR": (3, "total_iters"),
    "PolynomialLR": (1, "total_iters"),
    "get_linear_schedule_with_warmup": (2, "num_training_steps"),
    "get_cosine_schedule_with_warmup": (2, "num_training_steps"),
    "get_cosine_with_hard_restarts_schedule_with_warmup": (2, "num_training_steps"),
    "get_polynomial_decay_schedule_with_warmup": (2, "num_training_steps"),
    "get_scheduler": (3, "num_training_steps"),
}


def length(name: str, call: ast.Call) -> ast.expr | None:
    """Return what a scheduler is told of its length."""
    at, word = LENGTHS.get(name, (None, ""))
    given = keyword(call, "T_max") or keyword(call, "num_training_steps")
    return given or (argument(call, at, word) if at is not None else None)


def horizons(view: View, name: str, call: ast.Call, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield what a scheduler is told of its length, the steps of an epoch too, or what its factor is divided by."""
    given = (keyword(call, word) for word in ("steps_per_epoch", "total_steps"))
    yield from ((each, scope) for each in (length(name, call), *given) if each is not None)
    factor = argument(call, 1, "lr_lambda") if name == "LambdaLR" else None
    function = view.names.definition(factor, scope) if isinstance(factor, ast.Name) else None
    body, home = (function.node, function) if function is not None else (factor, scope)
    arguments = getattr(body, "args", None)
    if isinstance(arguments, ast.arguments) and body is not None:
        own = {arg.arg for arg in arguments.args}
        parts = (part for part in walk(body) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div))
        yield from ((part.right, home) for part in parts if own & set(idents(part.left)))


ROUNDS = ("int", "ceil", "floor", "round", "float", "max", "min")
# A length, or a part of one, that is counted: of what, where, and what it is divided by.
Counted = tuple[ast.expr, Scope, tuple[ast.expr, ...]]


def counted(
    view: View, node: ast.expr, scope: Scope, around: tuple[ast.expr, ...] = (), depth: int = 8
) -> Iterator[Counted]:
    """Yield what the lengths are of that a number is the product of."""
    if depth == 0:
        return
    if isinstance(node, ast.BinOp):
        shared = isinstance(node.op, ast.Div | ast.FloorDiv)
        yield from counted(view, node.left, scope, (*around, node.right) if shared else around, depth - 1)
        if isinstance(node.op, ast.Mult):
            yield from counted(view, node.right, scope, around, depth - 1)
    elif isinstance(node, ast.UnaryOp):
        yield from counted(view, node.operand, scope, around, depth - 1)
    elif isinstance(node, ast.Call) and last(node) == "len" and len(node.args) == 1:
        yield node.args[0], scope, around
    elif isinstance(node, ast.Call) and last(node) in ROUNDS:
        for given in node.args:
            yield from counted(view, given, scope, around, depth - 1)
    elif isinstance(node, ast.Name | ast.Attribute):
        found = [origin for origin in view.origins.of(node, scope) if isinstance(origin.node, PARTS)]
        for origin in found if len(found) == 1 else ():
            yield from counted(view, origin.node, origin.scope, around, depth - 1)


def number(view: View, node: ast.expr, scope: Scope) -> int:
    """A number that is written out, or the default of the option that a name stands for; 0 where it is neither."""
    value = constant(node)
    if isinstance(value, int | float):
        return int(value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        sides = [
            number(view, o.node, o.scope) for side in (node.left, node.right) for o in view.origins.of(side, scope)
        ]
        return max(sides, default=0) if all(sides) else 0
    found = [
        value for member in view.project.closure(view.module) for name, value in options(member) if name == last(node)
    ]
    return found[0] if len(found) == 1 and isinstance(node, ast.Attribute) else 0


@kept
def options(module: Module) -> tuple[tuple[str, int], ...]:
    """Return the names and the defaults of a program's options that are numbers."""
    found = []
    for site in module.sites("add_argument") if "default" in module.text else ():
        value = constant(keyword(site.call, "default"))
        names = [text.lstrip("-").replace("-", "_") for text in strings(site.call) if text.startswith("--")]
        found += [(name, int(value)) for name in names[:1] if isinstance(value, int | float)]
    return tuple(found)
