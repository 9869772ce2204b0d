"""Whether a graph is kept away from a call, and what is known of a function that nothing in sight calls."""

import ast
import functools
from collections.abc import Iterator

from lockstep_lint.analysis.context import loops, withs
from lockstep_lint.analysis.effects import turns_off_gradients
from lockstep_lint.analysis.forwards import given_held_out, is_forward, run_by, shields
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.view import View

__all__ = ["alone", "foreign", "handed_on", "keeps_all", "without_graph"]

# What keeps graphs away.
SHIELDS = ("no_grad", "inference_mode", "grad_enabled", "enable_grad")
# What says that a program without a training needs no gradients at all.
FROZEN = ("requires_grad = False", "requires_grad_(False)")


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


def switched_by(view: View, caller: Site) -> bool:
    """Whether the function of a call puts a model into eval mode before it, itself or by what it calls."""
    before = [s for s in caller.scope.sites if s.line < caller.line]
    return view.effects.find(before, lambda s: s.name == "eval" and s.receiver is not None) is not None


def without_graph(view: View, site: Site) -> bool | None:
    """Whether no graph is kept: by a `with`, a decorator, a global switch, or the callers."""
    inner = None if is_forward(view, site) else run_by(view, site)
    if inner is not None and shields(inner):
        return True
    switched = any(s.receiver is not None and s.line < site.line for s in site.scope.named("eval"))
    if not view.calls.callers(site.scope):
        switched = switched or any(map(functools.partial(switched_by, view), view.calls.by_base(site.scope)))
    found = shielded(view, site.stmt, site.scope, site.line, 0, switched)
    if found is None and ((switched and EVALUATION.search(site.scope.name)) or given_held_out(site)):
        callers = view.calls.callers(site.scope)
        return False if any(view.trainings.trains(c.scope.sites) for c in callers) else None  # what trains keeps graphs
    return found


def shielded(view: View, stmt: ast.stmt, scope: Scope, line: int, depth: int, switched: bool) -> bool | None:
    if any(map(turns_off_gradients, (*withs(stmt, scope.module), *scope.decorators))):
        return True
    if any(s.name in ("set_grad_enabled", "enter_context") and s.line < line for s in scope.sites):
        return True
    if view.effects.mentioned(view.module, *FROZEN) and not trains(view):
        return True
    if "volatile=True" in view.module.text:  # of a torch before no_grad
        return True
    if scope.kind != "function":
        return False
    callers = view.calls.callers(scope) or view.calls.by_base(scope)
    if not callers:
        sure = (depth > 0 or loops(stmt, scope.module)) and switched
        if sure and (alone(view, scope) or (handed_on(view, scope) and keeps_all(view))):
            return False
        return None
    if depth > 4:
        return None if scope.decorators or scope.owner is not None else False
    answers = [shielded(view, c.stmt, c.scope, c.line, depth + 1, switched) for c in callers[:6]]
    if depth == 0 and switched and False in answers:
        return False  # called with a shield too, but not everywhere
    if any(answer is True for answer in answers):
        return True
    return None if None in answers else False


@kept
def trains(view: View) -> bool:
    """Whether the programs of a file train: by a loop in sight, or by an optimizer's step."""
    return bool(view.trainings.near(view.module)) or any(
        view.steps.steps_optimizer(site) for member in view.project.family(view.module) for site in member.sites("step")
    )
