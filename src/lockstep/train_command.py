"""`lockstep train`: what can be refused at once is refused before torch is loaded, which takes seconds."""

import importlib
import os

from lockstep import options
from lockstep.folder import RunFolder
from lockstep.launch.leash import tie

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Trains to the end and returns the exit code.

    Raises:
        UsageError: what was asked for cannot be done; nothing was written.
        LockstepError: the run failed.
    """
    tie()
    config = options.parse(argv)
    if os.environ.get("RANK", "0") == "0":  # the one that will claim it
        RunFolder(config.save_dir, config.experiment_name).check_free()
    training = importlib.import_module("lockstep.run").train(config)
    while True:
        try:
            next(training)
        except StopIteration as end:
            return int(end.value)
