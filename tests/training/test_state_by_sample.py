"""State with rows by sample or stream is that of a plain loop on any number of ranks: `Task.sample_state`."""

import types

import numpy as np
import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.config.schema import Optim
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

STREAMS, LENGTH, WIDTH, STEPS = 8, 5, 4, 6


class InOrder:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def at(self, start, stop):
        return np.divmod(np.arange(start, stop), self.samples)


class Base(lockstep.Task):
    def order(self, samples, seed):
        return InOrder(samples)

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.build().double()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(WIDTH, 6, batch_first=True), nn.Linear(6, WIDTH)

    def forward(self, rows, hidden):
        out, hidden = self.cell(rows, hidden)
        return self.head(out), hidden


class Truncated(Base):
    """Backpropagation through time in pieces: a stream's hidden state goes on into the next step."""

    sample_state = ("hidden",)

    def __init__(self):
        self.hidden = torch.zeros(1, STREAMS, 6, dtype=torch.float64)

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, state):
        self.hidden = state["hidden"]

    def build(self):
        return Recurrent()

    def dataset(self, split):
        if split != "train":
            return None
        drawn = torch.Generator().manual_seed(3)
        rows = torch.randn(STREAMS, STEPS * LENGTH + 1, WIDTH, generator=drawn, dtype=torch.float64)
        return [
            (stream, rows[stream, k * LENGTH : (k + 1) * LENGTH], rows[stream, k * LENGTH + 1 : (k + 1) * LENGTH + 1])
            for k, stream in np.ndindex(STEPS, STREAMS)
        ]

    def loss(self, model, batch):
        which, rows, target = batch
        out, hidden = model(rows, self.hidden[:, which].clone())
        self.hidden = self.hidden.clone()
        self.hidden[:, which] = hidden.detach()
        return F.mse_loss(out, target)

    def state(self, model):
        return self.hidden


class Held(Truncated):
    """The state hangs on an object of the task."""

    sample_state = ("state",)

    def __init__(self):
        self.memory = types.SimpleNamespace(hidden=torch.zeros(1, STREAMS, 6, dtype=torch.float64))

    def state_dict(self):
        return {"state": self.memory.hidden}

    def load_state_dict(self, state):
        self.memory.hidden.copy_(state["state"])

    def loss(self, model, batch):
        which, rows, target = batch
        out, hidden = model(rows, self.memory.hidden[:, which].clone())
        self.memory.hidden[:, which] = hidden.detach()
        return F.mse_loss(out, target)

    def state(self, model):
        return self.memory.hidden


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))
        drawn = torch.Generator().manual_seed(1)
        self.register_buffer("bank", F.normalize(torch.randn(30, 3, generator=drawn, dtype=torch.float64)))

    def forward(self, rows):
        return F.normalize(self.net(rows))


class Memory(Base):
    """Each sample is told from all others by the bank, which then remembers it."""

    sample_state = ("bank",)

    def build(self):
        return Bank()

    def dataset(self, split):
        drawn = torch.Generator().manual_seed(3)
        rows = torch.randn(30, WIDTH, generator=drawn, dtype=torch.float64)
        return torch.utils.data.TensorDataset(torch.arange(30), rows) if split == "train" else None

    def loss(self, model, batch):
        which, rows = batch
        out, bank = model(rows), self.bank_of(model)
        loss = F.cross_entropy(out @ bank.clone().T / 0.5, which)
        with torch.no_grad():
            bank[which] = F.normalize(0.5 * bank[which] + 0.5 * out)
        return loss

    def bank_of(self, model):
        return dict(model.named_buffers())[next(name for name, _ in model.named_buffers())]

    def state(self, model):
        return model.bank


def numbers(task, model):
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return weights, task.state(model).tolist()


def plainly(kind):
    task = kind()
    model, data = task.model(), task.dataset("train")
    optimizer = task.optimizer(model, None)
    for step in range(STEPS):
        places = [position % len(data) for position in range(step * STREAMS, (step + 1) * STREAMS)]
        loss = task.loss(model, torch.utils.data.default_collate([data[place] for place in places]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return numbers(task, model)


def trained(world, folder, kind, stops=(0,), **changes):
    for stop in stops:
        task = kind()
        settings = {"micro_batch_size": 0, "batch_size": STREAMS, "max_steps": STEPS, "ckpt_freq": 0}
        made = config(
            folder, **settings | {"optim": Optim(clip=0.0, schedule="constant", warmup_steps=0)} | changes, stop_at=stop
        )
        running = lockstep.Run(made, task, world)
        running()
        found = numbers(task, running.model)
    return found


def close(found, wanted):
    for name, rows in wanted[0].items():
        torch.testing.assert_close(torch.tensor(found[0][name]), torch.tensor(rows), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(wanted[1]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Truncated, Memory])
def test_it_is_a_plain_loops_however_a_step_is_cut(tmp_path, kind):
    wanted = plainly(kind)
    assert trained(World(), tmp_path / "whole", kind) == wanted
    cut = trained(World(), tmp_path / "cut", kind, micro_batch_size=2, exact=True)
    close(cut, wanted)
    assert trained(World(), tmp_path / "resumed", kind, (2, 5, 0), micro_batch_size=2, exact=True) == cut
    close(run(trained, 3, tmp_path / "three", kind)[0], wanted)
    for found in run(trained, 2, tmp_path / "two", kind, (3, 0), timeout=90.0):
        close(found, wanted)
    changes = {"micro_batch_size": 2, "exact": True}
    for found in run(exactly, 2, tmp_path / "exact", kind, changes):
        assert found == cut


def test_an_object_of_the_task_may_have_it(tmp_path):
    changes = {"micro_batch_size": 2, "exact": True}
    close(trained(World(), tmp_path, Held, (3, 0), **changes), plainly(Held))


def exactly(world, folder, kind, changes):
    return trained(world, folder, kind, (4, 0), **changes)


class Undeclared(Memory):
    sample_state = ()


class Statistic(Memory):
    """A mean over all samples is no state by sample."""

    def loss(self, model, batch):
        bank = self.bank_of(model)
        with torch.no_grad():
            bank.mul_(0.9).add_(batch[1].mean(), alpha=0.1)
        return model(batch[1])[:, 0].square().mean()  # of all columns it would be constant


class Unknown(Memory):
    sample_state = ("queue",)


def refused(world, folder, kind, changes):
    with pytest.raises(ConfigError) as caught:
        trained(world, folder, kind, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "ranks", "name"), [(Undeclared, 2, "bank"), (Statistic, 2, "bank"), (Unknown, 1, "queue")]
)
def test_what_is_not_by_sample_is_named_in_the_first_step(tmp_path, kind, ranks, name):
    for message in run(refused, ranks, tmp_path, kind, {}):
        assert name in message
        assert "sample_state" in message


class Reshaped(Memory):
    """Puts a tensor of the micro-batch in place of the bank."""

    def loss(self, model, batch):
        loss = model(batch[1])[:, 0].square().mean()
        model.bank = loss.detach() * batch[1]
        return loss


@pytest.mark.parametrize("kind", [Statistic, Reshaped])
def test_statistics_and_other_shapes_are_named_on_one_rank_too(tmp_path, kind):
    assert "bank" in refused(World(), tmp_path, kind, {"micro_batch_size": 2})
