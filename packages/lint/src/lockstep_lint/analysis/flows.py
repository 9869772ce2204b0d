"""Whether what a function of the project gives back belongs to the graph of an argument (a soft Dice score, a loss)."""

import ast

from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.names import Names
from lockstep_lint.analysis.nodes import last

__all__ = ["flows_through"]

# Methods, and functions of torch, that give a tensor of the graph of what they are given.
SMOOTH = {"sum", "mean", "view", "reshape", "flatten", "permute", "transpose", "contiguous", "float", "double", "clone"}
SMOOTH |= {"softmax", "sigmoid", "log_softmax", "log", "exp", "pow", "square", "sqrt", "abs", "clamp", "squeeze"}
SMOOTH |= {"unsqueeze", "mul", "div", "add", "sub", "relu", "tanh", "cpu", "cuda", "to", "norm", "std", "mse_loss"}
SMOOTH |= {"l1_loss", "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
# How many names a value is followed back over.
MAX_NAMES = 8


def flows_through(names: Names, function: Scope, given: str) -> bool:
    """Whether all that a function returns is computed from one of its parameters, and nothing cuts it off."""
    returned = list(function.returns())
    return bool(returned) and all(Flow(names, function, given).holds(value, MAX_NAMES) for value in returned)


class Flow:
    """Follows the values of a function back to one of its parameters."""

    def __init__(self, names: Names, function: Scope, given: str) -> None:
        self.names = names
        self.function = function
        self.given = given

    def holds(self, value: ast.AST, left: int, within: str = "") -> bool:
        """Whether a value still has the graph of the parameter; `within` is the name that it is given to."""
        if isinstance(value, ast.Name):
            return self.named(value.id, left, within)
        if isinstance(value, ast.BinOp):
            return self.holds(value.left, left, within) or self.holds(value.right, left, within)
        if isinstance(value, ast.UnaryOp) and not isinstance(value.op, ast.Not):
            return self.holds(value.operand, left, within)
        if isinstance(value, ast.Subscript):
            return self.holds(value.value, left, within)
        if not isinstance(value, ast.Call) or last(value) not in SMOOTH:
            return False
        if self.names.qualify(value.func, self.function).startswith("torch."):
            return any(self.holds(arg, left, within) for arg in value.args)
        return isinstance(value.func, ast.Attribute) and self.holds(value.func.value, left, within)

    def named(self, name: str, left: int, within: str) -> bool:
        """Whether all that a name is given has the graph; its own value on the right of that is what it was before."""
        binds = [bind for bind in self.function.binds.get(name, []) if bind.how in ("assign", "aug")]
        if name == within or not binds:
            return name == self.given
        if not left or any(bind.path or bind.value is None for bind in binds):
            return False
        whole = [bind for bind in binds if bind.how == "assign"]
        return bool(whole) and all(self.turned(bind.value, name, left, binds) for bind in whole if bind.value)

    def turned(self, value: ast.expr, name: str, left: int, binds: list[Bind]) -> bool:
        """Whether a value that a name is given has the graph: where it is made of the name itself (`loss = 1 - loss`),
        the name's other values say so.
        """
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value)) and len(binds) > 1:
            return name != self.given
        return self.holds(value, left - 1, name)
