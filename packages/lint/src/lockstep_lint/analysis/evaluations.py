"""The calls that evaluate a model: over held-out data, in a function that says that it tests, after eval()."""

import ast

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import Loop, loops, withs
from lockstep_lint.analysis.forwards import given_held_out, is_forward, model_of, run_by, run_model, shields
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import dotted, idents, last
from lockstep_lint.analysis.rows import over_rows
from lockstep_lint.analysis.sight import without_graph
from lockstep_lint.analysis.view import View

__all__ = ["evaluations"]


@kept
def evaluations(view: View) -> tuple[Site, ...]:
    """The calls that evaluate, those of a helper after those of a model."""
    found = [site for site in view.sites() if evaluates(view, site)]
    return tuple(sorted(found, key=lambda site: not is_forward(view, site)))


def evaluates(view: View, site: Site) -> bool:  # noqa: C901
    """Whether a call runs a model over held-out data, or in a function that says it tests."""
    scope = site.scope
    if scope.name == "forward":
        return False
    nest = loops(site.stmt, scope.module)
    held_out = any(isinstance(loop, ast.For) and holds_out(view, loop.iter, scope) for loop in nest)
    if not held_out and tests_by_name(view, scope, bool(nest)):
        held_out = not any(view.steps.backwards(s) for s in scope.sites)  # it may test the gradients of what it runs
    held_out = held_out or (over_rows(site, nest) and is_forward(view, site))
    by_data = not held_out and given_held_out(site) and (is_forward(view, site) or run_by(view, site) is not None)
    if not held_out and not by_data and not scope.named("eval"):
        return False  # the cheap questions first: most calls are neither
    if view.steps.backwards(site):
        return False
    if not nest and isinstance(site.stmt, ast.Expr) and site.stmt.value is site.call and is_forward(view, site):
        return False  # nothing is done with what the model gives: its layers are shown or measured
    if by_data and not set_to_eval(site, run_model(site), nest):
        return without_graph(view, site) is False and not trained_on(view, site)
    if runs_part(view, site):
        if not held_out and not set_to_eval(site, switched_model(site), nest):
            return False
    elif not is_forward(view, site):
        inner = run_by(view, site) if nest else None
        if inner is None or not (held_out or set_to_eval(site, model_of(site, inner), nest)):
            return False
        if tests_by_name(view, inner.scope, False):  # told there
            return False
    elif not held_out and not set_to_eval(site, run_model(site), nest) and not after_training(view, site, nest):
        return False
    region = view.effects.block(nest[0], scope) if nest else until_next_switch(site)
    if nest and view.trainings.trains(region):
        region = until_next_switch(site, nest[0])  # between two steps of the training
    if view.trainings.trains(region) or any(last(item) == "enable_grad" for item in withs(site.stmt, scope.module)):
        return False  # an attack on the model, say
    return without_graph(view, site) is True or not any(differentiates(view, s) for s in region)


def trained_on(view: View, site: Site) -> bool:
    """Whether what a call gives may be trained on: a gradient is computed of it, or its function gives it back."""
    scope = site.scope
    made = {bind.key for bind in scope.bound(site.stmt)}
    if not made and not isinstance(site.stmt, ast.Expr):
        return True
    for stmt in sorted(scope.stmts, key=lambda each: each.lineno):
        if stmt.lineno > site.line and not isinstance(stmt, Loop | ast.If | ast.With | ast.Try):
            used = made & set(idents(stmt))
            if used and (isinstance(stmt, ast.Return) or "grad_fn" in idents(stmt)):  # given back, or its graph shown
                return True
            made |= {bind.key for bind in scope.bound(stmt)} if used else set()
    sites = (s for s in scope.sites if s.line >= site.line)
    return any((view.steps.backwards(s) or s.name == "grad") and bool(made & set(idents(s.call))) for s in sites)


def differentiates(view: View, site: Site) -> bool:
    """Whether a call is of those that need a graph; to clear a model's gradients alone needs none."""
    if site.name == "zero_grad":
        return not view.kinds.is_model(site.receiver, site.scope)
    return site.name == "grad"


@kept
def holds_out(view: View, header: ast.expr, scope: Scope) -> bool:
    """Whether a loop's header says that it runs over held-out data, or all callers that give it do."""
    over = view.kinds.iterated(header, scope)
    key = dotted(over)
    if any(map(EVALUATION.search, idents(over))):
        return True
    given = [passed(site, scope, key) for site in view.calls.callers(scope)] if key in scope.params else []
    return bool(given) and all(value is not None and any(map(EVALUATION.search, idents(value))) for value in given)


@kept
def tests_by_name(view: View, scope: Scope, loops_here: bool) -> bool:
    """Whether a function, or all that call it in a loop, say by their names that they evaluate."""
    if loops_here:
        return EVALUATION.search(scope.name)
    callers = view.calls.callers(scope)
    return bool(callers) and all(EVALUATION.search(c.scope.name) and loops(c.stmt, c.module) for c in callers)


def set_to_eval(site: Site, name: str | None, nest: list[Loop]) -> bool:
    """Whether the function switched the model of this name to eval mode before, and not back."""
    if name is None or (site.scope.kind != "function" and not nest):
        return False
    return site.scope.kind != "class" and in_eval(site, name)


def in_eval(site: Site, name: str) -> bool:
    """Whether the last switch of a model before a call, where that stands, is to eval mode."""
    switched = [s for s in switches(site.scope, name) if s.line < site.line]
    return bool(switched) and switched[-1].name == "eval"


def switches(scope: Scope, name: str) -> list[Site]:
    """The calls that switch the model of a name in a function or a file, in their order."""
    modes = (*scope.named("eval"), *scope.named("train"))
    return sorted((s for s in modes if dotted(s.receiver) == name), key=lambda s: s.line)


def after_training(view: View, site: Site, nest: list[Loop]) -> bool:
    """Whether a file that trains what it runs by itself (a notebook, say) then predicts with the model in eval mode."""
    scope, name = site.scope, run_model(site)
    if scope.kind != "module" or nest or name is None or not in_eval(site, name):
        return False
    return view.trainings.trains([s for s in scope.sites if s.line < site.line])


def until_next_switch(site: Site, loop: Loop | None = None) -> list[Site]:
    """The calls beside one of a file's own, or in a loop that trains: those between two switches of the model, where
    the first stands in the loop.
    """
    if site.scope.kind != "module" and loop is None:
        return site.scope.sites
    first, end = (loop.lineno, loop.end_lineno or loop.lineno) if loop is not None else (0, len(site.module.lines))
    modes = [s.line for s in switches(site.scope, switched_model(site) or "") if first <= s.line <= end]
    start = max((line for line in modes if line < site.line), default=first)
    end = min((line for line in modes if line > site.line), default=end + 1)
    return [s for s in site.scope.sites if start <= s.line < end]


def runs_part(view: View, site: Site) -> bool:
    """Whether a call runs a part of a model that is switched here (`self.model.encoder(x)`), or a method of its that
    runs its layers.
    """
    receiver = site.receiver
    if receiver is None or dotted(receiver) != switched_model(site):
        return False
    if is_forward(view, site):
        return True
    owner = view.kinds.module_class(receiver, site.scope)
    method = owner.defs.get(site.name) if owner is not None else None
    return method is not None and any(layer(s) and not shields(s) for s in method.sites)


def layer(site: Site) -> bool:
    """Whether a call is of a layer of the object, by its name or out of a list (`self.convs[i](x)`)."""
    func, owner = site.call.func, site.scope.owner
    name = dotted(func.value if isinstance(func, ast.Subscript) else func) or ""
    return name.startswith("self.") and owner is not None and last(func) not in owner.defs


def switched_model(site: Site) -> str | None:
    """The name of the model whose mode decides about a call: of one that the function switches, if it calls a part."""
    name = dotted(site.receiver)
    if name not in (None, "self") and any(dotted(s.receiver) == name for s in site.scope.named("eval")):
        return name
    return run_model(site)
