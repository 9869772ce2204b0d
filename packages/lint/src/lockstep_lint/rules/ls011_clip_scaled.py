"""LS011: clipping without unscale_, or after the step."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.drafts import unscaled
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, keyword, last
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, apart, seen_from
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import turn_of
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

APEX = "clips inside the block of scale_loss, which unscales the gradients at its end: clip behind it"
MANAGED = "clips gradients that {made} still scales in {precision}: call {method}(), which unscales them first"
# What scales the loss by itself, where it is told its precision, and the method that clips.
SCALING = {
    "Accelerator": ("accelerate", "mixed_precision", "accelerator.clip_grad_norm_"),
    "Fabric": ("lightning", "precision", "fabric.clip_gradients"),
}
HALF = {"fp16", "16-mixed", "16", 16}
MOOT = frozenset({"accelerate", "lightning", "pytorch_lightning"})
KINDS = ("backward", "zero", "step", "unscale", "clip")


def check(view: View) -> Iterator[Found]:
    """Look at every clip: are the gradients still scaled, and is it between backward and the step?"""
    yield from managed(view)
    if view.analysis.is_moot(view.module, MOOT):
        return
    for run in runs(view):
        for clip in run.of("clip"):
            events = [e for e in turn_of(run, clip, *KINDS) if not apart(e, clip)] if clip.detail != "master" else []
            message = APEX if within_scaling(run, clip) else misplaced(events, clip)
            near = next((e for e in events if e.kind in ("backward", "step")), clip)
            site = seen_from(clip, near)
            if message and site is not None and site.module is view.module:
                yield at(site, message, proposal=unscaled(view, site) if message is not APEX else ())


def managed(view: View) -> Iterator[Found]:
    """Look for torch's own clip after the backward of a framework that scales the loss itself."""
    family = view.project.family(view.module)
    if not any(f"{name}(" in member.text for member in family for name in SCALING):
        return
    if any("unscale" in name for member in family for name in member.by_name):
        return
    for site in view.sites("clip_grad_norm_", "clip_grad_value_"):
        if not view.full(site).startswith("torch.nn.utils.clip_grad"):
            continue
        for back in site.scope.named("backward"):
            made = scaling(view, back) if back.line < site.line and back.call.args else None
            if made is not None:
                yield at(site, MANAGED.format(made=made[0], precision=made[1], method=SCALING[made[0]][2]))
                break


def scaling(view: View, back: Site) -> tuple[str, object] | None:
    """Return the class and the precision of the object whose backward certainly scales the loss."""
    found = [(each.call, each.scope) for each in view.origins.of(back.receiver, back.scope)]
    answers = {half(view, call, home) for call, home in found}
    return answers.pop() if len(answers) == 1 else None


def half(view: View, call: ast.Call | None, scope: Scope) -> tuple[str, object] | None:
    """Return the class and the precision of an Accelerator or a Fabric that is set to train in half precision."""
    name = last(call)
    if call is None or name not in SCALING:
        return None
    package, option, _ = SCALING[name]
    told = [constant(each.node) for each in view.origins.of(keyword(call, option), scope)]
    ours = view.names.qualify(call.func, scope).startswith(package)
    return (name, told[0]) if ours and told and all(each in HALF for each in told) else None


def within_scaling(run: Run, clip: Event) -> bool:
    """Check whether a clip follows a backward inside apex's `scale_loss`, which unscales at its end."""
    blocks = [block for block in clip.withs if last(block.node) == "scale_loss"]
    backs = (back for back in run.of("backward") if back.place < clip.place)
    return bool(blocks) and any(blocks[-1] in back.path for back in backs)


def misplaced(events: list[Event], clip: Event) -> str:
    """Return what is wrong with the place of a clip among the events of its turn, if anything is."""
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
