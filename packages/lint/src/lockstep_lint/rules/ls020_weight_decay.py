"""LS020: weight decay on biases and norms (an opinion)."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, constant, has_star, keyword, last
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

# Optimizers that decay where nothing is said, and those that do if they are told.
DEFAULT = {"AdamW", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "DecoupledAdamW"}
TOLD = {"Adam", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad", "Lion", "ZeroRedundancyOptimizer"}
MAKERS = ("torch.optim", "bitsandbytes.optim", "transformers", "torch.distributed.optim", "composer.optim")
# Words of code that sorts parameters by their kind.
SORTS = ("no_decay", "bias", "ndim", ".dim()", "len(p.shape)", "norm", "named_parameters")
PASSING = ("filter", "list", "chain", "tuple", "iter")
MAX_DEPTH = 4


def check(view: View) -> Iterator[Found]:
    """Look for optimizers that decay all parameters alike."""
    for site in view.sites(*DEFAULT, *TOLD):
        full = view.full(site)
        known = (not full or full.startswith(MAKERS)) and decays(view, site, full)
        if known and alike(view, argument(site.call, 0, "params"), site.scope, MAX_DEPTH):
            message = "decays biases and norms too: put them in a group with weight_decay=0"
            yield at(site, message, severity=Severity.OPINION)


def decays(view: View, site: Site, full: str) -> bool:
    """Check whether an optimizer decays its parameters. The AdamW of transformers had 0 by default."""
    value = argument(site.call, 4, "weight_decay") if site.name in TOLD else keyword(site.call, "weight_decay")
    if value is None and has_star(site.call):
        return False
    if value is None:
        inner = any(last(item.value) == "AdamW" for item in site.call.keywords)
        return inner or (site.name in DEFAULT and not full.startswith("transformers"))
    return any(constant(origin.node) != 0 for origin in view.origins.of(value, site.scope))


def alike(view: View, node: ast.expr | None, scope: Scope, depth: int) -> bool:
    """Check whether parameters are those of complete models, in groups that all decay."""
    found = view.origins.of(node, scope) if depth else []
    return bool(found) and all(is_whole(view, origin.node, origin.scope, depth) for origin in found)


def is_whole(view: View, node: ast.expr, scope: Scope, depth: int) -> bool:
    """Check whether an expression gives all parameters of a model, with equal decay."""
    if isinstance(node, ast.Call):
        if last(node) in PASSING and node.args:
            return all(is_whole(view, value, scope, depth) for value in node.args if not isinstance(value, ast.Lambda))
        return last(node) == "parameters"
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        chosen = any(last(test) != "requires_grad" for part in node.generators for test in part.ifs)
        return not chosen and alike(view, node.generators[0].iter, scope, depth - 1)
    if isinstance(node, ast.List) and all(isinstance(each, ast.Dict) for each in node.elts):
        rates = [value for each in node.elts for value in rates_in(each)]
        text = ast.unparse(scope.node) if scope.kind == "function" else ast.unparse(node)
        sorts = any(word in text for word in SORTS if word != "norm" or not rates)
        return bool(node.elts) and not sorts and all(constant(value) != 0 for value in rates)
    return False


def rates_in(group: ast.expr) -> Iterator[ast.expr]:
    """Yield the decay that a written group sets."""
    if isinstance(group, ast.Dict):
        yield from (v for k, v in zip(group.keys, group.values, strict=True) if constant(k) == "weight_decay")


RULE = Rule("LS020", Severity.OPINION, Confidence.MEDIUM, check, fix="unsafe")
