"""A trial leaves no marks on a LightningModule and on a Trainer: they train as under their own library."""

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from lightning_modules import loaders, seeded, their_losses, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lockstep

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:::pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


def test_a_lightning_module_trains_as_under_lightning(tmp_path):
    pytest.importorskip("lightning")
    lightning = importlib.import_module("lightning.pytorch")

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.mean = 0, torch.zeros(8)

        def forward(self, x):
            if self.training:
                self.seen += 1
                self.mean = self.mean + (x.detach().mean(0) - self.mean) / self.seen
            return x - self.mean

    class Mine(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.calls, self.memory = nn.Sequential(Seen(), nn.Linear(8, 3)), 0, []
            self.register_buffer("centre", torch.zeros(3))
            self.validated = 0

        def training_step(self, batch, index):
            self.calls += 1
            out = self.net(batch[0]) - self.centre
            self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
            self.memory = [*self.memory, out.detach().mean(0)][-5:]
            return F.cross_entropy(out - torch.stack(self.memory).mean(0), batch[1]) * min(1, self.calls / 10)

        def validation_step(self, batch, index):
            self.validated += 1
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Average(lightning.Callback):
        def on_fit_start(self, trainer, module):
            self.average = [each.detach().clone() for each in module.parameters()]

        def on_train_batch_end(self, trainer, module, *rest):
            for mine, theirs in zip(self.average, module.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs.detach(), alpha=0.1)

    expected = Average()
    theirs, made = their_losses(lightning, seeded(Mine), loaders(), callbacks=[expected])
    module, average = seeded(Mine), Average()
    settings, task = lockstep.from_lightning(module, loaders(), trainer(lightning, callbacks=[average]))
    settings = dataclasses.replace(
        settings, save_dir=str(tmp_path), experiment_name="r", micro_batch_size=settings.batch_size
    )
    with lockstep.Run(settings, task) as run:
        ours = [step.loss for step in run]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert module.calls == len(theirs)
    assert module.validated == made.lightning_module.validated
    assert module.net[0].seen == made.lightning_module.net[0].seen
    torch.testing.assert_close(module.centre, made.lightning_module.centre)
    torch.testing.assert_close(average.average[0], expected.average[0])


def test_compute_loss_of_hugging_face_keeps_a_counter_and_a_mean(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.seen = nn.Linear(6, 12), nn.Linear(12, 3), 0

        def forward(self, x, labels=None):
            self.seen += self.training
            logits = self.two(torch.tanh(self.one(x)))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class Counting(transformers.Trainer):
        calls, average = 0, 0.0

        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.calls += 1
            out = model(**inputs)
            self.average = 0.9 * self.average + 0.1 * float(out["loss"].detach())
            loss = out["loss"] * min(1, self.calls / 10) * (1 + self.average)
            return (loss, out) if return_outputs else loss

    def made(folder):
        torch.manual_seed(1)
        draw = torch.Generator().manual_seed(0)
        rows = torch.randn(64, 6, generator=draw)
        samples = [{"x": row, "labels": (row.sum() > 0).long()} for row in rows]
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=8,
            per_device_train_batch_size=8,
            learning_rate=5e-2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1,
        )
        return Counting(Net(), arguments, transformers.default_data_collator, samples)

    theirs = made(tmp_path / "theirs")
    theirs.train()
    losses = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    trainer = made(tmp_path / "ours")
    settings, task = lockstep.from_trainer(trainer)
    with lockstep.Run(dataclasses.replace(settings, micro_batch_size=settings.batch_size), task) as run:
        ours = [step.loss for step in run]
    np.testing.assert_allclose(ours, losses, rtol=0, atol=1e-5)
    assert (trainer.calls, trainer.model.seen) == (theirs.calls, theirs.model.seen) == (8, 8)
    assert trainer.average == pytest.approx(theirs.average, abs=1e-6)


class Harder(Dataset):
    """Samples that grow with what a hook at the start of an epoch sets."""

    def __init__(self, scale=None):
        self.rows, self.scale = torch.randn(64, 8, generator=torch.Generator().manual_seed(3)), scale

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index] * self.scale, "labels": int(self.rows[index].sum() > 0)}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_starts_before_its_data_as_in_lightning(tmp_path, workers):
    pytest.importorskip("lightning")
    lightning = importlib.import_module("lightning.pytorch")

    class Scaled(lightning.Callback):
        def __init__(self, loader):
            self.dataset = loader.dataset

        def on_train_epoch_start(self, trainer, module):
            self.dataset.scale = 1.0 + trainer.current_epoch

    class Mine(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 2)

        def training_step(self, batch, index):
            return F.cross_entropy(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def data():
        return DataLoader(Harder(1.0), batch_size=8, num_workers=workers)

    more = {"max_epochs": 3, "accumulate_grad_batches": 2}
    theirs, loader = seeded(Mine), data()
    trainer(lightning, callbacks=[Scaled(loader)], **more).fit(theirs, loader)
    wanted = {name: tensor.tolist() for name, tensor in theirs.state_dict().items()}
    for stops in ((0,), (5, 0), (8, 0)):
        for stop in stops:
            module, loader = seeded(Mine), data()
            made = trainer(lightning, callbacks=[Scaled(loader)], **more)
            settings, task = lockstep.from_lightning(module, loader, made)
            changes = {"save_dir": str(tmp_path), "experiment_name": f"{stops}", "stop_at": stop, "report": False}
            lockstep.train(dataclasses.replace(settings, **changes), task)
        for name, found in module.state_dict().items():
            torch.testing.assert_close(found, torch.tensor(wanted[name]), rtol=1e-5, atol=1e-6)


def test_an_epoch_begins_before_its_data_as_in_the_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Scaled(transformers.TrainerCallback):
        def __init__(self, dataset):
            self.dataset = dataset

        def on_epoch_begin(self, args, state, control, **more):
            self.dataset.scale = 1.0 + round(state.epoch or 0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 2)

        def forward(self, x, labels=None):
            out = self.net(x)
            return {"loss": F.cross_entropy(out, labels), "logits": out}

    def made(folder):
        data = Harder()
        args = transformers.TrainingArguments(
            str(folder),
            num_train_epochs=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=0.05,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        # The first value is that of the trial's samples.
        data.scale = 1.0
        torch.manual_seed(1)
        return transformers.Trainer(Net(), args, train_dataset=data, callbacks=[Scaled(data)])

    theirs, ours = made(tmp_path / "theirs"), made(tmp_path / "ours")
    theirs.train()
    config, task = lockstep.from_trainer(ours, devices=1)
    lockstep.train(dataclasses.replace(config, report=False), task)
    for name, wanted in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], wanted, rtol=1e-5, atol=1e-6)
