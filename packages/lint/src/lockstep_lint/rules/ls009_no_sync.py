"""LS009: accumulation under DDP without no_sync."""

from collections.abc import Iterator

from lockstep_lint.analysis.nodes import idents
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import apart
from lockstep_lint.events.run import runs
from lockstep_lint.events.steps import accumulations, turn_of
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

SKIPS = (
    "no_sync",
    "require_backward_grad_sync",
    "set_requires_gradient_sync",
    "set_is_last_backward",
    "accelerator.accumulate(",
)


LATE = "no_sync around backward alone changes nothing, as DDP decides in forward: put the forward under it too"


def check(view: View) -> Iterator[Found]:
    """Look for accumulation loops under DDP without no_sync, or with a late one."""
    yield from late(view)
    if view.effects.mentioned(view.module, *SKIPS):
        return
    if "ddp" not in view.wrappers.kinds(view.module):
        return
    for found in accumulations(view):
        if view.ranks.programs.apart(found.training.scope):
            continue  # trains without the group
        yield at(
            found.training.backward,
            "exchanges gradients in every micro-batch: run all but the last backward under model.no_sync()",
        )


def late(view: View) -> Iterator[Found]:
    """Yield the contexts of no_sync around backward that leave the forward outside."""
    for run in runs(view):
        for back in run.of("backward"):
            block = next((b for b in back.withs if any(name == "no_sync" for name in idents(b.node))), None)
            if block is None or back.module is not view.module:
                continue
            around = [e for e in turn_of(run, back, "forward") if not apart(e, back)]
            inside = [e for e in run.of("forward", "backward") if block in e.path]
            if inside == [back] and any(e.scope is back.scope and e.place < back.place for e in around):
                yield Found(block.node, LATE)


MOOT = TRAINERS | {"accelerate", "deepspeed", "lightning_fabric"}
RULE = Rule("LS009", Severity.HINT, Confidence.HIGH, check, fix="unsafe", moot=MOOT)
