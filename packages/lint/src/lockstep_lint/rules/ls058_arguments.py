"""LS058: a call whose arguments do not fit the function."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.callees import Callee, callees, kind_of, may_be_of_object, refusal, shown_name
from lockstep_lint.analysis.flow import readable
from lockstep_lint.analysis.index import IMPORTS, Module, Site
from lockstep_lint.analysis.reach import ends_run, is_demonstration
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


def check(view: View) -> Iterator[Found]:
    """Look for calls that no function they may run can take."""
    known = callees(view)
    yield from called_modules(view)
    runs_objects = "forward" in view.calls.method_names(view.module)
    for site in view.module.sites():
        if not may_fail(view, site, runs_objects):
            continue
        found = known.of(site.call, site.scope, site.stmt)
        wrong = [refusal(callee, site.call) for callee in found]
        if wrong and all(wrong) and ends_run(view, site.stmt, site.scope):
            name = shown_name(found[0].function)
            level = Severity.HINT if is_demonstration(view, site.stmt, site.scope) else None
            yield at(site, f"{name}() {wrong[0]}: the run ends here with a TypeError", severity=level)


def called_modules(view: View) -> Iterator[Found]:
    """Yield the calls of a name that only `import` binds, to a module."""
    module = view.module
    if module.stars or module.path.endswith(".ipynb") or not readable(module.top):
        return
    for name in only_modules(module) - module.own_names if module.imports else ():
        for site in view.sites(name) if module.words[name] else ():
            if isinstance(site.call.func, ast.Name) and ends_run(view, site.stmt, site.scope):
                yield at(site, f"'{name}' is a module, which cannot be called: the run ends here with a TypeError")


def only_modules(module: Module) -> set[str]:
    """Return the names that every import of a file binds to a top package, which is a module for certain."""
    found: set[str] = set()
    others: set[str] = set()
    for stmt in (stmt for scope in module.scopes for stmt in scope.stmts if isinstance(stmt, IMPORTS)):
        for alias in stmt.names:
            top = isinstance(stmt, ast.Import) and not (alias.asname and "." in alias.name)
            name = alias.asname or alias.name.partition(".")[0]
            (found if top else others).add(name)
    return found - others


def may_fail(view: View, site: Site, runs_objects: bool) -> bool:
    """Check by the plainest answer whether a call is worth a closer look; that of an object, where any is called."""
    target = view.calls.target(site.call, site.scope)
    if target is not None:
        ways = (False, True) if kind_of(target) else (False,)  # a method may also be called by its class
        return any(refusal(Callee(target, bound), site.call) for bound in ways)
    return runs_objects and may_be_of_object(view, site)


RULE = Rule(
    code="LS058",
    name="call that does not fit",
    what="A call leaves out an argument that the function needs, gives one that it does not take, or calls a module.",
    why="The run ends with a TypeError when it comes there: at the first evaluation, or at the last save.",
    bad="""
import torch
from parts import prepare

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
    train(*prepare())
""",
    good="""
import torch
from parts import prepare

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
    train(*prepare())
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Give the arguments that the function takes",
)
