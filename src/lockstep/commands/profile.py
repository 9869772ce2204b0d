"""`lockstep profile [flags of train] --steps 10`: a short training that is traced and judged; or the traces of another.

lockstep profile --task digits.py:Digits --batch-size 32
lockstep launch --nproc-per-node 2 -- profile --task digits.py:Digits
lockstep profile --read outputs/digits/profile/100-110          the verdict over traces that are there

Here are the flags; `run/profiled.py` trains, `diagnose/profile/` judges.
"""

import importlib
from pathlib import Path

from lockstep.commands import train
from lockstep.config import options
from lockstep.config.flags import Parser
from lockstep.config.hints import FOREIGN
from lockstep.config.options import add_flags
from lockstep.errors import ConfigError

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep profile` with the arguments `argv`, prints the verdict and returns its exit code.

    Raises:
        UsageError: what was asked for cannot be done, or the traces are damaged; exit code 2.
        LockstepError: the run failed.
    """
    try:
        given = vars(_parser().read(argv))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    if given["read"]:
        read = importlib.import_module("lockstep.diagnose.profile.reading").read_all(Path(given["read"]))
        print(importlib.import_module("lockstep.diagnose.profile.verdict").judged(read))
        return 0
    for name, least in (("steps", 1), ("warmup", 0)):
        if not least <= given[name] <= 900:
            raise ConfigError(f"--{name} is {given[name]}: it must be from {least} to 900")
    config, task = train.asked(options.told(given))
    train.loaded()
    profiled = importlib.import_module("lockstep.run.profiled")
    code: int = profiled.profile(config, given["steps"], given["warmup"], task)
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep profile",
        usage="lockstep profile [flags] [flags of train]",
        description="Trains a few steps in a folder of its own, traces them on every rank, and says where their time "
        "goes and what to change first. The flags of `lockstep train` say what is trained.",
        foreign=FOREIGN,
    )
    add = parser.add_argument
    add("--steps", type=int, default=10, help="steps to trace (default: %(default)s)")
    add("--warmup", type=int, default=5, help="steps before them (default: %(default)s)")
    add(
        "--read",
        default="",
        metavar="DIR",
        help="train nothing: judge the traces in this folder, RUN/profile/FIRST-LAST",
    )
    parser.first = ("steps", "warmup", "read", "task", "batch_size", "engine")
    parser.examples = (
        "lockstep profile --task digits.py:Digits --batch-size 32",
        "lockstep launch --nproc-per-node 2 -- profile --task digits.py:Digits",
        "lockstep profile --read outputs/digits/profile/100-110",
    )
    add_flags(parser, kind="")
    return parser
