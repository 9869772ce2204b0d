"""Open images with classes: scikit-learn's digits, class folders, or a hub table.

data = open_images(config, say)         # opened, and not yet read
split = data.train
split.raw(5, channels=3, size=64)       # uint8 [3, height, width]
split.labels[5]                         # its class, an index into data.classes
"""

import io
import itertools
import os
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from lockstep.config.fields import is_hub_name
from lockstep.config.schema import Config
from lockstep.data.found import FoundFiles
from lockstep.data.hold_out import split_samples
from lockstep.errors import ConfigError, DataError
from lockstep.extras import install_extra
from lockstep.files import cache_folder
from lockstep.tasks.columns import class_labels, digits, find_column
from lockstep.text.hub import DataRequest, open_table, table_files

__all__ = [
    "DIGITS",
    "ImageData",
    "Raw",
    "check_pillow",
    "open_folder",
    "open_images",
]


# Suffixes of the files that are read as images.
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
# First bytes of PNG, JPEG, BMP, GIF, WebP (RIFF), TIFF, PGM and PPM files.
_HEADERS = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"BM", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"P2", b"P3", b"P5", b"P6")


# Threads that read the first bytes of files, and the files of a thread at a time.
_READERS = 8
_BATCH = 256


class ImageError(Exception):
    """Error of an image that cannot be read.

    `filename` is its path, or "" if it has none.
    """

    def __init__(self, filename: str, message: str) -> None:
        super().__init__(message)
        self.filename = filename

    def __reduce__(self) -> tuple[type["ImageError"], tuple[str, str]]:
        # Loader processes pickle the error; by default only its message would be passed to `__init__`.
        return ImageError, (self.filename, str(self))


def check_pillow(flag: str) -> None:
    """Check that pillow is installed; `flag` names what needs it.

    Raises:
        ConfigError: it is not.
    """
    _pillow(flag)


def open_image(source: str | PathLike[str] | bytes, *, channels: int, size: int, name: str = "") -> Tensor:
    """Read an image, with its shorter side resized to `size`: uint8 [channels, height, width].

    It is rotated as its EXIF orientation requires.

    Args:
        source: its path, or its bytes.
        channels: 1 for grey, 3 for RGB. 16-bit grey loses its lower byte.
        name: for messages, if `source` is bytes.

    Raises:
        ImageError: it is damaged, truncated, or no image.
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
    except Exception as error:
        # Decoders may raise any exception on a damaged file.
        message = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise ImageError(name, message) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _plain(pillow: Any, image: Any, channels: int) -> Any:
    if image.mode.startswith("I;16"):
        # 16-bit grey keeps its upper byte.
        image = pillow.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixel mode {image.mode} has no defined range; save it with 8 or 16 bits")
    return image.convert("L" if channels == 1 else "RGB")


def _pillow(flag: str) -> Any:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package pillow: {install_extra('images')}") from error
    return PIL


DIGITS = "builtin:digits"
# Names of the evaluation split's folder, in order of preference.
_EVALUATION = ("validation", "valid", "val", "dev", "evaluation", "eval", "test")

Say = Callable[[str], None]


class Raw(Protocol):
    """The images of a split.

    Attributes:
        labels: int64 [samples].
    """

    labels: Tensor

    def raw(self, index: int, *, channels: int, size: int) -> Tensor:
        """Read an image as uint8 [channels, height, width] with the shorter side `size`.

        Raises:
            ImageError: it cannot be read.
        """


@dataclass(frozen=True, slots=True)
class ImageData:
    """Both splits of image data.

    Attributes:
        classes: their names, in the order of the labels.
        channels: of the images: 1 or 3.
        digest: hex; of everything that determines the samples: for a folder the names and sizes of its files.
        revision: the commit on the hub, "" for local data.
    """

    train: Raw
    evaluation: Raw
    classes: tuple[str, ...]
    channels: int
    digest: str
    revision: str = ""


def open_images(config: Config, say: Say) -> ImageData:
    """Open the data of --dataset-name.

    Raises:
        ConfigError: a package is missing.
        DataError: no such data, no images, no class folders, a single class, or other classes in the evaluation.
    """
    name = config.dataset_name
    if name == DIGITS:
        return _digits(config.data.evaluation)
    if name.startswith("builtin:"):
        raise DataError(f"--dataset-name {name}: unknown; the built-in images are {DIGITS}")
    check_pillow(f"--dataset-name {name}")
    if is_hub_name(name) or table_files(name):
        return _table(config, say)
    # Before `open_folder`, whose message serves `lockstep.image_folder` too.
    if not Path(name).expanduser().is_dir():
        raise DataError(
            f"--dataset-name {name}: no such folder; name one with a folder of images for each class, or {DIGITS}"
        )
    return open_folder(name, config.data.evaluation, FoundFiles(f"--dataset-name {name}"), config.data.skip, say)


@final
class _InMemory:
    """Images in memory, each `size` pixels high and wide."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels = pixels
        self.labels = labels

    def raw(self, index: int, *, channels: int, size: int) -> Tensor:
        image = self.pixels[index].expand(channels, -1, -1)
        if size == image.shape[-1]:
            return image
        larger = torch.nn.functional.interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True)
        return larger[0].round().to(torch.uint8)


def _digits(fraction: float) -> ImageData:
    pixels, labels = digits(f"--dataset-name {DIGITS}")
    parts = [torch.tensor(indices) for indices in split_samples(len(labels), fraction)]
    digest = xxhash.xxh3_128_hexdigest(pixels.numpy().tobytes() + labels.numpy().tobytes() + repr(fraction).encode())
    train, evaluation = (_InMemory(pixels[indices], labels[indices]) for indices in parts)
    return ImageData(train, evaluation, tuple("0123456789"), 1, digest)


@final
class _Files:
    """Image files, and the class of each."""

    def __init__(self, root: Path, files: Sequence[tuple[str, int]]) -> None:
        self.root = root
        self.names = [name for name, _ in files]
        self.labels = torch.tensor([label for _, label in files], dtype=torch.int64)

    def raw(self, index: int, *, channels: int, size: int) -> Tensor:
        return open_image(self.root / self.names[index], channels=channels, size=size)


def open_folder(name: str | PathLike[str], fraction: float, tally: FoundFiles, skip: float, say: Say) -> ImageData:
    """Open ROOT/CLASS/FILE, with a share for evaluation, or ROOT/train and ROOT/validation (val, test).

    Args:
        fraction: share of the images for evaluation, if the folder has none of its own.
        tally: counts the files; its label starts the messages.
        skip: share of the files that may be left out.
        say: gets a line about these.

    Raises:
        DataError: see `open_images`.
    """
    root = Path(name).expanduser()
    flag = tally.label
    if not root.is_dir():
        raise DataError(f"{flag}: no such folder; name one with a folder of images for each class")
    evaluation_part = ""
    for split in _EVALUATION:
        if (root / "train").is_dir() and (root / split).is_dir():
            evaluation_part = split
            break
    classes = _classes(root / "train" if evaluation_part else root, flag)
    # File -> the reason why no decoder reads it.
    broken = dict[str, str]()
    train = _images(root, "train" if evaluation_part else "", classes, flag, broken)
    if evaluation_part:
        extra = sorted(set(_classes(root / evaluation_part, flag)) - set(classes))
        if extra:
            raise DataError(
                f"{flag}: {evaluation_part}/ has the class '{extra[0]}', which train/ lacks; add its folder"
            )
        evaluation = _images(root, evaluation_part, classes, flag, broken)
    else:
        if len(train) < 2:
            raise DataError(f"{flag}: one image, too few to split off an evaluation; add more")
        trained, evaluated = split_samples(len(train), fraction)
        evaluation = [train[sample] for sample in evaluated]
        train = [train[sample] for sample in trained]
    content = []
    for file, label in (*train, *evaluation):
        content.append((file, (root / file).stat().st_size, label))
    others = set()
    for split in _EVALUATION:
        if evaluation_part and split != evaluation_part:
            others.add(split)
    sizes = {file: size for file, size, _ in content}
    _account(root, sizes, broken, others, tally)
    tally.check(skip, say)
    digest = xxhash.xxh3_128_hexdigest(repr((content, len(train))).encode())
    return ImageData(_Files(root, train), _Files(root, evaluation), tuple(classes), 3, digest)


def _account(
    root: Path, read: Mapping[str, int], broken: Mapping[str, str], others: Container[str], tally: FoundFiles
) -> None:
    """Account for each file below a folder of images.

    Args:
        read: the bytes of each file that is read.
        broken: the reason for each file of a class that is not.
        others: folders of splits that are not asked for.
        tally: gets them.
    """
    for size in read.values():
        tally.add(size)
    for folder, folders, files in os.walk(root):
        at = Path(folder).relative_to(root)
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and (at / name).as_posix() not in others
        )
        for name in folders:
            inside = f"{(at / name).as_posix()}/"
            # os.walk does not follow links to folders, so these are reported.
            if (root / at / name).is_symlink() and not any(file.startswith(inside) for file in read):
                tally.leave_out(inside, 0, "links to a folder")
        for name in sorted(files):
            file = (at / name).as_posix()
            if not name.startswith(".") and file not in read:
                is_image = Path(name).suffix.lower() in _SUFFIXES
                if is_image:
                    reason = "outside the folders of the classes"
                else:
                    reason = "without a suffix of an image"
                tally.leave_out(file, (root / file).lstat().st_size, broken.get(file, reason))


def _classes(root: Path, flag: str) -> list[str]:
    """Return the names of the folders, sorted."""
    names = []
    for path in root.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            names.append(path.name)
    names.sort()
    loose = []
    for path in root.iterdir():
        if path.is_file() and path.suffix.lower() in _SUFFIXES:
            loose.append(path)
    if not names:
        if loose:
            content = f"{len(loose)} image{'s' * (len(loose) != 1)} outside any folder"
        else:
            content = "neither folders nor images"
        raise DataError(f"{flag}: {root} has {content}; put the images of each class into a folder named after it")
    # A folder of splits that lacks one looks like a folder of one class.
    if names == ["train"]:
        raise DataError(
            f"{flag}: {root} has train/ and no folder for the evaluation; add {root}/validation (or val, test), or "
            f"name {root}/train, of which a share is held out"
        )
    if len(names) == 1:
        raise DataError(f"{flag}: {root} has one class, '{names[0]}'; classification needs at least two")
    return names


def _images(root: Path, part: str, classes: list[str], flag: str, broken: dict[str, str]) -> list[tuple[str, int]]:
    """List (path below `root`, label) of each image, nested folders included, by class and name.

    Args:
        broken: gets the files that are left out, with the reason.
    """
    images = []
    for label, name in enumerate(classes):
        folder = root / part / name
        paths = []
        for path in folder.rglob("*"):
            if path.suffix.lower() in _SUFFIXES and path.is_file():
                paths.append(path)
        files = []
        for path in paths:
            if not path.name.startswith("."):
                files.append(path.relative_to(root).as_posix())
        files.sort()
        broken |= _faults(root, files)
        files = [file for file in files if file not in broken]
        if not files and (part in ("", "train")):
            raise DataError(
                f"{flag}: {folder} has no images that can be read ({', '.join(sorted(_SUFFIXES))}); put those of "
                f"'{name}' there, or remove the folder"
            )
        images += [(file, label) for file in files]
    if not images:
        raise DataError(f"{flag}: {root / part} has no images")
    return images


def _faults(root: Path, files: list[str]) -> dict[str, str]:
    """Return the files that no decoder reads, with the reason.

    Threads read them: a file on a network waits for its server.
    """
    batches = [files[start : start + _BATCH] for start in range(0, len(files), _BATCH)]

    def check(batch: list[str]) -> list[str]:
        return [_fault(root / file) for file in batch]

    with ThreadPoolExecutor(_READERS) as pool:
        reasons = itertools.chain.from_iterable(pool.map(check, batches))
        faults = dict(zip(files, reasons, strict=True))
    for file in files:
        if not faults[file]:
            del faults[file]
    return faults


def _fault(path: Path) -> str:
    """Return why no decoder reads a file, by its first bytes; "" if one may.

    Only decoding finds damage after these bytes.
    """
    try:
        # A third of the time of Python's file objects.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            begin = os.read(descriptor, 16)
        finally:
            os.close(descriptor)
    except OSError:
        return "that cannot be opened"
    if not begin:
        return "without content"
    # An unknown header may be one of Pillow's rarer formats, but asking Pillow is slower.
    if not begin.startswith(_HEADERS):
        try:
            _pillow("an image").Image.open(path).close()
        except Exception:
            # Decoders may raise any exception on a damaged file.
            return "without the header of an image"
    return ""


@final
class _ImageColumn:
    """An image column of a table, as `datasets` has it: bytes, or a path."""

    def __init__(self, rows: Any, column: str, labels: Tensor) -> None:
        self.rows = rows
        self.column = column
        self.labels = labels

    def raw(self, index: int, *, channels: int, size: int) -> Tensor:
        value = self.rows[index][self.column]
        if value is None:
            raise ImageError("", "the row has no image")
        path = str(value.get("path") or "")
        return open_image(value.get("bytes") or path, channels=channels, size=size, name=path)


def _table(config: Config, say: Say) -> ImageData:
    data = config.data
    flag = f"--dataset-name {config.dataset_name}"
    chosen = data.subset, data.split, data.revision, "", data.encoding
    request = DataRequest(config.dataset_name, *chosen, skip=data.skip)
    table = open_table(request, data.evaluation, cache_folder(config.data.cache) / "tables", say)
    image = find_column(table.kinds, data.image_column, "Image", ("image", "img"), flag, "--data.image-column")
    label = find_column(table.kinds, data.label_column, "", ("label", "labels", "class"), flag, "--data.label-column")
    classes, labels = class_labels(table, label, flag)
    train, evaluation = (
        _ImageColumn(rows, image, split_labels) for rows, split_labels in zip(table.images(image), labels, strict=True)
    )
    digest = xxhash.xxh3_128_hexdigest(repr((table.digest, image, label, data.evaluation)).encode())
    return ImageData(train, evaluation, classes, 3, digest, table.revision)
