"""LS036: a device sync in every step."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import turns_off_gradients
from lockstep_lint.analysis.context import Guard, Loop, above, each_update, in_most_turns, now_and_then
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import constant, dotted, idents, is_none, last, walk
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Block, CallBlock, Event, HandlerBlock, LoopBlock, WithBlock, parting
from lockstep_lint.events.run import runs
from lockstep_lint.events.steps import turns
from lockstep_lint.events.values import value_at
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

# Objects that only pass numbers on to be looked at.
TRACKERS = {"wandb", "run", "mlflow", "accelerator", "fabric", "experiment", "tracker"}


def check(view: View) -> Iterator[Found]:
    """Find device values that the host reads in every iteration of a stepping loop."""
    if not view.gpu or unit_test(view.module):
        return
    told: set[int] = set()
    for run in runs(view):
        for loop, steps, events in turns(run):
            backs = [event for event in events if event.kind == "backward"]
            for event in events:
                line = event.mark.stmt.lineno
                if event.kind != "sync" or event.module is not view.module or line in told:
                    continue
                if in_each(view, loop, steps, backs, event):
                    what = waits(view, event)
                    if what:
                        told.add(line)
                        text = f"{what} waits for the device in every step: keep tensors, and read them every n-th step"
                        yield Found(event.node, text)


def waits(view: View, event: Event) -> str:
    """Return what an event reads of the device, "" where that is nothing."""
    site = event.mark.site
    if site is None:
        part = event.mark.subject
        asked = [part, *part.args] if isinstance(part, ast.Call) else [part]  # `np.isnan(loss)`
        return "a test of a tensor" if any(value_at(view, event, each).device for each in asked) else ""
    if event.mark.subject is not None:
        inner = any(isinstance(n, ast.Call) and last(n) in ("item", "tolist", "cpu") for n in walk(event.mark.subject))
        return f".{site.name}()" if not inner and value_at(view, event).device else ""
    if site.name in ("log", "log_metrics") and last(site.receiver) not in TRACKERS:
        return ""
    for value in (*site.call.args, *(item.value for item in site.call.keywords)):
        for part in find_shown(value):
            if value_at(view, event, part).device:
                return f"{site.name}({ast.unparse(part)[:30]})"
    return ""


def find_shown(value: ast.expr) -> Iterator[ast.expr]:
    """Yield the values that become a text or a number with an argument."""
    if isinstance(value, ast.JoinedStr):
        yield from (part.value for part in value.values if isinstance(part, ast.FormattedValue))
    elif isinstance(value, ast.Call) and last(value) == "format":
        yield from value.args
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod):
        yield from value.right.elts if isinstance(value.right, ast.Tuple) else [value.right]
    elif isinstance(value, ast.Dict):
        yield from value.values
    else:
        yield value


def in_each(view: View, loop: LoopBlock | None, steps: list[Event], backs: list[Event], event: Event) -> bool:
    """Check whether an event happens in every training step of a loop."""
    inner = event.within(loop)
    shielded = any(isinstance(block, WithBlock) and turns_off_gradients(block.node) for block in inner)
    if shielded and any(isinstance(block, LoopBlock) for block in inner):
        return False
    arms = [parting(event, step) for step in steps]
    if None not in arms and not any(arm in back.path for arm in arms for back in backs):
        return False  # where a test turns the training off
    usual = [step for step in steps if all(is_regular(view, loop, block, step) for block in step.within(loop))]
    beside = {block for step in usual or steps for block in step.path}  # as often as the optimizer steps
    return all(block in beside or is_regular(view, loop, block, event) for block in inner)


def is_regular(view: View, loop: LoopBlock | None, block: Block, event: Event) -> bool:
    """Check whether a block is entered in every step."""
    if isinstance(block, ArmBlock):
        guard = Guard(block.node, block.when, event.mark.stmt)
        if each_update(guard):
            return True
        if now_and_then(block.node, block.when) or seldom(view, loop, block):
            return False
        within = loop.node if loop is not None and isinstance(loop.node, Loop) else None
        return block.leaves or in_most_turns(guard) or view.trainings.steady(block.node, block.scope, within)
    if isinstance(block, CallBlock):
        return not EVALUATION.search(block.function.name)
    if isinstance(block, LoopBlock):
        return "parameters" not in idents(getattr(block.node, "iter", block.node))
    return not isinstance(block, HandlerBlock)


def seldom(view: View, loop: LoopBlock | None, block: ArmBlock) -> bool:
    """Check whether a test holds in an evaluation, or in one step only."""
    test = block.node
    if last(test) in ("training", "is_train", "is_training"):
        return not block.when
    known = [constant(origin.node) for origin in view.origins.of(test, block.scope)]
    if isinstance(test, ast.Name) and known and all(isinstance(value, bool) for value in known):
        given = test.id in block.scope.params and any(
            above(b.stmt, block.scope.module) for b in block.scope.binds.get(test.id, [])
        )
        return block.when not in known and not given
    if not block.when or not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Is | ast.Eq):
        return False
    if not is_none(test.comparators[0]):
        return False
    binds = [bind for bind in block.scope.binds.get(dotted(test.left) or "", []) if bind.how == "assign"]
    inner = [bind for bind in binds if loop is not None and bind.stmt.lineno >= getattr(loop.node, "lineno", 0)]
    return bool(inner) and not any(bind.value is not None and is_none(bind.value) for bind in inner)


RULE = Rule("LS036", Severity.HINT, Confidence.MEDIUM, check, fix="unsafe", moot=TRAINERS)
