"""BatchNorm and a forward of one sample: refused by name before step 1 where it has one value a channel, else fine."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from ranks import run
from refusals import names
from small_runs import config
from torch import nn
from toys import Ragged

import lockstep
from lockstep.errors import ConfigError


class Channels(Ragged):
    """A BatchNorm over vectors [N, C], or over signals or images with some places for each sample."""

    def __init__(self, *inside, shape=(4,), frozen=False):
        super().__init__()
        self.inside, self.shape, self.frozen = inside, shape, frozen

    def model(self):
        made = nn.Sequential(*copy.deepcopy(self.inside), nn.Flatten(), nn.LazyLinear(2)).double()
        made(torch.zeros(2, *self.shape, dtype=torch.float64))
        return made.eval() if self.frozen else made

    def dataset(self, split):
        generator = torch.Generator().manual_seed(5)
        return torch.utils.data.TensorDataset(
            torch.randn(17, *self.shape, generator=generator, dtype=torch.float64), torch.arange(17) % 2
        )

    def collate(self, samples):
        return torch.utils.data.default_collate(samples)

    def count(self, batch):
        return len(batch[1])

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def metrics(self, model, batch):
        return {}


def one_a_channel(world, settings, task):
    with pytest.raises(ConfigError) as caught:
        lockstep.Run(settings, task, world)()
    assert names(str(caught.value), "BatchNorm (1)", "1 sample", "--micro-batch-size", "--batch-size")
    assert not Path(settings.save_dir, "r").exists()


@pytest.mark.parametrize(
    ("norm", "shape", "size"),
    [(nn.BatchNorm1d(4), (4,), 2), (nn.BatchNorm1d(4), (4, 1), 1), (nn.BatchNorm2d(4), (4, 1, 1), 1)],
)
@pytest.mark.parametrize("sizes", [(4, 1), (5, 2)], ids=["all", "the last"])
def test_batchnorm_with_one_value_a_channel_is_named_early(tmp_path, norm, shape, size, sizes):
    """Also where only the last micro-batch of a step has one sample."""
    task = Channels(nn.Identity(), norm, shape=shape)
    settings = config(tmp_path, batch_size=sizes[0], micro_batch_size=sizes[1], max_steps=3)
    run(one_a_channel, size, settings, task)


def test_the_default_of_a_batch_of_one_is_refused_too(tmp_path):
    with pytest.raises(ConfigError, match=r"BatchNorm \(0\) "):
        lockstep.train(config(tmp_path, batch_size=1, micro_batch_size=0), Channels(nn.BatchNorm1d(4)))


@pytest.mark.parametrize(
    "task",
    [
        Channels(nn.BatchNorm2d(1), shape=(1, 2, 2)),
        Channels(nn.BatchNorm1d(4), shape=(4, 3)),
        Channels(nn.BatchNorm1d(4), frozen=True),
    ],
)
def test_one_sample_with_places_or_frozen_statistics_is_fine(tmp_path, task):
    settings = config(tmp_path, batch_size=4, micro_batch_size=1, max_steps=3)
    assert lockstep.train(settings, task).global_step == 3
    log = (tmp_path / "r" / "logs" / "rank-00000.log").read_text()
    assert ("BatchNorm (0) normalises over the 1 sample of a forward" in log) is not task.frozen


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 2)])
def test_a_last_step_of_one_sample_is_no_crash_with_batchnorm(tmp_path, size, workers):
    """17 samples in steps of 4: the last step would hold one, and one is what BatchNorm cannot take."""
    settings = config(
        tmp_path, batch_size=4, micro_batch_size=2, max_steps=0, data={"workers": workers}, eval_workers=0
    )
    assert run(status, size, settings, Channels(nn.BatchNorm1d(4))) == [("finished", 4)] * size
    assert "the last sample of the last epoch is left out" in (tmp_path / "r/logs/rank-00000.log").read_text()
    plain = dataclasses.replace(settings, experiment_name="plain")  # who has no BatchNorm learns from it
    assert run(status, size, plain, Channels()) == [("finished", 5)] * size


def status(world, settings, task):
    result = lockstep.train(settings, task, world)
    return result.status, result.global_step
