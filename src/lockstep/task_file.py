"""Import a class by its name, `FILE.py:Class`."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import ConfigError

__all__ = ["construct", "import_class"]

_METHODS = ("model", "dataset")


def import_class(name: str, flag: str, methods: Iterable[str] = _METHODS) -> Callable[[], Any]:
    """Import the class that `FILE.py:CLASS` names.

    Args:
        name: FILE.py:CLASS.
        flag: the flag to name in errors.
        methods: methods of the classes that an error suggests.

    Raises:
        ConfigError: there is none; the message suggests a class of the file.
    """
    file, _, class_name = name.rpartition(":")
    if not file and Path(name).is_file():
        file = name
        class_name = ""
    path = Path(file)
    if not file or not path.is_file():
        raise ConfigError(f"{flag} '{name}': no such file; give FILE.py:Class")
    module = _import_file(name, path, flag)
    named_class: Callable[[], Any] | None = getattr(module, class_name, None) if class_name else None
    if named_class is None:
        if class_name:
            problem = f"the file has no class {class_name}"
        else:
            problem = "no class is named"
        candidates = []
        for key, value in vars(module).items():
            if _has_all(value, module, methods):
                candidates.append(key)
        close = difflib.get_close_matches(class_name, candidates, n=1)
        if close:
            hint = f"did you mean {file}:{close[0]}?"
        else:
            hint = f"give {' or '.join(f'{file}:{key}' for key in candidates)}"
        if flag == "--task":
            example = "a subclass of lockstep.Task that the file defines"
        else:
            example = "a class of the file"
        hint = hint if candidates else f"give {file}:CLASS, {example}"
        raise ConfigError(f"{flag} '{name}': {problem}; {hint}")
    return named_class


def construct(target: Any) -> Any:
    """Call a class or a function without arguments; return an object that the file has made as it is."""
    if isinstance(target, type) or inspect.isroutine(target):
        return target()
    return target


def _import_file(name: str, path: Path, flag: str) -> ModuleType:
    """Import the file as a module. Raises ConfigError if that fails."""
    module_name = f"lockstep_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag} '{name}' is not a Python file; give FILE.py:Class")
    module = importlib.util.module_from_spec(spec)
    # Loader processes unpickle classes of the file by this name.
    sys.modules[module_name] = module
    folder = str(path.resolve().parent)
    # The file may import its neighbours.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{flag} '{name}': {reason}; the file must import without an error") from error
    return module


def _has_all(value: Any, module: ModuleType, methods: Iterable[str]) -> bool:
    """Whether `value` is a class defined in the file, with these methods."""
    is_defined_here = isinstance(value, type) and value.__module__ == module.__name__ and not inspect.isabstract(value)
    return is_defined_here and all(callable(getattr(value, method, None)) for method in methods)
