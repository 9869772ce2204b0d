"""Rates, decay and momentum that callbacks set, beside schedulers: as in Lightning's and the Trainer's own runs."""

import dataclasses
import importlib
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.optim import lr_scheduler

import lockstep

pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.filterwarnings("ignore:::lightning"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]
STEPS, SIZE = 8, 8
SCHEDULERS = {
    "chained": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),  # continues from what is there
    "drops": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "absolute": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


def writes(groups, step):
    """Write a decay before each step, and a rate and a momentum once."""
    groups[0]["weight_decay"] = 0.01 * (1 + step)
    if step == 2:
        groups[0]["lr"] *= 3.0
        groups[0]["momentum"] = 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.double()

    def forward(self, x, labels=None):
        found = self.head(self.body(x).tanh()).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


def rows():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, x.sum(-1).sin()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_lightning(which):
    """(module, data, trainer), as a script makes them."""
    package = importlib.import_module("lightning.pytorch")

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            return self.net(*batch)["loss"]

        def configure_optimizers(self):
            made = optimizer_of(self)
            scheduler = SCHEDULERS[which](made)
            return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Writing(package.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            writes(trainer.optimizers[0].param_groups, trainer.global_step)

    plain = {
        "precision": "64-true",
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = package.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, callbacks=[Writing()], **plain
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows()), SIZE)
    return Module(), data, trainer


def by_trainer(which, folder):
    transformers = importlib.import_module("transformers")
    arguments = importlib.import_module("hf_trainers").arguments

    class Writing(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **more):
            writes(optimizer.param_groups, state.global_step)

    model, (x, labels) = Net(), rows()
    made = optimizer_of(model)
    args = arguments(folder, max_steps=STEPS, per_device_train_batch_size=SIZE, save_strategy="no", max_grad_norm=0.0)
    data = [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**args),
        lambda samples: {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]},
        data,
        optimizers=(made, SCHEDULERS[which](made)),
        callbacks=[Writing()],
    )


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def theirs(library, which, folder):
    if library == "lightning":
        module, data, trainer = by_lightning(which)
        trainer.fit(module, data)
        return flat(module)
    trainer = by_trainer(which, folder)
    trainer.train()
    return flat(trainer.model)


def ours(library, which, folder, **changes):
    if library == "lightning":
        config, task = lockstep.from_lightning(*by_lightning(which), devices=1)
    else:
        config, task = lockstep.from_trainer(by_trainer(which, folder / "hf"), 1)
    settings = {"save_dir": str(folder), "experiment_name": "r", "report": False, "ckpt_freq": 2, **changes}
    lockstep.train(dataclasses.replace(config, **settings), task)
    model = task.module if library == "lightning" else task.trainer.model
    return flat(model)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("library", ["lightning", "trainer"])
@pytest.mark.parametrize("which", SCHEDULERS)
def test_what_a_callback_sets_holds_as_in_the_framework(tmp_path, library, which):
    wanted = theirs(library, which, tmp_path / "theirs")
    found = ours(library, which, tmp_path / "whole")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    ours(library, which, tmp_path / "parts", stop_at=5)
    assert torch.equal(ours(library, which, tmp_path / "parts"), found)


def on_ranks(world, folder):
    world.leave()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = [ours("trainer", "chained", folder / engine, engine=engine).tolist() for engine in ("ddp", "zero")]
    dist.destroy_process_group()  # accelerate's
    return found


def test_what_a_callback_sets_holds_on_two_ranks(tmp_path):
    wanted = theirs("trainer", "chained", tmp_path / "theirs")
    for found in run(on_ranks, 2, tmp_path / "two", timeout=180.0):
        for weights in found:
            torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), wanted, rtol=0, atol=1e-10)
