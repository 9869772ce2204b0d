"""Loops over the phases of an epoch (`for phase in ["train", "val"]: ...`)."""

import ast

from lockstep_lint.analysis.context import guards, loops
from lockstep_lint.analysis.forwards import is_forward
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import dotted, idents, strings, walk
from lockstep_lint.analysis.view import View

__all__ = ["forward_of_phases", "phased"]

# What keeps a graph away, or says where one is needed.
SHIELDS = ("grad_enabled", "no_grad", "inference_mode", "enable_grad", "volatile")


def phases(stmt: ast.stmt, scope: Scope) -> set[str]:
    """The names of the phases that the loops around a statement run through, one of which evaluates."""
    found = {
        dotted(outer.target)
        for outer in loops(stmt, scope.module)
        if isinstance(outer, ast.For) and any(map(EVALUATION.search, strings(outer.iter)))
    }
    return {name for name in found if name is not None}


def phased(loop: ast.For, scope: Scope) -> bool:
    """Whether a loop runs over the loader of a phase (`for x, y in loaders[phase]`)."""
    names = phases(loop, scope)
    chosen = (item.slice for item in walk(loop.iter) if isinstance(item, ast.Subscript))
    return bool(names) and any(names & set(idents(item)) for item in chosen)


def forward_of_phases(view: View, backward: Site) -> Site | None:
    """The call of the model that also evaluates, where backward is made in the phase that trains alone, and nothing in
    the function ever keeps the graph away.
    """
    scope = backward.scope
    names = phases(backward.stmt, scope)
    asked = any(
        isinstance(guard.test, ast.Compare)
        and names & set(idents(guard.test))
        and "train" in strings(guard.test)
        and guard.when is isinstance(guard.test.ops[0], ast.Eq)
        for guard in guards(backward.stmt, scope.module)
    )
    if not asked or any(view.effects.mentioned_in(scope, word) for word in SHIELDS):
        return None
    nest = loops(backward.stmt, scope.module)
    return next((s for s in scope.sites if is_forward(view, s) and loops(s.stmt, scope.module) == nest), None)
