"""The data of a module: prepared once, set up on every rank, its loaders taken apart.

    loaders = begun(module, datamodule, trainer)
    loaders.train, loaders.validation["val"], loaders.test

`prepare_data` runs on one rank while the others wait for it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import ConfigError
from lockstep.tasks.lightning_data import Parts, named_loaders, taken_apart
from lockstep.tasks.lightning_package import kind_of, written
from lockstep.tasks.lightning_trainer import Standing

__all__ = ["Loaders", "begun", "more_loaders"]


@dataclass
class Loaders:
    """The parts of the loaders; `owner` has their methods: the datamodule, or the module itself."""

    train: Parts
    validation: dict[str, Parts] = field(default_factory=dict)
    datamodule: Any = None


def begun(module: Any, given: Any, trainer: Standing) -> Loaders:
    """Prepares, sets up, and asks for the loaders of the training and of the evaluation in it.

    Raises:
        ConfigError: there is no training loader, or one that cannot be taken apart.
        DataError: what the module's own methods raise, named.
    """
    datamodule = given if kind_of(given, "LightningDataModule") else None
    if datamodule is not None:
        datamodule.trainer = trainer
    _prepare(module, datamodule)
    owners: tuple[Any, ...] = (datamodule, module)
    for owner in owners:
        if written(owner, "setup"):
            owner.setup("fit")
    own = _given(given) if given is not None and datamodule is None else None
    train = own[0] if own else _asked("train_dataloader", module, datamodule)
    if train is None:
        raise ConfigError(
            f"from_lightning: {type(module).__name__} has no train_dataloader: give a datamodule (--datamodule "
            "FILE.py:DataModule), or a loader in its place"
        )
    if isinstance(train, Mapping | list | tuple) or type(train).__name__ == "CombinedLoader":
        named = named_loaders(train, "train_dataloader")
        if len(named) != 1:
            raise ConfigError(
                "from_lightning: train_dataloader returned several loaders, whose batches would have to be paired: "
                "return one, of a dataset whose samples have a part of each"
            )
        (train,) = named.values()
    trainer.train_dataloader = train
    parts = taken_apart(train, "train_dataloader")
    found = own[1] if own else _asked("val_dataloader", module, datamodule)
    trainer.val_dataloaders = found
    sets = named_loaders(found, "val_dataloader") if written(module, "validation_step") else {}
    validation = {name: taken_apart(each, "val_dataloader") for name, each in sets.items()}
    return Loaders(parts, {name: each for name, each in validation.items() if len(each.dataset)}, datamodule)


def more_loaders(module: Any, datamodule: Any, name: str) -> dict[str, Parts]:
    """The loaders of `test_dataloader` or `predict_dataloader`, set up for it."""
    stage, owners = name.removesuffix("_dataloader"), (datamodule, module)
    for owner in owners:
        if written(owner, "setup"):
            owner.setup(stage)
    found = _asked(name, module, datamodule)
    if found is None:
        raise ConfigError(f"{type(module).__name__} has no {name}: write it, or give a datamodule that has it")
    return {key: taken_apart(each, name) for key, each in named_loaders(found, name).items()}


def _asked(name: str, module: Any, datamodule: Any) -> Any:
    for owner in (datamodule, module):
        if written(owner, name):
            return getattr(owner, name)()
    return None


def _given(loaders: Any) -> tuple[Any, Any]:
    """(training, evaluation) of loaders that were given in a datamodule's place."""
    if isinstance(loaders, DataLoader):
        return loaders, None
    if isinstance(loaders, list | tuple) and len(loaders) == 2:
        return loaders[0], loaders[1]
    raise ConfigError(
        f"from_lightning: datamodule is {type(loaders).__name__}: give a LightningDataModule, a DataLoader, or "
        "(train loader, validation loader)"
    )


def _prepare(module: Any, datamodule: Any) -> None:
    """`prepare_data` of datamodule and module: on rank 0, or the first of each node, while the others wait."""
    owners = [each for each in (datamodule, module) if written(each, "prepare_data")]
    if not owners:
        return

    def here() -> None:
        for owner in owners:
            per_node = bool(getattr(owner, "prepare_data_per_node", True))
            if int(os.environ.get("LOCAL_RANK" if per_node else "RANK", "0")) == 0:
                owner.prepare_data()

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        here()
        return
    world = World.join(device="cpu", timeout=3600.0)
    try:
        on_all_ranks(world, here)  # collective: the others wait, and an error is one on every rank
    finally:
        world.leave()
