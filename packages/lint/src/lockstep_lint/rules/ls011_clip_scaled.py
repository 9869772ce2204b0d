"""LS011: clipping without unscale_, or after the step."""

from collections.abc import Iterator

from lockstep_lint.analysis.drafts import add_unscale
from lockstep_lint.analysis.nodes import last
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, apart, seen_from
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import turn_of
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

APEX = "clips inside the block of scale_loss, which unscales the gradients at its end: clip behind it"
MOOT = frozenset({"accelerate", "lightning", "pytorch_lightning"})
KINDS = ("backward", "zero", "step", "unscale", "clip")


def check(view: View) -> Iterator[Found]:
    """Find clips of scaled gradients, and clips that are not between backward and step."""
    if view.analysis.is_moot(view.module, MOOT):
        return
    for run in runs(view):
        for clip in run.of("clip"):
            events = [e for e in turn_of(run, clip, *KINDS) if not apart(e, clip)] if clip.detail != "master" else []
            message = APEX if within_scaling(run, clip) else explain_misplaced(events, clip)
            near = next((e for e in events if e.kind in ("backward", "step")), clip)
            site = seen_from(clip, near)
            if message and site is not None and site.module is view.module:
                yield at(site, message, proposal=add_unscale(view, site) if message is not APEX else ())


def within_scaling(run: Run, clip: Event) -> bool:
    """Check whether a clip follows a backward inside apex's `scale_loss`, which unscales at its end."""
    blocks = [block for block in clip.withs if last(block.node) == "scale_loss"]
    backs = (back for back in run.of("backward") if back.place < clip.place)
    return bool(blocks) and any(blocks[-1] in back.path for back in backs)


def explain_misplaced(events: list[Event], clip: Event) -> str:
    """Explain what is wrong with a clip's position among its iteration's events, if anything."""
    if clip not in events:
        return ""
    place = events.index(clip)
    before, after = events[:place], events[place + 1 :]
    made = [e for e in before if e.kind == "backward"]
    if made and made[-1].detail == "scaled" and not any(e.kind == "unscale" for e in before):
        return "clips gradients that are still multiplied by the loss scale: call scaler.unscale_(optimizer) first"
    kinds = [e.kind for e in events if e.kind != "unscale" and (e is clip or e.kind != "clip")]
    place = kinds.index("clip")
    former, later = kinds[:place], kinds[place + 1 :]
    cleared = former[-1:] == ["zero"] and later[:1] == ["backward"]
    first = clip.loops and former[-1:] in ([], ["step"]) and later == ["zero", "backward", "step"]
    if cleared or first:
        return "clips before backward has made the gradients: clip between backward and step"
    since = former[::-1].index("step") if "step" in former else None
    stepped = since is not None and "backward" not in former[-since:] if since else since == 0
    if stepped and "backward" in former and not any(e.kind == "step" for e in after):
        return "clips after the optimizer has stepped, which changes nothing: clip between backward and step"
    return ""


RULE = Rule("LS011", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=frozenset({"composer", "lockstep"}))
