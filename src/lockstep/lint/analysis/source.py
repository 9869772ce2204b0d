"""Reads and parses one file, whatever is in it: the result is a tree or one line that says why there is none."""

import ast
import io
import tokenize
import warnings
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["MAX_BYTES", "Problem", "Source", "parse", "read"]

# Larger files are generated data, not training code; parsing one would cost more than the 2 s that a file may take.
MAX_BYTES = 300_000


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


def read(path: str) -> Source:
    """Reads and parses the file at `path`; never raises for what the file holds."""
    try:
        size = Path(path).stat().st_size
        if size > MAX_BYTES:
            return _unchecked(path, f"{size} bytes is more than the {MAX_BYTES} that are checked: split or exclude it")
        data = Path(path).read_bytes()
    except OSError as error:
        return _unchecked(path, f"cannot be read: {error.strerror}")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return parse(path, data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n"))
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return _unchecked(path, "is not Python text: exclude it, or save it as UTF-8")


def parse(path: str, text: str) -> Source:
    """Parses `text`; a syntax error becomes the source's problem."""
    lines = text.split("\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a SyntaxWarning about somebody's escape sequence is not our business
            return Source(path, text, ast.parse(text), None, lines)
    except SyntaxError as error:
        return Source(path, text, None, Problem(error.lineno or 1, f"does not parse: {error.msg}"), lines)
    except (RecursionError, MemoryError):
        return Source(path, text, None, Problem(1, "is nested too deeply to be parsed: split or exclude it"), lines)
    except ValueError:  # NUL bytes
        return Source(path, text, None, Problem(1, "is not Python text: exclude it"), lines)


def _unchecked(path: str, message: str) -> Source:
    return Source(path, problem=Problem(1, message))
