"""`lockstep doctor [flags of train]`: exit code 0, or 3 where something is wrong.

lockstep doctor                                                 this machine
lockstep launch --nproc-per-node 4 -- doctor                    between the processes of a run too
torchrun --nnodes 2 ... -m lockstep doctor                      on several nodes: the same command on each
lockstep doctor --task mine.py:Task --batch-size 32             the task as well
lockstep doctor --json                                          for scripts

Here are the flags; `diagnose/doctor/command.py` does the work.
"""

import importlib

from lockstep.config.flags import Parser
from lockstep.config.hints import FOREIGN
from lockstep.config.options import add_flags

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep doctor` with the arguments `argv` and returns 0.

    Raises:
        DifferenceError: a check says FAIL; exit code 3.
        ConfigError: a flag that does not exist or does not hold.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    code: int = importlib.import_module("lockstep.diagnose.doctor.command").run(given)  # loads torch
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep doctor",
        usage="lockstep doctor [flags] [flags of train]",
        description="Looks for what keeps a run from training well: variables, names, versions, the machine, the "
        "network, the devices, and with --task the task itself. Within a minute, on every rank. With the flags of "
        "`lockstep train` it looks at that run; it trains and keeps nothing.",
        foreign=FOREIGN,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    text = "how long the ranks wait for each other to come (default: %(default)s)"
    add("--wait", type=float, default=20.0, metavar="SECONDS", help=text)
    parser.first = ("json", "wait", "task", "save_dir", "batch_size", "engine", "device")
    parser.examples = (
        "lockstep doctor --task digits.py:Digits",
        "lockstep launch --nproc-per-node 4 -- doctor --task digits.py:Digits",
    )
    add_flags(parser, kind="")
    return parser
