"""LS018: a collective that only some ranks reach."""

import os
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.engines import asks_for_deepspeed
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Block, CallBlock, Event
from lockstep_lint.events.query import alone, calls_after, many, same, side
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at


def check(view: View) -> Iterator[Found]:
    """Find collectives that a rank test keeps from some ranks."""
    for run in runs(view):
        for event in run.of("collective", "wrap", "forward"):
            site = event.mark.site
            if site is None or not waits(view, run, event) or alone(view, event):
                continue
            block = next((block for block in event.path if keeps_away(view, run, event, block)), None)
            calls = calls_after(event, block) if block is not None else []
            place = calls[0].site if calls else site
            if block is not None and place.module is view.module:
                yield at(place, describe(view, event, bool(calls)))


def waits(view: View, run: Run, event: Event) -> bool:
    """Check whether an event ends when all ranks are in it."""
    if event.kind == "wrap":
        return event.detail in ("ddp", "fsdp")
    return event.kind == "collective" or is_sharded(view, run, event)


def is_sharded(view: View, run: Run, event: Event) -> bool:
    """Check whether a model is certainly FSDP's, whose forward is a collective."""
    wraps = [wrap for wrap in run.of("wrap") if wrap.detail in ("fsdp", "fsdp2")]
    model = event.mark.subject
    if model is None or not (wraps or "fsdp" in view.wrappers.kinds(view.module)):
        return False
    if any(wrap.detail == "fsdp2" and wrap.place < event.place and same(view, wrap, event) for wrap in wraps):
        return True
    kinds = [kind for kind, _, _ in view.wrappers.wrapped(model, event.scope)]
    return bool(kinds) and set(kinds) == {"fsdp"} and len(kinds) == len(view.origins.of(model, event.scope))


def keeps_away(view: View, run: Run, event: Event, block: Block) -> bool:
    """Check whether a test keeps some ranks from an event which the others certainly reach."""
    ranks = side(view, block)
    return bool(ranks) and certain(view, event, block) and not is_paired(view, run, event, block, ranks)


def certain(view: View, event: Event, block: Block) -> bool:
    """Check whether a function under a test always reaches its event with several processes."""
    calls = calls_after(event, block)
    inner = event.path[event.path.index(calls[0]) :] if calls else ()
    return all(
        many(view, test) == 1 or side(view, test) == side(view, block) or (test.when and asks_for_deepspeed(test.node))
        for test in inner
        if isinstance(test, ArmBlock)
    )


def is_paired(view: View, run: Run, event: Event, block: Block, ranks: int) -> bool:
    """Check whether the other ranks reach the same collective elsewhere."""
    found = arrivals(view, run)
    arms = found.get((event.kind, event.detail, block.branch), set()) if isinstance(block, ArmBlock) else set()
    if len(arms) == 2 or -ranks in found.get((event.kind, event.detail, frame(event, block)), set()):
        return True
    return rests(view, run).get((event.kind, event.detail, frame(event, block)), -1) > event.place


@cache_answers
def rests(view: View, run: Run) -> dict[tuple[str, str, object], int]:
    """Map (kind, detail, frame) to the last such event of all remaining ranks."""
    found: dict[tuple[str, str, object], int] = {}
    for event in run.of("collective", "wrap", "forward"):
        leaves = any(isinstance(block, ArmBlock) and block.leaves for block in event.path)
        if leaves and not any(side(view, block) for block in event.path):
            calls = [block for block in event.path if isinstance(block, CallBlock)]
            found[event.kind, event.detail, calls[-1] if calls else None] = event.place
    return found


@cache_answers
def arrivals(view: View, run: Run) -> dict[tuple[str, str, object], set[int]]:
    """Map (kind, detail, frame or arm) of an event to the ranks that reach it."""
    found: dict[tuple[str, str, object], set[int]] = {}
    for event in run.of("collective", "wrap", "forward"):
        for block in event.path:
            if ranks := side(view, block):
                found.setdefault((event.kind, event.detail, frame(event, block)), set()).add(ranks)
            if isinstance(block, ArmBlock):
                found.setdefault((event.kind, event.detail, block.branch), set()).add(int(block.when))
    return found


def frame(event: Event, block: Block) -> Block | None:
    """Return the call whose function contains a block."""
    before = event.path[: event.path.index(block)]
    return next((outer for outer in reversed(before) if isinstance(outer, CallBlock)), None)


def describe(view: View, event: Event, called: bool) -> str:
    """Describe the fault of an event."""
    name = event.mark.site.name if event.mark.site is not None else ""
    if event.kind == "forward":
        return "runs the sharded model on some ranks only, which then wait for the parameters of the others"
    if called:
        where = "" if event.module is view.module else f" of {os.path.basename(event.module.path)}"
        return f"leads to {name}() on line {event.line}{where}, which other ranks never reach: they hang"
    if event.kind == "wrap":
        return "only some ranks wrap the model: the wrapper waits for all of them, so wrap on every rank"
    return f"only some ranks reach {name}(): they wait forever for the others"


RULE = Rule("LS018", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", placed=True)
