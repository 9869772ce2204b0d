"""LS042: zero_grad before backward inside Accelerate's accumulate()."""

from collections.abc import Iterator

from lockstep_lint.analysis.nodes import constant, has_star, keyword, last
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, WithBlock
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

MESSAGE = "clears what the micro-batches before the last one have accumulated: call it after optimizer.step()"


def check(view: View) -> Iterator[Found]:
    """Look for gradients that are cleared first in each turn under `accelerator.accumulate(model)`."""
    if not view.effects.mentioned(view.module, ".accumulate(") or not accumulates(view):
        return
    for run in runs(view):
        for zero in run.of("zero"):
            block = next((b for b in zero.withs if last(b.node) == "accumulate"), None)
            if block is not None and zero.module is view.module and first(run, zero, block):
                yield Found(zero.node, MESSAGE)


def accumulates(view: View) -> bool:
    """Check whether an Accelerator is set to accumulate, as far as is known."""
    sites = [site for member in view.project.family(view.module) for site in member.sites("Accelerator")]
    names = ("gradient_accumulation_steps", "gradient_accumulation_plugin")
    told = (keyword(site.call, name) for site in sites for name in names)
    return any(value is not None and constant(value) != 1 for value in told) or any(has_star(s.call) for s in sites)


def first(run: Run, zero: Event, block: WithBlock) -> bool:
    """Check whether a `with` clears gradients before backward, not after the step."""
    kinds = [e.kind for e in run.of("zero", "backward", "step") if block in e.path]
    return "backward" in kinds and kinds[0] == "zero" and kinds[-1] != "zero" and kinds.count("zero") == 1


RULE = Rule("LS042", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
