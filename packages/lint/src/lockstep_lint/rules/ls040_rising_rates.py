"""LS040: layer-wise learning rates that rise towards the input."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import constant, dotted, idents, last, targets, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

LAYERS = re.compile(r"(^|_)(layer|layers|block|blocks|stages|h)$")
COUNTED = re.compile(r"layers?\b|blocks?\b|stages\b|\bh\b|children\b")
DECAY = re.compile(r"decay|llrd|gamma|factor|mult", re.IGNORECASE)


RISES = (
    "gives the first layer the highest rate: let the exponent fall (layers - 1 - i), as the first should change least"
)
BELOW = "counts parameters, but the exponent counts layers: below zero the rates grow without end"


def check(view: View) -> Iterator[Found]:
    """Find per-layer learning rates that fall towards the output, or never stop rising."""
    text = view.module.text
    if "lr" not in text or "**" not in text or not COUNTED.search(text):
        return
    for scope in view.scopes:
        for loop in (stmt for stmt in scope.stmts if isinstance(stmt, ast.For)):
            for node in walk(loop):
                decays = (
                    isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and shrinks(view, node.left, scope)
                )
                if decays and isinstance(node, ast.BinOp):
                    counter = {name for name, path in targets(loop.target) if path in ((0,), ())}
                    message = wrong(loop, node.right, counter, scope)
                    if message:
                        yield Found(node.right if message == BELOW else node, message)


def wrong(loop: ast.For, power: ast.expr, counter: set[str], scope: Scope) -> str:
    """Explain what is wrong with the exponent of a layer's rate."""
    over = loop.iter.args[0] if isinstance(loop.iter, ast.Call) and last(loop.iter) == "enumerate" else loop.iter
    names = set(idents(power))
    if isinstance(over, ast.Name):
        values = [bind.value for bind in scope.binds.get(over.id, []) if bind.value is not None]
        over = values[0] if len(values) == 1 else over
    if {"named_parameters", "parameters"} & set(idents(over)):
        less = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) for part in walk(power))
        return BELOW if less and names & counter and any(counts_layers(name, scope) for name in names - counter) else ""
    layers = any(LAYERS.search(name) for name in idents(over)) and "reversed" not in idents(over)
    makes = {constant(key) for node in walk(loop) if isinstance(node, ast.Dict) for key in node.keys} >= {
        "lr",
        "params",
    }
    return RISES if layers and makes and "::-1" not in ast.unparse(over) and dotted(power) in counter else ""


def counts_layers(name: str, scope: Scope) -> bool:
    """Check whether a name is the number of a model's layers or parts (`len(list(model.children()))`)."""
    words = {word for bind in scope.binds.get(name, []) if bind.value is not None for word in idents(bind.value)}
    return "len" in words and any(word == "children" or LAYERS.search(word) for word in words)


def shrinks(view: View, node: ast.expr, scope: Scope) -> bool:
    """Check whether a factor is below one: a literal, or a name for a decay."""
    values = [constant(origin.node) for origin in view.origins.of(node, scope)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if numbers:
        return all(value < 1 for value in numbers)
    return bool(DECAY.search((dotted(node) or "").split(".")[-1]))


RULE = Rule("LS040", Severity.HINT, Confidence.MEDIUM, check, fix="unsafe")
