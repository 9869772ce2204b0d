"""LS049: attention dropout that ignores the mode."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import argument, constant, dotted
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

MESSAGE = "drops out in evaluation too, whatever the mode: pass dropout_p only if self.training"


def check(view: View) -> Iterator[Found]:
    """Find fused attentions of a module whose dropout does not depend on the mode."""
    for site in view.sites("scaled_dot_product_attention"):
        rate = argument(site.call, 4, "dropout_p")
        if site.scope.owner is None or not view.full(site).endswith("functional.scaled_dot_product_attention"):
            continue
        if rate is not None and is_rate(view, rate, site.scope):
            yield at(site, MESSAGE)


def is_rate(view: View, rate: ast.expr, scope: Scope) -> bool:
    """Check whether a dropout is a positive number, or an attribute set to one."""
    number = constant(rate)
    if isinstance(number, float | int):
        return number > 0
    key = dotted(rate) or ""
    if key.startswith("self.") and key.endswith(".p"):
        made = find_values(key.removesuffix(".p"), scope)
        return bool(made) and all(
            isinstance(value, ast.Call)
            and view.names.qualify(value.func, method).startswith("torch.nn.Dropout")
            and constant(argument(value, 0, "p")) not in (0, 0.0)
            for value, method in made
        )
    made = find_values(key, scope) if key.startswith("self.") else []
    return bool(made) and all(
        method.name == "__init__"
        and (isinstance(constant(value), float) or (dotted(value) or "").split(".")[0] in method.params)
        for value, method in made
    )


def find_values(key: str, scope: Scope) -> list[tuple[ast.expr | None, Scope]]:
    """Return what the methods of a class give an attribute of `self`."""
    methods = scope.owner.defs.values() if scope.owner is not None else ()
    return [(bind.value, method) for method in methods for bind in method.binds.get(key, [])]


RULE = Rule("LS049", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
