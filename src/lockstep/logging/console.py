"""Show a run on the terminal: progress bar, records as lines, summary.

    with waiting("evaluating", shown=world.is_main) as progress:
        progress(120, 339)                  # done, total

`Console` is a run's sink: a bar that is redrawn on a terminal, plain lines elsewhere. `waiting` is a bar on stderr for
other long work; it disappears when the work is done.
"""

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.console import OverflowMethod
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.config.secrets import mask, printable
from lockstep.files import bytes_text
from lockstep.logging.plots import curve

__all__ = [
    "Console",
    "perplexity",
    "waiting",
]


# Held while a timer draws, and during a fork. Otherwise a loader process would inherit locks of the terminal from a
# thread that does not exist in it, and wait for them forever.
_TERMINAL_LOCK = threading.RLock()
os.register_at_fork(
    before=_TERMINAL_LOCK.acquire, after_in_parent=_TERMINAL_LOCK.release, after_in_child=_TERMINAL_LOCK.release
)


class Ticker:
    """Timer that calls `tick` in its own thread until `stop`.

    The first error ends it silently.

    Args:
        tick: must not wait for the thread that made the ticker.
        seconds: between two calls.
    """

    def __init__(self, tick: Callable[[], None], seconds: float) -> None:
        self._tick = tick
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a running call, unless a blocked terminal delays it."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        # The terminal is gone: the run continues without a bar.
        with contextlib.suppress(Exception):
            while not self._over.wait(self._seconds):
                with _TERMINAL_LOCK:
                    if not self._over.is_set():
                        self._tick()


class _Screen(Terminal):
    """rich's console that survives a closed pipe (`| head`).

    rich itself would end the process.
    """

    def on_broken_pipe(self) -> None:
        # The run continues: its records and its log are in its folder.
        self.quiet = True
        # Buffered output must not fail at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _terminal(stream: TextIO, interactive: bool | None = None) -> Terminal:
    """Make rich's console on `stream`, without markup.

    Args:
        interactive: redraw in place; None: if the stream is a capable terminal.
    """
    # rich's own detection obeys FORCE_COLOR, which CI services set: it would put control sequences into a log.
    able = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    redraws = able if interactive is None else interactive
    return _Screen(
        file=stream,
        force_terminal=redraws,
        color_system="auto" if redraws else None,
        force_jupyter=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


# --- texts

# The most numbers of the task itself in a line.
_TASK_NUMBERS = 3


def count_text(count: float) -> str:
    """Format a count or rate in at most five characters: 950, 12.3k, 4.56M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:#.3g}".rstrip(".") + unit
    if count < 100:
        return f"{count:.3g}"
    return f"{count:.0f}"


def duration_text(seconds: float) -> str:
    """Format seconds as a clock: 0:07, 1:02:03, 3 d 04:00:00."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}:{second:02d}"
    if hour:
        return f"{hour}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def loss_text(loss: float) -> str:
    """Format a loss with four decimals, or five digits if very large or small."""
    if 0.001 <= abs(loss) < 10000:
        return f"{loss:.4f}"
    return f"{loss:.5g}"


def _numbers_of(record: Mapping[str, Any], items: str) -> list[str]:
    """Format the record's main numbers with names, most important first.

    Missing ones are left out.
    """
    formats = (
        ("running_loss", lambda value: f"loss {loss_text(value)}"),
        ("evaluation/loss", lambda value: f"evaluation {_losses(record, value)}"),
        ("best", str),
        ("lr", lambda value: f"lr {value:.2e}"),
        ("items_per_second", lambda value: f"{count_text(value)} {items}/s"),
        ("memory", bytes_text),
    )
    numbers = []
    for name, text in formats:
        if record.get(name) is not None:
            numbers.append(text(record[name]))
    return numbers


def _losses(record: Mapping[str, Any], loss: float) -> str:
    """Format the evaluation's loss; with several sets each one's, with its name."""
    by_set = []
    for name in _sets(record):
        by_set.append(f"{name} {loss_text(record[f'evaluation/{name}/loss'])}")
    return "  ".join(by_set) or loss_text(loss)


def line_of(record: Mapping[str, Any], steps: int, items: str, seconds_left: float | None) -> str:
    """Format a record as one plain line of ASCII, except for the user's names.

    Args:
        steps: the last step.
        items: name of the items, in the plural.
        seconds_left: seconds until the last step, if known.
    """
    parts = [f"step {record.get('global_step', '?')}/{steps}"]
    if "evaluation/loss" in record:
        numbers = _format_evaluation(record, items)
        return "  ".join([*parts, "evaluation " + "  ".join(f"{name} {text}" for name, text in numbers)])
    # A record with the caller's own numbers, which may have any name.
    if "running_loss" not in record:
        numbers_of_caller = {}
        for name, value in record.items():
            if name != "global_step":
                numbers_of_caller[name] = value
        return "  ".join([*parts, *(f"{name} {value:.5g}" for name, value in numbers_of_caller.items())])
    epochs = _epochs(record)
    parts += [f"epoch {epochs:.2f}"] if epochs is not None else []
    parts += _numbers_of(record, items)
    parts += [f"grad {record['grad_norm']:.3g}"] if record.get("grad_norm") is not None else []
    for name in _task_names(record):
        parts.append(f"{name.removeprefix('train/')} {record[name]:.5g}")
    parts += [f"{duration_text(seconds_left)} left"] if seconds_left else []
    return "  ".join(parts)


def _task_names(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the task's own numbers in the record's line."""
    return [name for name in record if name.startswith("train/")][:_TASK_NUMBERS]


def summary_rows(values: Mapping[str, Any], steps: int, items: str) -> list[tuple[str, str]]:
    """Return the summary's rows, (name, text); unknown values have no row.

    Args:
        values: the names of the records and of `Console.close`.
        steps: the last step planned.
        items: name of the items, in the plural.
    """
    # 0 means that it was not measured.
    memory = values.get("memory") or None
    evaluated = []
    for name, text in _format_evaluation(values, items):
        evaluated.append((name if name == "perplexity" else f"evaluation {name}", text))
    rows: tuple[tuple[str, Any, Callable[[Any], str]], ...] = (
        ("experiment", values.get("experiment"), str),
        ("steps", values.get("global_step"), lambda step: f"{step} of {steps}"),
        ("epochs", _epochs(values), lambda epoch: f"{epoch:.3g}"),
        ("training loss", values.get("running_loss"), loss_text),
        *((name, text, str) for name, text in evaluated),
        ("best evaluation", values.get("best"), str),
        (f"{items}/s", values.get("items_per_second"), count_text),
        ("time", values.get("seconds"), duration_text),
        ("gradient spikes", values.get("spikes"), lambda count: f"{count} (the log has each)"),
        ("peak memory", memory, bytes_text),
        ("processes", values.get("world_size"), lambda count: f"{count}{values.get('replicas', '')}"),
        ("engine", values.get("engine"), str),
    )
    return [(name, text(value)) for name, value, text in rows if value is not None]


def _format_evaluation(record: Mapping[str, Any], items: str) -> list[tuple[str, str]]:
    """Return an evaluation's numbers as (name, text): loss, perplexity of tokens, metrics.

    With several sets, those of each.
    """
    numbers: list[tuple[str, str]] = []
    for prefix in [f"{name}/" for name in _sets(record)] or [""]:
        loss = record.get(f"evaluation/{prefix}loss")
        if loss is not None:
            numbers.append((f"{prefix}loss", loss_text(loss)))
            numbers += [(f"{prefix}perplexity", f"{perplexity(loss):.4g}")] if items == "tokens" else []
        names_in_set = []
        for name in record:
            if name.startswith(f"evaluation/{prefix}"):
                names_in_set.append(name.removeprefix(f"evaluation/{prefix}"))
        metrics = []
        for name in names_in_set:
            if name not in ("loss", "items"):
                metrics.append(name)
        for name in metrics:
            numbers.append((f"{prefix}{name}", f"{record[f'evaluation/{prefix}{name}']:.5g}"))
    return numbers


def _sets(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the evaluation's sets, if they have names."""
    counted = []
    for name in record:
        if name.endswith("/items") and name != "evaluation/items":
            counted.append(name.removesuffix("/items"))
    sets = []
    for name in counted:
        if f"{name}/loss" in record:
            sets.append(name.removeprefix("evaluation/"))
    return sets


def _epochs(record: Mapping[str, Any]) -> float | None:
    """Return the epochs so far, with the fraction of the current one."""
    return record["epoch"] + record.get("epoch_progress", 0) if "epoch" in record else None


def perplexity(loss: float) -> float:
    """Return exp(loss), for a loss that is a mean over tokens in nats."""
    # exp overflows above 709.
    if loss < 700:
        return math.exp(loss)
    if loss > 0:
        return math.inf
    return math.nan


# --- sink

# Seconds between two drawings after a record.
_REDRAW = 0.2
# Seconds between two drawings without a new record.
_MOVE = 0.5
# Seconds between two drawings without any change, to move the clock.
_TICK = 1.0
# Records from which the remaining time is estimated.
_PACE_RECORDS = 20
# First steps of a start that the estimate leaves out: they compile, and fill caches.
_SLOW_STEPS = 2
# Columns. A wider bar or curve adds no detail.
_MAX_WIDTH = 100


class Console:
    """The sink for the terminal.

    Args:
        steps: the step at which training ends.
        start: the step from which this process continues.
        items: name of the items, in the plural ("tokens", "images"); for tokens the perplexity is shown too.
        earlier: records from before `start`, for the curve.
        stream: where to write; None: standard output.
        interactive: redraw in place; None: if the stream is a terminal that can.
        planned: the last step of the plan, which the summary shows; None: `steps`.
    """

    def __init__(
        self,
        steps: int,
        start: int = 0,
        items: str = "items",
        earlier: Iterable[Mapping[str, Any]] = (),
        stream: TextIO | None = None,
        interactive: bool | None = None,
        planned: int | None = None,
    ) -> None:
        self._steps = steps
        # With --stop-at the bar ends there, and the run does not.
        self._planned = steps if planned is None else planned
        self._start = start
        self._step = start
        # When the latest step ended, and whether an evaluation has.
        self._step_end = time.monotonic()
        self._has_evaluated = False
        self._items = printable(mask(items))
        self._page = _Page(sys.stdout if stream is None else stream, interactive)
        self._bar: _Bar | None = None
        self._activity: list[str] = []
        # The latest value of each name.
        self._latest: dict[str, Any] = {}
        self._losses: list[tuple[float, float]] = []
        self._recent: deque[tuple[int, float]] = deque([(start, time.monotonic())], _PACE_RECORDS)
        for record in earlier:
            self._remember(record)
        # The peak belongs to a process, so it does not carry over to this one.
        self._latest.pop("memory", None)

    def start(self, info: dict[str, Any]) -> None:
        """Show an empty bar, on a terminal. `info` is in the log."""
        if self._page.terminal.is_terminal:
            self._bar = _Bar(self._page.terminal, self._tick)
            self._bar.draw(self._step, self._steps, None, [])

    def log(self, record: dict[str, Any]) -> None:
        """Update the bar with the record, or print it as a line."""
        self._remember(record)
        self._activity = []
        if "running_loss" in record:
            self._step = int(record["global_step"])
            self._add_pace()
        elif "evaluation/loss" in record and not self._has_evaluated:
            self._has_evaluated = True
            self._leave_out(time.monotonic() - self._step_end)
        if self._bar is None:
            # Such a line has only lockstep's own text. Masking it would take a quarter of a record's time.
            is_own = "running_loss" in record and "evaluation/loss" not in record and not _task_names(record)
            self._page.line(line_of(record, self._steps, self._items, self._time_left()), is_own=is_own)
        elif self._bar.is_due():
            self._draw()

    def progress(self, step: int, evaluated: tuple[int, int] | None = None) -> None:
        """Move the bar, now and then; during an evaluation show (done, total)."""
        self._step = step
        if evaluated is None:
            self._step_end = time.monotonic()
            if step <= self._start + _SLOW_STEPS:
                self._recent[0] = (step, self._step_end)
        if evaluated:
            self._activity = [f"evaluating {evaluated[0]}/{evaluated[1]}"]
        else:
            self._activity = []
        if self._bar is not None and self._bar.is_due(_MOVE):
            self._draw()

    def best(self, text: str) -> None:
        """Show the best evaluation so far in the bar."""
        # A new dict, since the timer's thread may read the old one now.
        self._latest = {**self._latest, "best": text or None}

    def close(self, summary: dict[str, Any] | None) -> None:
        """Close the bar, and show the summary unless the run failed.

        After it come the curve, a sample, the files and the last line.

        Args:
            summary: any of experiment, global_step, epoch_progress, running_loss, evaluation/loss, items_per_second,
                spikes and memory (missing ones are taken from the records), seconds, world_size, replicas, engine;
                `sample`, generated text; `files`, paths or {name: path}; `waits`, the largest loss of time; `failed`,
                other sinks; `next`, the last line. None if the run failed.
        """
        if self._bar is not None:
            self._activity = []
            self._draw()
            self._bar.stop()
            self._bar = None
        if summary is not None:
            self._table(summary)
            self._curve()
            self._sample(str(summary.get("sample") or "").strip("\n"))
            self._files(summary.get("files") or {})
            self._page.paragraph(str(summary.get("waits") or ""))
            self._page.paragraph(str(summary.get("failed") or ""))
            self._page.paragraph(str(summary.get("next") or ""))

    def _remember(self, record: Mapping[str, Any]) -> None:
        peak = max(self._latest.get("memory") or 0, record.get("memory") or 0)
        # A new dict, since the timer's thread may read the old one now.
        self._latest = {**self._latest, **record, **({"memory": peak} if peak else {})}
        if "running_loss" in record:
            self._losses.append((float(record["global_step"]), float(record["running_loss"])))

    def _add_pace(self) -> None:
        """Note when the step of a record ended, for the remaining time."""
        if self._step > self._start + _SLOW_STEPS:
            self._recent.append((self._step, time.monotonic()))

    def _leave_out(self, seconds: float) -> None:
        """Leave `seconds` out of the pace, as those of the first evaluation, which compiles too."""
        for index, (step, ended) in enumerate(self._recent):
            self._recent[index] = (step, ended + seconds)

    def _time_left(self) -> float | None:
        """Return the seconds until the last step at the recent pace; None if unknown."""
        first_step, since = self._recent[0]
        last_step, until = self._recent[-1]
        # No record has arrived yet, so use the progress.
        if first_step == last_step:
            last_step = self._step
            until = time.monotonic()
        if last_step > first_step:
            return (until - since) / (last_step - first_step) * (self._steps - self._step)
        return None

    def _tick(self) -> None:
        """Redraw; called by the timer."""
        bar = self._bar
        if bar is not None and bar.is_due(_TICK):
            self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            numbers = [*self._activity, *_numbers_of(self._latest, self._items)]
            self._bar.draw(self._step, self._steps, self._time_left(), numbers)

    def _table(self, summary: Mapping[str, Any]) -> None:
        if "epoch" in summary:
            # The epoch's progress belongs to the last record, and the summary counts whole epochs.
            self._latest.pop("epoch_progress", None)
        values = {**self._latest, **summary}
        if "running_loss" in summary and "global_step" in summary:
            # Steps after the last record.
            self._losses.append((float(summary["global_step"]), float(summary["running_loss"])))
        rows = summary_rows(values, self._planned, self._items)
        margin = max((len(name) for name, _ in rows), default=0)
        self._page.line("")
        for name, value in rows:
            line = Text(f"{name:<{margin}}  ", "cyan")
            line.append(printable(mask(value)), "default")
            self._page.show(line)

    def _curve(self) -> None:
        width = self._page.width - 1
        lines = curve(sorted(self._losses), max(width, 30), unicode=self._page.unicode)
        if lines:
            self._page.paragraph("training loss by step", "bold")
        for line in lines:
            self._page.show(Text(line))

    def _sample(self, text: str) -> None:
        if text:
            self._page.paragraph("sample from the model", "bold")
            for line in printable(text, keep="\n\t").expandtabs(4).split("\n"):
                self._page.show(Text(line))

    def _files(self, files: Mapping[str, Any] | Iterable[Any]) -> None:
        if isinstance(files, Mapping):
            pairs = [(str(name), path) for name, path in files.items()]
        else:
            pairs = []
        lines = [str(path) for path in files] if not pairs else []
        margin = max((len(name) for name, _ in pairs), default=0)
        for name, path in pairs:
            lines.append(f"{name:<{margin}}  {path}")
        if lines:
            self._page.paragraph(lines[0])
        for line in lines[1:]:
            self._page.line(line)


class _Page:
    """Lines on a stream, written literally."""

    def __init__(self, stream: TextIO, interactive: bool | None) -> None:
        self.terminal = _terminal(stream, interactive)
        self.unicode = "utf" in self.terminal.encoding.lower()

    @property
    def width(self) -> int:
        return min(self.terminal.width, _MAX_WIDTH)

    def paragraph(self, line: str, style: str = "") -> None:
        """Write an empty line, then this one; nothing if it is empty."""
        if line:
            self.line("")
            self.line(line, style)

    def line(self, line: str, style: str = "", *, is_own: bool = False) -> None:
        """Write a line of external text: masked and printable.

        Args:
            is_own: it has none, only lockstep's own words, numbers, and text that is masked already.
        """
        text = line if is_own else printable(mask(line))
        if self.terminal.is_terminal:
            self.show(Text(text, style))
        elif not self.terminal.quiet:
            self._write(text)

    def _write(self, text: str) -> None:
        """Write a line into a file or a pipe, without rich.

        rich would add nothing and take ten times as long.
        """
        file = self.terminal.file
        encoding = self.terminal.encoding
        if not self.unicode:
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            file.write(f"{text}\n")
            file.flush()
        except BrokenPipeError:
            self.terminal.on_broken_pipe()

    def show(self, line: Text) -> None:
        """Write a line that only the terminal wraps, so that a path can be copied."""
        encoding = self.terminal.encoding
        if not self.unicode:
            line.plain = line.plain.encode(encoding, "backslashreplace").decode(encoding)
        self.terminal.print(line, soft_wrap=True)


class _Bar:
    """Two lines at the bottom of the terminal: progress and latest numbers.

    They are redrawn in place; other output to stdout or stderr appears above them. The cursor is hidden until `stop`,
    which also runs when a process exits without closing the bar.

    Args:
        tick: called periodically in its own thread, until `stop`.
    """

    def __init__(self, terminal: Terminal, tick: Callable[[], None]) -> None:
        self._since = time.monotonic()
        self._width = min(terminal.width, _MAX_WIDTH)
        self._encoding = terminal.encoding
        # rich's ellipsis is a Unicode character, whatever the terminal's encoding is.
        self._overflow: OverflowMethod = "ellipsis" if "utf" in terminal.encoding.lower() else "crop"
        self._live = Live(
            console=terminal,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            # `2> errors.txt` still gets its lines.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._drawn = -math.inf
        atexit.register(self.stop)
        self._live.start()
        self._ticker = Ticker(tick, _TICK)

    def is_due(self, seconds: float = _REDRAW) -> bool:
        return time.monotonic() - self._drawn >= seconds

    def draw(self, step: int, steps: int, seconds_left: float | None, numbers: list[str]) -> None:
        before = f"step {step}/{steps} "
        after = f" {step / max(steps, 1):4.0%}  " + (f"{duration_text(seconds_left)} left" if seconds_left else "")
        # Reserve the space of the longest text, so that the bar's width does not change.
        room = max(self._width - len(before) - max(len(after), len(" 100%  0:00:00 left")), 4)
        bar = Table.grid()
        bar.add_row(Text(before, "bold"), ProgressBar(max(steps, 1), step, width=room), Text(after))
        both = Table.grid()
        both.add_row(bar)
        parts = [duration_text(time.monotonic() - self._since), *(numbers or ["starting"])]
        # Escape what the terminal's encoding lacks: an error here would end the timer.
        line = printable("  ".join(parts)).encode(self._encoding, "backslashreplace").decode(self._encoding)
        both.add_row(Text(line, "cyan", overflow=self._overflow, no_wrap=True))
        self._live.update(both, refresh=True)
        self._drawn = time.monotonic()

    def stop(self) -> None:
        self._ticker.stop()
        self._live.stop()
        atexit.unregister(self.stop)


# --- bar for other work

# Seconds between two drawings.
_WAIT_TICK = 0.25


@contextlib.contextmanager
def waiting(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, and yield a function to update it.

    Yields:
        A function of (done, total), which does not draw by itself.

    Args:
        what: name of the work, in a word.
        shown: show the bar, if stderr is a terminal.
    """
    screen = _terminal(sys.stderr)
    if not (shown and screen.is_terminal):
        yield lambda done, whole: None
        return
    columns = (
        TextColumn(what + " {task.completed:.0f}/{task.total:.0f}", markup=False),
        *(BarColumn(), TimeElapsedColumn(), TextColumn("left", markup=False), TimeRemainingColumn()),
    )
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=1)
        ticker = Ticker(bar.refresh, _WAIT_TICK)
        try:
            yield lambda done, whole: bar.update(task, completed=done, total=whole)
        finally:
            ticker.stop()
