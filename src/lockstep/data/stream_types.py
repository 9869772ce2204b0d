"""Define streams as a user writes them: samples in parts, without an index.

    def dataset(self, split):
        return lockstep.stream(Documents(), parts=64)       # splits itself by get_worker_info()

`data/streams.py` reads them.
"""

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import xxhash
from torch.utils.data import Subset

from lockstep.errors import ConfigError, DataError

__all__ = ["SplitStream", "Stream", "StreamMixture", "has_class", "refuse_divided", "stream"]


@runtime_checkable
class Stream(Protocol):
    """Samples without an index, as a user writes them.

    Attributes:
        parts: number of parts, each with its own samples.
    """

    parts: int

    def iter(self, part: int, start: int, state: Any = None) -> Iterator[Any]:
        """Iterate over the samples of a part, from number `start` on.

        The sequence must be the same in each call, on every rank. The iterator may have `state_dict()`, which returns
        JSON: it comes back as `state`, if the iterator should continue there.
        """


@final
@dataclass(frozen=True, slots=True)
class SplitStream:
    """A torch IterableDataset that splits itself by `get_worker_info()`; see `lockstep.stream`."""

    dataset: Any
    parts: int


@final
@dataclass(frozen=True, slots=True)
class StreamMixture:
    """Several streams, and the weights by which their samples are mixed; see `lockstep.mixture`.

    Attributes:
        sources: the streams by name.
        points: (step, shares in millionths) of a curriculum; one point: constant.
    """

    sources: dict[str, Any]
    points: list[tuple[int, list[int]]]

    @property
    def fingerprint(self) -> str:
        """Hex; of the weights and the sources' names, for a resume."""
        return xxhash.xxh3_64_hexdigest(repr((list(self.sources), self.points)).encode())


def stream(dataset: Any, parts: int) -> SplitStream:
    """Declare an iterable dataset that splits itself by `torch.utils.data.get_worker_info()`.

    Part i is read with a worker info of `id` i and `num_workers` `parts`. Without this an iterable dataset is one part,
    which a single process reads for all ranks.

    Args:
        dataset: torch's IterableDataset, or another object whose `__iter__` opens it again.
        parts: into how many it splits itself; at least the micro-batches of a step, best eight times as many.

    Raises:
        ConfigError: `parts` is not above 0, or the dataset cannot be iterated.
    """
    if parts < 1:
        raise ConfigError(f"lockstep.stream: parts is {parts}: it must be at least 1")
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(f"lockstep.stream: {type(dataset).__name__} has no `__iter__`; give an iterable dataset")
    return SplitStream(dataset, parts)


def has_class(dataset: Any, package: str, name: str) -> bool:
    """Whether an object is of a class of an optional package.

    The package is not imported for this.
    """
    return any(
        base.__name__ == name and str(base.__module__).partition(".")[0] == package for base in type(dataset).__mro__
    )


def refuse_divided(dataset: Any, source: str) -> None:
    """Raise DataError for MosaicML's StreamingDataset, whose length and samples are a rank's share.

    Args:
        dataset: it, or a Subset of it.
        source: where it was found, for the message.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if not has_class(dataset, "streaming", "StreamingDataset"):
        return
    streams = list(getattr(dataset, "streams", []))
    folders = [
        posixpath.join(str(getattr(part, "remote", None) or getattr(part, "local", "...")), getattr(part, "split", ""))
        for part in streams
    ] or ["..."]
    lines = [f"lockstep.shards({folder.rstrip('/')!r})" for folder in folders]
    if len(lines) == 1:
        line = lines[0]
    else:
        line = f"lockstep.mixture of {', '.join(lines)}"
    raise DataError(
        f"{source} is a StreamingDataset of MosaicML, which divides its samples between ranks itself; its shards have "
        f"an index: use {line} in its place"
    )
