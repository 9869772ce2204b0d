"""Read a trace without torch: each rank's records, and tensors assembled from shards.

run = read(Path("one"))
run.parts[0].ranks[1].steps[5]              # rank 1's record of its sixth step
run.parts[0].tensors(5, "grad")             # {"layers.0.weight": WholeTensor(...)} of all ranks together

A run that was restarted has a part for each start.
"""

import base64
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "FOLDER_FILE",
    "FORMAT",
    "NO_STEP",
    "RankTrace",
    "TraceError",
    "TracePart",
    "TraceRun",
    "WholeTensor",
    "floats",
    "read",
    "summary",
    "words",
]


# Version of the trace's format, which `lockstep trace` writes into trace.json.
FORMAT = 2
FOLDER_FILE = "trace.json"
NO_STEP = "no process reached a step of a torch optimizer (a process started as python -I, -E or -S is not recorded)"
# Columns of a row of sums: digest, sum of squares, eight signed sums.
_WIDTH = 10


class TraceError(Exception):
    """Trace that is missing or unreadable; one line."""


def words(raw: memoryview | None) -> list[int]:
    """Return the int64 values of a record."""
    if raw:
        return raw.cast("q").tolist()
    return []


def floats(raw: memoryview | None) -> list[float]:
    """Return the float64 values of a record."""
    if raw:
        return [float(value) for value in raw.cast("d")]
    return []


@dataclass
class WholeTensor:
    """Tensor, assembled from the ranks' shards.

    Attributes:
        digest: 32 bits; equal for equal bits, however the tensor is sharded.
        square: sum of squares.
        sketch: signed sums.
        other: the first rank whose copy of a replicated piece differs, and the distance of the two.
        ranks: all such ranks.
        opaque: assembled from pieces with unknown places.
    """

    digest: int
    square: float
    sketch: tuple[float, ...]
    kind: str
    other: tuple[int, float] | None = None
    ranks: list[int] = field(default_factory=list)
    opaque: bool = False

    @property
    def norm(self) -> float:
        if self.square >= 0:
            return math.sqrt(self.square)
        return math.nan


@dataclass
class RankTrace:
    """The trace of one process.

    Attributes:
        end: what follows its last step; None if it was killed.
    """

    head: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    full: bool = False
    failed: str = ""


@dataclass
class TracePart:
    """The processes of one start, by rank.

    Attributes:
        hidden: (kind, name) of excluded tensors.
    """

    ranks: dict[int, RankTrace]
    hidden: set[tuple[str, str]] = field(default_factory=set)
    _cache: dict[tuple[int, str], dict[str, WholeTensor]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return max(int(rank.head["world"]) for rank in self.ranks.values())

    @property
    def first(self) -> RankTrace:
        return self.ranks[min(self.ranks)]

    @property
    def count(self) -> int:
        """Steps that all ranks have."""
        return min(len(rank.steps) for rank in self.ranks.values())

    def records(self, step: int) -> dict[int, dict[str, Any]]:
        """Return rank -> its record of the step at this index."""
        by_rank = {}
        for number, rank in self.ranks.items():
            if step < len(rank.steps):
                by_rank[number] = rank.steps[step]
        return by_rank

    def names(self, step: int, kind: str) -> set[str]:
        """Return the names of a kind without values: "frozen"."""
        entries = []
        for number, record in self.records(step).items():
            entries.append((number, record.get(kind)))
        return {n for number, entry in entries if entry is not None for n in self.ranks[number].tables[entry]["names"]}

    def tensors(self, step: int, kind: str) -> dict[str, WholeTensor]:
        """Return name -> tensor of a kind, such as "grad", "weights", "begin" or "initial".

        A kind that was recorded in several parts ("initial#1" of a second model) is merged.
        """
        key = (step, kind)
        if key not in self._cache:
            # Steps are mostly read in order, so old entries are seldom needed again.
            if len(self._cache) > 64:
                self._cache.clear()
            self._cache[key] = self._assemble(step, kind)
        tensors = self._cache[key]
        if self.hidden:
            visible = {}
            for n, w in tensors.items():
                if (kind, n) not in self.hidden:
                    visible[n] = w
            return visible
        return tensors

    def _assemble(self, step: int, kind: str) -> dict[str, WholeTensor]:
        pieces: dict[str, dict[tuple[int, int], tuple[int, list[int], list[float], str]]] = {}
        tensors: dict[str, WholeTensor] = {}
        entries = [
            (number, record[key])
            for number, record in self.records(step).items()
            for key in record
            if (key == kind or key.startswith(f"{kind}#")) and record[key]
        ]
        for number, entry in entries:
            table = self.ranks[number].tables[entry[0]]
            raw = words(entry[1])
            values = floats(entry[1])
            for row, name in enumerate(table["names"]):
                at = table["starts"][row]
                size = table["sizes"][row]
                # A piece with an unknown position is not taken for another rank's copy.
                key = (at, size) if at >= 0 else (-1 - number, size)
                shards = pieces.setdefault(name, {})
                numbers = values[row * _WIDTH + 1 : (row + 1) * _WIDTH]
                digest = raw[row * _WIDTH]
                if key not in shards:
                    shards[key] = (digest, raw[row * _WIDTH : (row + 1) * _WIDTH], numbers, table["types"][row])
                    self._add(tensors, name, digest, numbers, table["types"][row], at < 0)
                elif shards[key][0] != digest:
                    tensor = tensors[name]
                    tensor.ranks.append(number)
                    if tensor.other is None:
                        tensor.other = (number, distance(tuple(shards[key][2][1:]), tuple(numbers[1:])))
        return tensors

    @staticmethod
    def _add(
        tensors: dict[str, WholeTensor], name: str, digest: int, numbers: list[float], kind: str, opaque: bool
    ) -> None:
        tensor = tensors.get(name)
        if tensor is None:
            tensors[name] = WholeTensor(digest, numbers[0], tuple(numbers[1:]), kind, opaque=opaque)
            return
        tensor.digest = (tensor.digest + digest) & 0xFFFFFFFF
        tensor.square += numbers[0]
        tensor.sketch = tuple(a + b for a, b in zip(tensor.sketch, numbers[1:], strict=True))
        tensor.opaque |= opaque


def distance(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Estimate the 2-norm of two tensors' difference from their sketches; NaN if not finite."""
    total = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
    # False for NaN.
    if total == total:
        return math.sqrt(total / max(1, len(first)))
    return math.nan


@dataclass
class TraceRun:
    """A trace, with a part for each start.

    Attributes:
        name: as the user gave it.
        full: recording ended at the limit of --max-mb.
    """

    name: str
    parts: list[TracePart]
    info: dict[str, Any]
    full: bool = False


def read(folder: Path) -> TraceRun:
    """Read a trace up to its last complete line.

    Raises:
        TraceError: no trace, another format, or no optimizer step in any process.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; record a trace with `lockstep trace -o DIR -- ...`")
    try:
        info = json.loads((folder / FOLDER_FILE).read_text(encoding="utf-8"))
        is_trace = isinstance(info, dict) and "format" in info
    except (OSError, ValueError):
        is_trace = False
    if not is_trace:
        raise TraceError(
            f"{folder} is not a trace: it has no {FOLDER_FILE}; record one with `lockstep trace -o DIR -- ...`"
        )
    if info["format"] != FORMAT:
        raise TraceError(f"{folder} has format {info['format']}, but this lockstep reads {FORMAT}: record it again")
    ranks = []
    for path in sorted(folder.glob("rank*.jsonl")):
        if (trace := _rank(path)) is not None:
            ranks.append(trace)
    trained = [rank for rank in ranks if rank.steps]
    if not trained:
        forwards = any(rank.end and any(f["train"] for f in rank.end["fwd"]) for rank in ranks)
        if forwards:
            reason = "it has training forwards but no step of a torch optimizer: the update is compiled or hand-written"
        else:
            reason = NO_STEP
        raise TraceError(f"{folder} has no optimizer step: {reason}")
    return TraceRun(str(folder), _parts(trained), info, any(rank.full for rank in ranks))


def _rank(path: Path) -> RankTrace | None:
    """Read the file of one process, without a truncated last line."""
    rank: RankTrace | None = None
    with path.open("rb") as file:
        for record in _records(file):
            if record.get("t") == "begin":
                rank = RankTrace(record)
            elif rank is None:
                return None
            else:
                _add(rank, record)
    return rank


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records up to the first line that is none."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        if "words" in record:
            _fill(record)
        yield record


def _add(rank: RankTrace, record: dict[str, Any]) -> None:
    """Add a record after the first to its rank's trace."""
    record_type = record.get("t")
    if record_type == "table":
        rank.tables[record["id"]] = record
    elif record_type == "step":
        if record.get("begin") == "weights" and rank.steps:
            record["begin"] = rank.steps[-1]["weights"]
        _append(rank.steps, record)
    elif record_type == "end":
        rank.end = record
    elif record_type == "full":
        rank.full = True
    elif record_type == "failed":
        rank.failed = record["error"]


def _fill(record: dict[str, Any]) -> None:
    """Insert the words of a record where it refers to them; `journal._line` wrote them."""
    raw = memoryview(base64.b64decode(record.pop("words")))

    def part(place: list[int]) -> memoryview:
        return raw[8 * place[0] : 8 * (place[0] + place[1])]

    # Named tensors are stored as [number of a table, their sums].
    for value in record.values():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], int):
            value[1] = part(value[1])
    for batch in (*record["loads"], *record["fwd"]):
        batch.update({key: part(batch[key]) for key in ("s", "leaf", "out", "og") if key in batch})
        if "mv" in batch:
            batch["mv"] = [part(place) for place in batch["mv"]]


def _append(steps: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Append a record, or merge an extra update into the step before.

    An update of the same optimizer without a backward before it belongs to that optimizer's last step.
    """
    previous = steps[-1] if steps else None
    if previous is None or record["loss"] or record["opt"] != previous["opt"] or not previous["loss"]:
        steps.append(record)
        return
    previous["again"] = previous.get("again", 0) + 1
    for key in ("weights", "buffers", "state"):
        if key in record:
            previous[key] = record[key]


def _parts(ranks: list[RankTrace]) -> list[TracePart]:
    """Group the ranks by start: a rank that appears again belongs to the next start.

    The clocks of several nodes may differ, so if all ranks appear equally often no clock decides.
    """
    starts: dict[int, list[RankTrace]] = {}
    parts: list[dict[int, RankTrace]] = []
    for rank in sorted(ranks, key=lambda rank: rank.head["time"]):
        number = rank.steps[0].get("rank", rank.head["rank"])
        starts.setdefault(number, []).append(rank)
        if not parts or number in parts[-1]:
            parts.append({})
        parts[-1][number] = rank
    if len({len(traces) for traces in starts.values()}) == 1:
        parts = []
        for traces in zip(*starts.values(), strict=True):
            parts.append(dict(zip(starts, traces, strict=True)))
    return [TracePart(dict(sorted(start.items()))) for start in parts]


def summary(folder: Path) -> str:
    """Describe a trace in a line."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    try:
        run = read(folder)
    except TraceError as error:
        return str(error)
    last_part = run.parts[-1]
    counts = " and ".join(str(trace_part.count) for trace_part in run.parts)
    ranks = f"{len(last_part.ranks)} rank{'s' if len(last_part.ranks) > 1 else ''}"
    # The folder of one of several nodes has only the ranks of that node.
    if len(last_part.ranks) < last_part.world:
        ranks = f"{len(last_part.ranks)} of {last_part.world} ranks"
    lines = [f"{counts} steps of {ranks}, {size / 2**20:.2f} MiB in {folder}"]
    if run.full:
        count = min(len(rank.steps) for rank in last_part.ranks.values())
        lines.append(f"recording ended after step {count}: the limit of --max-mb was reached")
    return "; ".join(lines)
