"""Write one process's trace: a record for each step, and tables of tensor names.

journal = Journal(Options.read())
journal.record["loss"].append(...); journal.sums({"grad": [("layers.0.weight", tensor, WHOLE)]})
journal.ended()      # writes the step's record, and starts the next one

PassRecorder and Updates fill the record. An error in the recorder is printed once; it ends the recording, never the
script.
"""

import binascii
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import torch

from lockstep.trace.events import find_rank
from lockstep.trace.record.names import Entry
from lockstep.trace.record.pending import PendingTensors
from lockstep.trace.record.sums import WIDTH, SumPlan, plain

__all__ = [
    "Journal",
    "Options",
    "quiet",
]


# Version of the records' format, as in compare/reading.py, which needs no torch.
_FORMAT = 2
# Packages whose versions a trace records.
_PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "lightning", "pytorch-lightning", "deepspeed", "datasets"),
    *("torchmetrics", "torchvision", "timm", "peft", "flash-attn"),
)
# Framework -> the module that a script imports if it uses the framework.
_FRAMEWORKS = {
    "accelerate": "accelerate.accelerator",
    "lightning": "lightning.pytorch.trainer.trainer",
    "pytorch_lightning": "pytorch_lightning.trainer.trainer",
    "transformers": "transformers.trainer",
    "deepspeed": "deepspeed.runtime.engine",
}


def _bytes_written(folder: Path) -> int:
    """Count the bytes that all processes have written to the folder so far."""
    return sum(path.stat().st_size for path in folder.glob("rank*.jsonl"))


def _header() -> dict[str, Any]:
    """Return the first record: rank, versions, frameworks, the script's name and digest.

    For privacy it has no arguments, environment variables or host name.
    """
    rank, world = find_rank()
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    try:
        if script:
            digest = hashlib.sha256(Path(script).read_bytes()).hexdigest()
        else:
            digest = ""
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
        "format": _FORMAT,
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
    """Trace file of this process in `folder`.

    Args:
        most: size limit in bytes; the first line that would exceed it ends the file.
    """

    def __init__(self, folder: Path, most: int, head: dict[str, Any]) -> None:
        name = f"rank{head['rank']:05}-{time.time_ns()}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / name, flags, 0o600)
        self._free = most
        self.full = False
        # Written even if nothing else fits the limit.
        self._write(_line(head))

    def put(self, record: dict[str, Any]) -> bool:
        """Write a line; return False once the file is full, which its last line records."""
        if self.full:
            return False
        line = _line(record)
        # 200 bytes are reserved for the line that ends a full file.
        if len(line) + 200 > self._free:
            self.full = True
            line = _line({"t": "full", "k": record.get("k")})
        self._write(line)
        return not self.full

    def _write(self, line: bytes) -> None:
        self._free -= len(line)
        while line:
            line = line[os.write(self._file, line) :]


def _line(record: dict[str, Any]) -> bytes:
    parts: list[bytes] = []
    count = 0

    def refer(value: Any) -> list[int]:
        nonlocal count
        if not isinstance(value, bytes):
            raise TypeError(f"a trace record cannot store a {type(value).__name__}")
        parts.append(value)
        begin = count
        count = count + len(value) // 8
        return [begin, count - begin]

    text = json.dumps(record, separators=(",", ":"), default=refer).encode()
    # Appended by hand: base64 needs no escapes, for which the JSON encoder would search.
    if parts:
        text = b'%s,"words":"%s"}' % (text[:-1], binascii.b2a_base64(b"".join(parts), newline=False))
    return text + b"\n"


# Layouts that are cached, at most.
_LAYOUTS = 32
# First steps of a process, which are recorded in full.
_FIRST = 3
# Steps from one full record to the next after that.
_EVERY = 10

P = ParamSpec("P")


@dataclass(frozen=True)
class Options:
    """Recording options.

    Attributes:
        first, last: the first step, and the one after the last.
        most: bytes of all processes.
        modules: record every module's output.
    """

    folder: Path
    first: int = 0
    last: int = 1 << 60
    most: int = 1 << 30
    modules: bool = False

    @classmethod
    def read(cls) -> "Options":
        """Read the options that `lockstep trace` put into the environment."""
        first_step, _, last_step = os.environ.get("LOCKSTEP_TRACE_STEPS", "").partition(":")
        most = int(float(os.environ.get("LOCKSTEP_TRACE_MAX_MB", "1024")) * 2**20)
        every = os.environ.get("LOCKSTEP_TRACE_MODULES", "") == "1"
        return cls(Path(os.environ["LOCKSTEP_TRACE"]), int(first_step or 0), int(last_step or 1 << 60), most, every)


def quiet(method: Callable[P, None]) -> Callable[P, None]:
    """Wrap a method so that its errors end only the recording.

    The method's object has a journal. The method is skipped if nothing is recorded.
    """

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        owner: Any = args[0]
        journal: Journal = owner.journal
        if not journal.on or journal.busy:
            return
        journal.busy = True
        grad = torch.is_grad_enabled()
        try:
            # Tensors that are made in inference mode could not be changed afterwards.
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    method(*args, **kwargs)
            else:
                # Private in torch: it costs a third of torch.no_grad(), several times a step.
                torch._C._set_grad_enabled(False)
                method(*args, **kwargs)
        except Exception as error:
            journal.fail(error)
        finally:
            # Restores the script's setting.
            torch._C._set_grad_enabled(grad)
            journal.busy = False

    return wrapper


@dataclass
class _TensorLayout:
    """Layout of tensors of several kinds, with fixed names, sizes and places.

    Attributes:
        tables: kind -> number of the table with its names.
        plans: for each device, the indices of its tensors and the plan that sums them.
    """

    tables: dict[str, int]
    plans: list[tuple[list[int], SumPlan]]


class Journal:
    """Record of the current step, and the trace file.

    Attributes:
        on: recording is on.
        busy: the recorder itself runs, so operations are not the script's.
        fresh: no step has been recorded yet.
        step: optimizer steps so far.
        record: record of the current step.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.on = True
        self.busy = False
        self.fresh = True
        self.step = 0
        self.record = _empty_record()
        self.reading = PendingTensors()
        self._rank = -1
        self._writer: Writer | None = None
        self._tables: dict[tuple[Any, ...], int] = {}
        self._layouts: dict[tuple[Any, ...], _TensorLayout] = {}

    @property
    def thorough(self) -> bool:
        """Whether this step is recorded in full: one of the first steps, or every tenth."""
        return self.step < _FIRST or self.step % _EVERY == 0

    def within(self) -> bool:
        """Whether the current step is in the recorded range."""
        return self.options.first <= self.step < self.options.last

    def tick(self) -> int:
        """Return the number of the next event within the step."""
        ticks: int = self.record["ticks"] + 1
        self.record["ticks"] = ticks
        return ticks

    def sums(self, kinds: Mapping[str, list[Entry]]) -> None:
        """Record [table number, sums] for each kind of named tensors, all summed at once."""
        entries = [entry for section_entries in kinds.values() for entry in section_entries]
        key = (
            *((section, len(section_entries)) for section, section_entries in kinds.items()),
            *[(name, at, local.shape, local.dtype, local.device, local.layout) for name, local, at in entries],
        )
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._layout(kinds, entries)
        targets = []
        end = 0
        for section, section_entries in kinds.items():
            self.record[section] = target = [layout.tables[section], None] if section_entries else []
            begin = end
            end = end + len(section_entries)
            if section_entries:
                targets.append((target, begin, end))
        plains = [plain(local, at) for _, local, at in entries]
        if len(layout.plans) == 1:
            rows = layout.plans[0][1].run(plains)
        else:
            rows = torch.zeros(len(entries), WIDTH, dtype=torch.int64)
            for indices, plan in layout.plans:
                sums = plan.run([plains[index] for index in indices])
                # Waits for the device, for tensors on several devices only.
                rows[torch.tensor(indices)] = sums.cpu()
        for target, begin, end in targets:
            self.reading.put(target, 1, rows[begin:end])

    def _layout(self, kinds: Mapping[str, list[Entry]], entries: list[Entry]) -> _TensorLayout:
        plains = [plain(local, at) for _, local, at in entries]
        places = [at for _, _, at in entries]
        tables = {}
        for section, section_entries in kinds.items():
            if section_entries:
                tables[section] = self._table(section_entries)
        plans = []
        for device in dict.fromkeys(tensor.device for tensor in plains):
            indices = []
            for index, tensor in enumerate(plains):
                if tensor.device == device:
                    indices.append(index)
            plans.append((indices, SumPlan([plains[index] for index in indices], [places[index] for index in indices])))
        return _TensorLayout(tables, plans)

    def names(self, kind: str, entries: list[Entry]) -> None:
        """Record the names of tensors; nothing if there are none."""
        if entries:
            self.record[kind] = self._table(entries)

    def _table(self, entries: list[Entry]) -> int:
        """Return the number of the table with these names, which is written once."""
        table: dict[str, list[Any]] = {
            "names": [name for name, _, _ in entries],
            "starts": [position.start for _, _, position in entries],
            "sizes": [local.numel() for _, local, _ in entries],
            "types": [str(local.dtype).removeprefix("torch.") for _, local, _ in entries],
        }
        key = tuple(map(tuple, table.values()))
        number = self._tables.get(key)
        if number is None:
            number = self._tables[key] = len(self._tables)
            self._put({"t": "table", "id": number, **table})
        return number

    def end_step(self) -> None:
        """Write the step's record if it is in range, and start the next step."""
        if self.within():
            self.fresh = False
            # A process group may be made after the first steps, so the rank is read again now and then.
            if self._rank < 0 or self.thorough:
                self._rank = find_rank()[0]
            self.reading.finish()
            self._put({"t": "step", "k": self.step, **self.record, "rank": self._rank})
        self.step += 1
        self.forget()

    def forget(self) -> None:
        """Discard the current record."""
        self.record = _empty_record()

    def close(self) -> None:
        """Write the record after the last step, when the process ends."""
        if self._writer is not None or self.record["fwd"]:
            self.reading.finish()
            self._put({"t": "end", "k": self.step, **self.record, "rank": find_rank()[0], "error": _error()})
        self.on = False

    def fail(self, error: Exception) -> None:
        """End the recording with a line on stderr."""
        self.on = False
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        # The script may have closed its stderr.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"lockstep trace: recording ended in step {self.step + 1}: {message}", file=sys.stderr, flush=True)
        if os.environ.get("LOCKSTEP_TRACE_DEBUG"):
            raise error
        # Releases the tensors.
        self.forget()
        self.reading = PendingTensors()
        if self._writer is not None:
            # A disk may be full.
            with contextlib.suppress(OSError):
                self._writer.put({"t": "failed", "k": self.step, "error": message})

    def _put(self, line: dict[str, Any]) -> None:
        if self._writer is None:
            # Files of earlier starts count towards the limit.
            free = self.options.most - _bytes_written(self.options.folder)
            self._writer = Writer(self.options.folder, free // max(1, find_rank()[1]), _header() | {"first": self.step})
        if not self._writer.put(line):
            self.on = False


def _error() -> str:
    """Return the class of the error that ends this process, else "".

    Its text is not recorded, because it may have user data.
    """
    # The first is set in a child of multiprocessing, the second in the main program.
    error_class = sys.exc_info()[0] or getattr(sys, "last_type", None)
    if error_class is None or issubclass(error_class, SystemExit):
        return ""
    return error_class.__name__


def _empty_record() -> dict[str, Any]:
    return {"ticks": 0, "loads": [], "fwd": [], "loss": [], "ev": []}
