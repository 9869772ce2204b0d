"""Where records go: the terminal, metrics.jsonl, log files.

    sinks = Sinks([Console(steps=1000), JsonLines(folder / "metrics.jsonl")])
    sinks.start(info)
    sinks.log(record)
    sinks.close(summary)

A record is a flat dict of names and numbers. A training record has global_step, epoch, epoch_progress,
num_batches_remaining, lr, running_loss, grad_norm, items_per_second, memory (bytes) and time/data, time/forward,
time/backward, time/update, time/total (milliseconds, averages), train/NAME for each number of the task's own, and
gradients/NAME with --log-gradients; an evaluation record has global_step, evaluation/loss,
evaluation/items and further evaluation/NAME.
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
    """One place where records go. Called on rank 0 alone, between steps."""

    def start(self, info: dict[str, Any]) -> None:
        """The run begins; `info` says which."""

    def log(self, record: dict[str, Any]) -> None:
        """Takes a record. It must not change it, nor keep the loop waiting."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """The run ended; None where it failed. Called once, also after an error of `start` or `log`."""


@runtime_checkable
class Showing(Protocol):
    """A sink that shows how far the run is, also between records."""

    def progress(self, step: int, evaluated: tuple[int, int] | None) -> None:
        """As of `Sinks.progress`."""

    def best(self, text: str) -> None:
        """As of `Sinks.best`."""


class Sinks:
    """Several sinks as one. One that fails is reported once, as a warning, and never stops the run.

    A sink whose `start` failed gets no records; one whose `log` failed gets the next record all the same, as a full
    disk or a lost network may come back.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._shows: list[Any] = []
        self._waiting: deque[dict[str, Any] | None] = deque()  # None: one that is expected
        self._reported: set[int] = set()

    def start(self, info: dict[str, Any]) -> None:
        """Starts each sink; those that fail are left out from here on."""
        self._sinks = [sink for sink in self._sinks if self._holds(sink, partial(sink.start, info))]
        self._shows = [sink for sink in self._sinks if isinstance(sink, Showing)]

    def progress(self, step: int, evaluated: tuple[int, int] | None = None) -> None:
        """Tells those that show it how far the run is. To be called at every step: it waits for nothing.

        Args:
            step: steps taken.
            evaluated: within an evaluation, how many of how many micro-batches this rank has done.
        """
        for sink in self._shows:
            self._holds(sink, partial(sink.progress, step, evaluated))

    def best(self, text: str) -> None:
        """Tells the same ones the best evaluation so far, in a few words; "" for none."""
        for sink in self._shows:
            self._holds(sink, partial(sink.best, text))

    def log(self, record: dict[str, Any]) -> None:
        """Gives the record to each sink, after those that are expected."""
        if self._waiting:
            self._waiting.append(record)
        else:
            self._give(record)

    def expect(self) -> None:
        """A record is on its way from a device: what is logged until it has come stands behind it."""
        self._waiting.append(None)

    def arrived(self, record: dict[str, Any]) -> None:
        """Gives the record that was expected first, and what waited for it; where none was, as `log`."""
        if None not in self._waiting:
            self.log(record)
            return
        self._waiting[self._waiting.index(None)] = record
        while self._waiting and (first := self._waiting[0]) is not None:
            self._waiting.popleft()
            self._give(first)

    def flush(self) -> None:
        """Expects nothing any more, and gives what waited."""
        waiting, self._waiting = self._waiting, deque()
        for record in waiting:
            if record is not None:
                self._give(record)

    def _give(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            self._holds(sink, partial(sink.log, record))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Closes each sink, in the order in which they were given."""
        self.flush()
        for sink in self._sinks:
            self._holds(sink, partial(sink.close, summary))

    def _holds(self, sink: Sink, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # whatever a third party's service throws; Ctrl-C passes
            if id(sink) not in self._reported:
                self._reported.add(id(sink))
                logging.getLogger("lockstep").warning(
                    "%s failed and may miss records: %s: %s; training goes on",
                    type(sink).__name__,
                    type(error).__name__,
                    error,
                )
            return False
        return True
