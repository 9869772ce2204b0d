"""A user's task as a proof runs it: in float64 where asked, with a small evaluation set; and a task from a file."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.data.fetch import collate_of
from lockstep.errors import ConfigError

__all__ = ["Around", "Prepared", "load_task"]


class Around:
    """A task that is `inner` but for what a subclass changes; optional attributes are there where they were."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)


class Prepared(Around):
    """The task with floating-point data in float64 where `wide`, and at most `samples` to evaluate on."""

    def __init__(self, inner: Any, wide: bool, samples: int) -> None:
        super().__init__(inner)
        self._wide, self._samples = wide, samples

    def dataset(self, split: str) -> Any:
        found = self.inner.dataset(split)
        if split == "train" or found is None or len(found) <= self._samples:
            return found
        return _First(found, self._samples)

    def collate(self, samples: Any) -> Any:
        batch = collate_of(self.inner)(samples)
        return _in_float64(batch) if self._wide else batch


class _First(Around):
    """The first samples of a dataset."""

    def __init__(self, dataset: Any, count: int) -> None:
        super().__init__(dataset)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_float64(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_in_float64(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_in_float64(item) for item in value)
    return value


def load_task(named: str) -> Any:
    """The task that `FILE.py:Class` names, made without arguments.

    Raises:
        ConfigError: no such file or class, or one that cannot be made so.
    """
    file, _, name = named.rpartition(":")
    path = Path(file)
    if not file or not name or not path.is_file():
        raise ConfigError(f"--task '{named}': there is no such file; give FILE.py:Class")
    module_name = f"lockstep_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--task '{named}' is no Python file; give FILE.py:Class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # its classes can be pickled, to loader processes
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # the file may import its neighbours
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
        kind = getattr(module, name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"--task '{named}': {reason}; the file must import and define {name}") from error
    try:
        return kind()
    except Exception as error:
        raise ConfigError(f"--task '{named}': {name}() failed ({error}); it must need no arguments") from error
