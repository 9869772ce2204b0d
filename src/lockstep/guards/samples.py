"""Retry, skip and count samples that cannot be loaded.

    dataset = RetryingDataset(dataset, retries=2, skips=0, rank=0)

The next sample replaces a skipped one, on any rank and in any process, so every world size skips the same samples.
Each try, and the replacement, is seeded as in a run without an error. For a loader process that dies see
`data/loader.py`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.loader import Loader, collate_draws, draws
from lockstep.data.rows import rows_of
from lockstep.data.shared_memory import shared_zeros
from lockstep.distributed.progress import rank_label
from lockstep.errors import SampleError, StorageError

__all__ = ["RetryingDataset", "loading_failures"]

_LOG = logging.getLogger("lockstep")
# Seconds before a retry: a network disk may need them.
_PAUSE = 0.05


class RetryingDataset(Dataset[Any]):
    """Dataset that retries failing samples, and names those that still fail.

    Args:
        inner: map-style.
        retries: number of retries of a sample.
        skips: number of samples that each rank may skip in a start of the run, each in any number of epochs.
        rank: for messages.

    Attributes:
        counts: [retries, skips] so far on this rank, including loader processes.
        draws_random: whether a sample must be seeded.
        collation_draws: whether the collation must be.
        known_rows: reads samples of a known kind all at once, without retries; None: another kind.
    """

    def __init__(self, inner: Any, *, retries: int, skips: int, rank: int) -> None:
        self._inner = inner
        self._retries = retries
        self._rank = rank
        # At least one sample must remain to replace the others.
        self._skips = min(skips, max(0, len(inner) - 1))
        self.counts: Tensor = shared_zeros(2)
        # The skipped samples, each plus 1, since 0 marks a free entry.
        self._skipped: Tensor = shared_zeros(max(1, self._skips))
        self.draws_random = draws(inner)
        self.collation_draws = collate_draws(inner)
        self.known_rows = rows_of(inner)
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = self._many

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def fetches(self) -> int:
        """Shards that this rank has fetched from a store so far (`lockstep.shards`)."""
        return int(getattr(self._inner, "fetches", 0))

    def __getitem__(self, index: int) -> Any:
        return self.load_seeded(index, _nothing)

    def load_seeded(self, index: int, seed: Callable[[int], None]) -> Any:
        """Load a sample, or the one that replaces it.

        Args:
            seed: called with the index before each try.

        Raises:
            SampleError: it cannot be loaded, and no more samples may be skipped.
            StorageError: its store does not answer.
        """
        while True:
            for attempt in range(self._retries + 1):
                if attempt:
                    self.counts[0] += 1
                    time.sleep(_PAUSE)
                seed(index)
                try:
                    return self._inner[index]
                except StorageError:
                    # The store was asked several times already, and the sample is not at fault.
                    raise
                except Exception as error:
                    failure = error
            self._leave_out(index, failure)
            index = (index + 1) % len(self)

    def _many(self, indices: list[int]) -> Any:
        try:
            return self._inner.__getitems__(indices)
        except StorageError:
            raise
        except Exception:
            # Find the failing sample, one by one.
            return [self[index] for index in indices]

    def _leave_out(self, index: int, error: Exception) -> None:
        source = getattr(error, "filename", None) or getattr(self._inner, "path", None)
        file = f" ({source})" if source else ""
        reason = (str(error).splitlines() or [""])[0]
        line = f"{rank_label(self._rank)}: sample {index}{file} cannot be loaded: {type(error).__name__}: {reason}"
        count = int(self.counts[1])
        # A sample that was skipped in an earlier epoch does not count again.
        if index + 1 not in self._skipped[:count]:
            if count >= self._skips:
                more = f"; {self._skips} were skipped before" if self._skips else ""
                raise SampleError(f"{line}{more}; repair it, or skip such samples: --guards.bad-samples N") from error
            self._skipped[count] = index + 1
            self.counts[1] += 1
        _LOG.warning("%s; using sample %d instead", line, (index + 1) % len(self))


class Counting(Protocol):
    """A dataset that counts what it repairs.

    Attributes:
        counts: [retries, skips] so far on this rank.
    """

    counts: Tensor


def loading_failures(loading: Sequence[Counting | Loader]) -> list[float]:
    """Return [retries, skipped samples, restarts of loader processes] on this rank so far."""
    counts = [0.0, 0.0, 0.0]
    for counter in loading:
        if hasattr(counter, "counts"):
            counts[0], counts[1] = map(float, counter.counts.tolist())
        else:
            counts[2] = float(counter.restarts)
    return counts


def _nothing(_: int) -> None:
    """Do nothing, for a sample without random numbers."""
