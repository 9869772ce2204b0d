"""`lockstep evaluate RUN`: the flags; `run/evaluating.py` does the work.

lockstep evaluate outputs/first                                 the newest checkpoint, on the run's evaluation set
lockstep evaluate outputs/first --best --json                   that of the best evaluation, for scripts
lockstep evaluate outputs/first --ema                           the averaged weights of a run with --optim.ema
lockstep evaluate outputs/first --data other.txt                on the evaluation set of other data
lockstep evaluate outputs/digits --task digits.py:Digits        a run that was started from Python
lockstep launch --nproc-per-node 4 -- evaluate outputs/first    on several processes, the same numbers
"""

import argparse
import importlib

from lockstep.config.flags import Parser

__all__ = ["add_which", "command", "which"]


def command(argv: list[str]) -> int:
    """Runs `lockstep evaluate` with the arguments `argv` and returns its exit code.

    Raises:
        CheckpointError: no such run or checkpoint, or a task that does not fit it.
        ConfigError: a flag that does not exist or does not hold.
        DataError: there is no evaluation set.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    wanted = importlib.import_module("lockstep.run.using").Wanted  # loads torch
    evaluate_run = importlib.import_module("lockstep.run.evaluating").evaluate_run
    asked = wanted(given.run, which(given), given.task, given.data, given.device, ema=given.ema)
    evaluate_run(asked, as_json=given.json)
    return 0


def which(given: argparse.Namespace) -> str | int:
    """The checkpoint that the flags of `add_which` name."""
    if given.best:
        return "best"
    return "last" if given.step is None else int(given.step)


def add_which(parser: Parser) -> None:
    """Gives `parser` RUN, and the flags that say which of its checkpoints, and where it is computed."""
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    group.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    parser.add_argument("--ema", action="store_true", help="with the averaged weights of --optim.ema")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="", help="where it is computed (default: as the run)"
    )


def _parser() -> Parser:
    parser = Parser(prog="lockstep evaluate", description="Evaluates a checkpoint of a run, as the run itself does.")
    add_which(parser)
    add = parser.add_argument
    add("--task", metavar="FILE.py:CLASS", default="", help="the run's task, where it was started from Python")
    add("--data", metavar="DATASET", default="", help="evaluate on the evaluation set that --dataset-name would have")
    add("--json", action="store_true", help="print one JSON object, with every digit")
    return parser
