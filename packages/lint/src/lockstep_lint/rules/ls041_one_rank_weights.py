"""LS041: weights changed on one rank after wrapping."""

from collections.abc import Iterator

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event
from lockstep_lint.events.query import alone, same, sides
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule


def check(view: View) -> Iterator[Found]:
    """Find weights that only some ranks load or initialise after a wrapper made them equal."""
    for run in runs(view):
        for event in run.of("load", "initialise"):
            site = parted_at(view, event)
            if site is not None and site.module is view.module and changes_one(view, run, event):
                done = "loads" if event.kind == "load" else "initialises"
                yield Found(
                    site.call, f"{done} the wrapped model on some ranks only: the ranks train different weights"
                )


def parted_at(view: View, event: Event) -> Site | None:
    """Return the rank-guarded call that causes an event, directly or through a helper."""
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
