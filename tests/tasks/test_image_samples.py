"""lockstep.image_folder: a folder of images as the dataset of one's own task."""

import pytest
import torch
from pictures_here import draw, write_images
from ranks import run
from refusals import refuses
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.errors import ConfigError, DataError


class Shapes(lockstep.Task):
    """A model of the user's, on a folder of images."""

    def __init__(self, folder):
        self.folder = folder

    def model(self):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

    def dataset(self, split):
        return lockstep.image_folder(self.folder, split, size=8)

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)


def trained(world, folder, runs):
    """The fingerprints of the weights at the end of runs, one after the other."""
    found = []
    for name, changes in runs:
        sizes = {"batch_size": 8, "micro_batch_size": 4, "max_steps": 4, "exact": True}
        config = lockstep.Config(experiment_name=name, save_dir=str(folder), device="cpu", **{**sizes, **changes})
        result = lockstep.train(config, Shapes(folder / "shapes"), world)
        found.append(checkpoint.fingerprint(checkpoint.newest(result.folder, say=print)))
    return found


def test_ranks_workers_and_a_resume_are_bitwise_identical(tmp_path):
    write_images(tmp_path / "shapes")
    [one] = run(trained, 1, tmp_path, [("one", {}), ("part", {"stop_at": 2})])
    two = run(trained, 2, tmp_path, [("two", {"data": {"workers": 1}}), ("part", {})])
    assert one[0] != one[1]
    assert two == [[one[0], one[0]]] * 2


def test_a_folder_is_split_resized_and_scaled(tmp_path):
    folder = write_images(tmp_path / "shapes")
    train, evaluation = (lockstep.image_folder(folder, split, size=10) for split in ("train", "evaluation"))
    assert (len(train), len(evaluation), train.classes) == (19, 5, ("circle", "square"))
    assert not {*train.source.names} & {*evaluation.source.names}
    assert train.draws_random
    assert not evaluation.draws_random
    image, label = evaluation[0]
    assert (image.dtype, image.shape, label.dtype, label.shape) == (torch.float32, (3, 10, 10), torch.int64, ())
    assert -1 <= image.min() < 0 < image.max() <= 1
    assert label == evaluation.labels[0]
    scaled = lockstep.image_folder(folder, "evaluation", size=10, mean=(0, 0, 0), std=(0.5, 1, 2))[0][0]
    expected = (image + 1) / 2 / torch.tensor([0.5, 1, 2]).reshape(3, 1, 1)
    torch.testing.assert_close(scaled, expected)
    plain = lockstep.image_folder(folder, size=10, flip=False, padding=0)
    assert not plain.draws_random


def test_parts_of_the_folder_itself_come_first(tmp_path):
    folder = tmp_path / "shapes"
    write_images(folder / "train", count=3)
    write_images(folder / "val", count=2)
    assert [len(lockstep.image_folder(folder, split)) for split in ("train", "evaluation")] == [6, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"split": "test"}, {"size": 0}, {"held_out": 1}, {"padding": -1}, {"mean": (0.5,)}, {"std": (1.0, 0.0, 1.0)}),
        *({"size": "64"}, {"size": 16.5}, {"held_out": "half"}, {"padding": "8"}, {"mean": 0.5}, {"std": "abc"}),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(tmp_path, wrong):
    [(name, value)] = wrong.items()
    with refuses(ConfigError, name, repr(value)):
        lockstep.image_folder(tmp_path, **wrong)


def test_wrong_folders_are_named(tmp_path):
    with refuses(DataError, "lockstep.image_folder", "nowhere") as caught:
        lockstep.image_folder(tmp_path / "nowhere")
    # That is a value of --dataset-name alone.
    assert "builtin:digits" not in str(caught.value)
    write_images(tmp_path, classes=("circle",))
    with refuses(DataError, "circle"):
        lockstep.image_folder(tmp_path)
    (tmp_path / "square").mkdir()
    draw(1, 0).save(tmp_path / "square" / "1.png")
    (tmp_path / "square" / "notes.txt").write_text("not an image")
    with refuses(DataError, "square/notes.txt"):
        lockstep.image_folder(tmp_path)


def test_a_missing_folder_for_the_evaluation_is_named(tmp_path):
    write_images(tmp_path / "shapes" / "train")
    with refuses(DataError, "train/", "shapes/validation"):
        lockstep.image_folder(tmp_path / "shapes")
    assert len(lockstep.image_folder(tmp_path / "shapes" / "train")) == 19
