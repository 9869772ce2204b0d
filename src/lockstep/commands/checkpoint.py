"""`lockstep checkpoint list | inspect | verify RUN`: the flags; `checkpoint/command.py` does the work.

lockstep checkpoint list outputs/first          a table: step, epoch, size, written, engine, world, whole
lockstep checkpoint inspect outputs/first       the newest whole one, with its fingerprint
lockstep checkpoint verify outputs/first        one line each; exit code 3 when one is damaged
"""

import importlib

from lockstep.config.flags import Parser

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep checkpoint` with the arguments `argv` and returns its exit code: 0, or 3 for damage found.

    Raises:
        CheckpointError: there is no such run or no such checkpoint.
        ConfigError: a flag that does not exist.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    run = importlib.import_module("lockstep.checkpoint.command").run  # loads torch
    code: int = run(given.action, given.run, given.step, tensors=getattr(given, "tensors", False))
    return code


def _parser() -> Parser:
    parser = Parser(prog="lockstep checkpoint", description="List, inspect or verify the checkpoints of a run.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | inspect | verify")
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
    return parser
