"""Find the steps of a run's training: the loops that take them, and those that accumulate gradients for one."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.context import Guard, in_turn
from lockstep_lint.analysis.gradients import is_micro_loop, periodic
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, parting, turn
from lockstep_lint.events.run import Run

__all__ = ["Accumulating", "StepLoop", "accumulating", "step_loops", "turn_of"]


@dataclass(eq=False, slots=True)
class StepLoop:
    """A loop that computes gradients in its turns, with the steps of optimizers in one turn of it.

    `inner` is the loop within it that computes the gradients, where the step comes after that one.
    """

    loop: LoopBlock
    backwards: list[Event]
    steps: list[Event]
    inner: LoopBlock | None = None


def step_loops(run: Run) -> list[StepLoop]:
    """The loops of a run that take steps: the innermost around a backward that steps in its turns."""
    found: dict[LoopBlock, StepLoop] = {}
    for backward in run.of("backward"):
        loops = backward.loops[::-1]
        for loop in loops[:2]:
            steps = list(turn(run.events, loop, "step"))
            if steps:
                inner = loops[0] if loop is not loops[0] else None
                found.setdefault(loop, StepLoop(loop, [], steps, inner)).backwards.append(backward)
                break
    return list(found.values())


def turn_of(run: Run, event: Event, *kinds: str) -> Iterator[Event]:
    """The events of the turn that an event is part of: of the innermost loop that takes steps, else of the run."""
    loops = event.loops[::-1]
    steps = next((loop for loop in loops if any(turn(run.events, loop, "step"))), loops[-1] if loops else None)
    return turn(run.events, steps, *kinds) if steps is not None else iter(run.of(*kinds))


@dataclass(eq=False, slots=True)
class Accumulating:
    """A loop that computes gradients in each turn, of which only some step, by a test, or after the loop."""

    loop: LoopBlock
    backward: Event
    step: Event
    test: ArmBlock | None


def accumulating(view: View, run: Run) -> Iterator[Accumulating]:
    """The loops of a run that accumulate gradients."""
    for found in step_loops(run):
        inner = found.inner
        if inner is not None:
            after = [step for step in found.steps if step.place >= inner.end]
            if after and isinstance(inner.node, ast.For) and is_micro_loop(view, inner.node, inner.scope):
                yield Accumulating(inner, found.backwards[0], after[0], None)
            continue
        for backward in found.backwards:
            tests = list(asked(view, found, backward))
            if tests and tests[0][1] is not None and all(test is not None for _, test in tests):
                yield Accumulating(found.loop, backward, *tests[0])
                break


def asked(view: View, found: StepLoop, backward: Event) -> Iterator[tuple[Event, ArmBlock | None]]:
    """The steps that the gradients of a backward are for, each with the test that keeps it to every n-th turn."""
    for step in found.steps:
        arm = parting(step, backward)
        if arm is None:
            rare = (block for block in step.within(found.loop) if block not in backward.path)
            yield step, next((b for b in rare if isinstance(b, ArmBlock) and in_few_turns(view, b, step)), None)
        elif in_few_turns(view, arm, step):
            yield step, arm


def in_few_turns(view: View, block: ArmBlock, event: Event) -> bool:
    """Whether a test comes out so in every n-th turn."""
    guard = Guard(block.node, block.when, event.mark.stmt)
    return in_turn(block.node) is not (not block.when) and periodic(view, guard, block.scope)
