"""Samples are compared by their content before step 1: what differs on one rank is named, and nothing else is."""

import dataclasses
import random
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import small_runs
import torch
from ranks import run
from toys import Ragged, Sentences

import lockstep
from lockstep.errors import DifferenceError
from lockstep.guards import contents
from lockstep.guards.contents import KEY, Contents, alike, digest
from lockstep.guards.samples import RetryingDataset

Image = pytest.importorskip("PIL.Image")
Pair = namedtuple("Pair", ["a", "b"])
FLOATS = torch.linspace(-1, 1, 600)


@dataclasses.dataclass
class Boxes:
    """Of a picture."""

    boxes: torch.Tensor
    name: str = "x"


def picture(shade):
    return Image.new("RGB", (5, 4), (shade, 9, 9))


class Nothing:
    """That nobody can look into."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.tensor([1, 2]), torch.tensor([[1, 2]])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (FLOATS, FLOATS.flip(0)),
        (FLOATS, FLOATS * 1.01),
        (torch.tensor([0.0, torch.nan]), torch.tensor([torch.nan, 0.0])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1j]), torch.tensor([2j])),
        (np.arange(4, dtype=np.uint16), np.arange(1, 5, dtype=np.uint16)),
        (np.array(["a"]), np.array(["b"])),
        (np.array([[1], "a"], dtype=object), np.array([[2], "a"], dtype=object)),
        (np.zeros(3, np.uint8), np.array([0, 1, 0], np.uint8)),
        (np.float32(1.0), np.float32(1.5)),
        (picture(3), picture(4)),
        ({"a": 1, "b": [2, (3,)]}, {"a": 1, "b": [2, (4,)]}),
        ({"a": 1}, {"b": 1}),
        (Pair(1, 2.5), Pair(1, 2.25)),
        (Boxes(FLOATS), Boxes(FLOATS, "y")),
        ([0.5, 0.25], [0.25, 0.5]),
        ({"x", "y"}, {"x", "z"}),
        ("cat", "dog"),
        (b"1", b"2"),
        (None, 0),
        (1, True),
        ([1, 2], [1, 2, 3]),
    ],
)
def test_a_digest_sees_what_differs_and_only_that(one, other):
    assert not alike(digest(one), digest(other))
    assert alike(digest(one), digest(one))
    assert digest(one)[2] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FLOATS, FLOATS * (1 + 1e-6)),  # another processor's rounding
        ({"a": 1, "b": 2}, OrderedDict(b=2, a=1)),
        (Path("/node/1/cat.jpg"), "/scratch/cat.jpg"),
        ({"x": FLOATS, "y": {f"{i}" for i in range(9)}}, {"x": FLOATS.clone(), "y": {f"{8 - i}" for i in range(9)}}),
    ],
)
def test_a_digest_passes_over_what_two_nodes_may_have_otherwise(one, other):
    assert alike(digest(one), digest(other))


def test_what_cannot_be_digested_is_named_and_the_rest_compared():
    first, second = digest({"x": 1, "graph": Nothing()}), digest({"x": 2, "graph": Nothing()})
    assert not alike(first, second)
    assert first[2] == [f"{__name__}.Nothing"]
    assert alike(first, digest({"x": 1, "graph": Nothing()}))
    assert digest(torch.eye(2).to_sparse())[2] == ["torch.Tensor"]


class Drawn:
    """Augmented by what is seeded, or by what is not."""

    own = random.Random(5)

    def __init__(self, seeded, size=9):
        self.seeded, self.size = seeded, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return [index, torch.rand(3), np.random.rand(2), random.random() if self.seeded else self.own.random()]


def read(*datasets, seed=3):
    sets = {str(name): RetryingDataset(each, retries=1, skips=0, rank=0) for name, each in enumerate(datasets)}
    return Contents(sets, seed)[KEY][0]


def test_a_few_samples_are_read_under_the_seeds_of_the_training(monkeypatch):
    monkeypatch.setattr(contents, "_ENOUGH", 60.0)  # whatever else the machine does
    found = read(Drawn(True), Drawn(False))
    names = [f"sample {index} of the {name}" for index in (0, 4, 8, 2, 6) for name in "01"]
    assert list(found) == names
    assert all((found[name] is None) == name.endswith("1") for name in names)  # two readings differ
    again, other = read(Drawn(True)), read(Drawn(True), seed=4)
    assert all(alike(again[name], found[name]) for name in again)
    assert not alike(other[names[0]], found[names[0]])


class Slow(Drawn):
    def __getitem__(self, index):
        raise FileNotFoundError(index) if index else TimeoutError


def test_error_counts_as_content_and_a_slow_set_is_read_once(monkeypatch):
    found = read(Slow(True))
    assert [each[0].split()[-1] for each in found.values()] == [*["TimeoutError"], *["FileNotFoundError"] * 4]
    monkeypatch.setattr(contents, "_ENOUGH", -1.0)
    assert list(read(Drawn(True))) == ["sample 0 of the 0"]
    assert list(read(Drawn(True, size=1))) == ["sample 0 of the 0"]


class Unlike(Ragged):
    """Rank 1 has other data, in one way or another."""

    rank = 0

    def __init__(self, way, rank):
        super().__init__()
        self.way, self.rank = way, rank

    def dataset(self, split):
        found = Sentences(40 if split == "train" else 6)
        odd = self.rank == 1
        if self.way == "content" and odd and split == "train":
            found.rows[-1, 3] += 1
        elif self.way == "evaluation":
            found.rows[0, 0] += split != "train" and odd
        elif self.way == "unreadable" and odd:
            found.kept = found.kept[:-1]
        elif self.way == "unseeded":
            found = Loud(40)
        return found


class Loud(Sentences):
    draws_random = True
    own = random.SystemRandom()

    def __getitem__(self, index):
        row = super().__getitem__(index)["input"].clone()
        row[:4] = torch.tensor([self.own.randrange(29) for _ in range(4)])
        return super().__getitem__(index) | {"input": row}


CASES = {
    "content": ("sample 39 of the training set", 0),
    "evaluation": ("sample 0 of the evaluation set", 0),
    "unreadable": ("IndexError", 0),
    "worker": ("sample 39 of the training set", 1),
    "unseeded": ("", 0),
    "": ("", 0),
}


def all_unlike(world, folder):
    found, contents._ENOUGH = [], 60.0
    for way, (_, workers) in CASES.items():
        config = small_runs.config(folder, experiment_name=f"r-{way}", max_steps=1, report=False)
        config = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, workers=workers),
            guards=dataclasses.replace(config.guards, retries=0),
        )
        try:
            lockstep.train(config, Unlike({"worker": "content"}.get(way, way), world.rank), world)
            found.append("")
        except DifferenceError as error:
            found.append(str(error))
    return found


def test_ranks_with_other_samples_are_refused_before_step_1(tmp_path):
    for said in run(all_unlike, 2, tmp_path):
        for (name, _), line in zip(CASES.values(), said, strict=True):
            assert name in line
            assert bool(line) == bool(name), line
            assert not line or "rank 1" in line
    assert "two readings differ" in (tmp_path / "r-unseeded" / "logs" / "rank-00000.log").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"r-", "r-unseeded"}
