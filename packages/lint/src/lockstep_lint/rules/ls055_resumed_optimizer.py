"""LS055: a resumed run whose optimizer starts afresh."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.checkpoints import RESUMES, loaded, path_words, saves
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.kinds import TORCH_OPTIMIZERS
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, keyword, last, strings, walk
from lockstep_lint.analysis.view import Analysis, View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, apart
from lockstep_lint.events.query import given_as, same, shown_at
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MESSAGE = "a resumed run loads the weights alone, its optimizer starts afresh: save and load optimizer.state_dict() too"
OPTIMIZER = Words(r"optim|^opt$", re.IGNORECASE)
SHORT = Words(r"optim|(^|_)opts?(_|$)", re.IGNORECASE)
# What says that a run goes on from an epoch, and what says that its weights are only a beginning.
FIRST = Words(r"^(start|begin|init|initial)_?epoch$", re.IGNORECASE)
OTHERWISE = Words(
    r"pre_?train|fine_?tun|backbone|teacher|evaluat|^eval$|^test|infer|reset_|warm_?start|weights?(_only)?$|transfer|^jit$",
    re.IGNORECASE,
)
# Whatever may give an optimizer its state, or says that it is left out on purpose.
RESTORES = re.compile(
    r"optim\w*(\[[^\]]*\])?\.load|load_optim|set_(optimizer_)?state_dict|load_state\(|restore_optim|optim_state_dict"
    r"|(?<!torch\.)\b\w*(load|restore|resume)\w*\([^)\n]*\b(optim|opt\b(?!\.))|deepspeed|reset_optim"
)
# What gives a schedule its place: `last_epoch=`, its own state, or `step(epoch)`.
POSITIONS = re.compile(
    r"last_epoch(?!\s*=\s*-1\b)|sched\w*(\[[^\]]*\])?\.load|\.step\(\s*[\w.]*(epoch|iter|step)|step_update\("
)


def check(view: View) -> Iterator[Found]:
    """Looks for weights that a resumed run loads before it trains, where nothing loads the optimizer's state."""
    if "resum" not in (text := view.module.text).lower() and "start_epoch" not in text:
        return
    for run in runs(view):
        for event in run.of("load"):
            site = shown_at(view, event)
            if site is None or not resumes(view, event):
                continue
            if any(restores(view.analysis, member) for member in view.project.closure(view.module)):
                continue
            if goes_on(view, run, event):
                yield Found(site.call, MESSAGE)
                break


@kept
def restores(analysis: Analysis, module: Module) -> bool:
    """Whether a file may give an optimizer its state."""
    return RESTORES.search(module.bare) is not None or any(
        is_optimizer(analysis, site.receiver, site.scope) for site in module.sites("load_state_dict")
    )


def is_optimizer(analysis: Analysis, node: ast.expr | None, scope: Scope) -> bool:
    """Check whether an object is an optimizer, by its name, by the list that it is of, or by what made it."""
    if node is None:
        return False
    made = analysis.origins.of(node, scope)
    turns = (bind.value for bind in scope.binds.get(dotted(node) or "", ()) if bind.how == "for")
    names = [last(node), *(word for value in turns if value is not None for word in idents(value))]
    return any(map(SHORT.search, names)) or any(
        TORCH_OPTIMIZERS.match(analysis.names.qualify(origin.call.func, origin.scope))
        for origin in made
        if origin.call is not None
    )


def resumes(view: View, event: Event) -> bool:
    """Whether a run loads the weights of a model because it goes on."""
    receiver, home = given_as(event, event.mark.subject, event.scope)
    if not view.kinds.is_model(receiver, home) or OTHERWISE.search(last(receiver)):
        return False
    call = event.node
    given = next(iter(call.args), None) if isinstance(call, ast.Call) else None
    made = [(origin.node, origin.scope) for origin in view.origins.of(given, event.scope)]
    tests = [test for test in event.tests if test.when or denies(test.node)]
    words = [word for test in tests for word in meant(test.node, test.scope)]
    words += [word for test in event.tests for word in first_epochs(test)]
    words += [word for node, home in made for word in meant(node, home)]
    words += meant(given, event.scope) if given is not None else ()
    return any(map(RESUMES.search, words)) and not any(map(OTHERWISE.search, words))


def denies(test: ast.expr) -> bool:
    """Whether a test asks for the absence of something, so that its other arm is where it is there."""
    if isinstance(test, ast.Compare):
        none = isinstance(test.ops[0], ast.Is | ast.Eq) and not constant(test.comparators[0])
        return isinstance(test.ops[0], ast.NotIn) or (none and isinstance(test.comparators[0], ast.Constant))
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def first_epochs(arm: ArmBlock) -> Iterator[str]:
    """Yield the names of a first epoch that an arm takes from a checkpoint (`start_epoch = state["epoch"] + 1`)."""
    for key, binds in arm.scope.binds.items():
        for bind in binds if FIRST.search(key) and key not in arm.scope.params else ():
            given = walk(bind.value) if bind.value is not None else ()
            read = any(isinstance(node, ast.Subscript) and "epoch" in strings(node.slice) for node in given)
            around = guards(bind.stmt, arm.scope.module) if read else ()
            if any(guard.test is arm.node and guard.when is arm.when for guard in around):
                yield key


def meant(node: ast.expr, scope: Scope) -> Iterator[str]:
    """Yield the words of an expression, and of what its names were given in its function (`path = args.resume`)."""
    yield from (*idents(node), *strings(node))
    for name in idents(node):
        binds = scope.binds.get(name, [])
        for bind in binds if len(binds) == 1 else ():
            yield from idents(bind.value) if bind.value is not None else ()


def goes_on(view: View, run: Run, event: Event) -> bool:
    """Whether a run trains on after an event, in later epochs, with an optimizer or a schedule that starts afresh."""
    trained = [step for step in run.of("step") if step.place > event.place and not apart(step, event)]
    later = any(begins_later(view, loop) for step in trained for loop in step.loops)
    if not trained or not (later or saves_optimizer(view) or direct(view, event)):
        return False  # only the beginning of another training, perhaps
    made = [each for each in run.of("optimizer") if not apart(each, event)]
    switched = any(same(view, each, event) for each in run.of("eval") if each.place > event.place)
    if switched and made and not any(each.mark.subject is None or same(view, each, event) for each in made):
        return False  # another model is trained on what this one gives
    if any(has_state(view, each.node, each.scope) for each in made) or starts_over(view, run, event):
        return True
    calls = (each.node for each in made if isinstance(each.node, ast.Call))
    return any(keyword(call, "momentum") is not None for call in calls) and saves_optimizer(view)


def saves_optimizer(view: View) -> bool:
    """Check whether the program's checkpoints hold the state of its optimizer, which a resume then leaves out."""
    written = (pair for saved in saves(view.analysis, view.module) for pairs in saved.values.values() for pair in pairs)
    funcs = (value.func for value, _ in written if isinstance(value, ast.Call) and last(value) == "state_dict")
    return any(isinstance(func, ast.Attribute) and OPTIMIZER.search(last(func.value)) for func in funcs)


def direct(view: View, event: Event) -> bool:
    """Whether a model loads a file as it is, by a path that speaks of a resume: not what fits into another model."""
    given = next(iter(event.node.args), None) if isinstance(event.node, ast.Call) else None
    given = given.value if isinstance(given, ast.Subscript) else given
    made = loaded(view, given, event.scope) if given is not None else ()
    words = (word for call, scope in made for word in path_words(view, next(iter(call.args), None), scope))
    return any(map(RESUMES.search, words))


def begins_later(view: View, loop: LoopBlock) -> bool:
    """Whether a loop counts from a number that is not written out (`range(first, epochs)`, `while step < end`)."""
    first: ast.expr | None = None
    if isinstance(loop.node, ast.For):
        calls = (part for part in walk(loop.node.iter) if isinstance(part, ast.Call) and len(part.args) > 1)
        first = next((call.args[0] for call in calls if last(call) in ("range", "trange")), None)  # perhaps in a bar
    elif isinstance(loop.node, ast.While) and isinstance(loop.node.test, ast.Compare):
        first = loop.node.test.left
    made = view.origins.of(first, loop.scope)
    return any(constant(origin.node) is None for origin in made)


def starts_over(view: View, run: Run, event: Event) -> bool:
    """Whether a schedule is stepped after an event that nothing puts to where it was."""
    stepped = [each for each in run.of("schedule") if each.place > event.place]
    training = {loop for step in run.of("step") for loop in step.loops}
    forwarded = any(training.isdisjoint(each.loops) for each in stepped)  # `for _ in range(start): schedule.step()`
    text = "\n".join(member.bare for member in view.project.closure(view.module))
    return bool(stepped) and not forwarded and POSITIONS.search(text) is None


def has_state(view: View, call: ast.AST, scope: Scope) -> bool:
    """Whether an optimizer of torch keeps a state that comes back slowly; SGD's momentum is there in ten steps."""
    known = isinstance(call, ast.Call) and TORCH_OPTIMIZERS.match(view.names.qualify(call.func, scope)) is not None
    return known and last(call) != "SGD"


RULE = Rule(
    code="LS055",
    name="resume without the optimizer",
    what="A run that is resumed loads the weights of its checkpoint, and nothing loads the state of its optimizer.",
    why=(
        "Adam's moments start at zero again, and so does the schedule of the rate, which may rise to its peak on "
        "weights that were nearly done. The loss jumps, and the run is not the one that was interrupted."
    ),
    bad="""
import torch

def train(model, loader, loss_of, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
    for epoch in range(args.start_epoch, args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        torch.save({"model": model.state_dict()}, "last.pt")
""",
    good="""
import torch

def train(model, loader, loss_of, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for epoch in range(args.start_epoch, args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Save the states of the optimizer, the schedule and the scaler beside the model's, and load them too",
    moot=frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl", "deepspeed"}),
    note=(
        "It is told where a test or a path speaks of a resume or of a first epoch, and the epochs or steps go on from "
        "a number that it is given, the program's checkpoints hold the optimizer's state, or the path itself speaks of "
        "a resume. Weights that are only a beginning (`args.pretrained`) are left alone, and so is SGD without a "
        "schedule or with one that is put to its place (`last_epoch=`), but for its momentum where that was saved."
    ),
)
