"""LS020: weight decay on biases and norms (an opinion)."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards, loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import MODEL
from lockstep_lint.analysis.nodes import Words, argument, constant, dotted, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

DECAYING = {"AdamW", "Adam", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad", "Lion", "ZeroRedundancyOptimizer"}
DECAYING |= {"AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "DecoupledAdamW"}
# Those that decay where nothing is said.
DEFAULT = {"AdamW", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "DecoupledAdamW"}
# Those whose fifth argument is the decay (`SGD(params, 0.1, 0.9, 0, 5e-4)`).
FIFTH = {"AdamW", "Adam", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax"}
MAKERS = ("torch.optim", "bitsandbytes.optim", "transformers", "torch.distributed.optim", "composer.optim")
# What makes a tensor of the sizes that it is given, and what leaves it that.
SIZED = ("empty", "zeros", "ones", "randn", "rand", "Tensor", "FloatTensor")
KEEPS = ("cuda", "to", "float", "double", "half")
REGISTERS = ("add_module", "register_module", "register_parameter")
GIVES = ("parameters", "named_parameters")
EMPTY = ("[]", "list()")
# An optimizer's own way to leave biases and norms out.
SPARES = Words(r"filter|exclude|skip|no_decay|bias|norm")
SORTED_OUT = ("no_decay", "bias", "ndim", ".dim()", "len(p.shape)", "norm")


def check(view: View) -> Iterator[Found]:
    """Looks at the optimizers that decay all parameters alike."""
    for site in view.sites():
        if site.name not in DECAYING and not other_optimizer(view, site):
            continue
        full = view.full(site)
        if site.name in DECAYING and full and not full.startswith(MAKERS):
            continue
        parameters = site.call.args[0] if site.call.args else keyword(site.call, "params")
        if parameters is None or not (decays(view, site, full) or each_decays(view, parameters, site)):
            continue
        if alike(view, parameters, site.scope) and not lone_matrix(view, parameters, site.scope):
            message = "decays biases and norms too: put them in a group with weight_decay=0"
            yield at(site, message, severity=Severity.OPINION)


def other_optimizer(view: View, site: Site) -> bool:
    """Whether a call makes an optimizer of another library, or of a class that is looked up, for a model."""
    if keyword(site.call, "weight_decay") is None or not site.call.args:
        return False
    if any(SPARES.search(item.arg or "") for item in site.call.keywords):
        return False
    given = [site.call.args[0], *(value for value, _ in sources(view, site.call.args[0], site.scope))]
    filled = any(last(over) in GIVES for over in filled_from(site.call.args[0], site.scope))
    if not filled and not any(isinstance(n, ast.Call) and last(n) == "parameters" for v in given for n in walk(v)):
        return False
    made = view.names.definition(site.call.func, site.scope)
    return made is None or made.kind == "class"


def filled_from(node: ast.expr, scope: Scope) -> list[ast.expr]:
    """What the loops run over that append to a list without a choice (`for p in parameters: kept.append(p)`)."""
    added = [s for s in scope.named("append") if dotted(s.receiver) == dotted(node) is not None]
    around = [(s, loop) for s in added for loop in loops(s.stmt, s.module)[:1] if isinstance(loop, ast.For)]
    if any(last(guard.test) != "requires_grad" for s, loop in around for guard in guards(s.stmt, s.module, loop)):
        return []
    return [loop.iter for _, loop in around]


def decays(view: View, site: Site, full: str) -> bool:
    """Whether the optimizer has a weight decay, given or by default (0 in the AdamW that transformers had)."""
    value = argument(site.call, 4, "weight_decay") if site.name in FIFTH else keyword(site.call, "weight_decay")
    given = [(value, site.scope)] if value is not None else list(unpacked(view, site))
    if given:
        return any(constant(o.node) not in (0, 0.0) for rate, scope in given for o in view.origins.of(rate, scope))
    own = site.name in DEFAULT and not full.startswith("transformers")
    return own or any(last(k.value) == "AdamW" for k in site.call.keywords)


def unpacked(view: View, site: Site) -> Iterator[tuple[ast.expr, Scope]]:
    """The decays in the dictionaries whose items a call is given (`options = {"weight_decay": 0.1}`, `**options`)."""
    for item in site.call.keywords:
        for origin in view.origins.of(item.value, site.scope) if item.arg is None else ():
            rate = (pairs(origin.node) or {}).get("weight_decay")
            if rate is not None:
                yield rate, origin.scope


def each_decays(view: View, node: ast.expr, site: Site) -> bool:
    """Whether each of the groups that an optimizer is given has a decay of its own."""
    if keyword(site.call, "weight_decay") is not None:
        return False
    values = list(sources(view, node, site.scope)) if dotted(node) is not None else [(node, site.scope)]
    return bool(values) and all(
        isinstance(value, ast.List)
        and decaying_groups(view, value, home)
        and all("weight_decay" in (pairs(group) or ()) for group in value.elts)
        for value, home in values
    )


def alike(view: View, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether the parameters are one group, or groups that differ in other things than the decay."""
    if isinstance(node, ast.IfExp):
        return all(alike(view, arm, scope, depth) for arm in (node.body, node.orelse))
    if last(node) == "parameters" and isinstance(node, ast.Call):
        return True
    for item in walk(node):
        if isinstance(item, ast.Call) and last(item) == "parameters" and last(node) in ("filter", "list", "chain"):
            return True
    picked = chosen_from(node)
    if picked is not None:
        return depth < 3 and alike(view, picked, scope, depth + 1)
    values = list(sources(view, node, scope)) if dotted(node) is not None else [(node, scope)]
    given = made_by(view, node, scope)
    if given is not None and depth < 3:
        return all(alike(view, value, home, depth + 1) for value, home in given)
    more = [b.value for b in scope.binds.get(dotted(node) or "", []) if b.how == "aug" and b.value is not None]
    if more:  # `params += list(model.parameters())`
        values = [pair for pair in values if ast.unparse(pair[0]) not in EMPTY]
        return all(alike(view, value, home, depth + 1) for value, home in (*values, *((m, scope) for m in more)))
    if isinstance(node, ast.Name) and values and values[0][1] is scope:
        added = [s for s in scope.named("append") if dotted(s.receiver) == node.id and s.call.args]
        if added and not filled_alike(added):
            return False
        values = [pair for pair in values if not added or ast.unparse(pair[0]) not in EMPTY]
        if added and not values:
            return True
    return bool(values) and all(
        same_decay(value)
        or decaying_groups(view, value, home)
        or (depth < 3 and value is not node and alike(view, value, home, depth + 1))
        for value, home in values
    )


def lone_matrix(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether the parameters are those of a module of the project that has matrices of its own alone, which a group
    without decay would not spare (`self.proxies = nn.Parameter(torch.empty(100, dim))`).
    """
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters"):
        return False
    owner = view.kinds.module_class(node.func.value, scope)
    start = owner.defs.get("__init__") if owner is not None else None
    if owner is None or start is None or any(True for _ in view.names.parents(owner)):
        return False
    made = [site for method in owner.defs.values() for site in method.sites if site.name == "Parameter"]
    return bool(made) and all(map(is_matrix, made)) and not any(may_hold(*each) for each in held(owner))


def held(owner: Scope) -> Iterator[tuple[str, ast.expr | None]]:
    """What a class's methods put on its objects, by an assignment or a call, with its name."""
    for method in owner.defs.values():
        yield from ((key, b.value) for key, binds in method.binds.items() if key.startswith("self.") for b in binds)
        yield from ((s.name, s.call) for name in REGISTERS for s in method.named(name))


def may_hold(key: str, value: ast.expr | None) -> bool:
    """Whether an attribute of a module may hold parameters beside those that are written out there: what a call gives,
    a list, or what is called a model.
    """
    if isinstance(value, ast.Call):
        return last(value) not in ("Parameter", "int", "float", "len", "bool", "str")
    return isinstance(value, ast.List | ast.ListComp) or any(map(MODEL.search, (key.rpartition(".")[2], last(value))))


def is_matrix(site: Site) -> bool:
    """Whether a parameter has two dimensions or more, as written (`nn.Parameter(torch.zeros([8, 4]) * 0.1)`)."""
    inner = site.call.args[0] if site.call.args else None
    while isinstance(inner, ast.BinOp) or (isinstance(inner, ast.Call) and last(inner) in KEEPS):
        inner = inner.left if isinstance(inner, ast.BinOp) else getattr(inner.func, "value", None)
    sizes = inner.args if isinstance(inner, ast.Call) and last(inner) in SIZED else []
    if len(sizes) == 1 and isinstance(sizes[0], ast.List | ast.Tuple):
        sizes = sizes[0].elts
    return len(sizes) >= 2


def sources(view: View, node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """What a name is given where it stands or, if it is a parameter, by the calls of its function."""
    name = dotted(node)
    binds = view.origins.binds(name, scope, node.lineno) if name is not None else []
    yield from ((bind.value, home) for bind, home in binds if bind.value is not None)
    for site in view.calls.callers(scope)[:8] if not binds and name in scope.params else ():
        value = passed(site, scope, name or "")
        if value is not None:
            yield value, site.scope


def made_by(view: View, node: ast.expr, scope: Scope) -> list[tuple[ast.expr, Scope]] | None:
    """What a function of the project returns that makes the parameters, if it sorts nothing out."""
    target = view.calls.target(node, scope) if isinstance(node, ast.Call) else None
    if target is None or target.kind != "function":
        return None
    text = ast.unparse(target.node)
    if any(word in text for word in SORTED_OUT) or "weight_decay" in text or "named_parameters" in text:
        return None
    found = [(value, target) for value in target.returns()]
    return found or None


def chosen_from(node: ast.expr) -> ast.expr | None:
    """The parameters of which those are taken that can be trained (`[p for p in params if p.requires_grad]`)."""
    if isinstance(node, ast.ListComp | ast.GeneratorExp) and len(node.generators) == 1:
        part = node.generators[0]
        plain = dotted(node.elt) is not None and dotted(node.elt) == dotted(part.target)
        trained = all(last(test) == "requires_grad" for test in part.ifs)
        return part.iter if plain and trained and isinstance(part.iter, ast.Name) else None
    if isinstance(node, ast.Call) and last(node) in ("filter", "list") and node.args:
        return node.args[-1] if isinstance(node.args[-1], ast.Name) else None
    return None


def pairs(group: ast.expr) -> dict[object, ast.expr] | None:
    """What a written group holds, as `{"params": ...}` or `dict(params=...)`."""
    if isinstance(group, ast.Dict) and None not in group.keys:
        return {constant(key): value for key, value in zip(group.keys, group.values, strict=True)}
    if isinstance(group, ast.Call) and last(group) == "dict" and not group.args:
        return {item.arg: item.value for item in group.keywords}
    return None


def decaying_groups(view: View, value: ast.expr, scope: Scope) -> bool:
    """Whether groups are written out that all decay, by the optimizer's rate or one of their own."""
    if not isinstance(value, ast.List) or not value.elts:
        return False
    groups = [pairs(group) for group in value.elts]
    if any(group is None for group in groups):
        return False
    rates = [group.get("weight_decay") for group in groups if group is not None]
    if all(rate is None for rate in rates):
        return True
    sorts = any(view.effects.mentioned_in(scope, word) for word in SORTED_OUT if word != "norm")  # of gradients
    return not sorts and all(rate is None or constant(rate) not in (0, 0.0) for rate in rates)


def filled_alike(added: list[Site]) -> bool:
    """Whether the groups that are appended to a list all decay alike."""
    texts = [ast.unparse(site.call) for site in added]
    return all("params" in text and "weight_decay" not in text for text in texts) and not any(
        word in text for text in texts for word in SORTED_OUT
    )


def same_decay(value: ast.expr) -> bool:
    """Whether a value is all parameters of a model, or groups without a decay of their own and no sorting by kind."""
    text = ast.unparse(value)
    if any(word in text for word in SORTED_OUT) or "weight_decay" in text:
        return False
    if isinstance(value, ast.Call):
        return last(value) in ("parameters", "filter", "list", "chain") and "parameters()" in text
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return same_decay(value.left) and same_decay(value.right)
    if isinstance(value, ast.Starred):
        return same_decay(value.value)
    if isinstance(value, ast.List) and any(isinstance(e, ast.Starred) for e in value.elts):
        return all(map(same_decay, value.elts))
    groups = isinstance(value, ast.List) and bool(value.elts) and all(isinstance(e, ast.Dict) for e in value.elts)
    return groups or (isinstance(value, ast.ListComp) and "parameters()" in text)


RULE = Rule(
    code="LS020",
    name="decay on biases and norms",
    what="An optimizer with weight decay gets all parameters in groups that decay alike.",
    why=(
        "Shrinking biases, norm scales and embeddings regularises nothing and can hurt; most recipes for "
        "transformers leave them out. Others train well without: this is an opinion."
    ),
    bad="""
import torch

def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
""",
    good="""
import torch

def make(model):
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)
""",
    severity=Severity.OPINION,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Give biases and norms a group with weight_decay=0",
)
