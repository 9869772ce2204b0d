"""LS019: no destroy_process_group."""

import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import Words
from lockstep_lint.analysis.view import View
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

ENDS = Words(
    r"(?<!is_)(?<!get_)(?<!to_)dist(?!anc|il|ort|\d|_?(loss|mat|map)|ributed\w*(sampler|loader|data|model|optim))|ddp(?!m)"
    r"|clean|destroy|teardown|tear_down|shut_?down|finali[sz]e|finish|(?<![a-z])exit|launch|^init(?!_?log|_?seed)"
    r"|^setup(?!_?log|_?seed)|^main|^run|worker(?!_?(init|seed))",
    re.IGNORECASE,
)
# What only asks for something, or changes a value (`is_dist_avail`, `convert_to_distributed_tensor`, `cdist`).
ASKS = re.compile(r"(is|has|get|convert)_|[pc]?dists?$")

END = "destroy_process_group"
# Helpers of that name end it, wherever they come from.
HELPERS = ("cleanup_dist", "dist_cleanup")


def check(view: View) -> Iterator[Found]:
    """Look for the end of the process group in the programs that start one."""
    if ends_group(view) or any(not ASKS.match(site.name) for site in view.hidden_calls(ENDS)):
        return  # what a file that is not here does may end it
    runnable = any(member.is_script for member in view.project.users(view.module))
    for site in view.sites("init_process_group"):
        if runnable or view.training or site.scope.kind == "module" or run_here(view, site.scope):
            yield at(
                site, "the process group is never ended: call torch.distributed.destroy_process_group() at the end"
            )


def run_here(view: View, scope: Scope) -> bool:
    """Check whether the top level of a file that nothing imports calls a function."""
    called = any(site.scope is view.module.top for site in view.calls.callers(scope))
    return called and not view.project.importers(view.module)


def ends_group(view: View) -> bool:
    """Check whether a file's programs end the group, or register its end with atexit."""
    if not view.module.by_name.get("init_process_group"):
        return True
    own = view.module.is_script  # other scripts that import it end their own runs
    members = view.project.closure(view.module) if own else view.project.family(view.module)
    found = [run for run in runs(view) if not own or run.entry.module is view.module]
    started = any(run.entry.kind == "module" and run.of("start") for run in found)
    if any(run.of("end") for run in found if run.entry.kind == "module" or not started) or any(
        word in member.text for word in HELPERS for member in members
    ):
        return True
    sites = [site for member in members for site in member.sites(END)]
    handed = sum(member.words[END] for member in members) > len(sites)
    return handed or any(named_elsewhere(view, site.scope) for site in sites)


def named_elsewhere(view: View, scope: Scope) -> bool:
    """Check whether code out of sight, or Python itself, may run a function."""
    return scope.kind == "module" or bool(scope.decorators or view.calls.namesakes(scope))


RULE = Rule("LS019", Severity.HINT, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS | {"lightning_fabric"})
