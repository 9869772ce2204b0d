"""Where a program turns `print` off on the other ranks, and what is printed before that."""

import re
from collections.abc import Iterator

from lockstep.lint.analysis.calls import Calls
from lockstep.lint.analysis.index import Module, Scope, Site
from lockstep.lint.analysis.kept import kept
from lockstep.lint.analysis.nodes import constant

__all__ = ["Muting"]

# The words of a program that replaces print, and of what such functions are called.
REPLACED = ("builtin_print", "builtins.print", "__builtin__", "setup_for_distributed", "disable_print")
BUILTINS = re.compile(r"builtins?_*\.print$")
MAX_CALLERS = 40


class Muting:
    """Answers whether `print` has been replaced by the time a call is made."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.project = calls.project

    def muted(self, site: Site, module: Module) -> bool:
        """Whether a call may come after `print` was replaced in the programs of a file."""
        if not any(self.project.says(module, word) for word in REPLACED):
            return False
        places = self.places(module)
        return places is None or self.later(site.scope, site.line, places, 0)

    def later(self, scope: Scope, line: int, places: dict[Scope, list[int]], depth: int) -> bool:
        """Whether a line of a scope is reached after one of the places; what nobody is seen to call may be."""
        if any(place < line for place in places.get(scope, ())):
            return True
        if scope.kind != "function":
            return False
        callers = self.calls.callers(scope)[:MAX_CALLERS]
        if not callers or depth > 5:
            return scope not in places
        return any(self.later(site.scope, site.line, places, depth + 1) for site in callers)

    @kept
    def places(self, module: Module) -> dict[Scope, list[int]] | None:
        """The lines of each function of a file's programs that replace `print`, or call what does; None if what
        replaces it is not to be found.
        """
        table: dict[Scope, list[int]] = {}
        members = self.project.family(module)
        for member in members:
            for scope, line in self.replaced(member):
                table.setdefault(scope, []).append(line)
        queue = [scope for scope in table if scope.kind == "function"]
        if not table or any(not self.calls.callers(s) and self.named(s, members) for s in queue):
            return None
        seen = set(queue)
        while queue:
            for site in self.calls.callers(queue.pop()):
                table.setdefault(site.scope, []).append(site.line)
                if site.scope.kind == "function" and site.scope not in seen:
                    seen.add(site.scope)
                    queue.append(site.scope)
        return table

    def named(self, function: Scope, members: tuple[Module, ...]) -> bool:
        """Whether more than its definition names a function."""
        return sum(member.words[function.name] for member in members) > 1

    def replaced(self, module: Module) -> Iterator[tuple[Scope, int]]:
        """The lines of a file that give `print` another meaning everywhere."""
        if "builtin" not in module.text:
            return
        for scope in module.scopes:
            for key, binds in scope.binds.items():
                if BUILTINS.search(key):
                    yield from ((scope, bind.stmt.lineno) for bind in binds)
            for site in scope.named("setattr"):
                if [constant(value) for value in site.call.args[1:2]] == ["print"]:
                    yield scope, site.line
