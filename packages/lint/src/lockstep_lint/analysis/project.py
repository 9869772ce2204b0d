"""Collect the files that are checked together, and the imports between them."""

import os
from collections.abc import Iterable
from pathlib import PurePath

from lockstep_lint.analysis.budget import cache_answers, forget
from lockstep_lint.analysis.imports import EXTERNAL, KNOWN, Graph, Paths, root_of
from lockstep_lint.analysis.index import Module, index
from lockstep_lint.analysis.source import Source, read

__all__ = ["Project", "unit_test"]

# Files of the programs that one file is part of: what it imports, and what imports it. The bounds keep a script in a
# huge repository cheap; they are each file's own, so that no file's findings depend on which others are checked.
MAX_IMPORTED = 150
MAX_USERS = 60
# A file that names none of these trains nothing.
TRAINS = ("torch", "accelerat", "TrainingArguments", ".backward()")
# They compute gradients by a call of that name too.
OTHERS = ("paddle", "chainer", "mxnet", "oneflow", "mindspore", "jittor")


def may_train(text: str) -> bool:
    """Check whether a text names a training library, or computes gradients (`loss.backward()`)."""
    words = [word for word in TRAINS if word in text]
    return bool(words) and not (words == [TRAINS[-1]] and any(word in text for word in OTHERS))


class Project:
    """Loads files and resolves their imports."""

    def __init__(self, sources: Iterable[Source] = (), graph: Graph | None = None) -> None:
        self.graph = graph
        self.paths = graph.paths if graph is not None else Paths()
        self.modules: dict[str, Module | None] = {}
        self.checked: list[Module] = []
        self.real: dict[Module, str] = {}
        self.waiting: dict[str, Source] = {}
        for source in sources:
            self.take(source)

    def take(self, source: Source) -> None:
        """Index a file that may train. Any other waits until a file imports it."""
        real = os.path.realpath(source.path)
        if source.tree is not None and may_train(source.text):
            self.checked.append(self.add(real, source))
        else:
            self.waiting[real] = source

    def add(self, real: str, source: Source) -> Module:
        """Index a file that parses."""
        module = index(source)
        self.modules[real] = module
        self.real[module] = real
        return module

    def close(self) -> None:
        """Drop all files. Their tables form cycles, which cost the garbage collector a third of a run."""
        forget()
        for module in self.modules.values():
            for scope in module.scopes if module is not None else ():
                vars(scope).clear()
        self.modules.clear()

    @cache_answers
    def importers(self, module: Module) -> tuple[Module, ...]:
        """Return the files of the project that import a file."""
        real = self.real[module]
        sources = map(self.load, self.graph.importers(real) if self.graph is not None else ())
        return tuple(source for source in sources if source is not None and real in self.targets(source))

    @cache_answers
    def targets(self, module: Module) -> dict[str, str]:
        """Map the real paths of a file's imported project files to the paths found."""
        found: dict[str, str] = {}
        for imported in module.imported:
            for name in (imported.full, imported.module):
                path = self.paths.where(module.folder, name, imported.level)
                if path is not None:
                    found.setdefault(self.paths.real(path), path)
        found.pop(self.real[module], None)
        return found

    @cache_answers
    def imports(self, module: Module) -> tuple[Module, ...]:
        """Return the project files that a file imports."""
        found = (self.load(path) for path in self.targets(module).values())
        return tuple(target for target in found if target is not None)

    @cache_answers
    def unseen(self, module: Module) -> frozenset[str]:
        """Return the imported names of no project file or well-known package ("*" for any name)."""
        found: set[str] = set()
        for name, imported in (*module.imports.items(), *(("*", star) for star in module.stars)):
            root = imported.module.split(".")[0]
            if not imported.level and (root in EXTERNAL or not root):
                continue
            places = (imported.full, imported.module, root)
            if not any(self.paths.where(module.folder, place, imported.level) for place in places):
                found |= {name} if imported.level or root not in KNOWN else set()
        return frozenset(found)

    def find(self, module: Module, name: str, level: int = 0) -> Module | None:
        """Return the project file that the dotted name means in `module`, if there is one."""
        path = self.paths.where(module.folder, name, level)
        return self.load(path) if path is not None else None

    def load(self, path: str) -> Module | None:
        """Return the module at `path`, read at first use; None if it does not parse."""
        real = self.paths.real(path)
        if real not in self.modules:
            source = self.waiting.pop(real, None) or read(path)
            if source.tree is None:
                self.modules[real] = None
            else:
                self.add(real, source)
        return self.modules[real]

    @cache_answers
    def closure(self, module: Module) -> tuple[Module, ...]:
        """Return the file and all that it imports, directly or not."""
        seen = {module: None}
        queue = [module]
        while queue and len(seen) < MAX_IMPORTED:
            for target in self.imports(queue.pop(0)):
                if target not in seen:
                    seen[target] = None
                    queue.append(target)
        return tuple(seen)

    @cache_answers
    def says(self, module: Module, word: str) -> bool:
        """Check whether a word occurs in any file of a file's programs."""
        return any(word in member.text for member in self.family(module))

    @cache_answers
    def users(self, module: Module) -> tuple[Module, ...]:
        """Return the files that import this one, directly or not, and the file itself."""
        seen = {module: None}
        queue = [module]
        while queue and len(seen) < MAX_USERS:
            for source in self.importers(queue.pop(0)):
                if source not in seen:
                    seen[source] = None
                    queue.append(source)
        return tuple(seen)

    @cache_answers
    def family(self, module: Module) -> tuple[Module, ...]:
        """Return every file of the programs that use the file, except unit tests."""
        seen: dict[Module, None] = {}
        for user in self.users(module):
            if user is module or not unit_test(user):
                seen.update(dict.fromkeys(self.closure(user)))
        return tuple(seen)


@cache_answers
def unit_test(module: Module) -> bool:
    """Check whether a file holds unit tests, by its name or folder and its imports."""
    real = os.path.realpath(module.path)
    path = PurePath(os.path.relpath(real, root_of(os.path.dirname(real))))
    named = path.stem.startswith("test_") or path.stem.endswith("_test") or {"test", "tests"} & set(path.parts[-4:-1])
    return bool(named) and ("pytest" in module.imports or "unittest" in module.imports or "def test_" in module.text)
