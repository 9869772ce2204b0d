"""LS021: zero_grad missing or at the wrong place."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import in_turn
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, CallBlock, Event, LoopBlock, turn
from lockstep_lint.events.query import same
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import StepLoop, accumulating, step_loops
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

CLEARS = ("zero_grad", "grad = None", "grad.zero_", "grad.detach_", "zero_grad_buffer", "clear_grad", "grad=None")

ADDS = "so every step adds to all earlier ones"


def check(view: View) -> Iterator[Found]:
    """Look at every training loop for what clears the gradients, and when."""
    for run in runs(view):
        found = [*find_kept(view, run), *find_wiped(view, run), *wiped_early(view, run)]
        yield from (Found(event.node, message) for event, message in found if event.module is view.module)


def find_kept(view: View, run: Run) -> Iterator[tuple[Event, str]]:
    """Yield steps in loops that never clear the gradients, or cleared them before."""
    for found in step_loops(run):
        step = next(filter(plain, found.steps), None)
        if step is not None and not view.effects.mentioned(view.module, *CLEARS):
            yield (
                step,
                "the gradients are never cleared, so every step adds to all earlier ones: call optimizer.zero_grad()",
            )
        elif step is not None and cleared_before(view, run, found, step):
            yield (step, f"the gradients are cleared before the loop only, {ADDS}: call zero_grad() after each step")


def plain(step: Event) -> bool:
    """Check whether an optimizer steps without a closure or a parameter server."""
    call = step.node
    return isinstance(call, ast.Call) and (step.detail != "" or not call.args or step.mark.subject in call.args)


def cleared_before(view: View, run: Run, found: StepLoop, step: Event) -> bool:
    """Check whether gradients are cleared only before the loop whose turns step."""
    zeros = run.of("zero")
    tests = [block for block in step.within(found.loop) if isinstance(block, ArmBlock)]
    if found.inner is not None or any(in_turn(block.node) is not block.when for block in tests):
        return False
    if not zeros or zeros[-1].place >= found.loop.start or not all(same(view, zero, step) for zero in zeros):
        return False
    marks = {zero.mark for zero in zeros if zero.module is step.module}
    return sum(step.module.text.count(word) for word in CLEARS) == len(marks)


def find_wiped(view: View, run: Run) -> Iterator[tuple[Event, str]]:
    """Yield the calls that clear the gradients of an optimizer between backward and its step."""
    order = run.of("backward", "zero", "step")
    for back, zero, step in zip(order, order[1:], order[2:], strict=False):
        found = (back.kind, zero.kind, step.kind) == ("backward", "zero", "step") and same(view, zero, step)
        if found and together(back, zero) and together(zero, step):
            yield zero, "clears the gradients between backward and step: the step then does nothing"


def together(one: Event, other: Event) -> bool:
    """Check whether two events always happen together: only calls are around one alone."""
    apart = [block for block in (*one.path, *other.path) if not (block in one.path and block in other.path)]
    return all(isinstance(block, CallBlock) for block in apart)


def wiped_early(view: View, run: Run) -> Iterator[tuple[Event, str]]:
    """Yield calls that clear the gradients in every iteration of an accumulating loop."""
    for found in accumulating(view, run):
        for zero in turn(run.events, found.loop, "zero"):
            if not any(isinstance(block, ArmBlock | LoopBlock) for block in zero.within(found.loop)):
                yield (
                    zero,
                    "clears the gradients in every micro-batch, so nothing accumulates: clear them after the step",
                )
                break


RULE = Rule("LS021", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS | {"deepspeed", "fastai"})
