"""LS004: set_epoch missing or constant."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.context import inside
from lockstep_lint.analysis.drafts import epoch_set
from lockstep_lint.analysis.index import Module, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import constant, dotted, idents, keyword, last, strings
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event
from lockstep_lint.events.loaders import trained_on
from lockstep_lint.events.query import given_as, shown_at, things
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import step_loops
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule

FIXED = "set_epoch always gets the same number: pass the epoch, or every epoch has the same order"
NEVER = "set_epoch is never called, so every epoch has the first one's order: call sampler.set_epoch(epoch)"
# What keeps a program's options.
OPTIONS = ("args", "cfg", "config", "opt")


def check(view: View) -> Iterator[Found]:
    """Find epoch samplers without set_epoch, and set_epoch with a constant."""
    programs = runs(view)
    if not any(run.of("sampler", "set_epoch") for run in programs):
        return
    calls = [event for run in programs for event in run.of("set_epoch")]
    alike = {event.node: all(stays(view, e) for e in calls if e.node is event.node) for event in calls}
    changed = {identity_of(event) for event in calls if not alike[event.node]}
    for event in calls:
        if event.module is view.module and alike[event.node] and identity_of(event) not in changed:
            yield Found(event.node, FIXED)
    if any(f"{quote}set_epoch{quote}" in m.text for m in view.project.family(view.module) for quote in "'\""):
        return  # called by its name, out of sight
    set_on = [made for event in calls for made in things(view, event.mark.subject, event.scope) or (None,)]
    set_on = [made for made in set_on if not (isinstance(made, ast.Constant) and made.value is None)]
    if all(isinstance(made, ast.Call) and last(made) != "getattr" for made in set_on):
        keys = {key for event in calls if "." in (key := dotted(event.mark.subject) or "")}
        told = never(
            view, [run for run in programs if run.of("sampler") and (has_epochs(run) or endless(view))], set_on
        )
        yield from (found for site, found in told if not keys & {bind.key for bind in site.scope.bound(site.stmt)})


def never(view: View, programs: list[Run], set_on: list[object]) -> Iterator[tuple[Site, Found]]:
    """Yield the samplers that train in several epochs, without those that set_epoch is called on."""
    trained = trained_on(view) if any(run.of("sampler") for run in programs) else {}
    for run in programs:
        for event in run.of("sampler"):
            site, made = shown_at(view, event), event.mark.site
            own = [trained.get(loader) for loader in loaders(view, made)] if made is not None else []
            if own and not any(used is not False for used in own):
                continue  # the loops over its loaders compute no gradients
            if site is None or made is None or not shuffles(event) or event.node in set_on or is_listed(site):
                continue
            if not any(EVALUATION.search(name) for name in (*given_names(site.stmt), *given_names(made.stmt))):
                yield site, Found(site.call, NEVER, proposal=epoch_set(view, site) if site is made else ())


def loaders(view: View, made: Site) -> set[ast.Call]:
    """Return the loaders of its function that use a sampler."""
    found = [(site.call, keyword(site.call, "sampler")) for site in made.scope.named("DataLoader")]
    return {call for call, given in found if given is not None and made.call in things(view, given, made.scope)}


def given_names(stmt: ast.stmt) -> Iterator[str]:
    """Yield the words in a statement that makes a sampler."""
    plain = isinstance(stmt, ast.Assign | ast.Return | ast.Expr) and not isinstance(stmt.value, ast.DictComp)
    target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
    several = target.elts if isinstance(target, ast.Tuple) else []
    if several and not all(any(map(EVALUATION.search, idents(part))) for part in several):
        return iter(())  # `loader, val_loader = make(train_set, val_set)`
    return iter((*idents(stmt), *strings(stmt))) if plain else iter(())


def is_listed(site: Site) -> bool:
    """Check whether a list contains a call's sampler, which may get its epochs there."""
    names = {bind.key for bind in site.scope.bound(site.stmt)}
    return any(dotted(value) in names for other in site.scope.named("append") for value in other.call.args)


def shuffles(event: Event) -> bool:
    """Check whether a sampler gives each epoch another order."""
    call = event.node
    return isinstance(call, ast.Call) and constant(keyword(call, "shuffle")) is not False


def has_epochs(run: Run) -> bool:
    """Check whether a program's loop of steps is in another loop."""
    found = step_loops(run)
    deep = not found and any(len(event.loops) > 1 for event in run.of("backward"))
    return deep or any(each.backwards[0].loops[0] is not each.loop for each in found)


def endless(view: View) -> bool:
    """Check whether the programs restart a loader: an endless loop, or another `iter`."""
    return any(renews(view, member) for member in view.project.family(view.module))


@cache_answers
def renews(view: View, module: Module) -> bool:
    """Check whether a file takes a loader up again when it has run out."""
    for scope in (scope for scope in module.scopes if scope.kind == "function"):
        for stmt in scope.stmts:
            inner = stmt.body[0] if isinstance(stmt, ast.While) else None
            if isinstance(inner, ast.For) and view.kinds.is_loader(inner.iter, scope):
                return True
    return False


def identity_of(event: Event) -> tuple[object, str | None]:
    """Identify a sampler by its name, and by the class if it is an attribute."""
    name = dotted(event.mark.subject)
    return (event.scope.owner if (name or "").startswith("self.") else None), name


def stays(view: View, event: Event) -> bool:
    """Check whether set_epoch gets a literal, or a name that no loop changes."""
    call = event.node
    if not isinstance(call, ast.Call) or not call.args or not event.loops:
        return False
    node, scope = given_as(event, call.args[0], event.scope)
    key = dotted(node)
    if key is None:
        return isinstance(constant(node), int)
    if key.startswith("self."):
        return False
    around = [loop.node for loop in event.loops if loop.scope is scope and isinstance(loop.node, ast.stmt)]
    if not around or key in scope.globals or (key.partition(".")[0] not in OPTIONS and "." in key):
        return False
    changes = [bind.stmt for bind in scope.binds.get(key, [])]
    return not any(stmt is around[0] or inside(stmt, around[0], scope.module) for stmt in changes)


MOOT = TRAINERS | {"accelerate", "lightning_fabric"}
RULE = Rule("LS004", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=MOOT, placed=True)
