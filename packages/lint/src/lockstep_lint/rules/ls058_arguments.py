"""LS058: a call whose arguments do not fit the function."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.callees import Callee, callees, kind_of, refusal
from lockstep_lint.analysis.context import above, guards, turned_off, withs
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import REFERENCES, last, strings, walk
from lockstep_lint.analysis.reach import comes_to
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# Exceptions whose handlers take a TypeError.
TAKING = {"TypeError", "Exception", "BaseException"}
# Contexts in which an error is expected.
EXPECTING = {"raises", "assertRaises", "assertRaisesRegex", "suppress"}


def check(view: View) -> Iterator[Found]:
    """Look for calls that no function they may run can take."""
    known = callees(view)
    for site in view.module.sites():
        if not may_fail(view, site):
            continue
        found = known.of(site.call, site.scope, site.stmt)
        wrong = [refusal(callee, site.call) for callee in found]
        if wrong and all(wrong) and ends_run(view, site.stmt, site.scope):
            name = called(found[0].function)
            level = Severity.HINT if is_demonstration(view, site) else None
            yield at(site, f"{name}() {wrong[0]}: the run ends here with a TypeError", severity=level)


def may_fail(view: View, site: Site) -> bool:
    """Check by the plainest answer whether a call is worth a closer look."""
    target = view.calls.target(site.call, site.scope)
    if target is not None:
        return any(refusal(Callee(target, bound), site.call) for bound in (False, True))
    func = site.call.func
    if not isinstance(func, REFERENCES) or view.names.unknown(func, site.scope) or view.full(site):
        return False
    return "forward" in view.calls.method_names(view.module)


def called(function: Scope) -> str:
    """Return the name by which a user knows a function."""
    owner = function.parent
    if owner is None or owner.kind != "class":
        return function.name
    return owner.name if function.name == "__init__" else f"{owner.name}.{function.name}"


def ends_run(view: View, stmt: ast.stmt, scope: Scope) -> bool:
    """Check that a run can come to a statement, and that nothing there handles an error."""
    for node, place in above(stmt, scope.module):
        if isinstance(node, ast.Try) and place == "body" and any(map(takes_error, node.handlers)):
            return False
    if any(last(item) in EXPECTING for item in withs(stmt, scope.module)) or turned_off(stmt, scope):
        return False
    return comes_to(view, scope)


def is_demonstration(view: View, site: Site) -> bool:
    """Check whether a call is made where a file that others import is run by itself, to try it out."""
    shown = any("__main__" in strings(guard.test) for guard in guards(site.stmt, view.module))
    return shown and site.scope.kind == "module" and bool(view.project.importers(view.module)) and not view.training


def takes_error(handler: ast.ExceptHandler) -> bool:
    """Check whether a handler takes a TypeError."""
    return handler.type is None or any(last(node) in TAKING for node in walk(handler.type) if isinstance(node, ast.expr))


RULE = Rule(
    code="LS058",
    name="call that does not fit",
    what="A call leaves out an argument that the function needs, or gives one that it does not take.",
    why="The run ends with a TypeError when it comes there: at the first evaluation, or at the save after the training.",
    bad="""
import torch

def save(model, optimizer, path, epoch):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)

def train(model, loader, optimizer, criterion, epochs):
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    save(model, "last.pt", epoch)

if __name__ == "__main__":
    train(*torch.load("parts.pt", weights_only=False))
""",
    good="""
import torch

def save(model, optimizer, path, epoch):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)

def train(model, loader, optimizer, criterion, epochs):
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    save(model, optimizer, "last.pt", epoch)

if __name__ == "__main__":
    train(*torch.load("parts.pt", weights_only=False))
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Give the arguments that the function takes",
)
