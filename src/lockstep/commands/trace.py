"""`lockstep trace -o DIR [--steps A:B] -- COMMAND ...`: runs a command, and records what its processes train.

lockstep trace -o one -- python train.py --batch-size 8
lockstep trace -o two -- torchrun --nproc-per-node 2 train.py --batch-size 4
lockstep compare one two

The exit code is the command's. What attaches to the processes is in `trace/`; nothing here loads torch.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError, DifferenceError
from lockstep.files import write_whole
from lockstep.trace.compare.judge import judged
from lockstep.trace.compare.reading import FOLDER_FILE, FORMAT, NO_STEP, TraceError, read, summary

__all__ = [
    "compare_command",
    "trace_command",
]


def compare_command(argv: list[str]) -> int:
    """Runs `lockstep compare` with the arguments `argv`, prints the verdict and returns 0.

    Raises:
        ConfigError: a flag that does not exist, or a folder that is no trace; exit code 2.
        DifferenceError: the two are not the same training, or not proved to be; exit code 3.
    """
    try:
        given = _compare_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    try:
        verdict = judged(*(read(Path(name).expanduser()) for name in (given.one, given.two)))
    except TraceError as error:
        raise ConfigError(printable(str(error))) from None
    if given.json:
        print(json.dumps(verdict.plain(), indent=2))
    else:
        print("\n".join(printable(line) for line in str(verdict).splitlines()))
    if verdict.finding is not None:
        raise DifferenceError(f"not the same training: {verdict.finding.stage} at step {verdict.finding.step}")
    if verdict.missing:
        raise DifferenceError(printable(f"not proved to be the same training: {verdict.missing[0]}"))
    return 0


def _compare_parser() -> Parser:
    parser = Parser(
        prog="lockstep compare",
        description="Says where two trainings that `lockstep trace` recorded first differ: step, stage, tensor, rank "
        "and cause. The first is what the second is held against, such as one process against two.",
    )
    parser.add_argument("one", metavar="ONE", help="the folder of a trace")
    parser.add_argument("two", metavar="TWO", help="the folder of another")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


_ATTACH = Path(__file__).parents[1] / "trace" / "attach"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def trace_command(argv: list[str]) -> int:
    """Runs `lockstep trace` with the arguments `argv` and returns the exit code of the command behind `--`.

    A command that a signal ended gives 128 and the signal's number, as in a shell.

    Raises:
        ConfigError: a flag that does not exist or does not hold, no command, or a folder that is not empty.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    try:
        given = _trace_parser().read(argv[:at])
    except SystemExit as end:  # --help
        return int(end.code or 0)
    program = argv[at + 1 :]
    if not program:
        raise ConfigError("nothing stands behind `--`: lockstep trace -o DIR -- python train.py ...")
    if shutil.which(program[0]) is None:
        hint = f": python {program[0]}" if program[0].endswith(".py") else ""
        raise ConfigError(f"lockstep trace: there is no program '{printable(program[0])}'; give one behind `--`{hint}")
    first, last = _span(given.steps)
    if not 0 < given.max_mb < math.inf:
        raise ConfigError(f"--max-mb is {given.max_mb:g}: it must be a number above 0")
    folder, made = _folder(given.out)
    steps = "every step" if not given.steps else f"steps {given.steps}"
    _say(f"{steps} into {printable(str(folder))}, at most {given.max_mb:g} MiB (--max-mb)")
    environment = {
        **os.environ,
        "LOCKSTEP_TRACE": str(folder),
        "LOCKSTEP_TRACE_STEPS": f"{first}:{'' if last is None else last}",
        "LOCKSTEP_TRACE_MAX_MB": str(given.max_mb),
        "LOCKSTEP_TRACE_MODULES": "1" if given.modules else "0",
        "PYTHONPATH": os.pathsep.join([str(_ATTACH), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
    }
    began = time.time()
    try:
        code = _run(program, environment)
    except OSError as error:  # a file without a first line, of another machine
        _removed(folder, made)
        why = error.strerror or error
        raise ConfigError(f"lockstep trace: '{printable(program[0])}' cannot be started: {why}") from error
    if code:
        _say(f"the command ended with exit code {code}")
    try:
        _ended(folder, made, {"code": code, "seconds": round(time.time() - began, 3), "steps": given.steps})
    except OSError as error:  # a full disk, a folder that the command has removed: its exit code is kept
        _say(f"{printable(str(folder))}: {error.strerror or error}; the trace may not be whole")
    return code


def _ended(folder: Path, made: bool, record: dict[str, Any]) -> None:
    """Says what was recorded; a folder in which nothing was is not kept."""
    if made and not any(path.name != FOLDER_FILE for path in folder.iterdir()):
        _removed(folder, made)
        _say(f"nothing was recorded, so {printable(str(folder))} is not kept: {NO_STEP}")
        return
    write_whole(folder / FOLDER_FILE, json.dumps({"format": FORMAT, **record}) + "\n")
    _say(summary(folder))


def _removed(folder: Path, made: bool) -> None:
    (folder / FOLDER_FILE).unlink()
    if made:
        folder.rmdir()


def _say(line: str) -> None:
    print(f"lockstep trace: {line}", file=sys.stderr, flush=True)


def _span(text: str) -> tuple[int, int | None]:
    """`100:200` -> (100, 200); `100:` and `:200` leave the other end open."""
    if not text:
        return 0, None
    first, colon, last = text.partition(":")
    try:
        span = int(first or 0), int(last) if last else None
    except ValueError:
        span = -1, None
    if not colon or span[0] < 0 or (span[1] is not None and span[1] <= span[0]):
        raise ConfigError(
            f"--steps '{text}': give the first step and the one behind the last, such as 0:100 or 500:520"
        )
    return span


def _folder(text: str) -> tuple[Path, bool]:
    """The folder to write, and whether it was made here. Raises ConfigError where it is not empty or cannot be made."""
    folder = Path(text).expanduser().absolute()
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.name != FOLDER_FILE for path in folder.iterdir()):
            raise ConfigError(f"--out {printable(text)} is not empty: give a new folder, a trace is never written over")
        write_whole(folder / FOLDER_FILE, json.dumps({"format": FORMAT}) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {printable(text)}: {error.strerror or error}") from error
    return folder, made


def _run(program: list[str], environment: dict[str, str]) -> int:
    """The command's exit code. Signals go on to it; Ctrl-C reaches it from the terminal itself."""
    process = subprocess.Popen(program, env=environment)

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before: dict[int, Any] = {number: signal.signal(number, forward) for number in _SIGNALS}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _trace_parser() -> Parser:
    parser = Parser(
        prog="lockstep trace",
        usage="lockstep trace -o DIR [flags] -- COMMAND [arguments]",
        description="Runs a training script, on whatever framework of torch, and records digests and norms of each "
        "optimizer step on every rank: no data. The script is not edited, and computes the same bits. "
        "`lockstep compare ONE TWO` then says where two runs part, and why.",
    )
    add = parser.add_argument
    add("-o", "--out", required=True, metavar="DIR", help="a new folder for the trace")
    add("--steps", default="", metavar="A:B", help="optimizer steps to record, B left out (default: all)")
    text = "most that the folder may hold, of all processes and starts, in MiB; then recording ends "
    text += "(default: %(default)s)"
    add("--max-mb", type=float, default=1024.0, metavar="N", help=text)
    add("--modules", action="store_true", help="every module's output in every step (default: in the first two)")
    return parser
