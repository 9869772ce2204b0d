"""`lockstep profile`: a short run in a folder of its own, NAME-profile-TIME, of which traces, verdict and log stay.

code = profile(config, steps=10, warmup=5)
"""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from typing import Any

from lockstep.config.config import Config
from lockstep.diagnose.profile.verdict import FILE
from lockstep.errors import ConfigError, LockstepError
from lockstep.run.run import Run

__all__ = ["profile"]


def profile(config: Config, steps: int, warmup: int, task: Any = None) -> int:
    """Trains `warmup` steps, traces `steps` more, takes a last one and ends; the exit code. Collective, if joined.

    No run that exists is touched: the weights are a new run's, or those of --init-from.

    Raises:
        UsageError: what was asked for cannot be done; nothing was written.
        LockstepError: the run failed, or gave no verdict.
    """
    if config.profile:
        raise ConfigError("--profile is for train: here --steps and --warmup say what is traced")
    first, last = warmup + 1, warmup + steps
    name = f"{config.experiment_name[:160]}-profile-{time.strftime('%Y%m%d-%H%M%S')}"  # that of rank 0 is taken
    traced = f"{first}:{last}"
    config = dataclasses.replace(config, experiment_name=name, profile=traced, stop_at=last + 1, report=False)
    run = Run(config, task, _least_steps=last + 1)  # however small the training set is
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the run's summary is not asked for
        result = run()
    if run.is_main:
        folder = result.folder / "profile" / f"{first}-{last}"
        shutil.rmtree(result.folder / "checkpoints", ignore_errors=True)
        if not (folder / FILE).is_file():
            raise LockstepError(f"the steps were trained and gave no verdict; {result.folder}/logs says why")
        if not (sys.stdout.isatty() and sys.stderr.isatty()):  # a terminal has it from the run's own lines
            print(json.loads((folder / FILE).read_text(encoding="utf-8"))["sentence"])
    return result.exit_code
