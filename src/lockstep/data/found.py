"""Account for the files of a folder, and read compressed ones.

Each file is read, or left out by name with a reason.

    found = FoundFiles("--dataset-name crawl")
    found.add(812)                                  # bytes of a file that is read
    found.leave_out("scan.pdf", 90_000, "no suffix of a text")
    found.check(0.01, say)                          # a line with numbers and names, or an error above a hundredth

    with open_plain(Path("a.txt.gz")) as file: ...  # the bytes as they were before the compression

gzip, bzip2 and xz are Python's own. Zstandard is Python's from 3.14 on, and pyarrow's before.
"""

import bz2
import gzip
import importlib
import io
import lzma
import math
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, cast, final

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError, DataError, error_line
from lockstep.extras import install_extra

__all__ = ["LIMIT", "FoundFiles", "inner_suffix", "is_about", "is_compressed", "open_plain", "unpack"]

# Share of the files, or of their bytes, that may be left out unless the user allows more.
LIMIT = 0.01
# Number of names that are shown for each reason.
_SHOWN = 3
# Names of files without data begin with these.
_ABOUT = ("readme", "license", "licence", "thumbs.db", "desktop.ini", "_success")

Say = Callable[[str], None]


@final
class FoundFiles:
    """The files that were found: those that are read, and those left out.

    Args:
        label: the start of messages.
        flag: raises the limit; "": there is none.
        kind: what is counted.
    """

    def __init__(self, label: str, flag: str = "--data.skip", kind: str = "files") -> None:
        self.label = label
        self._flag = flag
        self._kind = kind
        self._read = 0
        self._read_bytes = 0
        # Reason -> (name, bytes) of each file that is left out.
        self._left: dict[str, list[tuple[str, int]]] = {}

    def add(self, size: int = 0) -> None:
        """Count a file of `size` bytes that is read."""
        self._read += 1
        self._read_bytes += size

    def leave_out(self, name: str, size: int, reason: str) -> None:
        """Count a file that is left out, unless it only describes the others (README, LICENSE)."""
        if not is_about(name):
            self._left.setdefault(reason, []).append((name, size))

    @property
    def share(self) -> float:
        """The share that is left out: the larger of those of files and bytes."""
        left_out = []
        for files in self._left.values():
            left_out.extend(files)
        size = sum(bytes_of for _, bytes_of in left_out)
        by_number = len(left_out) / max(1, len(left_out) + self._read)
        return max(by_number, size / max(1, size + self._read_bytes))

    @property
    def note(self) -> str:
        """One line about the files left out; "" for none.

        It has numbers, reasons and the first names.
        """
        if not self._left:
            return ""
        count = sum(map(len, self._left.values()))
        reasons = "; ".join(f"{len(files)} {reason} ({_names(files)})" for reason, files in self._left.items())
        return f"{count} of {count + self._read} {self._kind} left out, {100 * self.share:.2g}% of the data: {reasons}"

    def check(self, limit: float, say: Say) -> None:
        """Report what is left out.

        Raises:
            DataError: it is more than the share `limit`.
        """
        if not self._left:
            return
        if self.share <= limit:
            say(f"{self.label}: {self.note}")
            return
        if self._flag:
            allowed = f", or allow it with {self._flag} {math.ceil(100 * self.share) / 100}"
        else:
            allowed = ""
        raise DataError(f"{self.label}: {self.note}; convert, move or remove them{allowed}")


def is_about(name: str) -> bool:
    """Whether a file's name says that it describes data and has none."""
    return os.path.basename(name).lower().startswith(_ABOUT)


def _names(files: list[tuple[str, int]]) -> str:
    shown = ", ".join(printable(name) for name, _ in files[:_SHOWN])
    return shown + (", ..." if len(files) > _SHOWN else "")


# --- compressed files

_OPEN: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda path: io.BufferedReader(_ZstandardFile(path)),
}


def is_compressed(path: Path) -> bool:
    """Whether a file's name says that it is one compressed file."""
    return path.suffix.lower() in _OPEN


def inner_suffix(path: Path) -> str:
    """Return the suffix of what a file contains, in lower case: ".jsonl" of a.jsonl.gz."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, uncompressed.

    A seek in a compressed file reads up to the target.

    Raises:
        ConfigError: the package that reads its compression is missing.
        DataError: the compressed data are cut or damaged. (OSError: the file cannot be opened.)
    """
    if not is_compressed(path):
        with path.open("rb") as plain:
            yield plain
        return
    # A file that cannot be opened is not damaged: let that error pass.
    path.open("rb").close()
    try:
        with _OPEN[path.suffix.lower()](path) as file:
            yield cast(BinaryIO, file)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{printable(str(path))} cannot be unpacked: it is cut or damaged ({error_line(error)}); restore it"
        ) from error


def unpack(path: Path, folder: Path, name: str) -> Path:
    """Write the uncompressed content of a file into a folder; return its path.

    A file that is there already is not written again.

    Any number of processes may do so at a time.

    Args:
        name: of the content: another one for other content.
    """
    target = folder / name
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{name}.tmp-{token_hex(8)}"
    try:
        with unfinished.open("wb") as out:
            for block in _blocks(path):
                out.write(block)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _blocks(path: Path) -> Iterator[bytes]:
    # Around the reading alone, so that an error of a full disk is not taken for a damaged file.
    with open_plain(path) as file:
        while block := file.read(1 << 20):
            yield block


class _ZstandardFile(io.RawIOBase):
    """A Zstandard file with seeks, each of which reads from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _zstandard(path)
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        self._place += len(block)
        return len(block)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the end of a compressed file is unknown")
        target = offset + (self._place if whence == os.SEEK_CUR else 0)
        if target < self._place:
            self._file.close()
            self._file = _zstandard(self._path)
            self._place = 0
        while self._place < target and (block := self._file.read(min(1 << 20, target - self._place))):
            self._place += len(block)
        return self._place

    def close(self) -> None:
        # The file could not be opened.
        with suppress(AttributeError):
            self._file.close()
        super().close()


def _zstandard(path: Path) -> Any:
    # Python has Zstandard from 3.14 on.
    with suppress(ImportError):
        return importlib.import_module("compression.zstd").open(path, "rb")
    try:
        return importlib.import_module("pyarrow").input_stream(str(path), compression="zstd")
    except ImportError as error:
        raise ConfigError(
            f"{printable(str(path))} is compressed by Zstandard: {install_extra('shards')}, or use Python 3.14"
        ) from error
