r"""List a corpus's text files in a fixed order with checksums, and split them.

    sources = find("builtin:stdlib")                    # or a text file, or a folder of them
    train, evaluation = split_files(sources, eval_fraction=0.05, seed=0)
    for text, last in pieces(train): ...

Text is UTF-8, with or without a byte order mark; line ends become "\\n", so that a file has the same tokens on every
system. A compressed file has the tokens of its content. Other files of a folder are left out and reported: `found.py`.
"""

import codecs
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from lockstep.data.found import LIMIT, FoundFiles, inner_suffix, is_compressed, open_plain
from lockstep.errors import DataError
from lockstep.seeds import derive

__all__ = ["DocumentSpan", "TextFile", "cut", "find", "pieces", "split_files"]

_STDLIB = "builtin:stdlib"

# Suffixes to search a folder for; a file that is named directly may have any.
_PROSE = {".txt", ".text", ".md", ".rst", ".tex", ".org", ".html", ".htm"}
_CODE = {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts", ".rb", ".sh", ".sql"}
_TEXT = frozenset(_PROSE | _CODE)
_SKIP = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_TESTS = frozenset({"test", "tests", "idle_test"})
# Bytes read and tokenized at a time. A longer document is cut at the next line's end.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of a corpus.

    Attributes:
        name: its path below the corpus's folder, with "/" on every system.
        path: its location.
        size: bytes, uncompressed.
        digest: 128-bit xxh3 of these, in hex.
        readable: it is valid UTF-8 and not empty.
    """

    name: str
    path: Path
    size: int
    digest: str
    readable: bool


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """A document: the bytes start to stop - 1 of a file, uncompressed.

    Attributes:
        ends: the document ends at `stop`; False: the next span continues it.
    """

    path: Path
    start: int
    stop: int
    ends: bool = True


def find(name: str, skip: float = LIMIT, say: Callable[[str], None] = lambda line: None) -> list[TextFile]:
    """List the files of the corpus `name`, sorted by name, with their checksums.

    Args:
        name: "builtin:stdlib", a text file, or a folder, searched at any depth for text files (by suffix, without
            hidden files and installed packages).
        skip: share of a folder that may be left out: files of other suffixes, and those that are not UTF-8.
        say: gets a line about these.

    "builtin:stdlib" is the `.py` files of the running interpreter's standard library, without its `test` folders. These
    are more than half of its bytes, contain long tables of test data, double the preparation time, and many systems do
    not install them.

    Raises:
        DataError: no such file or folder, no readable text in it, a damaged compressed file, or more than `skip` of it
            is no such text.
    """
    tally = FoundFiles(f"--dataset-name {name}")
    try:
        paths = _list_files(name, tally)
    except OSError as error:
        raise DataError(
            f"--dataset-name {name}: cannot read {error.filename}: {error.strerror}; fix its permissions"
        ) from error
    sources = [_scan(label, path, name) for label, path in sorted(paths)]
    if not any(source.readable for source in sources):
        raise DataError(f"--dataset-name {name}: none of its {len(sources)} files is UTF-8 text; convert them")
    for source in sources:
        if source.readable or not source.size:
            tally.add(source.size)
        else:
            tally.leave_out(source.name, source.size, "not UTF-8")
    tally.check(skip, say)
    return sources


def _list_files(name: str, found: FoundFiles) -> list[tuple[str, Path]]:
    if name == _STDLIB:
        # This corpus is the .py files by definition, so other files need no report.
        others = FoundFiles("")
        return _walk(Path(sysconfig.get_path("stdlib")), frozenset({".py"}), _SKIP | _TESTS, others)
    if name.startswith("builtin:"):
        raise DataError(f"--dataset-name {name}: unknown; the built-in corpus is {_STDLIB}")
    # Path.expanduser raises an error if there is no such user.
    root = Path(os.path.expanduser(name))
    if root.is_file():
        return [(root.name, root)]
    if not name or not root.is_dir():
        raise DataError(
            f"--dataset-name {name}: no such file or folder; give a text file, a folder of text files, or {_STDLIB}"
        )
    paths = _walk(root, _TEXT, _SKIP, found)
    if not paths:
        raise DataError(f"--dataset-name {name}: the folder has no text files (.txt, .md, .py, ...); name another")
    return paths


def _walk(root: Path, suffixes: frozenset[str], skipped: frozenset[str], found: FoundFiles) -> list[tuple[str, Path]]:
    paths = []
    for folder, folders, files in os.walk(root, onerror=_raise):
        folders[:] = sorted(child for child in folders if child not in skipped and not child.startswith("."))
        for child in folders:
            # Not followed, because a link may lead in a circle.
            if os.path.islink(os.path.join(folder, child)):
                found.leave_out(Path(folder, child).relative_to(root).as_posix(), 0, "links to a folder")
        for file in sorted(files):
            path = Path(folder, file)
            label = path.relative_to(root).as_posix()
            if file.startswith("."):
                continue
            if not path.is_file():
                found.leave_out(label, 0, "links to nothing, or no plain files")
            elif inner_suffix(path) in suffixes:
                paths.append((label, path))
            else:
                found.leave_out(label, path.stat().st_size, "without a suffix of text")
    return paths


def _raise(error: OSError) -> None:
    # os.walk would skip an unreadable folder, and the run would train on less.
    raise error


def _scan(label: str, path: Path, name: str) -> TextFile:
    digest = xxhash.xxh3_128()
    size = 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    readable = True
    try:
        with open_plain(path) as file:
            while block := file.read(_PIECE):
                digest.update(block)
                size += len(block)
                readable = readable and _decodes(decoder, block)
    except OSError as error:
        raise DataError(
            f"--dataset-name {name}: cannot read {path}: {error.strerror}; fix its permissions, or remove it"
        ) from error
    complete = readable and _decodes(decoder, b"", final=True)
    return TextFile(label, path, size, digest.hexdigest(), complete and size > 0)


def _decodes(decoder: codecs.IncrementalDecoder, block: bytes, final: bool = False) -> bool:
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError:
        return False
    return True


def split_files(
    sources: list[TextFile], eval_fraction: float, seed: int
) -> tuple[list[DocumentSpan], list[DocumentSpan]]:
    """Split the readable documents into (training, evaluation), each in the order of their names.

    Files go to the evaluation in an order keyed by (seed, name) while they fit into `eval_fraction` of the bytes; at
    least one goes there, and at least one stays. A single file is cut after the line that crosses 1 - `eval_fraction`
    of it.
    """
    readable = [source for source in sources if source.readable]
    if len(readable) == 1:
        source = readable[0]
        cut = _line_end(source, round(source.size * (1.0 - eval_fraction)))
        return [DocumentSpan(source.path, 0, cut)], [DocumentSpan(source.path, cut, source.size)]
    chosen = _choose_evaluation(readable, eval_fraction * sum(source.size for source in readable), seed)
    spans = [(source in chosen, DocumentSpan(source.path, 0, source.size)) for source in readable]
    train = []
    evaluation = []
    for evaluates, span in spans:
        if evaluates:
            evaluation.append(span)
        else:
            train.append(span)
    return train, evaluation


def _choose_evaluation(sources: list[TextFile], room: float, seed: int) -> set[TextFile]:
    # The choice depends on names and seed alone, so it is the same on every machine.
    def rank(source: TextFile) -> int:
        return derive(seed, "split", xxhash.xxh3_64_intdigest(os.fsencode(source.name)))

    chosen: set[TextFile] = set()
    # The last document always stays in the training split.
    for source in sorted(sources, key=rank)[:-1]:
        if source.size <= room:
            chosen.add(source)
            room -= source.size
    return chosen or {min(sources, key=lambda source: source.size)}


def cut(spans: Iterable[DocumentSpan], size: int) -> list[list[DocumentSpan]]:
    """Cut documents into ranges of about `size` bytes; a long one at a line's end.

    A compressed file is not cut: each range would unpack all that is before it.
    """
    ranges: list[list[DocumentSpan]] = []
    room = 0
    for whole in spans:
        start = whole.start
        while start < whole.stop:
            if room <= 0:
                ranges.append([])
                room = size
            stop = whole.stop
            if stop - start > room and not is_compressed(whole.path):
                stop = _line_end(TextFile("", whole.path, whole.stop, "", True), start + room)
            ranges[-1].append(DocumentSpan(whole.path, start, stop, ends=stop == whole.stop))
            room -= stop - start
            start = stop
    return ranges


def _line_end(source: TextFile, position: int) -> int:
    """The first line end from `position` on, before the file's; else a character's start."""
    with open_plain(source.path) as file:
        file.seek(max(position - 1, 0))
        file.readline()
        if file.tell() < source.size:
            return file.tell()
        file.seek(position)
        following = file.read(4)
    # A byte 10xxxxxx continues the character before it.
    return position + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), 0)


def pieces(spans: Iterable[DocumentSpan]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is a document's last piece).

    A piece is about a megabyte of whole lines.

    Raises:
        DataError: a file has disappeared.
    """
    for span in spans:
        try:
            with open_plain(span.path) as file:
                yield from _read(file, span)
        except OSError as error:
            raise DataError(f"cannot read {span.path} any more: {error.strerror}; start the run again") from error


def _read(file: BinaryIO, span: DocumentSpan) -> Iterator[tuple[str, bool]]:
    file.seek(span.start)
    while (remaining := span.stop - file.tell()) > 0:
        block = file.read(min(_PIECE, remaining))
        block += file.readline(max(span.stop - file.tell(), 0))
        # The file became shorter after it was listed.
        if not block:
            return
        yield _text(block), span.ends and file.tell() >= span.stop


def _text(block: bytes) -> str:
    return block.removeprefix(codecs.BOM_UTF8).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
