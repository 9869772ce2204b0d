"""A user's task as a proof runs it: in float64 where asked, with a small evaluation set."""

from typing import Any

from torch import Tensor

__all__ = ["Around", "Prepared"]


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
        batch = self.inner.collate(samples)
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
