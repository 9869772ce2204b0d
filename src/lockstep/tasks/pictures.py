"""Image files as tensors. The only file that needs `pillow`.

image = opened("cat.jpg", channels=3, size=64)          # uint8 [3, height, width], the shorter side 64
"""

import io
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError

__all__ = ["SUFFIXES", "ImageError", "check_installed", "opened"]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


class ImageError(Exception):
    """An image that cannot be read. `filename` is its path, or "" where it has none."""

    def __init__(self, filename: str, told: str) -> None:
        super().__init__(told)
        self.filename = filename

    def __reduce__(self) -> tuple[type["ImageError"], tuple[str, str]]:
        return ImageError, (self.filename, str(self))


def check_installed(flag: str) -> None:
    """Raises ConfigError where the package is missing; `flag` is what needs it."""
    _pillow(flag)


def opened(source: str | PathLike[str] | bytes, *, channels: int, size: int, name: str = "") -> Tensor:
    """The image, turned as its camera held it, its shorter side resized to `size`: uint8 [channels, height, width].

    Args:
        source: its path, or its bytes.
        channels: 1 for grey, 3 for red, green and blue. 16-bit grey loses its lower byte.
        name: for messages, where `source` is bytes.

    Raises:
        ImageError: it is damaged, cut off, or no image.
    """
    pillow = _pillow("an image")
    name = name if isinstance(source, bytes) else str(source)
    try:
        with pillow.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            image = _plain(pillow, pillow.ImageOps.exif_transpose(file), channels)
        width, height = image.size
        if min(width, height) != size:
            shape = (max(size, round(width * size / height)), size)
            if height > width:
                shape = (size, max(size, round(height * size / width)))
            image = image.resize(shape, pillow.Image.Resampling.BILINEAR)
        pixels = np.array(image, dtype=np.uint8).reshape(*image.size[::-1], channels)
    except Exception as error:  # a damaged file makes the decoders raise whatever they please
        told = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise ImageError(name, told) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _plain(pillow: Any, image: Any, channels: int) -> Any:
    if image.mode.startswith("I;16"):
        image = pillow.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose range nobody says; save it with 8 or 16 bits")
    return image.convert("L" if channels == 1 else "RGB")


def _pillow(flag: str) -> Any:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package pillow: pip install 'torch-lockstep[images]'") from error
    return PIL
