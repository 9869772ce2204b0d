"""LS040: layer-wise learning rates that rise towards the input."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import inside, loops
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import constant, dotted, idents, last, targets, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

Turning = ast.For | ast.ListComp
LAYERS = re.compile(r"(^|_)(layer|layers|block|blocks|stages|h)$")
COUNTED = re.compile(r"layers?\b|blocks?\b|stages\b|\bh\b|children\b")
DECAY = re.compile(r"decay|llrd|gamma|factor|mult", re.IGNORECASE)
RATE = re.compile(r"(^|_)lr(_|$)|learning_rate", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Looks at loops from a model's first layer to its last that give each its rate."""
    text = view.module.text
    if "lr" not in text or "params" not in text or not ("**" in text or "*=" in text) or not COUNTED.search(text):
        return
    for scope in view.scopes:
        for node in turning(scope):
            below = below_zero(view, node, scope)
            if below is not None:
                yield Found(
                    below, "counts parameters, but the exponent counts layers: below zero the rates grow without end"
                )
            elif makes_groups(node):
                found = rising(view, node, scope)
                if found is not None:
                    yield Found(
                        found,
                        "gives the first layer the highest rate: let the exponent fall (layers - 1 - i), as the first "
                        "should change least",
                    )


def turning(scope: Scope) -> Iterator[Turning]:
    """The loops and list comprehensions of a scope."""
    yield from (stmt for stmt in scope.stmts if isinstance(stmt, ast.For))
    for node, home in scope.module.list_comps:
        if home is scope and len(node.generators) == 1:
            yield node


def header(node: Turning) -> tuple[ast.expr, ast.expr]:
    """The target of a loop or comprehension, and what it runs over."""
    return (
        (node.target, node.iter) if isinstance(node, ast.For) else (node.generators[0].target, node.generators[0].iter)
    )


def makes_groups(loop: Turning) -> bool:
    """Whether a loop runs over a model's layers, first to last, and makes parameter groups."""
    over = header(loop)[1]
    names = set(idents(over))
    if not any(LAYERS.search(name) for name in names) or {"reversed", "flip"} & names or "::-1" in ast.unparse(over):
        return False
    if isinstance(over, ast.Call) and last(over) == "range" and len(over.args) > 2:
        return False
    text = {constant(key) for node in walk(loop) if isinstance(node, ast.Dict) for key in node.keys}
    calls = {k.arg for node in walk(loop) if isinstance(node, ast.Call) for k in node.keywords}
    return "lr" in text | calls and "params" in text | calls


def below_zero(view: View, loop: Turning, scope: Scope) -> ast.expr | None:
    """The exponent of a rate that takes the number of a parameter from the number of layers, which are fewer."""
    target, over = header(loop)
    inner = over.args[0] if isinstance(over, ast.Call) and last(over) == "enumerate" and over.args else None
    if not isinstance(inner, ast.Call) or last(inner) not in ("named_parameters", "parameters"):
        return None
    counter = {name for name, path in targets(target) if path == (0,)}
    for node in walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and shrinks(view, node.left, scope):
            names = set(idents(node.right))
            less = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) for part in walk(node.right))
            if less and names & counter and any(counts_layers(name, scope) for name in names - counter):
                return node.right
    return None


def counts_layers(name: str, scope: Scope) -> bool:
    """Whether a name is given the number of a model's layers or parts (`len(list(model.children()))`)."""
    values = [bind.value for bind in scope.binds.get(name, []) if bind.value is not None]
    words = {word for value in values for word in idents(value)}
    return "len" in words and any(word == "children" or LAYERS.search(word) for word in words)


def rising(view: View, loop: Turning, scope: Scope) -> ast.expr | None:
    """The rate that falls from the first layer to the last, if there is one."""
    counter = {name for name, path in targets(header(loop)[0]) if path == (0,) or not path}
    for node in walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and rate(node.left):
            power = node.right
            if (
                isinstance(power, ast.BinOp)
                and isinstance(power.op, ast.Pow)
                and (dotted(power.right) or "?") in counter
                and shrinks(view, power.left, scope)
            ):
                return node
    if not isinstance(loop, ast.For):
        return None
    for name, binds in scope.binds.items():
        for bind in binds:
            by = (
                bind.stmt.value if isinstance(bind.stmt, ast.AugAssign) and isinstance(bind.stmt.op, ast.Mult) else None
            )
            here = inside(bind.stmt, loop, scope.module) and loops(bind.stmt, scope.module)[0] is loop
            if by is not None and here and RATE.search(name.split(".")[-1]) and shrinks(view, by, scope):
                return by
    return None


def rate(node: ast.expr) -> bool:
    return any(RATE.search(name) for name in idents(node))


def shrinks(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a factor certainly is below one: a literal, or a name that says decay and is nowhere given more."""
    values = [constant(origin.node) for origin in view.origins.of(node, scope)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if numbers:
        return all(value < 1 for value in numbers)
    return bool(DECAY.search((dotted(node) or "").split(".")[-1]))


RULE = Rule(
    code="LS040",
    name="layer-wise rates that rise",
    what="Layer-wise learning rates are largest at the first layer: `lr * decay ** i` with i counted from the input.",
    why=(
        "Fine-tuning with layer-wise decay keeps the first layers, which hold what is general, nearly still and lets "
        "the last ones learn. The other way round, the general layers are overwritten and the last ones hardly train."
    ),
    bad="""
import torch

def groups(model, base_lr, decay=0.9):
    found = []
    for i, layer in enumerate(model.encoder.layers):
        found.append({"params": layer.parameters(), "lr": base_lr * decay**i})
    return torch.optim.SGD(found, lr=base_lr)
""",
    good="""
import torch

def groups(model, base_lr, decay=0.9):
    found, count = [], len(model.encoder.layers)
    for i, layer in enumerate(model.encoder.layers):
        found.append({"params": layer.parameters(), "lr": base_lr * decay ** (count - 1 - i)})
    return torch.optim.SGD(found, lr=base_lr)
""",
    severity=Severity.HINT,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Let the rate grow from the input to the output: lr * decay ** (layers - 1 - i)",
)
