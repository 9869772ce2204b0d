"""Say where a run can come, by the names that a project mentions, and where an error ends it."""

import ast

from lockstep_lint.analysis.budget import WORK, kept
from lockstep_lint.analysis.context import above, guards, turned_off, withs
from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.nodes import last, strings, walk
from lockstep_lint.analysis.view import View

__all__ = ["comes_to", "ends_run", "is_demonstration"]

# Bases whose own code calls no method of a class but these, and its dunder methods.
PLAIN = ("torch.nn.Module", "torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset", "object")
CALLED = ("forward",)
# Exceptions whose handlers take what a wrong use of a function or of its result raises.
TAKING = {"TypeError", "AttributeError", "ValueError", "Exception", "BaseException"}
LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
# Contexts in which an error is expected.
EXPECTING = {"raises", "assertRaises", "assertRaisesRegex", "suppress"}


def comes_to(view: View, scope: Scope) -> bool:
    """Check whether a run can come to a function: it is named where some run comes, or a framework calls it."""
    found = reached(view, scope.module)
    current: Scope | None = scope
    while current is not None:
        if current not in found:
            return False
        current = current.parent
    return True


@kept
def reached(view: View, module: Module) -> frozenset[Scope]:
    """Return the scopes of a file's programs that a run can come to."""
    family = view.project.family(module)
    by_name: dict[str, list[Scope]] = {}
    for member in family:
        for scope in member.scopes:
            by_name.setdefault(scope.name, []).append(scope)
    words = [mentioned(member) for member in family]
    seen = dict.fromkeys(member.top for member in family)
    queue = list(seen)
    while queue:
        scope = queue.pop()
        WORK.spend(len(by_name) // 50)
        more = [each for table in words for name in table.get(scope, ()) for each in by_name.get(name, ())]
        more += [each for each in by_children(scope) if is_called(view, each)]
        queue += [each for each in more if each not in seen]
        seen.update(dict.fromkeys(more))
    return frozenset(seen)


def by_children(scope: Scope) -> list[Scope]:
    """Return all definitions that stand directly in a scope."""
    return [each for each in scope.module.scopes if each.parent is scope]


def is_called(view: View, scope: Scope) -> bool:
    """Check whether something calls a function or a method without naming it: a decorator, Python, a base's code."""
    owner = scope.parent
    if scope.kind == "function" and owner is not None and owner.kind == "class":
        if scope.name.startswith("__") or scope.name in CALLED:
            return True
        bases = set(view.names.bases_of(owner)) - set(PLAIN)
        known = {each.name for each in view.names.parents(owner)}
        return any(base.rpartition(".")[2] not in known for base in bases)
    return bool(scope.decorators)


@kept
def mentioned(module: Module) -> dict[Scope, frozenset[str]]:
    """For each scope of a file, the names and attributes that it mentions."""
    found = {scope: set(places) for scope, places in module.places.items()}
    for scope in module.scopes:
        found.setdefault(scope, set()).update(node.attr for node, _ in scope.reads)
    return {scope: frozenset(names) for scope, names in found.items()}


def ends_run(view: View, stmt: ast.stmt, scope: Scope) -> bool:
    """Check that a run can come to a statement, and that nothing there handles an error."""
    for node, place in above(stmt, scope.module):
        if isinstance(node, ast.Try) and place == "body" and any(map(takes_error, node.handlers)):
            return False
    if any(last(item) in EXPECTING for item in withs(stmt, scope.module)) or turned_off(stmt, scope):
        return False
    return not is_behind_exit(stmt, scope) and comes_to(view, scope)


def is_behind_exit(stmt: ast.stmt, scope: Scope) -> bool:
    """Check whether a `return` or a `raise` stands before a statement, in its block or in one around it."""
    current, around = stmt, above(stmt, scope.module)
    for outer, place in (*around, (scope.node, "body")):
        block = getattr(outer, place, [])
        if current in block and any(isinstance(each, LEAVING) for each in block[: block.index(current)]):
            return True
        if isinstance(outer, ast.stmt):
            current = outer
    return False


def is_demonstration(view: View, stmt: ast.stmt, scope: Scope) -> bool:
    """Check whether a statement runs where a file that others import is run by itself, to try it out."""
    shown = any("__main__" in strings(guard.test) for guard in guards(stmt, view.module))
    return shown and scope.kind == "module" and bool(view.project.importers(view.module)) and not view.training


def takes_error(handler: ast.ExceptHandler) -> bool:
    """Check whether a handler takes such an error."""
    return handler.type is None or any(
        last(node) in TAKING for node in walk(handler.type) if isinstance(node, ast.expr)
    )
