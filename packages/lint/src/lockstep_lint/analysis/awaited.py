"""Files that rank 0 writes and all ranks read: which read follows which write, and what has the ranks wait between."""

import ast

from lockstep_lint.analysis.context import Guard, above, apart, guards, inside
from lockstep_lint.analysis.effects import COLLECTIVES
from lockstep_lint.analysis.filed import handed_path, makes_file, reads_file, same_path
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted, walk
from lockstep_lint.analysis.view import View

__all__ = ["leads_to", "read_by_all", "saved_by_main", "waits"]

# What holds the ranks until all are there: barriers, and exchanges of objects, which the host waits for.
WAITS = {"barrier", "monitored_barrier", "wait_for_everyone", "synchronize"}
WAITS |= {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
# What holds no rank back, but has it wait for the main one.
TOGETHER = COLLECTIVES | {"backward", "allreduce", "allgather"}


def leads_to(view: View, save: Site, written: ast.expr, load: Site, path: ast.expr) -> bool:
    """Whether a call may read what another one has written before: the same path, none of whose names is bound anew
    between, on one way through the function.
    """
    scope = save.scope
    if not same_path(view, written, path, scope) or apart(save, load):
        return False
    names = {dotted(node) or "" for part in (written, path) for node in walk(part)}
    if any(save.line < bind.stmt.lineno < load.line for name in names for bind in scope.binds.get(name, [])):
        return False
    return not any(inside(save.stmt, exit.stmt, save.module) for exit in left_before(load))


def left_before(site: Site) -> list[Guard]:
    """The tests whose arm leaves the function or the loop before a call (`if done: ...; return`)."""
    around = {stmt for stmt, _ in above(site.stmt, site.module)}
    return [guard for guard in guards(site.stmt, site.module) if guard.stmt not in around]


def saved_by_main(view: View, site: Site) -> ast.expr | None:
    """The path of a file that a call writes on rank 0 alone, by the test around it or in a helper."""
    path, helped = makes_file(view, site), handed_path(view, site, makes_file, 1)
    if path is None and helped is None:
        path = handed_path(view, site, makes_file, 0)
    alone = path is not None and view.ranks.side(site.stmt, site.scope) == 1  # the dear question last
    return path if alone else helped


def read_by_all(view: View, site: Site) -> ast.expr | None:
    """The path of a file that a call reads on all ranks, itself or in a helper."""
    if view.ranks.side(site.stmt, site.scope):
        return None
    return reads_file(view, site) or handed_path(view, site, reads_file, 0)


def waits(view: View, scope: Scope, save: Site, load: Site) -> bool:
    """Whether a barrier, or something that may hold one, stands between, also at the end of a helper that writes or at
    the start of one that reads; where a helper writes or reads, whatever the ranks do together.
    """
    writer = None if makes_file(view, save) is not None else view.calls.target(save.call, scope)
    reader = None if reads_file(view, load) is not None else view.calls.target(load.call, scope)
    names = WAITS | (TOGETHER if writer or reader else set())
    between = [s for s in scope.sites if save.line < s.line < load.line]
    if writer is not None:
        between += after(writer.sites, [s for s in writer.sites if view.full(s) == "torch.save" or makes_file(view, s)])
    if reader is not None:
        first = min((s.line for s in reader.sites if reads_file(view, s) is not None), default=0)
        between += [s for s in reader.sites if s.line < first]
    return any(view.full(s) != "torch.cuda.synchronize" and view.effects.does(s, names) for s in between)


def after(sites: list[Site], these: list[Site]) -> list[Site]:
    """Those of some calls that stand after the last of others."""
    end = max((site.line for site in these), default=0)
    return [site for site in sites if site.line > end]
