"""What `lockstep verify` does with its flags, which are in commands/verify.py."""

import argparse
import contextlib
import dataclasses
import importlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.config import options, presets
from lockstep.config.config import Config
from lockstep.errors import ConfigError, DifferenceError
from lockstep.tasks.named import load_task
from lockstep.tasks.options import LIGHTNING, OWN, kind_of
from lockstep.verify import certificate
from lockstep.verify.request import Request
from lockstep.verify.verification import prove

__all__ = ["run"]

_OF_THE_MACHINE = ("device", "timeout", "save_dir", "task")  # flags that hold with --against


def run(own: argparse.Namespace) -> int:
    """Proves what `own`, read by the parser in commands/verify.py, asks for, prints the table and returns 0.

    Raises:
        DifferenceError: a combination differs; exit code 3.
        UsageError: what was asked for cannot be done; exit code 2.
    """
    values = options.told(vars(own))
    config = options.build(presets.applied(values))
    if config.task.startswith(LIGHTNING):
        config, _ = importlib.import_module("lockstep.tasks.lightning_files").configured(values)
    _check_out(own.out)
    if kind_of(config.task) == OWN:
        load_task(config.task)  # here first: what is wrong is one line, not a failed rank's
    given = certificate.read(Path(own.against)) if own.against else None
    asked = _repeated(own, config, given) if given else _request(own, config, precision=values.get("precision", ""))
    with _removing():
        table = prove(asked, given)
    if _is_main():
        print(table, flush=True)
        if own.out and table.certificate:
            certificate.write(Path(own.out), table.certificate)
            print(f"  certificate: {own.out}", flush=True)
    if not table.ok:
        wrong = [str(row.combination) for row in table.rows if not row.ok and row.verdict != "unavailable"]
        different = table.difference or any(row.verdict in ("different", "failed") for row in table.rows)
        what = "not the same training" if different else "not proved to be the same training"
        if table.difference and table.difference.stage == "determinism":
            what = "two runs of the same differ, so nothing else was compared"
        problem = DifferenceError(f"{what}: {', '.join(wrong) or 'the certificate'}; see the table")
        problem.relayed = not _is_main()
        raise problem
    return 0


def _check_out(out: str) -> None:
    """Raises ConfigError, before the proof and not after it, where no certificate can be written."""
    if out and _is_main() and (Path(out).is_dir() or not Path(out).parent.is_dir()):
        raise ConfigError(f"--out {out}: give a file in a folder that exists")


def _is_main() -> bool:
    """Whether this process speaks and writes: under torchrun rank 0 alone does."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _removing() -> Iterator[None]:
    """Within it SIGTERM (`timeout`, a scheduler) ends the processes and removes the files, as Ctrl-C does.

    In a torchrun job rank 0 has the files. It hears of the others' end where it waits for them.
    """
    if not _is_main() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _request(own: argparse.Namespace, config: Config, **changes: Any) -> Request:
    """What the flags ask for, but for `changes`."""
    asked = {
        "engines": own.engines,
        "world_sizes": own.world_sizes,
        "steps": own.steps,
        "resume_at": own.resume_at,
        "compile": bool(config.compile),
        "plant": own.plant,
        "plant_at": own.plant_at,
        "skip_unavailable": own.skip_unavailable,
        "scratch": own.scratch,
    }
    return Request(dataclasses.replace(config, compile=False), **asked | changes)


def _repeated(own: argparse.Namespace, config: Config, given: dict[str, Any]) -> Request:
    """What a certificate proved, asked for again. Raises ConfigError for a flag that would not be heeded."""
    flags = options.flat(Config())
    mine = [key for key in ("engines", "world_sizes", "steps", "resume_at") if key in own.named]
    mine += [key for key, value in options.flat(config).items() if value != flags[key] and key not in _OF_THE_MACHINE]
    if mine:
        shown = ", ".join(f"--{key.replace('_', '-')}" for key in mine)
        raise ConfigError(f"--against repeats what its certificate says: leave out {shown}")
    proved: Config = certificate.config_of(given)
    here = {key: getattr(config, key) for key in _OF_THE_MACHINE} | {"task": config.task or proved.task}
    proved = dataclasses.replace(proved, **here)
    same = {key: given[key] for key in ("engines", "world_sizes", "steps", "resume_at", "compile")}
    return _request(own, proved, **same, precision=proved.precision)
