"""LightningModules on two ranks: the bits of one, whatever their steps leave behind."""

import dataclasses
import importlib
import json
import os
import sys

import pytest
import torch
from ranks import run
from torch.utils.data import DataLoader

import lockstep
from lockstep import checkpoint
from lockstep.diagnose.plan.subject import subject_of
from lockstep.errors import ConfigError
from lockstep.tensors import local_of

pytest.importorskip("lightning")

pytestmark = [pytest.mark.filterwarnings("ignore:::lightning"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]


def one_cycle(module, optimizer):
    """Rates and momenta, of each group its own, by step."""
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.2], module.trainer.estimated_stepping_batches)
    return [optimizer], [{"scheduler": rates, "interval": "step"}]


def trained(folder, which, stop_at=0, engine="auto", configure=None, **more):
    """What a run came to: losses, evaluation, weights, logs, and the rates that a hook saw."""
    modules = importlib.import_module("lightning_modules")  # by the ranks too, which import this file
    package = importlib.import_module("lightning.pytorch")
    kind = modules.gan(package, draws=True) if which == "gan" else modules.classifier(package, 0.2, configure)
    module = modules.seeded(kind)
    data = modules.uneven() if which == "uneven" else modules.loaders(60, 20, shuffle=True)
    config, task = lockstep.from_lightning(module, data if which != "gan" else data[0], devices=3)
    config = dataclasses.replace(
        config, save_dir=str(folder), report=False, num_epochs=2, stop_at=stop_at, engine=engine, log_freq=1, **more
    )
    with lockstep.Run(config, task) as made:
        losses = [step.loss for step in made]
    found = dataclasses.asdict(made.result.evaluation) if made.result.evaluation else {}
    lines = (made.result.folder / "metrics.jsonl").read_text() if made.is_main else ""
    weights = {name: local_of(tensor).tolist() for name, tensor in made.model.state_dict().items()}
    logged = [line for line in lines.splitlines() if "mean_loss" in line or "judged" in line]
    return losses, found, weights, logged, getattr(module, "rates", [])


def on_ranks(world, folder, which, more):
    world.leave()
    os.environ["OMP_NUM_THREADS"] = "1"
    return trained(folder, which, **more)


@pytest.mark.parametrize("which", ["classifier", "gan", "uneven"])
def test_two_ranks_have_the_bits_of_one_and_resume_what_it_began(tmp_path, which):
    before = torch.get_num_threads()
    try:
        alone = trained(tmp_path / "one", which, exact=True)
        begun = trained(tmp_path / "two", which, stop_at=2, exact=True)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    losses, found, weights, logged, _ = alone
    for rank, other in enumerate(run(on_ranks, 2, tmp_path / "two", which, {"exact": True}, timeout=180.0)):
        assert begun[0] + other[0] == losses
        assert other[1:3] == (found, weights)
        if rank == 0:
            assert other[3][-1] == logged[-1]
    assert logged


def split(world, folder, engines):
    world.leave()
    return [trained(folder / engine, "classifier", engine=engine, configure=one_cycle) for engine in engines]


def test_a_module_is_trained_by_engines_that_split_it(tmp_path):
    losses, found, _, _, rates = trained(tmp_path / "one", "classifier", configure=one_cycle)
    assert len({rate for rate, _ in rates}) == len(losses)
    for rank in run(split, 2, tmp_path, ("fsdp", "zero"), timeout=180.0):
        for other in rank:
            assert other[0] == pytest.approx(losses, abs=1e-5)
            assert other[4] == rates
            assert other[1]["metrics"]["seen"] == found["metrics"]["seen"] == 20


def test_loader_processes_change_no_bit(tmp_path):
    modules = importlib.import_module("lightning_modules")
    package = importlib.import_module("lightning.pytorch")
    found = []
    for workers in (0, 1):
        data = DataLoader(modules.rows(), 8, shuffle=True, num_workers=workers)
        config, task = lockstep.from_lightning(modules.seeded(modules.autoencoder(package)), data)
        changes = {"save_dir": str(tmp_path / str(workers)), "report": False, "max_steps": 4}
        found.append([step.loss for step in lockstep.Run(dataclasses.replace(config, **changes), task)])
    assert found[0] == found[1]


def unseeded(world, folder, engines):
    """The guide's module, made without a seed: each rank draws its own."""
    if world:
        world.leave()
    modules = importlib.import_module("lightning_modules")
    package = importlib.import_module("lightning.pytorch")
    found = []
    for engine in engines:
        torch.manual_seed(7 + (world.rank if world else 0))
        data = DataLoader(modules.rows(), 4)
        config, task = lockstep.from_lightning(modules.autoencoder(package)(), data, devices=2)
        changes = {"save_dir": str(folder / engine), "report": False, "max_steps": 3, "engine": engine}
        with lockstep.Run(dataclasses.replace(config, exact=engine == "auto", **changes), task) as made:
            losses = [step.loss for step in made]
        found.append((losses, {name: local_of(tensor).tolist() for name, tensor in made.model.state_dict().items()}))
    return found


def test_module_made_without_a_seed_has_rank_0s_values(tmp_path):
    before = torch.get_num_threads()
    try:
        ((losses, weights),) = unseeded(None, tmp_path / "one", ["auto"])
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    for first, *others in run(unseeded, 2, tmp_path / "two", ["auto", "zero", "fsdp"], timeout=180.0):
        assert first == (losses, weights)
        assert all(other[0] == pytest.approx(losses, abs=1e-5) for other in others)


def as_prepared(world, folder):
    """`prepare_data` on one rank, before the others go on."""
    world.leave()
    modules = importlib.import_module("lightning_modules")
    package = importlib.import_module("lightning.pytorch")

    class Data(package.LightningDataModule):
        def prepare_data(self):
            (folder / f"by-{os.environ['RANK']}").touch()

        def setup(self, stage):
            self.seen = sorted(path.name for path in folder.iterdir())

        def train_dataloader(self):
            return modules.loaders()[0]

    data = Data()
    lockstep.from_lightning(modules.seeded(modules.autoencoder(package)), data)
    return data.seen


def speaking(world, folder):
    world.leave()
    modules = importlib.import_module("lightning_modules")
    package = importlib.import_module("lightning.pytorch")

    class Speaking(modules.autoencoder(package)):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            torch.distributed.all_reduce(loss.detach())
            return loss

    config, task = lockstep.from_lightning(modules.seeded(Speaking), modules.loaders()[0], devices=2)
    with pytest.raises(lockstep.errors.LockstepError, match=r"training_step calls torch.distributed.all_reduce"):
        lockstep.train(dataclasses.replace(config, save_dir=str(folder)), task)
    return True


def test_a_step_that_speaks_to_other_ranks_is_refused(tmp_path):
    assert run(speaking, 2, tmp_path) == [True, True]


def test_data_is_prepared_by_one_rank_alone(tmp_path):
    assert run(as_prepared, 2, tmp_path) == [["by-0"], ["by-0"]]


def test_manual_optimization_is_refused_with_sharded_engines(tmp_path):
    with pytest.raises(ConfigError, match=r"a task that steps its optimizers itself"):
        trained(tmp_path, "gan", engine="zero")
    modules = importlib.import_module("lightning_modules")
    module = modules.seeded(modules.gan(importlib.import_module("lightning.pytorch")))
    config, task = lockstep.from_lightning(module, modules.loaders(60, 20)[0])
    with pytest.raises(ConfigError, match="`lockstep profile` measures it"):
        subject_of(config, task, print)


FILE = """
import torch
import lightning.pytorch as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(64.0).reshape(32, 2) / 64), 4)


class Module(L.LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


module, data, number = Module(width=5), Data(), 3
"""


def test_the_command_takes_a_file(tmp_path, monkeypatch, capsys):
    cli = importlib.import_module("lockstep.cli")
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = ["--lightning", "mine.py:Module", "--datamodule", "mine.py:Data", "--max-steps", "3", "--no-report"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *flags])
    assert ended.value.code == 0
    capsys.readouterr()
    config = (tmp_path / "outputs" / "Module" / "config.toml").read_text()
    assert 'task = "lightning:mine.py:Module,mine.py:Data"' in config
    assert "batch_size = 4" in config
    with pytest.raises(SystemExit) as ended:  # of the training that `train` would make
        cli.main(["profile", *flags[:4], "--steps", "1", "--warmup", "1"])
    assert ended.value.code == 0
    assert " of 4 samples\n" in capsys.readouterr().err
    assert list((tmp_path / "outputs").glob("Module-profile-*"))
    values = {"task": "lightning:mine.py:Module,mine.py:Data"}
    seen = []
    tried = importlib.import_module("lockstep.diagnose.doctor.task")
    monkeypatch.setattr(tried, "_train_steps", lambda built: seen.append(built.config.micro_batch_size))
    here = importlib.import_module("lockstep.diagnose.doctor.command").place_of(
        lockstep.Config(**values), with_task=True, patience=1.0
    )
    here.told = values
    tried.task(here)
    assert seen == [4]
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *flags[:4], "--world-sizes", "2", "--device", "h100-80", "--fast", "--json"])
    assert ended.value.code == 0
    planned = json.loads(capsys.readouterr().out)["config"]
    assert (planned["micro_batch_size"], planned["batch_size"]) == (4, 8)  # a micro-batch of the loader's a device
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", "outputs/Module", "exported", "--format", "hf"])
    assert ended.value.code == 2
    assert "the run's model, of --task lightning:mine.py:Module,mine.py:Data, is neither" in capsys.readouterr().err
    made = importlib.import_module("lockstep.adapters.lightning.convert").load("lightning:mine.py:module,mine.py:data")
    assert made.module.layer.out_features == 5  # an object of the file
    for wrong, told in (
        (["--lightning", "mine.py:number"], "LightningModule"),
        (["--datamodule", "mine.py:Data"], "add --lightning FILE.py:Module"),
        (["--lightning", "mine.py:Module", "--task", "mine.py:Module"], "remove one"),
        (["--lightning", "mine.py:Modul"], "the file has no class Modul; did you mean mine.py:Module?"),
        (["--lightning", "mine.py:Net"], "the file has no class Net; give mine.py:Module"),
        (["--lightning", "mine.py:Module", "--datamodule", "mine.py"], "no class is named; give mine.py:Data"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", *wrong])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def by_label(world, folder):
    """Outputs of an evaluation in a dict of lists, of which each rank makes those that it comes by."""
    if world is not None:
        world.leave()
    modules = importlib.import_module("lightning_modules")
    package = importlib.import_module("lightning.pytorch")

    class ByLabel(modules.autoencoder(package)):
        def __init__(self):
            super().__init__()
            self.outputs = {}

        def validation_step(self, batch, batch_idx):
            for x, label in zip(*batch, strict=True):
                self.outputs.setdefault(int(label), []).append(x)

        def on_validation_epoch_end(self):
            self.log_dict({f"of_{label}": float(sum(map(len, held))) for label, held in sorted(self.outputs.items())})
            self.outputs.clear()

    held_out = torch.utils.data.TensorDataset(torch.ones(12, 8), torch.arange(12) // 2)  # each label on one rank alone
    data = (modules.loaders()[0], DataLoader(held_out, 2))
    config, task = lockstep.from_lightning(modules.seeded(ByLabel), data, devices=2)
    changes = {"save_dir": str(folder), "report": False, "max_steps": 2}
    result = lockstep.train(dataclasses.replace(config, **changes), task)
    return {name: value for name, value in result.evaluation.metrics.items() if name.startswith("of_")}


def test_a_dict_of_lists_has_the_keys_that_any_rank_came_by(tmp_path):
    alone = by_label(None, tmp_path / "one")
    assert alone == {f"of_{label}": 16.0 for label in range(6)}
    assert run(by_label, 2, tmp_path / "two") == [alone, alone]


def template(package):
    """The commonest template: batch and rate by the processes, a sampler by rank, a held-out part drawn twice."""

    class Data(package.LightningDataModule):
        batch_size = 8

        def setup(self, stage):
            self.batch_size_per_device = self.batch_size // self.trainer.world_size

        def parts(self):
            rows = torch.linspace(-1, 1, 64 * 8, dtype=torch.float64).reshape(64, 8)
            data = torch.utils.data.TensorDataset(rows.sin(), torch.arange(64))
            return torch.utils.data.random_split(data, [48, 16])  # without a seed

        def train_dataloader(self):
            mine = self.parts()[0]
            by_rank = self.trainer.distributed_sampler_kwargs
            sampler = torch.utils.data.DistributedSampler(mine, shuffle=False, **by_rank)
            assert len(sampler) == len(mine)
            return DataLoader(mine, self.batch_size_per_device, sampler=sampler)

        def val_dataloader(self):
            return DataLoader(self.parts()[1], 8)

    class Module(importlib.import_module("lightning_modules").autoencoder(package)):
        shown = ()

        def processes(self):
            trainer = self.trainer
            return (trainer.world_size, trainer.num_devices, trainer.global_rank, trainer.is_global_zero)

        def validation_step(self, batch, batch_idx):
            return self.decoder(self.encoder(batch[0])).square().mean()

        def configure_optimizers(self):
            self.shown = [self.processes(), self.global_rank]
            processes = lambda: self.trainer.world_size * self.trainer.num_devices  # noqa: E731
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01 * processes())
            rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step) * processes())
            return [optimizer], [{"scheduler": rates, "interval": "step"}]

        def on_train_end(self):
            self.shown.append(self.processes())

    return Module, Data


def templated(world, folder, stop_at=0):
    if world:
        world.leave()
        os.environ["PL_GLOBAL_SEED"] = "5"  # as `seed_everything` sets it
    torch.manual_seed(7 + int(os.environ.get("RANK", "0")))
    package = importlib.import_module("lightning.pytorch")
    kind, data = template(package)
    modules = importlib.import_module("lightning_modules")
    module, datamodule = modules.seeded(kind), data()
    torch.manual_seed(7 + int(os.environ.get("RANK", "0")))
    config, task = lockstep.from_lightning(module, datamodule, devices=2)
    assert (config.batch_size, config.micro_batch_size) == (16, 8)
    config = dataclasses.replace(
        config, save_dir=str(folder), report=False, num_epochs=2, stop_at=stop_at, precision="float64"
    )
    with lockstep.Run(config, task) as made:
        losses = [step.loss for step in made]
    held_out = made.result.evaluation and made.result.evaluation.loss
    return losses, held_out, module.shown, {name: each.tolist() for name, each in made.model.state_dict().items()}


def test_data_and_rates_are_set_up_as_on_one_device(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    losses, held_out, shown, weights = templated(None, tmp_path / "one")
    assert len(losses) == 6
    assert shown == [(1, 1, 0, True), 0, (1, 1, 0, True)]
    stored = checkpoint.read_state(checkpoint.newest(tmp_path / "one" / "Module", say=print))["contents"]
    assert {label.partition(" of the ")[2] for label in stored} == {"training set", "evaluation set"}
    assert not any(left_out for *_, left_out in stored.values())
    begun, *_ = templated(None, tmp_path / "two", 2)
    for rank, other in enumerate(run(templated, 2, tmp_path / "two", timeout=180.0)):
        assert begun + other[0] == pytest.approx(losses, rel=1e-12)
        assert other[1] == pytest.approx(held_out, rel=1e-12)
        assert other[2] == [(1, 1, 0, rank == 0), 0, (2, 2, rank, rank == 0)]
        for name, value in weights.items():
            torch.testing.assert_close(torch.tensor(other[3][name]), torch.tensor(value), rtol=1e-12, atol=1e-14)
