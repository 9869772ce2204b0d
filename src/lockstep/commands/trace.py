"""Run a command and record the optimizer steps of its processes; compare two recordings.

lockstep trace -o one -- python train.py --batch-size 8
lockstep trace -o two -- torchrun --nproc-per-node 2 train.py --batch-size 4
lockstep compare one two

`trace` returns the command's exit code. `trace/` attaches to the processes; this module does not import torch.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.commands.attached import check_program, new_folder, run_attached
from lockstep.commands.lint_hint import lint_hint
from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError, DifferenceError
from lockstep.files import write_whole
from lockstep.trace.compare.judge import compare_runs
from lockstep.trace.compare.reading import FOLDER_FILE, FORMAT, NO_STEP, TraceError, read, summary

__all__ = [
    "compare_command",
    "trace_command",
]


def compare_command(argv: list[str]) -> int:
    """Run `lockstep compare`, print the verdict and return 0.

    Raises:
        ConfigError: an unknown flag, or a folder that is not a trace; exit code 2.
        DifferenceError: the two are not the same training, or not proved to be; exit code 3.
    """
    try:
        args = _compare_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    try:
        verdict = compare_runs(*(read(Path(name).expanduser()) for name in (args.one, args.two)))
    except TraceError as error:
        raise ConfigError(printable(str(error))) from None
    if args.json:
        print(json.dumps(verdict.plain(), indent=2))
    else:
        print("\n".join(printable(line) for line in str(verdict).splitlines()))
    if verdict.finding is not None:
        hint = lint_hint(_scripts(Path(args.two).expanduser()))
        if hint:
            print(f"lockstep compare: {hint}", file=sys.stderr)
        raise DifferenceError(f"not the same training: {verdict.finding.stage} in step {verdict.finding.step + 1}")
    if verdict.missing:
        raise DifferenceError(printable(f"not proved to be the same training: {verdict.missing[0]}"))
    return 0


def _scripts(folder: Path) -> list[str]:
    """Return the scripts of a traced command; [] in a trace of an earlier version."""
    record = json.loads((folder / FOLDER_FILE).read_text(encoding="utf-8"))
    return [str(word) for word in record.get("scripts", [])]


def _compare_parser() -> Parser:
    parser = Parser(
        prog="lockstep compare",
        description="Report where two runs recorded by `lockstep trace` first differ: step, stage, tensor, rank and "
        "cause. ONE is the reference, for example one process against two.",
    )
    parser.add_argument("one", metavar="ONE", help="folder of the reference trace")
    parser.add_argument("two", metavar="TWO", help="folder of the trace to compare with it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def trace_command(argv: list[str]) -> int:
    """Run `lockstep trace` and return the exit code of the command after `--`.

    A command killed by a signal gives 128 plus the signal's number, as in a shell.

    Raises:
        ConfigError: an unknown flag, an invalid value, no command, or a folder that is not empty.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    try:
        args = _trace_parser().read(argv[:at])
    except SystemExit as end:  # --help
        return int(end.code or 0)
    program = argv[at + 1 :]
    check_program("trace", program)
    first_step, last_step = _span(args.steps)
    if not 0 < args.max_mb < math.inf:
        raise ConfigError(f"--max-mb is {args.max_mb:g}: it must be a number above 0")
    folder, created = new_folder(args.out, FOLDER_FILE, {"format": FORMAT})
    steps = "every step" if not args.steps else f"steps {args.steps}"
    _say(f"{steps} into {printable(str(folder))}, at most {args.max_mb:g} MiB (--max-mb)")
    environment = {
        "LOCKSTEP_TRACE": str(folder),
        "LOCKSTEP_TRACE_STEPS": f"{first_step}:{'' if last_step is None else last_step}",
        "LOCKSTEP_TRACE_MAX_MB": str(args.max_mb),
        "LOCKSTEP_TRACE_MODULES": "1" if args.modules else "0",
    }
    began = time.time()
    try:
        code = run_attached("trace", program, environment).code
    except ConfigError:
        _remove(folder, created)
        raise
    if code:
        _say(f"the command ended with exit code {code}")
    scripts = []
    for word in program:
        if word.endswith(".py"):
            scripts.append(word)
    record = {"code": code, "seconds": round(time.time() - began, 3), "steps": args.steps, "scripts": scripts}
    try:
        _finish(folder, created, record)
    except OSError as error:
        # The disk is full, or the command has removed the folder. The command's exit code is kept.
        _say(f"{printable(str(folder))}: {error.strerror or error}; the trace may be incomplete")
    hint = lint_hint(program)
    if hint:
        _say(hint)
    return code


def _finish(folder: Path, created: bool, record: dict[str, Any]) -> None:
    """Print a summary of the recording; remove the folder if nothing was recorded."""
    # Keep a folder that existed before, even if nothing was recorded.
    if created and not any(path.name != FOLDER_FILE for path in folder.iterdir()):
        _remove(folder, created)
        _say(f"nothing was recorded, removed {printable(str(folder))}: {NO_STEP}")
        return
    write_whole(folder / FOLDER_FILE, json.dumps({"format": FORMAT, **record}) + "\n")
    _say(summary(folder))


def _remove(folder: Path, created: bool) -> None:
    (folder / FOLDER_FILE).unlink()
    if created:
        folder.rmdir()


def _say(line: str) -> None:
    print(f"lockstep trace: {line}", file=sys.stderr, flush=True)


def _span(text: str) -> tuple[int, int | None]:
    """Parse `101:200` as (100, 200), a range of steps from 0.

    `101:` and `:200` leave the other end open.
    """
    if not text:
        return 0, None
    begin, colon, end = text.partition(":")
    try:
        first = int(begin or 1) - 1
        last = int(end) if end else None
    except ValueError:
        # No range begins here, so the check below fails.
        first = -1
        last = None
    if not colon or first < 0 or (last is not None and last <= first):
        raise ConfigError(f"--steps '{text}': give FIRST:LAST, both included, such as 1:100 or 501:520")
    return first, last


def _trace_parser() -> Parser:
    parser = Parser(
        prog="lockstep trace",
        usage="lockstep trace -o DIR [flags] -- COMMAND [arguments]",
        description="Run a training script of any torch framework and record digests and norms of each optimizer step "
        "on every rank, but no data. The script is not modified and computes the same bits. `lockstep compare ONE TWO` "
        "then reports where two runs diverge, and why.",
    )
    add = parser.add_argument
    add("-o", "--out", required=True, metavar="DIR", help="a new folder for the trace")
    add("--steps", default="", metavar="A:B", help="optimizer steps to record, both included (default: all)")
    text = "maximum size of the folder in MiB, over all processes and restarts; recording ends there "
    text += "(default: %(default)s)"
    add("--max-mb", type=float, default=1024.0, metavar="N", help=text)
    add("--modules", action="store_true", help="record every module's output in every step (default: the first two)")
    return parser
