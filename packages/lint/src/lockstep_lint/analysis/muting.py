"""Where a program turns the output of the other ranks off, and what is printed before that."""

import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import Words, constant
from lockstep_lint.analysis.view import View

__all__ = ["HUSHES", "muted", "quietens"]

# The words of a program that replaces print.
REPLACED = re.compile(r"builtin_print|builtins\.print|__builtin__|\bsetup_for_distributed\b|disable_print")
BUILTINS = re.compile(r"builtins?_*\.print$")
# A program that turns all ranks but one quiet has taken care.
QUIET = ("sys.stdout = open", "devnull", "suppress_output")
# A function of such a name in a file that is not here may turn `print` off.
HUSHES = Words(
    r"dist(ributed)?(_mode|_env)?$|^(init|setup|prepare)_(ddp|dist|print|env)|quiet|_print"
    r"|print_(?!arg|conf|opt|model|net|param|info|stat|time|result|metric|loss|summary|trainable)",
    re.IGNORECASE,
)
# What a block's own output, or that of another program, is sent away with.
LENDS = ("redirect_stdout", "redirect_stderr", "Popen", "run", "call", "check_call", "check_output")
MAX_CALLERS = 40

Places = dict[Scope, list[int]]


def muted(view: View, site: Site, hidden: tuple[Site, ...]) -> bool:
    """Whether a call may come after what replaces `print` in the file's programs, or a `hidden` call."""
    if not hidden and not any(map(replaces, view.project.family(view.module))):
        return False
    table = places(view.calls, view.module, hidden)
    return table is None or (bool(table) and later(view.calls, site.scope, site.line, table, 0))


@kept
def replaces(module: Module) -> bool:
    """Whether a file has the words of a program that replaces `print`."""
    return (
        any(word in module.text for word in ("print", "builtin", "setup_for"))
        and REPLACED.search(module.text) is not None
    )


def later(calls: Calls, scope: Scope, line: int, table: Places, depth: int) -> bool:
    """Whether a line of a scope is reached after one of the places; what no program that comes there is seen to run
    may be.
    """
    if any(place < line for place in table.get(scope, ())):
        return True
    callers = calls.callers(scope)[:MAX_CALLERS] if scope.kind == "function" else []
    if not callers or depth > 5:
        return scope not in table
    return any(later(calls, site.scope, site.line, table, depth + 1) for site in callers)


@kept
def places(calls: Calls, module: Module, hidden: tuple[Site, ...]) -> Places | None:
    """The lines of each function of a file's programs that replace `print`, or call what does, if any program comes
    there; None if what replaces it is not to be found.
    """
    members = calls.project.family(module)
    table: Places = {}
    for scope, line in (place for member in members for place in replaced(member)):
        table.setdefault(scope, []).append(line)
    queue = [scope for scope in table if scope.kind == "function"]
    if any(not calls.callers(scope) and named(scope, members) for scope in queue) or not (table or hidden):
        return None
    for site in hidden:
        table.setdefault(site.scope, []).append(site.line)
        queue += [site.scope] if site.scope.kind == "function" else []
    seen = set(queue)
    while queue:
        for site in calls.callers(queue.pop()):
            table.setdefault(site.scope, []).append(site.line)
            if site.scope.kind == "function" and site.scope not in seen:
                seen.add(site.scope)
                queue.append(site.scope)
    starts = (s for s in table if s.kind != "function" or not calls.callers(s))
    if any(s.kind != "function" or s.name == "main" or named(s, members) for s in starts):
        return table
    return {} if any(member.is_script for member in calls.project.users(module)) else None  # a library's programs


def named(function: Scope, members: tuple[Module, ...]) -> bool:
    """Whether more than its definition names a function."""
    return sum(member.words[function.name] for member in members) > 1


def replaced(module: Module) -> Iterator[tuple[Scope, int]]:
    """The lines of a file that give `print` another meaning everywhere."""
    for scope in module.scopes if "builtin" in module.text else ():
        for key, binds in scope.binds.items():
            if BUILTINS.search(key):
                yield from ((scope, bind.stmt.lineno) for bind in binds)
        for site in scope.named("setattr"):
            if [constant(value) for value in site.call.args[1:2]] == ["print"]:
                yield scope, site.line


def quietens(view: View, module: Module) -> bool:
    """Whether a file sends output to nowhere, other than in functions that all ranks call alike, or that of the other
    ranks to anywhere else.
    """
    scopes = module.scopes if "sys.stdout" in module.text else ()
    if any(view.ranks.side(bind.stmt, s) == -1 for s in scopes for bind in s.binds.get("sys.stdout", ())):
        return True
    if not any(word in module.text for word in QUIET):
        return False
    inside = [s for s in module.scopes if s.kind == "function" and any(view.effects.mentioned_in(s, w) for w in QUIET)]
    return not inside or not all(map(functools.partial(for_all, view), inside))


def for_all(view: View, function: Scope) -> bool:
    """Whether a function says nothing of ranks, nor do the calls of it; or sends away only what runs in its block."""
    if any(view.ranks.side(stmt, function) for stmt in function.stmts):
        return False
    if "sys.stdout" not in function.binds and any(map(function.named, LENDS)):
        return True
    callers = view.calls.callers(function)
    kept_to_some = (view.ranks.main_only(site.stmt, site.scope) or view.ranks.chosen(site) for site in callers)
    return bool(callers) and not any(kept_to_some)
