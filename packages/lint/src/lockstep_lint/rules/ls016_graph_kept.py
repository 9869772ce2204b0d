"""LS016: the graph kept alive over steps."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import find_passed
from lockstep_lint.analysis.context import Loop, inside, loops
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import REFERENCES, constant, dotted, idents, keyword, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.evaluation import evaluates as is_evaluated
from lockstep_lint.events.evaluation import without_graph
from lockstep_lint.events.event import ArmBlock, CallBlock, Event, LoopBlock, turn
from lockstep_lint.events.marks import split_sum
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.values import value_at
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, edit

MESSAGE = "keeps every step's graph alive: add {}.item() or .detach() instead of the tensor"

# Methods that take values out of a list again.
EMPTIES = ("pop", "popleft", "clear", "zero_")


def check(view: View) -> Iterator[Found]:
    """Find sums and lists that outlive a step and keep its graph."""
    told: set[int] = set()
    for run in runs(view):
        for event in run.of("keep"):
            value, node, scope = source(event)
            if scope.module is not view.module or node.lineno in told:
                continue
            if outlives(view, run, event) and value_at(view, event).graph and not flows_back(view, event):
                told.add(node.lineno)
                named = dotted(value) is not None
                cut = edit("method", value, "detach") if named else None
                yield Found(node, MESSAGE.format(ast.unparse(value) if named else "loss"), edit=cut)


def source(event: Event) -> tuple[ast.expr, ast.expr | ast.stmt, Scope]:
    """Return the value that is kept, at the call that passes it."""
    value, node, scope = event.mark.subject, event.node, event.scope
    assert value is not None
    for block in reversed(event.path):
        if isinstance(block, CallBlock) and block.function is scope:
            given = [find_passed(block.site, scope, name) for name in idents(value) if name in scope.params]
            values = [each for each in given if each is not None]
            if not values or not scope.binds.keys().isdisjoint(idents(value)):
                break
            value, node, scope = values[0], block.site.call, block.site.scope
    return value, node, scope


def outlives(view: View, run: Run, event: Event) -> bool:
    """Check whether a container outlives the step without being emptied in each."""
    scope, holder = event.scope, event.detail
    own = holder.startswith("self.")
    loop = step_loop(view, run, event)
    if any(dotted(site.receiver) == holder for name in EMPTIES for site in scope.named(name)):
        return False
    homes = scope.owner.defs.values() if own and scope.owner is not None else [scope]
    values = [bind.value for home in homes for bind in home.binds.get(holder, [])]
    if any(isinstance(value, ast.Call) and keyword(value, "maxlen") is not None for value in values):
        return False
    begun = [b for b in scope.binds.get(holder, []) if b.how == "assign" and split_sum(b.stmt)[1] is None]
    if loop is None or not isinstance(loop.node, Loop) or loop.scope is not scope:
        in_step = loop is not None or scope.name == "training_step" or scope.named("backward")
        return own and not begun and bool(in_step)
    outer = next((each for each in reversed(event.loops[: event.loops.index(loop)]) if each.scope is scope), None)
    trains = any(turn(run.events, loop, "backward"))
    backs = turn(run.events, outer, "backward") if trains and outer is not None else ()
    around = getattr(outer.node, "body", []) if outer is not None else []
    if begun and any(loop not in back.path for back in backs) and all(bind.stmt in around for bind in begun):
        return False  # begun anew in each turn of a training around
    within = [bind for bind in begun if inside(bind.stmt, loop.node, scope.module)]
    if any(bind.stmt in loop.node.body or in_step_or_loop(view, loop.node, bind, scope) for bind in within):
        return False
    handed = view.origins.of(ast.copy_location(ast.Name(holder), loop.node), scope) if not begun else []
    made = bool(handed) and all(isinstance(origin.node, ast.List) for origin in handed)
    return own or len(begun) > len(within) or made


def step_loop(view: View, run: Run, event: Event) -> LoopBlock | None:
    """Return the loop around an event whose iterations step, or evaluate with a graph."""
    for loop in reversed(event.loops):
        if any(turn(run.events, loop, "backward")) and not steps_around(run, event, loop):
            return loop if not any(map(evaluates, event.tests)) else None
        models = [each for each in turn(run.events, loop, "run") if is_evaluated(view, run, each)]
        if any(without_graph(view, run, each) is False for each in models):
            return loop
    return None


def steps_around(run: Run, event: Event, loop: LoopBlock) -> bool:
    """Check whether a loop runs over micro-batches: only an outer loop steps."""
    steps = [any(turn(run.events, each, "step")) for each in event.loops[: event.loops.index(loop) + 1]]
    return any(steps) and not steps[-1]


def evaluates(arm: ArmBlock) -> bool:
    """Check whether a test keeps an event to evaluation (`phase == "val"`)."""
    test = arm.node
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.NotEq):
        return False
    phase, same = str(constant(test.comparators[0])), isinstance(test.ops[0], ast.Eq)
    return (EVALUATION.search(phase) and same is arm.when) or ("train" in phase and same is not arm.when)


def in_step_or_loop(view: View, loop: Loop, bind: Bind, scope: Scope) -> bool:
    """Check whether a loop's statement is in an inner loop, or next to the step."""
    branch = scope.module.up.get(bind.stmt, (None, ""))[0]
    steps = isinstance(branch, ast.If) and any(
        view.steps.steps_optimizer(site) and inside(site.stmt, branch, scope.module) for site in scope.sites
    )
    return steps or loops(bind.stmt, scope.module)[0] is not loop


def flows_back(view: View, event: Event) -> bool:
    """Check whether gradients are computed of what takes in the values."""
    scope = event.scope
    homes = scope.owner.defs.values() if event.detail.startswith("self.") and scope.owner is not None else [scope]
    for home in homes:
        sites = [site for site in home.sites if view.steps.backwards(site)]
        queue = [name for site in sites for name in names_in(view.steps.loss_of(site))]
        seen: set[str] = set()
        while queue:
            name = queue.pop()
            if name == event.detail:
                return True
            if name not in seen:
                seen.add(name)
                queue += [each for bind in home.binds.get(name, []) for each in names_in(bind.value)]
    return False


def names_in(value: ast.expr | None) -> list[str]:
    """Return the names and attributes in an expression."""
    parts = walk(value) if value is not None else ()
    return [dotted(part) or "" for part in parts if isinstance(part, REFERENCES)]


RULE = Rule("LS016", Severity.ERROR, Confidence.HIGH, check, fix="safe")
