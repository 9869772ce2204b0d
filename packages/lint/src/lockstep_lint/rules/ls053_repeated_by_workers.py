"""LS053: loader workers that each read a whole iterable data set."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import find_passed
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, constant, dotted, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

# What divides the data among workers, or draws from it by chance, which a copy repeats rightly.
SPLITS = re.compile(
    r"worker|rank|shard|split|partition|world|islice|rand|shuffle|sample|choice|perm|queue", re.IGNORECASE
)
# What makes a sequence that is the same in each worker.
SEQUENCES = {"glob", "rglob", "iglob", "listdir", "list", "sorted", "range", "open", "readlines", "read_csv"}


def check(view: View) -> Iterator[Found]:
    """Look at the loaders with workers, and at the classes of their data sets."""
    for site in view.sites("DataLoader"):
        if has_workers(view, site) and keyword(site.call, "worker_init_fn") is None:
            made = view.origins.calls_of(argument(site.call, 0, "dataset"), site.scope)
            owners = [view.names.definition(call.func, scope) for call, scope, _ in made]
            if owners and all(owner is not None and repeats(view, owner) for owner in owners):
                yield at(site, "each worker reads the whole data set: divide it by get_worker_info() in __iter__")


def has_workers(view: View, site: Site) -> bool:
    """Check whether a loader has a literal number of workers, or a caller gives one."""
    value = keyword(site.call, "num_workers")
    name = dotted(value)
    if name is not None and name in site.scope.params and name not in site.scope.binds:
        given = (constant(find_passed(caller, site.scope, name)) for caller in view.calls.callers(site.scope))
        return any(isinstance(number, int) and number > 0 for number in given)
    found = [constant(origin.node) for origin in view.origins.of(value, site.scope)]
    return bool(found) and all(isinstance(number, int) and number > 0 for number in found)


def repeats(view: View, owner: Scope) -> bool:
    """Check whether a class iterates over fixed data and ignores workers."""
    method = owner.defs.get("__iter__")
    bases = [name.split(".")[-1] for name in view.names.bases_of(owner)]
    start, end = owner.node.lineno, owner.node.end_lineno or 0  # type: ignore[attr-defined]
    text = "\n".join(owner.module.lines[start - 1 : end])
    if owner.kind != "class" or method is None or bases != ["IterableDataset"] or SPLITS.search(text):
        return False
    loops = [stmt for stmt in method.stmts if isinstance(stmt, ast.For)]
    return bool(loops) and all(is_fixed(view, origin.node) for origin in view.origins.of(loops[0].iter, method))


def is_fixed(view: View, node: ast.expr) -> bool:
    """Check whether an expression is a known sequence: a literal, or files."""
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    name = name or (node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else "")
    return isinstance(node, ast.List | ast.ListComp) or name in SEQUENCES


RULE = Rule("LS053", Severity.ERROR, Confidence.HIGH, check)
