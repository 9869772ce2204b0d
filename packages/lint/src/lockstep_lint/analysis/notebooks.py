"""A notebook's code as one text: its code cells one after the other, without what only IPython understands."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.syntax import parsed

__all__ = ["FLAGS", "Cell", "Notebook", "cells_of", "place"]

# Cell magics whose cell is Python all the same.
PYTHON = ("time", "timeit", "capture", "prun", "debug", "python", "python3")
MAGIC = re.compile(r"^(?P<space>\s*)(?:[%!?]|(?P<target>[\w.,\s*()\[\]]+?=)\s*[%!](?!=))")
FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class Cell:
    """One code cell: its number among all cells (from 1), and where its first line stands in the joined text."""

    number: int
    start: int


@dataclass(frozen=True)
class Notebook:
    """The joined code, its cells, and the cells that do not parse, each with the line and the reason."""

    text: str
    cells: tuple[Cell, ...]
    broken: tuple[tuple[int, str], ...]


def cells_of(data: bytes) -> Notebook:
    """The code of a notebook's file. Raises ValueError for what is no notebook."""
    lines: list[str] = []
    cells: list[Cell] = []
    broken: list[tuple[int, str]] = []
    for number, source in _code(data):
        cells.append(Cell(number, len(lines) + 1))
        text = plain(source)
        try:
            parsed(text, FLAGS)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            broken.append((len(lines) + (getattr(error, "lineno", 1) or 1), str(getattr(error, "msg", error))))
            text = "\n" * text.count("\n")
        lines += text.split("\n")
    return Notebook("\n".join(lines) + "\n", tuple(cells), tuple(broken))


def _code(data: bytes) -> Iterator[tuple[int, str]]:
    """The sources of the code cells, with their numbers."""
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


def plain(source: str) -> str:
    """A cell without magics, shell commands and questions; every line stays where it is."""
    lines = source.split("\n")
    first = next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
    if first.startswith("%%") and (first[2:].split() or [""])[0] not in PYTHON:
        return "\n" * source.count("\n")
    try:
        parsed(source, FLAGS)
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
    """The cell of a line of the joined text, and the line in that cell."""
    found = cells[0] if cells else Cell(1, 1)
    for cell in cells:
        if cell.start > line:
            break
        found = cell
    return found.number, line - found.start + 1
