"""Whether what is saved has a wrapper's names: what takes the plain model out of it, or asks whether there is one."""

import ast
import re

from lockstep_lint.analysis.context import Guard, guards, withs
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted, last, mentions, walk
from lockstep_lint.analysis.view import View

__all__ = ["by_shards", "guarded_by_type", "knows_shards", "stripped", "taken_out"]

# What takes the wrapper's names off.
STRIPS = ("'module.'", '"module.', "_orig_mod", "consume_prefix_in_state_dict", "remove_prefix", "[7:]")
NEAR = 10
# A test of the rank, which says nothing of the wrapper.
RANKS = re.compile(r"not (args\.)?distributed or ")
# What tests for the wrapper, or takes the model out of it.
TESTS = [
    "hasattr",
    "isinstance",
    ".module if",
    "module else",
    ".module.state_dict",
    "not args.distributed",
    "not distributed",
]
WRAPPED = re.compile(r"module|Parallel|DDP")


def stripped(view: View, site: Site) -> bool:
    """Whether the code around a call, or a function that is handed what it gives, takes the wrapper's names off."""
    around = view.module.lines[max(0, site.line - NEAR) : site.line + NEAR]
    if any(word in line for line in around for word in STRIPS):
        return True
    names = {bind.key for bind in site.scope.bound(site.stmt)}
    return any(
        view.effects.mentioned_in(function, word)
        for other in site.scope.sites
        if other.line >= site.stmt.lineno and other is not site and handed(other, site, names)
        for function in view.calls.runs(other)
        for word in STRIPS
    )


def handed(other: Site, site: Site, names: set[str]) -> bool:
    """Whether a call is given what another gives, itself or under one of its names."""
    values = [*other.call.args, *(item.value for item in other.call.keywords)]
    return any(
        any(item is site.call for item in walk(value)) or any(mentions(value, name) for name in names)
        for value in values
    )


def replaced(view: View, site: Site) -> bool:
    """Whether the name of a state gets the plain model's instead right after (`if ddp: state = m.module...`)."""
    for bind in site.scope.bound(site.stmt):
        later = [b for b in site.scope.binds[bind.key] if b.stmt.lineno > site.line and b.value is not None]
        if any(".module.state_dict" in ast.unparse(b.value) for b in later if b.value is not None):
            return True
    return False


def taken_out(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a name stands for the plain model, taken out of the wrapper where there is one."""
    return any(isinstance(o.node, ast.Attribute) and o.node.attr == "module" for o in view.origins.of(node, scope))


def knows_shards(view: View, scope: Scope) -> bool:
    """Whether a function knows of FSDP, whose state it takes in another way."""
    return any(view.effects.mentioned_in(scope, word) for word in ("fsdp", "FSDP", "state_dict_type"))


def by_shards(site: Site) -> bool:
    """Whether FSDP gives the state, in the form that a block around says: its names are the plain model's."""
    return any(last(item) == "state_dict_type" for item in withs(site.stmt, site.module))


def guarded_by_type(view: View, site: Site) -> bool:
    """Whether a test on the wrapper decides, in a statement around it or a conditional expression."""
    if replaced(view, site) or any(parts_wrapped(view, guard) for guard in guards(site.stmt, site.module)):
        return True
    name = re.escape(dotted(site.receiver) or "")
    lines = view.module.lines[max(0, site.line - 6) : site.line + 1]
    other = re.compile(rf"\s*(?!{name} =)[\w.]+ = .*(\.module if|module else)") if name else None
    around = "\n".join(line for line in lines if other is None or not other.match(line))  # not a name for the plain one
    around = RANKS.sub("", around)
    return any(word in around for word in TESTS)


def parts_wrapped(view: View, guard: Guard) -> bool:
    """Whether a test divides wrapped models from plain ones: by what it asks, or by what its other arm takes."""
    test = ast.unparse(guard.test)
    if ("hasattr" in test or "isinstance" in test) and WRAPPED.search(test):
        return True
    other = getattr(guard.stmt, "orelse" if guard.when else "body", [])
    lines = view.module.lines[other[0].lineno - 1 : other[-1].end_lineno] if other else []
    return any(".module.state_dict" in line for line in lines)
