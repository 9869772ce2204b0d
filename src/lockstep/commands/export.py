"""`lockstep export RUN OUT --format safetensors|torch|hf|peft|deepspeed`: the flags; `run/exporting.py` does the work.

lockstep export outputs/first model.safetensors                     one file, for safetensors.torch.load_model
lockstep export outputs/first model.pt --format torch               one file, for torch.load(weights_only=True)
lockstep export outputs/first gpt --format hf --best                a folder, for transformers, with its tokenizer
lockstep export outputs/tuned adapters --format peft                a folder, for peft.PeftModel.from_pretrained
lockstep export outputs/tuned whole --format hf --merge             adapters added to their base
lockstep export outputs/first ds --format deepspeed --step 500      a folder, DeepSpeed's universal checkpoint
"""

import importlib
import sys

from lockstep.commands.evaluate import which
from lockstep.config.flags import Parser
from lockstep.config.secrets import printable

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep export` with the arguments `argv` and returns its exit code.

    Raises:
        CheckpointError: no such run, no whole checkpoint, or weights that the format cannot take.
        ConfigError: a flag that does not exist, or something at OUT.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    exporting = importlib.import_module("lockstep.run.exporting")  # loads torch
    asked = exporting.Asked(given.run, given.out, given.format, which(given), given.merge, given.task, given.ema)
    path = exporting.export_run(asked, lambda line: print(line, file=sys.stderr))
    print(f"{printable(path.name)} as {given.format}: {printable(given.out)}")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lockstep export", description="Writes the weights of a checkpoint in a common format.")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder, or the folder of one checkpoint")
    add("out", metavar="OUT", help="the file (safetensors, torch) or folder (hf, peft, deepspeed) to make")
    formats = ["safetensors", "torch", "hf", "peft", "deepspeed"]
    add("--format", choices=formats, default=formats[0], help="default: %(default)s")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest whole one)")
    group.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    add("--ema", action="store_true", help="the averaged weights of --optim.ema (not for deepspeed)")
    add("--merge", action="store_true", help="add adapters to their base, for every format but peft")
    add(
        "--task",
        metavar="FILE.py:CLASS",
        default="",
        help="with --merge: the run's task, if it was started from Python",
    )
    return parser
