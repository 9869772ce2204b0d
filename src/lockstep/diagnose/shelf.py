"""Tensors of the reference on disk, written and read one at a time.

shelf = Shelf(folder)
shelf.put("weights", step, named_tensors)
wanted = shelf.open("weights", step)
wanted["blocks.0.weight"]                   # a CPU tensor, read now
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

__all__ = ["Shelf", "Stored", "digest", "digests"]


class Stored:
    """The tensors that one `put` wrote, each read from the disk when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = path.with_suffix(".json")
        self._index: dict[str, Any] = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}

    @property
    def names(self) -> list[str]:
        """In the order in which they were put."""
        return list(self._index)

    def __getitem__(self, name: str) -> Tensor:
        """A new CPU tensor. KeyError for a name that was not put."""
        offset, size, dtype, shape = self._index[name]
        with self._path.open("rb") as file:
            file.seek(offset)
            raw = bytearray(size)
            file.readinto(raw)  # one copy in memory, not two
        wide = getattr(torch, dtype)
        return (torch.frombuffer(raw, dtype=wide) if size else torch.empty(0, dtype=wide)).reshape(shape)


class Shelf:
    """A folder of `Stored` by kind and step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, kind: str, step: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes whole tensors of any device and dtype; one of them at a time is copied to the host."""
        path, index, offset = self._path(kind, step), {}, 0
        with path.open("wb") as file:
            for name, tensor in tensors:
                raw = _bytes(tensor)
                file.write(raw)
                dtype = str(tensor.dtype).removeprefix("torch.")
                index[name] = [offset, len(raw), dtype, list(tensor.shape)]
                offset += len(raw)
        path.with_suffix(".json").write_text(json.dumps(index), encoding="utf-8")

    def open(self, kind: str, step: int) -> Stored:
        """What was put; empty where nothing was."""
        return Stored(self._path(kind, step))

    @property
    def free(self) -> int:
        """Bytes that are free on its disk."""
        return shutil.disk_usage(self._folder).free

    def _path(self, kind: str, step: int) -> Path:
        return self._folder / f"{step:08d}-{kind}.bin"


def digest(value: Tensor | bytes) -> str:
    """xxh3 of the bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(_bytes(value) if isinstance(value, Tensor) else value)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`digest` of each."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1).contiguous().cpu()  # waits for the device
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(raw)
