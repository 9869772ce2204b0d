"""LS033: a sharded model or optimizer saved on one rank."""

from collections.abc import Iterator

from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event
from lockstep_lint.events.query import alone, calls_after, sides
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

MESSAGE = "needs all ranks, but only one comes here: take the state on every rank, then write it on one"


def check(view: View) -> Iterator[Found]:
    """Find states of sharded objects that only one rank reads or writes."""
    if not view.effects.mentioned(view.module, "FullyShardedDataParallel", "fully_shard", "ZeroRedundancyOptimizer"):
        return
    for run in runs(view):
        wraps = [wrap for wrap in run.of("wrap") if wrap.detail in ("fsdp", "fsdp2")]
        for event in run.of("state"):
            if wraps and event.place < wraps[0].place:
                continue  # nothing is sharded yet
            found = sides(view, event)
            calls = calls_after(event, found[0][0]) if found else []
            site = calls[0].site if calls else event.mark.site
            kept = bool(found) and not alone(view, event) and reads(view, event)
            if kept and site is not None and site.module is view.module:
                yield at(site, MESSAGE)


def reads(view: View, event: Event) -> bool:
    """Check whether an event reads or writes the state of something sharded."""
    site = event.mark.site
    if site is None or site.name != "state_dict":
        return True
    for origin in view.origins.of(site.receiver, site.scope):
        name = view.names.qualify(origin.call.func, origin.scope) if origin.call is not None else ""
        if name.endswith("FullyShardedDataParallel"):
            return True
        if name.endswith("ZeroRedundancyOptimizer"):
            return not view.effects.mentioned(view.module, "consolidate_state_dict")
    return False


MOOT = (TRAINERS - {"trl"}) | {"accelerate"}
RULE = Rule("LS033", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=MOOT, placed=True)
