"""What is known of a function that nothing in sight calls: whether anything may, and may keep its graph away."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.forwards import shields
from lockstep.lint.analysis.index import Scope
from lockstep.lint.analysis.kept import kept
from lockstep.lint.analysis.view import View

__all__ = ["alone", "foreign", "handed_on", "keeps_all"]

# What keeps graphs away.
SHIELDS = ("no_grad", "inference_mode", "grad_enabled", "enable_grad")


def alone(view: View, scope: Scope) -> bool:
    """Whether nothing in sight that runs a function keeps the graph away: nothing names it, or, of a method of a class
    of the project's own, what calls something of its name.
    """
    if scope.decorators or scope.name.startswith("test_"):
        return False
    if scope.parent is scope.module.top:
        return sum(member.words[scope.name] for member in view.project.family(scope.module)) == 1
    owner = scope.owner
    if owner is None or scope.parent is not owner or any(name != "object" for name in foreign(view, owner)):
        return False
    return not any(map(shields, view.calls.namesakes(scope)))


@kept
def handed_on(view: View, scope: Scope) -> bool:
    """Whether a function is only ever handed to functions of the project, all of which are in sight."""
    members = view.project.family(scope.module)
    given = sum(
        isinstance(value, ast.Name) and value.id == scope.name and view.calls.target(site.call, site.scope) is not None
        for member in members
        for site in member.sites()
        for value in site.call.args
    )
    return scope.parent is scope.module.top and sum(member.words[scope.name] for member in members) == given + 1


@kept
def keeps_all(view: View) -> bool:
    """Whether nothing in the programs of a file, all of which are in sight, ever keeps a graph away."""
    members = view.project.family(view.module)
    return not view.effects.mentioned(view.module, *SHIELDS) and not any(map(view.project.unseen, members))


def foreign(view: View, owner: Scope) -> Iterator[str]:
    """What a class derives from that is not the project's."""
    known = {parent.name for parent in view.names.parents(owner)}
    yield from (name for name in view.names.bases_of(owner) if name.split(".")[-1] not in known)
