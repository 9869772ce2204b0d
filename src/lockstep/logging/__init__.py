"""Send records to sinks: the terminal, metrics.jsonl, trackers.

    sinks = Sinks([Console(steps=1000), JsonLines(folder / "metrics.jsonl")])
    sinks.start(info)
    sinks.log(record)
    sinks.close(summary)

A record is a flat dict of names and numbers. A training record has global_step, epoch, epoch_progress,
num_batches_remaining, lr, running_loss, grad_norm, items_per_second, memory (bytes) and time/data, time/forward,
time/backward, time/update, time/total (milliseconds, averages), train/NAME for each of the task's own numbers, and
gradients/NAME with --log-gradients; an evaluation record has global_step, evaluation/loss, evaluation/items and further
evaluation/NAME.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "Showing",
    "Sink",
    "Sinks",
]


class Sink(Protocol):
    """A destination of records. Called only on rank 0, between steps."""

    def start(self, info: dict[str, Any]) -> None:
        """Begin a run; `info` describes it."""

    def log(self, record: dict[str, Any]) -> None:
        """Write a record, without changing it or delaying the loop."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the run; `summary` is None if it failed.

        Its `complete` is False if steps are left for a resume. Called once, also after an error of `start` or `log`.
        """


@runtime_checkable
class Showing(Protocol):
    """A sink that shows the run's progress between records."""

    def progress(self, step: int, evaluated: tuple[int, int] | None) -> None:
        """Show progress, as `Sinks.progress`."""

    def best(self, text: str) -> None:
        """Show the best evaluation, as `Sinks.best`."""


class Sinks:
    """Several sinks as one. A failing sink never stops the run.

    The first failure of each is logged as a warning. A sink whose `start` failed gets no records; one whose `log`
    failed still gets the next record, since a full disk or a lost network may recover.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._displays: list[Any] = []
        # None stands for an expected record.
        self._waiting: deque[dict[str, Any] | None] = deque()
        # Sinks that failed, by id -> the error.
        self._failed: dict[int, str] = {}

    def start(self, info: dict[str, Any]) -> None:
        """Start each sink, and drop those that fail."""
        self._sinks = [sink for sink in self._sinks if self._call_sink(sink, partial(sink.start, info))]
        # Found once, since the check is slow and progress is shown at every step.
        self._displays = [sink for sink in self._sinks if isinstance(sink, Showing)]

    def progress(self, step: int, evaluated: tuple[int, int] | None = None) -> None:
        """Show the progress at every step, without waiting for anything.

        Args:
            step: steps trained.
            evaluated: (done, total) micro-batches of this rank in a running evaluation.
        """
        for sink in self._displays:
            try:
                sink.progress(step, evaluated)
            except Exception as error:
                # Caught here, and not in `_call_sink`, to save a call in every step.
                self._report(sink, error)

    def best(self, text: str) -> None:
        """Show the best evaluation so far, in a few words; "" for none."""
        for sink in self._displays:
            self._call_sink(sink, partial(sink.best, text))

    def log(self, record: dict[str, Any]) -> None:
        """Write a record to each sink, after expected ones."""
        if self._waiting:
            self._waiting.append(record)
        else:
            self._write(record)

    def expect(self) -> None:
        """Reserve a place for a record that is still on a device.

        Records logged in the meantime come after it.
        """
        self._waiting.append(None)

    def write_expected(self, record: dict[str, Any]) -> None:
        """Write the oldest expected record, and those queued behind it.

        Without an expected record it works as `log`.
        """
        if None not in self._waiting:
            self.log(record)
            return
        self._waiting[self._waiting.index(None)] = record
        # A record that is still on a device holds back those after it, so that sinks get them in order.
        while self._waiting and (oldest := self._waiting[0]) is not None:
            self._waiting.popleft()
            self._write(oldest)

    def flush(self) -> None:
        """Drop expected records, and write those queued behind them."""
        waiting = self._waiting
        self._waiting = deque()
        for record in waiting:
            if record is not None:
                self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            self._call_sink(sink, partial(sink.log, record))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Close each sink, in order. The summary gets `failed`, the sinks that have failed."""
        self.flush()
        if summary is not None and self._failed:
            summary = {**summary, "failed": "; ".join(self._failed.values())}
        for sink in self._sinks:
            self._call_sink(sink, partial(sink.close, summary))

    def _call_sink(self, sink: Sink, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            # A third party's service may raise anything. Ctrl-C passes.
            self._report(sink, error)
            return False
        return True

    def _report(self, sink: Sink, error: Exception) -> None:
        if id(sink) not in self._failed:
            failure = f"{type(sink).__name__} failed, its records may be incomplete: {type(error).__name__}: {error}"
            self._failed[id(sink)] = failure.partition("\n")[0]
            logging.getLogger("lockstep").warning("%s; training continues", failure)
