"""LS017: evaluation without eval() or no_grad, or train mode not restored."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, dotted, last, mentions
from lockstep_lint.analysis.view import View
from lockstep_lint.events.evaluation import evaluates, in_eval_mode, span, trains, without_graph
from lockstep_lint.events.event import CallBlock, Event, LoopBlock, Mark, apart, seen_from, turn
from lockstep_lint.events.query import exclude_each_other, same, subject, things
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

# A copy of the model, or another one, which stays in eval mode rightly.
OTHERS = Words(r"teacher|(?<![a-z])ema|(^|_)(ref|old|target|frozen|pretrained|best|final|test|eval)(_|$)")
# What the model is called, also under its wrapper.
TRAINED = Words(
    r"^(model|net|network|ddp_model|self)$|^(raw|unwrapped|bare)_(model|net)$"
    r"|^(model|net|network)_(without|wo|no)_(ddp|dp|parallel)$"
)
EVAL, NO_GRAD = "model.eval()", "torch.no_grad()"


def check(view: View) -> Iterator[Found]:
    """Find evaluations in training mode or with a graph, and training in eval mode."""
    answers: dict[Site, dict[str, set[bool | None]]] = {}
    for run in runs(view):
        for event, site in evaluations(view, run):
            asked = answers.setdefault(site, {EVAL: set(), NO_GRAD: set()})
            asked[EVAL].add(in_eval_mode(view, run, event))
            asked[NO_GRAD].add(without_graph(view, run, event))
    done: set[Scope] = set()
    trained = any(run.of("backward") for run in runs(view))
    for site in sorted(answers, key=lambda each: each.line):
        missing = [what for what, found in answers[site].items() if False in found and None not in found]
        if missing and site.scope not in done and site.module is view.module:
            done.add(site.scope)
            # What libraries load is in eval mode already, so a missing eval() matters most where something trains.
            level = None if trained or NO_GRAD in missing else Severity.HINT
            yield at(site, f"evaluates without {' and '.join(missing)}", severity=level)
    yield from not_restored(view)


def evaluations(view: View, run: Run) -> Iterator[tuple[Event, Site]]:
    """Yield the calls of models that evaluate, as their loops make them."""
    for event in run.of("run"):
        site = in_loop(run, event)
        if site is not None and site.module is view.module and evaluates(view, run, event):
            yield event, site


def in_loop(run: Run, event: Event) -> Site | None:
    """Return the evaluating loop's call that runs the model, directly or through a function."""
    loop = event.loops[-1] if event.loops and not trains(span(run, event.loops[-1])) else None
    inner = event.within(loop) if loop is not None else ()
    return next((block.site for block in inner if isinstance(block, CallBlock)), event.mark.site)


STAYS = "the model stays in eval mode for the training that follows: call model.train() after"


def not_restored(view: View) -> Iterator[Found]:
    """Yield the switches to eval mode that are still in effect at the next backward."""
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
    """Return the last eval switch that precedes a backward, with that backward."""
    events = list(turn(run.events, loop, "eval", "train", "mode", "backward"))
    mode: Event | None = None
    for turns in range(2):
        now: Event | None = None  # the switch, if it was made in this turn
        for event in events:
            trained_next = event.kind == "backward" and mode is not None and not apart(mode, event)
            trained_next = trained_next and not (mode is not None and now is mode and exclude_each_other(mode, event))
            if mode is not None and trained_next and may_step(run, loop, event):
                return mode, event
            if event.kind in ("train", "mode"):
                mode = None
            elif event.kind == "eval" and is_trained(view, run, event, loop) and goes_on(event, loop, epochs):
                mode = now = event
        if turns == 0 and mode is not None and made_anew(mode, loop):
            mode = None
    return None


def made_anew(switch: Event, loop: LoopBlock) -> bool:
    """Check whether each iteration makes a new model, which starts in training mode."""
    node, home = subject(switch, loop.scope)
    key = dotted(node)
    binds = home.binds.get(key, []) if key is not None and home is loop.scope else []
    start, end = getattr(loop.node, "lineno", 0), getattr(loop.node, "end_lineno", 0)
    made = (bind.value for bind in binds if bind.value is not None and start < bind.stmt.lineno <= end)
    return any(isinstance(value, ast.Call) and not mentions(value, key or "") for value in made)


def may_step(run: Run, loop: LoopBlock, backward: Event) -> bool:
    """Check whether a step may follow a backward in its turn."""
    steps = list(turn(run.events, loop, "step"))
    return not steps or any(step.place > backward.place or step.loops[-1:] != [loop] for step in steps)


def is_trained(view: View, run: Run, switch: Event, loop: LoopBlock) -> bool:
    """Check whether a switch concerns the model that a loop trains."""
    node, home = subject(switch, loop.scope)
    name = last(node)
    if name != "self" and OTHERS.search(name):
        return False
    model = things(view, node, home)
    own = home.owner is loop.scope.owner or not (dotted(node) or "").startswith("self.")
    named = TRAINED.search(name) and not any(isinstance(made, ast.Call) for made in model) and own
    if not named and not any(model & things(view, node, scope) for node, scope in find_trained(run, loop)):
        return False
    before = (e for e in run.of("eval") if e.place < loop.start and e.scope is loop.scope)
    return not any(same(view, e, switch) for e in before)  # frozen statistics


def find_trained(run: Run, loop: LoopBlock) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield the models that a loop runs, switches to training mode or optimizes."""
    training = {loop.scope, *(back.scope for back in turn(run.events, loop, "backward"))}
    for event in (*turn(run.events, loop, "forward"), *run.of("train")):
        node, home = subject(event)
        if node is not None and (event.scope in training or event.kind == "train"):
            yield node, home
    yield from ((node, home) for node, home in map(subject, run.of("optimizer")) if node is not None)
    yield from ((site.call.func, site.scope) for site in loop.scope.sites if isinstance(site.call.func, ast.Name))


def goes_on(switch: Event, loop: LoopBlock, epochs: bool) -> bool:
    """Check whether more iterations of a loop follow a switch."""
    inner = switch.within(loop)
    site = next((block.site for block in inner if isinstance(block, CallBlock)), switch.mark.site)
    if epochs or site is None:
        return True
    blocks = [node for node, _ in above(site.stmt, site.module)]
    around = blocks[: blocks.index(loop.node) + 1] if loop.node in blocks else []
    held = [stmt for node in around for part in ("body", "orelse") for stmt in getattr(node, part, [])]
    return not any(isinstance(stmt, ast.Break | ast.Return) and stmt.lineno > site.line for stmt in held)


RULE = Rule("LS017", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS | {"fastai"})
