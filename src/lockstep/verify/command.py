"""`lockstep verify [train flags] --engines single,ddp --world-sizes 1,2`: exit code 0, or 3 for a difference.

lockstep verify                                              the default model, float64, every engine that runs anywhere
lockstep verify --exact --engines ddp,fsdp --world-sizes 2,4
lockstep verify --task mine.py:Task --batch-size 32          your own task
lockstep verify --plant per-rank-seed                        see a mistake found
lockstep verify -o certificate.json                          keep the proof
lockstep verify --against certificate.json                   the same on another machine

Flags are read before torch is loaded, which takes seconds.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep import options
from lockstep.config import Config
from lockstep.errors import ConfigError, DifferenceError
from lockstep.verify import FAULTS

if TYPE_CHECKING:
    from lockstep.verify.request import Request
    from lockstep.verify.table import Table

__all__ = ["command"]

_OF_THE_MACHINE = ("device", "timeout", "save_dir")  # flags that hold with --against


def command(argv: list[str]) -> int:
    """Runs `lockstep verify` with the arguments `argv`, prints the table and returns 0.

    Raises:
        DifferenceError: a combination differs; exit code 3.
        UsageError: what was asked for cannot be done; exit code 2.
    """
    try:
        own, rest = _parser().parse_known_args(argv)
        config = options.parse(rest)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    _check_out(own.out)
    if own.task:
        _loaded("lockstep.task").load_task(own.task)  # here first: what is wrong is one line, not a failed rank's
    given = _loaded("lockstep.verify.certificate").read(Path(own.against)) if own.against else None
    request = _repeated(own, config, given) if given else _request(own, config, precision=_precision(config, rest))
    with _removing():
        table: Table = _loaded("lockstep.verify.verification").prove(request, given)
    if _is_main():
        print(table, flush=True)
        if own.out and table.certificate:
            _loaded("lockstep.verify.certificate").write(Path(own.out), table.certificate)
            print(f"  certificate: {own.out}", flush=True)
    if not table.ok:
        wrong = [str(row.combination) for row in table.rows if not row.ok and row.verdict != "unavailable"]
        problem = DifferenceError(f"not the same training: {', '.join(wrong) or 'the certificate'}; see the table")
        problem.relayed = not _is_main()
        raise problem
    return 0


def _loaded(module: str) -> Any:
    """A module that loads torch."""
    return importlib.import_module(module)


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


def _request(own: argparse.Namespace, config: Config, **changes: Any) -> "Request":
    """What the flags ask for, but for `changes`."""
    asked = {
        "named": own.task,
        "engines": _names(own.engines),
        "world_sizes": _sizes(own.world_sizes),
        "steps": own.steps,
        "resume_at": own.resume_at,
        "compile": config.compile,
        "plant": own.plant,
        "plant_at": own.plant_at,
        "skip_unavailable": own.skip_unavailable,
        "scratch": own.scratch,
    }
    made: Request = _loaded("lockstep.verify.request").Request(
        dataclasses.replace(config, compile=False), **asked | changes
    )
    return made


def _repeated(own: argparse.Namespace, config: Config, given: dict[str, Any]) -> "Request":
    """What a certificate proved, asked for again. Raises ConfigError for a flag that would not be heeded."""
    defaults, flags = _parser(), options.flat(Config())
    mine = [
        key
        for key in ("engines", "world_sizes", "steps", "resume_at")
        if getattr(own, key) != defaults.get_default(key)
    ]
    mine += [key for key, value in options.flat(config).items() if value != flags[key] and key not in _OF_THE_MACHINE]
    if mine:
        shown = ", ".join(f"--{key.replace('_', '-')}" for key in mine)
        raise ConfigError(f"--against repeats what its certificate says: leave out {shown}")
    proved: Config = _loaded("lockstep.verify.certificate").config_of(given)
    proved = dataclasses.replace(proved, **{key: getattr(config, key) for key in _OF_THE_MACHINE})
    same = {key: given[key] for key in ("engines", "world_sizes", "steps", "resume_at", "compile")}
    named = own.task or (given["task"] if ":" in given["task"] else "")
    return _request(own, proved, **same, named=named, precision=proved.precision)


def _precision(config: Config, rest: list[str]) -> str:
    """The run's own, where a flag or the file sets it; else "", which leaves it to the proof."""
    files = [word.partition("=")[2] for word in rest if word.startswith("--config=")]
    files += [after for word, after in itertools.pairwise(rest) if word == "--config"]
    given = any(word.partition("=")[0] == "--precision" for word in rest)
    return config.precision if given or any("precision" in options.read(Path(file)) for file in files) else ""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in _names(text)]
    except ValueError:
        raise ConfigError(f"--world-sizes '{text}' must be numbers such as 1,2,4") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, like every other error of the command line."""
        raise ConfigError(f"{message}; `lockstep verify --help` lists the flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lockstep verify",
        description="Proves that every engine and world size trains what one process does, tensor by tensor.",
        epilog="All other flags are those of `lockstep train`. Without --exact and --precision: in float64.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--engines", default="", help="engines to compare (default: all that need no further package and no GPU)")
    add("--world-sizes", default="1,2", help="numbers of processes (default: %(default)s)")
    add("--steps", type=int, default=8, help="steps of the run to compare (default: %(default)s)")
    add("--resume-at", type=int, help="save, end and resume before this step (default: half-way; 0: do not)")
    add("--task", default="", metavar="FILE.py:CLASS", help="a task of your own, made without arguments")
    add("--plant", default="", metavar="NAME", help=f"plant a fault and see it found: {', '.join(FAULTS)}")
    add(
        "--plant-at",
        type=int,
        help="the step of a fault that has a moment (default: 2, or 1 where the run resumes there)",
    )
    add("--skip-unavailable", action="store_true", help="leave out what cannot run here, and say so")
    add("-o", "--out", default="", metavar="FILE", help="write a certificate, which --against takes on any machine")
    add("--against", default="", metavar="FILE", help="repeat the proof of a certificate, and compare with it")
    add("--scratch", default="", help="folder for tensors, about 4 copies of the model a step (default: the system's)")
    return parser
