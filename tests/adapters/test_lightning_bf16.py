"""Manual optimization under bf16: what follows an optimizer's step is computed with the weights that it has left."""

import dataclasses
import importlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

pytest.importorskip("lightning")

pytestmark = [pytest.mark.filterwarnings("ignore:::lightning"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]

STEPS, SIZE = 2, 4  # samples of a micro-batch


def networks():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizers(maker, judge):
    return torch.optim.SGD(maker.parameters(), lr=0.2), torch.optim.SGD(judge.parameters(), lr=0.3)


def samples(micro):
    return torch.randn(STEPS * micro * SIZE, 6, generator=torch.Generator().manual_seed(5))


def judged(judge, x, made):
    return (judge(x).float() - 1.0).square().mean() + (judge(made.detach()).float() + 1.0).square().mean()


def fooled(judge, made):
    return (judge(made).float() - 1.0).square().mean()


def trained(folder, micro):
    package = importlib.import_module("lightning.pytorch")

    class Adversaries(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = networks()

        def training_step(self, batch, batch_idx):
            (x,) = batch
            make, judge = self.optimizers()
            made = self.maker(x[:, :4])
            judge.zero_grad()
            self.manual_backward(judged(self.judge, x, made))
            judge.step()
            make.zero_grad()
            self.manual_backward(fooled(self.judge, made))
            make.step()

        def configure_optimizers(self):
            return optimizers(self.maker, self.judge)

    data = DataLoader(TensorDataset(samples(micro)), SIZE)
    config, task = lockstep.from_lightning(Adversaries(), data, devices=micro)
    changes = {"save_dir": str(folder), "report": False, "precision": "bf16", "compile": False}
    with lockstep.Run(dataclasses.replace(config, **changes), task) as made:
        assert sum(1 for _ in made) == STEPS
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


def plain(micro):
    """One micro-batch after the other before each optimizer's step, each in an autocast of its own."""
    maker, judge = networks()
    make, decide = optimizers(maker, judge)
    for step in samples(micro).split(micro * SIZE):
        made = []
        for x in step.split(SIZE):
            with torch.autocast("cpu", torch.bfloat16):
                made.append(maker(x[:, :4]))
                loss = judged(judge, x, made[-1])
            (loss / micro).backward()
        decide.step()
        decide.zero_grad()
        for each in made:
            with torch.autocast("cpu", torch.bfloat16):
                loss = fooled(judge, each)
            (loss / micro).backward()
        make.step()
        make.zero_grad()
        decide.zero_grad()
    pairs = {"maker": maker, "judge": judge}
    return {f"{at}.{name}": tensor for at, net in pairs.items() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("micro", [1, 4])
def test_a_forward_after_an_optimizers_step_has_the_new_weights(tmp_path, micro):
    wanted, found = plain(micro), trained(tmp_path, micro)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_what_runs_under_autocast_is_what_lightning_runs_in_it(tmp_path):
    """Steps and forwards do; hooks do not. The weights are Lightning's."""
    package = importlib.import_module("lightning.pytorch")

    class Watched(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = networks()[1]
            self.found = {}

        def note(self, name):
            self.found.setdefault(name, set()).add(torch.is_autocast_enabled("cpu"))

        def forward(self, x):
            return self.net(self.net[0].weight.new_zeros(()) + x)

        def training_step(self, batch, batch_idx):
            self.note("training_step")
            return (self(batch[0][:, :6]) @ torch.ones(1, 1) - 1.0).square().mean()

        def validation_step(self, batch, batch_idx):
            self.note("validation_step")
            self.log("error", (self(batch[0]) - 1.0).square().mean())

        def on_train_batch_start(self, batch, batch_idx):
            self.note("on_train_batch_start")

        def on_after_batch_transfer(self, batch, place):
            self.note("on_after_batch_transfer")
            return batch

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.25)

    def loader():
        return DataLoader(TensorDataset(samples(4)), 8)

    theirs = Watched()
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    package.Trainer(precision="bf16-mixed", **given).fit(theirs, loader(), loader())
    ours = Watched()
    config, task = lockstep.from_lightning(ours, (loader(), loader()))
    changes = {"save_dir": str(tmp_path), "report": False, "precision": "bf16", "compile": False}
    with lockstep.Run(dataclasses.replace(config, **changes), task) as made:
        assert sum(1 for _ in made) == 4
    seen = {name: kinds if name.startswith("on_") else kinds - {False} for name, kinds in ours.found.items()}
    assert seen == theirs.found  # in the trial before step 1 steps run in the parameters' dtype
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in made.model.state_dict().items())
