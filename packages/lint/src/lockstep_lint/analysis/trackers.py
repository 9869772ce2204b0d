"""Calls that start or feed a tracker's run, by the tracker's module or by a run, wherever a function has it from."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted, is_none, keyword
from lockstep_lint.analysis.view import View

__all__ = ["LOGGERS", "apart_run", "tracked"]

MAX_CALLERS = 8
LOGGERS = {
    "wandb.init",
    "wandb.log",
    "wandb.watch",
    "swanlab.init",
    "swanlab.log",
    "mlflow.log_metric",
    "mlflow.start_run",
}
LOGGERS |= {"mlflow.log_metrics", "mlflow.log_param", "mlflow.log_params", "comet_ml.Experiment", "comet_ml.start"}
LOGGERS |= {"neptune.init_run", "neptune.init", "aim.Run", "clearml.Task.init", "trackio.init", "trackio.log"}
# The methods of a run of W&B that feed it.
RUNS = ("log", "watch")


def tracked(view: View, site: Site) -> str:
    """The full name of what a call calls; that of a tracker also where a function is given its module, or imports it
    where it is needed (`wandb = None`, then `if args.wandb: import wandb`), and for the methods of a W&B run.
    """
    full, name = view.full(site), dotted(site.call.func) or ""
    if full or not name:
        return full
    if name in LOGGERS:
        head = name.partition(".")[0]
        binds = site.scope.binds.get(head, [])
        none = bool(binds) and all(bind.value is not None and is_none(bind.value) for bind in binds)
        known = (none and head in site.module.imports) or (head in site.scope.params and not binds)
        if known and not any(by_one(view, *each) for each in holders(view, site, head)):
            return name
    if site.name in RUNS and view.project.says(view.module, "wandb.init"):
        made = view.origins.calls_of(site.receiver, site.scope)
        runs = [s for call, home, known in made if known == "wandb.init" for s in home.named("init") if s.call is call]
        kept = all(view.ranks.main_only(s.stmt, s.scope) or view.ranks.chosen(s) for s in runs)
        return "" if kept or any(map(apart_run, runs)) else f"wandb.{site.name}"
    return ""


def holders(view: View, site: Site, head: str) -> Iterator[tuple[str, Scope]]:
    """The names for a tracker's module, where a call reads it and where its function is given it."""
    yield head, site.scope
    for caller in view.calls.callers(site.scope)[:MAX_CALLERS] if head in site.scope.params else ():
        yield dotted(passed(caller, site.scope, head)) or "", caller.scope


def by_one(view: View, name: str, scope: Scope) -> bool:
    """Whether a function imports a tracker on one rank alone: it is None on the others."""
    stmts = (stmt for stmt in scope.stmts if isinstance(stmt, ast.Import | ast.ImportFrom))
    return any(
        (alias.asname or alias.name) == name and view.ranks.side(stmt, scope) for stmt in stmts for alias in stmt.names
    )


def apart_run(site: Site) -> bool:
    """Whether a tracker's run is one of a group, as W&B says to where each rank has a run."""
    return keyword(site.call, "group") is not None
