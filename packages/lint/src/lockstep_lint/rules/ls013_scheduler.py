"""LS013: the scheduler stepped at the wrong place."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import Loop, above, apart, guards, inside, loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, constant, dotted, idents, keyword, last, strings, walk
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

STEPS = re.compile(r"step|iter|len|loader|batches", re.IGNORECASE)
EPOCHS = re.compile(r"epoch", re.IGNORECASE)
HEAD = "steps the schedule before the epoch's training: the first rate is skipped, so step it after"
# The class of a scheduler, the call that makes it and the scope of that.
Made = tuple[str, ast.Call, Scope]
# How far a length is followed.
MAX_NAMES = 60
TORCH = re.compile(r"^torch\.optim\.lr_scheduler\.(\w+)$")


def check(view: View) -> Iterator[Found]:
    """Looks at every scheduler.step(): in which loop it runs, and before or after what."""
    for site in view.sites("step"):
        if not view.steps.steps_scheduler(site) or site.call.args or site.call.keywords:
            continue  # `step(epoch)` sets that epoch's own rate wherever it stands
        made = schedulers(view, site)
        if any(name == "ReduceLROnPlateau" for name, *_ in made) or view.names.definition(site.call.func, site.scope):
            continue
        message = misplaced(view, site, made) or early(view, site)
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


def misplaced(view: View, site: Site, made: list[Made]) -> str:
    """A horizon counted in steps with a step an epoch, or the other way round."""
    where = place(view, site)
    if where == "epoch" and leftover(view, site):
        return ""
    for name, call, scope in made:
        if where == "epoch" and name == "OneCycleLR" and not by_the_epoch(call):
            return "OneCycleLR counts batches, but is stepped once an epoch: step it after every optimizer.step()"
        horizon = length(name, call)
        if horizon is None:
            continue
        by_epoch, by_step = named(horizon, EPOCHS), named(horizon, STEPS)
        sure = by_step and (by_epoch or name.startswith("get_"))
        if where == "epoch" and (sure or counts_batches(view, horizon, scope)):
            return "the schedule's length is in steps, but it is stepped once an epoch: step it with the optimizer"
        if where == "batch" and by_epoch and not by_step and not multiplied(horizon):
            return "T_max counts epochs, but the scheduler is stepped in every batch: step it once an epoch"
        if (
            where == "batch"
            and name == "CosineAnnealingLR"
            and isinstance(constant(horizon), int)
            and not bounded(view, site, horizon)
        ):
            return f"T_max={constant(horizon)} is a fixed number of steps: give it the steps that the run takes"
    return ""


def leftover(view: View, site: Site) -> bool:
    """Whether a step under a test, around a loop over batches, is one more of a scheduler that is stepped in that loop
    too: for the last incomplete group of an accumulation.
    """
    key = dotted(site.receiver)
    others = [s for s in site.scope.named("step") if s is not site and key is not None and dotted(s.receiver) == key]
    return any(True for _ in guards(site.stmt, site.module)) and any(place(view, s) == "batch" for s in others)


def length(name: str, call: ast.Call) -> ast.expr | None:
    """What a scheduler is told of its length."""
    given = keyword(call, "T_max") or keyword(call, "num_training_steps")
    return given or (argument(call, 1, "T_max") if name == "CosineAnnealingLR" else None)


def by_the_epoch(call: ast.Call) -> bool:
    """Whether a OneCycleLR is told to count epochs (`total_steps=epochs`, `steps_per_epoch=1`)."""
    total = keyword(call, "total_steps")
    return (total is not None and named(total, EPOCHS) and not named(total, STEPS)) or (
        constant(keyword(call, "steps_per_epoch")) == 1
    )


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
            elif isinstance(node, ast.Name | ast.Attribute):
                found = view.origins.of(node, home)
                queue += [(item.node, item.scope) for item in found if isinstance(item.node, ast.BinOp | ast.Call)]
    return False


def named(node: ast.expr, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) for name in idents(node))


def multiplied(node: ast.expr) -> bool:
    return any(isinstance(item, ast.BinOp) and isinstance(item.op, ast.Mult) for item in ast.walk(node))


def bounded(view: View, site: Site, horizon: ast.expr) -> bool:
    """Whether a loop runs for just as many steps."""
    value = constant(horizon)
    return any(constant(node) == value for loop in loops(site.stmt, site.module) for node in ast.walk(header(loop)))


def header(loop: Loop) -> ast.expr:
    return loop.test if isinstance(loop, ast.While) else loop.iter


def place(view: View, site: Site) -> str:
    """ "batch" if the scheduler is stepped in a loop over batches, "epoch" if around one, "" if that is not clear."""
    nest = loops(site.stmt, site.module)
    for training in view.trainings.near(site.module):
        if nest and training.loop is nest[0]:
            return "batch"
    for training in view.trainings.near(site.module):
        for loop, scope, _ in view.trainings.epochs(training):
            if nest and loop is nest[0] and scope is site.scope:
                return "epoch"
    if not nest:
        for training in view.trainings.near(site.module):
            if site.scope is training.backward.scope and site.scope is not training.scope:
                return "batch"
            if site.scope is training.scope and ends_epoch(view, site, training):
                return "epoch"
    return ""


def ends_epoch(view: View, site: Site, training: Training) -> bool:
    """Whether a call stands after the loop of a function that trains one epoch."""
    ended = (training.loop.end_lineno or site.line) < site.line and not loops(training.loop, site.module)
    return ended and any(scope is not site.scope for _, scope, _ in view.trainings.epochs(training))


def early(view: View, site: Site) -> str:
    """A scheduler stepped at the head of the epoch, or before the optimizer in the same pass."""
    made = list(view.origins.calls_of(site.receiver, site.scope))
    ours = [call for call, _, full in made if full]
    if len(ours) == len(made) and made and not any(like_torch(view, *origin) for origin in made):
        return ""  # another library's scheduler, with rules of its own
    nest = loops(site.stmt, site.module)
    if not nest:
        return HEAD if begins_epoch(site.scope) or heads_epoch(view, site) else ""
    block = nest[0].body
    if site.stmt not in [s for stmt in block for s in (stmt, *inner(stmt))] and not flagged(site, nest[0]):
        return ""
    if carried(site, nest[0]):
        return ""
    for item in view.trainings.near(site.module):
        if item.loop is nest[0]:
            return before_optimizer(view, site, item.loop)
        for loop, scope, stmt in view.trainings.epochs(item):
            if (
                loop is nest[0]
                and scope is site.scope
                and site.line < stmt.lineno
                and not trained_before(view, site, nest[0])
            ):
                return HEAD
    return ""


def begins_epoch(scope: Scope) -> bool:
    """Whether an Engine of ignite runs a function where each epoch begins (`@trainer.on(Events.EPOCH_STARTED)`)."""
    return any(
        isinstance(item, ast.Call) and last(item) == "on" and "EPOCH_STARTED" in map(last, item.args)
        for item in scope.decorators
    )


def heads_epoch(view: View, site: Site) -> bool:
    """Whether a step stands before the loop of a function that trains one epoch, which a loop over epochs calls."""
    if any(named(guard.test, EPOCHS) for guard in guards(site.stmt, site.module)):
        return False  # `if epoch > 0`
    if any(s.line < site.line and view.steps.steps_optimizer(s) for s in site.scope.sites):
        return False
    trainings = [t for t in view.trainings.near(site.module) if t.scope is site.scope]
    first = min(trainings, key=lambda training: training.loop.lineno, default=None)
    if first is None or site.line >= first.loop.lineno or loops(first.loop, site.module):
        return False
    return any(scope is not site.scope for _, scope, _ in view.trainings.epochs(first))


def like_torch(view: View, call: ast.Call, scope: Scope, full: str) -> bool:
    """Whether a scheduler is torch's, or a class of the project that derives from torch's."""
    owner = view.names.definition(call.func, scope)
    if owner is not None and owner.kind == "class":
        return any(
            name.endswith("LRScheduler") or name.startswith("torch.optim.lr_scheduler.")
            for name in view.names.bases_of(owner)
        )
    return bool(TORCH.match(full)) or "get_" in full


def inner(stmt: ast.stmt) -> list[ast.stmt]:
    """The statements of an `if` without loops."""
    return [*stmt.body, *stmt.orelse] if isinstance(stmt, ast.If) else []


def flagged(site: Site, loop: Loop) -> bool:
    """Whether nothing but `with` blocks and tests of flags, which are no counts, stand between a step and its loop
    (`if accelerator.sync_gradients: if not accelerator.optimizer_step_was_skipped:`).
    """
    for node, place in above(site.stmt, site.module):
        if node is loop:
            return place == "body"
        if not isinstance(node, ast.With | ast.If):
            return False
        test = node.test if isinstance(node, ast.If) else None
        if test is not None and any(isinstance(item, ast.Compare | ast.BinOp | ast.Call) for item in walk(test)):
            return False
    return False


def carried(site: Site, loop: Loop) -> bool:
    """Whether a step depends on a flag that an earlier turn of its loop sets (`started = True` at the loop's end)."""
    flags = {name for guard in guards(site.stmt, site.module, loop) for name in idents(guard.test)}
    later = (bind.stmt for name in flags for bind in site.scope.binds.get(name, []) if bind.stmt.lineno > site.line)
    return any(inside(stmt, loop, site.module) for stmt in later)


def trained_before(view: View, site: Site, loop: Loop) -> bool:
    """Whether training stands before the scheduler's step in the same epoch."""
    sites = [s for s in view.effects.block(loop, site.scope) if s.line < site.line and s.stmt is not loop]
    return view.trainings.trains(sites) or any(view.steps.steps_optimizer(s) for s in sites)


def before_optimizer(view: View, site: Site, loop: Loop) -> str:
    """A scheduler's step that comes before the optimizer's, with no optimizer step earlier in the pass."""
    block = view.trainings.body(loop, site.scope)
    steps = [s for s in block if view.steps.steps_optimizer(s) and not (s.scope is site.scope and apart(site, s))]
    if (
        not steps
        or any((s.line, s.call.col_offset) < (site.line, site.call.col_offset) for s in steps)
        or len({last(s.receiver) for s in steps}) > 1
    ):
        return ""
    if any(
        view.trainings.steps_in(stmt, site.scope)
        for stmt in loop.body
        if isinstance(stmt, Loop) and stmt.lineno < site.line
    ):
        return ""
    return "steps the schedule before the optimizer: the first rate is skipped, so call optimizer.step() first"


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
    severity=Severity.WARNING,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Step the scheduler after the optimizer, as often as its length counts",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"}),
)
