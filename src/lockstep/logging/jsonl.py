"""metrics.jsonl: one JSON object a line, one line a record.

    sink = JsonLines(folder / "metrics.jsonl", resume_step=500)    # forgets what came after step 500
    sink.log({"global_step": 510, "running_loss": 2.5})
    records = read(folder / "metrics.jsonl")
    newest = tail(folder / "metrics.jsonl")                        # the last few hundred, of a file of any size

Every line is valid JSON. JSON has no NaN or infinity and null would lose which it was, so they are written as the
strings "nan", "inf" and "-inf"; `read` gives them back as numbers.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.config.secrets import mask
from lockstep.files import replacing

__all__ = [
    "JsonLines",
    "each",
    "plain",
    "read",
    "tail",
]


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonLines:
    """Appends records to a file, each in the operating system's hands before `log` returns.

    Opening it removes a last line that a crash cut short and, on a resume, the records of steps that will run again.

    Args:
        path: the file; made where it is missing, in a folder that exists.
        resume_step: the checkpoint's step; records with a later global_step are removed. None keeps all records.
        evaluated: False removes the record of that step's own evaluation too, which will be made again.

    Raises:
        OSError: the file cannot be read or written. Any error of a later write comes from `log`.
    """

    def __init__(self, path: Path, resume_step: int | None = None, evaluated: bool = True) -> None:
        if path.exists():
            _trim(path, resume_step, evaluated)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        self._end, self._torn = os.fstat(self._file.fileno()).st_size, False  # bytes of whole lines

    def start(self, info: dict[str, Any]) -> None:
        """Nothing: what a run is lies in its other files."""

    def log(self, record: dict[str, Any]) -> None:
        """Appends the record; numbers of numpy and torch become plain ones (a tensor on a device is waited for)."""
        line = json.dumps({name: plain(value) for name, value in record.items()}, allow_nan=False).encode() + b"\n"
        self._mend()
        end, self._torn = self._end + len(line), True
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError:  # a full disk, perhaps half-way
            with contextlib.suppress(OSError):
                self._mend()
            raise
        self._end, self._torn = end, False

    def close(self, summary: dict[str, Any] | None) -> None:
        """Closes the file, its contents on the disk."""
        if not self._file.closed:
            with self._file:
                self._mend()
                os.fsync(self._file.fileno())

    def _mend(self) -> None:
        """Cuts off what a write that failed has left of its line."""
        if self._torn:
            os.ftruncate(self._file.fileno(), self._end)
            self._torn = False


def read(path: Path) -> list[dict[str, Any]]:
    """The file's records in order; [] where there is no file. Lines that are no JSON object are passed over."""
    if not path.exists():
        return []
    with open(path, "rb") as lines:
        return _records(lines)


def tail(path: Path, most: int = 1 << 18) -> list[dict[str, Any]]:
    """The records in the last `most` bytes of the file, in order; [] where there is no such file. Raises OSError."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - most)
        file.seek(start)
        lines = file.read(most).splitlines()
    return _records(lines[1:] if start else lines)


def each(path: Path, having: str) -> Iterator[dict[str, Any]]:
    """The records that have the name `having`, one after the other, of a file of any size. Raises OSError."""
    wanted = json.dumps(having).encode()
    with open(path, "rb") as lines:
        for line in lines:
            if wanted in line:
                yield from (record for record in _records([line]) if having in record)


def _records(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    found = [_parse(line) for line in lines]
    return [{name: _number(value) for name, value in record.items()} for record in found if record is not None]


def plain(value: Any) -> Any:
    """A value as a line of JSON has it: a number of numpy or torch as a plain one, one that is not finite as a word."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int):
        return value
    return plain(value.item())  # a number of numpy or torch; anything else is a mistake of the caller


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # torn, or not UTF-8
        return None
    return record if isinstance(record, dict) else None


def _keeps(line: bytes, last_step: int | None, evaluated: bool) -> bool:
    record = _parse(line) if line.endswith(b"\n") else None
    if record is None:
        return False
    step = record.get("global_step")
    if not evaluated and step == last_step and "evaluation/loss" in record:
        return False
    return last_step is None or not isinstance(step, int | float) or step <= last_step


def _trim(path: Path, last_step: int | None, evaluated: bool) -> None:
    """Keeps whole records up to `last_step`. The file is replaced in one move: a crash leaves it old or new."""
    with open(path, "rb") as old:
        if all(_keeps(line, last_step, evaluated) for line in old):
            return
    with open(path, "rb") as old, replacing(path) as new:
        new.writelines(line for line in old if _keeps(line, last_step, evaluated))
