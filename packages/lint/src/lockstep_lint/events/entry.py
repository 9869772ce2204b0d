"""Tell whether a program's entry is in sight and reaches a line."""

import ast

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.view import View
from lockstep_lint.events.run import runs

__all__ = ["is_reached"]

# How many functions are followed back to an entry.
MAX_SCOPES = 200


def is_reached(view: View, node: ast.AST) -> bool:
    """Check whether a program of the project runs the function around a node."""
    scope = scope_of(view, getattr(node, "lineno", 1))
    queue, seen = [scope], {scope}
    functions = find_entries(view)
    while queue and len(seen) < MAX_SCOPES:
        current = queue.pop()
        if current in functions or (current.kind == "module" and is_program(view, current.module)):
            return True
        before = [site.scope for site in view.calls.callers(current)] if current.kind == "function" else []
        if not before and current.parent is not None and current.parent.kind == "function":
            before = [current.parent]  # a function within another one, handed on
        new = [each for each in before if each not in seen]
        seen.update(new)
        queue += new
    return False


@cache_answers
def find_entries(view: View) -> frozenset[Scope]:
    """Return the functions that the programs of a file run."""
    programs = (run for run in runs(view) if run.entry.kind == "module" and is_program(view, run.entry.module))
    return frozenset(scope for run in programs for scope in run.entered)


def scope_of(view: View, line: int) -> Scope:
    """Return the innermost function, class or file around a line."""
    found, start = view.module.top, 0
    for scope in view.scopes:
        first, end = getattr(scope.node, "lineno", 0), getattr(scope.node, "end_lineno", None) or 0
        if scope.kind == "function" and start <= first <= line <= end:
            found, start = scope, first
    return found


@cache_answers
def is_program(view: View, module: Module) -> bool:
    """Check whether a file is a program: marked as one, or code that nothing imports."""
    if unit_test(module):
        return False
    if module.is_script:
        return True
    blocks = ast.Expr | ast.For | ast.While | ast.With
    runs_something = any(isinstance(site.stmt, blocks) for site in module.top.sites)
    return runs_something and len(view.project.users(module)) == 1
