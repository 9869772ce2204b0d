"""LS013: the scheduler stepped at the wrong place."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import Loop, guards, inside
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import (
    REFERENCES,
    Words,
    argument,
    constant,
    dotted,
    idents,
    keyword,
    last,
    strings,
    walk,
)
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, apart, turn
from lockstep_lint.events.loaders import trained_on
from lockstep_lint.events.query import same
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import in_few_turns, step_loops
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

STEPS = re.compile(r"step|iter|len|loader|batches", re.IGNORECASE)
EPOCHS = re.compile(r"epoch", re.IGNORECASE)
IN_STEPS = "the schedule's length is in steps, but it is stepped once an epoch: step it with the optimizer"
BEFORE = "steps the schedule before the optimizer: the first rate is skipped, so call optimizer.step() first"
HEAD = "steps the schedule before the epoch's training: the first rate is skipped, so step it after"
PLATEAU = "ReduceLROnPlateau stops here: its step() needs the score that it watches"
GROUPED = "the schedule's length counts batches, but it is stepped once in several: divide it by their number"
SAMPLES = "the schedule's length counts samples, but it is stepped once a batch: divide it by the batch's size"
UNDIVIDED = "the schedule's length counts the batches of all ranks, each of which takes its part: use len(loader)"
TWICE = "the schedule is stepped in every batch, and once more an epoch: keep one of the two"
DATA = Words(r"data_?set$|(train|training)_?(set|data|ds)$", re.IGNORECASE)
BATCH = re.compile(r"batch|\bbs\b|^bs$", re.IGNORECASE)
RANKS = Words(r"world|gpu|rank|device|replica|process|node|accum|global|total_batch", re.IGNORECASE)
GROUPS = Words(r"accum|group|update|micro|every|step|grad", re.IGNORECASE)
# The class of a scheduler, the call that makes it and the scope of that.
Made = tuple[str, ast.Call, Scope]
# What a length is worked out by.
PARTS = (ast.BinOp, ast.UnaryOp, ast.Call)
# How far a length is followed.
MAX_NAMES = 60
TORCH = re.compile(r"^torch\.optim\.lr_scheduler\.(\w+)$")


def check(view: View) -> Iterator[Found]:
    """Looks at every scheduler.step(): in which loop it runs, before or after what, and for which length."""
    yield from missized(view)
    for run in runs(view):
        for event in run.of("schedule"):
            site = event.mark.site
            if site is None or site.module is not view.module or site.call.args or site.call.keywords:
                continue  # `step(epoch)` sets that epoch's own rate wherever it stands
            made = schedulers(view, site)
            if made and all(name == "ReduceLROnPlateau" for name, *_ in made):
                yield at(site, PLATEAU)
                continue
            if any(name == "ReduceLROnPlateau" for name, *_ in made) or view.names.definition(
                site.call.func, site.scope
            ):
                continue
            message = misplaced(view, run, event, made) or twice(view, run, event) or early(view, run, event)
            if message:
                yield at(site, message)


def schedulers(view: View, site: Site) -> list[Made]:
    """The schedulers that a step may be of, where its own tests let them pass, and those that they are made of."""
    made = view.origins.calls_of(site.receiver, site.scope)
    found = [(full.rsplit(".", 1)[-1], call, scope) for call, scope, full in made if full]
    if len({name for name, _, _ in found}) > 1:
        kinds = [kind for guard in guards(site.stmt, site.module) if guard.when for kind in strings(guard.test)]
        same = [item for item in found if any(plain(kind) in item[0].lower() for kind in kinds)]
        found = same if kinds else found
    return [*found, *(inner for item in found for inner in joined(view, *item))]


def joined(view: View, name: str, call: ast.Call, scope: Scope) -> Iterator[Made]:
    """The schedulers that a SequentialLR runs one after the other, or a ChainedScheduler together."""
    place = {"SequentialLR": 1, "ChainedScheduler": 0}.get(name)
    listed = argument(call, place, "schedulers") if place is not None else None
    for item in listed.elts if isinstance(listed, ast.List) else []:
        for made, home, full in view.origins.calls_of(item, scope):
            yield full.rsplit(".", 1)[-1], made, home


def plain(kind: str) -> str:
    """The word by which a test names a kind of scheduler, as it stands in a class's name."""
    return kind.lower().replace("_", "").replace("lr", "")


def misplaced(view: View, run: Run, event: Event, made: list[Made]) -> str:
    """A horizon counted in steps with a step an epoch, or the other way round."""
    where = place(run, event)
    if where == "epoch" and leftover(view, run, event):
        return ""
    for name, call, scope in made:
        if where == "epoch" and name == "OneCycleLR" and not by_the_epoch(view, call, scope):
            return "OneCycleLR counts batches, but is stepped once an epoch: step it after every optimizer.step()"
        read = asked(view, call, scope) if where == "epoch" and name == "LambdaLR" else ()
        if any(counts_batches(view, *part) for part in read):
            return IN_STEPS
        horizon = length(name, call)
        if horizon is None:
            continue
        by_epoch, by_step = named(horizon, EPOCHS), named(horizon, STEPS)
        sure = by_step and (by_epoch or name.startswith("get_"))
        if where == "epoch" and (sure or counts_batches(view, horizon, scope)):
            return IN_STEPS
        if where == "batch" and by_epoch and not by_step and not multiplied(horizon):
            return "T_max counts epochs, but the scheduler is stepped in every batch: step it once an epoch"
        if (
            where == "batch"
            and name == "CosineAnnealingLR"
            and isinstance(constant(horizon), int)
            and not bounded(event, horizon)
        ):
            return f"T_max={constant(horizon)} is a fixed number of steps: give it the steps that the run takes"
    return ""


def missized(view: View) -> Iterator[Found]:
    """Looks at the schedules that are made in a file and stepped in every batch: does their length count such steps?"""
    found: dict[ast.Call, Found] = {}
    for run in runs(view):
        for event in run.of("schedule"):
            if event.mark.site is None or place(run, event) != "batch":
                continue
            for name, call, scope in schedulers(view, event.mark.site):
                message = counted_apart(view, run, event, (name, call, scope)) if scope.module is view.module else ""
                if message:
                    found.setdefault(call, Found(call, message))
    yield from found.values()


def counted_apart(view: View, run: Run, event: Event, made: Made) -> str:
    """Explain why a length counts other steps than those of a schedule; "" where it may be right."""
    parts = [part for horizon, home in horizons(view, *made) for part in counted(view, horizon, home)]
    grouped = any(isinstance(b, ArmBlock) and in_few_turns(view, b, event) for b in event.within(event.loops[-1]))
    for of, home, around in parts:
        words = [word for each in around for word in idents(each)]
        if view.kinds.is_loader(of, home):
            if grouped and not any(map(GROUPS.search, words)):
                return GROUPED
        elif DATA.search(last(of)) and not any(map(RANKS.search, words)):
            batch = next((each for each in around if named(each, BATCH)), None)
            sizes = [keyword(call, "batch_size") for call in trained_on(view)]
            if (
                batch is None
                and not around
                and sizes
                and all(size is not None and constant(size) != 1 for size in sizes)
            ):
                return SAMPLES
            if batch is not None and run.of("sampler") and any(size_of_rank(size, batch) for size in sizes):
                return UNDIVIDED
    return ""


def is_arm(block: object) -> bool:
    return isinstance(block, ArmBlock)


def size_of_rank(size: ast.expr | None, batch: ast.expr) -> bool:
    """Whether a loader of each rank takes batches of the very size that a length is divided by."""
    return size is not None and dotted(size) is not None and dotted(size) == dotted(batch)


def horizons(view: View, name: str, call: ast.Call, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield what a scheduler is told of its length, the steps of an epoch too, or what its factor is divided by."""
    given = (keyword(call, word) for word in ("steps_per_epoch", "total_steps"))
    yield from ((each, scope) for each in (length(name, call), *given) if each is not None)
    factor = argument(call, 1, "lr_lambda") if name == "LambdaLR" else None
    function = view.names.definition(factor, scope) if isinstance(factor, ast.Name) else None
    body, home = (function.node, function) if function is not None else (factor, scope)
    arguments = getattr(body, "args", None)
    if isinstance(arguments, ast.arguments) and body is not None:
        own = {arg.arg for arg in arguments.args}
        parts = (part for part in walk(body) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div))
        yield from ((part.right, home) for part in parts if own & set(idents(part.left)))


ROUNDS = ("int", "ceil", "floor", "round", "float", "max", "min")
# A length, or a part of one, that is counted: of what, where, and what it is divided by.
Counted = tuple[ast.expr, Scope, tuple[ast.expr, ...]]


def counted(
    view: View, node: ast.expr, scope: Scope, around: tuple[ast.expr, ...] = (), depth: int = 8
) -> Iterator[Counted]:
    """Yield what the lengths are of that a number is the product of."""
    if depth == 0:
        return
    if isinstance(node, ast.BinOp):
        shared = isinstance(node.op, ast.Div | ast.FloorDiv)
        yield from counted(view, node.left, scope, (*around, node.right) if shared else around, depth - 1)
        if isinstance(node.op, ast.Mult):
            yield from counted(view, node.right, scope, around, depth - 1)
    elif isinstance(node, ast.UnaryOp):
        yield from counted(view, node.operand, scope, around, depth - 1)
    elif isinstance(node, ast.Call) and last(node) == "len" and len(node.args) == 1:
        yield node.args[0], scope, around
    elif isinstance(node, ast.Call) and last(node) in ROUNDS:
        for given in node.args:
            yield from counted(view, given, scope, around, depth - 1)
    elif isinstance(node, ast.Name | ast.Attribute):
        found = [origin for origin in view.origins.of(node, scope) if isinstance(origin.node, PARTS)]
        for origin in found if len(found) == 1 else ():
            yield from counted(view, origin.node, origin.scope, around, depth - 1)


def twice(view: View, run: Run, event: Event) -> str:
    """Explain that a schedule is stepped at the end of each epoch and in each of its batches too."""
    loop = event.loops[-1] if event.loops else None
    if place(run, event) != "epoch" or any(map(is_arm, event.within(loop))):
        return ""
    others = [other for other in run.of("schedule") if loop in other.loops and place(run, other) == "batch"]
    sure = (other for other in others if not any(map(is_arm, other.within(loop))) and not apart(event, other))
    return TWICE if any(same(view, event, other) for other in sure) else ""


def leftover(view: View, run: Run, event: Event) -> bool:
    """Whether a step under a test, around a loop over batches, is one more of a scheduler that is stepped in that loop
    too: for the last incomplete group of an accumulation.
    """
    others = (other for other in run.of("schedule") if other is not event and place(run, other) == "batch")
    tests = [block for block in event.within(event.loops[-1]) if isinstance(block, ArmBlock)]
    return bool(tests) and any(same(view, event, other) for other in others)


def length(name: str, call: ast.Call) -> ast.expr | None:
    """What a scheduler is told of its length."""
    given = keyword(call, "T_max") or keyword(call, "num_training_steps")
    return given or (argument(call, 1, "T_max") if name == "CosineAnnealingLR" else None)


def by_the_epoch(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a OneCycleLR is told to count epochs (`total_steps=epochs`, `steps_per_epoch=1`)."""
    total = keyword(call, "total_steps")
    if total is not None and named(total, EPOCHS) and not named(total, STEPS):
        return not counts_batches(view, total, scope)
    return constant(keyword(call, "steps_per_epoch")) == 1


def asked(view: View, call: ast.Call, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """What the factor of a LambdaLR reads beside its own argument, where it is a function of the project."""
    function = view.names.definition(argument(call, 1, "lr_lambda"), scope)
    for node in walk(function.node) if function is not None else ():
        if function is not None and isinstance(node, ast.Name) and node.id not in {*function.params, *function.binds}:
            yield node, function


def counts_batches(view: View, horizon: ast.expr, scope: Scope) -> bool:
    """Whether a length is computed from a loader's, by the names that it is given to on the way."""
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


def named(node: ast.expr, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) for name in idents(node))


def multiplied(node: ast.expr) -> bool:
    return any(isinstance(item, ast.BinOp) and isinstance(item.op, ast.Mult) for item in ast.walk(node))


def bounded(event: Event, horizon: ast.expr) -> bool:
    """Whether a loop runs for just as many steps."""
    value = constant(horizon)
    loops = (loop.node for loop in event.loops if isinstance(loop.node, Loop))
    return any(constant(node) == value for loop in loops for node in ast.walk(header(loop)))


def header(loop: Loop) -> ast.expr:
    return loop.test if isinstance(loop, ast.While) else loop.iter


def place(run: Run, event: Event) -> str:
    """ "batch" if a scheduler is stepped in a loop over batches, "epoch" if around one, "" if that is not clear."""
    loop = event.loops[-1] if event.loops else None
    if loop is None:
        return ""
    if any(loop in (found.loop, found.inner) for found in step_loops(run)):
        return "batch"
    around = (back.loops for back in run.of("backward"))
    return "epoch" if any(loop in loops[:-1] for loops in around) else ""


def early(view: View, run: Run, event: Event) -> str:
    """A scheduler stepped at the head of the epoch, or before the optimizer in the same pass."""
    node, scope = event.mark.subject, event.scope
    made = list(view.origins.calls_of(node, scope))
    ours = [call for call, _, full in made if full]
    if len(ours) == len(made) and made and not any(like_torch(view, *origin) for origin in made):
        return ""  # another library's scheduler, with rules of its own
    where = place(run, event)
    if not where:
        return HEAD if begins_epoch(scope) else ""
    loop = event.loops[-1]
    tests = [block for block in event.within(loop) if isinstance(block, ArmBlock)]
    if (len(tests) > 1 and not all(map(is_flag, tests))) or any(carried(block, event, loop) for block in tests):
        return ""
    around = [e for e in turn(run.events, loop, "backward", "step") if not apart(e, event)]
    before, after = [e for e in around if e.place < event.place], [e for e in around if e.place > event.place]
    steps = [e for e in after if e.kind == "step"]
    if where == "batch":
        wrong = not any(e.kind == "step" for e in before) and len({last(e.mark.subject) for e in steps}) == 1
        return BEFORE if wrong else ""
    dated = any(named(block.node, EPOCHS) for block in tests)  # `if epoch > 0`
    return HEAD if not before and after and not dated else ""


def begins_epoch(scope: Scope) -> bool:
    """Whether an Engine of ignite runs a function where each epoch begins (`@trainer.on(Events.EPOCH_STARTED)`)."""
    return any(
        isinstance(item, ast.Call) and last(item) == "on" and "EPOCH_STARTED" in map(last, item.args)
        for item in scope.decorators
    )


def like_torch(view: View, call: ast.Call, scope: Scope, full: str) -> bool:
    """Whether a scheduler is torch's, or a class of the project that derives from torch's."""
    owner = view.names.definition(call.func, scope)
    if owner is not None and owner.kind == "class":
        return any(
            name.endswith("LRScheduler") or name.startswith("torch.optim.lr_scheduler.")
            for name in view.names.bases_of(owner)
        )
    return bool(TORCH.match(full)) or "get_" in full


def is_flag(block: ArmBlock) -> bool:
    """Whether a test is of flags, which are no counts (`if not accelerator.optimizer_step_was_skipped:`)."""
    return not any(isinstance(item, ast.Compare | ast.BinOp | ast.Call) for item in walk(block.node))


def carried(block: ArmBlock, event: Event, loop: LoopBlock) -> bool:
    """Whether a test asks a flag that an earlier turn of its loop sets (`started = True` at the loop's end)."""
    scope, node = block.scope, loop.node
    later = (b.stmt for name in idents(block.node) for b in scope.binds.get(name, []) if b.stmt.lineno > event.line)
    return isinstance(node, Loop) and any(inside(stmt, node, scope.module) for stmt in later)


RULE = Rule(
    code="LS013",
    name="scheduler at the wrong place",
    what=(
        "A learning-rate scheduler is stepped before the optimizer, or once an epoch where its length counts "
        "steps, or the other way round."
    ),
    why=(
        "OneCycleLR stepped once an epoch stays in its warm-up for the whole run; a cosine with T_max in epochs, "
        "stepped in every batch, goes up and down many times an epoch. Stepped first, it skips its first rate."
    ),
    bad="""
import torch
from torch.optim.lr_scheduler import OneCycleLR

def train(model, loader, optimizer, criterion, epochs):
    scheduler = OneCycleLR(optimizer, max_lr=0.1, epochs=epochs, steps_per_epoch=len(loader))
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
""",
    good="""
import torch
from torch.optim.lr_scheduler import OneCycleLR

def train(model, loader, optimizer, criterion, epochs):
    scheduler = OneCycleLR(optimizer, max_lr=0.1, epochs=epochs, steps_per_epoch=len(loader))
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            scheduler.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Step the scheduler after the optimizer, as often as its length counts",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"}),
)
