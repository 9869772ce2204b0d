"""LS037: a loop that the ranks leave at different times, or run a different number of times."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep_lint.analysis.budget import WORK
from lockstep_lint.analysis.context import Loop, guards, inside, loops
from lockstep_lint.analysis.engines import shared_out
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, element_of, idents, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, turn
from lockstep_lint.events.query import side, sides
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]


SKIPPED = "some ranks alone go on to the next turn here, and the others come to line {line}: let all ranks decide alike"
# A test that goes back to more names than this decides on everything.
MAX_NAMES = 60

# Where a program keeps its options, which are the same on all ranks.
OPTIONS = Words(r"^(self\.)?(args?|opts?|cfg|conf(ig)?|hparams|flags|params)\.", re.IGNORECASE)


@dataclass
class Slice:
    """The part of a loop that decides a test: its statements, the calls in them, the names that they bind."""

    stmts: list[ast.stmt] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


def made_of(tests: list[ast.expr], loop: Loop, scope: Scope, fed: bool = True) -> Slice:
    """Collect what a loop computes for some of its tests: their values, and the tests around those.

    With `fed`, also the calls that give an object what the tests ask it for.
    """
    found = Slice()
    asked = {name for test in tests for name in _names(test)}
    queue = list(asked)
    sites = [site for site in scope.sites if inside(site.stmt, loop, scope.module)]
    while queue and len(found.names) < MAX_NAMES:
        name = queue.pop()
        if name in found.names:
            continue
        found.names.add(name)
        for stmt in (*_bound(name, loop, scope), *(_fed(name, sites) if fed and name in asked else ())):
            WORK.spend(4)
            if not any(stmt is seen for seen in found.stmts):
                found.stmts.append(stmt)
                queue.extend(_names(stmt) if not isinstance(stmt, ast.For | ast.AsyncFor) else _names(stmt.iter))
                queue.extend(name for guard in guards(stmt, scope.module, loop) for name in _names(guard.test))
    found.sites = [site for site in sites if any(site.stmt is stmt for stmt in found.stmts)]
    return found


def _bound(name: str, loop: Loop, scope: Scope) -> Iterator[ast.stmt]:
    """The statements of a loop that give a name its value."""
    return (bind.stmt for bind in scope.binds.get(name, []) if inside(bind.stmt, loop, scope.module))


def _fed(name: str, sites: list[Site]) -> Iterator[ast.stmt]:
    """The calls that give an object something to decide on: `stopper(loss)` for a test of `stopper.stop`.

    Only of the tests' own objects: whatever else is called with arguments, a model say, does not decide by them.
    """
    for site in sites:
        receiver = site.receiver if site.receiver is not None else site.call.func
        if site.call.args and dotted(receiver) in (name, name.split(".")[0]):
            yield site.stmt


def counts(stmt: ast.stmt, loop: Loop, scope: Scope) -> bool:
    """Whether a statement of a loop only counts (`step += 1`, `step = epoch * len(loader) + i`), alike on all ranks."""
    given = scope.bound(stmt)
    seen: set[str] = set()  # of all ways back: one that is no count is enough
    return bool(given) and all(_counting(bind, loop, scope, seen) for bind in given)


def _counting(bind: Bind, loop: Loop, scope: Scope, seen: set[str]) -> bool:
    """Whether a binding gives its name a number of turns."""
    value = bind.value
    if bind.how == "for":
        over = last(value) if isinstance(value, ast.Call) else ""
        return over in ("range", "trange") or (over == "enumerate" and bind.path[:1] == (0,))
    given = list(element_of(value, bind.path))
    return bool(given) and all(_is_count(each, loop, scope, seen) for each in given)


def _is_count(value: ast.expr, loop: Loop, scope: Scope, seen: set[str]) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_count(value.left, loop, scope, seen) and _is_count(value.right, loop, scope, seen)
    if isinstance(value, ast.Call):
        named = isinstance(value.func, ast.Name) and value.func.id
        return (
            named == "len"
            or is_batch_size(value)
            or (named in ("int", "min", "max") and all(_is_count(v, loop, scope, seen) for v in value.args))
        )
    key = dotted(value)
    if key is None:
        return isinstance(constant(value), int) or is_batch_size(value)
    inside_loop = [b for b in scope.binds.get(key, []) if inside(b.stmt, loop, scope.module) or b.stmt is loop]
    if key in seen or not inside_loop:
        return key in seen or "." not in key or OPTIONS.search(key)
    seen.add(key)
    return all(_counting(bind, loop, scope, seen) for bind in inside_loop)


def is_batch_size(value: ast.expr) -> bool:
    """Whether a value is the size of a batch, which is cut alike on all ranks (`x.size(0)`, `x.shape[0]`)."""
    if isinstance(value, ast.Call):
        first = next(iter(value.args), None)
        return isinstance(value.func, ast.Attribute) and value.func.attr == "size" and constant(first) == 0
    shape = value.value if isinstance(value, ast.Subscript) and constant(value.slice) == 0 else None
    return isinstance(shape, ast.Attribute) and shape.attr == "shape"


def _names(node: ast.AST) -> Iterator[str]:
    """The names and attributes that are read in an expression or a statement, `a.b` besides `a`."""
    for item in walk(node):
        if isinstance(item, ast.Name | ast.Attribute):
            key = dotted(item)
            if key is not None:
                yield key


# Whatever may tell all ranks what one of them has found.
TELLS = Words(
    r"reduce|gather|broadcast(?!_param|_optim)|sync(?!_?(batch|bn))|barrier|send|recv|store|agree|any_rank|all_ranks",
    re.IGNORECASE,
)
# The same without what only waits.
EXCHANGES = Words(
    r"reduce|gather|broadcast(?!_param|_optim)|sync(?!hroni|_?(batch|bn))|send|recv|(^|_)store|agree|any_rank|all_ranks",
    re.IGNORECASE,
)


def check(view: View) -> Iterator[Found]:
    """Looks at the loops in which ranks wait for each other: who leaves them, and who says how often they turn."""
    programs = [(run, loops) for run in runs(view) if (loops := waiting(view, run))]
    if not programs or view.hidden(TELLS):
        return
    found: dict[ast.AST, Found] = {}
    for run, loops in programs:
        skips = {loop: list(lone_continues(view, run, loop)) for loop in loops}
        for event in run.of("leave"):
            loop = event.loops[-1] if event.loops else None
            if loop in loops and not skips[loop] and loop.scope is event.scope and event.module is view.module:
                message = apart(view, run, event, loop)
                if message:
                    found.setdefault(event.node, Found(event.node, message))
        for loop in loops:
            node, scope = loop.node, loop.scope
            if not isinstance(node, Loop) or scope.module is not view.module or view.ranks.side(node, scope):
                continue  # under a test of the rank, the others have a loop of their own
            for one in (*counted(view, node, scope), *skips[loop]):
                found.setdefault(one.node, one)
    yield from found.values()


def waiting(view: View, run: Run) -> dict[LoopBlock, None]:
    """The loops of a run in which ranks wait for each other: in a collective that all of them come to, or as they
    exchange gradients.
    """
    wrapped = bool(view.wrappers.kinds(view.module) & {"ddp", "fsdp"} or {"deepspeed", "horovod"} & view.frameworks)
    exchanged = run.of("backward") if wrapped or view.ranks.programs.accelerated(view.module) else []
    found = {loop: None for event in exchanged for loop in event.loops}
    for event in run.of("collective"):
        found.update(dict.fromkeys(loop for loop in event.loops if not any(side(view, b) for b in event.within(loop))))
    return found


def lone_continues(view: View, run: Run, block: LoopBlock) -> Iterator[Found]:
    """Yield the `continue` of some ranks alone, before what all others come to in the same turn."""
    loop, scope = block.node, block.scope
    if not isinstance(loop, Loop) or scope.module is not view.module:
        return
    later = [event for event in turn(run.events, block, "collective", "backward", "leave") if event.scope is scope]
    if not later or any(event.kind == "collective" and sides(view, event) for event in later):
        return  # the ranks that go on may come to it where they do
    for stmt in scope.stmts:
        if not isinstance(stmt, ast.Continue) or loops(stmt, scope.module)[:1] != [loop]:
            continue
        told = view.ranks.side(stmt, scope) and not view.ranks.single(stmt, scope)
        missed = (event for event in later if event.line > stmt.lineno and not sides(view, event))
        event = next((event for event in missed if nests(event, loop)), None) if told else None
        if event is not None:
            yield Found(stmt, SKIPPED.format(line=event.line))


def nests(event: Event, loop: Loop) -> bool:
    """Check whether an event's statement stands in a loop of its own function."""
    return inside(event.mark.stmt, loop, event.module)


def apart(view: View, run: Run, event: Event, block: LoopBlock) -> str:
    """Explain why ranks leave a loop apart: only some reach the exit, or each decides by itself."""
    loop, scope = block.node, block.scope
    assert isinstance(loop, Loop)
    tests = [test for test in event.within(block) if isinstance(test, ArmBlock) and test.scope is scope]
    for test in tests:
        if side(view, test):
            return "only some ranks leave the loop here, and the others wait for them: let all ranks decide alike"
        name = own_flag(view, test.node, loop, scope)
        if name:
            return f"'{name}' is set on one rank alone, which then leaves without the others: broadcast it first"
    if event.detail == "exit":
        return ""  # an end by an own value is of an error, for which the others are ended too
    decided = made_of([test.node for test in tests], loop, scope)
    if exchanged(view, decided, loop, scope):
        return ""
    values = made_of([test.node for test in tests], loop, scope, fed=False).sites
    models = any(each.mark.site in values for each in turn(run.events, block, "run"))
    if models or own_score(view, decided, loop, scope):
        return (
            "each rank decides by the score of its own shard, so some leave the loop before others: reduce the score "
            "over all ranks first"
        )
    return ""


def exchanged(view: View, decided: Slice, loop: Loop, scope: Scope) -> bool:
    """Whether ranks may tell each other what a decision is made of: by any call but a collective of something else."""
    near = [site for site in scope.sites if inside(site.stmt, loop, scope.module)]
    return any(
        EXCHANGES.search(site.name) and not (site.scope is scope and of_other(view, site, decided))
        for site in view.effects.below(near)
    )


def of_other(view: View, site: Site, decided: Slice) -> bool:
    """Whether a call is a collective of torch that is given nothing of a decision (the gradients, say)."""
    given = {name for each in site.call.args[:1] for name in _names(each)}
    return view.effects.is_collective(site) and site not in decided.sites and not given & decided.names


def own_score(view: View, decided: Slice, loop: Loop, scope: Scope) -> bool:
    """Whether a decision comes from a rank's own shard of the data."""
    for stmt in (stmt for stmt in decided.stmts if not counts(stmt, loop, scope)):
        nest = loops(stmt, scope.module)
        inner = nest[: nest.index(loop)] if loop in nest else []
        if any(isinstance(each, ast.For) and is_part(view, each.iter, scope) for each in inner):
            return True
    return any(
        isinstance(stmt, ast.For) and is_part(view, stmt.iter, function) and gives_back(stmt, function)
        for site in decided.sites
        for function in view.calls.runs(site)
        for stmt in function.stmts
    )


def is_part(view: View, header: ast.expr, scope: Scope) -> bool:
    """Whether a loop's header runs over a rank's own part of the data."""
    return view.kinds.is_shard(header, scope) or shared_out(view, header, scope)


def gives_back(loop: ast.For, function: Scope) -> bool:
    """Whether a function returns what a loop of it has computed."""
    bound = {key for key, binds in function.binds.items() for b in binds if inside(b.stmt, loop, function.module)}
    return any(bound & set(idents(value)) for value in function.returns())


def own_flag(view: View, test: ast.expr, loop: Loop, scope: Scope) -> str:
    """A name in a test whose value in the loop comes from one rank only, with nothing that tells the others."""
    for node in walk(test):
        key = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else None
        if key is None:
            continue
        root = key.split(".")[0]
        binds = [b for b in scope.binds.get(key, []) if inside(b.stmt, loop, scope.module)]
        sets = [(b.stmt, view.ranks.side(b.stmt, scope)) for b in binds]
        if not sets and isinstance(node, ast.Attribute) and set_alone(view, node, scope):
            return key
        if key != root:  # an object that one rank alone feeds: `if rank == 0: stopper(loss)`, then `if stopper.stop`
            feeding = [s for s in scope.sites if inside(s.stmt, loop, scope.module) and feeds(s, root)]
            sets += [(s.stmt, view.ranks.side(s.stmt, scope)) for s in feeding]
        lone = [stmt for stmt, side in sets if side == 1]
        shared = [stmt for stmt, side in sets if side != 1 and not constant_start(stmt)]
        if lone and not shared and not shared_between(scope, root, lone[-1].lineno, test.lineno):
            return key
    return ""


def set_alone(view: View, node: ast.Attribute, scope: Scope) -> bool:
    """Whether an object's attribute is set in its class's methods, in one of them by one rank alone and in no other."""
    root = dotted(node.value)
    owner = scope.owner if root == "self" else view.calls.class_of(node.value, scope)
    methods = (
        [m for each in (owner, *view.names.parents(owner)) for m in each.defs.values()] if owner is not None else []
    )
    binds = [(bind, method) for method in methods for bind in method.binds.get(f"self.{node.attr}", [])]
    sets = [(bind.stmt, method) for bind, method in binds if not begins(bind, method)]
    if not sets or any(view.ranks.side(stmt, method) != 1 for stmt, method in sets):
        return False
    return not any(TELLS.search(site.name) for stmt, method in sets for site in method.sites if site.line > stmt.lineno)


def begins(bind: Bind, method: Scope) -> bool:
    """Whether a binding only gives an attribute its first value, or takes a flag back."""
    given = list(element_of(bind.value, bind.path))
    return all(isinstance(each, ast.Constant) and (method.name == "__init__" or not each.value) for each in given)


def feeds(site: Site, root: str) -> bool:
    """Whether a call gives an object something to decide on."""
    func = site.call.func
    named = isinstance(func, ast.Name) and func.id == root
    method = isinstance(func, ast.Attribute) and dotted(func.value) == root
    return bool(site.call.args) and (named or method)


def constant_start(stmt: ast.stmt) -> bool:
    """Whether a statement only gives a name its first value (`stop = False`)."""
    return isinstance(stmt, ast.Assign | ast.AnnAssign) and isinstance(stmt.value, ast.Constant)


def shared_between(scope: Scope, name: str, start: int, end: int) -> bool:
    """Whether something between two lines may tell a value to all ranks."""
    return any(start <= site.line <= end and TELLS.search(site.name) for site in scope.sites) or any(
        TELLS.search(last(b.value)) for b in scope.binds.get(name, []) if isinstance(b.value, ast.Call)
    )


def counted(view: View, loop: Loop, scope: Scope) -> Iterator[Found]:
    """A number of turns that one rank alone has set."""
    header = loop.test if isinstance(loop, ast.While) else loop.iter
    if isinstance(header, ast.Call) and last(header) not in ("range", "trange"):
        return
    for name in dict.fromkeys(idents(header)):
        binds = [b for b in scope.binds.get(name, []) if b.stmt.lineno < loop.lineno]
        sides = [view.ranks.side(b.stmt, scope) for b in binds]
        if 1 not in sides or -1 in sides:
            continue
        if any(side == 1 and wraps(name, b.value) for b, side in zip(binds, sides, strict=True)):
            continue
        rest = [b.stmt for b, side in zip(binds, sides, strict=True) if side == 0]
        lone = next(b.stmt for b, side in zip(binds, sides, strict=True) if side == 1)
        if all(constant_start(stmt) and stmt.lineno < lone.lineno for stmt in rest) and not shared_between(
            scope, name, lone.lineno, loop.lineno
        ):
            yield Found(
                header,
                f"'{name}' is set on one rank alone, so the others turn another number of times: broadcast it first",
            )
            return


def wraps(name: str, value: ast.expr | None) -> bool:
    """Whether a name is given what it stood for already, within something else (`loader = tqdm(loader)`)."""
    return isinstance(value, ast.Call) and any(isinstance(n, ast.Name) and n.id == name for n in walk(value))


RULE = Rule(
    code="LS037",
    name="ranks leave a loop apart",
    what=(
        "A loop in which the ranks wait for each other is left by some ranks only (early stopping on one rank, or on "
        "each rank by the score of its own shard), or turns as often as one rank alone has set."
    ),
    why=(
        "The ranks that go on wait in their next collective for those that have left, until the timeout ends the job. "
        "What one rank decides must be told to all before they act on it."
    ),
    bad="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, optimizer, criterion, evaluate, rank, local_rank):
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    best, bad, stop = float("inf"), 0, False
    for epoch in range(100):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x.to(local_rank)), y.to(local_rank)).backward()
            optimizer.step()
        if rank == 0:
            score = evaluate(model.module)
            bad = 0 if score < best else bad + 1
            if bad > 5:
                stop = True
        if stop:
            break
""",
    good="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, optimizer, criterion, evaluate, rank, local_rank):
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    stop = torch.zeros((), device=local_rank)
    for epoch in range(100):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x.to(local_rank)), y.to(local_rank)).backward()
            optimizer.step()
        if rank == 0 and evaluate(model.module) < 0.1:
            stop += 1
        dist.broadcast(stop, 0)
        if stop > 0:
            break
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Broadcast the decision, or reduce what it is made from, before any rank acts on it",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"}),
)
