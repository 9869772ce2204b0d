"""Load micro-batches in this process or in loader processes, which are restarted if they die.

    loader = Loader(fetch, Loading(workers=2), rank=0, pinned=False)
    for key, data, items in loader.stream(keys): ...        # in the order of the keys

A process that never starts is restarted too. An error in a sample or in the task's own code is raised as one line,
from whichever process it occurred in. `Fetch` builds one micro-batch; `seed_everything` and `generators_kept` control
the random generators that datasets draw from.
"""

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import threadpoolctl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lockstep.counts import check_count, describe_count, samples_in
from lockstep.data.descriptors import check_connections, open_files, reopen
from lockstep.data.rows import Rows, never_draws, rows_of
from lockstep.data.shared_memory import no_room, shortage
from lockstep.data.stream_types import refuse_divided
from lockstep.distributed.launcher import OPENCV_THREADS
from lockstep.distributed.progress import rank_label
from lockstep.errors import ConfigError, DataError, LockstepError, SampleError, error_line
from lockstep.seeds import derive
from lockstep.task import Task, has_own, items_of_a_sample

__all__ = [
    "Drawing",
    "Fetch",
    "Fetching",
    "Key",
    "Loader",
    "Loading",
    "blame",
    "check_dataset",
    "collate_draws",
    "draws",
    "generators_kept",
    "seed_everything",
    "seeded_alike",
]

# Read by Hugging Face's tokenizers at each call.
_TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"


class Key(NamedTuple):
    """A micro-batch to load: its place in the run, and its samples.

    Attributes:
        read: of a stream, what to read in place of indexed samples; see `stream_batches`.
    """

    step: int
    micro: int
    weight: float
    epochs: list[int]
    samples: list[int]
    read: tuple[Any, ...] | None = None


@runtime_checkable
class Reseeding(Protocol):
    """A dataset that may retry a sample or load another, and seeds before each try."""

    def load_seeded(self, index: int, seed: Callable[[int], None]) -> Any:
        """Return the sample; call `seed(i)` before each try, with the index i that is loaded."""


def draws(dataset: Any) -> bool:
    """Whether a dataset may draw random numbers: unless it declares, or is known, not to."""
    declared = getattr(dataset, "draws_random", None)
    if declared is None and type(dataset) is Subset:
        return draws(dataset.dataset)
    if declared is None:
        return not never_draws(dataset)
    return bool(declared)


def collate_draws(dataset: Any) -> bool:
    """Whether the collate function of a dataset may draw random numbers.

    It may unless the dataset declares that none does.
    """
    declared = getattr(dataset, "collation_draws", getattr(dataset, "draws_random", None))
    if declared is None and type(dataset) is Subset:
        return collate_draws(dataset.dataset)
    return declared is None or bool(declared)


def check_dataset(dataset: Any, split: str, name: str = "") -> None:
    """Raise DataError, in one line, unless the dataset is map-style.

    The order of samples is arithmetic on indices. For training a stream will do too (`data/stream_adapters.py`).

    Args:
        dataset: the result of the task's `dataset(split)`.
        split: its argument.
        name: of the set, if the split has several.
    """
    source = f"the task's dataset('{split}')" + (f"['{name}']" if name else "")
    type_name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{source} returned a DataLoader; return its dataset, loader.dataset: --batch-size and --micro-batch-size "
            "set the batches, a collate_fn becomes the task's `collate`, a sampler its `order`"
        )
    refuse_divided(dataset, source)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if isinstance(dataset, IterableDataset):
        missing = ["__len__", "__getitem__"]
    if missing:
        raise DataError(
            f"{source} returned {type_name}, which has no {' and no '.join(missing)}; samples are loaded by index, "
            "dataset[i] for i below len(dataset): give a small one as list(...), or write it to files and index them"
        )


class _DatasetBatch(NamedTuple):
    """Samples that were loaded as one batch, as torch collates them."""

    data: Any


class Fetch:
    """Builds micro-batches: Key -> (collated batch, items).

    All random draws depend on (seed, epoch, sample) alone. A dataset whose attribute `draws_random` is False promises
    that neither it nor the collate function draws; then nothing is seeded, which saves a few microseconds a sample.
    Samples of a known kind of dataset are indexed all at once (see `lockstep.data.rows`).

    Attributes:
        draws: samples or their collation may draw random numbers, and are seeded.
    """

    def __init__(self, dataset: Any, task: Task, seed: int, rank: int = 0) -> None:
        self._dataset = dataset
        self._collate = task.collate
        self._seed = seed
        self._rank = rank
        self._count = task.count
        self._counts = has_own(task, "count")
        self._collates = has_own(task, "collate")
        self._draws = draws(dataset)
        self._seeds_collate = self._draws or (self._collates and collate_draws(dataset))
        self.draws = self._draws or self._seeds_collate
        self._rows: Rows | None = None if self._draws else rows_of(dataset)
        self._load_seeded = dataset.load_seeded if isinstance(dataset, Reseeding) else self._seed_and_load
        self._many = getattr(dataset, "__getitems__", None)
        self._each = items_of_a_sample(task)

    def __getitem__(self, key: Key) -> tuple[Any, float]:
        return self.finish(self.load(key), key)

    def inherited(self) -> dict[str, Any]:
        """Return what loader processes inherit of the user's: name -> object."""
        return {"the dataset": self._dataset}

    def load(self, key: Key) -> Any:
        """Load the samples of a micro-batch, and seed what its collation draws."""
        samples = self._load_samples(key)
        if self._seeds_collate:
            seed_everything(derive(self._seed, "collate", key.step, key.micro))
        return samples

    def _load_samples(self, key: Key) -> Any:
        """Load the samples of a micro-batch: a list of them, or a `_DatasetBatch`."""
        if self._draws:
            return [self._load_drawn(epoch, sample) for epoch, sample in zip(key.epochs, key.samples, strict=True)]
        if self._rows:
            # A sample cannot be read: the code below retries, skips or names it.
            with suppress(Exception):
                if not self._collates and (batch := self._rows.batch(key.samples)) is not None:
                    return _DatasetBatch(batch)
                if self._collates and (rows := self._rows.samples(key.samples)) is not None:
                    return rows
        if self._many:
            samples = self._many(key.samples)
        else:
            samples = [self._dataset[sample] for sample in key.samples]
        # The task's own `collate` may accept a whole batch instead of a list of samples.
        if not self._collates and len(samples) != len(key.samples):
            raise DataError(
                f"the dataset's `__getitems__` returned {len(samples)} samples for {len(key.samples)} indices, at "
                f"{self._location(key)}; drop samples in the task's `collate` instead"
            )
        return samples

    def finish(self, loaded: Any, key: Key) -> tuple[Any, float]:
        """Make the batch of what `load` returned, and count its items."""
        if type(loaded) is _DatasetBatch:
            return loaded.data, self._items(loaded.data, [], len(key.samples), key)
        return self.collate(loaded, len(key.samples), key)

    def collate(self, samples: list[Any], count: int, key: Key) -> tuple[Any, float]:
        """Collate samples, and count the items of the batch.

        Args:
            count: of samples that were asked for.
        """
        try:
            data = self._collate(samples)
        except LockstepError:
            raise
        except Exception as error:
            raise blame("collate", error, self._location(key)) from error
        return data, self._items(data, samples, count, key)

    def _items(self, data: Any, samples: list[Any], count: int, key: Key) -> float:
        """Count the items of this micro-batch; the loss is divided by them."""
        per_sample = self._each
        if self._counts:
            items = self._count_items(data, key)
            if per_sample is not None and items != per_sample * count:
                raise self._items_error(f"`count` returned {items} for {count} samples", key)
            return items
        # torch's own collation keeps every sample.
        if not self._collates:
            return (per_sample or 1) * count
        size = samples_in(data, samples, count)
        if size == 0 or data is None:
            raise DataError(
                f"the task's `collate` returned {'None' if data is None else 'an empty batch'} for {count} samples, "
                f"at {self._location(key)}; drop fewer samples, or raise --micro-batch-size"
            )
        if per_sample is None and size is None:
            raise DataError(
                f"cannot count the samples of a batch that the task's `collate` returned ({type(data).__name__}), at "
                f"{self._location(key)}; define `count(batch)`, or set the task's items_per_sample = 1 if it drops none"
            )
        if per_sample is not None and size not in (None, count):
            raise self._items_error(f"`collate` kept {size} of {count} samples", key)
        # mypy does not see that `per_sample` is set where `size` is None.
        return count * per_sample if size is None and per_sample else size * (per_sample or 1)  # type: ignore[operator]

    def _items_error(self, reason: str, key: Key) -> DataError:
        return DataError(
            f"the task's items_per_sample is {self._each}, but {reason}, at {self._location(key)}; remove "
            "items_per_sample if samples differ in their items"
        )

    def _count_items(self, data: Any, key: Key) -> float:
        try:
            value = self._count(data)
            items = check_count(value)
        except LockstepError:
            raise
        except Exception as error:
            raise blame("count", error, self._location(key)) from error
        if items is None:
            raise DataError(
                f"the task's `count` returned {describe_count(value)} at {self._location(key)}; return one finite "
                "number >= 0"
            )
        return items

    def _location(self, key: Key) -> str:
        samples = ", ".join(str(sample) for sample in key.samples[:8]) + (", ..." if len(key.samples) > 8 else "")
        return f"{rank_label(self._rank)}, step {key.step + 1}, samples {samples}"

    def _load_drawn(self, epoch: int, sample: int) -> Any:
        return self._load_seeded(sample, lambda index: seed_everything(derive(self._seed, "sample", epoch, index)))

    def _seed_and_load(self, sample: int, seed: Callable[[int], None]) -> Any:
        seed(sample)
        return self._dataset[sample]


class Drawing:
    """A Fetch that returns (batch, whether its collation drew random numbers) as the batch."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.inherited = fetch.inherited

    def __getitem__(self, key: Key) -> tuple[Any, float]:
        loaded = self._fetch.load(key)
        # Only a dataset that may draw needs the comparison, which copies all states.
        before = generator_states() if self._fetch.draws else None
        data, items = self._fetch.finish(loaded, key)
        return (data, before is not None and before != generator_states()), items


def blame(method: str, error: Exception, location: str) -> DataError:
    """Describe an error in a user's method in one line.

    It names the method, the place, the error and its source line. The want of shared memory is no fault of the method.
    """
    if reason := shortage(error):
        return SampleError(f"{location}: {reason}")
    return DataError(f"the task's `{method}` failed at {location}: {error_line(error)}; fix it there")


def seed_everything(key: int) -> None:
    """Seed the CPU generators that datasets draw from: torch's default one, numpy's and random's."""
    # `torch.manual_seed` takes a hundred times as long, since it seeds every device.
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators that `seed_everything` seeds, as one comparable value."""
    numpy: Any = np.random.get_state(legacy=True)
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        tuple(np.asarray(array).tobytes() for array in numpy[1:]),
        random.getstate(),
    )


@contextmanager
def seeded_alike(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random for a call of user code; restore them afterwards.

    What it draws, such as a split into training and evaluation, is the same in each call, rank, start and resume.
    """
    with generators_kept():
        seed_everything(seed)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators that `seed_everything` seeds at the end of the context."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


# Of linux/prctl.h: the signal that this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def _collections_paused() -> Iterator[bool]:
    """Pause garbage collection here and, until `_keep_inherited`, in forked processes.

    A newly forked process runs Python of many modules before it reaches any code of lockstep.

    Yields:
        Whether garbage collection was on.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield collecting
    finally:
        if collecting:
            gc.enable()


def _keep_inherited(collecting: bool) -> None:
    """Exempt all inherited objects from garbage collection.

    Collections then leave their memory untouched, so it stays shared with the parent.

    Args:
        collecting: collect garbage created from here on; see `_collections_paused`.
    """
    gc.freeze()
    if collecting:
        gc.enable()


def _end_with_parent() -> None:
    """End this process when the process that it loads for ends. Linux only.

    A forked or spawned process is killed by the system; its "parent" is the thread that started it, which trains.
    Under a forkserver, Python's default from 3.14 on, the parent is the server, which lives as long as this process;
    there a thread waits until the other end of a pipe is closed.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    if multiprocessing.get_start_method() == "forkserver":
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="lockstep-parent", daemon=True).start()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent.pid:
        # The parent ended before prctl was called, so no signal will come.
        os.kill(os.getpid(), signal.SIGKILL)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


_LOG = logging.getLogger("lockstep")
# Seconds for a process to end after it closed its pipe.
_REAP_TIMEOUT = 1.0
# Seconds that a process may take to end before it is killed.
_KILL_TIMEOUT = 5.0
# A process forked while other threads run may wait for a lock that is never released: on Python 3.11 while a thread of
# gloo makes its thread state, and in whatever a library does after a fork.
# Seconds until a process is considered such a one; doubled in each further try.
_START_TIMEOUT = 2.0
_START_TRIES = 5
# Characters of a report: a longer one might not be written to the pipe at once.
_REPORT = 1000

# The module of torch's SIGCHLD handler.
_TORCH_HANDLER = "torch.utils.data._utils.signal_handling"


@dataclass(frozen=True, slots=True)
class Loading:
    """Settings of loading samples.

    Attributes:
        workers: processes per rank; 0 loads in the training process.
        prefetch: micro-batches that each process keeps ready.
        retries: how often, within one start of the run, processes are restarted after one has died.
    """

    workers: int = 0
    prefetch: int = 4
    retries: int = 0


class Fetching(Protocol):
    """Builds micro-batches, see `lockstep.data.loader.Fetch`."""

    def __getitem__(self, key: Key) -> tuple[Any, float]:
        """Return (collated batch, items)."""


@runtime_checkable
class Inherited(Protocol):
    """Fetching that names what forked processes inherit of the user's."""

    def inherited(self) -> dict[str, Any]:
        """Return name -> object."""


class Loader:
    """Loads micro-batches by their keys.

    Args:
        fetch: builds one.
        loading: processes and retries.
        rank: for messages.
        pinned: copy batches into pinned memory, for a CUDA device.

    Attributes:
        restarts: how often loader processes were restarted.
    """

    def __init__(self, fetch: Fetching, loading: Loading, rank: int, pinned: bool) -> None:
        self._fetch = fetch
        self._loading = loading
        self._rank = rank
        self._pinned = pinned
        self._deaths = self.restarts = 0

    def stream(self, keys: Iterator[Key]) -> Generator[tuple[Key, Any, float], None, None]:
        """Yield (key, batch, items) for each key, in order. Closing the generator ends its processes.

        Raises:
            DataError: a sample or a batch cannot be loaded; processes died more often than allowed, or never started.
        """
        if not self._loading.workers:
            for key in keys:
                yield key, *self._fetch[key]
            return
        # Keys that were sent to the processes and not delivered yet. A restart loads them again.
        pending: deque[Key] = deque()
        remaining: Iterator[Key] = keys
        tries = 1
        while True:
            with closing(_Processes(self._fetch, remaining, pending, self._loading, self._pinned, tries)) as processes:
                try:
                    for batch in processes:
                        pending.popleft()
                        yield batch
                    return
                except _StartTimeout:
                    self._record_timeout(tries)
                    tries += 1
                except (RuntimeError, OSError, EOFError) as error:
                    # An error of the program itself, from a process that is alive.
                    if not processes.has_lost_one():
                        raise
                    self._record_death(pending[0].step if pending else 0, error, processes.reason())
            remaining = chain(list(pending), remaining)
            pending = deque()

    def _record_death(self, step: int, error: Exception, reason: str) -> None:
        # Another process would meet the same reason again.
        if reason:
            raise SampleError(f"{rank_label(self._rank)}, step {step + 1}: {reason}") from error
        if str(error):
            line = str(error).splitlines()[0]
        else:
            line = type(error).__name__
        if self._deaths >= self._loading.retries:
            raise SampleError(
                f"{rank_label(self._rank)}: a loader process died in step {step + 1}: {line}; lower --data.workers "
                "(memory?), or load in the training process with --data.workers 0"
            ) from error
        self._deaths += 1
        self.restarts += 1
        _LOG.warning("%s: a loader process died in step %d: %s; restarting", rank_label(self._rank), step + 1, line)

    def _record_timeout(self, tries: int) -> None:
        if tries >= _START_TRIES:
            raise SampleError(
                f"{rank_label(self._rank)}: a loader process did not start in {tries} tries, it hangs after its fork; "
                "load in the training process with --data.workers 0"
            ) from None
        self.restarts += 1
        _LOG.warning("%s: a loader process did not start in %g s; restarting", rank_label(self._rank), _timeout(tries))


class _StartTimeout(Exception):
    """A loader process does not start to run Python."""


def _timeout(tries: int) -> float:
    return _START_TIMEOUT * 2.0 ** (tries - 1)


def _start(loader: DataLoader[Any], fetch: Fetching) -> Iterator[Any]:
    """Start the processes of a loader: fork, or send them what they need.

    Raises:
        ConfigError: it cannot be pickled, where processes are not forked.
        SampleError: /dev/shm has no room.
    """
    try:
        return iter(loader)  # forks
    except Exception as error:
        if reason := shortage(error):
            raise SampleError(reason) from error
        method = multiprocessing.get_start_method()
        try:
            ForkingPickler.dumps(fetch)
        except Exception:
            if method != "fork":
                raise ConfigError(
                    f"--data.workers: loader processes are started by {method}, and the data set or task cannot be "
                    f"sent to them ({error_line(error)}); define its classes and functions at the top of a module, "
                    "use --data.workers 0, or multiprocessing.set_start_method('fork') where the program begins"
                ) from error
        raise


class _Processes:
    """Loader processes, from their start to their end.

    Args:
        fetch: builds a micro-batch.
        keys: of the micro-batches to load.
        pending: receives each key sent to the processes; the caller removes delivered ones.
        loading: how many processes, and their prefetch.
        pinned: copy batches into pinned memory.
        tries: number of this attempt, counting those that timed out.
    """

    def __init__(
        self, fetch: Fetching, keys: Iterator[Key], pending: deque[Key], loading: Loading, pinned: bool, tries: int
    ) -> None:
        self._pending = pending
        self._pinned = pinned
        self._workers = loading.workers
        self._delivered = 0
        # Process ids by number of the process.
        self._started: dict[int, int] = {}
        self._reason = ""
        # Only forked processes inherit locks. Others first import torch, for which there is no time limit.
        forks = multiprocessing.get_start_method() == "fork"
        self._timeout = _timeout(tries) if forks else None
        if forks and isinstance(fetch, Inherited):
            check_connections(fetch.inherited())
        files = open_files() if forks else {}
        before = set(multiprocessing.active_children())
        self._handler = signal.getsignal(signal.SIGCHLD)
        # Both ends stay open here: the pipe must not close when the processes that have reported end.
        self._reports, self._report = multiprocessing.Pipe(duplex=False)
        # Otherwise tokenizers warn in each forked process.
        os.environ.setdefault(_TOKENIZER_THREADS, "true")
        with _collections_paused() as collecting, warnings.catch_warnings():
            # `_start` explains the error better.
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
            loader = DataLoader(
                _KeyedDataset(fetch),
                sampler=_IteratorSampler(_track(keys, pending)),
                batch_size=None,
                collate_fn=_as_is,
                num_workers=loading.workers,
                prefetch_factor=loading.prefetch,
                pin_memory=pinned,
                worker_init_fn=partial(_init_worker, collecting, files, self._report),
                # A generator of its own: each start would draw from this process's default one.
                generator=torch.Generator(),
            )
            self._iterator: Any = _start(loader, fetch)
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        self._remove_torch_handler()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Key, Any, float]:
        if self._delivered < self._workers and self._pending:
            # The processes deliver in turns, so the next unstarted one has this number.
            self._wait_for_start(self._delivered)
        key, data, items = next(self._iterator)
        self._delivered += 1
        if isinstance(data, _LoaderFailure):
            raise data.error
        return Key(*key), data, items

    def _wait_for_start(self, number: int) -> None:
        """Wait until this process has started, or any has died, which torch reports.

        Raises:
            _StartTimeout: neither happened in time.
        """
        sentinels = [child.sentinel for child in self._children]
        while number not in self._started:
            ready = wait([self._reports, *sentinels], self._timeout)
            if self._reports in ready:
                self._read_reports()
            elif ready:
                return
            else:
                self._kill_unstarted()
                raise _StartTimeout

    def _kill_unstarted(self) -> None:
        """Kill processes that never ran Python: they do not handle other signals."""
        self._read_reports()
        for child in self._children:
            if child.pid not in self._started.values():
                child.kill()

    def _read_reports(self) -> None:
        while self._reports.poll():
            number, report = self._reports.recv()
            if isinstance(report, int):
                self._started[number] = report
            else:
                self._reason = report

    def reason(self) -> str:
        """Return why a process ended, if it reported a reason or the system shows one.

        "" if unknown.
        """
        self._read_reports()
        if not self._reason and any(child.exitcode == -signal.SIGBUS for child in self._children):
            # A page of a shared file that the system could not provide.
            return no_room()
        return self._reason

    def has_lost_one(self) -> bool:
        """Whether a process has ended; none ends by itself before the last batch."""
        return bool(wait([child.sentinel for child in self._children], _REAP_TIMEOUT))

    def close(self) -> None:
        """End the processes at once, and wait for them."""
        self._remove_torch_handler()
        # With a pinning thread they must end in order: it must not wait for the rest of a truncated message.
        if not self._pinned:
            self._kill_unstarted()
            for child in self._children:
                child.terminate()
        iterator = self._iterator
        self._iterator = iter(())
        # Private to torch. If a version lacks it, dropping the iterator shuts the processes down.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        del iterator
        for child in self._children:
            child.join(_KILL_TIMEOUT)
            if child.is_alive():
                child.kill()
                child.join()
        self._reports.close()
        self._report.close()

    def _remove_torch_handler(self) -> None:
        """Remove torch's SIGCHLD handler, which would raise anywhere in the loop.

        When a child dies, requesting a batch raises too, so nothing is lost. Torch installs the handler once in a
        process, with the first loader of any kind: before this one's, or during its life.
        """
        if threading.current_thread() is threading.main_thread() and _is_torch(signal.getsignal(signal.SIGCHLD)):
            earlier = signal.SIG_DFL if self._handler is None or _is_torch(self._handler) else self._handler
            signal.signal(signal.SIGCHLD, earlier)


def _is_torch(handler: object) -> bool:
    return getattr(handler, "__module__", "") == _TORCH_HANDLER


class _LoaderFailure:
    """An error from a loader process, which torch would wrap with a long traceback."""

    def __init__(self, error: LockstepError) -> None:
        error.add_note("in a loader process:\n" + "".join(traceback.format_exception(error)).rstrip())
        self.error = error


class _KeyedDataset(Dataset[tuple[Key, Any, float]]):
    """Fetching as a torch Dataset.

    The key travels with the batch, so that they cannot be mismatched.
    """

    def __init__(self, fetch: Fetching) -> None:
        self._fetch = fetch

    def __getitem__(self, key: Key) -> tuple[Key, Any, float]:
        try:
            return key, *self._fetch[key]
        except LockstepError as error:
            return key, _LoaderFailure(error), 0


class _IteratorSampler:
    """An iterator as a DataLoader's sampler."""

    def __init__(self, keys: Iterator[Key]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys


def _track(keys: Iterator[Key], pending: deque[Key]) -> Iterator[Key]:
    for key in keys:
        pending.append(key)
        yield key


def _as_is(value: Any) -> Any:
    """Replace the DataLoader's conversion, which would make batches differ from those without workers."""
    return value


def _end_unsent(report: Connection, number: int, error: Exception, _: Any) -> None:
    """End this process, since a batch could not be sent.

    Python drops such a batch, and the training would wait for it.
    """
    unsent = f"a loader process cannot send its batch: {error_line(error)}; return another one from `collate`"
    # A report is short enough for one atomic write.
    report.send((number, (shortage(error) or unsent)[:_REPORT]))
    os._exit(1)


def _init_worker(collecting: bool, files: dict[int, int], report: Connection, number: int) -> None:
    """Set up a loader process: its own file offsets, and one thread per library."""
    # Private to Python: the only hook for errors in the thread that sends batches.
    multiprocessing.queues.Queue._on_queue_feeder_error = partial(_end_unsent, report, number)  # type: ignore
    try:
        _keep_inherited(collecting)
        reopen(files)
        _end_with_parent()
        torch.set_num_threads(1)
        # Not "true", even if the user set it: a forked process would wait for threads that only its parent has.
        os.environ[_TOKENIZER_THREADS] = "false"
        # BLAS and OpenMP of numpy and other loaded libraries.
        threadpoolctl.threadpool_limits(1)
        opencv = os.environ.setdefault(OPENCV_THREADS, "1")
        # OpenCV reads the variable if it is imported later.
        if opencv == "1" and "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
    finally:
        # Always report: torch sends an error in place of the first micro-batch.
        report.send((number, os.getpid()))
