"""One training script as `--migrate` sees it: its calls by their full names, and the rows that are told of it.

script = Script(read("train.py"))
for site, full in script.calls(): ...
row = script.row(site.call, "becomes", "engine.step()")
"""

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from lockstep.migrate.parsing import Analysis, Module, Project, Scope, Site, Source, View, dotted, walk

__all__ = ["ACTIONS", "BECOMES", "GOES", "REFUSED", "STAYS", "Row", "Script"]

ACTIONS = BECOMES, GOES, STAYS, REFUSED = "becomes", "goes", "stays", "refused"
_WIDTH = 110


class Row(NamedTuple):
    """What is told of one place.

    Attributes:
        line: from 1; in a notebook of the joined cells.
        action: one of BECOMES, GOES, STAYS, REFUSED.
        there: what stands there, in one line.
        here: what it becomes; what does it; what it is read as; why it is refused, and the way out.
    """

    line: int
    action: str
    there: str
    here: str


@final
class Script:
    """A parsed file, with what the files that it imports say of its names."""

    def __init__(self, source: Source) -> None:
        project = Project()
        self.module: Module = project.add(os.path.realpath(source.path), source)
        project.checked.append(self.module)
        self.source = source
        self.view = View(self.module, Analysis(project))

    @property
    def tree(self) -> ast.Module:
        """The whole file."""
        assert self.source.tree is not None
        return self.source.tree

    @functools.cached_property
    def called(self) -> list[tuple[Site, str]]:
        """Every call with the full name of what it calls, "" where that is not known."""
        return [(site, self.view.full(site)) for site in self.module.sites()]

    def made(self, full: re.Pattern[str]) -> list[Site]:
        """The calls of what has such a full name, or of a class that derives from it."""
        return [site for site, name in self.called if full.search(name) or self._derives(site, full)]

    def classes(self, full: re.Pattern[str]) -> Iterator[Scope]:
        """The file's classes that derive from what has such a full name."""
        for scope in self.module.scopes:
            if scope.kind == "class" and any(full.search(name) for name in self.view.names.bases_of(scope)):
                yield scope

    def _derives(self, site: Site, full: re.Pattern[str]) -> bool:
        found = self.view.names.definition(site.call.func, site.scope)
        if found is None or found.kind != "class":
            return False
        return any(full.search(name) for name in self.view.names.bases_of(found))

    def named(self, sites: list[Site]) -> set[str]:
        """The names that the results of these calls are given anywhere (`trainer`, `self.accelerator`)."""
        calls = {site.call for site in sites}
        return {
            key
            for scope in self.module.scopes
            for key, binds in scope.binds.items()
            for bind in binds
            if bind.value is not None and not bind.path and any(node in calls for node in walk(bind.value))
        }

    def attributes(self, keys: set[str]) -> Iterator[ast.Attribute]:
        """Each place that reads an attribute of one of these objects."""
        for node in walk(self.tree):
            if isinstance(node, ast.Attribute) and dotted(node.value) in keys:
                yield node

    def methods(self, keys: set[str], test: Callable[[str], bool]) -> Iterator[Site]:
        """The calls of such methods of these objects."""
        for site in self.module.sites():
            if test(site.name) and dotted(site.receiver) in keys:
                yield site

    def line(self, node: ast.AST) -> str:
        """The line where it begins, as it stands."""
        number = getattr(node, "lineno", 1)
        return shortened(self.source.lines[number - 1].strip()) if number <= len(self.source.lines) else ""

    def row(self, node: ast.AST, action: str, here: str, there: str = "") -> Row:
        """What is told of a place; `there`: the line, unless something is said."""
        return Row(getattr(node, "lineno", 1), action, there or self.line(node), here)


def shortened(text: str) -> str:
    """At most so many characters, in one line."""
    plain = " ".join(text.split())
    return plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH - 3]}..."
