"""Which files of a project import which, found before any is parsed and whatever files are to be checked."""

import functools
import os
from collections.abc import Iterable

from lockstep_lint.analysis.imports import Paths, lines_of, root_of, scan, stem

__all__ = ["Graph", "Importers", "draw"]

Importers = dict[str, tuple[str, ...]]


class Graph:
    """For each file of a project (real paths), the files of the project that seem to import it.

    A project is searched when it is first asked about, its answers are its own: they depend on what lies there, not on
    which files are checked, nor on which projects were searched before.
    """

    def __init__(
        self, projects: dict[str, Importers] | None = None, added: dict[str, tuple[str, ...]] | None = None
    ) -> None:
        self.projects = {} if projects is None else projects
        self.added = {} if added is None else added
        self.paths = Paths(self.places)
        self.files = functools.cache(scan)
        self.lines = functools.cache(lines_of)

    def importers(self, path: str) -> tuple[str, ...]:
        """The files that seem to import the one at the real path `path`, sorted."""
        return self.project(self.paths.root(os.path.dirname(path))).get(path, ())

    def project(self, root: str) -> Importers:
        """For each file of one project, those of its files that seem to import it."""
        if root not in self.projects:
            self.projects[root] = self.search(root)
        return self.projects[root]

    def search(self, root: str) -> Importers:
        files = self.files(root)
        stems = {stem(path) for path in files}
        found: dict[str, set[str]] = {}
        for path in files:
            for target in self.imported(path, stems):
                if target != path and self.paths.root(os.path.dirname(target)) == root:
                    found.setdefault(target, set()).add(path)
        return {target: tuple(sorted(sources)) for target, sources in found.items()}

    def imported(self, path: str, stems: set[str]) -> set[str]:
        """The real paths of the project files that a file's import lines mean."""
        folder = os.path.dirname(path)
        named = (one for one in self.lines(path).mentioned if one[0].rpartition(".")[2] in stems)
        found = (self.paths.where(folder, name, level) for name, level in named)
        return {self.paths.real(target) for target in found if target is not None}

    def places(self, root: str) -> tuple[str, ...]:
        """The folders that the programs of a project add to those where Python looks."""
        if root not in self.added:
            found = (place for path in self.files(root) for place in self.lines(path).places(path, root))
            self.added[root] = tuple(dict.fromkeys(found))
        return self.added[root]

    def together(self, paths: list[str]) -> list[list[str]]:
        """The paths in groups that imports connect, as far as is known, in the order of their first members."""
        parent: dict[str, str] = {}

        def top(name: str) -> str:
            while parent.setdefault(name, name) != name:
                parent[name] = parent[parent[name]]
                name = parent[name]
            return name

        for importers in self.projects.values():
            for target, sources in importers.items():
                for source in sources:
                    parent[top(source)] = top(target)
        groups: dict[str, list[str]] = {}
        for path in paths:
            groups.setdefault(top(os.path.realpath(path)), []).append(path)
        return list(groups.values())


def draw(paths: Iterable[str]) -> Graph:
    """The graph, with the projects that the paths belong to searched."""
    graph = Graph()
    for root in dict.fromkeys(
        root_of(folder) for folder in dict.fromkeys(os.path.dirname(path) or "." for path in paths)
    ):
        graph.project(root)
    graph.lines.cache_clear()
    return graph
