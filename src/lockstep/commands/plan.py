"""`lockstep plan [train flags] --world-size 512 --device h100-80`: exit code 0, or 3 where nothing of it fits.

lockstep plan --task mine.py:Mine --world-size 8 --device a100-80        your own task
lockstep plan --model-name builtin:gpt2-xl --device l4-24                a model by name, without its data
lockstep plan --model-name llama/config.json --world-size 512 --engine fsdp
lockstep plan --memory 70GB --json                                       less memory; one JSON object

Here are the flags; `diagnose/plan/command.py` does the work.
"""

import importlib
import os

from lockstep.config.flags import Parser
from lockstep.config.hints import FOREIGN
from lockstep.config.options import add_flags

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep plan` with the arguments `argv` and returns 0, or 3 where what was asked for does not fit.

    Raises:
        UsageError: what was asked for cannot be planned; exit code 2.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of how it is traced
    code: int = importlib.import_module("lockstep.diagnose.plan.command").run(given)  # loads torch
    return code


def _parser() -> Parser:
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
