"""Loops that count, over rows of held-out data (`for i in range(0, len(x_test), 32): model(x_test[i:i + 32])`)."""

import ast
import re

from lockstep_lint.analysis.context import Loop, inside
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import Words, idents, last, walk
from lockstep_lint.analysis.training import LOSSES

__all__ = ["over_rows"]

# What is counted beside held-out data, says which of its rows count, or may be something else.
BESIDE = Words(
    r"loss|acc|score|metric|hist|best|result|curve|perf|auc|f1|time|name|path|file|dir|mode|iou|psnr|log|every|freq"
    r"|interval|step|mask|len|num|count|size|valid(?!ation|_(set|data|x|y|im|in|lab))|^(val|dev|eval|infer(ence)?)$",
    re.IGNORECASE,
)
COUNTS = {"range", "trange"}


def over_rows(site: Site, nest: list[Loop]) -> bool:
    """Whether a model is given rows of held-out data in a loop that counts, or a loss compares its output with some."""
    loop = nest[0] if nest else None
    if loop is None or not counts_turns(loop):
        return False
    rows = rows_in(loop, site.scope)
    if any(holds(value, rows) for value in (*site.call.args, *(item.value for item in site.call.keywords))):
        return True
    outputs = {bind.key for bind in site.scope.bound(site.stmt)}
    return any(line > site.line and outputs & names for line, names in (compared(loop, site.scope) if outputs else ()))


def counts_turns(loop: Loop) -> bool:
    """Whether a loop counts (`while i < n`, `for i in tqdm(range(n))`)."""
    if isinstance(loop, ast.While):
        return True
    return any(isinstance(part, ast.Call) and last(part) in COUNTS for part in walk(loop.iter))


@kept
def compared(loop: Loop, scope: Scope) -> list[tuple[int, set[str]]]:
    """The losses of a loop that are given rows of held-out data: their lines, with the names that they compare."""
    rows = rows_in(loop, scope)
    losses = (site for name, sites in scope.by_name.items() if LOSSES.search(name) for site in sites)
    held = (site for site in losses if inside(site.stmt, loop, scope.module) and holds(site.call, rows))
    return [(site.line, set(idents(site.call))) for site in held]


@kept
def rows_in(loop: Loop, scope: Scope) -> frozenset[str]:
    """The names in a loop that hold rows of held-out data, or what is made of them, and nothing else."""
    rows: set[str] = set()
    other: set[str] = set()
    for stmt in (node for part in loop.body for node in walk(part)):
        if isinstance(stmt, ast.Assign | ast.AnnAssign):
            for bind in scope.bound(stmt) if stmt.value is not None else ():
                (rows if bind.value is not None and holds(bind.value, rows) else other).add(bind.key)
    return frozenset(rows - other)


def holds(node: ast.AST, rows: set[str] | frozenset[str]) -> bool:
    """Whether an expression takes rows of held-out data, by a number that is worked out, or holds some already."""
    return any(
        (isinstance(item, ast.Name) and item.id in rows) or (isinstance(item, ast.Subscript) and takes(item))
        for item in walk(node)
    )


def takes(item: ast.Subscript) -> bool:
    """Whether an expression takes a part of what is called held-out data (`x_test[i:i + 32]`)."""
    name = last(item.value) if isinstance(item.value, ast.Name | ast.Attribute) else ""
    counted = any(isinstance(part, ast.Name) for part in walk(item.slice))
    return counted and EVALUATION.search(name) and not BESIDE.search(name)
