"""What one process writes: the record of the present step, tables of tensors' names, and in the end the lines.

journal = Journal(Options.read())
journal.record["loss"].append(...); journal.sums({"grad": [("layers.0.weight", tensor, WHOLE)]})
journal.ended()         # the step's record is read and written, the next one begins

Passes and Updates fill it. Whatever goes wrong in here is said once and ends the recording, never the script.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor

from lockstep.trace.held import Reading
from lockstep.trace.sums import WIDTH, Place, Plan, plain
from lockstep.trace.writing import Writer, header, place, written

__all__ = ["Entry", "Journal", "Options", "quiet"]

_LAYOUTS = 32  # that are kept
_FIRST = 3  # steps of a process in which everything is digested
_SELDOM = 10  # steps between two of those after them

P = ParamSpec("P")
Entry = tuple[str, Tensor, Place]  # name, local tensor, its place in the whole


@dataclass(frozen=True)
class Options:
    """What is recorded: folder, first step and the one behind the last, bytes of all processes, all modules' output."""

    folder: Path
    first: int = 0
    last: int = 1 << 60
    most: int = 1 << 30
    modules: bool = False

    @classmethod
    def read(cls) -> "Options":
        """As `lockstep trace` left it in the environment."""
        first, _, last = os.environ.get("LOCKSTEP_TRACE_STEPS", "").partition(":")
        most = int(float(os.environ.get("LOCKSTEP_TRACE_MAX_MB", "1024")) * 2**20)
        every = os.environ.get("LOCKSTEP_TRACE_MODULES", "") == "1"
        return cls(Path(os.environ["LOCKSTEP_TRACE"]), int(first or 0), int(last or 1 << 60), most, every)


def quiet(method: Callable[P, None]) -> Callable[P, None]:
    """A method of what has a journal: nothing where nothing is recorded, and its errors are not the script's."""

    @functools.wraps(method)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        owner: Any = args[0]
        journal: Journal = owner.journal
        if not journal.on or journal.busy:
            return
        journal.busy = True
        try:
            with torch.no_grad():
                method(*args, **kwargs)
        except Exception as error:
            journal.fail(error)
        finally:
            journal.busy = False

    return tried


@dataclass
class _Layout:
    """Tensors of several kinds, with these names, sizes and places.

    Attributes:
        tables: kind -> number of the table that has their names.
        plans: for each device which of the tensors lie there, and how they are summed.
    """

    tables: dict[str, int]
    plans: list[tuple[list[int], Plan]]


class Journal:
    """The record of the present step, and the file.

    Attributes:
        on: whether anything is recorded.
        busy: within the recorder itself, whose own operations are not the script's.
        step: optimizer steps that were made.
        record: of the present one.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.on, self.busy = True, False
        self.step = 0
        self.record = _fresh()
        self.reading = Reading()
        self._writer: Writer | None = None
        self._tables: dict[tuple[Any, ...], int] = {}
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet."""
        return self._writer is None

    @property
    def thorough(self) -> bool:
        """Whether this is one of the first steps or of those after them in which everything is looked at."""
        return self.step < _FIRST or self.step % _SELDOM == 0

    def within(self) -> bool:
        """Whether the present step is one of those that are recorded."""
        return self.options.first <= self.step < self.options.last

    def tick(self) -> int:
        """The number of what happens now, within the step."""
        ticks: int = self.record["ticks"] + 1
        self.record["ticks"] = ticks
        return ticks

    def sums(self, kinds: Mapping[str, list[Entry]]) -> None:
        """Puts [number of the table, sums] of named tensors into the record, for each kind; all are summed at once."""
        entries = [entry for each in kinds.values() for entry in each]
        key = (
            *((kind, len(each)) for kind, each in kinds.items()),
            *[(name, at, local.numel(), local.dtype, local.device) for name, local, at in entries],
        )
        plains = [plain(local, at) for _, local, at in entries]
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._layout(kinds, entries, plains)
        if len(layout.plans) == 1:
            rows = layout.plans[0][1].run(plains)
        else:
            rows = torch.zeros(len(entries), WIDTH, dtype=torch.int64)
            for here, plan in layout.plans:
                rows[torch.tensor(here)] = plan.run([plains[index] for index in here]).cpu()  # waits for the device
        parts = rows.split_with_sizes([len(each) for each in kinds.values()])
        for (kind, each), part in zip(kinds.items(), parts, strict=True):
            self.record[kind] = found = [layout.tables[kind], None] if each else []
            if each:
                self.reading.put(found, 1, part)

    def _layout(self, kinds: Mapping[str, list[Entry]], entries: list[Entry], plains: list[Tensor]) -> _Layout:
        places, plans = [at for _, _, at in entries], []
        for device in dict.fromkeys(tensor.device for tensor in plains):
            here = [index for index, tensor in enumerate(plains) if tensor.device == device]
            plans.append((here, Plan([plains[index] for index in here], [places[index] for index in here])))
        return _Layout({kind: self._table(each) for kind, each in kinds.items() if each}, plans)

    def _table(self, entries: list[Entry]) -> int:
        """The number of the table with these names, which is written once."""
        table: dict[str, list[Any]] = {
            "names": [name for name, _, _ in entries],
            "starts": [place.start for _, _, place in entries],
            "sizes": [local.numel() for _, local, _ in entries],
            "types": [str(local.dtype).removeprefix("torch.") for _, local, _ in entries],
        }
        key = tuple(map(tuple, table.values()))
        number = self._tables.get(key)
        if number is None:
            number = self._tables[key] = len(self._tables)
            self._put({"t": "table", "id": number, **table})
        return number

    def ended(self) -> None:
        """The step is over: its record is written, where it is one that is, and the next begins."""
        if self.within():
            self._write({"t": "step", "k": self.step, **self.record})
        self.step += 1
        self.forget()

    def forget(self) -> None:
        """What the record holds was no step's."""
        self.record = _fresh()

    def close(self) -> None:
        """The process ends: what came after the last step is written."""
        if self._writer is not None or self.record["fwd"]:
            self._write({"t": "end", "k": self.step, **self.record})

    def fail(self, error: Exception) -> None:
        """Ends the recording, in one line."""
        self.on = False
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed its stderr
            print(f"lockstep trace: recording ended at step {self.step}: {said}", file=sys.stderr, flush=True)
        if os.environ.get("LOCKSTEP_TRACE_DEBUG"):
            raise error
        self.record, self.reading = _fresh(), Reading()  # what was held is let go
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a disk may be full
                self._writer.put({"t": "failed", "k": self.step, "error": said})

    def _write(self, record: dict[str, Any]) -> None:
        self.reading.finish()
        record["rank"] = place()[0]
        self._put(record)

    def _put(self, line: dict[str, Any]) -> None:
        if self._writer is None:
            left = self.options.most - written(self.options.folder)  # an earlier start's files count too
            self._writer = Writer(self.options.folder, left // max(1, place()[1]), header() | {"first": self.step})
        if not self._writer.put(line):
            self.on = False


def _fresh() -> dict[str, Any]:
    return {"ticks": 0, "loads": [], "fwd": [], "loss": [], "ev": []}
