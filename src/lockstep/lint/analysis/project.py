"""The files that are checked together, and which imports which."""

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from lockstep.lint.analysis.index import Module, index
from lockstep.lint.analysis.source import Source, read

__all__ = ["Project"]

# Imported files outside the checked paths are read too, so that one script can be checked alone; a bound keeps a
# script in a huge repository cheap.
MAX_FOLLOWED = 150
EXTERNAL = sys.stdlib_module_names | {"torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "sklearn"}
EXTERNAL |= {"matplotlib", "transformers", "accelerate", "deepspeed", "lightning", "pytorch_lightning", "wandb", "tqdm"}
EXTERNAL |= {"apex", "yaml", "cv2", "PIL", "timm", "einops", "tensorboardX", "omegaconf", "hydra", "composer"}
ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")


class Project:
    """Loads files and resolves their imports."""

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self.modules: dict[str, Module] = {}
        self.checked: list[Module] = []
        self.followed = 0
        self.found: dict[tuple[str, str, int], Module | None] = {}
        self.files = functools.cache(os.path.isfile)
        self.waiting: dict[str, Source] = {}
        for source in sources:
            if source.tree is not None:
                self.take(source)

    def take(self, source: Source) -> None:
        """Indexes a file that may train; any other waits until a file imports it."""
        real = os.path.realpath(source.path)
        if "torch" in source.text or "accelerat" in source.text:
            self.modules[real] = index(source)
            self.checked.append(self.modules[real])
        else:
            self.waiting[real] = source

    @functools.cached_property
    def importers(self) -> dict[Module, list[Module]]:
        """For each file, the files that import it."""
        table: dict[Module, list[Module]] = {}
        queue = list(self.modules.values())
        seen = set(queue)
        while queue:
            module = queue.pop()
            for target in self.imports(module):
                table.setdefault(target, []).append(module)
                if target not in seen:
                    seen.add(target)
                    queue.append(target)
        return table

    @functools.cache  # noqa: B019 - a project lives as long as the run
    def imports(self, module: Module) -> tuple[Module, ...]:
        """The project files that a file imports."""
        found: dict[Module, None] = {}
        for imported in module.imported:
            for name in (imported.full, imported.module):
                target = self.find(module, name, imported.level)
                if target is not None and target is not module:
                    found[target] = None
        return tuple(found)

    def find(self, module: Module, name: str, level: int = 0) -> Module | None:
        """The project file that the dotted name means in `module`, if there is one."""
        key = (module.folder, name, level)
        if key not in self.found:
            self.found[key] = self.search(module, name, level)
        return self.found[key]

    def search(self, module: Module, name: str, level: int) -> Module | None:
        parts = [part for part in name.split(".") if part and part != "*"]
        if level:
            folder = os.path.join(module.folder, *[".."] * (level - 1))
            return self.locate(folder, parts)
        if not parts or (parts[0] in EXTERNAL and not is_local(module, parts[0])):
            return None
        for folder in self.bases(module.folder):
            target = self.locate(folder, parts)
            if target is not None:
                return target
        return None

    @functools.cache  # noqa: B019 - a project lives as long as the run
    def bases(self, folder: str) -> tuple[str, ...]:
        """The folders that imports in `folder` can start from: it and its parents, up to the repository's root."""
        found = [folder]
        absolute = Path(os.path.abspath(folder))
        for i, parent in enumerate([absolute, *absolute.parents][:6]):
            if i:
                found.append(str(parent))
            found.append(str(parent / "src"))
            if any((parent / mark).exists() for mark in ROOT_MARKS):
                return tuple(found)
        return tuple(found[:4])

    def locate(self, folder: str, parts: list[str]) -> Module | None:
        if not parts:
            return None
        path = os.path.join(folder, *parts)
        for candidate in (f"{path}.py", os.path.join(path, "__init__.py")):
            if self.files(candidate):
                return self.load(candidate)
        return None

    def load(self, path: str) -> Module | None:
        """The module at `path`, read now if it was not yet."""
        real = os.path.realpath(path)
        if real in self.waiting:
            self.modules[real] = index(self.waiting.pop(real))
        elif real not in self.modules:
            if self.followed >= MAX_FOLLOWED:
                return None
            self.followed += 1
            source = read(path)
            if source.tree is None:
                return None
            self.modules[real] = index(source)
        return self.modules[real]

    @functools.cache  # noqa: B019 - a project lives as long as the run
    def closure(self, module: Module) -> tuple[Module, ...]:
        """The file and all that it imports, directly or not."""
        seen = {module: None}
        queue = [module]
        while queue:
            for target in self.imports(queue.pop()):
                if target not in seen:
                    seen[target] = None
                    queue.append(target)
        return tuple(seen)

    @functools.cache  # noqa: B019 - a project lives as long as the run
    def users(self, module: Module) -> tuple[Module, ...]:
        """The files that import this one, directly or not, and the file itself."""
        seen = {module: None}
        queue = [module]
        while queue:
            for source in self.importers.get(queue.pop(), []):
                if source not in seen:
                    seen[source] = None
                    queue.append(source)
        return tuple(seen)

    @functools.cache  # noqa: B019 - a project lives as long as the run
    def family(self, module: Module) -> tuple[Module, ...]:
        """Every file of every program that the file is part of."""
        seen: dict[Module, None] = {}
        for user in self.users(module):
            seen.update(dict.fromkeys(self.closure(user)))
        return tuple(seen)


def is_local(module: Module, name: str) -> bool:
    """Whether a folder beside the script hides an installed package of the same name (Python looks there first)."""
    return name not in {"torch", "numpy"} and os.path.isfile(os.path.join(module.folder, name, "__init__.py"))
