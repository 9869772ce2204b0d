"""LS069: a loader in a cycle."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import constant, idents, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

REPEATS = "cycle keeps each batch of the first pass and repeats that pass: no new shuffle, no new augmentation"
KEEPS = "cycle keeps each batch of a whole pass in memory: begin the loader again when it ends"
ORDERS = ("shuffle", "sampler", "batch_sampler")
# How many calls around a function are asked for loops.
MAX_CALLS = 3


def check(view: View) -> Iterator[Found]:
    """Find the loaders of a training that `itertools.cycle` repeats."""
    for site in view.sites("cycle"):
        if view.full(site) != "itertools.cycle" or not site.call.args or not trains(view):
            continue
        made = view.kinds.loader_call(site.call.args[0], site.scope)
        if made is None or evaluates(site, made[0]):
            continue
        orders = [value for value in (keyword(made[0], name) for name in ORDERS) if value is not None]
        drawn = any(constant(value) is not False and constant(value) != 0 for value in orders)
        if drawn and not repeated(view, site.stmt, site.scope):
            yield at(site, REPEATS)
        else:
            yield at(site, KEEPS, severity=Severity.HINT)


def trains(view: View) -> bool:
    """Check whether a program of the file computes gradients."""
    return any(any(member.sites("backward")) for member in view.project.family(view.module))


def evaluates(site: Site, made: ast.Call) -> bool:
    """Check whether a loader is held out, by any name that it, its data or its cycle has."""
    targets = [bind.key for bind in site.scope.bound(site.stmt)]
    words = [*targets, site.scope.name, *idents(site.call), *idents(made)]
    return any(EVALUATION.search(word) for key in words for word in key.split("."))


def repeated(view: View, stmt: ast.stmt, scope: Scope, depth: int = 0) -> bool:
    """Check whether a statement may run in each epoch, so that each has an order of its own."""
    if loops(stmt, scope.module) or depth > MAX_CALLS:
        return True
    callers = view.calls.callers(scope) if scope.kind == "function" else ()
    return any(repeated(view, site.stmt, site.scope, depth + 1) for site in callers)


RULE = Rule(
    code="LS069",
    name="loader in a cycle",
    what="`itertools.cycle` repeats a DataLoader that the program trains on.",
    why=(
        "cycle keeps every batch of the first pass in memory, and repeats them from there. The loader is never asked "
        "again: each epoch has the order, the batches and the random crops of the first, and memory grows by the "
        "whole data set."
    ),
    bad="""
import itertools
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, steps):
    loader = DataLoader(data, batch_size=32, shuffle=True)
    batches = itertools.cycle(loader)
    for step in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    good="""
from torch.utils.data import DataLoader

def endless(loader):
    while True:
        yield from loader

def train(model, data, optimizer, criterion, steps):
    loader = DataLoader(data, batch_size=32, shuffle=True)
    batches = endless(loader)
    for step in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="none",
    remedy="Begin the loader again when it ends: `while True: yield from loader`",
    note=(
        "A loader that does not shuffle, and a cycle that each epoch makes anew (`zip(cycle(small), large)`), are "
        "hints: the memory is still held."
    ),
)
