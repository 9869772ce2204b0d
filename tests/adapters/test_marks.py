"""A trial leaves no marks on a LightningModule and on a Trainer: they train as under their own library."""

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from lightning_modules import loaders, seeded, their_losses, trainer
from torch import nn
from torch.nn import functional as F

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
