"""LS010: find_unused_parameters=True."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.index import Site
from lockstep.lint.analysis.nodes import is_true, keyword
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

WRAPPERS = ("DistributedDataParallel", "DDP")
MESSAGE = "searches the graph for unused parameters in every step: leave it False unless there really are some"


def check(view: View) -> Iterator[Found]:
    """Looks for the flag in wrappers, in dictionaries of their arguments, and in names of strategies."""
    for site in view.sites():
        value = keyword(site.call, "find_unused_parameters")
        made = view.origins.of(value, site.scope) if value is not None else []
        if value is not None and (is_true(value) or (len(made) == 1 and is_true(made[0].node))):
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


RULE = Rule(
    code="LS010",
    name="find_unused_parameters=True",
    what="DDP is told to look for unused parameters.",
    why=(
        "DDP walks the whole autograd graph after every forward pass, which costs time in every step, and it hides a "
        "layer that never trains. Only models whose forward pass takes different paths need it."
    ),
    bad=(
        """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, local_rank):
    return DDP(model.to(local_rank), device_ids=[local_rank], find_unused_parameters=True)
""",
        """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, local_rank):
    options = {"device_ids": [local_rank], "find_unused_parameters": True}
    return DDP(model.to(local_rank), **options)
""",
    ),
    good=(
        """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, local_rank, flag):
    return DDP(model.to(local_rank), device_ids=[local_rank], find_unused_parameters=flag)
""",
    ),
    severity=Severity.WARNING,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Leave find_unused_parameters at its default",
)
