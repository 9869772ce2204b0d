"""LS010: find_unused_parameters=True."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.context import above, guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, has_star, idents, is_true, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

# Layers of torch.nn with parameters.
LAYERS = re.compile(
    r"^torch\.nn\.(Linear|Bilinear|(Lazy)?Conv(Transpose)?[123]d|Embedding(Bag)?|LayerNorm|RMSNorm|BatchNorm[123]d|GroupNorm|"
    r"LSTM|GRU|RNN|LSTMCell|GRUCell|MultiheadAttention|Transformer\w*)$"
)
# A forward that reaches its layers by other ways than their names.
OTHER_WAYS = {"children", "modules", "named_children", "named_modules", "getattr", "_modules", "vars", "parameters"}
HINT = "searches the graph for unused parameters in every step: leave it False unless there really are some"
UNUSED = (
    "'self.{layer}' of {model} is {how}, and DDP waits for its gradients: use it in every step, or pass "
    "find_unused_parameters=True"
)
# What draws a number, or reads one of the data.
CHANCE = {"rand", "random", "randint", "randn", "uniform", "bernoulli", "choice", "item", "any", "all"}
DATA = {"mean", "sum", "max", "min", "norm", "std", "argmax"}


def check(view: View) -> Iterator[Found]:
    """Find needless flags, and wrapped models with a layer that no forward uses."""
    yield from find_unused(view)
    for site in view.sites() if "find_unused_parameters" in view.module.text else ():
        value = keyword(site.call, "find_unused_parameters")
        made = view.origins.of(value, site.scope) if value is not None else []
        if is_true(value) or (len(made) == 1 and is_true(made[0].node)):
            if not any(chosen_at_run_time(view, owner) for owner in models(view, site)):
                yield at(site, HINT, severity=Severity.HINT)
        elif constant(keyword(site.call, "strategy")) == "ddp_find_unused_parameters_true":
            yield at(site, HINT, severity=Severity.HINT)


def models(view: View, site: Site) -> Iterator[Scope]:
    """Yield the project's classes of the model that a call wraps."""
    for call, scope, _ in view.origins.calls_of(view.wrappers.inner(site.call), site.scope):
        owner = view.names.definition(call.func, scope)
        if owner is not None and owner.kind == "class" and view.kinds.is_module_class(owner):
            yield owner


def chosen_at_run_time(view: View, owner: Scope) -> bool:
    """Check whether a test in a forward decides which layers run."""
    forward = owner.defs.get("forward")
    return forward is not None and any(isinstance(stmt, ast.If) for stmt in forward.stmts)


def find_unused(view: View) -> Iterator[Found]:
    """Find wrapped models with a layer that no method but `__init__` names."""
    if view.effects.mentioned(view.module, "static_graph", "find_unused_parameters"):
        return
    for kind, site in view.wrappers.made(view.module):
        for owner in models(view, site) if kind == "ddp" and not has_star(site.call) else ():
            layer, how = left_out(view, owner)
            if layer:
                yield at(site, UNUSED.format(layer=layer, how=how, model=owner.name))
                break


def left_out(view: View, owner: Scope) -> tuple[str, str]:
    """Return a layer that no forward or only some use, and which of both."""
    init, forward = owner.defs.get("__init__"), owner.defs.get("forward")
    if init is None or forward is None or OTHER_WAYS & set(idents(owner.node)) or any(view.names.parents(owner)):
        return "", ""
    rest = [method for method in owner.defs.values() if method not in (init, forward)]
    named = {name for method in rest for name in own(method.node)} | elsewhere(view, owner)
    names = list(own(init.node))
    for name in layers(view, init):
        if name in named or names.count(name) > 1:
            continue
        uses = [stmt for stmt in forward.stmts if not isinstance(stmt, ast.If | ast.For) and name in set(own(stmt))]
        if name not in set(own(forward.node)):
            return name, "used by no forward"
        if len(uses) == 1 and by_chance(view, uses[0], forward):
            return name, f"left out of some forwards (line {uses[0].lineno})"
    return "", ""


def by_chance(view: View, stmt: ast.stmt, forward: Scope) -> bool:
    """Check whether chance or the data decide over a statement of a forward."""
    for guard in guards(stmt, forward.module):
        flag = dotted(guard.test)
        sites = [s for m in view.project.family(forward.module) for s in m.sites()] if flag in forward.params else []
        passed = [keyword(site.call, flag or "") for site in sites]
        if any(last(node) in CHANCE for value in passed if value is not None for node in calls_in(value)):
            return True
        inner = [node for node in calls_in(guard.test) if node is not guard.test or last(node) in CHANCE]
        if any(last(node) in CHANCE | DATA for node in inner):
            return True
    return False


def calls_in(node: ast.AST) -> list[ast.Call]:
    """Return the calls in an expression."""
    return [item for item in walk(node) if isinstance(item, ast.Call)]


def layers(view: View, init: Scope) -> Iterator[str]:
    """Yield the attributes that certainly hold layers with parameters."""
    for key, binds in init.binds.items():
        value = binds[0].value
        plain = key.startswith("self.") and key.count(".") == 1 and len(binds) == 1 and not binds[0].path
        if not plain or not isinstance(value, ast.Call) or any(True for _ in above(binds[0].stmt, init.module)):
            continue
        full = view.names.qualify(value.func, init)
        parts = (
            [part for part in walk(value) if isinstance(part, ast.Call)] if full == "torch.nn.Sequential" else [value]
        )
        if any(LAYERS.match(view.names.qualify(part.func, init)) for part in parts):
            yield key[5:]


def elsewhere(view: View, owner: Scope) -> set[str]:
    """Return the attributes that the programs read of other objects, which may be this model's."""
    return set().union(*map(attributes, view.project.family(owner.module)))


@cache_answers
def attributes(module: Module) -> frozenset[str]:
    """Return the attributes that a file reads of anything but `self`."""
    nodes = (node for node in walk(module.top.node) if node.__class__ is ast.Attribute)
    return frozenset(node.attr for node in nodes if dotted(node.value) != "self")


def own(node: ast.AST) -> Iterator[str]:
    """Yield the attributes of `self` that a piece of code names."""
    for item in walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            yield item.attr


RULE = Rule("LS010", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
