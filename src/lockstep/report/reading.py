"""A run's files as far as they can be read: small ones whole, the records one after the other. Nothing is believed.

notes = []
state = small_json(folder / "state.json", notes)        # {} where it is missing or damaged, which is noted
records = Records.read(folder / "metrics.jsonl", notes)
"""

import contextlib
import json
import math
import tomllib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.secrets import mask, printable
from lockstep.report.curves import Curve

__all__ = ["Records", "lines_of", "shown", "small_json", "small_text", "small_toml"]

_SMALL = 16 << 20  # bytes of a file that is read whole
_LINE = 1 << 20  # bytes of a line, at most
_NAMES = 200  # curves that are kept
_STEPS = 1 << 53
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def shown(value: Any, most: int = 160) -> str:
    """A value as the page shows it: secrets masked, control characters written out, long ones cut."""
    text = printable(mask(value if isinstance(value, str) else _plain(value)))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def small_text(path: Path, notes: list[str]) -> str | None:
    """The text of a file; None where it is missing, or cannot be read, which is noted."""
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > _SMALL:
            notes.append(f"{path.name} is no file of a run, or too large")
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}")
        return None


def small_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object in a file of JSON; {} where it is missing, or damaged, which is noted."""
    text = small_text(path, notes)
    if text is None:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    notes.append(f"{path.name} is damaged")
    return {}


def small_toml(path: Path, notes: list[str]) -> dict[str, Any]:
    """The values of a file of TOML by dotted name; {} where it is missing, or damaged, which is noted."""
    text = small_text(path, notes)
    if text is None:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        return dict(_dotted(tomllib.loads(text)))
    notes.append(f"{path.name} is damaged")
    return {}


def _dotted(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def lines_of(path: Path, notes: list[str]) -> Iterator[bytes]:
    """The lines of a file of any size, those beyond a megabyte passed over; none where it cannot be read."""
    try:
        if not path.is_file():
            return
        with open(path, "rb") as file:
            whole = True
            while line := file.readline(_LINE):
                ends = line.endswith(b"\n")
                if whole and (ends or len(line) < _LINE):
                    yield line
                whole = ends
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")


class Records:
    """What the records say, each name as a curve.

    Attributes:
        curves: by name, in the order in which they came; numbers alone.
        left_out: names beyond those that are kept.
        count: of training records.
        words: the newest value of what is no number, by name.
        steps, losses, norms: of the training records, float64 each, for comparisons digit by digit.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.left_out: set[str] = set()
        self.words: dict[str, str] = {}
        self.count = self.damaged = 0
        self.steps, self.losses, self.norms = array("q"), array("d"), array("d")

    @classmethod
    def read(cls, path: Path, notes: list[str], *, digits: bool = False) -> "Records":
        """Of metrics.jsonl. `digits`: keep steps, losses and norms too, 24 bytes a record."""
        found = cls()
        for line in lines_of(path, notes):
            found._take(line, digits)
        if found.damaged:
            many = f"{found.damaged} lines" if found.damaged > 1 else "1 line"
            notes.append(f"{many} of {path.name} could not be read")
        if found.left_out:
            notes.append(f"{path.name} has more than {_NAMES} names; the others are not drawn")
        return found

    def _take(self, line: bytes, digits: bool) -> None:
        try:
            record = json.loads(line)
            step = record["global_step"]
            if type(step) is not int or not 0 <= step < _STEPS:
                raise ValueError
        except (ValueError, RecursionError, TypeError, KeyError):
            self.damaged += bool(line.strip())
            return
        for name, value in record.items():
            curve = self.curves.get(name)
            if curve is not None and type(value) is float:  # most of them
                curve.add(step, value)
            elif name != "global_step":
                self._add(name, step, _NOT_FINITE.get(value, value) if isinstance(value, str) else value)
        if "running_loss" in record:
            self.count += 1
            if digits:
                self.steps.append(step)
                self.losses.append(_float(record["running_loss"]))
                self.norms.append(_float(record.get("grad_norm")))

    def _add(self, name: str, step: int, value: Any) -> None:
        if isinstance(value, str):
            if len(self.words) < _NAMES:
                self.words[name] = value
            return
        curve = self.curves.get(name)
        if curve is None:
            if len(self.curves) >= _NAMES:
                if len(self.left_out) < _NAMES:
                    self.left_out.add(name)
                return
            curve = self.curves[name] = Curve()
        curve.add(step, _float(value))

    def newest(self, name: str) -> float | None:
        """The newest finite value; None where there is none."""
        curve = self.curves.get(name)
        return None if curve is None or curve.count == curve.bad else curve.newest[1]


def _float(value: Any) -> float:
    """NaN for what is no number, or one that is too large."""
    value = _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    return math.inf
