"""Weights & Biases: `lockstep train --wandb`. The only file that needs the package `wandb`.

The package's own variables hold: WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, and WANDB_MODE=offline to write into the
run's folder alone (`wandb sync` sends it later).
"""

import os
import re
from pathlib import Path
from typing import Any, final

from lockstep.config.secrets import mask

__all__ = ["WandB"]

_START, _END = 60.0, 120.0  # seconds to wait for the service when a run begins and ends


@final
class WandB:
    """One W&B run with the experiment's name as its name and id, so that a resumed run goes on in the same curves.

    A resumed run that W&B never saw starts anew there. Records of steps that run again after a resume are dropped by
    W&B, which takes each step once; they hold the same numbers.

    Args:
        folder: the run's; W&B makes its own, `wandb`, in it.
        experiment: the run's name.
        project: "" takes $WANDB_PROJECT, else "lockstep".
        resume_step: steps taken before; above 0 the run of this id is resumed where there is one.
    """

    def __init__(self, folder: Path, experiment: str, project: str = "", resume_step: int = 0) -> None:
        self._folder, self._experiment, self._resume_step = folder, experiment, resume_step
        self._project = project or os.environ.get("WANDB_PROJECT") or "lockstep"
        self._run: Any = None

    def start(self, info: dict[str, Any]) -> None:
        """Begins or resumes the run, with the program's code and `info` as its configuration.

        Raises:
            ImportError: the package is missing.
            Exception: whatever the package raises: no key, no answer.
        """
        import wandb

        # W&B's own description of the process holds its command line as it is, and the console may hold anything:
        # neither is taken. What a run was told is in `info`, masked.
        settings = wandb.Settings(
            x_disable_meta=True, console="off", silent=True, init_timeout=_START, finish_timeout=_END
        )
        self._run = wandb.init(
            project=self._project,
            dir=self._folder,
            name=self._experiment,
            id=re.sub(r"[^\w.-]", "-", self._experiment)[:128],
            resume="allow" if self._resume_step else None,
            save_code=True,
            config=info,
            settings=settings,
        )

    def log(self, record: dict[str, Any]) -> None:
        """Hands the record over; the package sends it from a process of its own."""
        masked = {name: mask(value) if isinstance(value, str) else value for name, value in record.items()}
        self._run.log(masked, step=int(record["global_step"]))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Ends the run, as failed where there is no summary. Waits two minutes at most for what is not yet sent."""
        if self._run is not None:
            self._run.finish(exit_code=1 if summary is None else 0)
