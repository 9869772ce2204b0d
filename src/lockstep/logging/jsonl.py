"""Write and read metrics.jsonl: one JSON object per line, one line per record.

    sink = JsonLines(folder / "metrics.jsonl", resume_step=500)    # drops records after step 500
    sink.log({"global_step": 510, "running_loss": 2.5})
    records = read(folder / "metrics.jsonl")
    newest = tail(folder / "metrics.jsonl")                        # the last few hundred, from a file of any size

Every line is valid JSON. JSON has no NaN or infinity, and null would not distinguish them, so they are written as the
strings "nan", "inf" and "-inf"; `read` converts them back to numbers.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.config.secrets import mask
from lockstep.files import replace_file

__all__ = [
    "JsonLines",
    "each",
    "plain",
    "read",
    "tail",
]


# Made once, because json.dumps makes an encoder for each call.
_encode = json.JSONEncoder(allow_nan=False).encode
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonLines:
    """Sink that appends records to a file, unbuffered.

    Opening it removes an incomplete last line and, on a resume, the records of steps that will run again.

    Args:
        path: the file; created if missing, in a folder that exists.
        resume_step: the checkpoint's step; records with a later global_step are removed. None keeps all records.
        evaluated: False also removes the record of that step's evaluation, which will run again.

    Raises:
        OSError: the file cannot be read or written. `log` raises the errors of later writes.
    """

    def __init__(self, path: Path, resume_step: int | None = None, evaluated: bool = True) -> None:
        if path.exists():
            _trim(path, resume_step, evaluated)
        # `close` closes it. Unbuffered, so that a kill loses no complete line.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        # Bytes of complete lines.
        self._end = os.fstat(self._file.fileno()).st_size
        self._incomplete = False

    def start(self, info: dict[str, Any]) -> None:
        """Do nothing; other files describe the run."""

    def log(self, record: dict[str, Any]) -> None:
        """Append the record; numpy and torch numbers become plain ones.

        Waits for a tensor on a device.
        """
        line = _encode({name: plain(value) for name, value in record.items()}).encode() + b"\n"
        self._drop_incomplete_line()
        end = self._end + len(line)
        # Until the write is complete, the next call removes what a failed one has left.
        self._incomplete = True
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError:
            # The disk is full, perhaps in the middle of a line.
            with contextlib.suppress(OSError):
                self._drop_incomplete_line()
            raise
        self._end = end
        self._incomplete = False

    def close(self, summary: dict[str, Any] | None) -> None:
        """Sync the file to the disk and close it."""
        if not self._file.closed:
            with self._file:
                self._drop_incomplete_line()
                os.fsync(self._file.fileno())

    def _drop_incomplete_line(self) -> None:
        """Truncate an incomplete last line."""
        if self._incomplete:
            os.ftruncate(self._file.fileno(), self._end)
            self._incomplete = False


def read(path: Path) -> list[dict[str, Any]]:
    """Read the file's records in order; [] without a file.

    Lines that are not JSON objects are skipped.
    """
    if not path.exists():
        return []
    with open(path, "rb") as lines:
        return _records(lines)


def tail(path: Path, most: int = 1 << 18) -> list[dict[str, Any]]:
    """Read the records in the last `most` bytes of the file; [] without a file.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - most)
        # The window begins in the middle of a line, which is dropped below.
        file.seek(start)
        lines = file.read(most).splitlines()
    return _records(lines[1:] if start else lines)


def each(path: Path, having: str) -> Iterator[dict[str, Any]]:
    """Yield the records that have the name `having`, from a file of any size.

    Raises:
        OSError: the file cannot be read.
    """
    needle = json.dumps(having).encode()
    with open(path, "rb") as lines:
        for line in lines:
            # A search in the bytes is much faster than parsing each line of a large file.
            if needle in line:
                yield from (record for record in _records([line]) if having in record)


def _records(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    parsed = [_parse(line) for line in lines]
    records = []
    for record in parsed:
        if record is not None:
            records.append({name: _number(value) for name, value in record.items()})
    return records


def plain(value: Any) -> Any:
    """Convert a value for JSON: numpy and torch numbers to plain ones.

    NaN and infinities become strings.
    """
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return str(float(value))
    if value is None or isinstance(value, bool | int):
        return value
    # The value is a numpy or torch number. Reading one on a device waits for the device.
    return plain(value.item())


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        # The line is cut short, or not UTF-8.
        return None
    if isinstance(record, dict):
        return record
    return None


def _keeps(line: bytes, last_step: int | None, evaluated: bool) -> bool:
    record = _parse(line) if line.endswith(b"\n") else None
    if record is None:
        return False
    step = record.get("global_step")
    # The evaluation of the resumed step runs again, so its record would appear twice.
    if not evaluated and step == last_step and "evaluation/loss" in record:
        return False
    return last_step is None or not isinstance(step, int | float) or step <= last_step


def _trim(path: Path, last_step: int | None, evaluated: bool) -> None:
    """Keep complete records up to `last_step`. The file is replaced atomically."""
    with open(path, "rb") as old:
        if all(_keeps(line, last_step, evaluated) for line in old):
            return
    with open(path, "rb") as old, replace_file(path) as new:
        new.writelines(line for line in old if _keeps(line, last_step, evaluated))
