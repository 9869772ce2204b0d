"""A run that was trained, opened again to be used: its configuration, its task, and its model with the weights.

    with opened(Wanted("outputs/mine", which="best")') as used:
        used.model, used.task, used.step

Nothing is written. The model is what the run evaluated: in its precision, compiled where it was, whatever engine and
number of processes trained it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep import checkpoint
from lockstep.config import options
from lockstep.config.config import Config
from lockstep.config.secrets import printable
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import CheckpointError, ConfigError
from lockstep.run.adapters import left_out
from lockstep.run.build import notify
from lockstep.run.device_defaults import on_device
from lockstep.run.environment import sources_of
from lockstep.run.joined import joined
from lockstep.run.model import model_of
from lockstep.run.task_check import recall
from lockstep.run.weights import chosen, fill
from lockstep.task import Task, written
from lockstep.tasks.causal_lm import CausalLM
from lockstep.tasks.columns import check_classes
from lockstep.tasks.hf import HubCausalLM
from lockstep.tasks.named import load_task, named_task, on_data
from lockstep.tasks.options import LANGUAGE, OWN, kind_of
from lockstep.tasks.regression import on_columns_of
from lockstep.transforms.determinism import check_precision, pin

__all__ = ["Used", "Wanted", "config_of", "opened", "task_of"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be opened.

    Attributes:
        run: a run's folder.
        which: "last", "best", or a step.
        task: FILE.py:CLASS in place of what the run's configuration names; "" takes that.
        data: what --dataset-name would say, in place of the run's own; "" takes that.
        device: auto, cpu or cuda; "" is the run's.
        changes: fields of the configuration that are to be others.
        ema: with the averaged weights.
    """

    run: str
    which: str | int = "last"
    task: str = ""
    data: str = ""
    device: str = ""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    ema: bool = False


@dataclass(slots=True)
class Used:
    """A run that was opened. `config` is as it was trained, but for engine and kernels; `step`: of the checkpoint."""

    config: Config
    world: World
    task: Task
    model: nn.Module
    step: int


@contextlib.contextmanager
def opened(wanted: Wanted) -> Iterator[Used]:
    """The run, on every process that a launcher started; the world is left at the end.

    Raises:
        CheckpointError: no such run or checkpoint, or the task's model is another one than it holds.
        ConfigError: the task is not to be had.
        DataError: the data is not.
    """
    path = Path(wanted.run).expanduser()
    config = config_of(path, wanted)
    with joined(config) as world:
        yield _made(path, config, wanted, world)


def config_of(path: Path, wanted: Wanted) -> Config:
    """Read the configuration as the run wrote it, without what only training needs.

    Raises:
        CheckpointError: the folder is no run's.
    """
    file = path / "config.toml"
    if not file.is_file():
        raise CheckpointError(f"{printable(str(path))} is no run's folder; pass SAVE_DIR/EXPERIMENT_NAME")
    values = {name: value for name, value in options.read(file).items() if not name.startswith("engine_options.")}
    training = {"engine": "auto", "weight_copies": "forward", "grad_dtype": "float32", "fused_kernels": "none"}
    values |= training | dict(wanted.changes)
    if wanted.device:
        values["device"] = wanted.device
    config = options.build(values)
    return dataclasses.replace(config, micro_batch_size=config.micro_size)


def _made(path: Path, config: Config, wanted: Wanted, world: World) -> Used:
    """The task and the model, the weights in it. Collective."""
    config = on_device(config, {}, world, notify(world))
    pin(exact=config.exact, matmul=config.matmul_precision, device=world.device)
    check_precision(config.precision, world.device)
    found = on_all_ranks(world, lambda: chosen(path, wanted.which))
    state = on_all_ranks(world, lambda: checkpoint.read_state(found))
    task = on_all_ranks(world, lambda: task_of(path, config, wanted, state, notify(world)))
    recall(task, state)
    model = model_of(config, task, world, dict(state), notify(world))
    without = left_out(model, state)
    on_all_ranks(world, lambda: _filled(found, model, task, without, wanted.ema))
    return Used(config, world, task, model, int(state.get("global_step", 0)))


def task_of(path: Path, config: Config, wanted: Wanted, state: dict[str, Any], say: Callable[[str], None]) -> Task:
    """The run's task, made anew.

    Raises:
        ConfigError: it was trained from Python, and is not named.
        DataError: its data is not to be had.
    """
    trained = state.get("plan", {}).get("task", "")
    if wanted.task:
        task = load_task(wanted.task)
    elif config.task or trained in (CausalLM.__qualname__, HubCausalLM.__qualname__):
        kind = kind_of(config.task)
        if kind not in (LANGUAGE, OWN):
            asked = dataclasses.replace(config, dataset_name=wanted.data or config.dataset_name)
            if kind == "regression":
                return on_columns_of(sources_of(path), printable(str(path)), asked, say)
            task = named_task(asked, say)
            check_classes(state.get("plan", {}).get("data", ""), task, str(path))
            return task
        task = named_task(config, say)
    else:
        name = printable(trained) or "CLASS"
        raise ConfigError(f"{printable(str(path))} was trained from Python: name its task with --task FILE.py:{name}")
    return on_data(task, config, wanted.data, say) if wanted.data else task


def _filled(found: Path, model: nn.Module, task: Task, without: frozenset[str], ema: bool) -> None:
    own = task.state_dict()
    try:
        fill(found, model, own, without=without, ema=ema)
    except CheckpointError as error:
        raise CheckpointError(f"the task {type(written(task)).__name__} does not fit the checkpoint: {error}") from None
    if own:
        task.load_state_dict(own)
