"""Read images as samples of a task: resized, augmented in training, and normalised.

    samples = lockstep.image_folder("photos", "train", size=64)
    image, label = samples[0]               # float32 [3, 64, 64], int64 []
    samples.classes[label]                  # the name of its folder

The random choices for an image draw from torch's default generator, which the loader seeds by (seed, epoch, sample).
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep.data.found import LIMIT, FoundFiles
from lockstep.errors import ConfigError
from lockstep.tasks.image_data import Raw, check_pillow, open_folder

__all__ = ["ImageSamples", "ImageTransform", "default_padding", "image_folder"]

_LOG = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """The conversion of an image to the model's input.

    Attributes:
        size, channels: of the model's images.
        mean, std: of each channel, for values from 0 to 1: subtracted, and divided by.
        padding: pixels around an image before the random crop of training.
        flip: mirror half of the images of training.
        dtype: of the result.
        change: changes an image of training at random, uint8 [channels, size, size]; None: does not.
    """

    size: int
    channels: int
    mean: Sequence[float]
    std: Sequence[float]
    padding: int
    flip: bool
    dtype: torch.dtype
    change: Callable[[Tensor], Tensor] | None = None


def default_padding(size: int) -> int:
    """Return the padding before a random crop: an eighth of the size.

    He et al., arXiv 1512.03385, pad images of 32 pixels by 4.
    """
    return size // 8


@final
class ImageSamples(Dataset[tuple[Tensor, Tensor]]):
    """The samples of a split: (image [channels, size, size], its class as an int64 of no dimension).

    Args:
        source: the images.
        how: their conversion.
        classes: the names of the classes, in the order of the labels.
        augmented: crop, mirror and change at random; else crop the centre.
        one_hot: a label is float [classes] with a 1 at the class, which the collation mixes.
    """

    def __init__(
        self, source: Raw, how: ImageTransform, classes: Sequence[str], *, augmented: bool, one_hot: bool = False
    ) -> None:
        self.source = source
        self.how = how
        self.classes = tuple(classes)
        self.augmented = augmented and bool(how.padding or how.flip or how.change)
        self._one_hot = one_hot
        self.draws_random = self.augmented or one_hot
        self._mean = torch.tensor(how.mean, dtype=how.dtype).reshape(-1, 1, 1)
        self._std = torch.tensor(how.std, dtype=how.dtype).reshape(-1, 1, 1)

    @property
    def labels(self) -> Tensor:
        """The class of each sample, int64 [samples]."""
        return self.source.labels

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the sample; with `augmented` it draws from torch's default generator.

        Raises:
            ImageError: the image cannot be read.
        """
        how = self.how
        image = self.source.raw(index, channels=how.channels, size=how.size)
        if self.augmented:
            image = self._augment(image)
        else:
            top, left = ((length - how.size) // 2 for length in image.shape[1:])
            image = image[:, top : top + how.size, left : left + how.size]
        label = self.source.labels[index]
        if self._one_hot:
            label = F.one_hot(label, len(self.classes)).to(how.dtype)
        # Bytes become values from 0 to 1.
        return (image.to(how.dtype) / 255 - self._mean) / self._std, label

    def _augment(self, image: Tensor) -> Tensor:
        """Crop the padded image at random, and maybe mirror it.

        He et al., arXiv 1512.03385, section 4.2.
        """
        size = self.how.size
        pad = self.how.padding
        image = F.pad(image, (pad, pad, pad, pad)) if pad else image
        top, left = (int(torch.randint(length - size + 1, ())) for length in image.shape[1:])
        image = image[:, top : top + size, left : left + size]
        if self.how.flip and bool(torch.rand(()) < 0.5):
            image = image.flip(-1)
        if self.how.change:
            return self.how.change(image)
        return image


def image_folder(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    size: int = 64,
    held_out: float = 0.2,
    flip: bool = True,
    padding: int | None = None,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
) -> ImageSamples:
    """Open a folder with a subfolder of images for each class.

    A sample is (image, label): float32 [3, size, size] in RGB, and an int64 without dimensions. An image is rotated by
    its EXIF orientation, its shorter side is resized to `size`, and it is cropped to a square: at random in training,
    else at its centre. The random choices depend on the run's seed, the epoch and the sample alone. The dataset has
    `classes`, the names of the folders in the order of the labels, and `labels`, int64 [samples].

    Args:
        path: PATH/CLASS/FILE; or PATH/train/CLASS/FILE with PATH/validation, PATH/val or PATH/test for evaluation.
        split: "train" or "evaluation".
        size: height and width of an image, in pixels.
        held_out: share of the images for evaluation, if the folder has no such part; the same in every run.
        flip: mirror half of the images of training.
        padding: black pixels around an image of training before its random crop; None: an eighth of `size`.
        mean, std: of each channel, for values from 0 to 1: subtracted, and divided by. The defaults give -1 to 1; a
            pretrained model names its own.

    Raises:
        ConfigError: an argument is invalid, or the package pillow is missing.
        DataError: no such folder, fewer than two classes, a class without images, or more than a hundredth of the files
            are no images.
    """
    label = f"lockstep.image_folder {os.fspath(path)}"
    _check_arguments(split, size, held_out, padding)
    mean = _channel_values("mean", mean)
    std = _channel_values("std", std)
    if not all(std):
        raise ConfigError(f"lockstep.image_folder: std is {std}: it divides the values, so none may be 0")
    # Before the folder is searched, which may take minutes.
    check_pillow(label)
    training = split == "train"
    # The first call reports the files that are left out.
    data = open_folder(path, held_out, FoundFiles(label, flag=""), LIMIT, _LOG.info if training else _LOG.debug)
    how = ImageTransform(
        *(size, 3, mean, std),
        default_padding(size) if padding is None else padding,
        flip,
        torch.float32,
    )
    return ImageSamples(data.train if training else data.evaluation, how, data.classes, augmented=training)


def _check_arguments(split: str, size: int, held_out: float, padding: int | None) -> None:
    # A size that is no integer would be reported as a fault of the first image.
    if split not in ("train", "evaluation"):
        raise ConfigError(f"lockstep.image_folder: split is {split!r}: it must be 'train' or 'evaluation'")
    if not isinstance(size, Integral) or size < 1:
        raise ConfigError(f"lockstep.image_folder: size is {size!r}: it must be a whole number of at least 1")
    if not isinstance(held_out, Real) or not 0 < held_out < 1:
        raise ConfigError(f"lockstep.image_folder: held_out is {held_out!r}: it must be above 0 and below 1")
    if padding is not None and (not isinstance(padding, Integral) or padding < 0):
        raise ConfigError(f"lockstep.image_folder: padding is {padding!r}: it must be a whole number of at least 0")


def _channel_values(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Return `values` as three floats; a single number or strings raise ConfigError."""
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3:
        raise ConfigError(
            f"lockstep.image_folder: {name} is {values!r}: it must be three numbers, for red, green and blue"
        )
    return numbers
