"""Attach a recorder when Python starts.

`lockstep trace`, and `profile`, `goodput` and `report` with a command, put this folder first on PYTHONPATH. They set
LOCKSTEP_TRACE, or LOCKSTEP_RECORDER with the recorder's package. A process that never imports torch is left alone. The
user's own `sitecustomize` still runs afterwards.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
from types import ModuleType

__all__: list[str] = []

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


def _attach() -> None:
    """Load the recorder once torch is imported.

    In an environment without lockstep it is loaded from this file's own package.
    """
    if importlib.util.find_spec("lockstep") is None:
        stub = ModuleType("lockstep")
        stub.__path__ = [_PACKAGE]
        sys.modules["lockstep"] = stub
    imports = importlib.import_module("lockstep.trace.record.imports")
    if os.environ.get("LOCKSTEP_TRACE"):
        imports.watch()
    if recorder := os.environ.get("LOCKSTEP_RECORDER"):
        package = importlib.import_module(recorder)
        imports.watch(package.HOOKS, package.MODULES)


def _run_user_sitecustomize() -> None:
    """Run the sitecustomize that this one shadows."""
    others = []
    for entry in sys.path:
        if os.path.abspath(entry or ".") != _HERE:
            others.append(entry)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get("LOCKSTEP_TRACE") or os.environ.get("LOCKSTEP_RECORDER"):
        try:
            _attach()
        except KeyboardInterrupt:
            # Python itself would end with a traceback of its start, and code 1.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        except Exception as error:
            # The script runs without the recorder.
            print(f"lockstep: this process is not recorded: {error!r}", file=sys.stderr)
    _run_user_sitecustomize()
