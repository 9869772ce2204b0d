"""What a test in a loop goes back to: the names, the calls and the tests that decide how it comes out."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep_lint.analysis.budget import WORK
from lockstep_lint.analysis.context import Loop, guards, inside
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, element_of, last, walk

__all__ = ["Slice", "counts", "made_of"]

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


def made_of(tests: list[ast.expr], loop: Loop, scope: Scope) -> Slice:
    """What the loop computes for some tests in it, by its values and by the tests around them."""
    found = Slice()
    asked = {name for test in tests for name in _names(test)}
    queue = list(asked)
    sites = [site for site in scope.sites if inside(site.stmt, loop, scope.module)]
    while queue and len(found.names) < MAX_NAMES:
        name = queue.pop()
        if name in found.names:
            continue
        found.names.add(name)
        for stmt in (*_bound(name, loop, scope), *(_fed(name, sites) if name in asked else ())):
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
