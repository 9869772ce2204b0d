"""Layers of a model that its forward leaves out, always or by chance."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import above, guards
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import argument, dotted, idents, last, walk
from lockstep_lint.analysis.view import View

__all__ = ["left_out"]

# Layers of torch.nn that have parameters, whatever they are given.
LAYERS = re.compile(
    r"^torch\.nn\.(Linear|Bilinear|(Lazy)?Conv(Transpose)?[123]d|Embedding(Bag)?|LayerNorm|RMSNorm|BatchNorm[123]d|GroupNorm|"
    r"LSTM|GRU|RNN|LSTMCell|GRUCell|MultiheadAttention|Transformer\w*)$"
)
# What copies the layer that it is given, and the name of that argument.
STACKS = {"TransformerEncoder": "encoder_layer", "TransformerDecoder": "decoder_layer"}
CHANCE = {"rand", "random", "randint", "randn", "uniform", "bernoulli", "choice", "item", "any", "all"}
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


def left_out(view: View, owner: Scope) -> tuple[str, int, bool] | None:
    """A layer of a model's class that some forwards do not use: its name, the line, and whether none does."""
    init, forward = owner.defs.get("__init__"), owner.defs.get("forward")
    if init is None or forward is None or not view.kinds.is_module_class(owner):
        return None
    if any(True for _ in view.names.parents(owner)) or OTHER_WAYS & set(idents(owner.node)):
        return None
    elsewhere = {name for method in owner.defs.values() if method not in (init, forward) for name in _own(method.node)}
    copied = list(copies(view, init))
    for name, line in layers(view, init):
        if name in elsewhere or sum(1 for other in _own(init.node) if other == name) - copied.count(name) > 1:
            continue  # another method may use it; a layer that is named twice is tied, frozen or listed
        uses = [stmt for stmt in forward.stmts if any(name == other for part in _parts(stmt) for other in _own(part))]
        if not uses and name not in outside(view, owner):
            return name, line, True
        if uses and all(isinstance(stmt, ast.For | ast.AsyncFor) for stmt in uses):
            uses = [use for loop in uses for use in _turns(loop, forward)]
        if uses and all(by_chance(stmt, forward) for stmt in uses) and not both_arms(uses, forward):
            return name, uses[0].lineno, False
    return None


def copies(view: View, init: Scope) -> Iterator[str]:
    """The attributes that a torch.nn.TransformerEncoder or -Decoder is made from, which takes copies of its layer."""
    for site in init.sites:
        if site.name in STACKS and view.full(site) == f"torch.nn.{site.name}":
            given = argument(site.call, 0, STACKS[site.name])
            yield from _own(given) if given is not None else ()


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


def by_chance(stmt: ast.stmt, forward: Scope) -> bool:
    """Whether chance or data decide if a statement of a forward runs."""
    return any(
        isinstance(node, ast.Call) and last(node) in CHANCE
        for guard in guards(stmt, forward.module)
        for node in walk(guard.test)
    )


def both_arms(uses: list[ast.stmt], forward: Scope) -> bool:
    """Whether each arm of some test uses the layer."""
    arms: dict[ast.stmt, set[str]] = {}
    for stmt in uses:
        for node, place in above(stmt, forward.module):
            if isinstance(node, ast.If):
                arms.setdefault(node, set()).add(place)
    return any({"body", "orelse"} <= places for places in arms.values())


def _own(node: ast.AST) -> Iterator[str]:
    """The attributes of `self` that a piece of code names."""
    for item in walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            yield item.attr


def _parts(stmt: ast.stmt) -> Iterator[ast.AST]:
    """What a statement itself evaluates, without the statements in it."""
    for _, value in ast.iter_fields(stmt):
        items = value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, ast.expr | ast.withitem))


def _turns(loop: ast.stmt, forward: Scope) -> Iterator[ast.stmt]:
    """The statements of a loop over layers that call its variable."""
    names = {n.id for n in walk(loop.target) if isinstance(n, ast.Name)} if isinstance(loop, ast.For) else set()
    for stmt in forward.stmts:
        inner = any(node is loop for node, _ in above(stmt, forward.module))
        if inner and any(isinstance(n, ast.Call) and dotted(n.func) in names for p in _parts(stmt) for n in walk(p)):
            yield stmt
