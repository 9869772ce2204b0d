"""Convert a LightningModule, an object or from a file, to a config and a task.

    task = load("lightning:FILE.py:Module,FILE.py:DM")
    config, task = configure(values)           # flags first, then the values that its loaders imply

`from_lightning` takes objects. `load` and `configure` serve `lockstep train --lightning FILE.py:Module
--datamodule FILE.py:DM`, and make both objects without arguments, the module under the run's seed. The module also
has the tasks for manual optimization and for datasets of whole batches.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.adapters.lightning.arguments import check_arguments, config_of, describe
from lockstep.adapters.lightning.callbacks import callbacks_of
from lockstep.adapters.lightning.data import LoaderParts, prepare_loaders
from lockstep.adapters.lightning.logging import rows_of
from lockstep.adapters.lightning.manual import ManualSteps
from lockstep.adapters.lightning.optimizers import Configured
from lockstep.adapters.lightning.package import calls, is_user_defined, kind_of, takes
from lockstep.adapters.lightning.refusals import HOOKS
from lockstep.adapters.lightning.state import Leavings
from lockstep.adapters.lightning.task import LightningTask
from lockstep.adapters.lightning.trainer import Standing
from lockstep.config import cli
from lockstep.config.schema import DEFAULTS, Config
from lockstep.data.loader import generators_kept, seed_everything
from lockstep.errors import ConfigError
from lockstep.task_file import construct, import_class

__all__ = [
    "configure",
    "from_lightning",
    "load",
]


def _check_module(module: Any, trainer: Any) -> None:
    """Check that this is a LightningModule that a run can train.

    Raises:
        ConfigError: it is no module, or uses a method that is not supported; one line.
    """
    if isinstance(module, type):
        raise ConfigError(f"from_lightning: {module.__name__} is a class: pass an object, {module.__name__}()")
    if kind_of(module, "LightningModule") is None:
        raise ConfigError(f"from_lightning takes a LightningModule, not {type(module).__name__}")
    if trainer is not None and kind_of(trainer, "Trainer") is None:
        raise ConfigError(f"from_lightning: trainer is {type(trainer).__name__}: pass a Lightning Trainer, or None")
    name = type(module).__name__
    for mandatory in ("training_step", "configure_optimizers"):
        if not is_user_defined(module, mandatory):
            raise ConfigError(f"from_lightning: {name} has no `{mandatory}`: define it")
    for hook, out in HOOKS.items():
        if _overrides(module, hook):
            raise ConfigError(f"from_lightning: {name} overrides `{hook}`, which is not supported: {out}")
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(module, step, None)
        if method is not None and takes(method, "dataloader_iter"):
            raise ConfigError(
                f"from_lightning: {step} of {name} takes a dataloader_iter, which is not supported: take (batch, "
                "batch_idx)"
            )
    for more, out in (
        ("optimizer_idx", "Lightning 2 removed it: set automatic_optimization = False"),
        ("hiddens", "Lightning 2 removed it: keep the state in the module"),
    ):
        if takes(module.training_step, more):
            raise ConfigError(f"from_lightning: training_step of {name} takes `{more}`: {out}")


def _materialise(module: Any, train: LoaderParts) -> None:
    """Materialise lazy parameters by one `training_step` on the first samples.

    Raises:
        ConfigError: the step fails, or leaves a parameter lazy.
    """
    if not any(is_lazy(parameter) for parameter in module.parameters()):
        return
    name = next(name for name, parameter in module.named_parameters() if is_lazy(parameter))
    count = min(train.batch_size, len(train.dataset))
    before = module._current_fx_name
    reason = "it is not used"
    try:
        # The step must leave no trace: random states and the module's attributes are restored.
        with generators_kept(), torch.no_grad(), Leavings.undone(module):
            module._current_fx_name = "training_step"
            batch = train.collate([train.dataset[index] for index in range(count)])
            module.training_step(*calls(module.training_step, batch, 0))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        module._current_fx_name = before
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ConfigError(
            f"from_lightning: the parameter {name} is lazy, and training_step on the first samples does not "
            f"materialise it ({reason}): call the module on a batch first"
        )


def _overrides(module: Any, hook: str) -> bool:
    return hasattr(module, hook) and is_user_defined(module, hook)


def from_lightning(
    module: Any, datamodule: Any = None, trainer: Any = None, devices: int = 0
) -> "tuple[Config, LightningTask]":
    """Convert a LightningModule that has not trained yet to a config and a task.

    Data are made under the seed of Lightning's `seed_everything`, else under 0.

    Args:
        module: of `lightning` or `pytorch_lightning`. It becomes the model that is trained.
        datamodule: a LightningDataModule; or a train DataLoader, or (train, validation) loaders; None: the module's.
        trainer: a constructed Trainer to take arguments from; None: the config's defaults.
        devices: the number of devices that the loader's batch size is meant for, however many the run has; 0: the
            Trainer's, or 1 without one.

    Raises:
        ConfigError: it uses a feature that lockstep does not serve; one line that names it and the way out.
    """
    return _convert(module, datamodule, trainer, devices, int(os.environ.get("PL_GLOBAL_SEED") or DEFAULTS.seed))


def _convert(module: Any, datamodule: Any, trainer: Any, devices: int, seed: int) -> "tuple[Config, LightningTask]":
    """Convert as `from_lightning`, with data that are made under `seed`."""
    _check_module(module, trainer)
    if trainer is not None:
        check_arguments(trainer)
    devices = devices or (int(trainer.num_devices * trainer.num_nodes) if trainer is not None else 1)
    stand_in = Standing(module, datamodule if kind_of(datamodule, "LightningDataModule") else None)
    describe(stand_in, trainer)
    module.trainer = stand_in
    with stand_in.setting_up():
        stand_in.take_callbacks(callbacks_of(module, trainer))
    loaders = prepare_loaders(module, datamodule, stand_in, seed)
    if trainer is not None and trainer.limit_val_batches == 0:
        loaders.validation.clear()
    _materialise(module, loaders.train)
    config = config_of(module, loaders, trainer, devices)
    task_class = ManualTask if not module.automatic_optimization else LightningTask
    if loaders.train.whole:
        task_class = WholeBatchManualTask if task_class is ManualTask else WholeBatchTask
    return config, task_class(module, loaders, stand_in, devices)


class WholeBatchTask(LightningTask):
    """A module with a dataset of whole batches, counted as samples."""

    items_per_sample = None

    def collate(self, samples: list[Any]) -> Any:
        batch = super().collate(samples)
        return batch._replace(samples=rows_of(batch.data))


class ManualTask(LightningTask):
    """A module that steps its optimizers in `training_step` (manual optimization).

    `loss` returns a placeholder, which the engine's step fills.
    """

    reduction = "sum"
    _manual: ManualSteps

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own_steps = self._manual = ManualSteps(self.life)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.own_steps = self._manual = ManualSteps(self.life)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # They cannot be pickled; `__setstate__` makes new ones.
        del state["own_steps"], state["_manual"]
        return state

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return a 0-dim placeholder that receives the summed loss during the engine's step."""
        turn = self.life.take_turn()
        if turn is None:
            mean = self._manual.try_loss(lambda: self._run_training_step(model, batch, None))
            return mean * float(batch.samples)
        device = self.trainer.device
        return self._manual.note(lambda: self._run_training_step(model, batch, turn), batch.samples, device)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        loss, metrics = super().evaluate(model, batch)
        return loss * batch.samples, metrics

    def state_dict(self) -> dict[str, Tensor]:
        return self._manual.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._manual.restore()

    def _build_optimizer(self, configuration: Configured) -> Optimizer:
        return self._manual.configure(configuration)


class WholeBatchManualTask(WholeBatchTask, ManualTask):
    """A module with manual optimization and a dataset of whole batches."""


# Methods by which a class in a file is recognised; train_dataloader would match modules too.
_MARKERS = {"--lightning": ["training_step"], "--datamodule": ["from_datasets"]}


def load(spec: str, seed: int = 0) -> LightningTask:
    """Make the task of `lightning:FILE.py:Module` or `lightning:FILE.py:Module,FILE.py:DM`.

    Raises:
        ConfigError: the file or class does not exist, cannot be made without arguments, or uses a feature that is not
            served.
    """
    return _build(spec, seed)[1]


def configure(values: dict[str, Any]) -> tuple[Config, LightningTask]:
    """Return the config and the task for `--lightning`.

    Flags and file override the values that the module's loaders imply.
    """
    config = cli.build(values)
    task_config, task = _build(config.task, config.seed)
    plain = cli.flatten(DEFAULTS, own_task=True)
    derived = {}
    for name, value in cli.flatten(task_config, own_task=True).items():
        if value != plain[name]:
            derived[name] = value
    # A micro-batch size that does not divide the user's batch size is chosen again.
    if "batch_size" in values and values["batch_size"] % derived.get("micro_batch_size", 1):
        derived.pop("micro_batch_size", None)
    return cli.build({**derived, **values}), task


def _build(spec: str, seed: int) -> tuple[Config, LightningTask]:
    module, _, data = spec.removeprefix("lightning:").partition(",")
    seed_everything(seed)
    instance = _instantiate(module, "--lightning")
    return _convert(instance, _instantiate(data, "--datamodule") if data else None, None, 0, seed)


def _instantiate(spec: str, flag: str) -> Any:
    target_class = import_class(spec, flag, _MARKERS[flag])
    try:
        return construct(target_class)
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{flag} '{spec}': {target_class.__name__}() failed ({line}); it is called without arguments: give them "
            "defaults, or call lockstep.from_lightning in a script"
        ) from error
