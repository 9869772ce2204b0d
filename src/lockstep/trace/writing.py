"""One file of a trace: a JSON object a line, written at once, so that a kill leaves what was put there.

writer = Writer(folder, 64 << 20, header())
writer.put({"t": "step", "k": 0, ...})      # False: the file is full

A process writes from its first record on. The first line says who writes (`header`). Bytes in a record, 64-bit words
all of them, stand together in its line, as `words` in base64; where they were stands [the first, how many].
A step's `begin` is "weights" where its weights are those of the record before.
"""

import binascii
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["FORMAT", "Writer", "header", "place", "written"]

FORMAT = 2
_PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "lightning", "pytorch-lightning", "deepspeed", "datasets"),
    *("torchmetrics", "torchvision", "timm", "peft", "flash-attn"),
)
_FRAMEWORKS = {
    "accelerate": "accelerate.accelerator",
    "lightning": "lightning.pytorch.trainer.trainer",
    "pytorch_lightning": "pytorch_lightning.trainer.trainer",
    "transformers": "transformers.trainer",
    "deepspeed": "deepspeed.runtime.engine",
}


def place() -> tuple[int, int]:
    """(rank, world size): of the default group, else of the launcher's variables, else (0, 1)."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def written(folder: Path) -> int:
    """Bytes that all processes have written there so far."""
    return sum(path.stat().st_size for path in folder.glob("rank*.jsonl"))


def header() -> dict[str, Any]:
    """Who writes: rank, versions, frameworks, the script's name and digest. No arguments, no variables, no host."""
    rank, world = place()
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    try:
        digest = hashlib.sha256(Path(script).read_bytes()).hexdigest() if script else ""
    except OSError:
        digest = ""
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        if name.replace("-", "_") in sys.modules:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = str(getattr(sys.modules[name.replace("-", "_")], "__version__", "?"))
    return {
        "t": "begin",
        "format": FORMAT,
        "rank": rank,
        "world": world,
        "initialized": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "restart": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        "pid": os.getpid(),
        "time": time.time(),
        "versions": versions,
        "frameworks": [name for name, module in _FRAMEWORKS.items() if module in sys.modules],
        "script": {"name": os.path.basename(script), "digest": digest},
        "threads": torch.get_num_threads(),
        "first": None,
    }


class Writer:
    """A file of its own in `folder`, for this process.

    Args:
        most: bytes; a line that would pass it is not written, nor any after it.
    """

    def __init__(self, folder: Path, most: int, head: dict[str, Any]) -> None:
        name = f"rank{head['rank']:05}-{time.time_ns()}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / name, flags, 0o600)
        self._left, self.full = most, False
        self._write(_line(head))  # also where nothing else has room

    def put(self, record: dict[str, Any]) -> bool:
        """Writes a line; False where the file is full, which its last line says."""
        if self.full:
            return False
        line = _line(record)
        if len(line) + 200 > self._left:
            self.full = True
            line = _line({"t": "full", "k": record.get("k")})
        self._write(line)
        return not self.full

    def _write(self, line: bytes) -> None:
        self._left -= len(line)
        while line:
            line = line[os.write(self._file, line) :]


def _line(record: dict[str, Any]) -> bytes:
    parts: list[bytes] = []
    count = 0

    def referred(value: Any) -> list[int]:
        nonlocal count
        if not isinstance(value, bytes):
            raise TypeError(f"a record holds no {type(value).__name__}")
        parts.append(value)
        first, count = count, count + len(value) // 8
        return [first, count - first]

    text = json.dumps(record, separators=(",", ":"), default=referred).encode()
    if parts:  # joined here: base64 needs no escapes, which the encoder would look for
        text = b'%s,"words":"%s"}' % (text[:-1], binascii.b2a_base64(b"".join(parts), newline=False))
    return text + b"\n"
