"""The size of a forward that a device takes best: a device that is made up, whose memory runs out."""

import pytest
import torch
from ranks import run
from small_runs import config, mark
from toys import Ragged

import lockstep
from lockstep.errors import ConfigError, name_settings
from lockstep.training.tuning import SizeCost, choose_size, find_micro_batch


class Counted(Ragged):
    """Notes how many samples each forward of training has; a tensor of its own counts them."""

    def __init__(self):
        super().__init__()
        self.sizes, self.counted = [], torch.zeros(1)

    def loss(self, model, batch):
        self.sizes.append(len(batch["input"]))
        self.counted += 1
        return super().loss(model, batch)

    def state_dict(self):
        return {"counted": self.counted}


def device(task, limit):
    """A measure: 100 bytes a sample, and no more than `limit`; small forwards cost more a sample."""

    def measure(once):
        once()
        size = task.sizes[-1]
        if 100 * size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 100 * size, 1.0 + size

    return measure


def tried(world, folder, limits):
    task = Counted()
    found = find_micro_batch(config(folder, batch_size=24), task, world, device(task, limits[world.rank]), 1000)
    return [each.size for each in found.costs], [each.peak for each in found.costs], found.size, float(task.counted)


def test_the_largest_that_fits_is_proposed_and_nothing_is_kept(tmp_path):
    task = Counted()
    found = find_micro_batch(config(tmp_path, batch_size=24), task, None, device(task, 400), 1000)
    assert [each.size for each in found.costs] == [1, 2, 4, 8]
    assert [each.peak for each in found.costs] == [100, 200, 400, 0]
    assert (found.size, float(task.counted)) == (4, 0.0)
    assert str(found).endswith(name_settings("train with --micro-batch-size 4"))
    assert not list(tmp_path.iterdir())


def test_ranks_agree_on_what_fits_on_all_of_them(tmp_path):
    found = run(tried, 2, tmp_path, [800, 200])
    assert found == [([1, 2, 4], [100, 200, 0], 2, 0.0)] * 2


def test_training_after_it_is_training_without_it(tmp_path):
    lockstep.train(config(tmp_path / "a", exact=True), Ragged())
    task = Counted()
    find_micro_batch(config(tmp_path / "b"), task, None, device(task, 1000), 10**9)
    lockstep.train(config(tmp_path / "b", exact=True), Ragged())
    assert mark(tmp_path / "a") == mark(tmp_path / "b")


def test_a_tenth_stays_free_and_what_is_slower_is_not_taken():
    took = [
        SizeCost(1, 100, 1.0),
        SizeCost(2, 200, 0.5),
        SizeCost(4, 400, 0.505),
        SizeCost(8, 800, 0.6),
        SizeCost(16, 0, 0.0),
    ]
    assert [choose_size(took, total) for total in (10**6, 440, 300, 100)] == [4, 2, 2, 0]
    assert choose_size(took, 10**6, 10**6) == 0


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="measures a CUDA device, and this run has none"):
        find_micro_batch(config(tmp_path), Ragged())
