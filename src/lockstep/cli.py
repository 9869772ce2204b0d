"""Dispatch `lockstep COMMAND ...` and turn errors into one line and an exit code.

Importing this loads no torch, so `lockstep --help` answers at once.
"""

import argparse
import atexit
import difflib
import gc
import importlib
import sys
from typing import Any

from lockstep.distributed import failures
from lockstep.distributed.launcher import end_with_launcher
from lockstep.errors import RESERVED_CODES, ConfigError, LockstepError, UsageError

__all__ = ["main"]

# command -> (module, function: remaining arguments -> exit code, one line of help)
COMMANDS = {
    "init": (
        "lockstep.commands.setup",
        "init_command",
        "create a folder with a working task, config and test",
    ),
    "train": ("lockstep.commands.train", "command", "train a model; the same --experiment-name resumes"),
    "launch": ("lockstep.launch.command", "command", "run train on several processes, and restart it after a failure"),
    "evaluate": ("lockstep.commands.use", "evaluate_command", "evaluate a checkpoint of a run, as the run itself does"),
    "generate": ("lockstep.commands.use", "generate_command", "generate text with the language model of a run"),
    "runs": (
        "lockstep.commands.reports",
        "runs_command",
        "list the runs in a folder: progress, best metric, status",
    ),
    "report": (
        "lockstep.commands.reports",
        "report_command",
        "write an HTML page about a run, or a comparison of several",
    ),
    "goodput": (
        "lockstep.commands.reports",
        "goodput_command",
        "report where the wall time of a run went, over all restarts",
    ),
    "checkpoint": (
        "lockstep.commands.checkpoint",
        "command",
        "list, inspect, verify or prune the checkpoints of a run",
    ),
    "data": ("lockstep.commands.data", "command", "tokenize a dataset into shards, in parallel, or look at them"),
    "export": ("lockstep.commands.use", "export_command", "write the weights of a checkpoint in a common format"),
    "verify": ("lockstep.commands.verify", "command", "prove that all engines and world sizes train the same"),
    "trace": ("lockstep.commands.trace", "trace_command", "record the steps of any training script"),
    "compare": ("lockstep.commands.trace", "compare_command", "report where two traces diverge, and why"),
    "scale": (
        "lockstep.commands.diagnose",
        "scale_command",
        "measure how training speeds up with the number of processes",
    ),
    "plan": (
        "lockstep.commands.diagnose",
        "plan_command",
        "estimate memory per device and time, without the devices",
    ),
    "profile": (
        "lockstep.commands.diagnose",
        "profile_command",
        "report where the time of a step goes, and what to change first",
    ),
    "doctor": (
        "lockstep.commands.diagnose",
        "doctor_command",
        "check the machine, network, devices and task",
    ),
    "completion": ("lockstep.cli", "completion_command", "print the completion script of bash or zsh"),
    "lint": (
        "lockstep.commands.setup",
        "lint_command",
        "find mistakes in PyTorch training scripts without running them",
    ),
}

USAGE = """usage: lockstep COMMAND [flags]     (lockstep COMMAND --help for the flags of one)

One training loop that gives the same training on any number of devices, and can prove it.

{commands}

On several processes: lockstep launch --nproc-per-node 4 -- train [flags]"""


def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` names, and exit with its code.

    Args:
        argv: command and flags; None: the process's arguments.
    """
    # Otherwise Python's garbage collector visits all of torch's objects at exit, which takes half a second.
    atexit.register(gc.freeze)
    end_with_launcher()
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        failures.report_interrupt()
        code = 130
    except BrokenPipeError:
        # The reader has gone, as in `lockstep ... | head`.
        code = 141
    except SystemExit as end:
        # The user's code has called sys.exit.
        if end.code not in RESERVED_CODES:
            raise
        failures.report(LockstepError(f"the code, or a library, called sys.exit({end.code}) outside a run"))
        code = 1
    except BaseException as error:
        # An error of lockstep's own, or a bug in the user's code or in lockstep.
        failures.report(error)
        code = error.exit_code if isinstance(error, LockstepError) else 1
    sys.exit(code)


def dispatch(argv: list[str]) -> int:
    """Run `argv` = [command, *flags] and return its exit code.

    Raises:
        UsageError: the command is unknown.
    """
    # The deepspeed launcher adds this flag; LOCAL_RANK has the same value.
    if argv and argv[0].startswith("--local_rank="):
        argv = argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        if argv:
            return 0
        return 2
    if argv[0] == "--version":
        print(f"lockstep {importlib.import_module('lockstep').__version__}")
        return 0
    if argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        if close:
            hint = f"did you mean '{close[0]}'?"
        else:
            hint = "`lockstep --help` lists the commands"
        raise UsageError(f"unknown command '{argv[0]}': {hint}")
    module, function, _ = COMMANDS[argv[0]]
    code: int = getattr(importlib.import_module(module), function)(argv[1:])
    return code


def usage() -> str:
    """Return the text of `lockstep --help`."""
    return USAGE.format(commands="\n".join(f"  {name:<12} {text}" for name, (_, _, text) in COMMANDS.items()))


def completion_command(argv: list[str]) -> int:
    """Print what shtab makes of the commands' flags: `lockstep completion bash`.

    Raises:
        ConfigError: an unknown shell, or shtab is missing.
    """
    parser = importlib.import_module("lockstep.config.cli").Parser(prog="lockstep completion")
    parser.add_argument("shell", choices=["bash", "zsh"], help="for eval in bash; for a file of $fpath in zsh")
    try:
        shell = parser.read(argv).shell
    except SystemExit as end:  # --help
        return int(end.code or 0)
    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        # Here, as pip's records take a third of the time of --help to load.
        advice = importlib.import_module("lockstep.extras").install_extra("completion")
        raise ConfigError(f"completion needs shtab: {advice}") from error
    root = argparse.ArgumentParser(prog="lockstep")
    commands = root.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, (_, _, text) in COMMANDS.items():
        flags = _parser_of(name)
        _add_values(flags, shtab.FILE)
        commands.add_parser(name, help=text, parents=[flags], add_help=False)
    print(shtab.complete(root, shell), end="")
    return 0


def _parser_of(command: str) -> Any:
    """Return the parser of a command, or one without flags: the linter may not be installed."""
    # Imported late: it takes longer than all else that `lockstep --help` needs.
    points = importlib.import_module("importlib.metadata").entry_points(group="lockstep.commands", name=command)
    home = importlib.import_module([*(point.module for point in points), COMMANDS[command][0]][0])
    makers = []
    for name in (f"_{command}_parser", "_parser", "parser"):
        makers.append(getattr(home, name, None))
    return next(filter(None, makers), argparse.ArgumentParser)()


def _add_values(parser: Any, file: Any) -> None:
    """Tell shtab what follows each flag: the choices of an option, else a file or a folder."""
    for action in parser._actions:
        if isinstance(action.choices, dict):  # sub-commands
            for inner in action.choices.values():
                _add_values(inner, file)
        elif "|" in (action.metavar or ""):
            action.choices = action.metavar.split("|")
        elif not action.choices and action.nargs != 0:
            action.complete = file
