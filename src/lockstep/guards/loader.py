"""A sample that cannot be loaded and a loader process that dies: named, tried again, and counted.

    dataset = Guarded(dataset, retries=2, skips=0, rank=0)
    batches = Lasting(batches, retries=2)

A skipped sample's place is taken by the sample after it, on whatever rank and in whatever process loads it, so that the
same run skips alike.
"""

import logging
import signal
import time
from collections.abc import Generator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.batches import Batches, Feed, MicroBatch, draws
from lockstep.errors import DataError

__all__ = ["Guarded", "Lasting", "troubles"]

_LOG = logging.getLogger("lockstep")
_PAUSE = 0.05  # seconds before a sample is tried again; a network disk may need them


class Guarded(Dataset[Any]):
    """A dataset whose failures name the sample.

    Args:
        inner: map-style.
        retries: how often a sample is tried again.
        skips: how many samples each rank may leave out in a start of the run.
        rank: for messages.

    Attributes:
        counts: [retries, skips] so far on this rank, loader processes included.
    """

    def __init__(self, inner: Any, *, retries: int, skips: int, rank: int) -> None:
        self._inner, self._retries, self._skips, self._rank = inner, retries, skips, rank
        self.counts: Tensor = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.draws_random = draws(inner)
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = self._many

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._inner[index]
        except Exception as error:
            return self._again(index, error)

    def _many(self, indices: list[int]) -> Any:
        try:
            return self._inner.__getitems__(indices)
        except Exception:  # which one it is, is found one by one
            return [self[index] for index in indices]

    def _again(self, index: int, error: Exception) -> Any:
        for _ in range(self._retries):
            self.counts[0] += 1
            time.sleep(_PAUSE)
            try:
                return self._inner[index]
            except Exception as found:
                error = found
        where = getattr(error, "filename", None) or getattr(self._inner, "path", None)
        file = f" ({where})" if where else ""
        line = f"rank {self._rank}: sample {index}{file} cannot be loaded: {type(error).__name__}: {error}"
        if int(self.counts[1]) >= self._skips:
            more = f"; {self._skips} were left out before" if self._skips else ""
            raise DataError(f"{line}{more}; repair it, or leave such samples out: --guards.bad-samples N") from error
        self.counts[1] += 1
        _LOG.warning("%s; sample %d takes its place", line, (index + 1) % len(self))
        return self[(index + 1) % len(self)]


class Lasting:
    """Batches whose loader processes may die: the loading begins again at the micro-batch that was not delivered.

    Args:
        inner: the batches.
        retries: how often, in a start of the run.
        rank: for messages.
    """

    def __init__(self, inner: Batches, *, retries: int, rank: int) -> None:
        self._inner, self._left, self._rank = inner, retries, rank
        self.cut, self.world_size = inner.cut, inner.world_size
        self.restarts = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def from_step(self, start: int) -> Feed:
        """As of `Batches`."""
        return Feed(self, start)  # type: ignore[arg-type]

    def micro(self, start: int) -> Generator[tuple[int, MicroBatch], None, None]:
        """As of `Batches`."""
        step, taken = start, 0
        while True:
            try:
                stream = islice(self._inner.micro(step), taken, None)
                for found, batch in stream:
                    _leave_children_alone()
                    step, taken = (found, taken + 1) if found == step else (found, 1)
                    yield found, batch
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                self._died(step, error)

    def _died(self, step: int, error: Exception) -> None:
        line = str(error).splitlines()[0]
        if self.restarts >= self._left:
            raise DataError(
                f"rank {self._rank}: a loader process died at step {step}: {line}; lower --data.workers (memory?), or "
                "load in the training process with --data.workers 0"
            ) from error
        self.restarts += 1
        _LOG.warning("rank %d: a loader process died at step %d: %s; started again", self._rank, step, line)


def troubles(loading: list[Any]) -> list[float]:
    """[samples tried again, samples left out, loader processes started again] on this rank so far."""
    found = [0.0, 0.0, 0.0]
    for each in loading:
        if isinstance(each, Guarded):
            found[0], found[1] = (float(count) for count in each.counts)
        else:
            found[2] = float(each.restarts)
    return found


def _leave_children_alone() -> None:
    """Torch's loader would raise out of any line of the loop when a child of it dies; asking for a batch raises too."""
    handler = signal.getsignal(signal.SIGCHLD)
    if str(getattr(handler, "__module__", "")).startswith("torch."):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
