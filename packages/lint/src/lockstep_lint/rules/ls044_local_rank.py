"""LS044: the process group started with the rank on the node."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, argument, constant, dotted, last, strings, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

LOCAL = Words(r"^(args_)?local_?rank$")
HOME = re.compile(r"^(\w+://)?(localhost|127\.\d+\.\d+\.\d+)(:|$)")
# A number of processes that one node has.
NODE = Words(r"device_count|local_world|n_?gpus?|num_gpus|nprocs|gpus_per_node")


def check(view: View) -> Iterator[Found]:
    """Look at the rank that the start of a process group is given."""
    for site in view.sites("init_process_group"):
        rank, count = argument(site.call, 4, "rank"), argument(site.call, 3, "world_size")
        if rank is None or at_home(site):
            continue
        if is_local(view, rank, site.scope) and not of_node(view, count, site.scope):
            yield at(
                site, "gives the rank on the node as the rank of all: a second node's processes repeat it, and hang"
            )


def at_home(site: Site) -> bool:
    """Check whether the rendezvous is local to this machine, out of other nodes' reach."""
    if HOME.search(str(constant(argument(site.call, 1, "init_method")))):
        return True
    made = [stmt for stmt in site.scope.stmts if isinstance(stmt, ast.Assign) and "MASTER_ADDR" in strings(stmt)]
    there = [guard.test for guard in guards(site.stmt, site.module)]
    sure = [stmt for stmt in made if all(guard.test in there for guard in guards(stmt, site.module))]
    return any(HOME.search(str(constant(stmt.value))) for stmt in sure)


def is_local(view: View, rank: ast.expr, scope: Scope) -> bool:
    """Check whether a value is certainly what the launcher calls the local rank."""
    origins = view.origins.of(rank, scope)
    numbers = view.ranks.tests.numbers
    return bool(origins) and all(
        (
            not any(isinstance(part, ast.BinOp) for part in walk(o.node))  # `node * gpus + local_rank`
            and "LOCAL_RANK" in strings(o.node)
        )
        or (LOCAL.search(last(o.node)) and not numbers.numbered(dotted(o.node) or "", o.scope))
        for o in origins
    )


def of_node(view: View, count: ast.expr | None, scope: Scope) -> bool:
    """Check whether a number of processes is one node's, in a script for one."""
    if count is None:
        return False
    origins = view.origins.of(count, scope)
    found = (count, *(origin.node for origin in origins))
    return any(NODE.search(text) for node in found for text in (last(node), *strings(node))) or any(
        isinstance(node, ast.Constant) for node in found
    )


RULE = Rule("LS044", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
