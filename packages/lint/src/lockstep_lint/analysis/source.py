"""Read and parse one file or notebook, or report in one line why not."""

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["MAX_BYTES", "Problem", "Source", "cells_of", "parse", "parse_text", "place", "read"]


ASYNC = re.compile(r"(?<=[(,\s])async(?=\s*=[^=])")
# A name as long as `async`, so that nothing moves.
NO_KEYWORD = "asynq"


def parse_text(text: str, flags: int = ast.PyCF_ONLY_AST) -> ast.Module:
    """Return the tree of a text, which SyntaxWarnings do not keep from parsing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about somebody's escape sequences
        try:
            return _tree(text, flags)
        except SyntaxError:
            if ASYNC.search(text):
                return restore_async(_tree(ASYNC.sub(NO_KEYWORD, text), flags))
            raise


def _tree(text: str, flags: int) -> ast.Module:
    tree: ast.Module = compile(text, "file", "exec", flags, dont_inherit=True)
    return tree


def restore_async(tree: ast.Module) -> ast.Module:
    """Return the tree, with what was `async` as the argument that it is now."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == NO_KEYWORD:
            node.arg = "non_blocking"
    return tree


# Cell magics whose cell is Python all the same.
PYTHON = ("time", "timeit", "capture", "prun", "debug", "python", "python3")
MAGIC = re.compile(r"^(?P<space>\s*)(?:[%!?]|(?P<target>[\w.,\s*()\[\]]+?=)\s*[%!](?!=))")
FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class Cell:
    """One code cell: its number in the notebook (from 1), and its first joined line."""

    number: int
    start: int


@dataclass(frozen=True)
class Notebook:
    """The joined code, its cells, and the broken cells, each with line and reason."""

    text: str
    cells: tuple[Cell, ...]
    broken: tuple[tuple[int, str], ...]


def cells_of(data: bytes) -> Notebook:
    """Return the code of a notebook's file. Raises ValueError for what is no notebook."""
    lines: list[str] = []
    cells: list[Cell] = []
    broken: list[tuple[int, str]] = []
    for number, source in _code(data):
        cells.append(Cell(number, len(lines) + 1))
        text = plain(strip_indent(source))
        try:
            parse_text(text, FLAGS)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            broken.append((len(lines) + (getattr(error, "lineno", 1) or 1), str(getattr(error, "msg", error))))
            text = "\n" * text.count("\n")
        lines += text.split("\n")
    return Notebook("\n".join(lines) + "\n", tuple(cells), tuple(broken))


def _code(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the sources of the code cells, with their numbers."""
    try:
        book = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    cells = book.get("cells") if isinstance(book, dict) else None
    if not isinstance(cells, list):
        raise ValueError("no cells")
    for number, cell in enumerate(cells, 1):
        source = cell.get("source", "") if isinstance(cell, dict) and cell.get("cell_type") == "code" else None
        if isinstance(source, list):
            source = "".join(item for item in source if isinstance(item, str))
        if isinstance(source, str):
            yield number, source.replace("\r\n", "\n").replace("\r", "\n")


def strip_indent(source: str) -> str:
    """Return a cell without the indent of its first line, as IPython does."""
    first = next((line for line in source.split("\n") if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip(" \t"))]
    return "\n".join(line.removeprefix(indent) for line in source.split("\n")) if indent else source


def plain(source: str) -> str:
    """Return a cell without magics, shell commands and questions; every line stays where it is."""
    lines = source.split("\n")
    first = next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
    if first.startswith("%%") and (first[2:].split() or [""])[0] not in PYTHON:
        return "\n" * source.count("\n")
    try:
        parse_text(source, FLAGS)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        goes_on = False
        for i, line in enumerate(lines):
            match = MAGIC.match(line)
            if goes_on or match is not None or (line.rstrip().endswith("?") and "#" not in line):
                goes_on = line.rstrip().endswith("\\")
                space = match["space"] if match is not None else ""
                target = match["target"] if match is not None else None
                lines[i] = f"{target} None" if target else f"{space}pass"
    return "\n".join(lines)


def place(cells: tuple[Cell, ...], line: int) -> tuple[int, int]:
    """Return the cell of a joined text's line, and the line in that cell."""
    found = cells[0] if cells else Cell(1, 1)
    for cell in cells:
        if cell.start > line:
            break
        found = cell
    return found.number, line - found.start + 1


# Larger files are generated data, not training code; parsing one would cost more than the 2 s that a file may take.
MAX_BYTES = 300_000
# A notebook holds its pictures too; its code may have as many bytes as any file's.
MAX_NOTEBOOK = 30_000_000


@dataclass(frozen=True)
class Problem:
    """Why a file was not checked, and the line where reading stopped."""

    line: int
    message: str


@dataclass(frozen=True)
class Source:
    """One file: its text, lines and tree, or the problem that prevented parsing."""

    path: str
    text: str = ""
    tree: ast.Module | None = None
    problem: Problem | None = None
    lines: list[str] = field(default_factory=list)
    cells: tuple[Cell, ...] = ()
    broken: tuple[Problem, ...] = ()


def read(path: str) -> Source:
    """Read and parses the file at `path`; never raises for what the file holds."""
    limit = MAX_NOTEBOOK if path.endswith(".ipynb") else MAX_BYTES
    try:
        size = Path(path).stat().st_size
        if size > limit:
            return _refuse(path, f"{size} bytes is more than the {limit} that are checked: split or exclude it")
        data = Path(path).read_bytes()
    except OSError as error:
        return _refuse(path, f"cannot be read: {error.strerror}")
    if path.endswith(".ipynb"):
        return notebook(path, data)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return parse(path, data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n"))
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return _refuse(path, "is not Python text: exclude it, or save it as UTF-8")


def notebook(path: str, data: bytes) -> Source:
    """Parse the code of a notebook. A cell that does not parse is left out and reported."""
    try:
        book = cells_of(data)
    except ValueError:
        return _refuse(path, "is not a notebook: exclude it")
    if len(book.text) > MAX_BYTES:
        return _refuse(path, f"its code is longer than the {MAX_BYTES} bytes that are checked: split or exclude it")
    source = parse(path, book.text, FLAGS)
    broken = tuple(Problem(line, f"this cell does not parse: {message}") for line, message in book.broken)
    return replace(source, cells=book.cells, broken=broken)


def parse(path: str, text: str, flags: int = ast.PyCF_ONLY_AST) -> Source:
    """Parse `text`. A syntax error becomes the source's problem."""
    lines = text.split("\n")
    try:
        return Source(path, text, parse_text(text, flags), None, lines)
    except SyntaxError as error:
        return Source(path, text, None, Problem(error.lineno or 1, f"does not parse: {error.msg}"), lines)
    except (RecursionError, MemoryError):
        return Source(path, text, None, Problem(1, "is nested too deeply to be parsed: split or exclude it"), lines)
    except ValueError:  # NUL bytes
        return Source(path, text, None, Problem(1, "is not Python text: exclude it"), lines)


def _refuse(path: str, message: str) -> Source:
    return Source(path, problem=Problem(1, message))
