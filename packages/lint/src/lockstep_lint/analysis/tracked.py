"""Which ranks have a run of a tracker, where a program asks for it (`if wandb.run is not None`)."""

import ast
from collections.abc import Callable

from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.context import choices, guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import dotted, walk

__all__ = ["RUN", "main_has_run"]

# What holds the run of a process, and what starts it.
RUN, INIT = "wandb.run", "wandb.init"
MAX_CALLERS = 20

Test = Callable[[ast.expr, Scope, bool], int]


def main_has_run(calls: Calls, module: Module, test: Test) -> bool:
    """Whether only the main rank starts a run, as far as starts are in sight: where there are none, whoever asks for a
    run leaves it to others to say on which ranks there is one.
    """
    own = starts(calls, calls.project.closure(module))  # other programs beside it may start runs of their own
    found = own or starts(calls, calls.project.family(module))
    return all(on_main(calls, site, test, 0) for site in found)


def starts(calls: Calls, members: tuple[Module, ...]) -> list[Site]:
    """The calls in some files that start a run."""
    sites = (site for member in members for site in member.sites("init"))
    return [site for site in sites if calls.names.qualify(site.call.func, site.scope) == INIT]


def on_main(calls: Calls, site: Site, test: Test, depth: int) -> bool:
    """Whether only the main rank makes a call, by the tests around it or around the calls of its function."""
    for guard in (*guards(site.stmt, site.module), *choices(site)):
        asks_itself = any(dotted(node) == RUN for node in walk(guard.test))
        if not asks_itself and test(guard.test, site.scope, guard.when) == 1:
            return True
    callers = calls.callers(site.scope)[:MAX_CALLERS] if site.scope.kind == "function" and depth < 5 else []
    return bool(callers) and all(on_main(calls, each, test, depth + 1) for each in callers)
