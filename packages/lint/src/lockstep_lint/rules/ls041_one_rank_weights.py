"""LS041: weights changed on one rank after wrapping."""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import Words, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event
from lockstep_lint.events.query import alone, same, sides, subject, things
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

STEPS = "steps the optimizer on some ranks only: the ranks train different weights"
# What sends weights or gradients on by hand.
SENDS = Words(r"broadcast|scatter|gather|^i?send$|^i?recv$|all_?reduce|sync_|average")


def check(view: View) -> Iterator[Found]:
    """Find weights that only some ranks load or initialise after a wrapper made them equal."""
    yield from steps_apart(view)
    for run in runs(view):
        for event in run.of("load", "initialise"):
            site = parted_at(view, event)
            if site is not None and site.module is view.module and changes_one(view, run, event):
                done = "loads" if event.kind == "load" else "initialises"
                yield Found(
                    site.call, f"{done} the wrapped model on some ranks only: the ranks train different weights"
                )


def steps_apart(view: View) -> Iterator[Found]:
    """Look for steps of a wrapped model's optimizer that only some ranks take, after a backward of all of them."""
    if any(SENDS.search(name) for member in view.project.family(view.module) for name in member.by_name):
        return
    for run in runs(view):
        for event in run.of("step"):
            parts = sides(view, event)
            site = parted_at(view, event)
            if not parts or site is None or site.module is not view.module or alone(view, event):
                continue
            blocks = [block for block, _ in parts]
            backs = [back for back in run.of("backward") if set(back.loops) & set(event.loops)]
            others = [other for other in run.of("step") if not any(block in other.path for block in blocks)]
            together = bool(backs) and not any(block in back.path for block in blocks for back in backs)
            if together and not others and of_wrapped(view, run, event):
                yield Found(site.call, STEPS)


def of_wrapped(view: View, run: Run, event: Event) -> bool:
    """Check whether an optimizer was given the parameters of a model that a wrapper has."""
    node, scope = subject(event)
    wraps = [things(view, *subject(wrap)) for wrap in run.of("wrap") if wrap.detail in ("ddp", "fsdp")]
    for call, home, _ in view.origins.calls_of(node, scope):
        given = [part.func.value for part in walk(call) if isinstance(part, ast.Call) and is_parameters(part.func)]
        if any(things(view, model, home) & wrapped for model in given for wrapped in wraps):
            return True
    return False


def is_parameters(func: ast.expr) -> TypeGuard[ast.Attribute]:
    """Check whether a function is a model's `parameters`."""
    return isinstance(func, ast.Attribute) and func.attr in ("parameters", "named_parameters")


def parted_at(view: View, event: Event) -> Site | None:
    """Return the call under the test of the rank that brings an event about: its own, or that of a helper."""
    parts = sides(view, event)
    after = event.within(parts[-1][0]) if parts else ()
    return next((block.site for block in after if isinstance(block, CallBlock)), event.mark.site)


def changes_one(view: View, run: Run, event: Event) -> bool:
    """Check whether some ranks alone change a wrapped model that then trains."""
    wraps = [wrap for wrap in run.of("wrap") if wrap.place < event.place and wrap.detail in ("ddp", "fsdp")]
    if not wraps or not sides(view, event) or alone(view, event):
        return False
    later = run.events[event.place :]
    sent = any((e.kind == "collective" and "broadcast" in e.detail) or e.kind == "wrap" for e in later)
    trained = any(e.kind == "backward" for e in later) or any(
        loop in back.path for loop in event.loops for back in run.of("backward")
    )
    return trained and not sent and any(same(view, wrap, event) for wrap in wraps)


RULE = Rule("LS041", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS - {"trl"}, placed=True)
