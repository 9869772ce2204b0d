"""Sinks that flags switch on: `--csv`, `--tensorboard`, `--wandb`, `--mlflow`, or several.

check(config)                                       # before anything is written
sinks = remote_sinks(config, folder, start=500)
"""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from lockstep.config.fields import is_url
from lockstep.config.schema import Config
from lockstep.config.secrets import is_secret_name, mask
from lockstep.errors import ConfigError
from lockstep.logging import Sink
from lockstep.logging.csv_file import CsvFile
from lockstep.logging.mlflow_run import MLflow

__all__ = [
    "check",
    "masked",
    "remote_sinks",
]


@final
class TensorBoard:
    """Sink that writes each number of a record as a scalar at its global_step.

    The times of a step are under lockstep/, so that a user's own names come first.

    Args:
        folder: of the event files; created by `start`.
        resume_step: steps trained before. Readers then hide the events of later steps, which will run again.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        self._folder, self._resume_step = folder, resume_step
        self._writer: Any = None

    def start(self, info: dict[str, Any]) -> None:
        """Open a new event file, and write `info` as text.

        Those of earlier starts are kept.

        Raises:
            ImportError: the package is missing.
            OSError: the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter

        purge = self._resume_step + 1 if self._resume_step else 0  # 0 purges all, for a run that starts over
        self._writer = SummaryWriter(self._folder, purge_step=purge)
        text = mask(json.dumps(info, indent=1, default=str))
        self._writer.add_text("run", f"```\n{text}\n```", self._resume_step)

    def log(self, record: dict[str, Any]) -> None:
        """Queue the record's numbers; the writer's own thread writes them."""
        step = int(record["global_step"])
        for name, value in record.items():
            if name != "global_step" and not isinstance(value, str | None):
                self._writer.add_scalar(f"lockstep/{name}" if name.startswith("time/") else name, value, step)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()


_START_TIMEOUT, _FINISH_TIMEOUT = 60.0, 120.0  # seconds to wait for the service at the start and the end of a run


@final
class WandB:
    """Sink for a W&B run with the experiment's name as its name and id.

    So a resumed run continues the same curves; if W&B does not know the run, it starts a new one. W&B accepts each step
    once, so it drops records of steps that run again after a resume; their numbers are the same.

    Args:
        folder: the run's; W&B creates its own, `wandb`, in it.
        experiment: the run's name.
        project: "": $WANDB_PROJECT, or "lockstep".
        resume_step: steps trained before; above 0 the run of this id is resumed if it exists.
    """

    def __init__(self, folder: Path, experiment: str, project: str = "", resume_step: int = 0) -> None:
        self._folder, self._experiment, self._resume_step = folder, experiment, resume_step
        self._project = project or os.environ.get("WANDB_PROJECT") or "lockstep"
        self._run: Any = None

    def start(self, info: dict[str, Any]) -> None:
        """Start or resume the run, with the program's code and `info` as its configuration.

        Raises:
            ImportError: the package is missing.
            Exception: any error of the package, such as a missing key or a timeout.
        """
        import wandb

        # W&B's own metadata has the unmasked command line, and the console output may have secrets: neither is sent.
        # The run's arguments are in `info`, masked.
        settings = wandb.Settings(
            x_disable_meta=True, console="off", silent=True, init_timeout=_START_TIMEOUT, finish_timeout=_FINISH_TIMEOUT
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
        """Queue the record; the package sends it from its own process."""
        masked = {name: mask(value) if isinstance(value, str) else value for name, value in record.items()}
        self._run.log(masked, step=int(record["global_step"]))

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the run, as failed without a summary. Waits two minutes at most."""
        if self._run is not None:
            self._run.finish(exit_code=1 if summary is None else 0)


def check(config: Config) -> None:
    """Raise ConfigError, which names the extra, if a package that a flag needs is missing."""
    for name, enabled in (("tensorboard", config.tensorboard), ("wandb", config.wandb), ("mlflow", config.mlflow)):
        if enabled and find_spec(name) is None:
            raise ConfigError(f"--{name} needs {name}: install the extra {name} of torch-lockstep")


def remote_sinks(config: Config, folder: Path, start: int, *, evaluated: bool = True) -> list[Sink]:
    """Build the sinks that `config` selects, not started yet.

    Args:
        folder: the run's.
        start: steps trained before.
        evaluated: False if the evaluation of step `start` will run again.
    """
    chosen: list[Sink] = []
    if config.csv:
        chosen.append(CsvFile(folder / "metrics.csv", start, evaluated))
    if config.tensorboard:
        chosen.append(TensorBoard(folder / "tensorboard", start))
    if config.wandb:
        chosen.append(WandB(folder, config.experiment_name, config.wandb_project, start))
    if config.mlflow:
        name, base = config.experiment_name, config.save_dir
        base = base if is_url(base) else str(Path(base).expanduser().resolve())
        chosen.append(MLflow(folder, name, where=f"{base.rstrip('/')}/{name}", resume_step=start))
    return chosen


def masked(values: dict[str, Any]) -> dict[str, Any]:
    """Mask secrets in names and plain values, nested or not."""
    return {mask(name): _masked(name, value) for name, value in values.items()}


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return masked(value)
    if isinstance(value, str):
        return "***" if value and is_secret_name(name) else mask(value)
    return value
