"""LS055: a resumed run whose optimizer starts afresh."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.kinds import TORCH_OPTIMIZERS
from lockstep_lint.analysis.nodes import Words, constant, idents, last, strings, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, apart
from lockstep_lint.events.query import given_as, shown_at
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

MESSAGE = "a resumed run loads the weights alone, its optimizer starts afresh: save and load optimizer.state_dict() too"
RESUMES = Words(r"resum|^(start|begin|init|initial)_?epoch$|^continue_?(train|from|run)|^restart", re.IGNORECASE)
# Words of a path or a test that make the weights only a beginning.
OTHERWISE = Words(
    r"pre_?train|fine_?tun|backbone|teacher|evaluat|^eval$|^test|infer|reset_|warm_?start|weights?(_only)?$|transfer|^jit$",
    re.IGNORECASE,
)
# Whatever may give an optimizer its state.
RESTORES = (
    *("load_optim", "set_state_dict", "set_optimizer_state_dict", "load_state(", "restore_optim", "optim_state_dict"),
    *("deepspeed", "reset_optim"),
)
# Two patterns, since a search for one fixed beginning is fast.
LOADS = re.compile(r"opt\w*(\[[^\]]*\])?\.load")
HANDS = re.compile(r"(?<!torch\.)\b\w*(load|restore|resume)\w*\([^)\n]*\b(optim|opt\b(?!\.))")


def check(view: View) -> Iterator[Found]:
    """Find resumed runs that load weights and train on, but load no optimizer state."""
    if "resum" not in view.module.text.lower() and "start_epoch" not in view.module.text:
        return
    if any(restores(view, member) for member in view.project.closure(view.module)):
        return
    for run in runs(view):
        for event in run.of("load"):
            site = shown_at(view, event)
            if site is not None and resumes(view, event) and goes_on(view, run, event):
                yield Found(site.call, MESSAGE)
                break


@cache_answers
def restores(view: View, module: Module) -> bool:
    """Check whether a file may give an optimizer its state."""
    others = (site for site in module.sites("load_state_dict") if not view.kinds.is_model(site.receiver, site.scope))
    text = module.bare
    if any(word in text for word in RESTORES) or LOADS.search(text):
        return True
    lines = (line for line in text.split("\n") if "opt" in line and "(" in line)
    return any(map(HANDS.search, lines)) or any(True for _ in others)


def resumes(view: View, event: Event) -> bool:
    """Check whether a run loads a model's weights because it resumes."""
    receiver, home = given_as(event, event.mark.subject, event.scope)
    if not view.kinds.is_model(receiver, home) or OTHERWISE.search(last(receiver)):
        return False
    call = event.node
    given = next(iter(call.args), None) if isinstance(call, ast.Call) else None
    words = [word for test in event.tests if test.when for word in find_words(test.node, test.scope)]
    words += find_words(given, event.scope) if given is not None else ()
    for origin in view.origins.of(given, event.scope) if given is not None else ():
        words += find_words(origin.node, origin.scope)
    words += [name for test in event.tests for name in first_epochs(test)]
    return any(map(RESUMES.search, words)) and not any(map(OTHERWISE.search, words))


def first_epochs(arm: ArmBlock) -> Iterator[str]:
    """Yield names that an arm sets to a checkpoint's epoch (`start_epoch = state["epoch"] + 1`)."""
    for key, binds in arm.scope.binds.items():
        for bind in binds:
            nodes = walk(bind.value) if bind.value is not None else ()
            read = any(isinstance(node, ast.Subscript) and "epoch" in strings(node.slice) for node in nodes)
            if read and any(guard.test is arm.node for guard in guards(bind.stmt, arm.scope.module)):
                yield key


def find_words(node: ast.expr, scope: Scope) -> Iterator[str]:
    """Yield the words of an expression and its names' values (`path = args.resume`)."""
    yield from (*idents(node), *strings(node))
    for name in idents(node):
        binds = scope.binds.get(name, [])
        value = binds[0].value if len(binds) == 1 else None
        yield from (*idents(value), *strings(value)) if value is not None else ()


def goes_on(view: View, run: Run, event: Event) -> bool:
    """Check whether a run trains later epochs, with a stateful optimizer."""
    steps = [step for step in run.of("step") if step.place > event.place and not apart(step, event)]
    made = [each for each in run.of("optimizer") if not apart(each, event)]
    later = any(begins_later(view, loop) for step in steps for loop in step.loops)
    return later and any(has_state(view, each.node, each.scope) for each in made)


def begins_later(view: View, loop: LoopBlock) -> bool:
    """Check whether a loop counts from a number that is no literal (`range(first, epochs)`)."""
    calls = (
        [part for part in walk(loop.node.iter) if isinstance(part, ast.Call)] if isinstance(loop.node, ast.For) else []
    )
    first = next((call.args[0] for call in calls if last(call) in ("range", "trange") and len(call.args) > 1), None)
    return any(constant(origin.node) is None for origin in view.origins.of(first, loop.scope))


def has_state(view: View, call: ast.AST, scope: Scope) -> bool:
    """Check whether an optimizer of torch has a long-lived state, as SGD has not."""
    known = isinstance(call, ast.Call) and TORCH_OPTIMIZERS.match(view.names.qualify(call.func, scope)) is not None
    return known and last(call) != "SGD"


RULE = Rule(
    "LS055", Severity.HINT, Confidence.MEDIUM, check, fix="unsafe", moot=TRAINERS | {"deepspeed", "lightning_fabric"}
)
