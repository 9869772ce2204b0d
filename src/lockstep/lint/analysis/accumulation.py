"""Gradient accumulation: loops that call backward more often than they step the optimizer."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.lint.analysis.context import Guard, above, apart, guards
from lockstep.lint.analysis.index import Scope, Site
from lockstep.lint.analysis.nodes import dotted, idents, walk
from lockstep.lint.analysis.training import Training
from lockstep.lint.analysis.view import View

__all__ = ["Accumulation", "accumulations"]


@dataclass(frozen=True)
class Accumulation:
    """A training loop that steps every n-th turn (`guard` is that test), or after an inner loop (`guard` is None)."""

    training: Training
    step: Site
    guard: Guard | None


def accumulations(view: View) -> Iterator[Accumulation]:
    """The accumulating loops of a file."""
    engines = (t for t in view.trainings.engines(view.module) if t.module is view.module)
    for training in (*view.training, *engines):
        if training.micro is not None:
            step = next(
                (s for s in view.trainings.body(training.loop, training.scope) if view.steps.steps_optimizer(s)), None
            )
            if step is not None and is_micro(view, training):
                yield Accumulation(training, step, None)
            continue
        found = guarded_step(view, training)
        if found is not None:
            yield found


def is_micro(view: View, training: Training) -> bool:
    """Whether an inner loop with a backward runs over parts of a batch (not over samples, tasks or models)."""
    loop = training.micro
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return False
    if isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range":
        text = ast.unparse(loop).lower()
        return any(word in text for word in ("accum", "micro", "grad_acc"))
    return False


def guarded_step(view: View, training: Training) -> Accumulation | None:
    """A step that runs in every n-th turn only, while backward runs in each."""
    scope = training.backward.scope
    same = scope is training.scope
    within = training.loop if same else None
    every = [g for g in guards(training.backward.stmt, scope.module, within) if periodic(g, scope)]
    if every and not in_both_arms(training.backward, every[0], scope):
        return None
    sites = view.trainings.body(training.loop, training.scope) if same else scope.sites
    steps = [s for s in sites if view.steps.steps_optimizer(s) and s.scope is scope]
    if not every:  # the other arm of `if accumulate:` steps in each turn
        steps = [s for s in steps if not apart(s, training.backward)]
    tests = [(s, next((g for g in guards(s.stmt, scope.module, within) if periodic(g, scope)), None)) for s in steps]
    if not tests or any(guard is None for _, guard in tests):
        return None
    step, guard = tests[0]
    return Accumulation(training, step, guard)


def in_both_arms(backward: Site, guard: Guard, scope: Scope) -> bool:
    """Whether each arm of a test has a backward of its own, one of which alone comes before the step."""
    return any(
        other is not backward and other.name == backward.name and apart(other, backward) and guard.stmt in around(other)
        for other in scope.sites
    )


def around(site: Site) -> list[ast.stmt]:
    """The statements around a call."""
    return [node for node, _ in above(site.stmt, site.module)]


def periodic(guard: Guard, scope: Scope) -> bool:
    """Whether a test holds in every n-th turn; a name that was given such a test counts."""
    return modulo(guard.test, scope) is not None or any("accum" in name for name in idents(guard.test))


def modulo(test: ast.expr, scope: Scope) -> tuple[ast.BinOp, ast.expr] | None:
    """The `a % b` in a test, with the test itself or with what a name in it was given."""
    found = _remainder(test)
    if found is not None:
        return found, test
    for node in walk(test):
        for bind in scope.binds.get(dotted(node) or "", []):
            if bind.value is not None and bind.stmt.lineno < test.lineno and bind.how == "assign":
                found = _remainder(bind.value)
                if found is not None:
                    return found, bind.value
    return None


def _remainder(value: ast.expr) -> ast.BinOp | None:
    for node in walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            return None if isinstance(node.left, ast.JoinedStr) else node
    return None
