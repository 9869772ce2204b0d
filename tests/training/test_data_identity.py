"""Data keep their identity: a random split is drawn once, and a resume on other samples is refused."""

import dataclasses
import random

import numpy as np
import pytest
import small_runs
import torch
from ranks import run
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import lockstep
from lockstep.errors import ResumeError
from lockstep.run_state import RunState
from lockstep.training.start.resume import accept_contents

SIZE = 50


class Drawn(lockstep.Task):
    """Counts how often each sample is trained on: a weight for each. The split is drawn where the data are made."""

    reduction = "sum"
    ways = ("torch", "numpy", "random")

    def __init__(self, way):
        self.way, self.made = way, []

    def model(self):
        return nn.Embedding(SIZE, 1).to(torch.float64)

    def dataset(self, split):
        rows = TensorDataset(torch.arange(SIZE))
        if self.way == "torch":
            parts = [each.indices for each in random_split(rows, [40, 10])]
        elif self.way == "numpy":
            parts = np.split(np.random.permutation(SIZE), [40])
        else:
            shuffled = random.sample(range(SIZE), SIZE)
            parts = [shuffled[:40], shuffled[40:]]
        indices = sorted(map(int, parts[split != "train"]))
        self.made.append((split, indices))
        return Subset(rows, indices)

    def order(self, samples, seed):
        assert len(self.dataset("train")) == samples  # as for a sampler by labels
        return torch.utils.data.SequentialSampler(range(samples))

    def loss(self, model, batch):
        return model(batch[0]).sum()


def drawn(world, folder, stop):
    """The splits of each call of `dataset`, and whether the caller's generators stay as they are."""
    random.seed(world.rank)
    np.random.seed(world.rank)
    torch.manual_seed(world.rank)
    found = []
    for way in Drawn.ways:
        task = Drawn(way)
        config = small_runs.config(folder, experiment_name=way, eval_freq=6, stop_at=stop, seed=3)
        result = lockstep.train(config, task, world)
        found.append((task.made, result.status))
    return found


def test_split_drawn_in_dataset_is_one_for_splits_and_ranks(tmp_path):
    alone = drawn(lockstep.World(), tmp_path, 5)
    for (made, status), others in zip(alone, zip(*run(drawn, 2, tmp_path, 0, timeout=180.0), strict=True), strict=True):
        assert status == "stopped"
        assert [split for split, _ in made[:3]] == ["train", "evaluation", "train"]
        assert all(other == made[0] for other in made[2:])  # of `order`
        assert sorted(made[0][1] + made[1][1]) == list(range(SIZE))
        assert list(others) == [(made, "finished")] * 2
    splits = {tuple(made[0][1]) for made, _ in alone}
    torch.manual_seed(3)
    assert tuple(sorted(random_split(range(SIZE), [40, 10])[0].indices)) in splits  # as in a script with that seed


class Files(Dataset):
    """As a folder that is listed in the file system's order."""

    def __init__(self, ids):
        self.ids = torch.as_tensor(ids)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], torch.rand(2)


CHANGES = {
    "": "",
    "reversed": "sample 0 of the training set",
    "replaced": "sample 39 of the training set",
    "held-out": "sample 0 of the evaluation set 'far'",
}


class Listed(lockstep.Task):
    reduction = "sum"

    def __init__(self, change=""):
        self.change = change

    def model(self):
        return nn.Embedding(100, 1).to(torch.float64)

    def dataset(self, split):
        ids = list(range(40))
        if split != "train":
            return {"near": Files(ids[:9]), "far": Files(ids[10:18][:: -1 if self.change == "held-out" else 1])}
        if self.change == "reversed":
            ids.reverse()
        elif self.change == "replaced":
            ids[30:] = range(60, 70)
        return Files(ids)

    def loss(self, model, batch):
        return model(batch[0]).sum()


def resumed(world, folder):
    """Return the outcome of a resume on each changed dataset, with and without --resume-anyway."""
    found = {}
    for change in CHANGES:
        config = small_runs.config(folder, experiment_name=f"r-{change}")
        try:
            found[change] = lockstep.train(config, Listed(change), world).status
        except ResumeError as error:
            found[change] = str(error)
            lockstep.train(dataclasses.replace(config, resume_anyway=True), Listed(change), world)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_data_of_the_same_length_are_refused_by_name(tmp_path, world_size):
    for change in CHANGES:
        config = small_runs.config(tmp_path, experiment_name=f"r-{change}", stop_at=5)
        assert lockstep.train(config, Listed(), lockstep.World()).status == "stopped"
    for found in run(resumed, world_size, tmp_path, timeout=180.0):
        assert found.pop("") == "finished"
        for change, line in found.items():
            assert CHANGES[change] in line
            assert "--resume-anyway" in line
            assert "\n" not in line
    for change, label in CHANGES.items():
        log = (tmp_path / f"r-{change}" / "logs" / "rank-00000.log").read_text()
        assert ("--resume-anyway continues with other data" in log) == bool(change)
        assert label in log
        # The next resume compares with the data that were accepted.
        with lockstep.Run(small_runs.config(tmp_path, experiment_name=f"r-{change}"), Listed(change)) as again:
            assert list(again) == []


def test_a_rollback_keeps_the_digests_of_the_first_start(tmp_path):
    first, changed = ["0", [], []], ["1", [], []]
    state = RunState(contents={"sample 0": first})
    found = {"sample 0": changed, "sample 9": changed, "sample 5": None}
    assert accept_contents(tmp_path, state, small_runs.config(tmp_path), found, compares=False) == []
    assert state.contents == {"sample 0": first, "sample 9": changed}
