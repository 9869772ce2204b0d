"""LS048: an optimizer made before the model is sharded."""

from collections.abc import Iterator

from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, apart
from lockstep_lint.events.query import same
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

MESSAGE = "made before the model is sharded on line {line}: it steps parameters that no longer train, so make it after"


def check(view: View) -> Iterator[Found]:
    """Look for optimizers that are made of a model before FSDP replaces its parameters."""
    for run in runs(view):
        for event in run.of("optimizer"):
            wrap = sharded_after(view, run, event) if event.module is view.module else None
            if wrap is not None:
                yield Found(event.node, MESSAGE.format(line=wrap.line))


def sharded_after(view: View, run: Run, event: Event) -> Event | None:
    """Return the FSDP wrapper that shards a model after its only optimizer was made."""
    wraps = [wrap for wrap in run.of("wrap") if wrap.place > event.place and wrap.detail in ("fsdp", "fsdp2")]
    found = [wrap for wrap in wraps if not apart(wrap, event) and same(view, wrap, event)]
    again = [other for other in run.of("optimizer") if found and other.place > found[0].place]
    return found[0] if found and event.mark.subject is not None and not again else None


MOOT = (TRAINERS - {"trl"}) | {"accelerate", "lightning_fabric"}
RULE = Rule("LS048", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=MOOT)
