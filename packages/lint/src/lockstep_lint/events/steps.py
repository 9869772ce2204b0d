"""Find the loops that take optimizer steps, and those that accumulate gradients for one."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import find_passed
from lockstep_lint.analysis.context import Guard, Loop, in_turn
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, idents, last, walk
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, parting, seen_from, turn
from lockstep_lint.events.run import Run, runs

__all__ = [
    "Accumulation",
    "StepLoop",
    "accumulating",
    "accumulations",
    "in_few_turns",
    "modulo",
    "step_loops",
    "turn_of",
    "turns",
]


@dataclass(eq=False, slots=True)
class StepLoop:
    """A loop that computes gradients, with the optimizer steps of one iteration.

    `inner` is the loop within it that computes the gradients, where the step comes after that one.
    """

    loop: LoopBlock
    backwards: list[Event]
    steps: list[Event]
    inner: LoopBlock | None = None


@cache_answers
def step_loops(run: Run) -> list[StepLoop]:
    """Return the innermost loops around a backward that take steps."""
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


def turns(run: Run) -> Iterator[tuple[LoopBlock | None, list[Event], list[Event]]]:
    """Yield each stepping loop of a run, its steps, and the events of one iteration.

    A function that makes one step, whose loop is out of sight, is a turn without a loop.
    """
    loops = step_loops(run)
    for found in loops:
        yield found.loop, found.steps, run.events[found.loop.start : found.loop.end]
    lone = [event for event in run.of("backward", "step") if not event.loops]
    if not loops and run.entry.owner is not None and {event.kind for event in lone} == {"backward", "step"}:
        yield None, [event for event in lone if event.kind == "step"], run.events


def turn_of(run: Run, event: Event, *kinds: str) -> Iterator[Event]:
    """Yield the events of an event's iteration of the innermost stepping loop, else the run's."""
    loops = event.loops[::-1]
    steps = next((loop for loop in loops if any(turn(run.events, loop, "step"))), loops[-1] if loops else None)
    return turn(run.events, steps, *kinds) if steps is not None else iter(run.of(*kinds))


# The test that keeps a step to some turns: of an `if`, or one that a call is given.
Arm = ArmBlock | Guard | None


@dataclass(eq=False, slots=True)
class Accumulation:
    """A training loop that accumulates gradients. `guard` tests for a step; it is None after an inner loop.

    `loop` is the one that computes gradients in each of its turns.
    """

    training: Training
    step: Site
    guard: Guard | None
    loop: LoopBlock


@cache_answers
def accumulations(view: View) -> tuple[Accumulation, ...]:
    """Return the accumulating loops of a file's programs whose backward is in it."""
    found = (each for run in runs(view) for each in accumulating(view, run))
    return tuple(
        {each.training.backward.call: each for each in found if each.training.backward.module is view.module}.values()
    )


def accumulating(view: View, run: Run) -> Iterator[Accumulation]:
    """Yield the loops of a run that accumulate gradients."""
    for found in step_loops(run):
        inner = found.inner
        if inner is not None:
            after = [step for step in found.steps if step.place >= inner.end]
            if after and isinstance(inner.node, ast.For) and is_micro_loop(view, inner.node, inner.scope):
                yield from accumulation(found, found.backwards[0], after[0], None)
            continue
        for backward in found.backwards:
            tests = list(find_steps(view, found, backward))
            if tests and all(test is not None for _, test in tests):
                shared = (pair for pair in tests if not has_own(pair[1], backward, found.backwards))
                yield from accumulation(found, backward, *next(shared, tests[0]))
                break


def accumulation(found: StepLoop, backward: Event, step: Event, test: Arm) -> Iterator[Accumulation]:
    """Yield an accumulation, with the first of its backwards."""
    outer, inner = found.loop, found.inner
    micro = inner.node if inner is not None and isinstance(inner.node, Loop) else None
    first = next((back for back in found.backwards if test is not None and test in back.path), backward)
    back, site = min((first, backward), key=lambda event: event.place).mark.site, seen_from(step, backward)
    if back is not None and site is not None:
        guard = Guard(test.node, test.when, step.mark.stmt) if isinstance(test, ArmBlock) else test
        yield Accumulation(Training(cast(Loop, outer.node), outer.scope, back, micro), site, guard, inner or outer)


def has_own(test: Arm, backward: Event, backwards: list[Event]) -> bool:
    """Check whether the guarded block computes gradients of its own for the step."""
    return test not in backward.path and any(test in other.path for other in backwards)


def find_steps(view: View, found: StepLoop, backward: Event) -> Iterator[tuple[Event, Arm]]:
    """Yield the steps that use a backward's gradients, each with its accumulation test."""
    for step in found.steps:
        arm = parting(step, backward)
        if step.node is backward.node and step.mark.site is not None:
            yield step, told_when(view, step.mark.site)
        elif arm is None:
            rare = (block for block in step.within(found.loop) if block not in backward.path)
            yield step, next((b for b in rare if isinstance(b, ArmBlock) and in_few_turns(view, b, step)), None)
        elif in_few_turns(view, arm, step):
            yield step, arm


def in_few_turns(view: View, block: ArmBlock, event: Event) -> bool:
    """Check whether a test comes out so in every n-th turn."""
    guard = Guard(block.node, block.when, event.mark.stmt)
    return in_turn(block.node) is not (not block.when) and periodic(view, guard, block.scope)


# What the parts of a batch are called.
PARTS = ("micro", "accum", "chunk")
# What cuts a batch.
CUTS = ("split", "chunk", "tensor_split")


def is_micro_loop(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether an inner loop with a backward runs over parts of a batch."""
    if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range":
        if len(loop.iter.args) == 1 and is_one(view, loop.iter.args[0], scope):
            return False
        text = ast.unparse(loop).lower()
        return any(word in text for word in ("accum", "micro", "grad_acc"))
    if any(isinstance(node, ast.Call) and last(node) in CUTS for node in walk(loop.iter)):
        return True
    return any(word in name.lower() for name in idents(loop.iter) for word in PARTS)


def told_when(view: View, site: Site) -> Guard | None:
    """Return the test that a scaler's helper gets (`update_grad=(i + 1) % n == 0`)."""
    tests = (part.value for part in site.call.keywords if rarely(view, part.value, site.scope))
    return next((Guard(test, True, site.stmt) for test in tests), None)


def rarely(view: View, test: ast.expr, scope: Scope) -> bool:
    """Check whether a test takes the remainder by a number other than 1."""
    found = modulo(test, scope)
    return found is not None and not is_one(view, found[0].right, scope)


def is_one(view: View, count: ast.expr, scope: Scope) -> bool:
    """Check whether a number of micro-batches certainly is 1. An option may change."""
    option = isinstance(count, ast.Attribute) and last(count.value) != "self"
    return not option and all(constant(origin.node) == 1 for origin in view.origins.of(count, scope))


def periodic(view: View, guard: Guard, scope: Scope) -> bool:
    """Check whether a test, or the value of its name, holds in every n-th turn."""
    if modulo(guard.test, scope) is not None:
        return rarely(view, guard.test, scope)
    if is_handed(view, guard.test, scope):
        return True
    return any("accum" in name and "loss" not in name for name in idents(guard.test))


def is_handed(view: View, test: ast.expr, scope: Scope) -> bool:
    """Check whether callers pass a parameter that is true every n-th iteration."""
    if not isinstance(test, ast.Name) or test.id not in scope.params or test.id in scope.binds:
        return False
    given = [(find_passed(site, scope, test.id), site.scope) for site in view.calls.callers(scope)]
    return any(value is not None and rarely(view, value, home) for value, home in given)


def modulo(test: ast.expr, scope: Scope) -> tuple[ast.BinOp, ast.expr] | None:
    """Return the `a % b` in a test or its names, with its expression."""
    found = _remainder(test)
    if found is not None:
        return found, test
    for node in without_order(test):
        for bind in scope.binds.get(dotted(node) or "", []):
            if bind.value is not None and bind.stmt.lineno < test.lineno and bind.how == "assign":
                found = _remainder(bind.value)
                if found is not None:
                    return found, bind.value
    return None


def without_order(test: ast.expr) -> Iterator[ast.AST]:
    """Yield the parts of a test except comparisons by size (`step < resume_step`)."""
    operands = test.values if isinstance(test, ast.BoolOp) else [test]
    for operand in operands:
        if not (isinstance(operand, ast.Compare) and isinstance(operand.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)):
            yield from walk(operand)


def _remainder(value: ast.expr) -> ast.BinOp | None:
    for node in walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            return None if isinstance(node.left, ast.JoinedStr) else node
    return None
