"""LS043: data that each rank shuffles or splits unseeded before sharding."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.kinds import EVALUATION, divides
from lockstep_lint.analysis.nodes import dotted, mentions, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event
from lockstep_lint.events.query import alone, sides
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

MESSAGE = "each rank shuffles in its own order before the data is divided: samples repeat and are left out; give a seed"
SPLIT = "each rank draws a split of its own: ranks train on what others test on; give a seed"


def check(view: View) -> Iterator[Found]:
    """Find unseeded shuffles and splits of data that is sharded afterwards."""
    if not view.distributed and "accelerate" not in view.frameworks:
        return
    for run in runs(view):
        for event in run.of("shuffle"):
            site = event.mark.site
            if event.module is not view.module or site is None or sides(view, event) or alone(view, event):
                continue
            split = event.detail.endswith("split") or holds_out(event)
            started = not split or view.ranks.several(site.stmt, site.scope) or view.ranks.everywhere(site, view.module)
            if started and is_unseeded(run, event) and (holds_out(event) or is_divided(view, event)):
                yield Found(event.node, SPLIT if split else MESSAGE)


def is_unseeded(run: Run, event: Event) -> bool:
    """Check whether nothing before makes the random numbers of all ranks alike."""
    library = event.detail.split()[0]
    return not any(seed.detail in (library, "all") for seed in run.of("seed") if seed.place < event.place)


def holds_out(event: Event) -> bool:
    """Check whether a shuffled value is split into training and held-out data (`data[:n]`, `data[n:]`)."""
    stmt, scope = event.mark.stmt, event.scope
    names = {bind.key for bind in scope.bound(stmt)} or {dotted(event.mark.subject) or ""}
    begins, ends, held = set[str](), set[str](), False
    for each in sorted(scope.stmts, key=line):
        if line(each) <= line(stmt) or not isinstance(each, ast.Assign | ast.Expr | ast.Return) or each.value is None:
            continue
        found = [part for part in walk(each.value) if isinstance(part, ast.Subscript) and dotted(part.value) in names]
        parts = [part.slice for part in found if isinstance(part.slice, ast.Slice)]
        begins |= {ast.dump(part.lower) for part in parts if part.lower is not None}
        ends |= {ast.dump(part.upper) for part in parts if part.upper is not None}
        held = held or (bool(parts) and any(EVALUATION.search(bind.key) for bind in scope.bound(each)))
        if isinstance(each, ast.Assign) and not parts and any(mentions(each.value, name) for name in names if name):
            names |= {bind.key for bind in scope.bound(each)}
    return held and bool(begins & ends)


def is_divided(view: View, event: Event) -> bool:
    """Check whether a shuffled value is sharded, here or in a caller."""
    stmt, scope = event.mark.stmt, event.scope
    if not isinstance(stmt, ast.Assign | ast.Expr | ast.Return):
        return False
    if divides(stmt):
        return not divides(event.mark.subject or stmt)
    prepared = "accelerate" in view.frameworks
    names = {bind.key for bind in scope.bound(stmt)} or {dotted(event.mark.subject) or ""}
    for block in (*reversed(event.path), None):
        later = [each for each in sorted(scope.stmts, key=line) if line(each) > line(stmt)]
        if any(parts(each, scope, names, prepared) for each in later):
            return True
        if not isinstance(block, CallBlock):
            continue
        returned = isinstance(stmt, ast.Return) or any(mentions(v, n) for v in scope.returns() for n in names if n)
        if not returned or block.handed:
            return False
        stmt, scope = block.site.stmt, block.site.scope
        names = {bind.key for bind in scope.bound(stmt)}
    return False


def parts(stmt: ast.stmt, scope: Scope, names: set[str], prepared: bool) -> bool:
    """Check whether a statement divides a shuffled value; `names` takes in its new names."""
    if not isinstance(stmt, ast.Assign | ast.Expr | ast.Return) or stmt.value is None:
        return False
    used = any(mentions(stmt.value, name) for name in names if name)
    text = ast.unparse(stmt)
    if used and (divides(stmt) or "DistributedSampler(" in text or (prepared and "DataLoader(" in text)):
        return True
    if used:
        targets = stmt.targets if isinstance(stmt, ast.Assign) else []
        names |= {bind.key for bind in scope.bound(stmt)}
        names |= {key for each in targets if isinstance(each, ast.Subscript) and (key := dotted(each.value))}
    return False


def line(stmt: ast.stmt) -> int:
    """Return the line of a statement."""
    return stmt.lineno


RULE = Rule("LS043", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", placed=True)
