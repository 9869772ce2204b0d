"""Find local tables, and choose how `datasets` reads them.

    files = table_files("data/")                                # [] for a folder of texts
    builder = open_tables(datasets, request, cache, say)        # of all of them, or an error with their names

The formats are json, jsonl, csv, tsv and parquet, also compressed. A separator other than the comma is reported.
`FoundFiles` accounts for the files of a folder that are not read. File names decide the splits of a folder.
"""

import codecs
import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lockstep.data.found import LIMIT, FoundFiles, inner_suffix, is_compressed, open_plain, unpack
from lockstep.errors import DataError

__all__ = ["DataRequest", "file_digest", "list_suffixes", "open_tables", "table_files"]

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_PROSE = (".txt", ".md", ".py")
_SEPARATORS = (",", ";", "\t", "|")
_NAMES = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# Bytes read at a time.
_PIECE = 1 << 20
# Characters of a csv file that show how it is written.
_SAMPLE = 1 << 18
_FRACTION = re.compile(r"[+-]?\d*[.]\d+(?:[eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DataRequest:
    """The data that the flags request: --dataset-name and the section `data`; "" is a default.

    Attributes:
        answers: prefer columns that mark the answer over a column "text"; see `reader` of `hub`.
        skip: share of the files that may be left out.
    """

    name: str
    subset: str = ""
    split: str = "train"
    revision: str = ""
    text_column: str = ""
    encoding: str = ""
    answers: bool = False
    skip: float = LIMIT

    @property
    def label(self) -> str:
        """The start of messages."""
        return f"--dataset-name {self.name}"


def list_suffixes() -> str:
    """List the suffixes of tables, for a message."""
    return ", ".join(suffix.lstrip(".") for suffix in _KINDS)


def table_files(name: str) -> list[Path]:
    """List the tables at a path, also compressed ones.

    The list is empty if the folder has text files.
    """
    root = Path(name).expanduser()
    if root.is_file():
        if inner_suffix(root) in _KINDS:
            return [root]
        return []
    files = _files(root) if root.is_dir() else []
    tables = []
    for path in files:
        if inner_suffix(path) in _KINDS:
            tables.append(path)
    prose = []
    for path in files:
        if inner_suffix(path) in _PROSE and not path.stem.upper().startswith("README"):
            prose.append(path)
    if prose:
        return []
    return tables


def _files(root: Path) -> list[Path]:
    paths = []
    for path in sorted(root.rglob("*")):
        if path.is_file() and not _hidden(path, root):
            paths.append(path)
    return paths


def _hidden(path: Path, root: Path) -> bool:
    return any(name.startswith(".") for name in path.relative_to(root).parts)


def file_digest(path: Path) -> str:
    """Return the 128-bit xxh3 of a file, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_PIECE):
            digest.update(block)
    return digest.hexdigest()


def open_tables(datasets: Any, request: DataRequest, cache: Path, say: Say) -> Any:
    """Return a builder of `datasets` for the tables of a path.

    Args:
        datasets: the package.
        cache: folder for their rows as memory-mapped tables, and for the content of compressed files.

    Raises:
        DataError: files of several encodings or separators, a csv file without a usable header, a damaged compressed
            file, or more than `request.skip` of a folder's files are not read.
    """
    root = Path(request.name).expanduser()
    whole: dict[str, Any] = {}
    if root.is_file():
        splits = {"train": [root]}
    else:
        whole = {"path": str(root), "name": request.subset or None}
        builder = datasets.load_dataset_builder(**whole, cache_dir=str(cache))
        splits = {}
        for split, files in builder.config.data_files.items():
            splits[str(split)] = list(map(Path, files))
        _account(builder, request, root, splits, say)
    files = sorted({path for paths in splits.values() for path in paths})
    options = _options(files, request, say)
    if root.is_file() or any(map(is_compressed, files)):
        plain = {path: _plain(path, cache) for path in files}
        data_files = {}
        for split, paths in splits.items():
            data_files[split] = [str(plain[path]) for path in paths]
        whole = {"path": _KINDS[inner_suffix(files[0])], "data_files": data_files}
    return datasets.load_dataset_builder(**whole, **options, cache_dir=str(cache))


def _account(builder: Any, request: DataRequest, root: Path, splits: dict[str, list[Path]], say: Say) -> None:
    """Account for each file of a folder.

    Several subsets, which a README.md defines, share its tables.
    """
    tally = FoundFiles(request.label)
    chosen = {path.resolve() for paths in splits.values() for path in paths}
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        size = path.stat().st_size
        if inner_suffix(path) not in _KINDS:
            tally.leave_out(name, size, "without a suffix of a table")
        elif path.resolve() in chosen or len(builder.builder_configs) > 1:
            tally.add(size)
        else:
            tally.leave_out(name, size, f"of another kind, or in none of the splits {', '.join(splits)}")
    tally.check(request.skip, say)


def _plain(path: Path, cache: Path) -> Path:
    if not is_compressed(path):
        return path
    return unpack(path, cache / "unpacked", f"{file_digest(path)}-{path.stem}")


def _options(files: list[Path], request: DataRequest, say: Say) -> dict[str, Any]:
    """Return the options with which `datasets` reads the files."""
    texts = []
    for path in files:
        if inner_suffix(path) != ".parquet":
            texts.append(path)
    encodings = {_encoding(path, request) for path in texts}
    if len(encodings) > 1:
        raise DataError(
            f"{request.label}: its files have the encodings {', '.join(sorted(encodings))}; convert them to one"
        )
    if not encodings:
        return {}
    encoding = encodings.pop()
    options: dict[str, Any] = {"encoding": encoding}
    tables = []
    for path in texts:
        if _KINDS[inner_suffix(path)] == "csv":
            tables.append(path)
    styles = {path: _csv_style(path, encoding, request) for path in tables}
    if len(set(styles.values())) > 1:
        kinds = ", ".join(f"{path.name} by {style[0]!r}" for path, style in list(styles.items())[:3])
        raise DataError(f"{request.label}: its files are separated in several ways ({kinds}); convert them to one")
    for separator, decimal in set(styles.values()) - {(",", ".")}:
        options |= {"sep": separator, "decimal": decimal}
        if decimal == ".":
            fractions = ""
        else:
            fractions = f", and {decimal!r} is its decimal sign"
        say(f"{request.label}: its columns are separated by {_NAMES.get(separator, repr(separator))}{fractions}")
    return options


def _csv_style(path: Path, encoding: str, request: DataRequest) -> tuple[str, str]:
    """Return the separator and the decimal sign of a csv file, by its beginning.

    The comma is taken if all rows have as many values with it, else the separator that gives all rows as many.

    Raises:
        DataError: its first line cannot be names of its columns.
    """
    with open_plain(path) as file:
        text = io.TextIOWrapper(file, encoding, newline="")
        begin = text.read(_SAMPLE)
        is_whole = not text.read(1)
        text.detach()
    parsed = {separator: _rows(begin, separator, is_whole) for separator in _SEPARATORS}
    widths = {separator: {len(row) for row in rows} for separator, rows in parsed.items()}
    fitting = [separator for separator, lengths in widths.items() if len(lengths) == 1 and lengths != {1}]
    # Prefer the separator of the suffix; otherwise the one with most columns.
    usual = "\t" if inner_suffix(path) == ".tsv" else ","
    fullest = max(fitting, key=lambda separator: max(widths[separator]), default=usual)
    separator = usual if usual in fitting else fullest
    rows = parsed[separator]
    _check_header(path, rows, request)
    values = [value for row in rows[1:] for value in row]
    # Numbers such as 1,5 have a decimal comma, unless others have a point.
    has_commas = separator != "," and any(map(_DECIMAL_COMMA.fullmatch, values))
    return separator, "," if has_commas and not any(map(_FRACTION.fullmatch, values)) else "."


def _rows(begin: str, separator: str, is_whole: bool) -> list[list[str]]:
    """Parse the beginning of a csv file; [] if it cannot be."""
    try:
        rows = []
        for row in csv.reader(io.StringIO(begin, newline=""), delimiter=separator):
            if row:
                rows.append(row)
    except csv.Error:
        return []
    if is_whole:
        return rows
    return rows[:-1]


def _check_header(path: Path, rows: list[list[str]], request: DataRequest) -> None:
    """Raise DataError for a first line that does not name the columns."""
    names = rows[0] if rows else []
    subject = f"{request.label}: the first line of {path.name}"
    way_out = "the first line must name each column once; write one"
    if len(rows) > 1 and len(rows[1]) > len(names):
        raise DataError(f"{subject} has {len(names)} names, and the next {len(rows[1])} values; {way_out}")
    value = ""
    for name in names:
        if _FRACTION.fullmatch(name.strip()):
            value = name
            break
    twice = ""
    for index, name in enumerate(names):
        if name and name in names[:index]:
            twice = name
            break
    if value or twice:
        what = f"the number {value!r}" if value else f"{twice!r} twice"
        raise DataError(f"{subject} has {what}; {way_out}")


def _encoding(path: Path, request: DataRequest) -> str:
    """The requested encoding, else the byte order mark's, else UTF-8.

    The file is read to check it.
    """
    encoding = request.encoding
    if not encoding:
        with open_plain(path) as file:
            begin = file.read(4)
        marks = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
        encoding = "utf-8"
        for mark, name in marks.items():
            if begin.startswith(mark):
                encoding = name
                break
    try:
        with open_plain(path) as file:
            text = io.TextIOWrapper(file, encoding)
            while text.read(_PIECE):
                pass
            text.detach()
    except LookupError:
        raise DataError(f"--data.encoding {encoding} is unknown; use one such as utf-8, cp1252 or utf-16") from None
    except UnicodeError as error:
        raise DataError(
            f"{request.label}: {path.name} is not {encoding} ({error}); name its encoding, such as "
            "--data.encoding cp1252"
        ) from error
    return encoding
