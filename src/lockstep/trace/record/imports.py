"""Attach the recorder to a module once it is imported.

watch()         # at the start of a process; costs nothing if torch is never imported
"""

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from lockstep.interrupts import keep_interrupts

__all__ = [
    "watch",
]


# Of `lockstep trace`: the listener's module, and the modules that it hooks once they are imported.
_HOOKS = "lockstep.trace.record.hooks"
_MODULES = ("torch", "accelerate.accelerator", "deepspeed.runtime.engine")


def watch(hooks: str = _HOOKS, modules: Iterable[str] = _MODULES) -> None:
    """Call `hooks.attach` with each of these modules once it is imported."""
    sys.meta_path.insert(0, _Finder(hooks, modules))


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that calls the recorder after a module was executed.

    It finds no module itself.
    """

    def __init__(self, hooks: str, modules: Iterable[str]) -> None:
        self._hooks = hooks
        self._pending = set(modules)
        self._busy = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._pending or getattr(self._busy, "name", None) == name:
            return None
        self._busy.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.name = None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_and_attach(module: ModuleType) -> None:
            with keep_interrupts():
                execute(module)
            with keep_interrupts():
                self._attach(module, name)

        # Replaced for this import: Python has no hook after a module's execution.
        spec.loader.exec_module = exec_and_attach  # type: ignore[method-assign]
        return spec

    def _attach(self, module: ModuleType, name: str) -> None:
        # Not in find_spec: transformers looks for torch with it, without importing it.
        if name not in self._pending:
            return
        self._pending.remove(name)
        try:
            importlib.import_module(self._hooks).attach(module)
        except Exception as error:
            # The script runs without the recorder.
            print(f"lockstep: {name} is not recorded: {error!r}", file=sys.stderr)
