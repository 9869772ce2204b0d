"""Parse the flags of `lockstep evaluate`, `export` and `generate`; `training/inference.py` does the work.

lockstep generate outputs/first --prompt "import "              from the newest checkpoint
lockstep generate outputs/first --best --temperature 0 --prompt "def " --prompt "class "
lockstep generate outputs/first < prompts.txt                   one prompt per line
"""

import argparse
import importlib
import math
import sys
from pathlib import Path

from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError

__all__ = [
    "evaluate_command",
    "export_command",
    "generate_command",
]


def evaluate_command(argv: list[str]) -> int:
    """Run `lockstep evaluate` and return its exit code.

    Raises:
        CheckpointError: no such run or checkpoint, or a task that does not fit it.
        ConfigError: an unknown flag or an invalid value.
        DataError: there is no evaluation set.
    """
    try:
        args = _evaluate_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    # Imported late: it loads torch.
    request_type = importlib.import_module("lockstep.training.inference").InferenceRequest
    evaluate_run = importlib.import_module("lockstep.training.inference").evaluate_run
    request = request_type(args.run, _which(args), args.task, args.data, args.device, ema=args.ema)
    evaluate_run(request, as_json=args.json)
    return 0


def _which(args: argparse.Namespace) -> str | int:
    """Return the checkpoint that --step or --best selects."""
    if args.best:
        return "best"
    if args.step is None:
        return "last"
    return int(args.step)


def _add_which(parser: Parser) -> None:
    """Add RUN and the flags that select a checkpoint and a device."""
    parser.add_argument("run", metavar="RUN", help="a run's folder or URL")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    group.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of --optim.ema")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="", help="device to run on (default: the run's)"
    )


def _evaluate_parser() -> Parser:
    parser = Parser(prog="lockstep evaluate", description="Evaluate a checkpoint of a run, as the run itself does.")
    _add_which(parser)
    add = parser.add_argument
    add("--task", metavar="FILE.py:CLASS", default="", help="the run's task, if it was started from Python")
    add(
        "--data",
        metavar="DATASET",
        default="",
        help="evaluate on the evaluation set of this dataset, named as for --dataset-name",
    )
    add("--json", action="store_true", help="print one JSON object, with every digit")
    return parser


def export_command(argv: list[str]) -> int:
    """Run `lockstep export` and return its exit code.

    Raises:
        CheckpointError: no such run, no complete checkpoint, or weights that the format cannot store.
        ConfigError: an unknown flag, or OUT exists.
    """
    try:
        args = _export_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    form = args.format or ("torch" if Path(args.out).suffix in _TORCH_ENDINGS else "safetensors")
    # Imported late: it loads torch.
    exporting = importlib.import_module("lockstep.training.inference")
    request = exporting.ExportRequest(args.run, args.out, form, _which(args), args.merge, args.task, args.ema)
    path = exporting.export_run(request, lambda line: print(line, file=sys.stderr))
    print(f"{printable(path.name)} as {form}: {printable(args.out)}")
    return 0


# Endings of files that their readers open with torch.load.
_TORCH_ENDINGS = (".pt", ".pth", ".bin")


def _export_parser() -> Parser:
    parser = Parser(prog="lockstep export", description="Write the weights of a checkpoint in a common format.")
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder or URL of a run, or of one checkpoint")
    add("out", metavar="OUT", help="file (safetensors, torch) or folder (dcp, hf, peft) to write")
    formats = ["safetensors", "torch", "dcp", "hf", "peft"]
    by_ending = f"default: torch for an OUT that ends in {', '.join(_TORCH_ENDINGS)}, else safetensors"
    add("--format", choices=formats, default="", help=by_ending)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest complete one)")
    group.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    add("--ema", action="store_true", help="export the averaged weights of --optim.ema")
    add("--merge", action="store_true", help="merge adapters into the base weights, for every format but peft")
    add(
        "--task",
        metavar="FILE.py:CLASS",
        default="",
        help="with --merge: the run's task, if it was started from Python",
    )
    return parser


def generate_command(argv: list[str]) -> int:
    """Run `lockstep generate` and return its exit code.

    Raises:
        CheckpointError: no such run or checkpoint.
        ConfigError: an unknown flag, an invalid value, no prompt, or a run that is not a language model.
    """
    try:
        args = _generate_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    _check(args)
    prompts = args.prompt or _lines()
    # Imported late: it loads torch.
    request_type = importlib.import_module("lockstep.training.inference").InferenceRequest
    sampling = importlib.import_module("lockstep.tasks.language_model").Sampling
    generate_texts = importlib.import_module("lockstep.training.inference").generate_texts
    # Without torch.compile, which would recompile for each length of text.
    request = request_type(args.run, _which(args), device=args.device, changes={"compile": False}, ema=args.ema)
    generate_texts(request, prompts, sampling(args.max_tokens, args.temperature, args.top_k, args.seed))
    return 0


def _check(args: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--max-tokens", args.max_tokens, 1),
        ("--temperature", args.temperature, 0),
        ("--top-k", args.top_k, 0),
        ("--seed", args.seed, 0),
    ):
        if not (math.isfinite(value) and least <= value < 2**63):
            raise ConfigError(f"{flag} is {value}: it must be at least {least}")


def _lines() -> list[str]:
    """Read the prompts from stdin, one per non-empty line."""
    if sys.stdin.isatty():
        print("enter prompts, one per line; Ctrl-D ends the input", file=sys.stderr)
    prompts = []
    for line in sys.stdin:
        if line.strip():
            prompts.append(line.rstrip("\r\n"))
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT, or lines on stdin")
    return prompts


def _generate_parser() -> Parser:
    parser = Parser(prog="lockstep generate", description="Generate text with the language model of a run.")
    _add_which(parser)
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="start of a text; repeat it for several texts (default: lines of stdin)",
    )
    add(
        "--max-tokens",
        type=int,
        default=100,
        metavar="N",
        help="maximum number of new tokens per text (default: %(default)s)",
    )
    text = "sampling temperature; 0 takes the likeliest token (default: %(default)s)"
    add("--temperature", type=float, default=0.8, metavar="T", help=text)
    text = "sample from the K likeliest tokens; 0: from all (default: %(default)s)"
    add("--top-k", type=int, default=50, metavar="K", help=text)
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the sampling; the same seed gives the same text (default: 0)",
    )
    return parser
