"""Build the sinks that flags switch on: `--csv`, `--tensorboard`, `--wandb`, `--mlflow`, or several.

check(config)                                       # before anything is written
sinks = remote_sinks(config, folder, start=500, run_id="3f2a")
"""

import contextlib
import json
import netrc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from lockstep.config.schema import Config
from lockstep.config.secrets import environment_snapshot, is_secret_name, mask
from lockstep.errors import SETTINGS, ConfigError
from lockstep.extras import install_extra
from lockstep.logging import Sink
from lockstep.logging.csv_file import CsvFile
from lockstep.logging.mlflow_run import MLflow

__all__ = [
    "check",
    "mask_values",
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
        self._folder = folder
        self._resume_step = resume_step
        self._writer: Any = None

    def start(self, info: dict[str, Any]) -> None:
        """Open a new event file, and write `info` as text.

        Those of earlier starts are kept.

        Raises:
            ImportError: the package is missing.
            OSError: the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter

        # 0 hides all earlier events, for a run that starts over.
        purge = self._resume_step + 1 if self._resume_step else 0
        # LS028: only rank 0 opens the sinks.
        self._writer = SummaryWriter(self._folder, purge_step=purge)  # noqa: LS028
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


# Seconds to wait for the service at the start and the end of a run.
_START_TIMEOUT = 60.0
_FINISH_TIMEOUT = 120.0


@final
class WandB:
    """Sink for the program's active W&B run, or for one of lockstep's own.

    A run that the program has begun gets the records, and is left to the program. An own one has the experiment's name,
    and its id is the run's: a resume on any machine continues its curves. What the environment sets (WANDB_RUN_ID of a
    already. The numbers would be the same.
    already; their numbers are the same.

    Args:
        folder: the run's; W&B creates its own, `wandb`, in it.
        experiment: the run's name.
        run_id: see `RunState`.
        project: "": $WANDB_PROJECT, or "lockstep".
        resume_step: steps trained before; above 0 the run of this id is resumed if it exists.
    """

    def __init__(self, folder: Path, experiment: str, run_id: str, *, project: str = "", resume_step: int = 0) -> None:
        # W&B reads the environment once in a process, but a sweep's agent sets it for each run.
        self._options: dict[str, Any] = {
            "project": project or os.environ.get("WANDB_PROJECT") or "lockstep",
            "dir": os.environ.get("WANDB_DIR") or str(folder),
            "name": os.environ.get("WANDB_NAME") or experiment,
            "id": os.environ.get("WANDB_RUN_ID") or run_id,
            "resume": os.environ.get("WANDB_RESUME") or ("allow" if resume_step else None),
        }
        self._run: Any = None
        self._is_own = True
        # Steps of lockstep's own W&B run before this start.
        self._known_steps = 0
        # Names of the records so far, in the program's run.
        self._names = {"global_step"}

    def start(self, info: dict[str, Any]) -> None:
        """Start or resume the run, with the program's code and `info` as its configuration.

        The program's run has `info` under `lockstep` in its configuration.

        Raises:
            ImportError: the package is missing.
            Exception: any error of the package, such as a missing key or a timeout.
        """
        import wandb

        self._run = wandb.run
        self._is_own = wandb.run is None
        if self._run is not None:
            self._run.config.update({"lockstep": info}, allow_val_change=True)
            return
        # W&B's own metadata has the unmasked command line, and the console output may have secrets, so neither is sent.
        # The run's arguments are in `info`, masked.
        settings = wandb.Settings(
            x_disable_meta=True, console="off", silent=True, init_timeout=_START_TIMEOUT, finish_timeout=_FINISH_TIMEOUT
        )
        # LS028: only rank 0 opens the sinks.
        self._run = wandb.init(save_code=True, config=info, settings=settings, **self._options)  # noqa: LS028
        self._known_steps = self._run.starting_step

    def log(self, record: dict[str, Any]) -> None:
        """Queue the record; the package sends it from its own process."""
        masked = {}
        for name, value in record.items():
            masked[name] = mask(value) if isinstance(value, str) else value
        for name in () if self._is_own else sorted(masked.keys() - self._names):
            self._names.add(name)
            # W&B takes a name with an asterisk as a pattern.
            if "*" not in name:
                self._run.define_metric(name, step_metric="global_step")
        # W&B drops a record below its own step, and the program's own logging may have raised that step.
        step = int(record["global_step"])
        is_behind = step >= self._known_steps and self._run.step > step
        self._run.log(masked, **({} if is_behind else {"step": step}))

    def close(self, summary: dict[str, Any] | None) -> None:
        """End an own run: as failed unless it is complete. Waits two minutes at most."""
        if self._run is not None and self._is_own:
            self._run.finish(exit_code=0 if summary and summary["complete"] else 1)


def check(config: Config, *, is_main: bool = True) -> None:
    """Check that the sinks can start, without the network.

    Args:
        is_main: this rank opens the sinks.

    Raises:
        ConfigError: a package that a flag needs is missing, which names the extra; or the key of W&B is, or W&B rejects
            its settings; or a project is named for a sink that is off.
    """
    if "wandb_project" in SETTINGS.typed and not (config.wandb or "wandb" in SETTINGS.typed):
        raise ConfigError("--wandb-project has no effect without --wandb: add --wandb, or leave it out")
    for name, enabled in (("tensorboard", config.tensorboard), ("wandb", config.wandb), ("mlflow", config.mlflow)):
        if enabled and find_spec(name) is None:
            raise ConfigError(f"--{name} needs {name}: {install_extra(name)}")
    # Other nodes may have no key, and need none.
    if config.wandb and is_main and not _has_wandb_key():
        raise ConfigError(
            "--wandb needs an API key, and there is none: run `wandb login`, or set WANDB_API_KEY; to log without the "
            "service, set WANDB_MODE=offline"
        )


def _has_wandb_key() -> bool:
    """Whether W&B needs no key, or has one in the environment, its settings or a netrc file."""
    import wandb

    if wandb.run is not None:
        return True
    try:
        settings = wandb.setup().settings
    except Exception as error:
        # The package may raise anything; a value such as a key is masked.
        reason = mask(" ".join(str(error).split()))[:200]
        raise ConfigError(
            f"--wandb: the package wandb rejects its settings ({reason}): correct or unset the variable WANDB_... of "
            "that name, or the line in wandb/settings"
        ) from error
    names = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS")
    if any(map(os.environ.get, names)):
        return True
    # W&B reads the environment once in a process.
    modes = {os.environ.get("WANDB_MODE", ""), str(settings.mode)}
    if modes & {"offline", "disabled", "dryrun"} or settings.api_key:
        return True
    return _has_netrc_entry(urlsplit(str(settings.base_url)).netloc)


def _has_netrc_entry(host: str) -> bool:
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in paths:
        # W&B ignores a file that it cannot read.
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
    return False


def remote_sinks(config: Config, folder: Path, start: int, run_id: str, *, evaluated: bool = True) -> list[Sink]:
    """Build the sinks that `config` selects, not started yet.

    Args:
        folder: the run's.
        start: steps trained before.
        run_id: see `RunState`.
        evaluated: False if the evaluation of step `start` will run again.
    """
    sinks: list[Sink] = []
    if config.csv:
        sinks.append(CsvFile(folder / "metrics.csv", start, evaluated))
    if config.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", start))
    if config.wandb:
        name = config.experiment_name
        project = config.wandb_project
        sinks.append(WandB(folder, name, run_id, project=project, resume_step=start))
    if config.mlflow:
        sinks.append(MLflow(folder, config.experiment_name, run_id))
    return sinks


@environment_snapshot()
def mask_values(values: dict[str, Any]) -> dict[str, Any]:
    """Mask secrets in names and plain values, nested or not."""
    return {mask(name): _mask_value(name, value) for name, value in values.items()}


def _mask_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return mask_values(value)
    if isinstance(value, str):
        if value and is_secret_name(name):
            return "***"
        return mask(value)
    return value
