"""LS010: find_unused_parameters=True."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import above, loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, dotted, has_star, idents, is_true, keyword, last, targets, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, Mark, apart
from lockstep_lint.events.run import run_from
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


# Layers of torch.nn that have parameters, whatever they are given.
LAYERS = re.compile(
    r"^torch\.nn\.(Linear|Bilinear|(Lazy)?Conv(Transpose)?[123]d|Embedding(Bag)?|LayerNorm|RMSNorm|BatchNorm[123]d|GroupNorm|"
    r"LSTM|GRU|RNN|LSTMCell|GRUCell|MultiheadAttention|Transformer\w*)$"
)
# What copies the layer that it is given, and the name of that argument.
STACKS = {"TransformerEncoder": "encoder_layer", "TransformerDecoder": "decoder_layer"}
CHANCE = {"rand", "random", "randint", "randn", "uniform", "bernoulli", "choice", "item", "any", "all"}
# What a comparison of the data with a number is made of (`x.mean() > 0`).
DATA = {"mean", "sum", "max", "min", "norm", "std", "argmax"}
# A forward that reaches its layers by other ways than their names.
OTHER_WAYS = {
    "children",
    "modules",
    "named_children",
    "named_modules",
    "getattr",
    "_modules",
    "vars",
    "__dict__",
    "parameters",
}


class Uses:
    """Reads which attributes of `self` the calls and statements of a forward name: events of the kind `use`."""

    def __init__(self, view: View) -> None:
        self.calls = view.calls

    def of(self, site: Site) -> tuple[tuple[Mark, ...], tuple[Scope, ...]]:
        """The uses in a call, or of the layers that a loop around hands it one by one, and the methods that it runs."""
        runs = tuple(function for function in self.calls.runs(site) if function.kind == "function")
        names = () if isinstance(site.stmt, ast.For) else (*own(site.call), *turned(site))
        return tuple(Mark("use", site.call, site.stmt, site.scope, None, name) for name in names), runs

    def assigned(self, stmt: ast.stmt, scope: Scope) -> tuple[Mark, ...]:
        """The uses in a plain statement."""
        value = getattr(stmt, "value", None)
        return tuple(Mark("use", stmt, stmt, scope, None, name) for name in (own(value) if value is not None else ()))


def turned(site: Site) -> Iterator[str]:
    """The attributes that loops run over, of whose variables a call is one."""
    for loop in loops(site.stmt, site.module):
        if isinstance(loop, ast.For) and dotted(site.call.func) in {key for key, _ in targets(loop.target)}:
            yield from own(loop.iter)


def left_out(view: View, owner: Scope) -> tuple[str, int, bool] | None:
    """A layer of a model's class that some forwards do not use: its name, the line, and whether none does."""
    init, forward = owner.defs.get("__init__"), owner.defs.get("forward")
    if init is None or forward is None or not view.kinds.is_module_class(owner):
        return None
    if any(True for _ in view.names.parents(owner)) or OTHER_WAYS & set(idents(owner.node)):
        return None
    run = run_from(view, forward, Uses(view))
    elsewhere = {
        name for method in owner.defs.values() if method not in (init, *run.entered) for name in own(method.node)
    }
    copied, inits = list(copies(view, init)), list(own(init.node))
    for name, line in layers(view, init):
        if name in elsewhere or inits.count(name) - copied.count(name) > 1:
            continue  # another method may use it; a layer that is named twice is tied, frozen or listed
        uses = [event for event in run.of("use") if event.detail == name]
        if not uses and name not in outside(view, owner) and name not in set(own(forward.node)):
            return name, line, True
        arms = any(apart(one, other) for one in uses for other in uses)
        if uses and not arms and all(by_chance(view, event, forward) for event in uses):
            return name, uses[0].line, False
    return None


def copies(view: View, init: Scope) -> Iterator[str]:
    """The attributes that a torch.nn.TransformerEncoder or -Decoder is made from, which takes copies of its layer."""
    for site in init.sites:
        if site.name in STACKS and view.full(site) == f"torch.nn.{site.name}":
            given = argument(site.call, 0, STACKS[site.name])
            yield from own(given) if given is not None else ()


def layers(view: View, init: Scope) -> Iterator[tuple[str, int]]:
    """The attributes that hold layers with parameters, made for certain, with their lines."""
    for key, binds in init.binds.items():
        if not key.startswith("self.") or key.count(".") > 1 or len(binds) != 1 or binds[0].path:
            continue
        value = binds[0].value
        if not isinstance(value, ast.Call) or any(True for _ in above(binds[0].stmt, init.module)):
            continue
        full = view.names.qualify(value.func, init)
        inside = full in ("torch.nn.Sequential", "torch.nn.ModuleList") and any(
            isinstance(part, ast.Call) and LAYERS.match(view.names.qualify(part.func, init)) for part in walk(value)
        )
        if LAYERS.match(full) or inside:
            yield key[5:], binds[0].stmt.lineno


def outside(view: View, owner: Scope) -> set[str]:
    """The attributes that the programs read of other objects, which may be this model's."""
    found: set[str] = set()
    for member in view.project.family(owner.module):
        found.update(
            node.attr
            for node in walk(member.top.node)
            if isinstance(node, ast.Attribute) and dotted(node.value) != "self"
        )
    return found


def by_chance(view: View, event: Event, forward: Scope) -> bool:
    """Whether chance or data decide about an event of a forward, there or in what its callers pass for a flag."""
    for test in (arm.node for arm in event.tests):
        flag = dotted(test)
        if flag in forward.params and flag not in forward.binds and passed_by_chance(view, flag, forward):
            return True
        if any(draws(node) or (last(node) in DATA and node is not test) for node in calls_in(test)):
            return True
    return False


def passed_by_chance(view: View, flag: str, forward: Scope) -> bool:
    """Whether a call of the programs passes for a flag what is drawn anew for each."""
    sites = (site for member in view.project.family(forward.module) for site in member.sites())
    given = (keyword(site.call, flag) for site in sites)
    return any(draws(node) for value in given if value is not None for node in calls_in(value))


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in an expression."""
    return (item for item in walk(node) if isinstance(item, ast.Call))


def draws(call: ast.Call) -> bool:
    """Whether a call draws a number, or takes one out of a tensor."""
    return last(call) in CHANCE


def own(node: ast.AST) -> Iterator[str]:
    """The attributes of `self` that a piece of code names."""
    for item in walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            yield item.attr


WRAPPERS = ("DistributedDataParallel", "DDP")
MESSAGE = "searches the graph for unused parameters in every step: leave it False unless there really are some"


def check(view: View) -> Iterator[Found]:
    """Looks for the flag in wrappers, in dictionaries of their arguments, and in names of strategies; then for models
    that need it and do not have it.
    """
    if view.only_evaluates:
        return  # without gradients nothing is searched, and nothing waits
    yield from unused(view)
    for site in view.sites():
        value = keyword(site.call, "find_unused_parameters")
        made = view.origins.of(value, site.scope) if value is not None else []
        if value is not None and (asked(value) or (len(made) == 1 and asked(made[0].node))):
            yield from () if needed(view, site) else (at(site, MESSAGE, severity=Severity.HINT),)
        elif keyword(site.call, "strategy") is not None and "find_unused_parameters_true" in view.module.text:
            strategy = keyword(site.call, "strategy")
            if any(
                "find_unused_parameters_true" in str(getattr(o.node, "value", ""))
                for o in view.origins.of(strategy, site.scope)
            ):
                yield at(site, MESSAGE, severity=Severity.HINT)
        else:
            yield from unpacked(view, site)


def asked(value: ast.AST) -> bool:
    """Whether a value is True, or is one constant or another by a test and may be True."""
    if isinstance(value, ast.IfExp):
        return isinstance(value.orelse, ast.Constant) and is_true(value.body)
    return is_true(value)


def unpacked(view: View, site: Site) -> Iterator[Found]:
    """`**kwargs` that come from a dictionary literal with the flag."""
    if site.name not in WRAPPERS:
        return
    for item in site.call.keywords:
        if item.arg is None:
            for origin in view.origins.of(item.value, site.scope):
                if isinstance(origin.node, ast.Dict):
                    pairs = zip(origin.node.keys, origin.node.values, strict=True)
                    if any(getattr(k, "value", None) == "find_unused_parameters" and is_true(v) for k, v in pairs):
                        yield at(site, MESSAGE, severity=Severity.HINT)


def needed(view: View, site: Site) -> bool:
    """Whether the wrapped model leaves layers out in some steps, so that DDP must look for them."""
    made = view.origins.calls_of(view.wrappers.inner(site.call), site.scope) if view.wrappers.wrapper(site) else ()
    owners = (view.names.definition(call.func, scope) for call, scope, _ in made)
    found = (left_out(view, owner) for owner in owners if owner is not None and owner.kind == "class")
    return any(layer is not None and not layer[2] for layer in found)


def unused(view: View) -> Iterator[Found]:
    """A wrapped model whose forward leaves layers out, in some steps or in all, while DDP waits for their gradients."""
    if view.effects.mentioned(view.module, "static_graph", "find_unused_parameters"):
        return
    for kind, site in view.wrappers.made(view.module):
        if kind != "ddp" or has_star(site.call):
            continue
        for call, scope, _ in view.origins.calls_of(view.wrappers.inner(site.call), site.scope):
            owner = view.names.definition(call.func, scope)
            found = left_out(view, owner) if owner is not None and owner.kind == "class" else None
            if found is not None:
                layer, line, always = found
                where = "is used by no forward" if always else f"is left out of some forwards (line {line})"
                yield at(
                    site,
                    f"'self.{layer}' of {last(call)} {where}, and DDP waits for its gradients: use it in every "
                    "step, or pass find_unused_parameters=True",
                )
                break


RULE = Rule(
    code="LS010",
    name="unused parameters",
    what=(
        "DDP is told to look for unused parameters; or it is not, though the model's forward leaves layers out by "
        "chance, by the data, or always."
    ),
    why=(
        "DDP walks the whole autograd graph after every forward pass, which costs time in every step, and it hides a "
        "layer that never trains. Only models whose forward pass takes different paths need it; and these stop with an "
        "error in the second step, or hang, without it."
    ),
    bad="""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, local_rank):
    return DDP(model.to(local_rank), device_ids=[local_rank], find_unused_parameters=True)
""",
    good="""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, local_rank, flag):
    return DDP(model.to(local_rank), device_ids=[local_rank], find_unused_parameters=flag)
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Leave find_unused_parameters at its default",
)
