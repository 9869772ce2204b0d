"""What of a Trainer, its callbacks, a module and its loaders from_lightning takes over, and what it refuses."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import lockstep
from lockstep.adapters.lightning.data import LoaderDraws, LoaderOrder, named_loaders, taken_apart
from lockstep.adapters.lightning.optimizers import read
from lockstep.adapters.lightning.refusals import ARGUMENTS as TABLE
from lockstep.adapters.lightning.refusals import HOOKS
from lockstep.errors import ConfigError

pytest.importorskip("lightning")

from lightning_modules import autoencoder, classifier, loaders, rows, seeded, trainer

L = importlib.import_module("lightning.pytorch")
DOC = Path(__file__).parents[2] / "docs" / "inside" / "lightning.md"
pytestmark = [pytest.mark.filterwarnings("ignore:::lightning"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]


@pytest.fixture(autouse=True)
def torchs_own_settings():
    yield
    torch.use_deterministic_algorithms(False)


def config_of(module=None, data=None, **arguments):
    return lockstep.from_lightning(module or seeded(classifier(L)), data or loaders(), trainer(L, **arguments))[0]


def test_table_has_every_trainer_argument_and_the_docs_every_row():
    known = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    assert known == TABLE.keys()
    text = DOC.read_text()
    for name, row in TABLE.items():
        assert f"`{name}`" in text, name
        assert row.what in text, name


FIELDS = [
    ({"max_epochs": 3}, "num_epochs", 3),
    ({"max_steps": 7}, "max_steps", 7),
    ({"max_epochs": None}, "num_epochs", 1000),
    ({"accumulate_grad_batches": 4}, "batch_size", 32),
    ({"accumulate_grad_batches": 4}, "micro_batch_size", 8),
    ({"devices": 2}, "batch_size", 16),
    ({"num_nodes": 2}, "batch_size", 16),
    ({"gradient_clip_val": 0.5}, "optim.clip", 0.5),
    ({}, "optim.clip", 0.0),
    ({"precision": "bf16-mixed"}, "precision", "bf16"),
    ({"precision": "64-true"}, "precision", "float64"),
    ({"accelerator": "cpu"}, "device", "cpu"),
    ({"strategy": "ddp", "devices": 2}, "engine", "auto"),
    ({"limit_train_batches": 4}, "limit_train_batches", 4),
    ({"limit_train_batches": 0.5}, "limit_train_batches", "50%"),
    ({"limit_val_batches": 2}, "limit_eval_batches", 2),
    ({"limit_val_batches": 0}, "eval_freq", 0),
    ({}, "eval_freq", "1epoch"),
    ({"val_check_interval": 0.25}, "eval_freq", "0.25epochs"),
    ({"val_check_interval": 4}, "eval_freq", 4),
    ({"val_check_interval": 1}, "eval_freq", 1),
    ({"val_check_interval": 1.0}, "eval_freq", "1epoch"),
    ({"check_val_every_n_epoch": None, "val_check_interval": 3}, "eval_freq", 3),
    ({"check_val_every_n_epoch": 2}, "eval_freq", "2epochs"),
    ({"log_every_n_steps": 3}, "log_freq", 3),
    ({"enable_checkpointing": False}, "ckpt_freq", 0),
    ({"enable_checkpointing": True}, "ckpt_freq", "1epoch"),
    ({"deterministic": True}, "exact", True),
    ({"fast_dev_run": 2}, "max_steps", 2),
    ({"fast_dev_run": 2}, "limit_eval_batches", 2),
    ({"logger": False}, "compile", False),
    ({"sync_batchnorm": True, "devices": 2}, "batchnorm", "sync"),
]


@pytest.mark.parametrize(
    ("given", "field", "wanted"),
    FIELDS,
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, dict) else None,
)
def test_arguments_become_fields(given, field, wanted):
    config = config_of(**given)
    for part in field.split("."):
        config = getattr(config, part)
    assert config == wanted


def test_the_folder_is_the_trainers(tmp_path):
    assert config_of(default_root_dir=tmp_path).save_dir == str(tmp_path)


REFUSED = [
    {"min_epochs": 2},
    {"min_steps": 2},
    {"max_time": "00:00:01:00"},
    {"overfit_batches": 2},
    {"gradient_clip_algorithm": "value", "gradient_clip_val": 1.0},
    {"profiler": "simple"},
    {"detect_anomaly": True},
    {"reload_dataloaders_every_n_epochs": 1},
    {"max_epochs": -1},
    {"precision": "transformer-engine"},
    {"val_check_interval": "00:00:01:00"},
    {"check_val_every_n_epoch": 2, "val_check_interval": 0.5},
    {"check_val_every_n_epoch": 2, "val_check_interval": 2},
]


# Arguments that tests of their own use: callbacks and folders here, the rest in test_lightning and in Loggers below.
ELSEWHERE = {"callbacks", "default_root_dir", "logger", "limit_test_batches", "limit_predict_batches", "plugins"}
ELSEWHERE |= {"enable_autolog_hparams"}


def test_every_trainer_argument_is_tried_or_has_a_reason():
    tried = {name for given, *_ in FIELDS for name in given} | {name for given in REFUSED for name in given}
    signature = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    idle = {name for name, row in TABLE.items() if row.kind == "idle" and row.what}
    assert signature - tried - ELSEWHERE - idle == {"model_registry"}  # of a service that is not here


@pytest.mark.parametrize("logs", [True, False])
def test_loggers_get_hyperparameters_unless_that_is_turned_off(tmp_path, logs):
    from lightning.pytorch.loggers import CSVLogger

    logger, seen = CSVLogger(tmp_path), []
    logger.log_hyperparams = lambda *given: seen.append(given)
    made = trainer(L, logger=logger, enable_autolog_hparams=logs, max_epochs=1)
    config, task = lockstep.from_lightning(seeded(classifier(L)), loaders(8, 8), made)
    lockstep.train(dataclasses.replace(config, save_dir=str(tmp_path / "run"), report=False), task)
    assert len(seen) == logs


@pytest.mark.parametrize(
    "given",
    REFUSED,
    ids=lambda each: next(iter(each)),
)
def test_arguments_are_refused_by_their_name(given):
    name = next(iter(given))
    if given.get("precision"):  # which Lightning itself makes with a package alone
        made = trainer(L)
        made._accelerator_connector.precision_plugin.precision = given["precision"]
        with pytest.raises(ConfigError, match=r"Trainer\(precision="):
            lockstep.from_lightning(seeded(classifier(L)), loaders(), made)
        return
    with pytest.raises(ConfigError, match=rf"from_lightning: Trainer\({name}=.*\)") as caught:
        config_of(**given)
    assert "\n" not in str(caught.value)


def test_a_plugin_is_refused():
    plugin = importlib.import_module("lightning.pytorch.plugins").TorchCheckpointIO()
    with pytest.raises(ConfigError, match=r"Trainer\(plugins='TorchCheckpointIO'\)"):
        config_of(plugins=[plugin])


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (lambda c: c.EarlyStopping("val_loss", patience=4, min_delta=0.1), ("val_loss:min", 4, 0.1)),
        (lambda c: c.EarlyStopping("accuracy", mode="max"), ("accuracy:max", 3, 0.0)),
        (lambda c: c.EarlyStopping("accuracy/dataloader_idx_1", mode="max"), ("accuracy/dataloader_idx_1:max", 3, 0.0)),
        (lambda c: c.ModelCheckpoint(monitor="val_loss"), ("val_loss:min", 0, 0.0)),
        (lambda c: c.LearningRateMonitor(), ("loss", 0, 0.0)),
        (lambda c: c.DeviceStatsMonitor(), ("loss", 0, 0.0)),
    ],
)
def test_callbacks_have_their_meaning(made, wanted, tmp_path):
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    more = {"enable_checkpointing": True, "default_root_dir": tmp_path, "logger": True}
    config = config_of(callbacks=[made(callbacks)], **more)
    assert (config.best_metric, config.patience, config.min_delta) == wanted


def test_one_may_end_the_run_and_another_choose_the_best(tmp_path):
    c = importlib.import_module("lightning.pytorch.callbacks")
    more = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    given = [c.EarlyStopping("val_loss", patience=0, min_delta=0.1), c.ModelCheckpoint(monitor="val_acc", mode="max")]
    for callbacks in (given, given[::-1]):
        config = config_of(callbacks=callbacks, **more)
        assert (config.best_metric, config.patience_metric, config.min_delta) == ("val_acc:max", "val_loss:min", 0.1)
        assert config.patience == 1  # Lightning ends at the first that is no better, with 0 as with 1
    for twice, what in (
        ([c.EarlyStopping("a"), c.EarlyStopping("b")], "two EarlyStopping"),
        ([c.ModelCheckpoint(monitor="a"), c.ModelCheckpoint(monitor="b")], "two ModelCheckpoints monitor a and b"),
    ):
        with pytest.raises(ConfigError, match=what):
            config_of(callbacks=twice, **more)


def test_checkpoints_and_averages_are_the_callbacks(tmp_path):
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    more = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    config = config_of(callbacks=[callbacks.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)], **more)
    assert (config.ckpt_freq, config.checkpoint.keep) == (5, 10**6)
    config = config_of(
        callbacks=[callbacks.ModelCheckpoint(every_n_epochs=2, save_top_k=3, monitor="val_loss")], **more
    )
    assert (config.ckpt_freq, config.checkpoint.keep) == ("2epochs", 3)
    assert config_of(callbacks=[callbacks.EMAWeightAveraging(decay=0.9)]).optim.ema == 0.9


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda c: c.StochasticWeightAveraging(1e-3), "StochasticWeightAveraging"),
        (lambda c: c.GradientAccumulationScheduler({0: 2}), "accumulate_grad_batches"),
        (lambda c: c.EarlyStopping("val_loss", stopping_threshold=0.1), "stopping_threshold"),
        (lambda c: c.EMAWeightAveraging(update_every_n_steps=4), "update_every_n_steps"),
    ],
)
def test_other_callbacks_are_refused(made, words):
    with pytest.raises(ConfigError, match=words) as caught:
        config_of(callbacks=[made(importlib.import_module("lightning.pytorch.callbacks"))])
    assert "\n" not in str(caught.value)


def test_a_modules_own_callbacks_are_taken_too():
    class Own(classifier(L)):
        def configure_callbacks(self):
            return importlib.import_module("lightning.pytorch.callbacks").EarlyStopping("val_loss", patience=7)

    assert lockstep.from_lightning(seeded(Own), loaders())[0].patience == 7


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_hooks_that_are_not_served_are_refused_by_name(hook):
    kind = type("Own", (autoencoder(L),), {hook: lambda self, *given: None})
    with pytest.raises(ConfigError, match=f"Own .*`{hook}`") as caught:
        lockstep.from_lightning(seeded(kind), loaders())
    assert "\n" not in str(caught.value)


def without(name):
    return type("Short", (autoencoder(L),), {name: getattr(L.LightningModule, name)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.nn.Linear(1, 1), "LightningModule.* Linear"),
        (lambda: autoencoder(L), "is a class"),
        (lambda: without("training_step")(), "no `training_step`"),
        (
            lambda: type("Iter", (autoencoder(L),), {"training_step": lambda self, dataloader_iter: None})(),
            "takes a dataloader_iter",
        ),
        (
            lambda: type("Old", (autoencoder(L),), {"training_step": lambda self, b, i, optimizer_idx: None})(),
            "takes `optimizer_idx`",
        ),
    ],
)
def test_what_is_no_module_that_can_be_trained_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        lockstep.from_lightning(make(), loaders())


def test_a_module_without_data_is_refused():
    with pytest.raises(ConfigError, match="no train_dataloader"):
        lockstep.from_lightning(seeded(autoencoder(L)))


class Streaming(IterableDataset):
    def __iter__(self):
        return iter([])


class Backwards(Sampler):
    """By epoch another half, from behind."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size // 2

    def __iter__(self):
        return iter(range(self.size - 1 - self.epoch % 2, -1, -2))


def order(loader, epochs=2, seed=0):
    parts = taken_apart(loader, "train_dataloader")
    found = parts.order(seed)
    return parts, None if found is None else found.at(0, epochs * len(parts.dataset))


def test_a_loader_is_taken_apart():
    parts, found = order(DataLoader(rows(10), 4, shuffle=True, num_workers=2, prefetch_factor=3, drop_last=True))
    assert (parts.batch_size, parts.workers, parts.prefetch, parts.drop_last) == (4, 2, 3, True)
    assert found is None  # lockstep's own shuffle
    parts, (epochs, samples) = order(DataLoader(rows(3), 2))
    assert (parts.drop_last, epochs.tolist(), samples.tolist()) == (False, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])


def test_samplers_of_ones_own_are_kept():
    parts, (_, samples) = order(DataLoader(rows(6), 2, sampler=Backwards(6)))
    assert len(parts.dataset) == 3
    assert samples.tolist() == [5, 3, 1, 4, 2, 0]
    parts, (_, samples) = order(DataLoader(rows(6), batch_sampler=BatchSampler(SequentialSampler(rows(6)), 3, False)))
    assert (parts.batch_size, samples.tolist()) == (3, [*range(6), *range(6)])
    longer = WeightedRandomSampler(torch.ones(4), 12)
    parts, (_, samples) = order(DataLoader(rows(4), 2, sampler=longer))
    again = order(DataLoader(rows(4), 2, sampler=longer))[1][1]
    assert len(parts.dataset) == 12
    np.testing.assert_array_equal(samples, again)
    assert samples[:12].tolist() != samples[12:].tolist()
    parts, (_, samples) = order(DataLoader(rows(8), 2, sampler=DistributedSampler(rows(8), 2, 0, shuffle=False)))
    assert (len(parts.dataset), samples[:8].tolist()) == (8, list(range(8)))


def test_a_generator_of_a_samplers_goes_on_from_epoch_to_epoch():
    generator = torch.Generator().manual_seed(3)
    wanted = [list(RandomSampler(range(5), generator=generator)) for _ in range(3)]
    generator = torch.Generator().manual_seed(3)
    _, (_, samples) = order(DataLoader(rows(5), sampler=RandomSampler(rows(5), generator=generator)), epochs=3)
    assert samples.tolist() == [each for epoch in wanted for each in epoch]


class InBatches(Sampler):
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def test_batch_samplers_of_ones_own_are_kept():
    parts, (_, samples) = order(DataLoader(rows(6), batch_sampler=InBatches([[4, 1], [0, 3]])), epochs=1)
    assert (parts.batch_size, len(parts.dataset), samples.tolist()) == (2, 4, [4, 1, 0, 3])
    with pytest.raises(ConfigError, match="makes no batches"):
        order(DataLoader(rows(6), batch_sampler=InBatches([])))


def test_uneven_lists_are_the_micro_batches():
    lists = InBatches([[4, 1], [0], [5, 3, 2]])
    config, task = lockstep.from_lightning(seeded(autoencoder(L)), DataLoader(rows(6), batch_sampler=lists))
    groups = task.order(6, 0)
    assert (config.batch_size, config.micro_batch_size, groups.size) == (1, 1, 3)
    assert [groups.samples(0, number)[1].tolist() for number in range(3)] == lists.batches
    late = LoaderOrder(LoaderDraws(InBatches([[4, 1], [0]]), 0), 3, 6, in_batches=True)  # even when it was looked at
    with pytest.raises(ConfigError, match="1 to 2 samples in epoch 0"):
        late.at(0, 3)


@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [
        ({"sampler": SubsetRandomSampler([5, 3, 4]), "batch_size": 2}, [2, 1]),
        ({"batch_sampler": InBatches([[3], [5, 4]])}, [1, 2]),
        ({"batch_sampler": InBatches([[3, 4], [5, 4]])}, [2, 2]),
    ],
)
def test_an_evaluation_has_the_samples_of_its_sampler(chosen, sizes):
    data = rows(6)
    parts = taken_apart(DataLoader(data, **chosen), "val_dataloader").held_out()
    assert [len(each) for each in parts.batches()] == sizes
    found = {parts.dataset[place][0].sum().item() for place in range(sum(sizes))}
    assert found == {data[place][0].sum().item() for place in (3, 4, 5)}


def test_an_item_that_is_a_batch_already_is_one(tmp_path):
    class Whole(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return rows(3 + index, index)[:]

    config, task = lockstep.from_lightning(seeded(autoencoder(L)), DataLoader(Whole(), batch_size=None))
    assert config.batch_size == 1
    assert [task.count(task.collate([task.dataset("train")[place]])) for place in range(3)] == [3, 4, 5]
    config = dataclasses.replace(config, save_dir=str(tmp_path), report=False, max_steps=2)
    assert lockstep.train(config, task).global_step == 2


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: [1, 2], "returned list"),
        (lambda: DataLoader(Streaming(), 2), "is iterable"),
    ],
)
def test_loaders_that_cannot_be_taken_apart_are_refused(loader, words):
    with pytest.raises(ConfigError, match=words):
        taken_apart(loader(), "train_dataloader")


def test_several_training_loaders_are_refused():
    both = [loaders()[0], loaders()[0]]
    module = type("Two", (autoencoder(L),), {"train_dataloader": lambda self: both})
    with pytest.raises(ConfigError, match="train_dataloader returned several loaders"):
        lockstep.from_lightning(seeded(module))


def test_evaluation_loaders_have_names():
    one, two = loaders()
    assert list(named_loaders([one, two], "x")) == ["dataloader_idx_0", "dataloader_idx_1"]
    assert list(named_loaders({"near": one}, "x")) == ["near"]
    assert list(named_loaders([one], "x")) == [""]
    assert named_loaders(None, "x") == {}


def test_drop_last_leaves_whole_steps_of_each_epoch():
    data = DataLoader(rows(30), 8, drop_last=True)
    assert lockstep.from_lightning(seeded(autoencoder(L)), data)[0].limit_train_batches == 3


def sgd(lr=0.1):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda: None, "returned None"),
        (lambda: [sgd(), sgd()], "returned 2 optimizers"),
        (lambda: ({"optimizer": sgd(), "frequency": 2}, {"optimizer": sgd()}), "frequency, which Lightning 2"),
        (lambda: torch.optim.LBFGS([torch.zeros(1, requires_grad=True)]), "returned LBFGS"),
        (
            lambda: {"optimizer": (o := sgd()), "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
            "without a monitor",
        ),
        (
            lambda: {"optimizer": sgd(), "lr_scheduler": {"scheduler": 1, "interval": "week"}},
            "interval 'week'",
        ),
    ],
)
def test_other_forms_of_configure_optimizers_are_refused(found, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(found())


def test_the_datamodule_is_prepared_and_set_up():
    class Data(L.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.seen = []

        def prepare_data(self):
            self.seen.append("prepare_data")

        def setup(self, stage):
            self.seen.append(stage)

        def train_dataloader(self):
            return DataLoader(rows(), 4)

        def val_dataloader(self):
            return DataLoader(rows(8), 2)

    data = Data()
    config, task = lockstep.from_lightning(seeded(classifier(L)), data)
    assert data.seen == ["prepare_data", "fit"]
    assert (config.batch_size, config.eval_micro_batch_size, len(task.dataset("evaluation"))) == (4, 2, 8)
