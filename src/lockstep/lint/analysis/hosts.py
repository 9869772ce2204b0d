"""Which values are on the CPU: made there, read from the device, or computed by numpy."""

import ast

from lockstep.lint.analysis.index import Scope
from lockstep.lint.analysis.losses import SYNCS
from lockstep.lint.analysis.nodes import constant, last
from lockstep.lint.analysis.origins import Origins

__all__ = ["MADE", "made_on_host", "moves", "on_host"]

# They make a tensor on the CPU.
MADE = {f"torch.{name}" for name in ("tensor", "Tensor", "FloatTensor", "LongTensor", "from_numpy", "zeros", "ones")}
MADE |= {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "arange", "linspace", "full", "empty")}
# Methods of a tensor that give a tensor.
COMPUTED = {"sum", "mean", "max", "min", "abs", "norm", "std", "float", "exp", "log", "sqrt", "pow"}


def on_host(origins: Origins, value: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether a value is read from the device, computed by numpy, or a tensor that is made on the CPU."""
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(value, ast.Call):
            full = origins.names.qualify(value.func, scope)
            if full.startswith("numpy.") or last(value) in (*SYNCS, "numpy"):
                return True
            if full in MADE and not any(item.arg == "device" for item in value.keywords):
                return True
            if moves(value):
                return False
            value = value.func
        else:
            value = value.value
    if isinstance(value, ast.BinOp):
        sides = (value.left, value.right)
        return any(on_host(origins, side, scope, depth) and not computed(other) for side, other in (sides, sides[::-1]))
    if not depth or not isinstance(value, ast.Name):
        return False
    return made_on_host(origins, value, scope, depth - 1)


def computed(value: ast.expr) -> bool:
    """Whether a value is what a tensor's method computes, which a number beside it leaves on the device
    (`losses.sum() / mask.sum().item()`).
    """
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and last(value) not in SYNCS:
        if last(value) in COMPUTED:
            return True
        value = value.func.value
    return False


def made_on_host(origins: Origins, node: ast.Name, scope: Scope, depth: int) -> bool:
    """Whether all that a name may have been given is on the CPU."""
    given = [(bind, home) for bind, home in origins.binds(node.id, scope, node.lineno)]
    return bool(given) and all(
        b.value is not None and not b.path and on_host(origins, b.value, home, depth) for b, home in given
    )


def moves(call: ast.Call) -> bool:
    """Whether a call gives back its object on the device."""
    if last(call) == "to" and isinstance(call.func, ast.Attribute):
        return bool(call.args) and constant(call.args[0]) != "cpu"
    return last(call) == "cuda" and isinstance(call.func, ast.Attribute)
