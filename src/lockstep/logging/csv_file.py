"""Write metrics.csv: one row per record, one column per name.

sink = CsvFile(folder / "metrics.csv", resume_step=500)     # `start` drops rows after step 500
sink.start({})
sink.log({"global_step": 510, "running_loss": 2.5})

A name that appears later adds a column: the file is then written again, with the cell empty in earlier rows.
"""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

from lockstep.files import replace_file
from lockstep.logging.jsonl import plain

__all__ = [
    "CsvFile",
]


@final
class CsvFile:
    """Sink that appends rows to a file, unbuffered.

    Args:
        path: the file; created by `start` if missing.
        resume_step: the checkpoint's step; rows with a later global_step are removed.
        evaluated: False also removes the row of that step's evaluation, which will run again.
    """

    def __init__(self, path: Path, resume_step: int = 0, evaluated: bool = True) -> None:
        self._path = path
        self._resume_step = resume_step
        self._evaluated = evaluated
        self._names: list[str] = []
        self._file: BinaryIO | None = None

    def start(self, info: dict[str, Any]) -> None:
        """Remove the rows of steps that will run again, and open the file.

        Raises:
            OSError: the file cannot be read or written.
        """
        names, rows = _read(self._path)
        if self._path.exists():
            self._rewrite(names, [row for row in rows if self._keeps(dict(zip(names, row, strict=True)))])
        self._names = names
        # `close` closes it. Unbuffered, so that a kill loses no complete row.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115

    def log(self, record: dict[str, Any]) -> None:
        """Append the record; a new name rewrites the file with one more column.

        Waits for a tensor on a device.

        Raises:
            OSError: the file cannot be written; it keeps its whole rows.
        """
        assert self._file, "`start` comes first"
        names = [*self._names, *(name for name in record if name not in self._names)]
        row = [_cell(record.get(name)) for name in names]
        # A new name: write the file again, with an empty cell for it in the earlier rows.
        if names != self._names:
            self._file.close()
            old_names, rows = _read(self._path)
            self._rewrite(names, [*(old_row + [""] * (len(names) - len(old_names)) for old_row in rows), row])
            # `close` closes it.
            self._file, self._names = open(self._path, "ab", buffering=0), names  # noqa: SIM115
            return
        end = os.fstat(self._file.fileno()).st_size
        data = _lines([row])
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError:
            # The disk is full, perhaps in the middle of a row.
            os.ftruncate(self._file.fileno(), end)
            raise

    def close(self, summary: dict[str, Any] | None) -> None:
        """Sync the file to the disk and close it."""
        if self._file and not self._file.closed:
            with self._file:
                os.fsync(self._file.fileno())

    def _keeps(self, row: dict[str, str]) -> bool:
        step = row.get("global_step", "")
        # A row without a step cannot be placed before or after the resume.
        if not step.isdecimal():
            return False
        is_evaluation = any(value for name, value in row.items() if name.startswith("evaluation/"))
        again = not self._evaluated and is_evaluation and int(step) == self._resume_step
        return int(step) <= self._resume_step and not again

    def _rewrite(self, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        with replace_file(self._path) as file:
            file.write(_lines([names, *rows]) if names else b"")


def _cell(value: Any) -> str:
    value = plain(value)
    if value is None:
        return ""
    return str(value)


def _lines(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the names and the whole rows of the file; none without a file."""
    if not path.exists():
        return [], []
    text = path.read_bytes().decode(errors="replace")
    # A kill may leave half a row.
    whole = text[: text.rfind("\n") + 1]
    names, *rows = list(csv.reader(io.StringIO(whole, newline=""))) or [[]]
    return names, [row for row in rows if len(row) == len(names)]
