"""The calls of a function that trains which do not: their own arguments keep it from computing gradients."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.literals import default, truth
from lockstep_lint.analysis.nodes import idents
from lockstep_lint.analysis.view import View

__all__ = ["idle_calls"]

# How many functions hand the flag on.
MAX_HANDS = 3


def idle_calls(view: View, backward: Site) -> Iterator[Site]:
    """The calls for which a test before a backward comes out so that it is not made (`optimizer=None`), nor another."""
    function = backward.scope
    others = [site for site in function.sites if view.steps.backwards(site)]
    for name in tested(backward):
        for call, value in values(view, function, name, 0):
            if not any(made(site, name, value) for site in others):
                yield call


def tested(backward: Site) -> set[str]:
    """The parameters that decide alone whether a backward is made."""
    function = backward.scope
    found = (
        {name for name in idents(guard.test) if name in function.params}
        for guard in guards(backward.stmt, backward.module)
    )
    return {names.pop() for names in found if len(names) == 1} - function.binds.keys()


def made(backward: Site, name: str, value: ast.Constant) -> bool:
    """Whether a backward is made for a value of a parameter, as far as is known."""
    call = ast.Call(ast.Name(backward.scope.name), [], [ast.keyword(name, value)])
    entry = (call, backward.scope)
    return all(
        truth(guard.test, backward.scope, entry) is not (not guard.when)
        for guard in guards(backward.stmt, backward.module)
    )


def values(view: View, function: Scope, name: str, depth: int) -> Iterator[tuple[Site, ast.Constant]]:
    """The calls of a function with the literals that they give for a parameter, or the calls that hand it on."""
    for site in view.calls.callers(function) if depth <= MAX_HANDS else ():
        value = passed(site, function, name) or default(function, name, site.call)
        if isinstance(value, ast.Constant):
            yield site, value
        elif isinstance(value, ast.Name) and value.id in site.scope.params and value.id not in site.scope.binds:
            yield from values(view, site.scope, value.id, depth + 1)
