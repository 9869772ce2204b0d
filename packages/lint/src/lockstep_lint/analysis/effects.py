"""What a function does in the end: its own calls and those of the project's functions that it calls."""

import ast
from collections.abc import Callable, Iterator

from lockstep_lint.analysis.budget import WORK
from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import is_true, last, walk

__all__ = ["COLLECTIVES", "Effects"]

COLLECTIVES = {
    "barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast",
    "broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "gather", "scatter", "gather_object", "scatter_object_list", "monitored_barrier",
}  # fmt: skip
MAX_FUNCTIONS = 80


class Effects:
    """Searches the calls that run when a function or a block runs, with the path that leads there forgotten."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.names_of = calls.names
        self.project = calls.project

    def below(self, sites: list[Site]) -> Iterator[Site]:
        """The given calls and all calls of the project's functions that they run."""
        seen: set[Scope] = set()
        queue: list[Scope] = []
        yield from self.enter(sites, seen, queue)
        while queue and len(seen) < MAX_FUNCTIONS:
            yield from self.enter(queue.pop().sites, seen, queue)

    def enter(self, sites: list[Site], seen: set[Scope], queue: list[Scope]) -> Iterator[Site]:
        for site in sites:
            WORK.spend()
            yield site
            for function in self.calls.runs(site):
                if function not in seen:
                    seen.add(function)
                    queue.append(function)

    @kept
    def names(self, scope: Scope) -> frozenset[str]:
        """The last names of all calls that run when a function runs."""
        return frozenset(site.name for site in self.below(scope.sites))

    def block(self, stmt: ast.stmt, scope: Scope) -> list[Site]:
        """The calls written in a statement and the blocks in it."""
        end = stmt.end_lineno or stmt.lineno
        WORK.spend(len(scope.sites))
        return [site for site in scope.sites if stmt.lineno <= site.stmt.lineno and (site.stmt.end_lineno or 0) <= end]

    def does(self, site: Site, names: set[str]) -> bool:
        """Whether a call is one of `names` or runs a function that calls one."""
        return site.name in names or any(names & self.names(function) for function in self.calls.runs(site))

    def anywhere(self, module: Module, *names: str) -> bool:
        """Whether a call with one of the names stands in any file of the programs that the file is part of."""
        return any(name in member.by_name for member in self.project.family(module) for name in names)

    def mentioned(self, module: Module, *words: str) -> bool:
        """Whether the text of any file of the programs that the file is part of has one of the words."""
        return any(self.project.says(module, word) for word in words)

    def mentioned_in(self, scope: Scope, word: str) -> bool:
        """Whether the text of a function has the word."""
        node = scope.node
        start, end = getattr(node, "lineno", 1), getattr(node, "end_lineno", None)
        return any(word in line for line in scope.module.lines[start - 1 : end])

    def is_collective(self, site: Site) -> bool:
        """Whether a call is a collective of torch.distributed over the default group."""
        if site.name not in COLLECTIVES:
            return False
        full = self.names_of.qualify(site.call.func, site.scope)
        if not full.startswith("torch.distributed"):
            return False
        return not any(item.arg == "group" for item in site.call.keywords)

    def find(self, sites: list[Site], wanted: Callable[[Site], bool]) -> Site | None:
        """The first call, in `sites` or in what they run, that is wanted."""
        return next((site for site in self.below(sites) if wanted(site)), None)


def turns_off_gradients(node: ast.expr) -> bool:
    """Whether a context or decorator keeps no graph: no_grad, inference_mode, set_grad_enabled(False or a flag)."""
    name = last(node)
    if name == "set_grad_enabled" and isinstance(node, ast.Call):
        return not any(is_true(value) for value in node.args)
    return name in ("no_grad", "inference_mode") or any(
        isinstance(item, ast.Attribute) and item.attr in ("no_grad", "inference_mode") for item in walk(node)
    )
