"""Which parts of a test need a number that stands on the device."""

import ast

from lockstep.lint.analysis.calls import given
from lockstep.lint.analysis.devices import on_device
from lockstep.lint.analysis.index import Scope
from lockstep.lint.analysis.losses import gives_number, key, read
from lockstep.lint.analysis.nodes import base, constant, dotted, last, walk
from lockstep.lint.analysis.view import View

__all__ = ["asked", "on_losses"]

FINITE = {"isnan", "isinf", "isfinite"}
TORCHS = {f"torch.{name}" for name in FINITE}


def asked(view: View, node: ast.AST, scope: Scope, losses: set[str]) -> bool:
    """Whether a part of a test needs a loss's number."""
    if isinstance(node, ast.Compare):
        plain = not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
        plain = plain and not any(isinstance(constant(each), str) for each in (node.left, *node.comparators))
        if plain and on_device(view, node, scope):
            return True
        values = [node.left, *node.comparators] if plain else []
    elif isinstance(node, ast.Call) and last(node) in ("any", "all") and isinstance(node.func, ast.Attribute):
        if on_device(view, node, scope):
            return True
        asks = node.func.value  # `assert not torch.isnan(flow).any()`
        if not isinstance(asks, ast.Call) or view.names.qualify(asks.func, scope) not in TORCHS:
            return False
        root = base(asks.args[0]) if asks.args else None
        binds = view.origins.binds(dotted(root) or "", scope, node.lineno)
        return not any(bind.how == "for" for bind, _ in binds)  # the loader's, on the CPU
    elif isinstance(node, ast.Call) and last(node) in FINITE:
        values = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    else:
        return asks_given(view, node, scope, losses) if isinstance(node, ast.Call) else False
    finite = isinstance(node, ast.Call)
    return any(on_losses(view, v, scope, losses) or (finite and on_device(view, v, scope)) for v in values)


def asks_given(view: View, call: ast.Call, scope: Scope, losses: set[str]) -> bool:
    """Whether a function of the project asks of the loss that it is given whether it is finite (`if is_bad(loss):`)."""
    function = view.calls.target(call, scope)
    if function is None or function.kind != "function":
        return False
    for value in (node for each in function.returns() for node in walk(each)):
        if isinstance(value, ast.Call) and last(value) in FINITE and value.args:
            name = dotted(value.args[0])
            handed = given(call, function, name) if name in function.params else None
            if handed is not None and (on_losses(view, handed, scope, losses) or on_device(view, handed, scope)):
                return True
    return False


def on_losses(view: View, node: ast.AST, scope: Scope, losses: set[str]) -> bool:
    """Whether a name stands for a loss that was not read before (`loss = loss.item()`)."""
    name = key(node)
    binds = view.origins.binds(name, scope, getattr(node, "lineno", 0)) if name in losses else []
    return name in losses and not any(read(b.value) or gives_number(view.calls, b.value, home) for b, home in binds)
