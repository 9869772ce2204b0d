"""A dataset that changes between epochs: `Task.start_epoch` runs before the first sample of an epoch is loaded."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep
from lockstep.config.schema import Data, Optim
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError

SAMPLES, SIZE, STEPS = 20, 8, 9


class Harder(Dataset):
    """Samples that grow with the epoch, with noise that is drawn at its start."""

    def __init__(self):
        draw = torch.Generator().manual_seed(3)
        self.rows = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
        self.scale, self.noise = None, None

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.scale * self.rows[index] + self.noise[index], int(self.rows[index].sum() > 0)


class Task(lockstep.Task):
    def __init__(self):
        self.seen = []

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return nn.Linear(4, 2).double()

    def dataset(self, split):
        return Harder() if split == "train" else None

    def start_epoch(self, dataset, epoch):
        self.seen.append(epoch)
        dataset.scale, dataset.noise = 1 + epoch, torch.rand(SAMPLES, 4, dtype=torch.float64)

    def order(self, samples, seed):
        return InOrder(samples)

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Counted(Task):
    """The ranks ask for the items of the coming steps ahead."""

    def count(self, batch):
        return len(batch[1])


class InOrder:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def at(self, start, stop):
        return np.divmod(np.arange(start, stop), self.samples)


def trained(world, folder, kind=Task, workers=0, stops=(0,), **changes):
    for stop in stops:
        task = kind()
        settings = {"micro_batch_size": 0, "batch_size": SIZE, "max_steps": STEPS, "ckpt_freq": 0} | changes
        settings |= {"optim": Optim(clip=0.0, schedule="constant", warmup_steps=0)}
        made = config(folder, **settings, stop_at=stop, data=Data(workers=workers, prefetch=4))
        running = lockstep.Run(made, task, world)
        running()
    return {name: tensor.tolist() for name, tensor in running.model.state_dict().items()}


def plainly(noises):
    """A plain loop; the epoch of a step is that of its first sample.

    Args:
        noises: of each epoch, as the hook drew them.
    """
    task = Task()
    model, data = task.model(), Harder()
    optimizer = task.optimizer(model, None)
    for step in range(STEPS):
        epoch = step * SIZE // SAMPLES
        data.scale, data.noise = 1 + epoch, noises[epoch]
        places = [position % SAMPLES for position in range(step * SIZE, (step + 1) * SIZE)]
        loss = task.loss(model, torch.utils.data.default_collate([data[place] for place in places]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


class Noted(Task):
    noises: ClassVar = {}

    def start_epoch(self, dataset, epoch):
        super().start_epoch(dataset, epoch)
        assert self.noises.setdefault(epoch, dataset.noise).equal(dataset.noise)


def test_it_is_a_plain_loop_with_and_without_workers(tmp_path):
    found = trained(World(), tmp_path / "one", Noted)
    assert found == plainly(Noted.noises)
    assert trained(World(), tmp_path / "workers", Noted, workers=2) == found
    assert trained(World(), tmp_path / "resumed", Noted, stops=(1, 4, 5, 0)) == found
    assert trained(World(), tmp_path / "resumed", Noted, workers=1, stops=(0,)) == found


@pytest.mark.parametrize("kind", [Task, Counted])
def test_so_it_is_on_two_ranks(tmp_path, kind):
    alone = trained(World(), tmp_path / "one", kind, exact=True, micro_batch_size=4)
    for workers, stops in ((0, (0,)), (2, (4, 0))):
        for found in run(exactly, 2, tmp_path / f"{workers}", kind, workers, stops, timeout=120.0):
            assert found == alone


def exactly(world, folder, kind, workers, stops):
    return trained(world, folder, kind, workers, stops, exact=True, micro_batch_size=4)


class Failing(Task):
    def start_epoch(self, dataset, epoch):
        raise ValueError("no negatives")


class Growing(Task):
    def start_epoch(self, dataset, epoch):
        dataset.rows = torch.zeros(epoch + 5, 4)


class GrowingSet(Harder):
    def __len__(self):
        return len(self.rows)


class Grown(Growing):
    def dataset(self, split):
        return GrowingSet() if split == "train" else None


@pytest.mark.parametrize(("kind", "names"), [(Failing, ("start_epoch", "no negatives")), (Grown, ("epoch 1", "5"))])
def test_a_hook_that_fails_or_changes_the_length_is_one_line(tmp_path, kind, names):
    with pytest.raises(DataError) as caught:
        trained(World(), tmp_path, kind)
    assert all(name in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from Harder().rows


class Streamed(Task):
    def dataset(self, split):
        return Stream() if split == "train" else None

    order = lockstep.Task.order


def test_a_stream_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="set_epoch"):
        trained(World(), tmp_path, Streamed)
