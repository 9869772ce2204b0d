"""Classify images: `lockstep train --task images`.

    task = make(Config(task="images"), say=print)       # scikit-learn's digits, a small ResNet

An item is an image. The random choices for an image (crop, mirroring) depend only on (seed, epoch, sample): the
loader seeds torch's default generator for each sample (see `data/loader.py`). Mixup and cutmix draw for a
micro-batch, by (seed, step, micro-batch).
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.fields import is_hub_name
from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.files import cache_folder
from lockstep.models.hf import repeated_blocks
from lockstep.models.hf_heads import IMAGES, HubClassifier, image_logits
from lockstep.models.timm import TimmModel
from lockstep.models.vision import ResNet, ViT, patch_for
from lockstep.task import Task
from lockstep.tasks.columns import fingerprint_of, names_of
from lockstep.tasks.image_data import DIGITS, ImageData, open_images
from lockstep.tasks.image_mixing import mixing, rand_augment
from lockstep.tasks.image_samples import ImageSamples, ImageTransform, default_padding

__all__ = [
    "DTYPES",
    "make",
]


_BUILT_IN = ("builtin:resnet", "builtin:vit")
# Dtypes of the inputs by --precision; float32 for the others.
DTYPES = {"bf16-true": torch.bfloat16, "float64": torch.float64}
# Default height and width of the images, in pixels.
_SIZE = 64

Say = Callable[[str], None]
Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model that was located, and not yet built.

    Attributes:
        build: makes a new one, initialised from torch's default generator or with pretrained weights.
        logits: (model, images) -> float [batch, classes].
        blocks: returns its repeated blocks, in order; None: to be searched for.
        size, channels, mean, std: of its input images.
        revision: the commit on the hub, else "".
        untrained: returns the modules, by name, that the last `build` initialised while it read the other weights.
    """

    build: Callable[[], nn.Module]
    logits: Callable[[nn.Module, Tensor], Tensor]
    blocks: Callable[[nn.Module], Sequence[nn.Module] | None]
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    revision: str = ""
    untrained: Callable[[], Sequence[str]] = tuple


def _image_model(config: Config, *, classes: Sequence[str], channels: int, own_size: int, say: Say) -> ImageModel:
    """Locate the model of --model-name, for images of these classes.

    Args:
        channels: of the data.
        own_size: height and width of the data's images if all have the same; else 0.

    Raises:
        ConfigError: no such model, a package is missing, or --images.size does not fit it.
    """
    name = config.model_name
    model_config = config.model
    if name in _BUILT_IN:
        if model_config.pretrained:
            raise ConfigError(
                f"--model.pretrained: {name} has no pretrained weights; drop the flag, or use a hub model"
            )
        return _built_in(config, len(classes), channels, config.images.size or own_size or _SIZE)
    if name.startswith("timm:"):
        source = TimmModel(
            name.removeprefix("timm:"), classes=len(classes), cache=cache_folder(config.data.cache), say=say
        )
        return ImageModel(
            partial(source.build, pretrained=model_config.pretrained, dropout=model_config.dropout),
            _plain,
            lambda model: None,
            config.images.size or source.size,
            3,
            source.mean,
            source.std,
            untrained=lambda: source.untrained,
        )
    if is_hub_name(name) or (Path(name).expanduser() / "config.json").is_file():
        return _hub(config, classes, say)
    close = difflib.get_close_matches(name, _BUILT_IN, n=1, cutoff=0.4)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"choose {' or '.join(_BUILT_IN)}."
    raise ConfigError(
        f"--model-name '{name}' is unknown: {hint} Other models: timm:NAME, OWNER/NAME on the hub, or a local folder"
    )


def _built_in(config: Config, classes: int, channels: int, size: int) -> ImageModel:
    # The built-in models take values from -1 to 1.
    half = (0.5,) * channels
    blocks = _blocks
    build: Callable[[], nn.Module] = partial(ResNet, channels, classes, dropout=config.model.dropout)
    if config.model_name == "builtin:vit":
        build = partial(ViT, size, patch_for(size), channels, classes, dropout=config.model.dropout)
    return ImageModel(build, _plain, blocks, size, channels, half, half)


def _hub(config: Config, classes: Sequence[str], say: Say) -> ImageModel:
    model_config = config.model
    if model_config.dropout:
        raise ConfigError(
            f"--model.dropout works only with the built-in models and timm's, not {config.model_name}; drop the flag"
        )
    source = HubClassifier(
        config.model_name,
        IMAGES,
        classes=classes,
        revision=model_config.revision,
        trust_remote_code=model_config.trust_remote_code,
        cache=cache_folder(config.data.cache),
        say=say,
    )
    dtype = DTYPES.get(config.precision, torch.float32)
    if source.channels not in (1, 3):
        raise ConfigError(
            f"--model-name {config.model_name} takes images of {source.channels} channels; use a model with 1 or 3"
        )
    return ImageModel(
        partial(source.build, dtype=dtype, pretrained=model_config.pretrained),
        image_logits,
        repeated_blocks,
        # 224 pixels is ImageNet's usual size.
        config.images.size or source.size or 224,
        source.channels,
        source.mean,
        source.std,
        source.revision,
        lambda: source.untrained,
    )


def _plain(model: nn.Module, images: Tensor) -> Tensor:
    return cast(Tensor, model(images))


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(cast(ResNet | ViT, model).blocks)


# The metric "top5" counts a class among the five likeliest.
_TOP = 5


@final
class ImageClassification(Task):
    """Task that predicts a class for each image.

    Args:
        data: the images.
        source: the model.
        how: see `ImageTransform`.
        label_smoothing: share of a label that is spread evenly over all classes, in training only.
        mix: mixes the images and labels of a micro-batch of training; None: does not.
        pretrained: the model's weights are pretrained.
        sources: name -> revision of everything from a hub.

    Attributes:
        classes: their names.
        sources: with the names of the classes, for the run's environment.json.
    """

    reduction = "sum"
    item_name = "images"
    items_per_sample = 1

    def __init__(
        self,
        data: ImageData,
        source: ImageModel,
        how: ImageTransform,
        *,
        label_smoothing: float = 0.0,
        mix: Mix | None = None,
        pretrained: bool = False,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.data = data
        self.source = source
        self.how = how
        self._smoothing = label_smoothing
        self._mix = mix
        self.classes = data.classes
        self.defaults = "fine-tuning" if pretrained else "images"
        self.fingerprint = fingerprint_of(data.classes, data.digest)
        self.sources = {**(sources or {}), "classes": names_of(data.classes)}

    def model(self) -> nn.Module:
        """Build the model, initialised from torch's default generator or with pretrained weights."""
        return self.source.build()

    def untrained(self) -> Sequence[str]:
        """Return the last layer, if the weights are for other classes."""
        return self.source.untrained()

    def dataset(self, split: str) -> ImageSamples:
        """Return the samples of "train" or "evaluation".

        Raises:
            ValueError: any other split.
        """
        if split not in ("train", "evaluation"):
            raise ValueError(f"there is no split '{split}'; the splits are 'train' and 'evaluation'")
        training = split == "train"
        source = self.data.train if training else self.data.evaluation
        mixes = training and self._mix is not None
        return ImageSamples(source, self.how, self.classes, augmented=training, one_hot=mixes)

    def collate(self, samples: list[Any]) -> Sequence[Tensor]:
        """Combine samples into (images, labels), and mix those of training."""
        images, labels = super().collate(samples)
        # Only labels of training are shares of the classes; see `ImageSamples`.
        if self._mix and labels.dim() == 2:
            images, mixed = self._mix(images, labels.argmax(1))
            labels = mixed.to(labels.dtype)
        return images, labels

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the cross entropy in nats, summed over the images.

        It is a scalar in float32, or float64 for such logits.
        """
        images, labels = batch
        logits = _wide(self.source.logits(model, images))
        # Mixed labels are shares of the classes, which must have the dtype of the logits.
        if labels.dim() == 2:
            labels = labels.to(logits.dtype)
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._smoothing)

    def evaluate(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return (summed cross entropy without smoothing, metrics).

        The metrics are "top1" and, with more than five classes, "top5".
        """
        images, labels = batch
        logits = _wide(self.source.logits(model, images))
        best = logits.topk(min(_TOP, logits.shape[1]), dim=1).indices == labels[:, None]
        metrics = {"top1": (best[:, 0].sum(), len(labels))}
        if logits.shape[1] > _TOP:
            metrics["top5"] = (best.sum(), len(labels))
        return F.cross_entropy(logits, labels, reduction="sum"), metrics

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Return the repeated blocks of an unwrapped model from `model`; None: to be searched for."""
        return self.source.blocks(model)


def make(config: Config, say: Callable[[str], None]) -> ImageClassification:
    """Make the task of the flags.

    Raises:
        ConfigError: no such model, or a package is missing.
        DataError: see `image_data.open_images`.
    """
    data = open_images(config, say)
    digits = config.dataset_name == DIGITS
    # The digits are 8 x 8 pixels.
    source = _image_model(config, classes=data.classes, channels=data.channels, own_size=8 * digits, say=say)
    image_config = config.images
    padding = image_config.padding if image_config.padding >= 0 else default_padding(source.size)
    how = ImageTransform(
        source.size,
        source.channels,
        source.mean,
        source.std,
        padding,
        image_config.flip == "true" or (image_config.flip == "auto" and not digits),
        DTYPES.get(config.precision, torch.float32),
        rand_augment(image_config.randaugment) if image_config.randaugment else None,
    )
    mixup = image_config.mixup
    cutmix = image_config.cutmix
    revisions = {config.model_name: source.revision, config.dataset_name: data.revision}
    return ImageClassification(
        data,
        source,
        how,
        label_smoothing=image_config.label_smoothing,
        mix=mixing(mixup, cutmix, classes=len(data.classes)) if mixup or cutmix else None,
        pretrained=config.model.pretrained,
        sources={name: revision for name, revision in revisions.items() if revision},
    )


def _wide(logits: Tensor) -> Tensor:
    """Convert to float32 at least: a loss in half precision is too coarse."""
    if logits.dtype is torch.float64:
        return logits
    return logits.float()
