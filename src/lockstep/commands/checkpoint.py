"""`lockstep checkpoint list | inspect | verify | prune RUN`: the flags; `checkpoint/command.py` does the work.

lockstep checkpoint list outputs/first          a table: step, epoch, size, written, engine, world, whole
lockstep checkpoint list outputs/first --json   the same as one JSON list, for scripts
lockstep checkpoint inspect outputs/first       the newest whole one, with its fingerprint
lockstep checkpoint verify outputs/first        one line each; exit code 3 when one is damaged
lockstep checkpoint prune outputs/first --keep 1        removes all but the newest whole one and the best
"""

import argparse
import importlib
from pathlib import Path

from lockstep.config.cli import Parser
from lockstep.errors import ConfigError

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep checkpoint` with the arguments `argv` and returns its exit code: 0, or 3 for damage found.

    Raises:
        CheckpointError: there is no such run or no such checkpoint.
        ConfigError: a flag that does not exist or does not hold, or a run that goes on, which `prune` leaves alone.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    if given.action == "prune":
        return _prune(given)
    run = importlib.import_module("lockstep.checkpoint.command").run  # loads torch
    asked = {"tensors": getattr(given, "tensors", False), "as_json": getattr(given, "json", False)}
    code: int = run(given.action, given.run, given.step, **asked)
    return code


def _prune(given: argparse.Namespace) -> int:
    if given.keep < 1:
        raise ConfigError(f"--keep is {given.keep}: it must be at least 1; to remove all, delete the run's folder")
    prune = importlib.import_module("lockstep.training.prune").prune  # loads torch
    prune(Path(given.run), given.keep, best=given.keep_best, dry_run=given.dry_run, as_json=given.json)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lockstep checkpoint", description="List, inspect, verify or prune the checkpoints of a run.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | inspect | verify | prune")
    for name, text in (
        ("list", "a table of the checkpoints: step, epoch, size, written, engine, world size, whole or not"),
        ("inspect", "what is in one checkpoint, with its fingerprint; the newest whole one by default"),
        ("verify", "check every file of every checkpoint; exit code 3 when something is damaged"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("run", metavar="RUN", help="a run's folder, or the folder of one checkpoint")
        action.add_argument("--step", type=int, help="only the checkpoint of this step")
        if name == "inspect":
            action.add_argument("--tensors", action="store_true", help="list every tensor")
        if name == "list":
            action.add_argument("--json", action="store_true", help="print one JSON list, with numbers as numbers")
    text = "remove all but the newest whole checkpoints and the best; not while the run goes on"
    action = actions.add_parser("prune", help=text, description=text)
    action.add_argument("run", metavar="RUN", help="a run's folder")
    action.add_argument("--keep", type=int, required=True, metavar="N", help="newest whole checkpoints to keep, from 1")
    text = "keep that of the best evaluation too (default: yes)"
    action.add_argument("--keep-best", action=argparse.BooleanOptionalAction, default=True, help=text)
    action.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    action.add_argument(
        "--json", action="store_true", help="print what is removed as one JSON list: step, bytes, removed"
    )
    return parser
