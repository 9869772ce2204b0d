"""Find the loaders that a run trains on."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import inside
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import last
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, LoopBlock
from lockstep_lint.events.run import runs

__all__ = ["feeds", "trained_on"]

# Methods of Accelerate and Fabric that give back the loader that they are given.
PREPARES = ("prepare", "prepare_data_loader", "setup_dataloaders")


def trained_on(view: View) -> dict[ast.Call, bool]:
    """Return the loaders that loops run over, and whether any of these loops computes gradients."""
    found: dict[ast.Call, bool] = {}
    for run in runs(view):
        backs = {loop for event in run.of("backward") for loop in event.loops}
        for loop in {loop for event in run.events for loop in event.loops}:
            for made in (loader(view, source, loop) for source in sources(loop)):
                if made is not None:
                    found[made[0]] = found.get(made[0], False) or loop in backs
    return found


def feeds(view: View, event: Event) -> Iterator[ast.Call]:
    """Yield the loaders that the innermost loop around a backward reads."""
    for loop in event.loops[:-3:-1]:
        found = [made[0] for source in sources(loop) if (made := loader(view, source, loop)) is not None]
        yield from () if evaluates(loop.scope.name) else found
        if found:
            return  # the model does not train on an outer loop's loader


def loader(view: View, source: ast.expr, loop: LoopBlock) -> tuple[ast.Call, Scope] | None:
    """Return the loader that a loop certainly iterates over; None if that is unknown."""
    node = view.kinds.iterated(source, loop.scope)
    found = view.kinds.loader_call(node, loop.scope)
    if found is None:  # `loader = accelerator.prepare(loader)`
        prepared = (pair for pair in view.origins.calls_of(node, loop.scope) if last(pair[0]) in PREPARES)
        given = ((call.args[0], home) for call, home, _ in prepared if len(call.args) == 1)
        found = next(filter(None, (view.kinds.loader_call(*each) for each in given)), None)
    return found


def evaluates(name: str) -> bool:
    """Check whether a function evaluates, by its name. It may call the training method for that."""
    return EVALUATION.search(name) and "train" not in name.lower()


def sources(loop: LoopBlock) -> Iterator[ast.expr]:
    """Yield the expressions that a loop iterates over or passes to `next`."""
    if isinstance(loop.node, ast.For | ast.comprehension):
        yield loop.node.iter
    if isinstance(loop.node, ast.stmt):
        asked = [site for site in loop.scope.named("next") if inside(site.stmt, loop.node, loop.scope.module)]
        yield from (site.call.args[0] for site in asked if site.call.args)
