"""LS037: a loop with different ends or lengths on different ranks."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import Loop, guards, inside, loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, dotted, idents, last, mentions, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, turn
from lockstep_lint.events.query import side
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

SOME = "only some ranks leave the loop here, and the others wait for them: let all ranks decide alike"
FLAG = "'{name}' is set on one rank alone, which then leaves without the others: broadcast it first"
SCORE = "each rank decides by the score of its own shard, so some leave the loop before others: reduce the score first"
TURNS = "'{name}' is set on one rank alone, so the others turn another number of times: broadcast it first"
# A test that depends on more names than this may depend on anything.
MAX_NAMES = 60
# Whatever may send a value of one rank to the others.
TELLS = Words(
    r"reduce|gather|broadcast(?!_param|_optim)|sync(?!_?(batch|bn))|barrier|send|recv|store|agree|any_rank|all_ranks",
    re.IGNORECASE,
)


def check(view: View) -> Iterator[Found]:
    """Find loops with a collective whose ends or lengths differ between ranks."""
    programs = [(run, waits) for run in runs(view) if (waits := waiting(view, run))]
    if not programs or view.hidden(TELLS):
        return
    found: dict[ast.AST, Found] = {}
    for run, waits in programs:
        for event in run.of("leave"):
            loop = event.loops[-1] if event.loops else None
            if loop in waits and loop.scope is event.scope and event.module is view.module:
                message = apart(view, run, event, loop)
                if message:
                    found.setdefault(event.node, Found(event.node, message))
        for loop in waits:
            node, scope = loop.node, loop.scope
            if not isinstance(node, Loop) or scope.module is not view.module or view.ranks.side(node, scope):
                continue  # under a test of the rank, the others have a loop of their own
            header = node.test if isinstance(node, ast.While) else node.iter
            name = set_by_one(view, node, header, scope)
            if name:
                found.setdefault(header, Found(header, TURNS.format(name=name)))
    yield from found.values()


def waiting(view: View, run: Run) -> dict[LoopBlock, None]:
    """Return the loops of a run with a collective or a gradient exchange."""
    wrapped = bool(view.wrappers.kinds(view.module) & {"ddp", "fsdp"} or {"deepspeed", "horovod"} & view.frameworks)
    exchanged = run.of("backward") if wrapped or view.ranks.programs.accelerated(view.module) else []
    found = {loop: None for event in exchanged for loop in event.loops}
    for event in run.of("collective"):
        found.update(dict.fromkeys(loop for loop in event.loops if not any(side(view, b) for b in event.within(loop))))
    return found


def apart(view: View, run: Run, event: Event, block: LoopBlock) -> str:
    """Explain why ranks leave a loop apart: only some exit, or each decides itself."""
    loop, scope = block.node, block.scope
    assert isinstance(loop, Loop)
    tests = [test for test in event.within(block) if isinstance(test, ArmBlock) and test.scope is scope]
    for test in tests:
        if side(view, test):
            return SOME
        name = own_flag(view, test.node, loop, scope)
        if name:
            return FLAG.format(name=name)
    if event.detail == "exit":
        return ""  # the end of a program by its own value is of an error
    stmts = slice_of([test.node for test in tests], loop, scope)
    sites = [site for site in scope.sites if any(site.stmt is stmt for stmt in stmts)]
    inner = [site for site in scope.sites if inside(site.stmt, loop, scope.module)]
    if any(TELLS.search(site.name) and not exchanges_gradients(view, site) for site in view.effects.below(inner)):
        return ""
    of_model = any(each.mark.site in sites for each in turn(run.events, block, "run"))
    return SCORE if of_model or own_score(view, stmts, sites, loop, scope) else ""


def exchanges_gradients(view: View, site: Site) -> bool:
    """Check whether a call is a collective of gradients, or only waits."""
    waits = site.name in ("barrier", "synchronize")
    return waits or (view.effects.is_collective(site) and ".grad" in ast.unparse(site.call))


def slice_of(tests: list[ast.expr], loop: Loop, scope: Scope) -> list[ast.stmt]:
    """Return the statements of a loop that decide its tests."""
    found: list[ast.stmt] = []
    queue, seen = [name for test in tests for name in names_in(test)], set[str]()
    while queue and len(seen) < MAX_NAMES:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        binds = [bind.stmt for bind in scope.binds.get(name, []) if inside(bind.stmt, loop, scope.module)]
        fed = [site.stmt for site in scope.sites if site.call.args and dotted(site.receiver) == name.split(".")[0]]
        for stmt in (*binds, *(stmt for stmt in fed if "." in name and inside(stmt, loop, scope.module))):
            if not any(stmt is each for each in found):
                found.append(stmt)
                queue += names_in(stmt.iter if isinstance(stmt, ast.For | ast.AsyncFor) else stmt)
                queue += [each for guard in guards(stmt, scope.module, loop) for each in names_in(guard.test)]
    return found


def names_in(node: ast.AST) -> list[str]:
    """Return the names and attributes in an expression or a statement, `a.b` with `a`."""
    return [key for item in walk(node) if isinstance(item, ast.Name | ast.Attribute) and (key := dotted(item))]


def own_score(view: View, stmts: list[ast.stmt], sites: list[Site], loop: Loop, scope: Scope) -> bool:
    """Check whether a decision uses a score of the rank's own shard."""
    for stmt in (s for s in stmts if isinstance(s, ast.Assign | ast.AugAssign) and not counts(s, loop, scope)):
        nest = loops(stmt, scope.module)
        within = nest[: nest.index(loop)] if loop in nest else []
        if any(isinstance(each, ast.For) and view.kinds.is_shard(each.iter, scope) for each in within):
            return True
    functions = [function for site in sites for function in view.calls.runs(site)]
    return any(
        isinstance(stmt, ast.For) and view.kinds.is_shard(stmt.iter, function) and gives_back(stmt, function)
        for function in functions
        for stmt in function.stmts
    )


def counts(stmt: ast.Assign | ast.AugAssign, loop: Loop, scope: Scope) -> bool:
    """Check whether a statement only counts turns, batches or samples, alike on all ranks."""
    calls = [node for node in walk(stmt.value) if isinstance(node, ast.Call)]
    if calls:
        return all(last(call) in ("len", "size", "int", "min", "max") for call in calls)
    own = {bind.key for bind in scope.bound(stmt)}
    binds = [bind for name in names_in(stmt.value) if name not in own for bind in scope.binds.get(name, [])]
    inner = [bind for bind in binds if inside(bind.stmt, loop, scope.module)]
    return all(isinstance(bind.value, ast.Call) and last(bind.value) in ("range", "enumerate") for bind in inner)


def gives_back(loop: ast.For, function: Scope) -> bool:
    """Check whether a function returns what a loop of it has computed."""
    bound = {key for key, binds in function.binds.items() for b in binds if inside(b.stmt, loop, function.module)}
    return any(bound & set(idents(value)) for value in function.returns())


def own_flag(view: View, test: ast.expr, loop: Loop, scope: Scope) -> str:
    """Return a name in a test that one rank alone sets in the loop."""
    for node in walk(test):
        key = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else None
        stmts = [b.stmt for b in scope.binds.get(key or "", []) if inside(b.stmt, loop, scope.module)]
        lone = [stmt for stmt in stmts if view.ranks.side(stmt, scope) == 1]
        rest = [stmt for stmt in stmts if stmt not in lone and not sets_constant(stmt)]
        if isinstance(node, ast.Attribute) and not stmts and set_alone(view, node, scope):
            return key or node.attr
        if key and lone and not rest and not is_sent(scope, key.split(".")[0], lone[-1], test.lineno):
            return key
    return ""


def set_alone(view: View, node: ast.Attribute, scope: Scope) -> bool:
    """Check whether one rank alone sets an object's attribute, in the methods of its class."""
    owner = scope.owner if dotted(node.value) == "self" else view.calls.class_of(node.value, scope)
    methods = [m for m in owner.defs.values() if m.name != "__init__"] if owner is not None else []
    sets = [(bind.stmt, method) for method in methods for bind in method.binds.get(f"self.{node.attr}", [])]
    if not sets or any(view.ranks.side(stmt, method) != 1 for stmt, method in sets):
        return False
    return not any(TELLS.search(site.name) for _, method in sets for site in method.sites)


def sets_constant(stmt: ast.stmt) -> bool:
    """Check whether a statement only gives a name its first value (`stop = False`)."""
    return isinstance(stmt, ast.Assign | ast.AnnAssign) and isinstance(stmt.value, ast.Constant)


def is_sent(scope: Scope, name: str, start: ast.stmt, end: int) -> bool:
    """Check whether a call from a statement to a line may send a value to all ranks."""
    return any(start.lineno <= site.line <= end and TELLS.search(site.name) for site in scope.sites) or any(
        TELLS.search(last(b.value)) for b in scope.binds.get(name, []) if isinstance(b.value, ast.Call)
    )


def set_by_one(view: View, loop: Loop, header: ast.expr, scope: Scope) -> str:
    """Return the name in a loop's header that one rank alone has set."""
    if isinstance(header, ast.Call) and last(header) not in ("range", "trange"):
        return ""
    for name in dict.fromkeys(idents(header)):
        binds = [b for b in scope.binds.get(name, []) if b.stmt.lineno < loop.lineno]
        sides = {b: view.ranks.side(b.stmt, scope) for b in binds}
        lone = [b for b in binds if sides[b] == 1 and not (isinstance(b.value, ast.Call) and mentions(b.value, name))]
        starts = [b for b in binds if lone and sets_constant(b.stmt) and b.stmt.lineno < lone[0].stmt.lineno]
        rest = [b for b in binds if sides[b] == 0 and b not in starts]
        if lone and not rest and -1 not in sides.values() and not is_sent(scope, name, lone[0].stmt, loop.lineno):
            return name
    return ""


RULE = Rule("LS037", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS, placed=True)
