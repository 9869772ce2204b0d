"""What a method keeps of its arguments in its object, with the graph that they belong to."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.context import withs
from lockstep_lint.analysis.effects import turns_off_gradients
from lockstep_lint.analysis.graphs import added, chain, holds
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted
from lockstep_lint.analysis.view import View

__all__ = ["handed_to_keep", "plainly"]

# Where more is done with what is kept than adding it up: it may be differentiated, or thrown away.
MAX_STMTS = 15


def handed_to_keep(view: View, site: Site, live: set[str], outs: set[str]) -> str | None:
    """The name that still has its graph and that a call hands to a method which keeps it (`metric.add(output, y)`)."""
    method = view.calls.target(site.call, site.scope)
    if method is None or method.owner is None or dotted(site.receiver) in (None, "self"):
        return None
    for name in taken(method):
        value = given(site.call, method, name)
        if value is not None and (holds(value, live) or plainly(value, outs)):
            return chain(value) or "loss"
    return None


def plainly(value: ast.expr, names: set[str]) -> bool:
    """Whether a value is one of the names as it stands, or computed from one, and not a part of it."""
    if isinstance(value, ast.BinOp):
        return plainly(value.left, names) or plainly(value.right, names)
    return chain(value) in names


def taken(method: Scope) -> Iterator[str]:
    """The parameters that a method adds, uncut, to a sum or a list of its object."""
    if len(method.stmts) > MAX_STMTS or any(map(turns_off_gradients, method.decorators)):
        return
    for name in method.params:
        if name == "self" or any(bind.how == "assign" for bind in method.binds.get(name, [])):
            continue
        if sums_up(method, name) or lists_up(method, name):
            yield name


def sums_up(method: Scope, name: str) -> bool:
    """Whether a method adds a parameter to an attribute that it does not set otherwise."""
    return any(
        key.startswith("self.") and all(map(added, binds)) and any(holds(b.value, {name}) for b in binds if b.value)
        for key, binds in method.binds.items()
    )


def lists_up(method: Scope, name: str) -> bool:
    """Whether a method appends a parameter to a list of its object, which it sets nowhere else."""
    for site in method.named("append"):
        held = dotted(site.receiver) or ""
        if not held.startswith("self.") or held in method.binds or len(site.call.args) != 1:
            continue
        shielded = any(map(turns_off_gradients, withs(site.stmt, site.module)))
        if chain(site.call.args[0]) == name and plain_list(method, held) and not shielded:
            return True
    return False


def plain_list(method: Scope, key: str) -> bool:
    """Whether an attribute is only ever set to an empty list, by the methods of its object."""
    homes = method.owner.defs.values() if method.owner is not None else ()
    values = [bind.value for home in homes for bind in home.binds.get(key, [])]
    return bool(values) and all(isinstance(value, ast.List) and not value.elts for value in values)
