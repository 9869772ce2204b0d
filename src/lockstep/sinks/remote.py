"""The sinks of optional packages that the flags ask for: `--tensorboard`, `--wandb`, or both.

check(config)                                       # before anything is written
sinks = remote_sinks(config, folder, start=500)
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.config.config import Config
from lockstep.config.secrets import is_secret_name, mask
from lockstep.errors import ConfigError
from lockstep.sinks import Sink
from lockstep.sinks.tensorboard import TensorBoard
from lockstep.sinks.wandb import WandB

__all__ = ["check", "masked", "remote_sinks"]


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
