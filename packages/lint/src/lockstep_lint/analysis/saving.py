"""Whether a value ends in a file: in the call of a save, under a name that is saved, or by who calls its function."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, dotted, last, mentions, walk
from lockstep_lint.analysis.view import View

__all__ = ["SAVES", "is_saved"]

SAVES = Words(
    r"^_*(torch_|async_)?(save|dump|write)(_|[A-Z]|$)|_save$|(write|dump|store|make|create)_(checkpoint|ckpt)"
)
# Calls that give back what they are given, as far as a file is concerned.
COPIES = re.compile(r"^(dict|list|tuple|OrderedDict|deepcopy|copy|asdict|vars|clone_state|.*cpu)$")
# Calls that run a function given as their first argument, with the others.
RUNS = {"Thread", "Process", "submit", "apply_async", "partial", "run_in_executor"}
MAX_CALLERS = 8
MAX_DEPTH = 3

Holds = Callable[[ast.expr], bool]


def is_saved(view: View, node: ast.expr, stmt: ast.stmt, scope: Scope, depth: int = 0) -> bool:
    """Whether the value of an expression is written to a file, in its function, its object or by the callers."""

    def holds(value: ast.expr) -> bool:
        return any(item is node for item in walk(value))

    if any(s.stmt is stmt and s.call is not node and writes(view, s, holds, depth) for s in scope.sites):
        return True
    names = set(taken(stmt, scope, holds))
    if names and under_name(view, names, scope, stmt.lineno, depth):
        return True
    if isinstance(stmt, ast.Return):
        return handed_back(view, scope, depth)
    return any(name.startswith("self.") and elsewhere(view, name, scope, depth) for name in names)


def under_name(view: View, names: set[str], scope: Scope, line: int, depth: int) -> bool:
    """Whether what names hold from a line on is written to a file."""
    follow(names, scope, line)

    def holds(value: ast.expr) -> bool:
        return any(mentions(value, name) for name in names)

    if any(s.line >= line and writes(view, s, holds, depth) for s in scope.sites):
        return True
    return any(holds(value) for value in scope.returns()) and handed_back(view, scope, depth)


def handed_back(view: View, scope: Scope, depth: int) -> bool:
    """Whether a caller of a function writes what it returns to a file."""
    if scope.kind != "function" or depth >= MAX_DEPTH:
        return False
    callers = view.calls.callers(scope) or view.calls.namesakes(scope)
    return any(is_saved(view, site.call, site.stmt, site.scope, depth + 1) for site in callers[:MAX_CALLERS])


def elsewhere(view: View, name: str, scope: Scope, depth: int) -> bool:
    """Whether another method writes an attribute of the object to a file."""
    owner = scope.owner
    methods = [method for method in owner.defs.values() if method is not scope] if owner is not None else []
    return depth < MAX_DEPTH and any(under_name(view, {name}, method, 0, depth + 1) for method in methods)


def taken(stmt: ast.stmt, scope: Scope, holds: Holds) -> Iterator[str]:
    """The names that hold a value after its statement: bound to it, or of the table that it is put into."""
    yield from (bind.key for bind in scope.bound(stmt) if bind.value is not None and holds(bind.value))
    yield from filled(stmt)
    for site in scope.sites:
        if site.stmt is stmt and site.name in ("update", "setdefault", "append") and site.receiver is not None:
            key = dotted(site.receiver)
            if key is not None and any(map(holds, given(site))):
                yield key


def filled(stmt: ast.stmt) -> Iterator[str]:
    """The tables into which an assignment puts something (`state["model"] = ...`)."""
    for target in stmt.targets if isinstance(stmt, ast.Assign) else ():
        key = dotted(target.value) if isinstance(target, ast.Subscript) else None
        if key is not None:
            yield key


def follow(names: set[str], scope: Scope, line: int) -> None:
    """Adds the names to which later assignments pass what `names` hold, by itself, copied or in a table."""
    for stmt in scope.stmts:
        if isinstance(stmt, ast.Assign | ast.AnnAssign) and stmt.lineno >= line and stmt.value is not None:
            value = stmt.value
            passes = not isinstance(value, ast.Call) or COPIES.match(last(value)) or last(value)[:1].isupper()
            if passes and any(mentions(value, name) for name in names):
                names.update(bind.key for bind in scope.bound(stmt))
                names.update(filled(stmt))


def writes(view: View, site: Site, holds: Holds, depth: int) -> bool:
    """Whether a call writes one of its arguments to a file, itself or in a function of the project."""
    values = given(site)
    if not any(map(holds, values)):
        return False
    if SAVES.search(site.name) or (site.name in RUNS and any(SAVES.search(last(value)) for value in values)):
        return True
    function = view.calls.target(site.call, site.scope)
    if function is None or depth >= MAX_DEPTH:
        return False
    params = [name for name in function.params if (v := passed(site, function, name)) is not None and holds(v)]
    return any(under_name(view, {name}, function, 0, depth + 1) for name in params)


def given(site: Site) -> list[ast.expr]:
    """All arguments of a call."""
    return [*site.call.args, *(item.value for item in site.call.keywords)]
