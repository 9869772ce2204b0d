"""Say which functions a project's programs can come to, by the names that they mention."""

from lockstep_lint.analysis.budget import WORK, kept
from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.view import View

__all__ = ["comes_to"]

# Bases whose own code calls no method of a class but these, and its dunder methods.
PLAIN = ("torch.nn.Module", "torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset", "object")
CALLED = ("forward",)


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
    """The scopes of a file's programs that a run can come to."""
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
    """All definitions that stand directly in a scope."""
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
    found: dict[Scope, set[str]] = {}
    for name, places in module.named.items():
        for _, scope in places:
            found.setdefault(scope, set()).add(name)
    for scope in module.scopes:
        found.setdefault(scope, set()).update(node.attr for node, _ in scope.reads)
    return {scope: frozenset(names) for scope, names in found.items()}
