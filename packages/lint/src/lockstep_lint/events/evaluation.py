"""Find where a run evaluates a model, and in which mode and with which gradients."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import find_passed, turns_off_gradients
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.kinds import EVALUATION, OPTIMIZER
from lockstep_lint.analysis.nodes import REFERENCES, dotted, element_of, idents, last
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Block, CallBlock, Event, LoopBlock, apart
from lockstep_lint.events.query import given_as, same, subject, things
from lockstep_lint.events.run import Run

__all__ = ["evaluates", "has_loop", "holds_out", "in_eval_mode", "span", "trains", "without_graph"]

# What says that a program without a training needs no gradients at all.
FROZEN = ("requires_grad = False", "requires_grad_(False)")
SWITCHES = ("set_grad_enabled", "enter_context")


@cache_answers
def span(run: Run, block: Block) -> tuple[Event, ...]:
    """Return the events that happen under a block, in order."""
    return tuple(event for event in run.events if block in event.path)


def evaluates(view: View, run: Run, event: Event) -> bool:
    """Check whether a model's call evaluates it: held-out data or eval mode, no training."""
    site, owner = event.mark.site, event.scope.owner
    part = (
        owner is not None
        and (dotted(event.mark.subject) or "").startswith("self.")
        and view.kinds.is_module_class(owner)
    )
    if site is None or part or event.scope.name == "forward" or unit_test(event.module):
        return False
    if any(last(block.node) == "enable_grad" for block in event.withs):
        return False
    own = any(loop.scope is event.scope for loop in event.loops)
    if not own and isinstance(site.stmt, ast.Expr) and site.stmt.value is site.call:
        return False  # nothing is done with what the model gives: its layers are shown or measured
    blocks = list(says_so(view, run, event))
    shown = any(block is None or not trains(span(run, block)) for block in blocks)
    if not shown and (blocks or not in_own_mode(view, run, event)):
        return False
    return without_graph(view, run, event) is True or not needs_graph(run, event)


def needs_graph(run: Run, event: Event) -> bool:
    """Check whether code near an event computes or clears gradients, as adversarial attacks do."""
    turns = span(run, event.loops[-1]) if event.loops else ()
    scopes = {event.scope, *(loop.scope for loop in event.loops[-1:])}
    cleared = not trains(turns) and any(
        each.kind == "zero" and OPTIMIZER.search(last(each.mark.subject)) for each in turns
    )
    return cleared or any(scope.named("grad") for scope in scopes)


def trains(events: tuple[Event, ...] | list[Event]) -> bool:
    """Check whether gradients are computed in some events."""
    return any(event.kind == "backward" for event in events)


def says_so(view: View, run: Run, event: Event) -> Iterator[Block | None]:
    """Yield the blocks that mark an evaluation by data or name; None for runs."""
    for place, block in enumerate(event.path):
        if isinstance(block, LoopBlock):
            if holds_out(view, event, block):
                yield block
        elif isinstance(block, CallBlock) and EVALUATION.search(block.function.name) and has_loop(event.path[place:]):
            yield block
    if EVALUATION.search(run.entry.name) and event.loops and not trains(run.events):
        yield None


def has_loop(blocks: tuple[Block, ...]) -> bool:
    """Check whether one of some blocks is a loop."""
    return any(isinstance(block, LoopBlock) for block in blocks)


def holds_out(view: View, event: Event, loop: LoopBlock) -> bool:
    """Check whether a loop around an event runs over held-out data, by its names."""
    if not isinstance(loop.node, ast.For | ast.comprehension):
        return False
    over = view.kinds.iterated(loop.node.iter, loop.scope)
    ends = [block.function for block in event.path if isinstance(block, CallBlock)]
    given = (given_as(event, over, loop.scope, function)[0] for function in (*ends, None))
    named = any(node is not None and names_evaluation(node) for node in (over, *given))
    return named or kept_held_out(view, dotted(over) or "", loop.scope)


@cache_answers
def names_evaluation(node: ast.expr) -> bool:
    """Check whether an expression has a name for evaluations or held-out data."""
    return any(map(EVALUATION.search, idents(node)))


@cache_answers
def kept_held_out(view: View, key: str, scope: Scope) -> bool:
    """Check whether all callers set an attribute to held-out data (`self.loader = loader`)."""
    init = scope.owner.defs.get("__init__") if scope.owner is not None and key.startswith("self.") else None
    binds = init.binds.get(key, []) if init is not None else []
    names = [dotted(next(element_of(bind.value, bind.path), None)) or "" for bind in binds]
    if init is None or any(name not in init.params for name in names):
        return False
    given = [find_passed(site, init, name) for site in view.calls.callers(init) for name in names]
    return bool(given) and all(value is not None and names_evaluation(value) for value in given)


def in_own_mode(view: View, run: Run, event: Event) -> bool:
    """Check whether an event's function evaluates until its next mode switch."""
    own = [mode for mode in run.of("eval", "train", "mode") if same(view, mode, event) and not apart(mode, event)]
    before = [mode for mode in own if mode.place < event.place]
    if not before or before[-1].kind != "eval":
        return False
    switch, after = before[-1], next((mode.place for mode in own if mode.place > event.place), len(run.events))
    calls = [block for block in switch.path if isinstance(block, CallBlock)]
    if any(block not in event.path for block in calls) or (switch.scope is not event.scope and not event.loops):
        return False
    if switch.scope.kind == "module" and not event.loops and not trains(run.events[: switch.place]):
        return False  # a file that predicts only
    around = switch.loops[-1].end if switch.loops else len(run.events)
    ends = (block for block in calls[-1:])
    end = min(after, around, *(span(run, block)[-1].place + 1 for block in ends))
    return not trains(run.events[switch.place : end])


def in_eval_mode(view: View, run: Run, event: Event) -> bool | None:
    """Check whether an event's model is in eval mode; None if that is unknown."""
    modes = [m for m in run.of("eval", "train", "mode") if m.place < event.place and not apart(m, event)]
    own = [mode for mode in modes if same(view, mode, event)]
    if own:
        return own[-1].kind != "train"
    node, home = subject(event)
    made = [each for each in things(view, node, home) if isinstance(each, ast.Call)]
    own_name = isinstance(node, ast.Name) and node.id in home.binds  # nobody else has switched it
    if any(last(call) == "from_pretrained" for call in made) or any(mode.kind != "train" for mode in modes):
        return None  # it comes in eval mode, or another name may stand for it
    if run.entry.kind == "module" or own_name:
        return False
    return None


def without_graph(view: View, run: Run, event: Event) -> bool | None:
    """Check whether an event keeps no graph; None if a caller may disable it."""
    functions = [run.entry, *(block.function for block in event.path if isinstance(block, CallBlock))]
    if any(turns_off_gradients(block.node) for block in event.withs):
        return True
    if any(site.line < event.line or f is not event.scope for f in functions for n in SWITCHES for site in f.named(n)):
        return True
    if view.effects.mentioned(event.module, *FROZEN) and not (view.trainings.near(event.module) or run.of("step")):
        return True
    model, home = subject(event)
    owner = view.kinds.run_class(model, home) if isinstance(model, REFERENCES) else None
    if "volatile=True" in event.module.text or (owner is not None and view.effects.mentioned_in(owner, "no_grad")):
        return True  # of a torch before no_grad; of a model that sees to it itself
    handed = [block for block in event.path if isinstance(block, CallBlock) and block.handed]
    if run.entry.kind == "module" and not handed:
        return False
    if trains(span(run, handed[-1]) if handed else run.events):
        return False  # whoever calls what trains keeps graphs
    switched = any(mode.place < event.place for mode in run.of("eval"))
    return False if switched and event.loops and not handed and is_unnamed(view, run.entry) else None


def is_unnamed(view: View, scope: Scope) -> bool:
    """Check whether nothing in sight names a function, so that no caller disables gradients."""
    if scope.decorators or scope.name.startswith("test_"):
        return False
    names = sum(member.words[scope.name] for member in view.project.family(scope.module))
    return scope.parent is scope.module.top and names == 1
