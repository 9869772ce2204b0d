"""`lockstep compare ONE TWO [--json]`: where two traced trainings part, and why. Exit code 0, or 3.

lockstep trace -o one -- python train.py --batch-size 8
lockstep trace -o two -- torchrun --nproc-per-node 2 train.py --batch-size 4
lockstep compare one two

Exit code 3 stands for a difference, and for two runs of which too little is there to prove them the same. Pure
arithmetic over the two folders: no torch, on any machine.
"""

import json
from pathlib import Path

from lockstep.config.flags import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError, DifferenceError
from lockstep.trace.judge import judged
from lockstep.trace.reading import TraceError, read

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep compare` with the arguments `argv`, prints the verdict and returns 0.

    Raises:
        ConfigError: a flag that does not exist, or a folder that is no trace; exit code 2.
        DifferenceError: the two are not the same training, or not proved to be; exit code 3.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    try:
        verdict = judged(*(read(Path(name).expanduser()) for name in (given.one, given.two)))
    except TraceError as error:
        raise ConfigError(printable(str(error))) from None
    if given.json:
        print(json.dumps(verdict.plain(), indent=2))
    else:
        print("\n".join(printable(line) for line in str(verdict).splitlines()))
    if verdict.finding is not None:
        raise DifferenceError(f"not the same training: {verdict.finding.stage} at step {verdict.finding.step}")
    if verdict.missing:
        raise DifferenceError(printable(f"not proved to be the same training: {verdict.missing[0]}"))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep compare",
        description="Says where two trainings that `lockstep trace` recorded first differ: step, stage, tensor, rank "
        "and cause. The first is what the second is held against, such as one process against two.",
    )
    parser.add_argument("one", metavar="ONE", help="the folder of a trace")
    parser.add_argument("two", metavar="TWO", help="the folder of another")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
