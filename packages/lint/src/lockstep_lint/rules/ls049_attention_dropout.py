"""LS049: dropout of a function, or of a fresh layer, that does not know the mode."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import choices, guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, argument, constant, dotted, has_star, idents, mentions, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

ATTENTION = "drops out in evaluation too, whatever the mode: pass dropout_p only if self.training"
FUNCTION = "drops out in evaluation too: the function's default is training=True, so pass training=self.training"
IDLE = "never drops out: the function's default is training=False, so pass training=self.training"
FRESH = "drops out in evaluation too: a layer that forward makes is always in training mode, so make it in __init__"
# Functions that drop out unless they are told that nothing trains, and those that have to be told that it does.
ALWAYS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
NEVER = ("alpha_dropout", "feature_alpha_dropout")
LAYERS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
SWITCHES = ("train", "eval")
# What a test asks that decides by itself where values are dropped.
MODE = Words(r"train|eval|infer|test|sampl|predict|stoch|monte|(^|_)mc(_|$)")


def check(view: View) -> Iterator[Found]:
    """Looks at the dropout of every fused attention in a module, and at every other one that has no mode."""
    if not any(word in view.module.text for word in ("drop", "Dropout", "scaled_dot")):
        return
    for site in view.sites("scaled_dot_product_attention"):
        rate = argument(site.call, 4, "dropout_p")
        if site.scope.owner is None or not view.full(site).endswith("functional.scaled_dot_product_attention"):
            continue
        if rate is not None and is_rate(view, rate, site.scope):
            yield at(site, ATTENTION)
    for site in view.sites(*ALWAYS, *NEVER, *LAYERS):
        if in_forward(view, site) and not asked(site):
            yield from without_mode(view, site)


def without_mode(view: View, site: Site) -> Iterator[Found]:
    """A dropout in a forward that is not told the mode."""
    full, rate = view.full(site), argument(site.call, int(site.name not in LAYERS), "p")
    if has_star(site.call) or not (rate is None or is_rate(view, rate, site.scope)):
        return
    if full.startswith("torch.nn.functional."):
        if argument(site.call, 2, "training") is None:
            yield at(site, FUNCTION if site.name in ALWAYS else IDLE)
    elif full.startswith("torch.nn.") and used_at_once(site):
        yield at(site, FRESH)


def in_forward(view: View, site: Site) -> bool:
    """Check whether a call stands in the forward of a module, or in a method that forward calls."""
    owner = site.scope.owner
    if owner is None or site.scope.parent is not owner or not view.kinds.is_module_class(owner):
        return False
    forward = owner.defs.get("forward")
    helps = forward is not None and any(dotted(s.receiver) == "self" for s in forward.named(site.scope.name))
    return site.scope is forward or helps


def asked(site: Site) -> bool:
    """Check whether a test of the mode, or of what the method is told, decides over a call."""
    tests = (guard.test for guard in (*guards(site.stmt, site.module), *choices(site)))
    return any(MODE.search(name) or name in site.scope.params[1:] for test in tests for name in idents(test))


def used_at_once(site: Site) -> bool:
    """Check whether the function that makes a layer calls it, and does not give it the mode."""
    made = [bind.key for bind in site.scope.bound(site.stmt) if bind.value is site.call]
    if any(mentions(other.call.func, name) for name in made for other in site.scope.sites if other.name in SWITCHES):
        return False
    if any(isinstance(node, ast.Call) and node.func is site.call for node in walk(site.stmt)):
        return True
    return any(dotted(other.call.func) in made for other in site.scope.sites)


def is_rate(view: View, rate: ast.expr, scope: Scope) -> bool:
    """Whether a dropout is a number above zero, an attribute that `__init__` gives one that it is handed, or the rate
    of a layer that `__init__` makes (`self.dropout.p`).
    """
    number = constant(rate)
    if isinstance(number, float | int):
        return number > 0
    key = dotted(rate) or ""
    if key.startswith("self.") and key.endswith(".p"):
        made = kept(key.removesuffix(".p"), scope)
        return bool(made) and all(
            isinstance(value, ast.Call)
            and view.names.qualify(value.func, method).startswith("torch.nn.Dropout")
            and constant(argument(value, 0, "p")) not in (0, 0.0)
            for value, method in made
        )
    made = kept(key, scope) if key.startswith("self.") else []
    return bool(made) and all(
        method.name == "__init__"
        and (isinstance(constant(value), float) or (dotted(value) or "").split(".")[0] in method.params)
        for value, method in made
    )


def kept(key: str, scope: Scope) -> list[tuple[ast.expr | None, Scope]]:
    """Return what the methods of a class give an attribute of `self`."""
    methods = scope.owner.defs.values() if scope.owner is not None else ()
    return [(bind.value, method) for method in methods for bind in method.binds.get(key, [])]


RULE = Rule(
    code="LS049",
    name="dropout without a mode",
    what=(
        "`scaled_dot_product_attention` in a module gets a `dropout_p` that does not depend on the mode; or forward "
        "calls `F.dropout` without `training`, or a dropout layer that it makes itself."
    ),
    why=(
        "A function knows no mode, and a fresh layer is in training mode: model.eval() does not turn them off, and "
        "every score is one with dropout. `F.alpha_dropout`, the other way round, does nothing unless it is told to."
    ),
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
    remedy="dropout_p=self.dropout if self.training else 0.0; F.dropout(x, rate, self.training)",
    note="A rate that the method is handed, a test of it, and `training=True` written out are taken for meant.",
)
