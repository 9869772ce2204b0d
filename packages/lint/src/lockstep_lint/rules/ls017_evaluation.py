"""LS017: evaluation without eval() or no_grad, or train mode not restored."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import above, guards
from lockstep_lint.analysis.evaluation import (
    evaluations,
    foreign,
    forward_of_phases,
    is_forward,
    run_model,
    shields,
    without_graph,
)
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, last, mentions, walk
from lockstep_lint.analysis.origins import default, truth
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, CallBlock, Event, LoopBlock, Mark, apart, seen_from, turn
from lockstep_lint.events.query import same, subject, things
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


# How many functions hand the flag on.
MAX_HANDS = 3


def idle_calls(view: View, backward: Site) -> Iterator[Site]:
    """The calls for which a test before a backward comes out so that it is not made (`optimizer=None`), nor another."""
    function, names = backward.scope, tested(backward)
    others = [site for site in function.sites if view.steps.backwards(site)] if names else []
    for name in names:
        for call, value in values(view, function, name, 0):
            if not any(made(site, name, value) for site in others):
                yield call


def tested(backward: Site) -> set[str]:
    """The parameters that decide alone whether a backward is made."""
    function = backward.scope
    found = (
        {name for name in idents(guard.test) if name in function.params}
        for guard in guards(backward.stmt, backward.module)
    )
    return {names.pop() for names in found if len(names) == 1} - function.binds.keys()


def made(backward: Site, name: str, value: ast.Constant) -> bool:
    """Whether a backward is made for a value of a parameter, as far as is known."""
    call = ast.Call(ast.Name(backward.scope.name), [], [ast.keyword(name, value)])
    entry = (call, backward.scope)
    return all(
        truth(guard.test, backward.scope, entry) is not (not guard.when)
        for guard in guards(backward.stmt, backward.module)
    )


def values(view: View, function: Scope, name: str, depth: int) -> Iterator[tuple[Site, ast.Constant]]:
    """The calls of a function with the literals that they give for a parameter, or the calls that hand it on."""
    for site in view.calls.callers(function) if depth <= MAX_HANDS else ():
        value = passed(site, function, name) or default(function, name, site.call)
        if isinstance(value, ast.Constant):
            yield site, value
        elif isinstance(value, ast.Name) and value.id in site.scope.params and value.id not in site.scope.binds:
            yield from values(view, site.scope, value.id, depth + 1)


# A copy of the model, or another one, which stays in eval mode rightly.
OTHERS = Words(r"teacher|(?<![a-z])ema|(^|_)(ref|old|target|frozen|pretrained|best|final|test|eval)(_|$)")


# What the model is called, also under its wrapper.
TRAINED = Words(
    r"^(model|net|network|ddp_model|self)$|^(raw|unwrapped|bare)_(model|net)$"
    r"|^(model|net|network)_(without|wo|no)_(ddp|dp|parallel)$"
)


TRAINS = Words(r"^(is_)?train$|^training$")


def check(view: View) -> Iterator[Found]:
    """Looks at the loops that evaluate, and at training loops that evaluate in between."""
    done: set[Scope] = set()
    for site in evaluations(view):
        if site.scope in done:
            continue
        missing = [
            what
            for what, present in (
                ("model.eval()", seen(view, site)),
                ("torch.no_grad()", without_graph(view, site)),
            )
            if present is False
        ]
        if missing:
            done.add(site.scope)
            yield at(site, f"evaluates without {' and '.join(missing)}")
    yield from by_flag(view)
    yield from by_phase(view)
    yield from without_training(view)
    yield from not_restored(view)


def seen(view: View, site: Site) -> bool | None:
    """Whether the programs that make a call do so in eval mode, or what its file says without any."""
    programs = [run for run in runs(view) if run.entry.kind == "module"]
    found = {in_mode(view, run, e) for run in programs for e in run.of("evaluate") if e.node is site.call}
    if not found or None in found:
        return in_eval_mode(view, site)
    return False not in found


def in_mode(view: View, run: Run, event: Event) -> bool | None:
    """Whether the model that an event evaluates is in eval mode; None where that cannot be seen."""
    modes = [m for m in run.of("eval", "train", "mode") if m.place < event.place and not apart(m, event)]
    own = [m for m in modes if same(view, m, event)]
    if own:
        return own[-1].kind != "train"
    if any(isinstance(made, ast.Call) and last(made) == "from_pretrained" for made in things(view, *subject(event))):
        return None  # it comes in eval mode, and stays so
    return None if any(m.kind != "train" for m in modes) else False


def by_flag(view: View) -> Iterator[Found]:
    """`self.run(loader, train=False)` where the shared loop never calls eval(), or nothing keeps it from a graph."""
    switched = any(
        site.name in ("eval", "train") and site.receiver is not None and is_mode(view, site)
        for site in view.sites("eval", "train")
    )
    for site in view.sites():
        flag = says_so(site)
        target = view.calls.target(site.call, site.scope) if flag is not None else None
        if target is None or flag is None:
            continue
        below = [s for s in view.effects.below(target.sites) if s.module is view.module and forwards(view, s)]
        if not below:
            continue
        if not switched and TRAINS.search(flag):
            yield at(below[0], f"also evaluates, for line {site.line}, without model.eval()")
        elif (
            switched
            and any(view.steps.backwards(s) and asks(s, flag) for s in target.sites)
            and not view.effects.mentioned_in(below[0].scope, "grad_enabled")
            and not view.effects.mentioned_in(below[0].scope, "no_grad")
            and without_graph(view, below[0]) is False
        ):
            yield at(below[0], f"also evaluates, for line {site.line}, without torch.no_grad()")


def by_phase(view: View) -> Iterator[Found]:
    """A loop over phases whose evaluating phase builds the graph too."""
    for backward in (site for site in view.sites("backward") if view.steps.backwards(site)):
        forward = forward_of_phases(view, backward)
        if forward is not None:
            yield at(forward, "also evaluates, in another phase, without torch.no_grad()")


def without_training(view: View) -> Iterator[Found]:
    """`self.run(loader)` or `self.run(loader, optimizer=None)` where the shared loop trains only with an optimizer."""
    for backward in (site for site in view.sites("backward") if view.steps.backwards(site)):
        for call in idle_calls(view, backward):
            if call.module is not view.module or says_so(call) is not None or without_graph(view, call) is not False:
                continue
            sites = list(view.effects.below([call]))
            below = [site for site in sites if forwards(view, site)]
            trains = any(view.steps.backwards(s) and s.scope is not backward.scope for s in sites)
            flagged = any(shields(s) or view.effects.mentioned_in(s.scope, "grad_enabled") for s in below)
            flagged = flagged or runs_shielded(view, backward.scope)
            if below and not trains and not flagged:
                yield at(call, "evaluates without torch.no_grad()")


def runs_shielded(view: View, scope: Scope) -> bool:
    """Whether a function runs the model without a graph too, on another of its ways."""
    shielded = [site for site in scope.sites if shields(site)]
    return any(forwards(view, site) for site in view.effects.below(shielded))


def says_so(site: Site) -> str | None:
    """The flag by which a call asks a shared loop to evaluate (`train=False`, `validate=True`)."""
    for item in site.call.keywords:
        value, name = constant(item.value), item.arg or ""
        if (value is False and TRAINS.search(name)) or (value is True and EVALUATION.search(name)):
            return name
    return None


def asks(site: Site, flag: str) -> bool:
    """Whether a call is made by a test of a flag."""
    return any(flag in idents(guard.test) for guard in guards(site.stmt, site.module))


def is_mode(view: View, site: Site) -> bool:
    """Whether `x.train(...)` or `x.eval()` sets a module's mode rather than running a method of the project."""
    return site.name == "eval" or (
        view.calls.target(site.call, site.scope) is None and view.kinds.is_model(site.receiver, site.scope)
    )


def forwards(view: View, site: Site) -> bool:
    """Whether a call runs the model."""
    return is_forward(view, site) or (site.name == "forward" and view.kinds.is_model(site.receiver, site.scope))


def in_eval_mode(view: View, site: Site) -> bool | None:
    """Whether eval() is called before, here or by the callers; None where that cannot be seen."""
    if any(
        full.endswith("from_pretrained") or last(call) == "from_pretrained"
        for call, _, full in view.origins.calls_of(site.call.func, site.scope)
    ) and not any(dotted(s.receiver) == run_model(site) for s in site.scope.named("train")):
        return None  # comes in eval mode, and stays so
    if site.scope.binds.get(run_model(site) or "") and site.scope.kind == "function":  # no caller has it
        return view.effects.find([s for s in site.scope.sites if s.line <= site.line], switches) is not None
    found = present(view, site.scope, site.line, 0)
    return False if found is None and never_switched(view, site.scope) else found


def never_switched(view: View, scope: Scope) -> bool:
    """Whether no file of the programs switches any mode, and nothing that runs a method is out of sight."""
    owner = scope.owner
    if owner is None or any(name != "object" for name in foreign(view, owner)) or view.project.unseen(view.module):
        return False
    return not any(
        switches(site) for member in view.project.family(view.module) for site in member.sites("eval", "train")
    )


def switches(site: Site) -> bool:
    """Whether a call is `model.eval()` or `model.train(False)`, or `train(mode)`."""
    return site.receiver is not None and (site.name == "eval" or (site.name == "train" and len(site.call.args) == 1))


def present(view: View, scope: Scope, line: int, depth: int, call: ast.Call | None = None) -> bool | None:
    """Whether a switch comes before a line: in the function, in what it calls, or in all that call it; `call` is the
    one that led to the function that was asked before, which does not count with what stands in it further down.
    """
    if view.effects.find([s for s in scope.sites if s.line <= line and s.call is not call], switches) is not None:
        return True
    if scope.kind != "function":
        return False
    callers = view.calls.callers(scope) or view.calls.by_base(scope)
    if not callers or depth > 4:
        return None
    answers = [present(view, c.scope, c.line, depth + 1, c.call) for c in callers[:6]]
    if depth == 0 and False in answers:
        return False  # evaluated in eval mode too, but not everywhere
    if any(answer is True for answer in answers):
        return True
    return None if None in answers else False


STAYS = "the model stays in eval mode for the training that follows: call model.train() after"


def not_restored(view: View) -> Iterator[Found]:
    """The calls that switch the trained model to eval mode, in which it still is when it trains next."""
    for run in runs(view):
        done: set[Mark] = set()
        steps = {back.loops[-1] for back in run.of("backward") if back.loops}
        for loop in {each: None for back in run.of("backward") for each in reversed(back.loops)}:
            switch, back = left_on(view, run, loop, loop not in steps) or (None, None)
            if switch is not None and back is not None and switch.mark not in done:
                done.add(switch.mark)
                site = seen_from(switch, back)
                if site is not None and site.module is view.module:
                    yield at(site, STAYS)


def left_on(view: View, run: Run, loop: LoopBlock, epochs: bool) -> tuple[Event, Event] | None:
    """The switch to eval mode that is the last one before a backward, in a turn of a loop or from one to the next, and
    that backward.
    """
    events = list(turn(run.events, loop, "eval", "train", "mode", "backward"))
    mode: Event | None = None
    for turns in range(2):
        for event in events:
            if event.kind == "backward" and mode is not None and not apart(mode, event) and stepped(run, loop, event):
                return mode, event
            if event.kind in ("train", "mode"):
                mode = None
            elif event.kind == "eval" and is_trained(view, run, event, loop) and goes_on(event, loop, epochs):
                mode = event
        if turns == 0 and mode is not None and made_anew(mode, loop):
            mode = None
    return None


def made_anew(switch: Event, loop: LoopBlock) -> bool:
    """Whether each turn of a loop makes the model anew, which begins in training mode."""
    node, home = subject(switch, loop.scope)
    key = dotted(node)
    binds = home.binds.get(key, []) if key is not None and home is loop.scope else []
    start, end = getattr(loop.node, "lineno", 0), getattr(loop.node, "end_lineno", 0)
    made = (bind.value for bind in binds if bind.value is not None and start < bind.stmt.lineno <= end)
    return any(isinstance(value, ast.Call) and not mentions(value, key or "") for value in made)


def stepped(run: Run, loop: LoopBlock, backward: Event) -> bool:
    """Whether a step may be made of the gradients of a backward in its turn, where any steps are in sight."""
    steps = list(turn(run.events, loop, "step"))
    return not steps or any(step.place > backward.place or step.loops[-1:] != [loop] for step in steps)


def is_trained(view: View, run: Run, switch: Event, loop: LoopBlock) -> bool:
    """Whether a switch is of the model that a loop trains, which is not meant to train in eval mode."""
    node, home = subject(switch, loop.scope)
    name = last(node)
    if name != "self" and OTHERS.search(name):
        return False
    model = things(view, node, home)
    own = home.owner is loop.scope.owner or not (dotted(node) or "").startswith("self.")
    named = TRAINED.search(name) and not any(isinstance(made, ast.Call) for made in model) and own
    if not named and not any(model & things(view, node, scope) for node, scope in trained(run, loop)):
        return False
    before = (e for e in run.of("eval") if e.place < loop.start and e.scope is loop.scope)
    return not any(same(view, e, switch) for e in before)  # frozen statistics


def trained(run: Run, loop: LoopBlock) -> Iterator[tuple[ast.expr, Scope]]:
    """The models that a loop runs, or that are switched to training mode."""
    training = {loop.scope, *(back.scope for back in turn(run.events, loop, "backward"))}
    for event in (*turn(run.events, loop, "forward"), *run.of("train")):
        node, home = subject(event)
        if node is not None and (event.scope in training or event.kind == "train"):
            yield node, home
    yield from ((site.call.func, site.scope) for site in loop.scope.sites if isinstance(site.call.func, ast.Name))


def goes_on(switch: Event, loop: LoopBlock, epochs: bool) -> bool:
    """Whether more turns of a loop follow a switch: not in the last one only, nor does the loop end."""
    inner = switch.within(loop)
    site = next((block.site for block in inner if isinstance(block, CallBlock)), switch.mark.site)
    if epochs or site is None:
        return True
    if any(isinstance(block, ArmBlock) and in_last(block.node) for block in inner):
        return False
    blocks = [node for node, _ in above(site.stmt, site.module)]
    around = blocks[: blocks.index(loop.node) + 1] if loop.node in blocks else []
    held = [stmt for node in around for part in ("body", "orelse") for stmt in getattr(node, part, [])]
    return not any(isinstance(stmt, ast.Break | ast.Return) and stmt.lineno > site.line for stmt in held)


def in_last(test: ast.expr) -> bool:
    """Whether a test compares with the number of batches, in each of its parts where one of them is enough."""
    if isinstance(test, ast.BoolOp):
        found = map(in_last, test.values)
        return all(found) if isinstance(test.op, ast.Or) else any(found)
    parts = list(walk(test)) if isinstance(test, ast.Compare) else []
    counted = any(isinstance(part, ast.Call) and last(part) == "len" for part in parts)
    often = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod | ast.FloorDiv) for part in parts)
    return counted and not often  # `i % (len(loader) // 4) == 0`


RULE = Rule(
    code="LS017",
    name="evaluation mode",
    what="An evaluation runs without `model.eval()` or without `torch.no_grad()`, or training goes on in eval mode.",
    why=(
        "Without eval(), dropout and batch statistics disturb the score, and the validation data leak into the running "
        "statistics. Without no_grad() the graph is built for nothing. In eval mode, training silently loses both."
    ),
    bad="""
import torch

def evaluate(model, val_loader):
    correct = 0
    with torch.no_grad():
        for x, y in val_loader:
            correct += (model(x).argmax(1) == y).sum()
    return correct

def main(model, val_loader):
    print(evaluate(model, val_loader))

if __name__ == "__main__":
    main(torch.nn.Linear(4, 2), [])
""",
    good="""
import torch

@torch.no_grad()
def evaluate(model, val_loader):
    model.eval()
    correct = 0
    for x, y in val_loader:
        correct += (model(x).argmax(1) == y).sum()
    model.train()
    return correct

def main(model, val_loader):
    print(evaluate(model, val_loader))

if __name__ == "__main__":
    main(torch.nn.Linear(4, 2), [])
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="model.eval(), with torch.no_grad(): ..., then model.train()",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl", "fastai"}),
    note=(
        "It is told once a function, at the first call of the model that evaluates (at the call of a shared loop, "
        "where that loop runs without an optimizer), and at `model.eval()` where training goes on in eval mode, for "
        "the rest of an epoch too. What is run over held-out data as a whole (`model(X_test)`) counts where it builds "
        "the graph and nothing is trained on it, and so do rows of it in a loop that counts (`model(x_test[i])`). "
        "A method that a class of the project only inherits the calls of is judged by what its base class does before. "
        "A model that is run with nothing done with what it gives (to show its layers) is no evaluation."
    ),
)
