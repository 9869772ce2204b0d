"""The sinks of optional packages that the flags ask for: `--tensorboard`, `--wandb`, or both.

check(config)                                       # before anything is written
sinks = remote_sinks(config, folder, start=500)
"""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from lockstep.config.schema import Config
from lockstep.config.secrets import is_secret_name, mask
from lockstep.errors import ConfigError
from lockstep.logging import Sink

__all__ = [
    "TensorBoard",
    "WandB",
    "check",
    "masked",
    "remote_sinks",
]


@final
class TensorBoard:
    """Writes each number of a record as a scalar at its global_step.

    Args:
        folder: where the event files lie; made by `start`.
        resume_step: steps taken before. Readers then hide the events of later steps, which will run again.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        self._folder, self._resume_step = folder, resume_step
        self._writer: Any = None

    def start(self, info: dict[str, Any]) -> None:
        """Opens a new event file, beside those of earlier starts, and writes `info` as text.

        Raises:
            ImportError: the package is missing.
            OSError: the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter

        purge = self._resume_step + 1 if self._resume_step else 0  # where a run begins again, all that was before
        self._writer = SummaryWriter(self._folder, purge_step=purge)
        text = mask(json.dumps(info, indent=1, default=str))
        self._writer.add_text("run", f"```\n{text}\n```", self._resume_step)

    def log(self, record: dict[str, Any]) -> None:
        """Writes the record's numbers; the writer's own thread brings them to the disk."""
        step = int(record["global_step"])
        for name, value in record.items():
            if name != "global_step" and not isinstance(value, str | None):
                self._writer.add_scalar(name, value, step)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Flushes and closes the file."""
        if self._writer is not None:
            self._writer.close()


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


def check(config: Config) -> None:
    """Raises ConfigError, with the pip line, where a package that a flag needs is not installed."""
    for name, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if wanted and find_spec(name) is None:
            raise ConfigError(f"--{name} needs the package {name}: pip install 'torch-lockstep[{name}]'")


def remote_sinks(config: Config, folder: Path, start: int) -> list[Sink]:
    """The sinks that `config` asks for, not yet started, of the run in `folder` that has taken `start` steps."""
    chosen: list[Sink] = []
    if config.tensorboard:
        chosen.append(TensorBoard(folder / "tensorboard", start))
    if config.wandb:
        chosen.append(WandB(folder, config.experiment_name, config.wandb_project, start))
    return chosen


def masked(values: dict[str, Any]) -> dict[str, Any]:
    """Names and plain values, nested or not, in which no secret is left."""
    return {mask(name): _masked(name, value) for name, value in values.items()}


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return masked(value)
    if isinstance(value, str):
        return "***" if value and is_secret_name(name) else mask(value)
    return value
