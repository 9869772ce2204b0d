"""`lockstep scale --world-sizes 1,2,4 -- [flags of train]`: exit code 0, or 1 where a size failed.

lockstep scale --world-sizes 1,2,4 -- --task mine.py:Task --batch-size 64
lockstep scale --world-sizes 1,2 --strong --rounds 5 --extrapolate 8,64 -- --task mine.py:Task
lockstep scale --world-sizes 1,2,4 --json -- --exact
lockstep scale --runs outputs/n8 outputs/n16 --ranks-per-node 8 --extrapolate 64          of several nodes

Here are the flags; `diagnose/scale/command.py` does the work.
"""

import argparse
import importlib
import os
from pathlib import Path

from lockstep.commands import train
from lockstep.config import cli
from lockstep.config.cli import Parser, add_flags
from lockstep.config.hints import FOREIGN
from lockstep.diagnose.scale.runs import STRONG, WEAK, ScaleRequest, ascending
from lockstep.errors import ConfigError

__all__ = [
    "doctor_command",
    "plan_command",
    "profile_command",
    "scale_command",
]


def doctor_command(argv: list[str]) -> int:
    """Runs `lockstep doctor` with the arguments `argv` and returns 0.

    Raises:
        DifferenceError: a check says FAIL; exit code 3.
        ConfigError: a flag that does not exist or does not hold.
    """
    try:
        given = _doctor_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    code: int = importlib.import_module("lockstep.diagnose.doctor.command").run(given)  # loads torch
    return code


def _doctor_parser() -> Parser:
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


def plan_command(argv: list[str]) -> int:
    """Runs `lockstep plan` with the arguments `argv` and returns 0, or 3 where what was asked for does not fit.

    Raises:
        UsageError: what was asked for cannot be planned; exit code 2.
    """
    try:
        given = _plan_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of how it is traced
    code: int = importlib.import_module("lockstep.diagnose.plan.command").run(given)  # loads torch
    return code


def _plan_parser() -> Parser:
    parser = Parser(
        prog="lockstep plan",
        usage="lockstep plan [flags] [flags of train]",
        description="Says what a training takes of each device's memory, and about how long, without the devices. The "
        "flags of `lockstep train` say what is trained.",
        foreign={name: said for name, said in FOREIGN.items() if name != "world_size"},
    )
    add = parser.add_argument
    add("--world-size", type=int, default=1, metavar="N", help="devices, a process each (default: %(default)s)")
    add("--memory", default="", metavar="80GB", help="memory of a device, in place of the named one's")
    add("--fast", action="store_true", help="what was asked for alone, without what else would fit")
    add("--json", action="store_true", help="print one JSON object, with numbers as numbers")
    parser.first = ("world_size", "device", "memory", "json", "task", "model_name", "batch_size", "micro_batch_size")
    parser.first = (*parser.first, "engine", "precision", "activation_checkpointing", "exact")
    parser.examples = (
        "lockstep plan --model-name builtin:gpt2-xl --world-size 8 --device a100-80",
        "lockstep plan --task mine.py:Mine --device l4-24 --batch-size 64",
    )
    add_flags(parser, kind="")
    return parser


def profile_command(argv: list[str]) -> int:
    """Runs `lockstep profile` with the arguments `argv`, prints the verdict and returns its exit code.

    Raises:
        UsageError: what was asked for cannot be done, or the traces are damaged; exit code 2.
        LockstepError: the run failed.
    """
    try:
        given = vars(_profile_parser().read(argv))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    if given["read"]:
        read = importlib.import_module("lockstep.diagnose.profile.reading").read_all(Path(given["read"]))
        print(importlib.import_module("lockstep.diagnose.profile.verdict").judged(read))
        return 0
    for name, least in (("steps", 1), ("warmup", 0)):
        if not least <= given[name] <= 900:
            raise ConfigError(f"--{name} is {given[name]}: it must be from {least} to 900")
    config, task = train.asked(cli.told(given))
    train.loaded()
    profiled = importlib.import_module("lockstep.training.run")
    code: int = profiled.profile(config, given["steps"], given["warmup"], task)
    return code


def _profile_parser() -> Parser:
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


_ELSEWHERE = "it is no flag of scale; those of train stand behind `--`"


def scale_command(argv: list[str]) -> int:
    """Runs `lockstep scale` with the arguments `argv`, prints the tables and returns 0.

    Raises:
        ConfigError: a flag of scale or of train that does not hold; exit code 2, and nothing was started.
        LockstepError: a run failed; what was measured is printed before.
    """
    own, flags = _split(argv)
    try:
        given = _scale_parser().read(own)
        further = ascending("--extrapolate", given.extrapolate) if given.extrapolate else ()
        if given.runs:
            return _of_runs(given, flags, further)
        if given.ranks_per_node:
            raise ConfigError("--ranks-per-node goes with --runs: what is started here is on one node")
        sizes = ascending("--world-sizes", given.world_sizes)
        config = cli.parse(flags)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    asked = tuple(mode for mode, wanted in ((STRONG, given.strong), (WEAK, given.weak)) if wanted)
    request = ScaleRequest(
        tuple(flags),
        config,
        sizes,
        modes=asked or (STRONG, WEAK),
        rounds=given.rounds,
        steps=given.steps,
        extrapolate=further,
    )
    if config.micro_batch_size:
        request.check(config.micro_batch_size)
    code: int = importlib.import_module("lockstep.diagnose.scale.command").run(request, as_json=given.json)
    return code


def _of_runs(given: argparse.Namespace, flags: list[str], further: tuple[int, ...]) -> int:
    """The tables of runs that were made before."""
    if flags:
        raise ConfigError("--runs reads runs that were made before: leave out the flags of train behind `--`")
    paths = [Path(each).expanduser() for each in given.runs]
    module = importlib.import_module("lockstep.diagnose.scale.command")
    code: int = module.compare(paths, further, given.ranks_per_node, as_json=given.json)
    return code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """scale's own flags, and those of train behind `--`, with or without the word `train`."""
    if "--" not in argv:
        if "train" in argv:
            raise ConfigError("`--` is missing before `train`: lockstep scale --world-sizes 1,2 -- [flags of train]")
        return argv, []
    at = argv.index("--")
    behind = argv[at + 1 :]
    return argv[:at], behind[1:] if behind[:1] == ["train"] else behind


def _scale_parser() -> Parser:
    elsewhere = {name.partition(".")[2] or name: _ELSEWHERE for name in (*FOREIGN, *cli.option_list())}
    parser = Parser(
        prog="lockstep scale",
        usage="lockstep scale --world-sizes 1,2,4 [flags] -- [flags of train]",
        description="Measures how training speeds up with the number of processes on this machine: the same batch "
        "(strong), and one that grows with them (weak). Each size is a real run of a few steps in a temporary folder.",
        epilog="The flags of train: `lockstep train --help`, and `lockstep train --help-all`.",
        foreign={name: said for name, said in elsewhere.items() if name not in (*_OWN, "world_size")},
    )
    add = parser.add_argument
    add(
        "--world-sizes", default="1,2", metavar="N,N,...", help="numbers of processes, ascending (default: %(default)s)"
    )
    add("--strong", action="store_true", help="the same batch at every size (default: both)")
    add("--weak", action="store_true", help="the batch grows with the size, the micro-batch stays (default: both)")
    add("--rounds", type=int, default=3, metavar="N", help="runs of each size, in turns (default: %(default)s)")
    add("--steps", type=int, default=20, metavar="N", help="steps of a run that are counted (default: %(default)s)")
    add("--extrapolate", default="", metavar="N,N,...", help="sizes to carry the fit on to")
    add("--runs", nargs="+", default=[], metavar="DIR", help="start nothing: compare runs that were made before")
    add("--ranks-per-node", type=int, default=0, metavar="N", help="of --runs on several nodes (default: all on one)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


_OWN = ("world_sizes", "strong", "weak", "rounds", "steps", "extrapolate", "runs", "ranks_per_node", "json")
