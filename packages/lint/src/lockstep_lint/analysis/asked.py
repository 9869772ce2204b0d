"""Which parts of a test need a number that stands on the device."""

import ast

from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.devices import on_device
from lockstep_lint.analysis.hosts import on_host
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.losses import is_read, key
from lockstep_lint.analysis.nodes import base, constant, dotted, is_none, last, walk
from lockstep_lint.analysis.view import View

__all__ = ["asked", "on_losses"]

FINITE = {"isnan", "isinf", "isfinite"}
TORCHS = {f"torch.{name}" for name in FINITE}


def asked(view: View, node: ast.AST, scope: Scope, losses: set[str]) -> bool:
    """Whether a part of a test needs a loss's number."""
    if isinstance(node, ast.Compare):
        plain = not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
        sides = (node.left, *node.comparators)
        plain = plain and not any(isinstance(constant(each), str | bool) or is_none(each) for each in sides)
        if plain and on_device(view, node, scope):
            return True
        values = [node.left, *node.comparators] if plain else []
    elif isinstance(node, ast.Call) and last(node) in ("any", "all") and isinstance(node.func, ast.Attribute):
        if on_device(view, node, scope):
            return True
        asks = node.func.value  # `assert not torch.isnan(flow).any()`
        return isinstance(asks, ast.Call) and asks_tensor(view, asks, scope)
    elif isinstance(node, ast.Call) and last(node) in FINITE:
        if asks_tensor(view, node, scope):
            return True
        values = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    else:
        return asks_given(view, node, scope, losses) if isinstance(node, ast.Call) else False
    finite = isinstance(node, ast.Call)
    return any(on_losses(view, v, scope, losses) or (finite and on_device(view, v, scope)) for v in values)


def asks_tensor(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a call asks of a tensor whether it is finite, in torch's words (`torch.isnan(loss)`, `loss.isnan()`): not
    of what a loader gives, or of what is known to be on the CPU.
    """
    value = next(iter(call.args), None)
    if view.names.qualify(call.func, scope) not in TORCHS:
        method = last(call) in FINITE and isinstance(call.func, ast.Attribute) and not (call.args or call.keywords)
        value = call.func.value if method else None  # type: ignore[attr-defined]
    if value is None or on_host(view.origins, value, scope, 1):
        return False
    binds = view.origins.binds(dotted(base(value)) or "", scope, call.lineno)
    return not any(bind.how == "for" for bind, _ in binds)


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
    return name in losses and not any(is_read(view.calls, bind, home) for bind, home in binds)
