"""`lockstep generate RUN --prompt TEXT`: the flags; `run/generating.py` does the work.

lockstep generate outputs/first --prompt "import "              text of the newest checkpoint
lockstep generate outputs/first --best --temperature 0 --prompt "def " --prompt "class "
lockstep generate outputs/first < prompts.txt                   a prompt a line
"""

import argparse
import importlib
import math
import sys

from lockstep.commands.evaluate import add_which, which
from lockstep.config.flags import Parser
from lockstep.errors import ConfigError

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep generate` with the arguments `argv` and returns its exit code.

    Raises:
        CheckpointError: no such run or checkpoint.
        ConfigError: a flag that does not exist or does not hold, no prompt, or a run of no language model.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    _check(given)
    prompts = given.prompt or _lines()
    wanted = importlib.import_module("lockstep.run.using").Wanted  # loads torch
    sampling = importlib.import_module("lockstep.tasks.causal_lm").Sampling
    generate_texts = importlib.import_module("lockstep.run.generating").generate_texts
    # compiled code is made anew for each length of a text
    asked = wanted(given.run, which(given), device=given.device, changes={"compile": False}, ema=given.ema)
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


def _parser() -> Parser:
    parser = Parser(prog="lockstep generate", description="Writes text with a language model that a run trained.")
    add_which(parser)
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
