"""Run a command, time the steps of its training processes, and report.

The result is a verdict, an account of the wall time, or a page.

lockstep profile -- torchrun --nproc-per-node 2 train.py
lockstep goodput -- python train.py --epochs 3
lockstep report --out outputs/mine -- python train.py

The script needs no change, and no lockstep: `diagnose/script` attaches to its processes as `lockstep trace` does. They
write the files of a run's folder, and the readers of such folders do the rest. This module does not import torch.
"""

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.commands.attached import check_program, new_folder, run_attached
from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.diagnose.script import SETTINGS_VARIABLE, STARTED
from lockstep.errors import ConfigError
from lockstep.files import write_whole

__all__ = ["script_command"]

# Marks a folder as created by these commands; it has the command's scripts.
_MARK = "command.json"
_ABOUT = {
    "profile": "report where the time of its steps goes, and what to change first",
    "goodput": "report where its wall time went",
    "report": "write an HTML page about it",
}


def script_command(name: str, argv: list[str]) -> int:
    """Run `lockstep NAME [flags] -- COMMAND` and return the command's exit code.

    Args:
        name: "profile", "goodput" or "report".

    Raises:
        ConfigError: an unknown flag, an invalid value, no command, a folder that is not empty; or the command succeeded
            and took no optimizer step, or too few for a verdict. Exit code 2.
    """
    at = argv.index("--")
    try:
        args = _parser(name).read(argv[:at])
    except SystemExit as end:  # --help
        return int(end.code or 0)
    program = argv[at + 1 :]
    check_program(name, program)
    span = _span(args) if name == "profile" else None
    scripts = []
    for word in program:
        if word.endswith(".py"):
            scripts.append(word)
    stem = Path((scripts or program)[0]).stem
    out = args.out or f"outputs/{stem}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, created = new_folder(out, _MARK, {"command": name, "scripts": scripts})
    traces = _ProfileTraces(folder, span) if span else None
    variables = {
        "LOCKSTEP_RECORDER": "lockstep.diagnose.script",
        SETTINGS_VARIABLE: json.dumps({"folder": str(folder), "trace": span}),
    }
    try:
        code, interrupted = run_attached(name, program, variables, traces.look if traces else None)
    except (ConfigError, KeyboardInterrupt):
        # The command did not start, so there is nothing to keep.
        _remove(folder, created)
        raise
    if code and not interrupted:
        _say(name, f"the command ended with exit code {code}")
    problem = _end(folder, created, "interrupted" if interrupted else "failed" if code else "finished")
    # Ctrl-C came before the first step: the command's code says enough.
    if problem and interrupted and code:
        _say(name, "interrupted before the first step; nothing is recorded")
        return code
    if not problem:
        if not interrupted:
            _say(name, f"records: {printable(out)}")
        problem = _RESULTS[name](folder, args, traces)
    if problem and not code:
        raise ConfigError(f"lockstep {name}: {problem}")
    if problem:
        _say(name, problem)
    if interrupted:
        _say(name, f"interrupted; records: {printable(out)}")
    return code


def _parser(name: str) -> Parser:
    if name == "profile":
        flags = "[--out DIR] [--steps N] [--warmup N]"
    else:
        flags = "[--out DIR]"
    flags += " [--json]" if name == "goodput" else ""
    parser = Parser(
        prog=f"lockstep {name}",
        usage=f"lockstep {name} {flags} -- COMMAND [arguments]",
        description=f"Run a training script of any torch framework, unchanged, and {_ABOUT[name]}.",
    )
    add = parser.add_argument
    text = f"a new folder for the records (default: outputs/SCRIPT-{name}-TIME)"
    add("-o", "--out", default="", metavar="DIR", help=text)
    if name == "profile":
        add("--steps", type=int, default=10, metavar="N", help="steps to trace (default: %(default)s)")
        add("--warmup", type=int, default=5, metavar="N", help="steps before the traced ones (default: %(default)s)")
    if name == "goodput":
        add("--json", action="store_true", help="print one JSON object, in seconds")
    return parser


def _span(args: argparse.Namespace) -> list[int]:
    for flag, value in (("steps", args.steps), ("warmup", args.warmup)):
        if not 1 <= value <= 900:
            raise ConfigError(f"--{flag} is {value}: it must be from 1 to 900")
    return [args.warmup + 1, args.warmup + args.steps]


def _say(name: str, text: str) -> None:
    print(f"lockstep {name}: {text}", file=sys.stderr, flush=True)


class _ProfileTraces:
    """The traces of `profile`, judged as soon as the last rank has written its own.

    Attributes:
        judged: the verdict was printed.
    """

    def __init__(self, folder: Path, span: Sequence[int]) -> None:
        self.span = span
        self.folder = folder / "profile" / f"{span[0]}-{span[1]}"
        self.judged = False
        self._ranks = 0

    def look(self) -> None:
        """Print the verdict if all traces are there."""
        if self.judged:
            return
        paths = sorted(self.folder.glob("rank-*.json.gz"))
        if paths and not self._ranks:
            reading = importlib.import_module("lockstep.diagnose.profile.reading")
            # Each trace has the number of ranks. Until it is complete, it cannot be read.
            with contextlib.suppress(ConfigError):
                self._ranks = int(reading.read(paths[0]).about["world_size"])
        if self._ranks and len(paths) >= self._ranks:
            with contextlib.suppress(ConfigError):
                if self.judge() == self.span[1]:
                    _say("profile", "the command keeps running; Ctrl-C ends it")

    def judge(self) -> int:
        """Print the verdict, write it next to the traces, and return the last traced step.

        Raises:
            ConfigError: a rank's trace is missing, damaged, or has other steps.
        """
        traces = importlib.import_module("lockstep.diagnose.profile.reading").read_all(self.folder)
        verdict = importlib.import_module("lockstep.diagnose.profile.verdict").judge(traces)
        self.judged = True
        print(verdict, file=sys.stderr, flush=True)
        try:
            verdict.write(self.folder)
        except OSError as error:
            _say("profile", f"verdict.json: {error.strerror or error}")
        return int(verdict.steps[1])


def _end(folder: Path, created: bool, status: str) -> str:
    """Record how the command ended; return why nothing was recorded, or "".

    Removes a folder without records.
    """
    started = folder / STARTED
    has_torch = started.exists()
    started.unlink(missing_ok=True)
    if not (folder / "timeline.jsonl").exists():
        if not any(path.name != _MARK for path in folder.iterdir()):
            _remove(folder, created)
        if has_torch:
            return "the command took no step of a torch optimizer"
        return "the command started no Python process that loads torch (python -I, -E and -S are not recorded)"
    with contextlib.suppress(OSError):
        write_whole(folder / "ended.json", json.dumps({"status": status, "step": _steps(folder)}) + "\n")
    return ""


def _remove(folder: Path, created: bool) -> None:
    (folder / _MARK).unlink()
    if created:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _steps(folder: Path) -> int:
    """Return the steps of the last start."""
    start = importlib.import_module("lockstep.report.goodput").goodput(folder / "timeline.jsonl").starts[-1]
    return int(start.last - start.first)


def _profile(folder: Path, _: argparse.Namespace, traces: _ProfileTraces | None) -> str:
    assert traces is not None
    if traces.judged:
        return ""
    first_step = traces.span[0]
    steps = _steps(folder)
    if not traces.folder.exists():
        if steps < first_step:
            return (
                f"the command took {steps} steps, and the trace begins with step {first_step}: give a smaller --warmup"
            )
        return f"the command ended in the traced steps, {first_step} to {traces.span[1]}, without a trace: no verdict"
    try:
        traces.judge()
    except ConfigError as error:
        return f"no verdict: {error}"
    return ""


def _goodput(folder: Path, args: argparse.Namespace, _: _ProfileTraces | None) -> str:
    importlib.import_module("lockstep.report.goodput").show(folder, as_json=args.json)
    return ""


def _report(folder: Path, _: argparse.Namespace, __: _ProfileTraces | None) -> str:
    path = folder / "report.html"
    try:
        # Imported late: it loads torch.
        importlib.import_module("lockstep.report.page").write([folder], path)
    except OSError as error:
        return f"{printable(str(path))}: {error.strerror or error}"
    print(f"report: {printable(str(path))}")
    return ""


_RESULTS: dict[str, Callable[[Path, argparse.Namespace, Any], str]] = {
    "profile": _profile,
    "goodput": _goodput,
    "report": _report,
}
