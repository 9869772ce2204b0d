"""RandAugment, mixup and cutmix of torchvision. Only this file imports the package.

change = rand_augment(9)                        # uint8 [channels, height, width] -> the same
mix = mixing(0.2, 1.0, classes=10)              # images [batch, ...], labels int64 [batch] -> mixed images, shares

They draw from torch's default generator, which the loader seeds.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.extras import install_extra

__all__ = [
    "mixing",
    "rand_augment",
]


def rand_augment(magnitude: int) -> Callable[[Tensor], Tensor]:
    """Make RandAugment: two random operations on each image. Cubuk et al., arXiv 1909.13719.

    Args:
        magnitude: of the operations, from 1 to 30.

    Raises:
        ConfigError: torchvision is not installed.
    """
    made: Callable[[Tensor], Tensor] = _transforms("--images.randaugment").RandAugment(magnitude=magnitude)
    return made


def mixing(mixup: float, cutmix: float, *, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Make mixup, cutmix, or either of them at random for each batch.

    Zhang et al., arXiv 1710.09412; Yun et al., arXiv 1905.04899.

    Args:
        mixup, cutmix: alpha of the Beta distribution that the shares are drawn from; 0: not used.
        classes: their number.

    Returns:
        (images [batch, ...], labels int64 [batch]) -> (images, labels [batch, classes]), each row's sum 1.

    Raises:
        ConfigError: torchvision is not installed.
    """
    transforms = _transforms("--images.mixup" if mixup else "--images.cutmix")
    if mixup:
        chosen = [transforms.MixUp(alpha=mixup, num_classes=classes)]
    else:
        chosen = []
    chosen += [transforms.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    made: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = (
        chosen[0] if len(chosen) == 1 else transforms.RandomChoice(chosen)
    )
    return made


def _transforms(flag: str) -> Any:
    try:
        # torchvision is optional.
        from torchvision.transforms import v2  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package torchvision: {install_extra('torchvision')}") from error
    except RuntimeError as error:
        # torchvision raises it if it was built for another torch.
        raise ConfigError(f"{flag}: the installed torchvision does not fit this torch: {error}") from error
    return v2
