"""Parse the flags of `lockstep doctor`, `plan`, `profile` and `scale`; `diagnose/` does the work.

lockstep scale --world-sizes 1,2,4 -- --task mine.py:Task --batch-size 64
lockstep scale --world-sizes 1,2 --strong --rounds 5 -- --task mine.py:Task
lockstep scale --world-sizes 1,2,4 --json -- --exact
lockstep scale --runs outputs/n8 outputs/n16          several nodes
"""

import argparse
import importlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from lockstep.commands import train
from lockstep.commands.lint_hint import lint_hint
from lockstep.commands.reports import open_folder
from lockstep.commands.script import script_command
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
    """Run `lockstep doctor` and return 0.

    Raises:
        DifferenceError: a check failed; exit code 3.
        ConfigError: an unknown flag or an invalid value.
    """
    try:
        args = _doctor_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    # Imported late: it loads torch.
    code: int = importlib.import_module("lockstep.diagnose.doctor.command").run(args)
    # A flag of train that was not given is absent. One rank prints the hint.
    hint = lint_hint([getattr(args, "task", None) or ""])
    if hint and not args.json and os.environ.get("RANK", "0") == "0":
        print(f"lockstep doctor: {hint}", file=sys.stderr)
    return code


def _doctor_parser() -> Parser:
    parser = Parser(
        prog="lockstep doctor",
        usage="lockstep doctor [flags] [flags of train]",
        description="Check the environment, host names, versions, machine, network and devices, and with --task the "
        "task, on every rank, in less than a minute. With the flags of `lockstep train` it checks that run; it "
        "trains and writes nothing.",
        foreign=FOREIGN,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    text = "seconds to wait for all ranks to connect (default: %(default)s)"
    add("--wait", type=float, default=20.0, metavar="SECONDS", help=text)
    parser.common = ("json", "wait", "task", "save_dir", "batch_size", "engine", "device")
    parser.examples = (
        "lockstep doctor --task digits.py:Digits",
        "lockstep launch --nproc-per-node 4 -- doctor --task digits.py:Digits",
    )
    add_flags(parser, kind="")
    return parser


def plan_command(argv: list[str]) -> int:
    """Run `lockstep plan` and return 0, or 3 if the run does not fit.

    Raises:
        UsageError: the run cannot be planned; exit code 2.
    """
    try:
        args = _plan_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    # Set before torch is loaded: DDP would warn about the tracing.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported late: it loads torch.
    code: int = importlib.import_module("lockstep.diagnose.plan.command").run(args)
    return code


def _plan_parser() -> Parser:
    parser = Parser(
        prog="lockstep plan",
        usage="lockstep plan [flags] [flags of train]",
        description="Estimate the memory per device and the time of a run, without the devices. Takes the flags of "
        "`lockstep train`.",
        foreign={name: message for name, message in FOREIGN.items() if name != "world_size"},
    )
    add = parser.add_argument
    add(
        "--world-sizes",
        default="1",
        metavar="N[,N]",
        help="number of devices, one process each; of several each is planned (default: %(default)s)",
    )
    add("--memory", default="", metavar="80GB", help="memory per device; overrides that of --device")
    add("--fast", action="store_true", help="estimate only this configuration; do not search for others that fit")
    add("--json", action="store_true", help="print one JSON object, or with several sizes a list; numbers as numbers")
    parser.common = (
        *("world_sizes", "device", "memory", "json", "task", "model_name"),
        *("batch_size", "micro_batch_size", "engine", "precision", "activation_checkpointing", "exact"),
    )
    parser.examples = (
        "lockstep plan --model-name builtin:gpt2-xl --world-sizes 8 --device a100-80",
        "lockstep plan --task mine.py:Mine --device l4-24 --batch-size 64",
    )
    add_flags(parser, kind="")
    return parser


def profile_command(argv: list[str]) -> int:
    """Run `lockstep profile`, print the verdict and return the exit code.

    Raises:
        UsageError: an invalid request, or damaged traces; exit code 2.
        LockstepError: the run failed.
    """
    if "--" in argv:
        return script_command("profile", argv)
    try:
        args = vars(_profile_parser().read(argv))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    if args["read"]:
        read = importlib.import_module("lockstep.diagnose.profile.reading").read_all(Path(args["read"]))
        print(importlib.import_module("lockstep.diagnose.profile.verdict").judge(read))
        return 0
    for name, least in (("steps", 1), ("warmup", 0)):
        if not least <= args[name] <= 900:
            raise ConfigError(f"--{name} is {args[name]}: it must be from {least} to 900")
    config, task = train.config_and_task(cli.collect_options(args))
    train.import_training()
    profiled = importlib.import_module("lockstep.training.run")
    code: int = profiled.profile(config, args["steps"], args["warmup"], task)
    return code


def _profile_parser() -> Parser:
    parser = Parser(
        prog="lockstep profile",
        usage="lockstep profile [flags] [flags of train]\n       lockstep profile [--out DIR] [--steps N] [--warmup N] "
        "-- COMMAND [arguments]",
        description="Train a few steps in a separate folder, trace them on every rank, and report where the time goes "
        "and what to change first. Takes the flags of `lockstep train`; or, after `--`, the command of any "
        "torch script, which runs to its end with its traces in the new folder --out.",
        foreign=FOREIGN,
    )
    add = parser.add_argument
    add("--steps", type=int, default=10, help="steps to trace (default: %(default)s)")
    add("--warmup", type=int, default=5, help="warm-up steps before the traced ones (default: %(default)s)")
    add(
        "--read",
        default="",
        metavar="DIR",
        help="do not train; analyse the traces in this folder, RUN/profile/FIRST-LAST",
    )
    parser.common = ("steps", "warmup", "read", "task", "batch_size", "engine")
    parser.examples = (
        "lockstep profile --task digits.py:Digits --batch-size 32",
        "lockstep launch --nproc-per-node 2 -- profile --task digits.py:Digits",
        "lockstep profile --read outputs/digits/profile/100-110",
        "lockstep profile -- torchrun --nproc-per-node 2 train.py",
    )
    add_flags(parser, kind="")
    return parser


_ELSEWHERE = "not a flag of scale; flags of train go after `--`"


def scale_command(argv: list[str]) -> int:
    """Run `lockstep scale`, print the tables and return 0.

    Raises:
        ConfigError: an invalid flag of scale or of train; exit code 2, and nothing was started.
        LockstepError: a run failed; the measurements so far are printed first.
    """
    scale_flags, flags = _split_flags(argv)
    try:
        args = _scale_parser().read(scale_flags)
        if args.runs:
            return _of_runs(args, flags)
        sizes = ascending("--world-sizes", args.world_sizes)
        config = cli.parse(flags)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    # Without a choice both kinds of scaling are measured.
    modes = tuple(mode for mode, enabled in ((STRONG, args.strong), (WEAK, args.weak)) if enabled)
    request = ScaleRequest(
        tuple(flags),
        config,
        sizes,
        modes=modes or (STRONG, WEAK),
        rounds=args.rounds,
        steps=args.steps,
    )
    if config.micro_batch_size:
        request.check(config.micro_batch_size)
    code: int = importlib.import_module("lockstep.diagnose.scale.command").run(request, as_json=args.json)
    return code


def _of_runs(args: argparse.Namespace, flags: list[str]) -> int:
    """Print the tables of existing runs."""
    if flags:
        raise ConfigError("--runs compares existing runs and takes no flags of train; remove those after `--`")
    module = importlib.import_module("lockstep.diagnose.scale.command")
    with ExitStack() as stack:
        paths = [stack.enter_context(open_folder(name)) for name in args.runs]
        code: int = module.compare(paths, as_json=args.json)
    return code


def _split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the flags of scale from those of train, which follow `--` or `-- train`."""
    if "--" not in argv:
        if "train" in argv:
            raise ConfigError("`--` is missing before `train`: lockstep scale --world-sizes 1,2 -- [flags of train]")
        return argv, []
    at = argv.index("--")
    train_flags = argv[at + 1 :]
    return argv[:at], train_flags[1:] if train_flags[:1] == ["train"] else train_flags


def _scale_parser() -> Parser:
    elsewhere = {}
    for name in (*FOREIGN, *cli.option_list()):
        elsewhere[name.partition(".")[2] or name] = _ELSEWHERE
    parser = Parser(
        prog="lockstep scale",
        usage="lockstep scale --world-sizes 1,2,4 [flags] -- [flags of train]",
        description="Measure how training scales with the number of processes on this machine, at a fixed batch size "
        "(strong) and at a batch size that grows with it (weak). Each size runs a few steps in a temporary folder.",
        epilog="For the flags of train, see `lockstep train --help` and `lockstep train --help-all`.",
        foreign={name: message for name, message in elsewhere.items() if name not in (*_OWN, "world_size")},
    )
    add = parser.add_argument
    add(
        "--world-sizes", default="1,2", metavar="N,N,...", help="numbers of processes, ascending (default: %(default)s)"
    )
    add("--strong", action="store_true", help="strong scaling: the same batch at every size (default: both)")
    add(
        "--weak",
        action="store_true",
        help="weak scaling: the batch grows with the size, the micro-batch does not (default: both)",
    )
    add("--rounds", type=int, default=3, metavar="N", help="runs of each size, interleaved (default: %(default)s)")
    add("--steps", type=int, default=20, metavar="N", help="measured steps of each run (default: %(default)s)")
    add("--runs", nargs="+", default=[], metavar="DIR", help="start nothing; compare existing runs")
    add("--json", action="store_true", help="print one JSON object")
    return parser


# Flags of scale itself: a hint for flags of train must not name them.
_OWN = ("world_sizes", "strong", "weak", "rounds", "steps", "runs", "json")
