"""Attach the recorder to a module as soon as it has been imported.

watch()         # in a process's first moments; costs nothing if torch is never imported
"""

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = [
    "watch",
]


# module -> (module of the recorder, function to call with it)
_WAITING = {
    "torch": ("lockstep.trace.record.hooks", "attach"),
    "accelerate.accelerator": ("lockstep.trace.record.hooks", "accelerate"),
    "deepspeed.runtime.engine": ("lockstep.trace.record.hooks", "deepspeed"),
}


def watch() -> None:
    """Start waiting for the imports."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that finds nothing itself, but adds a call after the module's execution."""

    def __init__(self) -> None:
        self._waiting = dict(_WAITING)
        self._busy = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting or getattr(self._busy, "name", None) == name:
            return None
        self._busy.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.name = None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            # Here and not above: transformers looks for torch with find_spec, without importing it.
            where, function = self._waiting.pop(name, ("", ""))
            if not where:
                return
            try:
                getattr(importlib.import_module(where), function)(module)
            except Exception as error:  # the script runs all the same
                print(f"lockstep trace: not attached to {name}: {error!r}", file=sys.stderr)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
