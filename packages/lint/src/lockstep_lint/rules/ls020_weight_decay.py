"""LS020: weight decay on biases and norms (an opinion)."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import MODEL
from lockstep_lint.analysis.nodes import SEQUENCES, argument, constant, has_star, keyword, last
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# Optimizers that decay where nothing is said, and those that do if they are told.
DEFAULT = {"AdamW", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "DecoupledAdamW"}
TOLD = {"Adam", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad", "Lion", "ZeroRedundancyOptimizer"}
MAKERS = ("torch.optim", "bitsandbytes.optim", "transformers", "torch.distributed.optim", "composer.optim")
# Words of code that sorts parameters by their kind.
SORTS = ("no_decay", "bias", "ndim", ".dim()", "len(p.shape)", "norm", "named_parameters")
PASSING = ("filter", "list", "chain", "tuple", "iter")
# They make a tensor of the sizes that they are given.
SIZED = ("empty", "zeros", "ones", "rand", "randn")
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
    """Check whether an optimizer decays its parameters (by default 0 in the AdamW that transformers had)."""
    value = argument(site.call, 4, "weight_decay") if site.name in TOLD else keyword(site.call, "weight_decay")
    if value is None and has_star(site.call):
        return False
    if value is None:
        inner = any(last(item.value) == "AdamW" for item in site.call.keywords)
        return inner or (site.name in DEFAULT and not full.startswith("transformers"))
    return any(constant(origin.node) != 0 for origin in view.origins.of(value, site.scope))


def alike(view: View, node: ast.expr | None, scope: Scope, depth: int) -> bool:
    """Check whether parameters are certainly those of whole models, in groups of which none is spared the decay."""
    found = view.origins.of(node, scope) if depth else []
    return bool(found) and all(is_whole(view, origin.node, origin.scope, depth) for origin in found)


def is_whole(view: View, node: ast.expr, scope: Scope, depth: int) -> bool:
    """Check whether an expression gives all parameters of a model, as one group or as several that decay alike."""
    if isinstance(node, ast.Call):
        if last(node) in PASSING and node.args:
            return all(is_whole(view, value, scope, depth) for value in node.args if not isinstance(value, ast.Lambda))
        model = node.func.value if isinstance(node.func, ast.Attribute) else None
        return last(node) == "parameters" and not is_one_matrix(view, model, scope)
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        chosen = any(last(test) != "requires_grad" for part in node.generators for test in part.ifs)
        return not chosen and alike(view, node.generators[0].iter, scope, depth - 1)
    if isinstance(node, ast.BinOp):
        return alike(view, node.left, scope, depth - 1) and alike(view, node.right, scope, depth - 1)
    if isinstance(node, ast.List) and node.elts and all(isinstance(each, ast.Starred) for each in node.elts):
        return all(alike(view, each, scope, depth - 1) for each in node.elts)
    if isinstance(node, ast.List) and all(isinstance(each, ast.Dict) for each in node.elts):
        rates = [value for each in node.elts for value in rates_in(each)]
        text = ast.unparse(scope.node) if scope.kind == "function" else ast.unparse(node)
        sorts = any(word in text for word in SORTS if word != "norm" or not rates)
        return bool(node.elts) and not sorts and all(constant(value) != 0 for value in rates)
    return False


def is_one_matrix(view: View, model: ast.expr | None, scope: Scope) -> bool:
    """Check whether a module of the project has matrices of its own alone, which no group would spare the decay."""
    owner = view.kinds.module_class(model, scope) if model is not None else None
    if owner is None or any(True for _ in view.names.parents(owner)):
        return False
    methods = list(owner.defs.values())
    kept = [(key, b.value) for each in methods for key, bs in each.binds.items() if key.startswith("self.") for b in bs]
    made = [value for _, value in kept if isinstance(value, ast.Call) and last(value) == "Parameter"]
    if any(each.named(name) for each in methods for name in ("add_module", "register_parameter", "register_module")):
        return False
    return bool(made) and all(map(is_matrix, made)) and not any(may_hold(*each) for each in kept)


def may_hold(key: str, value: ast.expr | None) -> bool:
    """Check whether an attribute may hold other parameters: what a call gives, a list, or what is called a model."""
    if isinstance(value, ast.Call):
        return last(value) not in ("Parameter", "int", "float", "len", "bool", "str")
    return isinstance(value, ast.List | ast.ListComp) or any(map(MODEL.search, (key.rpartition(".")[2], last(value))))


def is_matrix(made: ast.Call) -> bool:
    """Check whether a parameter has two dimensions or more, as written (`nn.Parameter(torch.zeros([8, 4]) * 0.1)`)."""
    inner = made.args[0] if made.args else None
    while isinstance(inner, ast.BinOp) or (isinstance(inner, ast.Call) and last(inner) in ("to", "cuda", "float")):
        inner = inner.left if isinstance(inner, ast.BinOp) else getattr(inner.func, "value", None)
    sizes = inner.args if isinstance(inner, ast.Call) and last(inner) in SIZED else []
    if len(sizes) == 1 and isinstance(sizes[0], SEQUENCES):
        sizes = sizes[0].elts
    return len(sizes) >= 2


def rates_in(group: ast.expr) -> Iterator[ast.expr]:
    """Yield the decay that a written group sets."""
    if isinstance(group, ast.Dict):
        yield from (v for k, v in zip(group.keys, group.values, strict=True) if constant(k) == "weight_decay")


RULE = Rule(
    code="LS020",
    severity=Severity.OPINION,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
)
