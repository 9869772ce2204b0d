"""A bar for a person who waits, on stderr where that is a terminal; it is gone when the work is done.

with waiting("evaluating", shown=world.is_main) as progress:
    progress(120, 339)                  # how much is done, and of how much
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
    "Ticker",
    "count_text",
    "duration_text",
    "line_of",
    "loss_text",
    "summary_rows",
    "waiting",
]


# Held while a timer draws, and while this process is forked: a loader process must not begin with a half-drawn
# terminal's locks held by a thread that it has not.
_DRAWING = threading.RLock()
os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)


class Ticker:
    """Calls `tick` every so often, in a thread of its own, until `stop`. The first error ends it silently.

    Args:
        tick: what to call; it must not wait for the thread that made the ticker.
        seconds: between two calls.
    """

    def __init__(self, tick: Callable[[], None], seconds: float) -> None:
        self._tick, self._seconds, self._over = tick, seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns once no call goes on any more, but for one that a blocked terminal holds up."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a terminal that is gone: the run goes on without its progress
            while not self._over.wait(self._seconds):
                with _DRAWING:
                    if not self._over.is_set():
                        self._tick()


class _Screen(Terminal):
    """rich's console, which for itself would end the process when whoever reads its output is gone (`| head`)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True  # the run goes on; its records and its log are in its folder
        with contextlib.suppress(OSError, ValueError):  # what is still in the stream must not fail at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _terminal(stream: TextIO, interactive: bool | None = None) -> Terminal:
    """rich's console on `stream`, which takes text literally.

    Args:
        interactive: whether to redraw in place; None means where the stream is a terminal that can.
    """
    # Not rich's own guess: FORCE_COLOR, which CI services set, would put control sequences into a log.
    able = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    wanted = able if interactive is None else interactive
    return _Screen(
        file=stream,
        force_terminal=wanted,
        color_system="auto" if wanted else None,
        force_jupyter=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


_OWN_SHOWN = 3  # numbers of the task's own in a line


def count_text(count: float) -> str:
    """A count or rate in at most five characters: 950, 12.3k, 4.56M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:#.3g}".rstrip(".") + unit
    return f"{count:.3g}" if count < 100 else f"{count:.0f}"


def duration_text(seconds: float) -> str:
    """Seconds as a clock: 0:07, 1:02:03, 3 d 04:00:00."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def loss_text(loss: float) -> str:
    """A loss with four decimals where it is of usual size, else in five digits."""
    return f"{loss:.4f}" if 0.001 <= abs(loss) < 10000 else f"{loss:.5g}"


def _numbers_of(seen: Mapping[str, Any], items: str) -> list[str]:
    """The record's main numbers with their names, most wanted first; those that are missing are left out."""
    shown = (
        ("running_loss", lambda value: f"loss {loss_text(value)}"),
        ("evaluation/loss", lambda value: f"evaluation {_losses(seen, value)}"),
        ("best", str),
        ("lr", lambda value: f"lr {value:.2e}"),
        ("items_per_second", lambda value: f"{count_text(value)} {items}/s"),
        ("memory", bytes_text),
    )
    return [text(seen[name]) for name, text in shown if seen.get(name) is not None]


def _losses(seen: Mapping[str, Any], loss: float) -> str:
    """The evaluation's loss; of several sets that of each, with its name."""
    named = [f"{name} {loss_text(seen[f'evaluation/{name}/loss'])}" for name in _sets(seen)]
    return "  ".join(named) or loss_text(loss)


def line_of(record: Mapping[str, Any], steps: int, items: str, left: float | None) -> str:
    """A record as one plain line of ASCII (but for names of the user's).

    Args:
        steps: the last step.
        left: seconds until then, where known.
    """
    parts = [f"step {record.get('global_step', '?')}/{steps}"]
    if "evaluation/loss" in record:
        numbers = _evaluated(record, items)
        return "  ".join([*parts, "evaluation " + "  ".join(f"{name} {text}" for name, text in numbers)])
    if "running_loss" not in record:  # numbers of the caller's own, whatever their names
        own = {name: value for name, value in record.items() if name != "global_step"}
        return "  ".join([*parts, *(f"{name} {value:.5g}" for name, value in own.items())])
    epochs = _epochs(record)
    parts += [f"epoch {epochs:.2f}"] if epochs is not None else []
    parts += _numbers_of(record, items)
    parts += [f"grad {record['grad_norm']:.3g}"] if record.get("grad_norm") is not None else []
    beside = [name for name in record if name.startswith("train/")][:_OWN_SHOWN]
    parts += [f"{name.removeprefix('train/')} {record[name]:.5g}" for name in beside]
    parts += [f"{duration_text(left)} left"] if left else []
    return "  ".join(parts)


def summary_rows(values: Mapping[str, Any], steps: int, items: str) -> list[tuple[str, str]]:
    """The summary's rows, name and text; what is not known has no row.

    Args:
        values: the names of the records and of `Console.close`.
        steps: the last step planned.
        items: what a batch counts.
    """
    memory = values.get("memory") or None  # 0 where nobody measured it
    evaluated = [
        (name if name == "perplexity" else f"evaluation {name}", text) for name, text in _evaluated(values, items)
    ]
    rows: tuple[tuple[str, Any, Callable[[Any], str]], ...] = (
        ("experiment", values.get("experiment"), str),
        ("steps", values.get("global_step"), lambda step: f"{step} of {steps}"),
        ("epochs", _epochs(values), lambda epoch: f"{epoch:.3g}"),
        ("training loss", values.get("running_loss"), loss_text),
        *((name, text, str) for name, text in evaluated),
        ("best evaluation", values.get("best"), str),
        (f"{items}/s", values.get("items_per_second"), count_text),
        ("time", values.get("seconds"), duration_text),
        ("peak memory", memory, bytes_text),
        ("processes", values.get("world_size"), str),
        ("engine", values.get("engine"), str),
    )
    return [(name, text(value)) for name, value, text in rows if value is not None]


def _evaluated(record: Mapping[str, Any], items: str) -> list[tuple[str, str]]:
    """An evaluation's numbers, name and text: loss, perplexity of tokens, metrics; of several sets those of each."""
    found: list[tuple[str, str]] = []
    for prefix in [f"{name}/" for name in _sets(record)] or [""]:
        loss = record.get(f"evaluation/{prefix}loss")
        if loss is not None:
            found.append((f"{prefix}loss", loss_text(loss)))
            found += [(f"{prefix}perplexity", _perplexity(loss))] if items == "tokens" else []
        own = [name.removeprefix(f"evaluation/{prefix}") for name in record if name.startswith(f"evaluation/{prefix}")]
        metrics = [name for name in own if name not in ("loss", "items")]
        found += [(f"{prefix}{name}", f"{record[f'evaluation/{prefix}{name}']:.5g}") for name in metrics]
    return found


def _sets(record: Mapping[str, Any]) -> list[str]:
    """The names of the evaluation's sets, where they have names."""
    counted = [name.removesuffix("/items") for name in record if name.endswith("/items") and name != "evaluation/items"]
    return [name.removeprefix("evaluation/") for name in counted if f"{name}/loss" in record]


def _epochs(record: Mapping[str, Any]) -> float | None:
    """Epochs so far: the whole ones and the part of the one that runs."""
    return record["epoch"] + record.get("epoch_progress", 0) if "epoch" in record else None


def _perplexity(loss: float) -> str:
    """exp(loss), for a loss that is a mean over tokens in nats."""
    return f"{math.exp(loss):.4g}" if loss < 700 else str(math.inf if loss > 0 else math.nan)


_REDRAW = 0.2  # seconds between two drawings of the progress
_MOVE = 0.5  # and where no record has come
_TICK = 1.0  # and where nothing has: the clock goes on
_RECENT = 20  # records over which the time left is reckoned
_WIDEST = 100  # columns; a longer bar or curve says no more


class Console:
    """The sink that people look at.

    Args:
        steps: the step at which training ends.
        start: the step from which this process goes on.
        items: what a batch counts, in the plural ("tokens", "images"); of tokens the perplexity is shown too.
        earlier: records from before `start`, for the curve.
        stream: where to write; None means standard output.
        interactive: whether to redraw in place; None means where the stream is a terminal that can.
    """

    def __init__(
        self,
        steps: int,
        start: int = 0,
        items: str = "items",
        earlier: Iterable[Mapping[str, Any]] = (),
        stream: TextIO | None = None,
        interactive: bool | None = None,
    ) -> None:
        self._steps, self._step, self._items = steps, start, items
        self._page = _Page(sys.stdout if stream is None else stream, interactive)
        self._bar: _Bar | None = None
        self._doing: list[str] = []
        self._seen: dict[str, Any] = {}  # the latest value of each name
        self._losses: list[tuple[float, float]] = []
        self._recent: deque[tuple[int, float]] = deque([(start, time.monotonic())], _RECENT)
        for record in earlier:
            self._remember(record)
        self._seen.pop("memory", None)  # the peak is this process's

    def start(self, info: dict[str, Any]) -> None:
        """Shows an empty bar, on a terminal. `info` is not shown: the log says it."""
        self._recent[0] = (self._step, time.monotonic())
        if self._page.terminal.is_terminal:
            self._bar = _Bar(self._page.terminal, self._tick)
            self._bar.draw(self._step, self._steps, None, [])

    def log(self, record: dict[str, Any]) -> None:
        """Takes the record into the progress, or prints it as a line of its own."""
        self._remember(record)
        self._doing = []
        if "running_loss" in record:
            self._step = int(record["global_step"])
            self._recent.append((self._step, time.monotonic()))
        if self._bar is None:
            self._page.line(line_of(record, self._steps, self._items, self._time_left()))
        elif self._bar.is_due():
            self._draw()

    def progress(self, step: int, evaluated: tuple[int, int] | None = None) -> None:
        """Moves the bar, now and then; of an evaluation (micro-batches done, of how many) it shows the part."""
        self._step, self._doing = step, [f"evaluating {evaluated[0]}/{evaluated[1]}"] if evaluated else []
        if self._bar is not None and self._bar.is_due(_MOVE):
            self._draw()

    def best(self, text: str) -> None:
        """Has the bar show the best evaluation so far."""
        self._seen = {**self._seen, "best": text or None}

    def close(self, summary: dict[str, Any] | None) -> None:
        """Closes the bar; then, unless the run failed, shows the summary, the curve, a sample, the files, the way on.

        Args:
            summary: any of experiment, global_step, epoch_progress, running_loss, evaluation/loss, items_per_second and
                memory (what is missing is taken from the records), seconds, world_size, engine; `sample`, generated
                text; `files`, paths or {what: path}; `waits`, where time was lost; `next`, the last line. None where
                the run failed.
        """
        if self._bar is not None:
            self._doing = []
            self._draw()
            self._bar.stop()
            self._bar = None
        if summary is not None:
            self._table(summary)
            self._curve()
            self._sample(str(summary.get("sample") or "").strip("\n"))
            self._files(summary.get("files") or {})
            self._page.paragraph(str(summary.get("waits") or ""))
            self._page.paragraph(str(summary.get("next") or ""))

    def _remember(self, record: Mapping[str, Any]) -> None:
        peak = max(self._seen.get("memory") or 0, record.get("memory") or 0)
        self._seen = {**self._seen, **record, **({"memory": peak} if peak else {})}  # as a whole: the timer reads it
        if "running_loss" in record:
            self._losses.append((float(record["global_step"]), float(record["running_loss"])))

    def _time_left(self) -> float | None:
        """Seconds until the last step at the pace of the recent records; None before there is one."""
        (first, since), (last, until) = self._recent[0], self._recent[-1]
        if first == last:  # no record yet
            last, until = self._step, time.monotonic()
        return (until - since) / (last - first) * (self._steps - self._step) if last > first else None

    def _tick(self) -> None:
        """Called by the timer."""
        bar = self._bar
        if bar is not None and bar.is_due(_TICK):
            self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            numbers = [*self._doing, *_numbers_of(self._seen, self._items)]
            self._bar.draw(self._step, self._steps, self._time_left(), numbers)

    def _table(self, summary: Mapping[str, Any]) -> None:
        if "epoch" in summary:
            self._seen.pop("epoch_progress", None)  # a part of the epoch that was, not of the summary's
        rows = summary_rows({**self._seen, **summary}, self._steps, self._items)
        margin = max((len(name) for name, _ in rows), default=0)
        self._page.line("")
        for name, value in rows:
            shown = Text(f"{name:<{margin}}  ", "cyan")
            shown.append(printable(mask(value)), "default")
            self._page.show(shown)

    def _curve(self) -> None:
        width = self._page.width - 1
        lines = curve(sorted(self._losses), max(width, 30), unicode=self._page.unicode)
        if lines:
            self._page.paragraph("training loss by step", "bold")
        for line in lines:
            self._page.show(Text(line))

    def _sample(self, text: str) -> None:
        if text:
            self._page.paragraph("what the model writes now", "bold")
            for line in printable(text, keep="\n\t").expandtabs(4).split("\n"):
                self._page.show(Text(line))

    def _files(self, files: Mapping[str, Any] | Iterable[Any]) -> None:
        pairs = [(str(name), path) for name, path in files.items()] if isinstance(files, Mapping) else []
        lines = [str(path) for path in files] if not pairs else []
        margin = max((len(name) for name, _ in pairs), default=0)
        lines += [f"{name:<{margin}}  {path}" for name, path in pairs]
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
        return min(self.terminal.width, _WIDEST)

    def paragraph(self, line: str, style: str = "") -> None:
        """An empty line, then this one; nothing if it is empty."""
        if line:
            self.line("")
            self.line(line, style)

    def line(self, line: str, style: str = "") -> None:
        """One line of text from outside."""
        self.show(Text(printable(mask(line)), style))

    def show(self, line: Text) -> None:
        """One line, which only the terminal wraps, so that a path can be copied whole."""
        encoding = self.terminal.encoding
        if not self.unicode:
            line.plain = line.plain.encode(encoding, "backslashreplace").decode(encoding)
        self.terminal.print(line, soft_wrap=True)


class _Bar:
    """Two lines at the bottom of the terminal, redrawn in place: the progress, and the latest numbers.

    What others print to stdout or stderr meanwhile is put above them. The cursor is hidden until `stop`, which also
    runs at the end of a process that nobody closed.

    Args:
        tick: called now and then by a thread of its own, until `stop`.
    """

    def __init__(self, terminal: Terminal, tick: Callable[[], None]) -> None:
        self._since = time.monotonic()
        self._width = min(terminal.width, _WIDEST)
        self._live = Live(
            console=terminal,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),  # `2> errors.txt` still gets its lines
        )
        self._drawn = -math.inf
        atexit.register(self.stop)
        self._live.start()
        self._ticker = Ticker(tick, _TICK)

    def is_due(self, seconds: float = _REDRAW) -> bool:
        return time.monotonic() - self._drawn >= seconds

    def draw(self, step: int, steps: int, left: float | None, numbers: list[str]) -> None:
        before = f"step {step}/{steps} "
        after = f" {step / max(steps, 1):4.0%}  " + (f"{duration_text(left)} left" if left else "")
        room = max(self._width - len(before) - max(len(after), len(" 100%  0:00:00 left")), 4)
        bar = Table.grid()
        bar.add_row(Text(before, "bold"), ProgressBar(max(steps, 1), step, width=room), Text(after))
        both = Table.grid()
        both.add_row(bar)
        shown = [duration_text(time.monotonic() - self._since), *(numbers or ["starting"])]
        both.add_row(Text(printable("  ".join(shown)), "cyan", overflow="ellipsis", no_wrap=True))
        self._live.update(both, refresh=True)
        self._drawn = time.monotonic()

    def stop(self) -> None:
        self._ticker.stop()
        self._live.stop()
        atexit.unregister(self.stop)


_WAIT_TICK = 0.25  # seconds between two drawings


@contextlib.contextmanager
def waiting(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """What to call with how much is done and of how much; it draws nothing itself.

    Args:
        what: is done, in a word.
        shown: False, and where stderr is no terminal, shows nothing.
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
