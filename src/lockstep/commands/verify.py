"""`lockstep verify [train flags] --engines single,ddp --world-sizes 1,2`: exit code 0, or 3 for a difference.

lockstep verify                                              the default model, float64, every engine that runs anywhere
lockstep verify --exact --engines ddp,fsdp --world-sizes 2,4
lockstep verify --task mine.py:Task --batch-size 32          your own task
lockstep verify --plant per-rank-seed                        see a mistake found
lockstep verify -o certificate.json                          keep the proof
lockstep verify --against certificate.json                   the same on another machine

Here are the flags; `verify/verification.py` does the work.
"""

import argparse
import importlib

from lockstep.config.cli import Parser, add_flags
from lockstep.config.hints import FOREIGN
from lockstep.errors import ConfigError
from lockstep.verify import FAULTS

__all__ = ["command"]

_OWN = (
    *("engines", "world_sizes", "steps", "resume_at", "plant", "plant_at"),
    *("skip_unavailable", "out", "against", "scratch"),
)


def command(argv: list[str]) -> int:
    """Runs `lockstep verify` with the arguments `argv`, prints the table and returns 0.

    Raises:
        DifferenceError: a combination differs; exit code 3.
        UsageError: what was asked for cannot be done; exit code 2.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    given.engines, given.world_sizes = _names(given.engines), _sizes(given.world_sizes)
    code: int = importlib.import_module("lockstep.verify.verification").run(given)  # loads torch
    return code


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in _names(text)]
    except ValueError:
        raise ConfigError(f"--world-sizes '{text}' must be numbers such as 1,2,4") from None


class _Noted(argparse.Action):
    """Also notes in `named` that the flag was given."""

    def __call__(self, parser: object, given: argparse.Namespace, value: object, flag: str | None = None) -> None:
        setattr(given, self.dest, value)
        given.named = [*given.named, self.dest]


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep verify",
        usage="lockstep verify [flags] [flags of train]",
        description="Proves that every engine and world size trains what one process does, tensor by tensor; without "
        "--exact and --precision in float64. The flags of `lockstep train` say what is trained.",
        foreign={name: said for name, said in FOREIGN.items() if name != "world_size"},  # --world-sizes is its own
    )
    parser.set_defaults(named=[])
    add = parser.add_argument
    text = "engines to compare (default: all that need no further package and no GPU)"
    add("--engines", action=_Noted, default="", help=text)
    add("--world-sizes", action=_Noted, default="1,2", help="numbers of processes (default: %(default)s)")
    add("--steps", action=_Noted, type=int, default=8, help="steps of the run to compare (default: %(default)s)")
    text = "save, end and resume before this step (default: half-way; 0: do not)"
    add("--resume-at", action=_Noted, type=int, help=text)
    add("--plant", default="", metavar="NAME", help=f"plant a fault and see it found: {', '.join(FAULTS)}")
    text = "the step of a fault that has a moment (default: 2, or 1 where the run resumes there)"
    add("--plant-at", type=int, help=text)
    add("--skip-unavailable", action="store_true", help="leave out what cannot run here, and say so")
    add("-o", "--out", default="", metavar="FILE", help="write a certificate, which --against takes on any machine")
    add("--against", default="", metavar="FILE", help="repeat the proof of a certificate, and compare with it")
    add("--scratch", default="", help="folder for tensors, about 4 copies of the model a step (default: the system's)")
    parser.first = (*_OWN, "task", "batch_size", "exact")
    parser.examples = (
        "lockstep verify --task digits.py:Digits --batch-size 32",
        "lockstep verify --exact --engines ddp,fsdp --world-sizes 2,4",
    )
    add_flags(parser, kind="")
    return parser
