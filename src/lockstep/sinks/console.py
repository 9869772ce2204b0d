"""What a person sees of a run: a progress line while it trains, and how it went at the end.

    console = Console(steps=1000, items="tokens")
    console.start({"experiment": "first"})
    console.log(record)
    console.close({"seconds": 118.0, "engine": "single", "world_size": 1, "sample": text, "files": paths, "next": line})

On a terminal the progress is redrawn in place, a few times a second at most: when a record comes, when a step or a part
of an evaluation is done, and by a timer where none of that happens for a while. Anywhere else (a file, a pipe, Slurm)
each record is one plain line without control sequences. Text that comes from outside is written literally, its control
characters visible.
"""

import atexit
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.config.secrets import mask, printable
from lockstep.sinks.plot import curve
from lockstep.sinks.terminal import Ticker, terminal
from lockstep.sinks.words import duration_text, line_of, numbers_of, summary_rows

__all__ = ["Console"]

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
            numbers = [*self._doing, *numbers_of(self._seen, self._items)]
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
        self.terminal = terminal(stream, interactive)
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
