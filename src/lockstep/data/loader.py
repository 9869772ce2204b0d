"""Micro-batches loaded here or in processes of their own, which are replaced where one dies or never starts.

    loader = Loader(fetch, Loading(workers=2), rank=0, pinned=False)
    for key, data, items in loader.stream(keys): ...        # in the order of the keys

An error of a sample or of the task's own code comes back as itself, in one line, from whatever process it rose in.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, Self

import threadpoolctl
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.data.fetch import Key
from lockstep.data.worker import collections_paused, end_with_parent, keep_inherited
from lockstep.distributed.cores import OPENCV_THREADS
from lockstep.distributed.rank_label import rank_label
from lockstep.errors import DataError

__all__ = ["Fetching", "Loader", "Loading"]

_LOG = logging.getLogger("lockstep")
_REAPED = 1.0  # seconds in which a process that closed its pipe is gone
_PATIENCE = 5.0  # seconds that a process may take to end before it is killed
# A fork beside other threads may leave a process that waits for a lock which nobody releases: on Python 3.11 while a
# thread of gloo makes its thread state, and in whatever a library does after a fork.
_START_TIMEOUT = 2.0  # seconds until a process is taken for such a one; doubled in each further try
_START_TRIES = 5

_TORCHS = "torch.utils.data._utils.signal_handling"  # where its handler of SIGCHLD is defined


@dataclass(frozen=True, slots=True)
class Loading:
    """How samples are loaded.

    Attributes:
        workers: processes a rank; 0 loads in the training process.
        prefetch: micro-batches that each keeps ready.
        retries: how often, in a start of the run, they are begun again after one has died.
    """

    workers: int = 0
    prefetch: int = 4
    retries: int = 0


class Fetching(Protocol):
    """What makes a micro-batch: see `lockstep.data.fetch.Fetch`."""

    def __getitem__(self, key: Key) -> tuple[Any, float]:
        """(collated batch, items)."""


class Loader:
    """Makes micro-batches from keys.

    Args:
        fetch: makes one.
        loading: where, and how often it is tried again.
        rank: for messages.
        pinned: copy batches into pinned memory, for a CUDA device.

    Attributes:
        restarts: how often loader processes were begun again.
    """

    def __init__(self, fetch: Fetching, loading: Loading, rank: int, pinned: bool) -> None:
        self._fetch, self._loading, self._rank, self._pinned = fetch, loading, rank, pinned
        self._deaths = self.restarts = 0

    def stream(self, keys: Iterator[Key]) -> Generator[tuple[Key, Any, float], None, None]:
        """(key, batch, items) for each key, in order. Closing the generator ends its processes.

        Raises:
            DataError: a sample or a batch cannot be made; or processes died more often than they may, or never start.
        """
        if not self._loading.workers:
            for key in keys:
                yield key, *self._fetch[key]
            return
        asked: deque[Key] = deque()  # by the processes, and not delivered yet
        rest: Iterator[Key] = keys
        tries = 1
        while True:
            with closing(_Processes(self._fetch, rest, asked, self._loading, self._pinned, tries)) as processes:
                try:
                    for found in processes:
                        asked.popleft()
                        yield found
                    return
                except _StartTimeout:
                    self._never_started(tries)
                    tries += 1
                except (RuntimeError, OSError, EOFError) as error:
                    if not processes.has_lost_one():  # the program's own, which came out of a process that lives
                        raise
                    self._died(asked[0].step if asked else 0, error)
            rest, asked = chain(list(asked), rest), deque()

    def _died(self, step: int, error: Exception) -> None:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self._deaths >= self._loading.retries:
            raise DataError(
                f"{rank_label(self._rank)}: a loader process died at step {step}: {line}; lower --data.workers "
                "(memory?), or load in the training process with --data.workers 0"
            ) from error
        self._deaths += 1
        self.restarts += 1
        _LOG.warning("%s: a loader process died at step %d: %s; started again", rank_label(self._rank), step, line)

    def _never_started(self, tries: int) -> None:
        if tries >= _START_TRIES:
            raise DataError(
                f"{rank_label(self._rank)}: a loader process never started, in {tries} tries: it hangs since its fork; "
                "load in the training process with --data.workers 0"
            ) from None
        self.restarts += 1
        _LOG.warning(
            "%s: a loader process did not start in %g s; started again", rank_label(self._rank), _timeout(tries)
        )


class _StartTimeout(Exception):
    """A loader process runs no Python."""


def _timeout(tries: int) -> float:
    return _START_TIMEOUT * 2.0 ** (tries - 1)


class _Processes:
    """Loader processes, from their start to their end.

    Args:
        keys: what to load.
        asked: gets each key that the processes are asked for; the caller takes away what was delivered.
        tries: the number of this start, if those before it timed out.
    """

    def __init__(
        self, fetch: Fetching, keys: Iterator[Key], asked: deque[Key], loading: Loading, pinned: bool, tries: int
    ) -> None:
        self._asked, self._pinned, self._workers = asked, pinned, loading.workers
        self._delivered = 0
        self._started: dict[int, int] = {}  # pids by the number of the process
        # Others than forked ones inherit no locks, and import torch first, which takes as long as it takes.
        self._timeout = _timeout(tries) if multiprocessing.get_start_method() == "fork" else None
        before = set(multiprocessing.active_children())
        self._handler = signal.getsignal(signal.SIGCHLD)
        # Open here at both ends, or it would end when those who have reported are gone.
        self._reports, self._report = multiprocessing.Pipe(duplex=False)
        with collections_paused() as collecting:
            loader = DataLoader(
                _Keyed(fetch),
                sampler=_Once(_noted(keys, asked)),
                batch_size=None,
                collate_fn=_as_is,
                num_workers=loading.workers,
                prefetch_factor=loading.prefetch,
                pin_memory=pinned,
                worker_init_fn=partial(_begin, collecting, self._report),
                generator=torch.Generator(),  # not this process's, or each start would draw from it
            )
            self._iterator: Any = iter(loader)  # forks
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        self._without_torchs_handler()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Key, Any, float]:
        if self._delivered < self._workers and self._asked:
            self._wait_for_start(self._delivered)  # they take turns
        key, data, items = next(self._iterator)
        self._delivered += 1
        if isinstance(data, _Failure):
            raise data.error
        return Key(*key), data, items

    def _wait_for_start(self, number: int) -> None:
        """Wait until this process has started, or any has died, which torch reports.

        Raises:
            _StartTimeout: neither has happened.
        """
        sentinels = [child.sentinel for child in self._children]
        while number not in self._started:
            ready = wait([self._reports, *sentinels], self._timeout)
            if self._reports in ready:
                started, pid = self._reports.recv()
                self._started[started] = pid
            elif ready:
                return
            else:
                self._kill_unstarted()
                raise _StartTimeout

    def _kill_unstarted(self) -> None:
        """No other signal ends a process that never comes to run Python."""
        while self._reports.poll():
            number, pid = self._reports.recv()
            self._started[number] = pid
        for child in self._children:
            if child.pid not in self._started.values():
                child.kill()

    def has_lost_one(self) -> bool:
        """Whether a process has ended, which none does by itself before the last batch is there."""
        return bool(wait([child.sentinel for child in self._children], _REAPED))

    def close(self) -> None:
        """Ends the processes, whatever they are doing, and waits until they are gone."""
        self._without_torchs_handler()
        if not self._pinned:  # a thread that pins must not wait for the rest of a message that was cut off
            self._kill_unstarted()
            for child in self._children:
                child.terminate()
        iterator, self._iterator = self._iterator, iter(())
        shut_down = getattr(iterator, "_shutdown_workers", None)  # else dropping the iterator does it
        if shut_down is not None:
            shut_down()
        del iterator
        for child in self._children:
            child.join(_PATIENCE)
            if child.is_alive():
                child.kill()
                child.join()
        self._reports.close()
        self._report.close()

    def _without_torchs_handler(self) -> None:
        """Torch's handler would raise out of any line of the loop when a child dies; asking for a batch raises too.

        Torch installs it once in a process, with the first loader of any kind: before this one's, or while it lives.
        """
        if threading.current_thread() is threading.main_thread() and _is_torchs(signal.getsignal(signal.SIGCHLD)):
            earlier = signal.SIG_DFL if self._handler is None or _is_torchs(self._handler) else self._handler
            signal.signal(signal.SIGCHLD, earlier)


def _is_torchs(handler: object) -> bool:
    return getattr(handler, "__module__", "") == _TORCHS


class _Failure:
    """An error on its way out of a loader process: torch would put a traceback of many lines into its message."""

    def __init__(self, error: DataError) -> None:
        error.add_note("in a loader process:\n" + "".join(traceback.format_exception(error)).rstrip())
        self.error = error


class _Keyed(Dataset[tuple[Key, Any, float]]):
    """Fetching as torch's loader wants it; the key travels with the batch, so that the two cannot be mismatched."""

    def __init__(self, fetch: Fetching) -> None:
        self._fetch = fetch

    def __getitem__(self, key: Key) -> tuple[Key, Any, float]:
        try:
            return key, *self._fetch[key]
        except DataError as error:
            return key, _Failure(error), 0


class _Once:
    """An iterator as the sampler that a DataLoader asks for."""

    def __init__(self, keys: Iterator[Key]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys


def _noted(keys: Iterator[Key], asked: deque[Key]) -> Iterator[Key]:
    for key in keys:
        asked.append(key)
        yield key


def _as_is(value: Any) -> Any:
    """The loader's own conversion would make batches differ from those loaded without workers."""
    return value


def _begin(collecting: bool, report: Connection, number: int) -> None:
    """Prepare a loader process: its libraries must not take the cores that other ranks compute on."""
    try:
        keep_inherited(collecting)
        end_with_parent()
        torch.set_num_threads(1)
        threadpoolctl.threadpool_limits(1)  # BLAS and OpenMP of numpy and whatever else is loaded
        opencv = os.environ.setdefault(OPENCV_THREADS, "1")
        if opencv == "1" and "cv2" in sys.modules:  # else it reads the variable later
            sys.modules["cv2"].setNumThreads(0)
    finally:  # torch sends an error in place of the first micro-batch
        report.send((number, os.getpid()))  # in one piece
