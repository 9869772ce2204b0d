"""`lockstep export RUN OUT --format safetensors|torch|hf|deepspeed`: the flags; `checkpoint/export.py` does the work.

lockstep export outputs/first model.safetensors                     one file, for safetensors.torch.load_model
lockstep export outputs/first model.pt --format torch               one file, for torch.load(weights_only=True)
lockstep export outputs/first gpt --format hf                       a folder, for transformers
lockstep export outputs/first ds --format deepspeed --step 500      a folder, DeepSpeed's universal checkpoint
"""

import importlib
from pathlib import Path

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
    exporting = importlib.import_module("lockstep.checkpoint.export.export")  # loads torch
    path = exporting.chosen(Path(given.run), given.step)
    out = exporting.export(path, Path(given.out), given.format)
    print(f"{printable(path.name)} as {given.format}: {printable(str(out))}")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lockstep export", description="Writes the weights of a checkpoint in a common format.")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder, or the folder of one checkpoint")
    add("out", metavar="OUT", help="the file (safetensors, torch) or folder (hf, deepspeed) to make")
    formats = ["safetensors", "torch", "hf", "deepspeed"]
    add("--format", choices=formats, default=formats[0], help="default: %(default)s")
    add("--step", type=int, help="the checkpoint of this step (default: the newest whole one)")
    return parser
