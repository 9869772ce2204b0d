"""Follow a state into its file, and a file's path to the names in it."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import Words, dotted, element_of, idents, last, mentions, walk
from lockstep_lint.analysis.rank_names import RANK, RANKED
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event
from lockstep_lint.events.query import given_as, subject
from lockstep_lint.events.run import runs

__all__ = ["gets_saved", "one_file", "own_path"]

# Calls that give back what they are given, or take it in.
COPIES = re.compile(r"^(dict|list|OrderedDict|deepcopy|copy|asdict|vars|update|setdefault|append|.*cpu|[A-Z].*)$")
# A path of one process: the rank's, a temporary file, a buffer in memory.
OWN = Words(rf"{RANKED}|shard|process_index|gpu_id|getpid|uuid|stream|buf|bytes|mem_|^te?mp", re.IGNORECASE)


def one_file(view: View, save: Event, read: Event) -> bool:
    """Check whether a file is written and read under one path."""
    (written, home), (asked, place) = resolve_path(*subject(save)), resolve_path(*subject(read))
    if written is None or asked is None or ast.dump(written) != ast.dump(asked):
        return False
    keys = {key for node in (subject(save)[0], written) if node for p in walk(node) if (key := dotted(p)) is not None}
    changed = any(len(home.binds.get(key, [])) > (key not in home.params and "." not in key) for key in keys)
    known = home is place or (home.module is place.module and not keys & (home.binds.keys() | place.binds.keys()))
    return known and not changed


def own_path(view: View, event: Event) -> bool:
    """Check whether a path is one process's own: with its rank, temporary, or in memory."""
    queue, seen = [(event.mark.subject, event.scope)], set[object]()
    while queue and len(seen) < 30:
        node, scope = given_as(event, *queue.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(RANK.search(name) or OWN.search(name) for name in idents(node)):
            return True
        keys = {key: part for part in walk(node) if (key := dotted(part)) is not None}
        queue += [(v, scope) for key in keys for b in scope.binds.get(key, []) for v in element_of(b.value, b.path)]
        params = (part for key, part in keys.items() if key in scope.params and part is not node)
        queue += [(part, scope) for part in params if isinstance(part, ast.expr)]
    return False


def resolve_path(path: ast.expr | None, scope: Scope) -> tuple[ast.expr | None, Scope]:
    """Return the value of a path's name, if it has one alone."""
    binds = scope.binds.get(dotted(path) or "", [])
    plain = len(binds) == 1 and binds[0].how == "assign" and not binds[0].path and dotted(path) not in scope.params
    return (binds[0].value, scope) if plain and binds[0].value is not None else (path, scope)


def gets_saved(view: View, event: Event) -> bool:
    """Check whether a state reaches a file: directly, by a name, or through a return."""
    node, stmt, scope = event.node, event.mark.stmt, event.scope
    for block in (*reversed(event.path), None):
        names = holders(scope, stmt, node)
        if any(holds(value, node, names, home, scope) for value, home in saved_values(view, scope)):
            return True
        if not isinstance(block, CallBlock):
            continue
        if not isinstance(stmt, ast.Return) and not any(mentions(v, n) for v in scope.returns() for n in names):
            return False
        node, stmt, scope = block.site.call, block.site.stmt, block.site.scope
    return False


def saved_values(view: View, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield the values that calls of all runs write to files, with their functions."""
    for event in (event for run in runs(view) for event in run.of("save", "hand")):
        call = event.node
        for value in (*call.args, *(item.value for item in call.keywords)) if isinstance(call, ast.Call) else ():
            given, home = given_as(event, value, event.scope, scope)
            if given is not None:
                yield given, home


def holders(scope: Scope, stmt: ast.stmt, node: ast.AST) -> set[str]:
    """Return a function's names that hold a value, directly, copied or in a table."""
    names: set[str] = set()
    for other in (stmt, *(each for each in scope.stmts if each.lineno >= stmt.lineno and each is not stmt)):
        value = getattr(other, "iter" if isinstance(other, ast.For) else "value", None)
        if not isinstance(other, ast.Assign | ast.AnnAssign | ast.Expr | ast.For) or value is None:
            continue
        copies = not isinstance(value, ast.Call) or COPIES.search(last(value))
        if any(part is node for part in walk(value)) or (copies and any(mentions(value, name) for name in names)):
            names |= {bind.key for bind in scope.bound(other) if bind.how in ("assign", "for")}
            tables = other.targets if isinstance(other, ast.Assign) else [getattr(value, "func", value)]
            names |= {key for t in tables if isinstance(t, ast.Subscript | ast.Attribute) and (key := dotted(t.value))}
    return names - {"self"}


def holds(value: ast.expr, node: ast.AST, names: set[str], home: Scope, scope: Scope) -> bool:
    """Check whether a written value is a state, or a name that holds it."""
    if any(part is node for part in walk(value)):
        return True
    known = names if home is scope else {n for n in names if n.startswith("self.") and home.owner is scope.owner}
    return any(mentions(value, name) for name in known)
