"""Whether what is saved has a wrapper's names: what takes the plain model out of it, or asks whether there is one."""

import ast
import re

from lockstep.lint.analysis.context import Guard, guards, withs
from lockstep.lint.analysis.index import Scope, Site
from lockstep.lint.analysis.nodes import dotted, last
from lockstep.lint.analysis.view import View

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
    """Whether the code around a call takes the wrapper's names off."""
    around = view.module.lines[max(0, site.line - NEAR) : site.line + NEAR]
    return any(word in line for line in around for word in STRIPS)


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
    if any(parts_wrapped(view, guard) for guard in guards(site.stmt, site.module)):
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
