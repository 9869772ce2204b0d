"""LS013: the scheduler stepped at the wrong place."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import Loop, guards, inside
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import REFERENCES, argument, constant, idents, keyword, last, strings, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, apart, turn
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import step_loops
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

STEPS = re.compile(r"step|iter|len|loader|batches", re.IGNORECASE)
EPOCHS = re.compile(r"epoch", re.IGNORECASE)
IN_STEPS = "the schedule's length is in steps, but it is stepped once an epoch: step it with the optimizer"
ONE_CYCLE = "OneCycleLR counts batches, but is stepped once an epoch: step it after every optimizer.step()"
IN_EPOCHS = "{name} counts epochs, but the scheduler is stepped in every batch: step it once an epoch"
FIXED = "T_max={size} is a fixed number of steps: give it the steps that the run takes"
BEFORE = "steps the schedule before the optimizer: the first rate is skipped, so call optimizer.step() first"
HEAD = "steps the schedule before the epoch's training: the first rate is skipped, so step it after"
PLATEAU = "ReduceLROnPlateau stops here: its step() needs the score that it watches"
# How many names a length is followed through.
MAX_NAMES = 60
# The class of a scheduler, the call that makes it and the scope of that.
Made = tuple[str, ast.Call, Scope]
TORCH = "torch.optim.lr_scheduler."
PARTS = (ast.BinOp, ast.UnaryOp, ast.Call)
# The argument that holds a scheduler's length: its position and its name.
LENGTHS = {
    "CosineAnnealingLR": (1, "T_max"),
    "LinearLR": (3, "total_iters"),
    "PolynomialLR": (1, "total_iters"),
    "get_scheduler": (3, "num_training_steps"),
}


def check(view: View) -> Iterator[Found]:
    """Compare the place of every scheduler.step() with the schedule's length and with the optimizer's step."""
    for run in runs(view):
        for event in run.of("schedule"):
            site = event.mark.site
            # `step(epoch)` sets that epoch's own rate wherever it is called.
            if site is None or site.module is not view.module or site.call.args or site.call.keywords:
                continue
            made = schedulers(view, site)
            plateaus = [name == "ReduceLROnPlateau" for name, *_ in made]
            if made and all(plateaus):
                yield at(site, PLATEAU)
            elif not any(plateaus) and view.names.definition(site.call.func, site.scope) is None:
                message = wrong_unit(view, run, event, made) or early(view, run, event)
                if message:
                    yield at(site, message)


def schedulers(view: View, site: Site) -> list[Made]:
    """Return the schedulers that a step may be of, given the tests around it."""
    made = list(view.origins.calls_of(site.receiver, site.scope))
    for call, scope, _ in list(made):  # `scheduler = accelerator.prepare(scheduler)`
        made += view.origins.calls_of(call.args[0], scope) if last(call) == "prepare" and len(call.args) == 1 else ()
    found = [(full.rsplit(".", 1)[-1], call, scope) for call, scope, full in made if full]
    if len({name for name, _, _ in found}) > 1:
        kinds = [kind for guard in guards(site.stmt, site.module) if guard.when for kind in strings(guard.test)]
        words = [kind.lower().replace("_", "").replace("lr", "") for kind in kinds]
        same = [item for item in found if any(word in item[0].lower() for word in words)]
        found = same if kinds else found
    return found


def wrong_unit(view: View, run: Run, event: Event, made: list[Made]) -> str:
    """Explain that a schedule counts steps but advances per epoch, or vice versa."""
    where = place(run, event)
    if where == "epoch" and any(place(run, other) == "batch" for other in run.of("schedule")):
        return ""  # one more step, for the last incomplete group of an accumulation
    for name, call, scope in made:
        if where == "epoch" and name == "OneCycleLR" and not by_the_epoch(view, call, scope):
            return ONE_CYCLE
        read = find_reads(view, call, scope) if where == "epoch" and name == "LambdaLR" else ()
        if any(counts_batches(view, *part) for part in read):
            return IN_STEPS
        horizon = length(name, call)
        if horizon is None:
            continue
        by_epoch, by_step = has_name(horizon, EPOCHS), has_name(horizon, STEPS)
        sure = by_step and (by_epoch or name.startswith("get_"))
        if where == "epoch" and (sure or counts_batches(view, horizon, scope)):
            return IN_STEPS
        product = any(isinstance(item, ast.Mult) for item in ast.walk(horizon))
        turns = [header(loop) for loop in event.loops]
        as_long = last(horizon) in idents(turns[-1]) if turns else False
        if where == "batch" and by_epoch and not (by_step or product or as_long):
            return IN_EPOCHS.format(name="T_max" if name.startswith("Cosine") else "the schedule's length")
        size = constant(horizon)
        bounded = any(constant(node) == size for each in turns for node in ast.walk(each))
        if where == "batch" and name == "CosineAnnealingLR" and isinstance(size, int) and not bounded:
            return FIXED.format(size=size)
    return ""


def header(loop: LoopBlock) -> ast.AST:
    """Return the test or the iterable of a loop."""
    return loop.node.test if isinstance(loop.node, ast.While) else getattr(loop.node, "iter", loop.node)


def find_reads(view: View, call: ast.Call, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield the names that a LambdaLR's factor reads, if it is a project's function."""
    function = view.names.definition(argument(call, 1, "lr_lambda"), scope)
    for node in walk(function.node) if function is not None else ():
        if function is not None and isinstance(node, ast.Name) and node.id not in {*function.params, *function.binds}:
            yield node, function


def length(name: str, call: ast.Call) -> ast.expr | None:
    """Return the argument that holds a scheduler's length."""
    warms = name.startswith("get_") and name.endswith("_with_warmup") and "constant" not in name
    at, word = (2, "num_training_steps") if warms else LENGTHS.get(name, (None, ""))
    given = keyword(call, "T_max") or keyword(call, "num_training_steps")
    return given or (argument(call, at, word) if at is not None else None)


def by_the_epoch(view: View, call: ast.Call, scope: Scope) -> bool:
    """Check whether a OneCycleLR counts epochs (`total_steps=epochs`, `steps_per_epoch=1`)."""
    total = keyword(call, "total_steps")
    if total is not None and has_name(total, EPOCHS) and not has_name(total, STEPS):
        return not counts_batches(view, total, scope)
    return constant(keyword(call, "steps_per_epoch")) == 1


def counts_batches(view: View, horizon: ast.expr, scope: Scope) -> bool:
    """Check whether a length is computed from a loader's."""
    queue, seen = [(horizon, scope)], 0
    while queue and seen < MAX_NAMES:
        value, home = queue.pop()
        for node in walk(value):
            seen += 1
            if isinstance(node, ast.Call) and last(node) == "len" and node.args:
                if view.kinds.is_loader(node.args[0], home):
                    return True
            elif isinstance(node, REFERENCES):
                found = view.origins.of(node, home)
                queue += [(item.node, item.scope) for item in found if isinstance(item.node, PARTS)]
    return False


def has_name(node: ast.expr, pattern: re.Pattern[str]) -> bool:
    """Check whether a name in an expression matches a pattern."""
    return any(pattern.search(name) for name in idents(node))


def place(run: Run, event: Event) -> str:
    """Return "batch" for a step in a batch loop, "epoch" around one, else ""."""
    loop = event.loops[-1] if event.loops else None
    if loop is not None and any(loop in (found.loop, found.inner) for found in step_loops(run)):
        return "batch"
    around = (back.loops for back in run.of("backward"))
    return "epoch" if any(loop in loops[:-1] for loops in around) else ""


def early(view: View, run: Run, event: Event) -> str:
    """Explain that a scheduler steps before the epoch's training, or before the optimizer."""
    made = list(view.origins.calls_of(event.mark.subject, event.scope))
    ours = [call for call, _, full in made if full]
    if len(ours) == len(made) and made and not any(like_torch(view, *origin) for origin in made):
        return ""  # another library's scheduler, with rules of its own
    where = place(run, event)
    if not where:
        return ""
    loop = event.loops[-1]
    tests = [block for block in event.within(loop) if isinstance(block, ArmBlock)]
    flags = [not any(isinstance(item, ast.Compare | ast.BinOp | ast.Call) for item in walk(t.node)) for t in tests]
    binds = [bind for test in tests for name in idents(test.node) for bind in test.scope.binds.get(name, [])]
    later = [bind.stmt for bind in binds if bind.stmt.lineno > event.line]  # a flag that an earlier turn sets
    flagged = isinstance(loop.node, Loop) and any(inside(stmt, loop.node, event.module) for stmt in later)
    if flagged or (len(tests) > 1 and not all(flags)):
        return ""
    around = [e for e in turn(run.events, loop, "backward", "step") if not apart(e, event)]
    before, after = [e for e in around if e.place < event.place], [e for e in around if e.place > event.place]
    if where == "batch":
        steps = [e for e in after if e.kind == "step"]
        wrong = not any(e.kind == "step" for e in before) and len({last(e.mark.subject) for e in steps}) == 1
        return BEFORE if wrong else ""
    dated = any(has_name(block.node, EPOCHS) for block in tests)  # `if epoch > 0`
    return HEAD if not before and after and not dated else ""


def like_torch(view: View, call: ast.Call, scope: Scope, full: str) -> bool:
    """Check whether a scheduler is torch's, or derives from torch's."""
    owner = view.names.definition(call.func, scope)
    bases = view.names.bases_of(owner) if owner is not None and owner.kind == "class" else iter((full,))
    return any("get_" in name or name.endswith("LRScheduler") or name.startswith(TORCH) for name in bases)


RULE = Rule("LS013", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS)
