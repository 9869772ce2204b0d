"""`lockstep generate RUN --prompt TEXT`: the flags; `training/inference.py` does the work.

lockstep generate outputs/first --prompt "import "              text of the newest checkpoint
lockstep generate outputs/first --best --temperature 0 --prompt "def " --prompt "class "
lockstep generate outputs/first < prompts.txt                   a prompt a line
"""

import argparse
import importlib
import math
import sys

from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError

__all__ = [
    "evaluate_command",
    "export_command",
    "generate_command",
]


def evaluate_command(argv: list[str]) -> int:
    """Runs `lockstep evaluate` with the arguments `argv` and returns its exit code.

    Raises:
        CheckpointError: no such run or checkpoint, or a task that does not fit it.
        ConfigError: a flag that does not exist or does not hold.
        DataError: there is no evaluation set.
    """
    try:
        given = _evaluate_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    wanted = importlib.import_module("lockstep.training.inference").InferenceRequest  # loads torch
    evaluate_run = importlib.import_module("lockstep.training.inference").evaluate_run
    asked = wanted(given.run, _which(given), given.task, given.data, given.device, ema=given.ema)
    evaluate_run(asked, as_json=given.json)
    return 0


def _which(given: argparse.Namespace) -> str | int:
    """The checkpoint that the flags of `add_which` name."""
    if given.best:
        return "best"
    return "last" if given.step is None else int(given.step)


def _add_which(parser: Parser) -> None:
    """Gives `parser` RUN, and the flags that say which of its checkpoints, and where it is computed."""
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    group.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    parser.add_argument("--ema", action="store_true", help="with the averaged weights of --optim.ema")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="", help="where it is computed (default: as the run)"
    )


def _evaluate_parser() -> Parser:
    parser = Parser(prog="lockstep evaluate", description="Evaluates a checkpoint of a run, as the run itself does.")
    _add_which(parser)
    add = parser.add_argument
    add("--task", metavar="FILE.py:CLASS", default="", help="the run's task, where it was started from Python")
    add("--data", metavar="DATASET", default="", help="evaluate on the evaluation set that --dataset-name would have")
    add("--json", action="store_true", help="print one JSON object, with every digit")
    return parser


def export_command(argv: list[str]) -> int:
    """Runs `lockstep export` with the arguments `argv` and returns its exit code.

    Raises:
        CheckpointError: no such run, no whole checkpoint, or weights that the format cannot take.
        ConfigError: a flag that does not exist, or something at OUT.
    """
    try:
        given = _export_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    exporting = importlib.import_module("lockstep.training.inference")  # loads torch
    asked = exporting.ExportRequest(
        given.run, given.out, given.format, _which(given), given.merge, given.task, given.ema
    )
    path = exporting.export_run(asked, lambda line: print(line, file=sys.stderr))
    print(f"{printable(path.name)} as {given.format}: {printable(given.out)}")
    return 0


def _export_parser() -> Parser:
    parser = Parser(prog="lockstep export", description="Writes the weights of a checkpoint in a common format.")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder, or the folder of one checkpoint")
    add("out", metavar="OUT", help="the file (safetensors, torch) or folder (hf, peft) to make")
    formats = ["safetensors", "torch", "hf", "peft"]
    add("--format", choices=formats, default=formats[0], help="default: %(default)s")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest whole one)")
    group.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    add("--ema", action="store_true", help="the averaged weights of --optim.ema")
    add("--merge", action="store_true", help="add adapters to their base, for every format but peft")
    add(
        "--task",
        metavar="FILE.py:CLASS",
        default="",
        help="with --merge: the run's task, if it was started from Python",
    )
    return parser


def generate_command(argv: list[str]) -> int:
    """Runs `lockstep generate` with the arguments `argv` and returns its exit code.

    Raises:
        CheckpointError: no such run or checkpoint.
        ConfigError: a flag that does not exist or does not hold, no prompt, or a run of no language model.
    """
    try:
        given = _generate_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    _check(given)
    prompts = given.prompt or _lines()
    wanted = importlib.import_module("lockstep.training.inference").InferenceRequest  # loads torch
    sampling = importlib.import_module("lockstep.tasks.language_model").Sampling
    generate_texts = importlib.import_module("lockstep.training.inference").generate_texts
    # compiled code is made anew for each length of a text
    asked = wanted(given.run, _which(given), device=given.device, changes={"compile": False}, ema=given.ema)
    generate_texts(asked, prompts, sampling(given.max_tokens, given.temperature, given.top_k, given.seed))
    return 0


def _check(given: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--max-tokens", given.max_tokens, 1),
        ("--temperature", given.temperature, 0),
        ("--top-k", given.top_k, 0),
        ("--seed", given.seed, 0),
    ):
        if not (math.isfinite(value) and least <= value < 2**63):
            raise ConfigError(f"{flag} is {value}: it must be at least {least}")


def _lines() -> list[str]:
    """The prompts on stdin: its lines that are not empty."""
    if sys.stdin.isatty():
        print("prompts, one a line; Ctrl-D ends them", file=sys.stderr)
    prompts = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT, or lines on stdin")
    return prompts


def _generate_parser() -> Parser:
    parser = Parser(prog="lockstep generate", description="Writes text with a language model that a run trained.")
    _add_which(parser)
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="how a text begins; several times for several (default: stdin)",
    )
    add("--max-tokens", type=int, default=100, metavar="N", help="most new tokens of a text (default: %(default)s)")
    text = "what logits are divided by; 0 takes the likeliest token (default: %(default)s)"
    add("--temperature", type=float, default=0.8, metavar="T", help=text)
    text = "draw among the K likeliest tokens; 0: among all (default: %(default)s)"
    add("--top-k", type=int, default=50, metavar="K", help=text)
    add("--seed", type=int, default=0, metavar="S", help="of the draw; the same seed, the same text (default: 0)")
    return parser
