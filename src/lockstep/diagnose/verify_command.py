"""`lockstep verify [train flags] --engines single,ddp --world-sizes 1,2`: exit code 0, or 3 for a difference.

lockstep verify                                              the default model, float64, single, ddp, fsdp, zero
lockstep verify --exact --engines ddp,fsdp --world-sizes 2,4
lockstep verify --task mine.py:Task --batch-size 32          your own task
lockstep verify --plant per-rank-seed                        see a mistake found
lockstep verify --against certificate.json                   the same on another machine
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lockstep import options
from lockstep.config import Config
from lockstep.diagnose import certificate
from lockstep.diagnose.plant import FAULTS
from lockstep.diagnose.verify import prove
from lockstep.diagnose.wanted import DEFAULT_ENGINES, Wanted
from lockstep.errors import ConfigError, DifferenceError
from lockstep.task import load_task

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
        wanted = _wanted(own, rest)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    if own.task:
        load_task(own.task)  # here first: what is wrong with it is one line, not a failed rank's
    with _removing():
        table = prove(wanted)
    wrong = [str(row.combination) for row in table.rows if not row.ok and row.verdict != "unavailable"]
    problem = DifferenceError(f"not the same training: {', '.join(wrong) or 'the certificate'}; see the table")
    if not _is_first():
        problem.relayed = True
    elif table.certificate and own.certificate:
        certificate.write(Path(own.certificate), table.certificate)
        table.notes.append(f"certificate: {own.certificate}")
    if not problem.relayed:
        print(table, flush=True)
    if not table.ok:
        raise problem
    return 0


def _is_first() -> bool:
    """Whether this process speaks and writes: under torchrun rank 0 alone does."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _removing() -> Iterator[None]:
    """Within it SIGTERM (`timeout`, a scheduler) ends the processes and removes the files, as Ctrl-C does.

    In a torchrun job rank 0 has the files. It hears of the others' end where it waits for them.
    """
    if not _is_first() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wanted(own: argparse.Namespace, rest: list[str]) -> Wanted:
    config, given = options.parse(rest), None
    if own.against:
        given = certificate.read(Path(own.against))
        proved = certificate.config_of(given)
        _check_left(own, config)
        config = dataclasses.replace(proved, **{key: getattr(config, key) for key in _OF_THE_MACHINE})
        asked = {key: given[key] for key in ("engines", "world_sizes", "steps", "resume_at", "compile")}
        return _made(config, own, given["task"] if ":" in given["task"] else "", asked, given)
    if not config.exact and not _names_precision(rest) and "deepspeed" not in _names(own.engines):
        config = dataclasses.replace(config, precision="float64")  # DeepSpeed has none: with it the run's own
    asked = {
        "engines": _names(own.engines),
        "world_sizes": _sizes(own.world_sizes),
        "steps": own.steps,
        "resume_at": own.resume_at,
        "compile": config.compile,
    }
    return _made(dataclasses.replace(config, compile=False), own, "", asked, None)


def _check_left(own: argparse.Namespace, config: Config) -> None:
    """Raises ConfigError for a flag that --against would not heed: the certificate says what is run."""
    plain, defaults = _parser(), options.flat(Config())
    mine = [
        key for key in ("engines", "world_sizes", "steps", "resume_at") if getattr(own, key) != plain.get_default(key)
    ]
    mine += [
        key for key, value in options.flat(config).items() if value != defaults[key] and key not in _OF_THE_MACHINE
    ]
    if mine:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in mine)
        raise ConfigError(f"--against repeats what its certificate says: leave out {flags}")


def _made(
    config: Config, own: argparse.Namespace, named: str, asked: dict[str, Any], given: dict[str, Any] | None
) -> Wanted:
    return Wanted(
        config,
        named=own.task or named,
        plant=own.plant,
        plant_at=own.plant_at,
        skip_unavailable=own.skip_unavailable,
        scratch=own.scratch,
        given=given,
        **asked,
    )


def _names_precision(rest: list[str]) -> bool:
    """Whether a flag or the file sets --precision, so that the run's own is meant."""
    if any(word.partition("=")[0] == "--precision" for word in rest):
        return True
    files = [word.partition("=")[2] for word in rest if word.startswith("--config=")]
    files += [after for word, after in itertools.pairwise(rest) if word == "--config"]
    return any("precision" in options.read(Path(file)) for file in files)


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
    add("--engines", default=",".join(DEFAULT_ENGINES), help="engines to compare (default: %(default)s)")
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
    add("--certificate", default="certificate.json", help="where the proof is written (default: %(default)s)")
    add("--against", default="", metavar="FILE", help="repeat the proof of a certificate, and compare with it")
    add("--scratch", default="", help="folder for tensors, about 4 copies of the model a step (default: the system's)")
    return parser
