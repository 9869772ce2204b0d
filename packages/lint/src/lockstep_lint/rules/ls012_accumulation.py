"""LS012: accumulation with the loss undivided, a step after the first micro-batch, or leftovers dropped."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards, loops
from lockstep_lint.analysis.gradients import modulo, steps_by
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, element_of, has_star, idents, keyword, last, targets, walk
from lockstep_lint.analysis.rank_names import COUNT
from lockstep_lint.analysis.view import View
from lockstep_lint.events.steps import Accumulation, accumulations
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# Settings by which an Accelerator may know of the accumulation.
TOLD = re.compile(r"accumulation|plugin")
# What accumulates by itself, or by the Accelerator.
HELPS = re.compile(r"\.accumulate\(|sync_gradients|no_sync|deepspeed|megatron", re.IGNORECASE)
ALWAYS = "divides each loss by the number of micro-batches, and every one is stepped on: use accelerator.accumulate()"
DIVIDED = "Accelerate's backward divides the loss by the micro-batches already: leave the second division out"
SCALES = ("div", "div_", "mul", "mul_", "true_divide")


def check(view: View) -> Iterator[Found]:
    """Looks at every accumulating loop for the three mistakes."""
    yield from never_accumulated(view)
    yield from divided_again(view)
    for found in accumulations(view):
        if undivided(view, found):
            yield at(
                found.training.backward,
                "accumulates whole losses: divide the loss by the number of micro-batches",
            )
        if found.guard is None:
            continue
        if starts_at_zero(found) or first_of_hand(view, found):
            yield Found(found.guard.test, "is true for the first micro-batch alone: test (i + 1) % n == 0")
        elif drops_leftovers(view, found):
            yield Found(
                found.guard.test,
                "the micro-batches after the last full group are never stepped on: step also in the loop's last turn",
            )


def never_accumulated(view: View) -> Iterator[Found]:
    """The Accelerators that divide each loss by a number of micro-batches, where every one of them is stepped on."""
    for site in view.sites("Accelerator"):
        told = keyword(site.call, "gradient_accumulation_steps")
        names = {bind.key for bind in site.scope.bound(site.stmt)}
        backs = [s for s in site.scope.named("backward") if dotted(s.receiver) in names]
        if told is None or constant(told) == 1 or not backs or accumulations(view):
            continue
        if not any(HELPS.search(member.text) for member in view.project.family(view.module)) and steps_always(backs):
            yield at(site, ALWAYS)


def divided_again(view: View) -> Iterator[Found]:
    """Yield the losses that are divided by the number that an Accelerator is told, and divides by in its backward."""
    if "accelerator" not in view.module.text:
        return
    makers = [site for member in view.project.family(view.module) for site in member.sites("Accelerator")]
    told = [keyword(site.call, "gradient_accumulation_steps") for site in makers]
    if not makers or any(number is None or constant(number) == 1 for number in told):
        return
    for site in view.sites("backward"):
        loss = next(iter(site.call.args), None)
        if not last(site.receiver).endswith("accelerator") or view.calls.target(site.call, site.scope) is not None:
            continue
        if any(
            same_number(divisor, number) for divisor in divisors(loss, site) for number in told if number is not None
        ):
            yield at(site, DIVIDED)


def divisors(loss: ast.expr | None, site: Site) -> Iterator[ast.expr]:
    """Yield what a loss is divided by on its way to a backward of the same loop."""
    around = loops(site.stmt, site.module)[:1]
    binds = [b for b in site.scope.binds.get(dotted(loss) or "", []) if b.stmt.lineno < site.line]
    here = [b for b in binds if loops(b.stmt, site.module)[:1] == around]
    for value in (loss, *(bind.value for bind in here if bind.how == "assign")):
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            yield value.right
    yield from (b.stmt.value for b in here if isinstance(b.stmt, ast.AugAssign) and isinstance(b.stmt.op, ast.Div))


def same_number(divisor: ast.expr, told: ast.expr) -> bool:
    """Check whether a loss is divided by the number of micro-batches that an Accelerator is told, or has."""
    if isinstance(constant(told), int):
        return constant(divisor) == constant(told) or last(divisor) == "gradient_accumulation_steps"
    return dotted(divisor) is not None and last(divisor) in (last(told), "gradient_accumulation_steps")


def steps_always(backs: list[Site]) -> bool:
    """Whether steps follow the backwards of a function, each under no test of its own."""
    steps = [s for s in backs[0].scope.named("step") if s.line > backs[0].line]
    tests = {guard.test for back in backs for guard in guards(back.stmt, back.module)}
    return bool(steps) and all(guard.test in tests for s in steps for guard in guards(s.stmt, s.module))


def undivided(view: View, found: Accumulation) -> bool:
    """Whether nothing between the model and backward divides or scales the loss."""
    site = found.training.backward
    if divides_itself(view, site):
        return False
    loss = view.steps.loss_of(site)
    if site.call.args and loss is not site.call.args[0]:
        return False  # a gradient is given, which may be scaled
    if any(
        s.name in SCALES and "grad" in idents(s.call.func) for s in view.trainings.body(found.training.loop, site.scope)
    ):
        return False  # the gradients themselves are divided
    seen: set[tuple[Scope, str]] = set()
    queue: list[tuple[ast.expr, Scope]] = [(loss, site.scope)] if loss is not None else []
    while queue:
        value, scope = queue.pop()
        factor = of_ranks(value)
        if factor is not None:
            queue.append((factor, scope))
            continue
        if scales(value) or sums(view, value, scope) or hidden(view, value, scope):
            return False
        queue += parts(view, value, scope)
        key = dotted(value)
        if key is None or (scope, key) in seen:
            continue
        seen.add((scope, key))
        before = given(view, key, scope)
        if before is None:
            return False
        queue += before
    return loss is not None


def divides_itself(view: View, site: Site) -> bool:
    """Whether Accelerate's backward divides the loss: by the number of steps that its Accelerator is told, which is 1
    where nothing is told.
    """
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
    """The terms of a sum, and what a method reduces (`loss.mean()`)."""
    if isinstance(value, ast.BinOp):
        yield from ((value.left, scope), (value.right, scope))
    elif (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and last(value.func.value) != "self"
        and view.calls.target(value, scope) is None  # an object of the project is no part of the loss
    ):
        yield value.func.value, scope


def given(view: View, key: str, scope: Scope) -> list[tuple[ast.expr, Scope]] | None:
    """What a loss is made of, here or by all callers; None where that cannot be seen or it is divided on the way."""
    binds = scope.binds.get(key, [])
    if not binds and key in scope.params:
        callers = view.calls.callers(scope)
        values = [(value, call.scope) for call in callers if (value := passed(call, scope, key)) is not None]
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


def of_ranks(value: ast.expr) -> ast.expr | None:
    """Return the loss that a value is a multiple of by the number of ranks, which is no number of micro-batches."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
        return None
    for one, other in ((value.left, value.right), (value.right, value.left)):
        if COUNT.search(last(other)):
            return one
    return None


def scales(node: ast.AST) -> bool:
    """Whether an expression divides or multiplies."""
    if isinstance(node, ast.Call) and last(node) in SCALES:
        return True
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult | ast.FloorDiv)


def sums(view: View, node: ast.AST, scope: Scope) -> bool:
    """Whether a call makes a loss that is a sum over the samples, which needs no share of its own."""
    if not isinstance(node, ast.Call):
        return False
    makers = [node, *(call for call, _, _ in view.origins.calls_of(node.func, scope))]
    return any(constant(keyword(maker, "reduction")) == "sum" for maker in makers)


def hidden(view: View, node: ast.AST, scope: Scope) -> bool:
    """Whether a call of the project divides inside, where the loss may come out already divided."""
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
    """Whether the test is `i % n == 0` with `i` counted from 0 by the loop."""
    loop, guard = found.training.loop, found.guard
    if guard is None or not guard.when or not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return False
    scope = found.step.scope
    node, test = modulo(guard.test, scope) or (None, guard.test)
    if node is None or not isinstance(node.left, ast.Name) or not equals_zero(test, node):
        return False
    if last(loop.iter) == "enumerate":
        start = keyword(loop.iter, "start") or (loop.iter.args[1] if len(loop.iter.args) > 1 else None)
        counter = next((name for name, path in targets(loop.target) if path == (0,)), None)
        zero = start is None or constant(start) == 0
    elif last(loop.iter) == "range":
        counter = dotted(loop.target)
        zero = len(loop.iter.args) == 1
    else:
        inner = loop.iter.args[0] if loop.iter.args else None  # tqdm(enumerate(loader))
        zero = (
            isinstance(inner, ast.Call) and last(inner) == "enumerate" and len(inner.args) == 1 and not inner.keywords
        )
        counter = next((name for name, path in targets(loop.target) if path == (0,)), None)
    if not zero or counter is None or rebound(found, node.left.id):
        return False
    return counter == node.left.id or over_epochs(found, node.left.id, counter)


def first_of_hand(view: View, found: Accumulation) -> bool:
    """Whether the test is `n % k == 0` with `n` counted from 0 by hand, after the test."""
    guard, scope = found.guard, found.step.scope
    node, test = (modulo(guard.test, scope) or (None, guard.test)) if guard is not None else (None, None)
    if guard is None or test is None or node is None or not guard.when or not isinstance(node.left, ast.Name):
        return False
    later = [bind.stmt.lineno > guard.test.lineno for bind in scope.binds.get(node.left.id, []) if bind.how == "aug"]
    return all(later) and equals_zero(test, node) and counted_anew(view, found, node.left.id)


def over_epochs(found: Accumulation, name: str, counter: str) -> bool:
    """Whether a name counts the turns of all epochs (`step = i + epoch * len(loader)`)."""
    binds = found.step.scope.binds.get(name, [])
    value = binds[0].value if len(binds) == 1 else None
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return False
    sides = (value.left, value.right)
    return any(
        dotted(one) == counter and isinstance(other, ast.BinOp) and isinstance(other.op, ast.Mult)
        for one, other in (sides, sides[::-1])
    )


def rebound(found: Accumulation, name: str) -> bool:
    """Whether the counter is changed in the loop."""
    return any(b.how == "aug" for b in found.step.scope.binds.get(name, []))


def equals_zero(test: ast.expr, node: ast.BinOp) -> bool:
    """Whether a test is true when `node` is 0."""
    for item in walk(test):
        if isinstance(item, ast.Compare) and item.left is node:
            return isinstance(item.ops[0], ast.Eq) and constant(item.comparators[0]) == 0
    return isinstance(test, ast.UnaryOp) and test.operand is node


def drops_leftovers(view: View, found: Accumulation) -> bool:
    """Whether the loop's last turns may never be followed by a step, in a loop that counts anew in every epoch."""
    loop, guard, scope = found.training.loop, found.guard, found.step.scope
    if guard is None or scope is not found.training.scope or not isinstance(loop, ast.For):
        return False
    node, test = modulo(guard.test, scope) or (None, guard.test)
    counters = {name for name, _ in targets(loop.target)}
    if node is None or adds_epochs(found, node):
        return False
    if not any(name in counters or counted_anew(view, found, name) for name in idents(node.left)):
        return False
    text = ast.unparse(test)
    if (
        (isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.Or))  # `full or last_turn`
        or "len(" in text
        or "last" in text
        or " or " in text
        or once(view, found)
        or cut_off(loop, guard.test, scope, counters)
    ):
        return False
    end = loop.end_lineno or loop.lineno
    return not any(s.line > end and steps_by(view, s) for s in scope.sites)


ORDERS = ast.Gt | ast.GtE | ast.Lt | ast.LtE


def cut_off(loop: ast.For, guard: ast.expr, scope: Scope, counters: set[str]) -> bool:
    """Whether the loop passes over its last turns by the number of their group, so that none is left over."""
    groups = {
        bind.key
        for stmt in loop.body
        for bind in scope.bound(stmt)
        if isinstance(bind.value, ast.BinOp) and isinstance(bind.value.op, ast.FloorDiv)
        if not counters.isdisjoint(idents(bind.value))
    }
    for stmt in loop.body:
        test = stmt.test if isinstance(stmt, ast.If) else None
        test = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
        if isinstance(stmt, ast.If) and isinstance(test, ast.Compare) and isinstance(test.ops[0], ORDERS):
            around = isinstance(stmt.body[-1], ast.Continue | ast.Break) or any(node is guard for node in walk(stmt))
            if around and guard is not stmt.test and not groups.isdisjoint(idents(test.left)):
                return True
    return False


def counted_anew(view: View, found: Accumulation, name: str) -> bool:
    """Whether a name counts the loop's turns by hand, from 0 in every epoch (`n = 0; for x in loader: n += 1`)."""
    loop, module = found.training.loop, found.training.module
    start, nest = [], loops(loop, module)
    for bind in found.step.scope.binds.get(name, []):
        if bind.how == "aug":
            plain = isinstance(bind.stmt, ast.AugAssign) and isinstance(bind.stmt.op, ast.Add)
            if not plain or constant(bind.value) != 1 or loops(bind.stmt, module)[:1] != [loop]:
                return False
        elif [constant(value) for value in element_of(bind.value, bind.path)] != [0]:
            return False
        else:
            start.append(loops(bind.stmt, module) == nest and bind.stmt.lineno < loop.lineno)
    anew = bool(nest) or any(True for _ in view.trainings.epochs(found.training))
    return bool(start) and all(start) and anew and len(start) < len(found.step.scope.binds[name])


def adds_epochs(found: Accumulation, node: ast.BinOp) -> bool:
    """Whether what is counted by takes in the earlier epochs (`step += epoch * len(loader)`), as groups do then."""
    binds = [b for name in idents(node.left) for b in found.step.scope.binds.get(name, []) if b.how == "aug"]
    parts = [node.left, *(bind.value for bind in binds if bind.value is not None)]
    return any(isinstance(item, ast.BinOp) and isinstance(item.op, ast.Mult) for part in parts for item in walk(part))


def once(view: View, found: Accumulation) -> bool:
    """Whether a loop runs once and ends by a count of its own: no loop over epochs is around it or around its calls."""
    training = found.training
    ends = any(isinstance(stmt, ast.Break) for stmt in walk(training.loop))
    return ends and not any(True for _ in view.trainings.epochs(training))


RULE = Rule(
    code="LS012",
    name="accumulation",
    what=(
        "Gradients are accumulated, but the loss is not divided by the number of micro-batches, the step comes "
        "after the first one (`i % n == 0`), or the last incomplete group is dropped; or an Accelerator with "
        "`gradient_accumulation_steps` is stepped on every micro-batch, without `accumulate()`, or is given a loss "
        "that was divided before."
    ),
    why=(
        "An undivided loss makes the gradient n times too large. `i % n == 0` steps on one micro-batch first and is "
        "off by one ever after. Leftovers are lost, or leak into the next epoch's first step."
    ),
    bad="""
import torch

def train(model, loader, optimizer, criterion, n):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward()
        if (i + 1) % n == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    good="""
import torch

def train(model, loader, optimizer, criterion, n):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / n
        loss.backward()
        if (i + 1) % n == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Divide the loss by n and step when (i + 1) % n == 0 or in the last turn",
    moot=frozenset({"lightning", "pytorch_lightning", "deepspeed", "composer", "lockstep", "trl"}),
    note=(
        "Left over are micro-batches of a loop that counts anew in each epoch, by itself or by hand, also where their "
        "gradients go into the next epoch's first group: that group is larger than the others. A counter that runs on "
        "over epochs is no finding."
    ),
)
