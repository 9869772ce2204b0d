"""The model that --model-name names for images: built in, of `timm`, or of `transformers`.

made = image_model(config, classes=data.classes, channels=data.channels, own_size=0, say=print)
logits = made.logits(made.build(), images)          # float [batch, made.channels, made.size, made.size]
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from lockstep.config.config import Config
from lockstep.config.hub_name import is_hub_name
from lockstep.errors import ConfigError
from lockstep.models.hf import repeated_blocks
from lockstep.models.hf_heads import IMAGES, HubClassifier, image_logits
from lockstep.models.resnet import ResNet
from lockstep.models.timm import TimmModel
from lockstep.models.vit import ViT, patch_for
from lockstep.tasks.hf import cache_of

__all__ = ["BUILT_IN", "DTYPES", "ImageModel", "image_model"]

BUILT_IN = ("builtin:resnet", "builtin:vit")
DTYPES = {"bf16-true": torch.bfloat16, "float64": torch.float64}  # of inputs, by --precision; else float32
_SIZE = 64  # where nobody says one

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model that was found, and not yet built.

    Attributes:
        build: a new one, drawn from torch's default generator or with its pretrained weights.
        logits: (model, images) -> float [batch, classes].
        blocks: its repeated blocks, in order; None: they are to be looked for.
        size, channels, mean, std: of the images that it takes.
        revision: the commit on the hub, else "".
        untrained: the modules that `build` drew last beside weights that it read, by name.
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


def image_model(config: Config, *, classes: Sequence[str], channels: int, own_size: int, say: Say) -> ImageModel:
    """What --model-name names, for images of these classes.

    Args:
        channels: of the data.
        own_size: height and width of the data's images where all have the same; 0: they have not.

    Raises:
        ConfigError: no such model, a package is missing, or --images.size does not fit it.
    """
    name, asked = config.model_name, config.model
    if name in BUILT_IN:
        if asked.pretrained:
            raise ConfigError(
                f"--model.pretrained: {name} has no pretrained weights; leave it out, or name a hub model"
            )
        return _built_in(config, len(classes), channels, config.images.size or own_size or _SIZE)
    if name.startswith("timm:"):
        source = TimmModel(name.removeprefix("timm:"), classes=len(classes), cache=cache_of(config), say=say)
        return ImageModel(
            partial(source.build, pretrained=asked.pretrained, dropout=asked.dropout),
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
    close = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.4)
    meant = f"did you mean {close[0]}?" if close else f"choose {' or '.join(BUILT_IN)}."
    raise ConfigError(
        f"--model-name '{name}' is unknown: {meant} A model of timm is timm:NAME, one of the hub OWNER/NAME, a local "
        "one its folder"
    )


def _built_in(config: Config, classes: int, channels: int, size: int) -> ImageModel:
    half = (0.5,) * channels
    blocks = _blocks
    build: Callable[[], nn.Module] = partial(ResNet, channels, classes, dropout=config.model.dropout)
    if config.model_name == "builtin:vit":
        build = partial(ViT, size, patch_for(size), channels, classes, dropout=config.model.dropout)
    return ImageModel(build, _plain, blocks, size, channels, half, half)


def _hub(config: Config, classes: Sequence[str], say: Say) -> ImageModel:
    asked = config.model
    if asked.dropout:
        raise ConfigError(
            f"--model.dropout is of the built-in models and timm's: leave it out with {config.model_name}"
        )
    source = HubClassifier(
        config.model_name,
        IMAGES,
        classes=classes,
        revision=asked.revision,
        trust_remote_code=asked.trust_remote_code,
        cache=cache_of(config),
        say=say,
    )
    dtype = DTYPES.get(config.precision, torch.float32)
    if source.channels not in (1, 3):
        raise ConfigError(
            f"--model-name {config.model_name} takes images of {source.channels} channels; here are 1 or 3"
        )
    return ImageModel(
        partial(source.build, dtype=dtype, pretrained=asked.pretrained),
        image_logits,
        repeated_blocks,
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
