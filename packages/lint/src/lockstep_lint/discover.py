"""Finds the Python files and notebooks under the paths that the user names."""

import os
from collections.abc import Iterator
from pathlib import Path

from lockstep_lint.analysis.imports import SKIPPED

__all__ = ["find_files"]


def find_files(paths: list[str]) -> list[str]:
    """The Python files and notebooks at and under `paths`, sorted, each once. Raises FileNotFoundError."""
    found: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            found.update(dict.fromkeys(_under(path)))
        elif os.path.exists(path):
            found[path] = None
        else:
            raise FileNotFoundError(path)
    return sorted(found)


def _under(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        for name in names:
            if name.endswith((".py", ".ipynb")) and not name.startswith("."):
                yield str(Path(parent) / name)
