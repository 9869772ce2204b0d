"""LS045: a name that only one rank defines, and all ranks use."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import above, guards
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.nodes import Words, idents, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.marks import operands
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

# What is on where rank 0 is, in most scripts: `verbose = args.verbose * (rank == 0)`.
VERBOSE = Words(r"^(self_|args_)?verb(ose|osity)?$")
# What wandb refuses where there is no run.
TRACKS = Words(r"wandb|w_and_b|track|log|report|writer|main|master|rank", re.IGNORECASE)
NEEDS_RUN = ("log", "save", "watch", "alert", "log_artifact")
COMPREHENSION = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def check(view: View) -> Iterator[Found]:
    """Looks for names whose every value is given under a test of the rank, and that are read outside of one; and for
    calls of a tracker whose run only one rank has.
    """
    yield from without_run(view)
    if "rank" not in view.module.text and "main_process" not in view.module.text:
        return
    for scope in view.scopes:
        for name, binds in scope.binds.items() if scope.kind != "class" else ():
            if "." in name or name in scope.params or name in scope.globals or name in scope.module.imports:
                continue
            if own(view, binds, scope):
                read = next(reads(view, name, binds, scope), None)
                if read is not None:
                    yield Found(read, f"'{name}' is defined on rank 0 alone: the others stop here")


def without_run(view: View) -> Iterator[Found]:
    """The calls that need a run of wandb, on ranks that never begin one."""
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
    """The tests around a call that may say whether something is tracked, as text."""
    parts = (part for guard in guards(site.stmt, site.module) for part in operands(guard.test))
    return {ast.unparse(part) for part in parts if any(TRACKS.search(name) for name in idents(part))}


def own(view: View, binds: list[Bind], scope: Scope) -> bool:
    """Whether only the main rank gives a name any of its values."""
    return all(
        bind.how in ("assign", "with", "aug")
        and view.ranks.side(bind.stmt, scope) == 1
        and not any(isinstance(node, ast.Try) for node, _ in above(bind.stmt, scope.module))
        for bind in binds
    )


def reads(view: View, name: str, binds: list[Bind], scope: Scope) -> Iterator[ast.Name]:
    """The places after its first value where all ranks read a name."""
    first = min(bind.stmt.lineno for bind in binds)
    if view.ranks.reserved(scope):
        return
    for stmt, home in scope.module.named.get(name, []):
        if home is not scope or stmt.lineno <= first or tested(view, stmt, scope):
            continue
        if any(isinstance(node, ast.Try) for node, _ in above(stmt, scope.module)):
            continue
        yield from names(view, stmt, name, scope)


def tested(view: View, stmt: ast.stmt, scope: Scope) -> bool:
    """Whether only some ranks come to a statement, or there is but one process there, or a value decides that."""
    there = any(
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot)
        for guard in guards(stmt, scope.module)
        for test in operands(guard.test)
    )  # `if scores is not None`, which only rank 0 may have got
    there = there or any(VERBOSE.search(name) for guard in guards(stmt, scope.module) for name in idents(guard.test))
    return there or bool(view.ranks.side(stmt, scope)) or view.ranks.single(stmt, scope)


def names(view: View, stmt: ast.stmt, name: str, scope: Scope) -> Iterator[ast.Name]:
    """The reads of a name in the parts of a statement that a test of the rank in it does not keep to some."""
    stack: list[ast.AST] = [*own_parts(stmt)]
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


def own_parts(stmt: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in it."""
    for child in ast.iter_child_nodes(stmt):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


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
