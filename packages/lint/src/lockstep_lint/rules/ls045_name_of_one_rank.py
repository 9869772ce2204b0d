"""LS045: a name that only one rank defines, and all ranks use."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import above, guards
from lockstep_lint.analysis.flow import Fact, Read, Way, gaps, may_be_none, nones, undecided
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, idents, is_none, own_expressions, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.marks import operands
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

# What is on where rank 0 is, in most scripts: `verbose = args.verbose * (rank == 0)`.
VERBOSE = Words(r"^(self_|args_)?verb(ose|osity)?$")
MAX_CALLERS = 20
# What wandb refuses where there is no run.
TRACKS = Words(r"wandb|w_and_b|track|log|report|writer|main|master|rank", re.IGNORECASE)
NEEDS_RUN = ("log", "save", "watch", "alert", "log_artifact")
COMPREHENSION = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def check(view: View) -> Iterator[Found]:
    """Looks for names that only the main rank gives a value, or more than None, and that all ranks use; and for calls
    of a tracker whose run only one rank has.
    """
    yield from without_run(view)
    if "rank" not in view.module.text and "main_process" not in view.module.text:
        return
    for scope in view.scopes:
        if scope.kind == "class":
            continue
        for read in gaps(scope, view.calls):
            if not read.never and left_out(view, read, scope):
                yield Found(read.node, f"'{read.name}' is defined on rank 0 alone: the others stop here")
        for read in nones(scope, emptied(view, scope), view.calls, absent(view, scope)):
            if left_out(view, read, scope):
                yield Found(read.node, f"'{read.name}' is None on all ranks but 0: these stop here")
    yield from shared(view)


def without_run(view: View) -> Iterator[Found]:
    """Yield the calls that need a run of wandb, on ranks that never begin one."""
    if "wandb" not in view.module.text or view.effects.mentioned(view.module, "WANDB_", "wandb.log ="):
        return
    sites = [site for site in view.sites(*NEEDS_RUN) if view.full(site) == f"wandb.{site.name}"]
    starts = (init for member in view.project.family(view.module) for init in member.sites("init"))
    begun = {flag for init in starts for flag in flags(init)}
    for site in sites if sites and view.ranks.owns_run(view.module) else ():
        asked = tested(view, site.stmt, site.scope) or view.ranks.chosen(site) or flags(site) - begun
        caught = any(isinstance(node, ast.Try) for node, _ in above(site.stmt, site.module))
        if not asked and not caught and view.ranks.everywhere(site, view.module):
            yield Found(site.call, f"wandb.{site.name} fails where no run was begun: wandb.init is on rank 0 alone")


def flags(site: Site) -> set[str]:
    """Return the tests around a call that may say whether something is tracked, as text."""
    parts = (part for guard in guards(site.stmt, site.module) for part in operands(guard.test))
    return {ast.unparse(part) for part in parts if any(TRACKS.search(name) for name in idents(part))}


def left_out(view: View, read: Read, scope: Scope) -> bool:
    """Check whether the other ranks come to a read by a way that gives its name no value."""
    stmt, module = read.stmt, scope.module
    if not any(of_others(view, way, read.name, scope) for way in read.ways):
        return False
    if view.ranks.reserved(scope) or view.ranks.side(stmt, scope) or view.ranks.single(stmt, scope):
        return False
    return not any(isinstance(node, ast.Try) for node, _ in above(stmt, module))


def emptied(view: View, scope: Scope) -> frozenset[str]:
    """Return the names that are None, in one place, and get a value under a test of the rank."""
    found: set[str] = set()
    for name, binds in scope.binds.items():
        if "." not in name and any(bind.value is not None and may_be_none(bind.value) for bind in binds):
            chosen = any(isinstance(bind.value, ast.IfExp) for bind in binds)
            if chosen or any(view.ranks.side(bind.stmt, scope) for bind in binds):
                found.add(name)
    return frozenset(found - scope.globals)


def of_others(view: View, way: Way, name: str, scope: Scope) -> bool:
    """Check whether only the other ranks go a way, and a test of the rank is what leads past the value."""
    if any(fact.node is None or fact.scope is not scope for fact in way):
        return False
    sides = [side_of(view, fact, way) for fact in way]
    causes = [side for fact, side in zip(way, sides, strict=True) if fact.cause]
    if 1 in sides or len(causes) != 1 or causes[0] >= 0:
        return False
    rest = [fact for fact, side in zip(way, sides, strict=True) if not side and fact.node is not None]
    return not any(hides(view, fact, scope) for fact in rest)


def side_of(view: View, fact: Fact, way: Way) -> int:
    """Return the ranks for which a test comes out so; a parameter is None where the calls of these ranks say so."""
    assert fact.node is not None
    found = view.ranks.tests.test(fact.node, fact.scope, fact.holds)
    name, _, rest = fact.key.partition(" ")
    if not found and rest == "is None" and name in absent(view, fact.scope):
        return -1 if fact.when else 1
    if not found and isinstance(fact.node, ast.BoolOp):  # `not (rank == 0 and video)`, where `video` holds
        left = undecided(fact, way)
        return view.ranks.tests.test(left[0], fact.scope, fact.holds) if len(left) == 1 else 0
    return found


def hides(view: View, fact: Fact, scope: Scope) -> bool:
    """Whether a test may tell the ranks too: it asks for None, for output, for one process, or for a name that only
    some ranks give a value.
    """
    assert fact.node is not None
    if fact.key.endswith(" is None") or view.ranks.tests.many(fact.node, fact.scope, fact.holds) == -1:
        return True
    names = {*idents(fact.node)}
    given = (bind for name in names for bind in scope.binds.get(name, ()))
    return any(map(VERBOSE.search, names)) or any(view.ranks.side(bind.stmt, scope) for bind in given)


@kept
def absent(view: View, scope: Scope) -> dict[str, tuple[Way, ...]]:
    """Return the parameters for which the calls of the other ranks, and only these, give None."""
    found: dict[str, tuple[Way, ...]] = {}
    callers = view.calls.callers(scope)[:MAX_CALLERS] if scope.kind == "function" else []
    for name in scope.params if len(callers) > 1 else ():
        given = [(site, passed(site, scope, name)) for site in callers]
        none = [site for site, value in given if value is not None and is_none(value)]
        others = [site for site in none if view.ranks.side(site.stmt, site.scope) == -1]
        if none and len(others) == len(none) < len(given) and all(value is not None for _, value in given):
            test = ast.Compare(ast.Name(name, ast.Load()), [ast.Is()], [ast.Constant(None)])
            found[name] = ((Fact(f"{name} is None", True, test, scope, cause=True),),)
    return found


def shared(view: View) -> Iterator[Found]:
    """Yield the reads, in functions of all ranks, of names of the file that only the main rank gives a value."""
    top = view.module.top
    inner = {name for scope in view.scopes if scope.kind == "function" for name in scope.globals}
    for name in sorted(inner & {*top.binds} - {*top.defs} - {*view.module.imports}):
        homes = [(bind, home_of(bind.stmt, name, view)) for bind in top.binds[name]]
        if all(home is not None and view.ranks.side(bind.stmt, home) == 1 for bind, home in homes):
            blocks: set[object] = set()
            for stmt, scope in view.module.named.get(name, ()):
                local = scope.kind != "function" or name in scope.globals or name in scope.binds or name in scope.params
                if local or view.ranks.reserved(scope) or tested(view, stmt, scope):
                    continue
                node = next(names(view, stmt, name, scope), None)
                block = view.module.up.get(stmt, scope)
                if node is not None and block not in blocks:
                    yield Found(node, f"'{name}' is defined on rank 0 alone: the others stop here")
                    blocks.add(block)


def home_of(stmt: ast.stmt, name: str, view: View) -> Scope | None:
    """Return the function that a statement stands in, if it says that a name is the file's."""
    return next((scope for scope in view.scopes if name in scope.globals and stmt in scope.stmts), None)


def tested(view: View, stmt: ast.stmt, scope: Scope) -> bool:
    """Whether only some ranks come to a statement, or there is but one process there, or a value decides that."""
    there = any(
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Is | ast.IsNot)
        and isinstance(test.left, ast.Name | ast.Attribute)
        for guard in guards(stmt, scope.module)
        for test in operands(guard.test)
    )  # `if scores is not None`, which only rank 0 may have got
    there = there or any(VERBOSE.search(name) for guard in guards(stmt, scope.module) for name in idents(guard.test))
    return there or bool(view.ranks.side(stmt, scope)) or view.ranks.single(stmt, scope)


def names(view: View, stmt: ast.stmt, name: str, scope: Scope) -> Iterator[ast.Name]:
    """The reads of a name in the parts of a statement that a test of the rank in it does not keep to some."""
    stack: list[ast.AST] = [*own_expressions(stmt)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.IfExp) and view.ranks.tests.test(node.test, scope):
            continue
        if isinstance(node, ast.BoolOp) and any(view.ranks.tests.test(value, scope) for value in node.values):
            continue
        if isinstance(node, ast.Lambda | COMPREHENSION) and any(
            isinstance(inner, ast.Name) and inner.id == name and is_store(inner) for inner in walk(node)
        ):
            continue
        if isinstance(node, ast.Name) and node.id == name and not is_store(node):
            yield node
        stack.extend(ast.iter_child_nodes(node))


def is_store(node: ast.Name) -> bool:
    """Whether a name is given a value, or taken away, rather than read."""
    return not isinstance(node.ctx, ast.Load)


RULE = Rule(
    code="LS045",
    name="name of one rank",
    what=(
        "A name gets its only values under a test of the rank, and is read where all ranks come; or `wandb.init` is "
        "called on rank 0 alone, and `wandb.log` on all."
    ),
    why="The other ranks stop with an error, and the first one waits for them in its next collective.",
    bad="""
import torch.distributed as dist

def main(rank, losses):
    dist.init_process_group("nccl")
    if rank == 0:
        best = float("inf")
    for loss in losses:
        if loss < best:
            loss.backward()
    dist.destroy_process_group()
""",
    good="""
import torch.distributed as dist

def main(rank, losses):
    dist.init_process_group("nccl")
    if rank == 0:
        best = float("inf")
    for loss in losses:
        loss.backward()
        if rank == 0 and loss < best:
            print("better")
    dist.destroy_process_group()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Give the name a value on every rank, or use it under the same test",
)
