"""Which values are on the CPU: made there, read from the device, or computed by numpy."""

import ast

from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.losses import SYNCS
from lockstep_lint.analysis.nodes import argument, base, constant, dotted, last
from lockstep_lint.analysis.origins import Origins

__all__ = ["MADE", "asks_for_gpu", "made_on_host", "moves", "on_host"]

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
    if any(brought(bind, home) for bind, home in given):
        return True
    return bool(given) and all(
        b.value is not None and not b.path and on_host(origins, b.value, home, depth) for b, home in given
    )


def brought(bind: Bind, scope: Scope) -> bool:
    """Whether a name is given its own value from the device where there is one (`if use_cuda: loss = loss.cpu()`)."""
    value = bind.value
    if not isinstance(value, ast.Call) or last(value) not in SYNCS or dotted(base(value)) != bind.key:
        return False
    around = above(bind.stmt, scope.module)[:1]
    return any(isinstance(n, ast.If) and place == "body" and asks_for_gpu(n.test) == 1 for n, place in around)


def moves(call: ast.Call) -> bool:
    """Whether a call gives back its object on the device."""
    if last(call) == "to" and isinstance(call.func, ast.Attribute):
        place = argument(call, 0, "device")
        return place is not None and constant(place) != "cpu"
    return last(call) == "cuda" and isinstance(call.func, ast.Attribute)


def asks_for_gpu(test: ast.expr) -> int:
    """1 if a test holds only with a GPU, -1 if only without, else 0."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return -asks_for_gpu(test.operand)
    if isinstance(test, ast.BoolOp):
        found = [asks_for_gpu(value) for value in test.values]
        return next((value for value in found if value), 0) if isinstance(test.op, ast.And) else min(found)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq):
        value = constant(test.comparators[0])
        sign = 1 if isinstance(test.ops[0], ast.Eq) else -1
        return {"cpu": -sign, "gloo": -sign, "cuda": sign, "nccl": sign}.get(value, 0) if isinstance(value, str) else 0
    name = last(test)
    if name in ("is_available", "use_cuda", "cuda", "gpu", "use_gpu", "has_cuda"):
        return 1
    return -1 if name in ("cpu", "no_cuda", "use_cpu", "cpu_only", "force_cpu") else 0
