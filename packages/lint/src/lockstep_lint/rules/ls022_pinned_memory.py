"""LS022: pin_memory without non_blocking; no workers (an opinion)."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import turns_off_gradients
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import Words, argument, constant, has_star, idents, keyword, last
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.values import PREPARES, value_at
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at, edit

BLOCKS = "the batch is in pinned memory but this move waits for it: add non_blocking=True"
ALONE = "loads in the training process: give the loader num_workers"
PIN = Words(r"pin_mem(ory)?$", re.IGNORECASE)
# Names in a condition for pinning that hold where there is a GPU.
GPU = re.compile(r"is_available|cuda|gpu|device", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Look for blocking moves of batches from pinned memory, and for loaders without workers."""
    if any(map(pins, view.project.family(view.module))) and not view.frameworks & PREPARES:
        told: set[ast.AST] = set()
        for run in runs(view):
            for event in run.of("batch"):
                site = event.mark.site
                if site is None or event.module is not view.module or event.node in told:
                    continue
                if blocks(view, site) and of_pinned(view, run, event):
                    told.add(event.node)
                    yield at(site, BLOCKS, edit=edit("keyword", site.call, "non_blocking", "True"))
    for site in view.sites("DataLoader") if view.gpu else ():
        if view.full(site).startswith("torch") and not has_workers(view, site):
            yield at(site, ALONE, severity=Severity.OPINION)


def blocks(view: View, site: Site) -> bool:
    """Check whether a call moves to a device and waits for that."""
    place = argument(site.call, 0, "device")
    if keyword(site.call, "non_blocking") is not None or has_star(site.call) or len(site.call.args) > 1:
        return False
    if site.name == "to" and (place is None or "dtype" in idents(place) or view.full(site)):
        return False
    named = ast.unparse(place) if place is not None else ""
    return not (re.match(r"torch\.(float|u?int|long|double|half|bfloat|bool)", named) or view.is_cpu(place, site.scope))


def of_pinned(view: View, run: Run, event: Event) -> bool:
    """Check whether an event moves part of a pinned batch that is not held out."""
    if view.on_cpu(event.mark.site) if event.mark.site is not None else False:
        return False
    if not event.loops or any(turns_off_gradients(block.node) for block in event.withs):
        return False
    loop, backs = event.loops[-1], run.of("backward")
    training = any(loop in back.loops for back in backs)
    over = loop.node.iter if isinstance(loop.node, ast.For) else None
    if training and not any(loop is back.loops[-1] for back in backs if back.loops) and counts(over):
        return False  # once an epoch
    loaders = value_at(view, event).loaders
    names = [last(loader) for loader, _ in loaders] + [event.scope.name]
    return any(may_pin(view, *loader) for loader in loaders) and (training or not any(map(EVALUATION.search, names)))


def counts(over: ast.expr | None) -> bool:
    """Check whether a loop counts, as that of the epochs does."""
    return isinstance(over, ast.Call) and last(over) in ("range", "count", "trange")


def may_pin(view: View, loader: ast.expr, scope: Scope) -> bool:
    """Check whether a loader is out of sight, or may pin its memory."""
    made = [call for call, _, full in view.origins.calls_of(loader, scope) if full.endswith("DataLoader")]
    return not made or any(
        has_star(call) or constant(argument(call, 7, "pin_memory") or ast.Constant(False)) is not False for call in made
    )


@cache_answers
def pins(module: Module) -> bool:
    """Check whether a file pins memory, always or where there is a GPU."""
    if "pin_mem" not in module.text.lower():
        return False
    return any(
        isinstance(name, str) and PIN.search(name) and is_on(resolve(module, value)) for name, value in settings(module)
    )


def settings(module: Module) -> Iterator[tuple[object, ast.expr | None]]:
    """Yield the names and values that a file sets: arguments, flags, keys, variables, parameters."""
    for site in module.sites():
        call = site.call
        yield from ((item.arg, item.value) for item in call.keywords)
        flag = next((text for value in call.args if isinstance(text := constant(value), str)), None)
        if flag is not None:
            usual = call.args[1:] if site.name in ("get", "getattr", "setdefault") else []
            yield flag.replace("-", "_"), usual[-1] if usual else keyword(call, "default")
    for table in module.dicts:
        yield from ((constant(key), value) for key, value in zip(table.keys, table.values, strict=True))
    for scope in module.scopes:
        for stmt in scope.stmts:
            if isinstance(stmt, (ast.Assign, ast.AnnAssign)):
                target = stmt.targets[0] if isinstance(stmt, ast.Assign) else stmt.target
                yield constant(target.slice) if isinstance(target, ast.Subscript) else last(target), stmt.value
        if isinstance(scope.node, ast.FunctionDef):
            args = scope.node.args
            yield from ((a.arg, value) for a, value in zip(reversed(args.args), reversed(args.defaults), strict=False))
            yield from ((a.arg, value) for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True))


def resolve(module: Module, value: ast.expr | None) -> ast.expr | None:
    """Return the one value of a name of the file's top level, else the expression."""
    binds = module.top.binds.get(value.id, []) if isinstance(value, ast.Name) else []
    return binds[0].value if len(binds) == 1 and binds[0].how == "assign" else value


def is_on(value: ast.expr | None) -> bool:
    """Check whether a value is True, or asks for a GPU."""
    if value is None or isinstance(value, ast.Constant):
        return constant(value) is True
    return any(GPU.search(name) for name in idents(value))


def has_workers(view: View, site: Site) -> bool:
    """Check whether a loader may have workers, or serves one batch alone."""
    value = argument(site.call, 5, "num_workers")
    if value is None:
        return has_star(site.call) or ("next" in site.module.text and "next(iter(" in ast.unparse(site.stmt))
    found = view.origins.of(value, site.scope)
    return not found or any(constant(origin.node) != 0 for origin in found)


RULE = Rule("LS022", Severity.HINT, Confidence.HIGH, check, fix="safe", moot=frozenset({"lockstep"}))
