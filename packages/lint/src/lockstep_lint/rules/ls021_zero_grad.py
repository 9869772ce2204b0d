"""LS021: zero_grad missing or at the wrong place."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards, in_turn, loops
from lockstep_lint.analysis.gradients import accumulations
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import dotted
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

CLEARS = ("zero_grad", "grad = None", "grad.zero_", "grad.detach_", "zero_grad_buffer", "clear_grad", "grad=None")


def check(view: View) -> Iterator[Found]:
    """Looks at every training loop for what clears the gradients, and when."""
    accumulating = {found.training.loop: found for found in accumulations(view)}
    for training in view.training:
        step = own_step(view, training)
        if step is None:
            continue
        if not clears(view, training):
            yield at(
                step,
                "the gradients are never cleared, so every step adds to all earlier ones: call optimizer.zero_grad()",
            )
            continue
        if clears_before(view, training, step):
            yield at(
                step,
                "the gradients are cleared before the loop only, so every step adds to all earlier ones: call "
                "optimizer.zero_grad() after each step",
            )
            continue
        wrong = between(view, training, step)
        if wrong is not None:
            yield at(wrong, "clears the gradients between backward and step: the step then does nothing")
        found = accumulating.get(training.loop)
        if found is not None:
            micro = found.training.micro if found.guard is None else None
            early = in_every_turn(view, training, micro or training.loop)
            if early is not None:
                yield at(
                    early,
                    "clears the gradients in every micro-batch, so nothing accumulates: clear them after the step",
                )


def own_step(view: View, training: Training) -> Site | None:
    """The optimizer's step in the training loop or in the function that computes the gradients."""
    sites = [*view.trainings.body(training.loop, training.scope), *training.backward.scope.sites]
    for site in sites:
        if site.call.args and not view.kinds.is_scaler(site.receiver, site.scope) and not view.steps.helps(site):
            continue  # a closure, or the optimizer of a parameter server
        if view.steps.steps_optimizer(site) and view.calls.target(site.call, site.scope) is None:
            return site
    return None


def clears(view: View, training: Training) -> bool:
    """Whether anything in the program clears gradients, in whatever way."""
    return view.effects.mentioned(view.module, *CLEARS)


def clears_before(view: View, training: Training, step: Site) -> bool:
    """Whether the gradients are cleared only outside the loop that computes them and steps in each, or each n-th, of
    its turns.
    """
    scope, module = step.scope, view.module
    nest, test = loops(step.stmt, scope.module), guards(step.stmt, scope.module, training.loop)
    if training.backward.scope is not scope or nest[:1] != [training.loop]:
        return False
    if any(in_turn(guard.test) is not guard.when for guard in test):
        return False
    if loops(training.backward.stmt, scope.module) != nest:
        return False
    cleared, known = scope.named("zero_grad"), (view.steps.stepped(step), dotted(step.receiver))
    before = [s for s in cleared if s.line < training.loop.lineno and dotted(s.receiver) in known]
    inside = view.trainings.body(training.loop, training.scope)
    if any(view.effects.does(site, {"zero_grad"}) for site in inside):
        return False
    return bool(before) and sum(module.text.count(word) for word in CLEARS) == len(cleared) == len(before)


def between(view: View, training: Training, step: Site) -> Site | None:
    """A zero_grad that directly precedes the step of the same optimizer, after backward."""
    scope = step.scope
    nest = loops(step.stmt, scope.module)
    line = [s for s in scope.sites if loops(s.stmt, scope.module) == nest and s.line <= step.line]
    order = sorted(
        (s for s in line if s.name in ("zero_grad", "backward", "manual_backward") or s is step), key=lambda s: s.line
    )
    if len(order) < 3 or order[-1] is not step:
        return None
    zero, back = order[-2], order[-3]
    same = dotted(zero.receiver) in (view.steps.stepped(step), dotted(step.receiver))
    together = scope.module.up.get(zero.stmt) == scope.module.up.get(step.stmt) == scope.module.up.get(back.stmt)
    return zero if zero.name == "zero_grad" and back.name != "zero_grad" and same and together else None


def in_every_turn(view: View, training: Training, loop: ast.stmt) -> Site | None:
    """A zero_grad that stands in the body of the loop over micro-batches itself, outside every test."""
    body = getattr(loop, "body", [])
    for site in view.trainings.body(training.loop, training.scope):
        if site.name == "zero_grad" and isinstance(site.stmt, ast.Expr) and site.stmt in body:
            return site
    return None


RULE = Rule(
    code="LS021",
    name="zero_grad",
    what=(
        "The gradients are never cleared, cleared before the loop only, cleared between backward and step, or cleared "
        "in every micro-batch of an accumulation."
    ),
    why=(
        "Uncleared gradients add up over all steps and training diverges; cleared at the wrong moment, the step "
        "or the accumulation does nothing."
    ),
    bad="""
import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    good="""
import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        for p in model.parameters():
            p.grad = None
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Call optimizer.zero_grad() once a step, before backward or after step",
    moot=frozenset({"lightning", "pytorch_lightning", "deepspeed", "composer", "lockstep", "trl", "fastai"}),
    note="Gradients that are never cleared are told at the optimizer's step, those cleared too early at `zero_grad`.",
)
