"""LS013: the scheduler stepped at the wrong place."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import Guard, Loop, guards, inside
from lockstep_lint.analysis.context import apart as in_two_arms
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import (
    REFERENCES,
    Words,
    argument,
    constant,
    dotted,
    has_star,
    idents,
    keyword,
    last,
    strings,
    walk,
)
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, apart, turn
from lockstep_lint.events.lengths import PARTS, Made, counted, horizons, length, number
from lockstep_lint.events.loaders import trained_on
from lockstep_lint.events.query import alone, given_as, same, sides, subject
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import accumulating, accumulations, exchanges, in_few_turns, step_loops
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
DIVIDED = (
    "the schedule's length is divided by the accumulation, but it is stepped in every batch: step it with the optimizer"
)
AGAIN = "the schedule is stepped {turns} times for each batch, but its length counts batches: multiply it"
SHARED = (
    "the length counts one process's batches, but Accelerate steps what it prepared once for each process: multiply it "
    "by num_processes"
)
BY_HAND = "the schedule's length counts batches, but its steps are made once in several: divide it by their number"
ENGINE = "engine.step() of DeepSpeed steps this schedule already: leave this step out"
TWICE = "the schedule is stepped in every batch, and once more an epoch: keep one of the two"
PARTED = "only some ranks step this schedule: the others train on with another rate"
SET_APART = "only some ranks set this rate: the others train on with another one"
DATA = Words(r"data_?set$|(train|training)_?(set|data|ds)$", re.IGNORECASE)
BATCH = re.compile(r"batch|\bbs\b|^bs$", re.IGNORECASE)
RANKS = Words(r"world|gpu|rank|device|replica|process|node|accum|global|total_batch", re.IGNORECASE)
ACCUMULATES = Words(r"accum", re.IGNORECASE)
# What accumulates by itself: an engine, or Accelerate, which passes over a schedule's steps then.
OWN_GROUPS = re.compile(r"accumulate\(|sync_gradients|no_sync|deepspeed|megatron")
# By what Accelerate is told to step a schedule otherwise.
OTHERWISE = ("split_batches", "step_scheduler_with_optimizer", "dataloader_config", "gradient_accumulation_steps")
GROUPS = Words(r"accum|group|update|micro|every|step|grad", re.IGNORECASE)
# A schedule of rates by its name alone, and what sends values from one rank to the others.
RATED = Words(r"lr|^sched(uler)?$", re.IGNORECASE)
SENDS = Words(r"broadcast|scatter|^send$|^isend$|sync_")
# The place of the schedule in what deepspeed.initialize gives back.
SCHEDULE = 3
# How far a length is followed.
MAX_NAMES = 60
TORCH = re.compile(r"^torch\.optim\.lr_scheduler\.(\w+)$")


def check(view: View) -> Iterator[Found]:
    """Looks at every scheduler.step(): in which loop it runs, before or after what, and for which length."""
    yield from missized(view)
    yield from by_hand(view)
    yield from set_apart(view)
    for run in runs(view):
        for event in run.of("schedule"):
            site = event.mark.site
            if site is None or site.module is not view.module:
                continue
            if parted(view, run, event, site):
                yield at(site, PARTED)
                continue
            if site.call.args or site.call.keywords:
                continue  # `step(epoch)` sets that epoch's own rate wherever it stands
            made = schedulers(view, site)
            if made and all(name == "ReduceLROnPlateau" for name, *_ in made):
                yield at(site, PLATEAU)
                continue
            if any(name == "ReduceLROnPlateau" for name, *_ in made) or view.names.definition(
                site.call.func, site.scope
            ):
                continue
            if steps_with_engine(view, event):
                yield at(site, ENGINE)
                continue
            message = misplaced(view, run, event, made) or twice(view, run, event) or early(view, run, event)
            if message:
                yield at(site, message)


def parted(view: View, run: Run, event: Event, site: Site) -> bool:
    """Check whether only some ranks step a schedule of an optimizer that all of them step."""
    if not isinstance(site.stmt, ast.Expr) or site.stmt.value is not site.call or len(site.call.args) > 1:
        return False  # a sampler of noise gives a sample back
    parts = sides(view, event)
    if not parts or alone(view, event) or not exchanges(view, run):
        return False
    made = schedulers(view, site)
    if not any(like_torch(view, *origin[1:], origin[0]) or "LR" in origin[0] for origin in made) and (
        made or not RATED.search(last(site.receiver))
    ):
        return False
    blocks = [block for block, _ in parts]
    steps = [step for step in run.of("step") if not sides(view, step)]
    others = (other for other in run.of("schedule") if other is not event and not any(b in other.path for b in blocks))
    return (
        bool(steps)
        and not any(block in step.path for block in blocks for step in run.of("step"))
        and not any(same(view, event, other) for other in others)
        and not sends_on(view)
    )


def sends_on(view: View) -> bool:
    """Check whether a file of the programs sends anything from one rank to the others."""
    return any(SENDS.search(name) for member in view.project.family(view.module) for name in member.by_name)


def set_apart(view: View) -> Iterator[Found]:
    """Looks at the rates that are set by hand under a test of the rank, without another arm that sets them too."""
    text = view.module.text
    if "param_groups" not in text or "lr" not in text or ("rank" not in text and "main" not in text):
        return
    if not any(exchanges(view, run) for run in runs(view)) or sends_on(view):
        return
    for scope in view.scopes:
        for stmt in scope.stmts:
            target = stmt.targets[0] if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 else None
            if not isinstance(target, ast.Subscript) or constant(target.slice) != "lr" or not is_group(target, scope):
                continue
            tests = [g for g in guards(stmt, view.module) if view.ranks.tests.test(g.test, scope, g.when)]
            if tests and not any(view.ranks.tests.many(g.test, scope, g.when) == -1 for g in tests):
                arms = [g.stmt for g in tests]
                if not any(isinstance(arm, ast.If) and arm.orelse for arm in arms) and not steps_in(view, scope, arms):
                    yield Found(stmt, SET_APART)


def is_group(target: ast.Subscript, scope: Scope) -> bool:
    """Check whether a subscript is of a group of an optimizer's parameters."""
    binds = scope.binds.get(dotted(target.value) or "", ())
    values = [target.value, *(bind.value for bind in binds if bind.value is not None)]
    return any("param_groups" in idents(value) for value in values)


def steps_in(view: View, scope: Scope, arms: list[ast.stmt]) -> bool:
    """Check whether an optimizer is stepped in some arms: what only one rank trains."""
    sites = [site for site in scope.sites if view.steps.steps_optimizer(site)]
    return any(inside(site.stmt, arm, scope.module) for site in sites for arm in arms)


def schedulers(view: View, site: Site) -> list[Made]:
    """The schedulers that a step may be of, where its own tests let them pass, and those that they are made of."""
    made = list(view.origins.calls_of(site.receiver, site.scope))
    for call, scope, _ in list(made):  # `scheduler = accelerator.prepare(scheduler)`
        made += view.origins.calls_of(call.args[0], scope) if last(call) == "prepare" and len(call.args) == 1 else ()
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
        if where == "batch" and by_epoch and not by_step and not multiplied(horizon) and not as_long(event, horizon):
            word = "T_max" if name.startswith("Cosine") else "the schedule's length"
            return f"{word} counts epochs, but the scheduler is stepped in every batch: step it once an epoch"
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
    lengths = list(horizons(view, *made))
    parts = [part for horizon, home in lengths for part in counted(view, horizon, home)]
    grouped = any(isinstance(b, ArmBlock) and in_few_turns(view, b, event) for b in event.within(event.loops[-1]))
    for of, home, around in parts:
        words = [word for each in around for word in idents(each)]
        if view.kinds.is_loader(of, home):
            if grouped and not any(map(GROUPS.search, words)):
                return GROUPED
            if not grouped and never_grouped(view, run, event, home, around):
                return DIVIDED
            if is_shared(view, event, of, home, made) and not any(map(RANKS.search, [*words, *names(view, lengths)])):
                return SHARED
            turns = inner_turns(view, event, of, home)
            if turns > 1 and not grouped and not around:
                return AGAIN.format(turns=turns) if str(turns) not in names(view, lengths) else ""
        elif DATA.search(last(of)) and not any(map(RANKS.search, words)):
            message = samples(view, run, around)
            if message:
                return message
    return ""


def samples(view: View, run: Run, around: tuple[ast.expr, ...]) -> str:
    """Explain why a length counts samples, or those of all ranks; "" where it may be right."""
    batch = next((each for each in around if named(each, BATCH)), None)
    sizes = [keyword(call, "batch_size") for call in trained_on(view)]
    if batch is None and not around and sizes and all(size is not None and constant(size) != 1 for size in sizes):
        return SAMPLES
    return UNDIVIDED if batch and run.of("sampler") and any(size_of_rank(size, batch) for size in sizes) else ""


def never_grouped(view: View, run: Run, event: Event, home: Scope, around: tuple[ast.expr, ...]) -> bool:
    """Whether a length is divided by an accumulation that its schedule, stepped in every turn, does not follow: as its
    optimizer does, or as nobody does although more than one batch is asked for.
    """
    loop = event.loops[-1]
    divisor = next((each for each in around if any(map(ACCUMULATES.search, idents(each)))), None)
    if divisor is None or any(OWN_GROUPS.search(member.text) for member in view.project.family(view.module)):
        return False
    if not all(map(is_flag, (block for block in event.within(loop) if isinstance(block, ArmBlock)))):
        return False
    if any(found.loop is loop for found in accumulating(view, run)):
        return True
    steps = list(turn(run.events, loop, "step"))
    always = all(not isinstance(block, ArmBlock) or is_flag(block) for step in steps for block in step.within(loop))
    asked = [number(view, origin.node, origin.scope) for origin in view.origins.of(divisor, home)]
    return bool(steps) and always and bool(asked) and min(asked) > 1


def names(view: View, lengths: list[tuple[ast.expr, Scope]]) -> set[str]:
    """Return all names and numbers by which some lengths are worked out."""
    queue, found, seen = list(lengths), set(), 0
    while queue and seen < MAX_NAMES:
        value, home = queue.pop()
        for node in walk(value):
            seen += 1
            if isinstance(node, ast.Constant):
                found.add(str(node.value))
            elif isinstance(node, REFERENCES):
                found.update(idents(node))
                queue += [
                    (o.node, o.scope) for o in view.origins.of(node, home) if isinstance(o.node, (*PARTS, ast.Constant))
                ]
    return found


def inner_turns(view: View, event: Event, of: ast.expr, home: Scope) -> int:
    """How often a loop within the loop over a loader repeats a step for each batch; 0 where that is not known."""
    if len(event.loops) < 2:
        return 0
    outer, inner = event.loops[-2:]
    header = inner.node.iter if isinstance(inner.node, ast.For) else None
    over = view.kinds.iterated(outer.node.iter, outer.scope) if isinstance(outer.node, ast.For) else None
    if not isinstance(header, ast.Call) or last(header) not in ("range", "trange") or len(header.args) != 1:
        return 0
    if over is None or dotted(over) != dotted(of) or outer.scope is not home:
        return 0
    counter = dotted(inner.node.target) or "" if isinstance(inner.node, ast.For) else ""
    tests = (block.node for block in event.within(inner) if isinstance(block, ArmBlock))
    if any(counter in idents(test) and in_one_turn(test) for test in tests):
        return 0
    return min((number(view, o.node, o.scope) for o in view.origins.of(header.args[0], inner.scope)), default=0)


def in_one_turn(test: ast.expr) -> bool:
    """Check whether a test picks a turn, or every n-th one."""
    return any(isinstance(node, ast.Eq | ast.Mod) for node in ast.walk(test))


def is_shared(view: View, event: Event, of: ast.expr, home: Scope, made: Made) -> bool:
    """Whether Accelerate prepared a loader before it was counted, and the schedule after that, which it then steps once
    for each process.
    """
    loader, schedule = prepared(view, of, home), prepared(view, *subject(event))
    if not loader or not schedule or made[2].module is not view.module:
        return False
    makers = [site for member in view.project.family(view.module) for site in member.sites("Accelerator")]
    plain = all(not has_star(s.call) and all(keyword(s.call, word) is None for word in OTHERWISE) for s in makers)
    return bool(makers) and plain and "accelerate" in view.frameworks


def prepared(view: View, node: ast.expr | None, scope: Scope) -> bool:
    """Check whether all that a name may be is what Accelerate prepared."""
    key = dotted(node)
    binds = view.origins.binds(key, scope, node.lineno) if key is not None and node is not None else []
    values = [bind.value for bind, _ in binds]
    return bool(values) and all(
        isinstance(value, ast.Call) and last(value) == "prepare" and "accelerator" in (dotted(value.func) or "")
        for value in values
    )


def of_engine(view: View, node: ast.expr | None, scope: Scope) -> Iterator[tuple[ast.Call, int]]:
    """Yield the calls of deepspeed.initialize that give a value, each with its place among the four results."""
    key = dotted(node)
    for bind, home in view.origins.binds(key, scope, node.lineno) if key is not None and node is not None else []:
        made = bind.value if len(bind.path) == 1 else None
        if isinstance(made, ast.Call) and view.names.qualify(made.func, home) == "deepspeed.initialize":
            yield made, bind.path[0]


def steps_with_engine(view: View, event: Event) -> bool:
    """Check whether a schedule is one that DeepSpeed gave back, or was given, and whose engine steps beside it."""
    if "deepspeed" not in view.frameworks:
        return False
    node, home = subject(event)
    calls = {call for call, at in of_engine(view, node, home) if at == SCHEDULE}
    asked = any(dotted(block.node) == dotted(node) or is_compared(block.node, node) for block in event.tests)
    calls = {call for call in calls if not asked or keyword(call, "lr_scheduler") is not None}
    calls |= {s.call for s in home.named("initialize") if handed(view, s, node)}
    for site in event.scope.named("step"):
        engine, there = given_as(event, site.receiver, site.scope)
        if any(call in calls and at == 0 for call, at in of_engine(view, engine, there)):
            mine = event.mark.site
            return mine is not None and not in_two_arms(mine, site)
    return False


def is_compared(test: ast.expr, node: ast.expr | None) -> bool:
    """Check whether a test asks whether there is such an object (`if scheduler is not None`)."""
    return isinstance(test, ast.Compare) and dotted(test.left) == dotted(node)


def handed(view: View, site: Site, node: ast.expr | None) -> bool:
    """Check whether DeepSpeed is handed a schedule under the very name."""
    full = view.full(site) == "deepspeed.initialize"
    return full and dotted(node) is not None and dotted(keyword(site.call, "lr_scheduler")) == dotted(node)


def by_hand(view: View) -> Iterator[Found]:
    """Looks at the rates that a loop sets by hand, as a function of a count of steps and of a length."""
    if "lr" not in view.module.text or "param_groups" not in view.module.text:
        return
    done: set[ast.expr] = set()
    for found in accumulations(view):
        scope, guard = found.step.scope, found.guard
        if guard is None:
            continue
        rare = counters(scope, guard)
        for call in rates(scope, found.training.loop):
            given = [*call.args, *(item.value for item in call.keywords)]
            if not any(dotted(value) in rare for value in given):
                continue
            for value in given:
                whole = [around for of, home, around in counted(view, value, scope) if view.kinds.is_loader(of, home)]
                origin = next(iter(view.origins.of(value, scope)), None)
                plain = whole and not any(
                    GROUPS.search(word) for around in whole for each in around for word in idents(each)
                )
                if plain and origin is not None and origin.scope.module is view.module and origin.node not in done:
                    done.add(origin.node)
                    yield Found(origin.node, BY_HAND)


def counters(scope: Scope, guard: Guard) -> set[str]:
    """Return the names that count up where a test comes out so, and nowhere else."""
    arm = (guard.test, guard.when)
    ups = {key: [bind.stmt for bind in binds if bind.how == "aug"] for key, binds in scope.binds.items()}
    return {
        key
        for key, stmts in ups.items()
        if stmts and all(arm in [(each.test, each.when) for each in guards(stmt, scope.module)] for stmt in stmts)
    }


def rates(scope: Scope, loop: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls whose result a loop gives the groups of an optimizer as their rate."""
    for stmt in scope.stmts:
        target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
        if isinstance(stmt, ast.Assign) and isinstance(target, ast.Subscript) and constant(target.slice) == "lr":
            binds = scope.binds.get(dotted(stmt.value) or "", [])
            values = (stmt.value, *(bind.value for bind in binds if inside(bind.stmt, loop, scope.module)))
            yield from (each for each in values if isinstance(each, ast.Call) and inside(stmt, loop, scope.module))


def is_arm(block: object) -> bool:
    return isinstance(block, ArmBlock)


def size_of_rank(size: ast.expr | None, batch: ast.expr) -> bool:
    """Check whether a loader of each rank takes batches of the very size that a length is divided by."""
    return size is not None and dotted(size) is not None and dotted(size) == dotted(batch)


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


def as_long(event: Event, horizon: ast.expr) -> bool:
    """Check whether the loop around a step runs for just as many turns, each of which is an epoch without batches."""
    loop = event.loops[-1].node
    return isinstance(loop, Loop) and last(horizon) in idents(header(loop))


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
        "steps, or the other way round, or on some ranks only; or its length counts other steps than those that it "
        "makes: batches where gradients are accumulated, one process's where Accelerate steps it for each, those of a "
        "loop around."
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
    note=(
        "A length is followed through products, quotients and arguments to the loader that it counts. A schedule that "
        "`engine.step()` of DeepSpeed steps is told where it is stepped by hand too. A rate that a loop sets by hand "
        "from a count of steps and a length is judged like a schedule's."
    ),
)
