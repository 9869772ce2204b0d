"""LS049: attention that drops out in evaluation too."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import argument, constant, dotted
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


def check(view: View) -> Iterator[Found]:
    """Looks at the dropout of every fused attention in a module."""
    for site in view.sites("scaled_dot_product_attention"):
        rate = argument(site.call, 4, "dropout_p")
        if site.scope.owner is None or not view.full(site).endswith("functional.scaled_dot_product_attention"):
            continue
        if rate is not None and is_rate(rate, site.scope):
            yield at(site, "drops out in evaluation too, whatever the mode: pass dropout_p only if self.training")


def is_rate(rate: ast.expr, scope: Scope) -> bool:
    """Whether a dropout is a number above zero, or an attribute that `__init__` gives one that it is handed."""
    number = constant(rate)
    if isinstance(number, float):
        return number > 0
    key = dotted(rate) or ""
    methods = scope.owner.defs.values() if scope.owner is not None else ()
    binds = [(bind, method) for method in methods for bind in method.binds.get(key, [])] if key[:5] == "self." else []
    return bool(binds) and all(
        method.name == "__init__"
        and (isinstance(constant(bind.value), float) or (dotted(bind.value) or "").split(".")[0] in method.params)
        for bind, method in binds
    )


RULE = Rule(
    code="LS049",
    name="dropout of fused attention",
    what="`scaled_dot_product_attention` in a module gets a `dropout_p` that does not depend on the mode.",
    why="It is a function and knows no mode: model.eval() does not turn it off, and every score is one with dropout.",
    bad="""
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
""",
    good="""
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, q, k, v):
        rate = self.dropout if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="dropout_p=self.dropout if self.training else 0.0",
)
