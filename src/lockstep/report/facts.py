"""Gather everything that a run's folder records, as plain values.

    facts = gather(Path("outputs/digits"))
    facts.verdict()                 # a sentence or two: how it ended, its quality, where time was lost

Missing or damaged files become notes, not errors. `gather` raises ConfigError if the folder is not a run's.
"""

import contextlib
import json
import math
import re
import tomllib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import checkpoint
from lockstep.checkpoint.check import resume_problems
from lockstep.checkpoint.format import read_manifest
from lockstep.config import cli
from lockstep.config.schema import DEFAULTS, is_auto
from lockstep.config.secrets import environment_snapshot, is_secret_name, mask, printable
from lockstep.config.task_options import OWN, kind_of
from lockstep.errors import CheckpointError, ConfigError, StorageError
from lockstep.report.curves import Curve
from lockstep.report.goodput import Goodput, duration, goodput, waits
from lockstep.run_state import RunState, Selection
from lockstep.timeline import EVALUATION, LOADING, SAVES, TRAINING

__all__ = [
    "RunFacts",
    "format_value",
    "gather",
    "number",
]


# Bytes of a file that is read whole.
_SMALL_FILE = 16 << 20
# Most bytes of a line.
_RECORD_LINE = 1 << 20
# Most curves that are kept.
_MAX_CURVES = 200
# Steps that float64 represents exactly.
_MAX_STEP = 1 << 53
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def format_value(value: Any, most: int = 160) -> str:
    """Format a value for the page: secrets masked, control characters escaped, long text cut."""
    text = printable(mask(value if isinstance(value, str) else _plain(value)))
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _small_text(path: Path, notes: list[str]) -> str | None:
    """Read a text file; None if it is missing, or unreadable, which is noted."""
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > _SMALL_FILE:
            notes.append(f"{path.name} is not a regular file, or too large")
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")
        return None


def _small_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read an object from a JSON file; {} if it is missing or damaged.

    Damage is noted.
    """
    text = _small_text(path, notes)
    if text is None:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(text)
        if isinstance(data, dict):
            return data
    notes.append(f"{path.name} is damaged")
    return {}


def _small_toml(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read a TOML file by dotted name; {} if it is missing or damaged.

    Damage is noted.
    """
    text = _small_text(path, notes)
    if text is None:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        return dict(_flatten(tomllib.loads(text)))
    notes.append(f"{path.name} is damaged")
    return {}


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _lines_of(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the lines of a file of any size, without those beyond a megabyte.

    An unreadable file has none, and is noted.
    """
    try:
        if not path.is_file():
            return
        with open(path, "rb") as file:
            at_line_start = True
            while line := file.readline(_RECORD_LINE):
                ends = line.endswith(b"\n")
                # A longer line is not a record of lockstep: skip all its pieces.
                if at_line_start and (ends or len(line) < _RECORD_LINE):
                    yield line
                at_line_start = ends
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")


class Records:
    """A run's records, with a curve for each name.

    Attributes:
        curves: by name, in order of appearance; numbers only.
        left_out: names beyond the limit.
        count: of training records.
        words: the newest value of each name whose values are text.
        steps, losses, norms: of the training records, float64 each, for exact comparisons.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.left_out: set[str] = set()
        self.words: dict[str, str] = {}
        self.count = self.damaged = 0
        self.steps = array("q")
        self.losses = array("d")
        self.norms = array("d")

    @classmethod
    def read(cls, path: Path, notes: list[str], *, digits: bool = False) -> "Records":
        """Read metrics.jsonl.

        Args:
            digits: keep steps, losses and norms too, 24 bytes a record.
        """
        records = cls()
        for line in _lines_of(path, notes):
            records._add_record(line, digits)
        if records.damaged:
            lines = f"{records.damaged} lines" if records.damaged > 1 else "1 line"
            notes.append(f"{lines} of {path.name} could not be read")
        if records.left_out:
            notes.append(f"{path.name} has more than {_MAX_CURVES} curves; the rest are not drawn")
        return records

    def _add_record(self, line: bytes, digits: bool) -> None:
        try:
            record = json.loads(line)
            step = record["global_step"]
            if type(step) is not int or not 0 <= step < _MAX_STEP:
                raise ValueError
        except (ValueError, RecursionError, TypeError, KeyError):
            self.damaged += bool(line.strip())
            return
        for name, value in record.items():
            curve = self.curves.get(name)
            # The usual case comes first, since a long run has millions of numbers.
            if curve is not None and type(value) is float:
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
            if len(self.words) < _MAX_CURVES:
                self.words[name] = value
            return
        curve = self.curves.get(name)
        if curve is None:
            if len(self.curves) >= _MAX_CURVES:
                if len(self.left_out) < _MAX_CURVES:
                    self.left_out.add(name)
                return
            curve = self.curves[name] = Curve()
        curve.add(step, _float(value))

    def newest(self, name: str) -> float | None:
        """Return the newest finite value; None if there is none."""
        curve = self.curves.get(name)
        if curve is None or curve.count == curve.bad:
            return None
        return curve.newest[1]


def _float(value: Any) -> float:
    """Convert to float: NaN if it is no number, inf if it is too large."""
    if isinstance(value, str):
        value = _NOT_FINITE.get(value, value)
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return math.nan
    return math.inf


_RUN_FILES = ("config.toml", "state.json", "metrics.jsonl", "run.lock", "checkpoints", "timeline.jsonl")
# Bytes of checkpoints that are read for their fingerprints.
_READ_BUDGET = 512 << 20
# Log files that are read, and lines that are shown.
_LOGS = 64
_LINES = 12
_CHECKPOINTS = 24
_CERTIFICATES = 4
_VERDICTS = 8
_LINE = re.compile(rb"(\S+) rank (\d+) (WARNING|ERROR) (.*)")
# The text that the guards log for a spike.
_SPIKE = b"three times the usual or more"
_TROUBLES = {
    "skipped_steps": "updates not applied, in the last start",
    "steps_left_out": "steps skipped by a guard",
    "loading/retries": "failed attempts to load a sample",
    "loading/left_out": "samples skipped",
    "loading/restarts": "loader processes restarted",
}


@dataclass(slots=True)
class StoredCheckpoint:
    """A checkpoint in the run's folder.

    Attributes:
        fingerprint: the digest of the parameters, or the reason it is missing.
        whole: whether it is complete.
    """

    step: int
    world: str
    engine: str
    size: int
    fingerprint: str
    whole: bool


@dataclass(slots=True)
class RunFacts:
    """The facts of a run's folder.

    Attributes:
        changed: settings that differ from their defaults, by name: (value, default), as text without secrets.
        chosen: settings that were "auto", by name: the value chosen, as text.
        config: all settings as text, for comparisons.
        troubles: (kind, how often).
        warnings: the newest warning lines of the logs: (time, rank, level, text).
        warned: the number of such lines.
        account: the wall time by part; None if the run has no timeline.
        notes: files that could not be read.
        is_script: recorded of a command that lockstep does not run, so without settings, guards and checkpoints.
    """

    folder: Path
    name: str
    records: Records
    notes: list[str]
    state: RunState = field(default_factory=RunState)
    ended: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    is_script: bool = False
    config: dict[str, str] = field(default_factory=dict)
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    troubles: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str, str, str]] = field(default_factory=list)
    warned: int = 0
    spikes: int = 0
    checkpoints: list[StoredCheckpoint] = field(default_factory=list)
    certificates: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    account: Goodput | None = None

    @property
    def step(self) -> int:
        """Steps trained, by the newest record, checkpoint or state."""
        curves = []
        for curve in self.records.curves.values():
            if curve.count > curve.bad:
                curves.append(curve.newest[0])
        stored = [self.state.global_step, integer_of(self.ended.get("step"))]
        return max(
            [*curves, *(item for item in stored if item is not None), *(item.step for item in self.checkpoints), 0]
        )

    @property
    def steps(self) -> int | None:
        """Planned steps; None if unknown."""
        return integer_of(self.state.plan.get("steps")) or integer_of(_number_of(self.config.get("max_steps"))) or None

    @property
    def status(self) -> str:
        """How the run ended, by its own record."""
        status = self.ended.get("status")
        if status in ("finished", "stopped", "abandoned", "interrupted", "preempted", "failed"):
            return str(status)
        return "no end recorded"

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best evaluation."""
        best = self.state.selection.best
        if best:
            return (format_value(best.metric, 60), best.metric_value, best.step)
        return None

    def verdict(self) -> str:
        """Summarise how the run ended, its quality, and its problems."""
        of = f" of {self.steps:,}" if self.steps else ""
        words = {
            "finished": f"Finished: {self.step:,}{of} steps",
            "failed": f"Failed after {self.step:,}{of} steps",
            "no end recorded": f"No end recorded: still running, or killed at step {self.step:,}{of}",
        }
        text = words.get(self.status, f"{self.status.capitalize()} after {self.step:,}{of} steps")
        if self.account:
            text += f" in {duration(self.account.wall)}"
        loss = self.records.curves.get("running_loss")
        if loss and loss.count > loss.bad:
            text += f"; training loss from {number(loss.first[1])} to {number(loss.newest[1])}"
        if self.best:
            metric, value, step = self.best
            text += f"; best evaluation {metric} {number(value)} after step {step:,}"
        text += "."
        if self.account:
            text += f" {self.account.share:.1%} of the wall time was spent on training steps that were kept."
        if sentence := self.waits():
            text += f" {sentence}."
        if self.profiles:
            text += f" {format_value(self.profiles[-1].get('sentence', ''), 300)}"
        problems = [f"{name}: {count}" for name, count in self.troubles]
        if problems:
            return f"{text} Problems: {'; '.join(problems)}."
        return text

    def waits(self) -> str:
        """Describe the part that most exceeds its normal time; "" if none does.

        Its share is of the wall time, as in the page's table.
        """
        if not self.account:
            return ""
        parts: dict[str, float] = {}
        for name, curve in self.records.curves.items():
            if name.startswith("time/") and name != "time/total" and curve.count - curve.bad > 1:
                # The first value includes the start, such as compilation.
                total = sum(span.mean * span.count for span in curve.spans()) - curve.first[1]
                parts[name.removeprefix("time/")] = max(0.0, total)
        seconds = self.account.seconds
        steps = seconds[TRAINING] + seconds[LOADING]
        step_total = sum(parts.values())
        by_part = {"steps": steps, "data": seconds[LOADING], "saves": seconds[SAVES], "evaluation": seconds[EVALUATION]}
        # Only the records have the time of the exchange: scale its share to all steps.
        by_part["exchange"] = steps * parts.get("exchange", 0.0) / (step_total or 1.0)
        workers = _number_of(self.config.get("data.workers")) or 0
        return waits(by_part, workers=workers, ranks=self.account.starts[-1].world, wall=self.account.wall)


@environment_snapshot()
def gather(folder: Path, *, digits: bool = False) -> RunFacts:
    """Gather the facts of a run's folder.

    Args:
        digits: keep exact losses and norms too, for comparisons.

    Raises:
        ConfigError: the folder is missing, or not a run's.
    """
    folder = folder.expanduser()
    label = format_value(str(folder))
    try:
        if not folder.is_dir():
            raise ConfigError(f"{label} is not a folder; give a run's folder, SAVE_DIR/EXPERIMENT_NAME")
        if not any((folder / name).exists() for name in _RUN_FILES):
            raise ConfigError(f"{label} is not a run's folder: it has none of {', '.join(_RUN_FILES)}")
    except OSError as error:
        raise ConfigError(f"{label}: {error.strerror or error}") from error
    notes: list[str] = []
    records = Records.read(folder / "metrics.jsonl", notes, digits=digits)
    facts = RunFacts(folder, format_value(folder.resolve().name, 100), records, notes)
    facts.state = RunState.from_json(_small_json(folder / "state.json", notes), lenient=True)
    evaluated = Selection.from_json(_small_json(folder / "checkpoints" / "evaluated.json", notes))
    facts.state.selection.best = evaluated.best or facts.state.selection.best
    facts.ended = _small_json(folder / "ended.json", notes)
    facts.environment = _small_json(folder / "environment.json", notes)
    # lockstep.commands.script writes this file.
    facts.is_script = (folder / "command.json").is_file()
    _read_config(facts)
    try:
        facts.account = goodput(folder / "timeline.jsonl")
        notes += facts.account.notes
    except ConfigError:
        notes.append("timeline.jsonl is missing: the wall time is unknown")
    _read_logs(facts)
    _read_checkpoints(facts)
    _read_proofs(facts)
    _count_troubles(facts)
    return facts


def number(value: float) -> str:
    """Format a curve's value with five digits."""
    if 1e5 <= abs(value) < 1e12 and value == int(value):
        return f"{value:,.0f}"
    return f"{value:.5g}"


def integer_of(value: Any) -> int | None:
    """Return the value if it is an integer, else None."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
        return value
    return None


def _number_of(text: str | None) -> int | None:
    if text is not None and re.fullmatch(r"\d{1,15}", text):
        return int(text)
    return None


def _read_config(facts: RunFacts) -> None:
    settings = _small_toml(facts.folder / "config.toml", facts.notes)
    own_task = kind_of(str(settings.get("task", ""))) == OWN
    defaults: Mapping[str, Any] = cli.flatten(DEFAULTS, own_task=own_task)
    for name, value in settings.items():
        name = format_value(name, 80)
        text = "***" if is_secret_name(name) and value else format_value(value)
        facts.config[name] = text
        if name in ("experiment_name", "save_dir"):
            continue
        if name in defaults and is_auto(DEFAULTS, name):
            facts.chosen[name] = text
        elif name not in defaults or defaults[name] != value:
            facts.changed[name] = (text, format_value(defaults[name]) if name in defaults else "")


def _read_logs(facts: RunFacts) -> None:
    newest_lines: deque[tuple[str, str, str, str]] = deque(maxlen=_LINES)
    if (facts.folder / "logs").is_dir():
        files = sorted((facts.folder / "logs").glob("rank-*.log"))
    else:
        files = []
    for path in files[:_LOGS]:
        rank_lines: deque[tuple[str, str, str, str]] = deque(maxlen=_LINES)
        for line in _lines_of(path, facts.notes):
            match = _LINE.match(line)
            if match:
                facts.warned += 1
                facts.spikes += _SPIKE in line
                # The first of them is enough to see.
                if _SPIKE in line and facts.spikes > 1:
                    continue
                when, rank, level, text = (field.decode("utf-8", "replace") for field in match.groups())
                rank_lines.append((format_value(when[:19], 20), rank[:6], level, format_value(text, 300)))
        newest_lines = deque(sorted([*newest_lines, *rank_lines])[-_LINES:], _LINES)
    facts.warnings = list(newest_lines)


def _read_checkpoints(facts: RunFacts) -> None:
    try:
        steps = checkpoint.list_steps(facts.folder)
    except (CheckpointError, StorageError) as error:
        facts.notes.append(format_value(str(error)))
        return
    budget = _READ_BUDGET
    # The newest checkpoints first, since they are the first to be read within the budget.
    for step in reversed(steps[-_CHECKPOINTS:]):
        path = checkpoint.path_of(facts.folder, step)
        try:
            manifest = read_manifest(path)
            world = str(manifest.world)
            engine = format_value(manifest.engine, 40)
            size = manifest.size
        except (CheckpointError, StorageError, OSError) as error:
            facts.checkpoints.append(StoredCheckpoint(step, "?", "?", 0, format_value(str(error)), False))
            continue
        if problems := resume_problems(path, manifest):
            facts.checkpoints.append(StoredCheckpoint(step, world, engine, size, format_value(problems[0]), False))
            continue
        if size > budget:
            text = f"not computed: run `lockstep checkpoint inspect --step {step}`"
            facts.checkpoints.append(StoredCheckpoint(step, world, engine, size, text, True))
            continue
        budget -= size
        try:
            facts.checkpoints.append(StoredCheckpoint(step, world, engine, size, checkpoint.fingerprint(path), True))
        except (CheckpointError, StorageError, OSError) as error:
            facts.checkpoints.append(StoredCheckpoint(step, world, engine, size, format_value(str(error)), False))


def _read_proofs(facts: RunFacts) -> None:
    """Read the certificates of `lockstep verify` in the folder, and the verdicts of `lockstep profile`."""
    for path in sorted(facts.folder.glob("*.json")):
        if path.name in ("state.json", "ended.json", "environment.json"):
            continue
        data = _small_json(path, [])
        rows = data.get("rows")
        if isinstance(rows, list) and "fingerprints" in data and len(facts.certificates) < _CERTIFICATES:
            certificate = []
            for row in rows[:_CHECKPOINTS]:
                if isinstance(row, dict):
                    certificate.append(row)
            facts.certificates.append(
                {"file": format_value(path.name), "steps": format_value(data.get("steps", "?")), "rows": certificate}
            )
    paths = sorted((facts.folder / "profile").glob("*-*/verdict.json"), key=lambda path: path.parent.name)
    verdicts = []
    for path in paths[-_VERDICTS:]:
        verdicts.append((path, _small_json(path, facts.notes)))
    facts.profiles = [verdict for _, verdict in verdicts if isinstance(verdict.get("parts"), dict)]
    facts.profiles.sort(key=lambda verdict: str(verdict.get("steps")))


def _count_troubles(facts: RunFacts) -> None:
    for metric, trouble in _TROUBLES.items():
        count = facts.records.newest(metric)
        if count:
            facts.troubles.append((trouble, f"{count:,.0f}"))
    restarts = facts.state.restarts
    losses = facts.state.losses
    for count, trouble in ((restarts, "restarts after a failure"), (losses, "rank failures, survived by the others")):
        if count:
            facts.troubles.append((trouble, f"{count:,}"))
    if facts.spikes:
        facts.troubles.append(("gradient norm spikes, by the logs", f"{facts.spikes:,}"))
    loss = facts.records.curves.get("running_loss")
    if loss and loss.bad:
        facts.troubles.append(("records with a non-finite loss", f"{loss.bad:,}"))
