"""Parse the flags of `lockstep verify`; `verify/verification.py` does the work.

lockstep verify                                              the default model, float64, every engine that runs anywhere
lockstep verify --exact --engines ddp,fsdp --world-sizes 2,4
lockstep verify --parallel.tensor 2 --world-sizes 2,4        layers divided over two ranks
lockstep verify --task mine.py:Task --batch-size 32          your own task
lockstep verify --plant per-rank-seed                        check that a fault is detected
lockstep verify -o certificate.json                          keep the proof
lockstep verify --against certificate.json                   the same on another machine
"""

import argparse
import importlib

from lockstep.config.cli import Parser, add_flags
from lockstep.config.hints import FOREIGN
from lockstep.config.parallel_options import DEGREES
from lockstep.errors import ConfigError
from lockstep.verify import FAULTS

__all__ = ["command"]

_OWN = (
    *("engines", "world_sizes", "steps", "resume_at", "plant", "plant_at"),
    *("skip_unavailable", "out", "against", "scratch"),
)


def command(argv: list[str]) -> int:
    """Run `lockstep verify`, print the table and return 0.

    Raises:
        DifferenceError: a combination differs; exit code 3.
        UsageError: an invalid request; exit code 2.
    """
    try:
        args = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    args.engines = _names(args.engines)
    args.world_sizes = _sizes("--world-sizes", args.world_sizes)
    for name in DEGREES:
        field = f"parallel.{name}"
        degrees = _sizes(f"--{field}", getattr(args, field, ""))
        setattr(args, name, degrees)
        if degrees:
            # The options that do not go with divided models are refused for the largest.
            setattr(args, field, max(degrees))
    # Imported late: it loads torch.
    code: int = importlib.import_module("lockstep.verify.verification").run(args)
    return code


def _names(text: str) -> list[str]:
    names = []
    for name in text.split(","):
        if name.strip():
            names.append(name.strip())
    return names


def _sizes(flag: str, text: str) -> list[int]:
    try:
        return [int(word) for word in _names(text)]
    except ValueError:
        raise ConfigError(f"{flag} '{text}' must be numbers such as 1,2,4") from None


class _NotingAction(argparse.Action):
    """Store the value, and add the flag to the list `named`."""

    def __call__(self, parser: object, namespace: argparse.Namespace, value: object, flag: str | None = None) -> None:
        setattr(namespace, self.dest, value)
        namespace.named = [*namespace.named, self.dest]


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep verify",
        usage="lockstep verify [flags] [flags of train]",
        description="Prove that every engine and world size trains the same as one process, tensor by tensor; in "
        "float64 without --exact and --precision. Takes the flags of `lockstep train`.",
        # verify has --world-sizes itself, so the hint for --world-size does not apply.
        foreign={name: message for name, message in FOREIGN.items() if name != "world_size"},
    )
    parser.set_defaults(named=[])
    add = parser.add_argument
    text = "engines to compare (default: all that need no extra package and no GPU)"
    add("--engines", action=_NotingAction, default="", help=text)
    add("--world-sizes", action=_NotingAction, default="1,2", help="numbers of processes (default: %(default)s)")
    add("--steps", action=_NotingAction, type=int, default=8, help="steps of each run (default: %(default)s)")
    text = "save, exit and resume after this step (default: half-way; 0: never)"
    add("--resume-at", action=_NotingAction, type=int, help=text)
    add(
        "--plant", default="", metavar="NAME", help=f"inject a fault and check that it is detected: {', '.join(FAULTS)}"
    )
    text = "step of the injected fault (default: 3, or 2 if the run resumes before it)"
    add("--plant-at", type=int, help=text)
    add("--skip-unavailable", action="store_true", help="skip what cannot run here, and report it")
    add("-o", "--out", default="", metavar="FILE", help="write a certificate, for --against on any machine")
    add("--against", default="", metavar="FILE", help="repeat the proof of a certificate and compare the results")
    add(
        "--scratch", default="", help="folder for tensors, about 4 copies of the model per step (default: the system's)"
    )
    parser.common = (*_OWN, *map("parallel.{}".format, DEGREES), "task", "batch_size", "exact")
    parser.examples = (
        "lockstep verify --task digits.py:Digits --batch-size 32",
        "lockstep verify --exact --engines ddp,fsdp --world-sizes 2,4",
    )
    add_flags(parser, kind="")
    for name in DEGREES:
        noun = {"tensor": "layers", "context": "sequences", "pipeline": "stages"}[name]
        text = f"compare {noun} divided over so many ranks too, such as 1,2 (default: 1)"
        parser.change(f"parallel.{name}", type=str, metavar="N,N,...", help=text)
    return parser
