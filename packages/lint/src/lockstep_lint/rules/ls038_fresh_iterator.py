"""LS038: next(iter(loader)) in every step."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import inside, loops, rarely
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import dotted, last
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

BEGINS = ("iter", "enumerate")


def check(view: View) -> Iterator[Found]:
    """Looks in training loops for loaders that are begun anew in every turn."""
    steps = {id(loop) for t in view.trainings.near(view.module) for loop in (t.loop, t.micro) if loop is not None}
    for site in view.sites("next"):
        loader = begun(site)
        if loader is None:
            continue
        nest = loops(site.stmt, site.module)
        if not nest or id(nest[0]) not in steps or view.trainings.rare(site.stmt, site.scope, nest[0]):
            continue
        if id(site.call) in rarely(site.stmt) or goes_on(view, site, loader) or made_inside(site, loader):
            continue
        if view.kinds.is_loader(loader, site.scope):
            yield at(
                site,
                "begins the loader anew for one batch: its workers start in every turn, and without shuffling it is "
                "always the first batch, so keep one iterator",
            )


def begun(site: Site) -> ast.expr | None:
    """What `next(iter(loader))`, or `next(enumerate(loader))`, takes the first item of."""
    taken = site.call.args[0] if site.call.args and isinstance(site.call.func, ast.Name) else None
    loader = taken
    while (
        isinstance(loader, ast.Call) and isinstance(loader.func, ast.Name) and loader.func.id in BEGINS and loader.args
    ):
        loader = loader.args[0]
    return loader if loader is not taken else None


def goes_on(view: View, site: Site, loader: ast.expr) -> bool:
    """Whether a name may hold an iterator already (`loader = iter(loader)`), which `iter` gives back as it is."""
    return any(last(call) == "iter" for call, *_ in view.origins.calls_of(loader, site.scope))


def made_inside(site: Site, loader: ast.expr) -> bool:
    """Whether the loop makes the loader itself, so that there is nothing to keep."""
    key = dotted(loader)
    loop = loops(site.stmt, site.module)[0]
    return key is None or any(inside(bind.stmt, loop, site.module) for bind in site.scope.binds.get(key, []))


RULE = Rule(
    code="LS038",
    name="next(iter(loader)) in a loop",
    what="A training loop takes its batch by `next(iter(loader))`, or `next(enumerate(loader))`, in every turn.",
    why=(
        "Every `iter` starts the loader's workers, draws a new order and fills its queue, for one batch of it: most of "
        "the time goes into that. Samples are drawn with repeats, a loader that does not shuffle gives its first batch "
        "for ever, and a DistributedSampler the first batch of its epoch."
    ),
    bad="""
import torch

def train(model, loader, optimizer, criterion, steps):
    for step in range(steps):
        x, y = next(iter(loader))
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    good="""
import torch

def train(model, loader, optimizer, criterion, steps):
    batches = iter(loader)
    for step in range(steps):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Keep one iterator over the loader, and begin a new one when it ends",
    moot=frozenset({"lightning", "pytorch_lightning", "lockstep"}),
    note=(
        "It is told where each turn of a training loop does so, also for a second loader beside the loop's own; not "
        "where it is done now and then, with a loader that the loop makes itself, or with a name that holds an "
        "iterator already, which `iter` gives back as it is."
    ),
)
