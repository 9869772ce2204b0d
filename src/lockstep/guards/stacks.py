"""What a process was doing, into a file of the run's logs: every Python stack and the last collectives.

dump(folder / "logs", rank, "no progress for 600 s")
where_main()                            # "text.py:40 in __getitem__", and whether that is a wait for other ranks
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lockstep.distributed import step_exchange, world
from lockstep.guards import told

__all__ = ["dump", "where_main"]

_COLLECTIVES = 20  # the last ones of the flight recorder
_OURS = tuple(str(module.__file__) for module in (step_exchange, world, told))  # what waits for the other ranks
_WAITS = ("torch/distributed/", "torch/autograd/graph.py", "torch/cuda/", *_OURS)
_OUTSIDE = ("/threading.py", "/torch/nn/modules/module.py", "/torch/_tensor.py")


def dump(logs: Path, rank: int, reason: str) -> Path:
    """Appends the stacks of all threads and the last collectives to `logs`/hang-00000.txt, and returns its path."""
    path = logs / f"hang-{rank:05d}.txt"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with contextlib.suppress(OSError), open(os.open(path, flags, 0o644), "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} rank {rank}, process {os.getpid()}: {reason}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.writelines(line + "\n" for line in _collectives())
    return path


def _collectives() -> list[str]:
    """The flight recorder's last entries, oldest first; what there is where torch records nothing is one line."""
    recorder: Any = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # from torch 2.13 for gloo
    if recorder is None or os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return ["no record of collectives: set TORCH_FR_BUFFER_SIZE=1000 (lockstep launch does)"]
    try:
        entries = json.loads(recorder()).get("entries", [])
    except (RuntimeError, ValueError, TypeError) as error:
        return [f"no record of collectives: {error}"]
    return [f"the last {min(len(entries), _COLLECTIVES)} collectives, oldest first:"] + [
        f"  {entry.get('process_group', '')} #{entry.get('collective_seq_id', '?')} {entry.get('profiling_name', '?')} "
        f"{entry.get('input_sizes', '')} {entry.get('state', '?')}"
        for entry in entries[-_COLLECTIVES:]
    ]


def where_main() -> tuple[str, bool]:
    """The line at which the main thread stands, and whether it only waits there for other ranks or the device."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = frame is not None and any(part in frame.f_code.co_filename for part in _WAITS)
    while frame and frame.f_back and any(frame.f_code.co_filename.endswith(part) for part in _OUTSIDE):
        frame = frame.f_back
    if frame is None:
        return "an unknown place", False
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}", waits
