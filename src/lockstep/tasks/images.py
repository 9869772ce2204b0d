"""Image classification: `lockstep train --task images`.

    task = make(Config(task="images"), say=print)       # scikit-learn's digits, a small ResNet

An item is an image. What is drawn for an image (the crop, whether it is mirrored) depends on (seed, epoch, sample)
alone: whoever loads a sample seeds torch's default generator so (see `data/fetch.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.config import Config
from lockstep.task import Task
from lockstep.tasks.columns import fingerprint_of, names_of
from lockstep.tasks.image_data import DIGITS, ImageData, Raw, open_images
from lockstep.tasks.image_models import DTYPES, ImageModel, image_model

__all__ = ["ImageClassification", "Prepared", "Preparing", "make"]

_TOP = 5


@dataclass(frozen=True, slots=True)
class Preparing:
    """How an image becomes what the model takes.

    Attributes:
        size, channels: of the model's images.
        mean, std: of each channel, of values from 0 to 1: they are taken off, and divided by.
        padding: pixels around an image before the random crop of training.
        flip: mirror half of the images of training.
        dtype: of the result.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int
    flip: bool
    dtype: torch.dtype


@final
class Prepared:
    """The samples of one split: (image [channels, size, size], its class).

    Args:
        augmented: crop and mirror at random; else the middle is taken.
    """

    def __init__(self, source: Raw, how: Preparing, *, augmented: bool) -> None:
        self.source, self.how = source, how
        self.augmented = augmented and bool(how.padding or how.flip)
        self.draws_random = self.augmented
        self._mean = torch.tensor(how.mean, dtype=how.dtype).reshape(-1, 1, 1)
        self._std = torch.tensor(how.std, dtype=how.dtype).reshape(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The sample; with `augmented` it draws from torch's default generator.

        Raises:
            ImageError: the image cannot be read.
        """
        how = self.how
        image = self.source.raw(index, channels=how.channels, size=how.size)
        if self.augmented:
            image = self._drawn(image)
        else:
            top, left = ((length - how.size) // 2 for length in image.shape[1:])
            image = image[:, top : top + how.size, left : left + how.size]
        return (image.to(how.dtype) / 255 - self._mean) / self._std, self.source.labels[index]

    def _drawn(self, image: Tensor) -> Tensor:
        """A random crop of the padded image, mirrored or not (He et al., arXiv 1512.03385, section 4.2)."""
        size, pad = self.how.size, self.how.padding
        image = F.pad(image, (pad, pad, pad, pad)) if pad else image
        top, left = (int(torch.randint(length - size + 1, ())) for length in image.shape[1:])
        image = image[:, top : top + size, left : left + size]
        if self.how.flip and bool(torch.rand(()) < 0.5):
            image = image.flip(-1)
        return image


@final
class ImageClassification(Task):
    """A class for each image.

    Args:
        data: the images.
        source: the model.
        how: see `Preparing`.
        label_smoothing: share of a label that goes to all classes alike, in training alone.
        pretrained: the model's weights are trained already.
        sources: what came from a hub: name -> revision.

    Attributes:
        classes: their names.
        sources: with the names of the classes, which the run's environment.json keeps.
    """

    reduction = "sum"
    item_name = "images"
    items_per_sample = 1

    def __init__(
        self,
        data: ImageData,
        source: ImageModel,
        how: Preparing,
        *,
        label_smoothing: float = 0.0,
        pretrained: bool = False,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.data, self.source, self.how, self._smoothing = data, source, how, label_smoothing
        self.classes = data.classes
        self.defaults = "fine-tuning" if pretrained else "images"
        self.fingerprint = fingerprint_of(data.classes, data.digest)
        self.sources = {**(sources or {}), "classes": names_of(data.classes)}

    def model(self) -> nn.Module:
        """The model, drawn from torch's default generator or with its pretrained weights."""
        return self.source.build()

    def untrained(self) -> Sequence[str]:
        """The last layer, where the weights are of other classes."""
        return self.source.untrained()

    def dataset(self, split: str) -> Prepared:
        """The samples of "train" or "evaluation". ValueError for any other split."""
        if split not in ("train", "evaluation"):
            raise ValueError(f"there is no split '{split}'; the splits are 'train' and 'evaluation'")
        training = split == "train"
        return Prepared(self.data.train if training else self.data.evaluation, self.how, augmented=training)

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Cross entropy in nats, summed over the images: a scalar in float32, or float64 for such logits."""
        images, labels = batch
        logits = _wide(self.source.logits(model, images))
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._smoothing)

    def evaluate(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """(cross entropy without smoothing, summed; "top1" and, of more than five classes, "top5")."""
        images, labels = batch
        logits = _wide(self.source.logits(model, images))
        best = logits.topk(min(_TOP, logits.shape[1]), dim=1).indices == labels[:, None]
        found = {"top1": (best[:, 0].sum(), len(labels))}
        if logits.shape[1] > _TOP:
            found["top5"] = (best.sum(), len(labels))
        return F.cross_entropy(logits, labels, reduction="sum"), found

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """The repeated blocks of a model that `model` built, not yet wrapped; None where they are to be looked for."""
        return self.source.blocks(model)


def make(config: Config, say: Callable[[str], None]) -> ImageClassification:
    """The task that the flags ask for.

    Raises:
        ConfigError: no such model, or a package is missing.
        DataError: see `image_data.open_images`.
    """
    data = open_images(config, say)
    digits = config.dataset_name == DIGITS
    source = image_model(config, classes=data.classes, channels=data.channels, own_size=8 * digits, say=say)
    asked = config.images
    padding = asked.padding if asked.padding >= 0 else source.size // 8
    how = Preparing(
        source.size,
        source.channels,
        source.mean,
        source.std,
        padding,
        asked.flip == "true" or (asked.flip == "auto" and not digits),
        DTYPES.get(config.precision, torch.float32),
    )
    revisions = {config.model_name: source.revision, config.dataset_name: data.revision}
    return ImageClassification(
        data,
        source,
        how,
        label_smoothing=asked.label_smoothing,
        pretrained=config.model.pretrained,
        sources={name: revision for name, revision in revisions.items() if revision},
    )


def _wide(logits: Tensor) -> Tensor:
    """In float32 at least: a loss in half precision is too coarse."""
    return logits if logits.dtype is torch.float64 else logits.float()
