"""A LightningModule as it stands, as a config and a task; nothing in it is edited.

    config, task = lockstep.from_lightning(module, datamodule, trainer)         # in place of trainer.fit(...)
    result = lockstep.train(config, task)

What the module does with a batch (`training_step`, `validation_step`, `configure_optimizers`, its hooks) is called as
it is; what a Trainer does with processes, steps and files is lockstep's. Nothing here imports Lightning.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.config import Config
from lockstep.tasks.lightning_arguments import check_arguments, config_of, describe
from lockstep.tasks.lightning_checks import check_module, made_whole
from lockstep.tasks.lightning_loaders import begun
from lockstep.tasks.lightning_log import rows_of
from lockstep.tasks.lightning_manual import ManualSteps
from lockstep.tasks.lightning_optimizers import Configured
from lockstep.tasks.lightning_package import kind_of
from lockstep.tasks.lightning_task import LightningTask
from lockstep.tasks.lightning_trainer import Standing

__all__ = ["ManualTask", "WholeBatchTask", "from_lightning"]


def from_lightning(
    module: Any, datamodule: Any = None, trainer: Any = None, devices: int = 0
) -> "tuple[Config, LightningTask]":
    """The config and the task of a LightningModule that has not trained yet.

    Args:
        module: of `lightning` or `pytorch_lightning`. It is the model that is trained.
        datamodule: a LightningDataModule; or a train DataLoader, or (train, validation) loaders; None: the module's.
        trainer: a made Trainer, whose arguments are taken over; None: the config's defaults.
        devices: for how many devices the loader's batch size is meant, however many there are; 0: for those of the
            trainer.

    Raises:
        ConfigError: it uses what lockstep does not serve; named in one line, with the way out.
    """
    check_module(module, trainer)
    if trainer is not None:
        check_arguments(trainer)
    devices = devices or (int(trainer.num_devices * trainer.num_nodes) if trainer is not None else 1)
    standing = Standing(module, datamodule if kind_of(datamodule, "LightningDataModule") else None)
    describe(standing, trainer, devices)
    module.trainer = standing
    loaders = begun(module, datamodule, standing)
    if trainer is not None and trainer.limit_val_batches == 0:
        loaders.validation.clear()
    made_whole(module, loaders.train)
    config = config_of(module, loaders, trainer, devices)
    kind = ManualTask if not module.automatic_optimization else LightningTask
    if loaders.train.whole:
        kind = WholeBatchManualTask if kind is ManualTask else WholeBatchTask
    return config, kind(module, loaders, standing, devices)


class WholeBatchTask(LightningTask):
    """One whose dataset holds whole batches, each of which has as many items as samples."""

    items_per_sample = None

    def collate(self, samples: list[Any]) -> Any:
        made = super().collate(samples)
        return made._replace(samples=rows_of(made.data))


class ManualTask(LightningTask):
    """One whose `training_step` steps its optimizers itself. Its loss is noted, and filled after the step."""

    reduction = "sum"
    _manual: ManualSteps

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.own_steps = self._manual = ManualSteps(self.life)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.own_steps = self._manual = ManualSteps(self.life)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["own_steps"], state["_manual"]
        return state

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A number that is filled with the loss, summed over the samples, once the step is taken."""
        turn = self.life.take_turn()
        if turn is None:
            tried = self._manual.tried(lambda: self._stepped(model, batch, None))
            return tried * float(batch.samples)
        device = self.trainer.device
        return self._manual.note(lambda: self._stepped(model, batch, turn), batch.samples, device)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        loss, found = super().evaluate(model, batch)
        return loss * batch.samples, found

    def schedule(self, step: int, steps: int) -> float | None:
        """What the module's own schedulers have made of the first rate."""
        group = self.trainer.optimizers[0].param_groups[0] if self.trainer.optimizers else {"lr": 1.0}
        base = group.get("initial_lr", group["lr"])
        return float(group["lr"] / base) if base else 1.0

    def state_dict(self) -> dict[str, Tensor]:
        return self._manual.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._manual.restored()

    def _stepping(self, found: Configured) -> Optimizer:
        return self._manual.configured(found)


class WholeBatchManualTask(WholeBatchTask, ManualTask):
    """Both."""
