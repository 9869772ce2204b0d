"""LS012: accumulation with the loss undivided, or a step after the first micro-batch."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import find_passed
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, has_star, idents, keyword, last, targets, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.steps import Accumulation, accumulations, modulo
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

# Settings by which an Accelerator may know of the accumulation.
TOLD = re.compile(r"accumulation|plugin")
LEFT = "the micro-batches after the last full group are never stepped on: step also in the loop's last turn"
SCALES = ("div", "div_", "mul", "mul_", "true_divide")


def check(view: View) -> Iterator[Found]:
    """Find accumulating loops with an undivided loss, or a single micro-batch in the first group."""
    for found in accumulations(view):
        if is_undivided(view, found):
            yield at(
                found.training.backward, "accumulates whole losses: divide the loss by the number of micro-batches"
            )
        if found.guard is not None and starts_at_zero(found):
            yield Found(found.guard.test, "is true for the first micro-batch alone: test (i + 1) % n == 0")
        elif found.guard is not None and drops_leftovers(view, found):
            yield Found(found.guard.test, LEFT)


def is_undivided(view: View, found: Accumulation) -> bool:
    """Check whether nothing between the model and backward divides or scales the loss."""
    site = found.training.backward
    if divides_itself(view, site):
        return False
    loss = view.steps.loss_of(site)
    if site.call.args and loss is not site.call.args[0]:
        return False  # a gradient is given, which may be scaled
    seen: set[tuple[Scope, str]] = set()
    queue: list[tuple[ast.expr, Scope]] = [(loss, site.scope)] if loss is not None else []
    while queue:
        value, scope = queue.pop()
        if scales(value) or sums(view, value, scope) or hidden(view, value, scope):
            return False
        queue += parts(view, value, scope)
        key = dotted(value)
        if key is None or (scope, key) in seen:
            continue
        if any(dotted(s.receiver) == key and s.name in SCALES for s in scope.sites):
            return False  # `loss.mul_(share)`
        seen.add((scope, key))
        before = find_terms(view, key, scope)
        if before is None:
            return False
        queue += before
    return loss is not None


def divides_itself(view: View, site: Site) -> bool:
    """Check whether Accelerate's backward divides the loss by a number of steps other than 1."""
    if "Accelerator" not in view.module.text and last(site.receiver) != "accelerator":
        return False
    made = [s for member in view.project.family(view.module) for s in member.sites("Accelerator")]
    told = any(has_star(s.call) or any(TOLD.search(k.arg or "") for k in s.call.keywords) for s in made)
    return (
        told
        or not made
        or view.effects.mentioned(view.module, "accelerator.gradient_accumulation_steps", "accelerator.accumulate")
    )


def parts(view: View, value: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield the terms of a sum, and what a method reduces (`loss.mean()`)."""
    if isinstance(value, ast.BinOp):
        yield from ((value.left, scope), (value.right, scope))
    elif (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and last(value.func.value) != "self"
        and view.calls.target(value, scope) is None  # an object of the project is no part of the loss
    ):
        yield value.func.value, scope


def find_terms(view: View, key: str, scope: Scope) -> list[tuple[ast.expr, Scope]] | None:
    """Return what a loss consists of, locally or in all callers. None: unknown, or divided."""
    binds = scope.binds.get(key, [])
    if not binds and key in scope.params:
        callers = view.calls.callers(scope)
        values = [(value, call.scope) for call in callers if (value := find_passed(call, scope, key)) is not None]
        return values if callers and len(values) == len(callers) else None
    found: list[tuple[ast.expr, Scope]] = []
    for bind in binds:
        if isinstance(bind.stmt, ast.AugAssign) and isinstance(bind.stmt.op, ast.Div | ast.Mult):
            return None
        if bind.value is not None and bind.how in ("assign", "aug"):
            found.append((bind.value, scope))
        elif isinstance(bind.value, ast.Call) and bind.how == "with":
            found += [(value, scope) for value in bind.value.args[:1]]  # with amp.scale_loss(loss, optimizer) as scaled
    return found


def scales(node: ast.AST) -> bool:
    """Check whether an expression divides or multiplies."""
    if isinstance(node, ast.Call) and last(node) in SCALES:
        return True
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult | ast.FloorDiv)


def sums(view: View, node: ast.AST, scope: Scope) -> bool:
    """Check whether a call makes a loss that sums over samples."""
    if not isinstance(node, ast.Call):
        return False
    makers = [node, *(call for call, _, _ in view.origins.calls_of(node.func, scope))]
    return any(constant(keyword(maker, "reduction")) == "sum" for maker in makers)


def hidden(view: View, node: ast.AST, scope: Scope) -> bool:
    """Check whether a project's function may already divide the loss."""
    if not isinstance(node, ast.Call):
        return False
    if any(word in name for name in idents(node) for word in ("accum", "grad_acc")):
        return True
    held = (view.names.definition(item.node, item.scope) for item in view.origins.of(node.func, scope))
    found = [target for target in (view.calls.target(node, scope), *held) if target is not None]
    return any(
        scales(item) or (isinstance(item, ast.AugAssign) and isinstance(item.op, ast.Div))
        for target in found
        for item in walk(target.node)
    )


def starts_at_zero(found: Accumulation) -> bool:
    """Check whether the test is `i % n == 0` with a loop from 0."""
    loop, guard = found.training.loop, found.guard
    if guard is None or not guard.when or not isinstance(loop, ast.For):
        return False
    node, test = modulo(guard.test, found.step.scope) or (None, guard.test)
    calls = (part for part in walk(loop.iter) if isinstance(part, ast.Call) and last(part) in ("enumerate", "range"))
    count = next(calls, None)  # also in a progress bar
    start = None if count is None else keyword(count, "start") or next(iter(count.args[1:]), ast.Constant(0))
    if node is None or start is None or constant(start) != 0 or not equals_zero(test, node):
        return False
    names = [name for name, path in targets(loop.target) if path in ((), (0,))]
    changed = any(bind.how == "aug" for bind in found.step.scope.binds.get(dotted(node.left) or "", []))
    return dotted(node.left) in names and not changed


def drops_leftovers(view: View, found: Accumulation) -> bool:
    """Check whether a loop steps every n-th iteration, but not for the remainder."""
    loop, guard, scope = found.training.loop, found.guard, found.step.scope
    if guard is None or scope is not found.training.scope or not isinstance(loop, ast.For):
        return False
    node, test = modulo(guard.test, scope) or (None, guard.test)
    text, whole = ast.unparse(test), isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.Or)
    counters = {name for name, _ in targets(loop.target)}
    if node is None or whole or any(word in text for word in ("len(", "last", " or ")):
        return False
    ifs = [stmt for stmt in loop.body if isinstance(stmt, ast.If) and guard.test not in set(ast.walk(stmt.test))]
    inner = [node for stmt in ifs for node in ast.walk(stmt)]
    cut = any(isinstance(node, ast.Break | ast.Continue) or node is guard.test for node in inner)
    count = node.left.left if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add) else None
    end = loop.end_lineno or loop.lineno
    after = (s for s in scope.sites if s.line > end and view.effects.does(s, {"step"}))
    return dotted(count) in counters and not cut and not any(True for _ in after)


def equals_zero(test: ast.expr, node: ast.BinOp) -> bool:
    """Check whether a test is true when `node` is 0."""
    for item in walk(test):
        if isinstance(item, ast.Compare) and item.left is node:
            return isinstance(item.ops[0], ast.Eq) and constant(item.comparators[0]) == 0
    return isinstance(test, ast.UnaryOp) and test.operand is node


RULE = Rule("LS012", Severity.ERROR, Confidence.MEDIUM, check, fix="unsafe", moot=TRAINERS | {"deepspeed"})
