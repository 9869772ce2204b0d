"""Reads and parses one file, whatever is in it: the result is a tree or one line that says why there is none."""

import ast
import io
import tokenize
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep_lint.analysis.notebooks import FLAGS, Cell, cells_of
from lockstep_lint.analysis.syntax import parsed

__all__ = ["MAX_BYTES", "MAX_NOTEBOOK", "Problem", "Source", "parse", "read"]

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
    """One file: its text, its lines and its tree, or the problem that kept it from being parsed."""

    path: str
    text: str = ""
    tree: ast.Module | None = None
    problem: Problem | None = None
    lines: list[str] = field(default_factory=list)
    cells: tuple[Cell, ...] = ()
    broken: tuple[Problem, ...] = ()


def read(path: str) -> Source:
    """Reads and parses the file at `path`; never raises for what the file holds."""
    limit = MAX_NOTEBOOK if path.endswith(".ipynb") else MAX_BYTES
    try:
        size = Path(path).stat().st_size
        if size > limit:
            return _unchecked(path, f"{size} bytes is more than the {limit} that are checked: split or exclude it")
        data = Path(path).read_bytes()
    except OSError as error:
        return _unchecked(path, f"cannot be read: {error.strerror}")
    if path.endswith(".ipynb"):
        return notebook(path, data)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return parse(path, data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n"))
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return _unchecked(path, "is not Python text: exclude it, or save it as UTF-8")


def notebook(path: str, data: bytes) -> Source:
    """Parses the code of a notebook; a cell that does not parse is left out and told."""
    try:
        book = cells_of(data)
    except ValueError:
        return _unchecked(path, "is not a notebook: exclude it")
    if len(book.text) > MAX_BYTES:
        return _unchecked(path, f"its code is longer than the {MAX_BYTES} bytes that are checked: split or exclude it")
    source = parse(path, book.text, FLAGS)
    broken = tuple(Problem(line, f"this cell does not parse: {message}") for line, message in book.broken)
    return replace(source, cells=book.cells, broken=broken)


def parse(path: str, text: str, flags: int = ast.PyCF_ONLY_AST) -> Source:
    """Parses `text`; a syntax error becomes the source's problem."""
    lines = text.split("\n")
    try:
        return Source(path, text, parsed(text, flags), None, lines)
    except SyntaxError as error:
        return Source(path, text, None, Problem(error.lineno or 1, f"does not parse: {error.msg}"), lines)
    except (RecursionError, MemoryError):
        return Source(path, text, None, Problem(1, "is nested too deeply to be parsed: split or exclude it"), lines)
    except ValueError:  # NUL bytes
        return Source(path, text, None, Problem(1, "is not Python text: exclude it"), lines)


def _unchecked(path: str, message: str) -> Source:
    return Source(path, problem=Problem(1, message))
