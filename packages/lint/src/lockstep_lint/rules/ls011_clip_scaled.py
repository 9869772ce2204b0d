"""LS011: clipping without unscale_, or after the step."""

from collections.abc import Iterator

from lockstep_lint.analysis.context import apart, loops
from lockstep_lint.analysis.drafts import unscaled
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_")


def check(view: View) -> Iterator[Found]:
    """Looks at every clip: are the gradients still scaled, and is it before the step?"""
    for site in (*view.sites(*CLIPS), *helped(view)):
        if is_master(site):
            continue
        if scaled(view, site):
            yield at(
                site,
                "clips gradients that are still multiplied by the loss scale: call scaler.unscale_(optimizer) first",
                proposal=unscaled(view, site),
            )
        elif hasty(view, site):
            yield at(site, "clips before backward has made the gradients: clip between backward and step")
        elif late(view, site):
            yield at(
                site,
                "clips after the optimizer has stepped, which changes nothing: clip between backward and step",
                proposal=unscaled(view, site),
            )


def helped(view: View) -> Iterator[Site]:
    """The calls of the project's own functions that clip the parameters they are given, and do nothing else with a
    step.
    """
    if not view.effects.mentioned(view.module, "clip_grad"):
        return
    stepping = dict.fromkeys(s.scope for s in view.sites("step") if view.steps.steps_optimizer(s))
    for site in (s for scope in stepping for s in scope.sites):
        function = view.calls.target(site.call, site.scope)
        if function is None or not any(map(function.named, CLIPS)):
            continue
        if not view.effects.names(function) & {"unscale_", "step", "backward"}:
            yield site


def is_master(site: Site) -> bool:
    """Whether apex's unscaled master parameters are clipped."""
    return any(
        last(node) == "master_params" for argument in site.call.args for node in walk(argument) if hasattr(node, "func")
    )


def scaled(view: View, site: Site) -> bool:
    """Whether a scaler's backward comes before the clip, and no unscale_ between them."""
    return same_function_scaled(view, site) and not any(
        s.line <= site.line and view.effects.does(s, {"unscale_"}) for s in site.scope.sites
    )


def same_function_scaled(view: View, site: Site) -> bool:
    """Whether the function of the clip runs a scaled backward before it and a scaler's step after it, on all paths."""
    scope = site.scope
    before = [s for s in scope.sites if view.steps.backwards(s) and s.line < site.line]
    if not before or apart(site, before[-1]):
        return False
    receiver = before[-1].receiver
    return receiver is not None and any(last(node) == "scale" for node in walk(receiver))


def hasty(view: View, site: Site) -> bool:
    """Whether the gradients were just cleared, or are cleared next, and backward comes only after that: what is clipped
    is nothing, or the last step's gradients.
    """
    nest = loops(site.stmt, site.module)
    same = [s for s in site.scope.sites if loops(s.stmt, site.module) == nest and not apart(s, site)]
    order = sorted((s for s in same if s is site or s.name in ("zero_grad", "backward", "step")), key=lambda s: s.line)
    place = order.index(site)
    names = [s.name for s in order]
    if place and names[place - 1] == "zero_grad" and names[place + 1 : place + 2] == ["backward"]:
        return True
    ends = not place or names[place - 1] == "step"  # nothing of this turn comes before
    return bool(nest) and ends and names[place + 1 :] == ["zero_grad", "backward", "step"]


def late(view: View, site: Site) -> bool:
    """Whether backward, then step, then the clip follow each other in one loop body."""
    scope: Scope = site.scope
    nest = loops(site.stmt, scope.module)
    same = [s for s in scope.sites if loops(s.stmt, scope.module) == nest]
    steps = [s for s in same if view.steps.steps_optimizer(s) and s.line < site.line and not apart(s, site)]
    if not steps or any(view.steps.steps_optimizer(s) and s.line > site.line for s in same):
        return False
    return (
        not any(view.steps.backwards(s) and steps[-1].line < s.line < site.line for s in same)
        and any(view.steps.backwards(s) and s.line < steps[-1].line for s in same)
        and dotted(steps[-1].receiver) is not None
    )


RULE = Rule(
    code="LS011",
    name="clipping scaled or stepped gradients",
    what="Gradients are clipped while a GradScaler's factor is still in them, or after the optimizer's step.",
    why=(
        "A scaler multiplies the loss, and so the gradients, by up to 65536: a clip at norm 1 then shrinks nearly "
        "everything to nothing. A clip after the step has no effect at all."
    ),
    bad="""
import torch

def step(model, optimizer, scaler, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    good="""
import torch

def step(model, optimizer, scaler, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Call scaler.unscale_(optimizer), clip, then step",
    moot=frozenset({"accelerate", "lightning", "pytorch_lightning", "lockstep", "composer"}),
)
