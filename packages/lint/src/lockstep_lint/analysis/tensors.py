"""Tell what makes a tensor on the CPU, what moves one, and tests that ask for a GPU."""

import ast

from lockstep_lint.analysis.nodes import argument, constant, last

__all__ = [
    "MADE",
    "asks_for_gpu",
    "moves",
]


# They make a tensor on the CPU.
MADE = {f"torch.{name}" for name in ("tensor", "Tensor", "FloatTensor", "LongTensor", "from_numpy", "zeros", "ones")}
MADE |= {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "arange", "linspace", "full", "empty")}


def moves(call: ast.Call) -> bool:
    """Check whether a call returns its object on the device."""
    if last(call) == "to" and isinstance(call.func, ast.Attribute):
        place = argument(call, 0, "device")
        return place is not None and constant(place) != "cpu"
    return last(call) == "cuda" and isinstance(call.func, ast.Attribute)


def asks_for_gpu(test: ast.expr) -> int:
    """Return 1 if a test holds only with a GPU, -1 if only without, else 0."""
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
