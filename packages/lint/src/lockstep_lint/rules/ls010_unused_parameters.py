"""LS010: find_unused_parameters=True."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.branches import left_out
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import has_star, is_true, keyword, last
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

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
            yield at(site, MESSAGE)
        elif keyword(site.call, "strategy") is not None and "find_unused_parameters_true" in view.module.text:
            strategy = keyword(site.call, "strategy")
            if any(
                "find_unused_parameters_true" in str(getattr(o.node, "value", ""))
                for o in view.origins.of(strategy, site.scope)
            ):
                yield at(site, MESSAGE)
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
                        yield at(site, MESSAGE)


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
    severity=Severity.WARNING,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Leave find_unused_parameters at its default",
)
