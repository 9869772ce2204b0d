"""Open the parts of other libraries' streams: torch, Hugging Face datasets, webdataset, and a user's own.

    if is_stream(dataset):
        source = source_of(dataset)

No library is imported here: an object of it brings it along.
"""

import copy
import inspect
from collections.abc import Generator, Iterator
from typing import Any, cast, final

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from lockstep.data.stream_mixture import MixtureSource
from lockstep.data.stream_types import SplitStream, Stream, StreamMixture
from lockstep.data.streams import Opened, StreamSource
from lockstep.errors import DataError

__all__ = ["is_stream", "source_of"]


def is_stream(dataset: Any) -> bool:
    """Whether a dataset has no index, but can be iterated."""
    if isinstance(dataset, IterableDataset | SplitStream | StreamMixture) or _is_own(dataset):
        return True
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and not indexed and not isinstance(dataset, DataLoader)


def source_of(dataset: Any) -> StreamSource | MixtureSource:
    """Make the source of a stream, or of a mixture of streams.

    Raises:
        DataError: one can be read only once, or has no parts.
    """
    if isinstance(dataset, StreamMixture):
        return MixtureSource(
            list(dataset.sources), [_source_of(each) for each in dataset.sources.values()], dataset.points
        )
    return _source_of(dataset)


def _source_of(dataset: Any) -> StreamSource:
    inner = dataset.dataset if isinstance(dataset, SplitStream) else dataset
    name = type(inner).__name__
    if hasattr(inner, "__next__"):
        raise DataError(
            f"the task's dataset('train') returned {name}, an iterator, which can be read only once; return an object "
            "whose `__iter__` opens it anew"
        )
    if isinstance(dataset, SplitStream):
        return IterableSource(inner, dataset.parts, splits=True)
    if _is_own(dataset):
        return OwnSource(dataset)
    if _is_hugging_face(dataset):
        return HuggingFaceSource(dataset)
    if urls := _shard_urls(dataset):
        return WebSource(dataset, urls)
    return IterableSource(dataset, 1, splits=False)


def _is_own(dataset: Any) -> bool:
    """Whether the object has `parts` and `iter`; a Hugging Face dataset has an `iter` of batches, and no `parts`."""
    return hasattr(dataset, "parts") and callable(getattr(dataset, "iter", None))


@final
class OwnSource(StreamSource):
    """A user's own object with `parts` and `iter`."""

    def __init__(self, inner: Stream) -> None:
        has_state = "state" in inspect.signature(inner.iter).parameters
        draws = bool(getattr(inner, "draws_random", True))
        super().__init__(inner.parts, type(inner).__name__, draws, has_state=has_state)
        self._inner = inner

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        if callable(set_epoch := getattr(self._inner, "set_epoch", None)):
            set_epoch(epoch)
        resumed = {"state": state} if self.has_state and state is not None else {}
        return Opened(iter(self._inner.iter(part, start, **resumed)), start)

    def state(self, opened: Iterator[Any]) -> Any:
        state_dict = getattr(opened, "state_dict", None)
        return state_dict() if callable(state_dict) else None


@final
class IterableSource(StreamSource):
    """An iterable dataset: one part, or several if it splits itself by `get_worker_info()`.

    It cannot seek: a part is opened at its beginning. torchdata's state of a dataset is not used, since it belongs to
    one iterator in one process.
    """

    def __init__(self, inner: Any, parts: int, *, splits: bool) -> None:
        super().__init__(parts, type(inner).__name__, bool(getattr(inner, "draws_random", True)))
        self._inner, self._splits = inner, splits

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        if callable(set_epoch := getattr(self._inner, "set_epoch", None)):
            set_epoch(epoch)
        return Opened(iter(self._inner), 0)

    def worker_info(self, part: int) -> Any:
        return WorkerInfo(id=part, num_workers=self.parts, seed=0, dataset=self._inner) if self._splits else None


class _Resumable:
    """An iterator over a Hugging Face dataset, with the dataset whose state it moves."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self._iterator = dataset, cast(Generator[Any, None, None], iter(dataset))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def close(self) -> None:
        """Close the iterator's files."""
        self._iterator.close()


@final
class HuggingFaceSource(StreamSource):
    """A `datasets.IterableDataset`: its shards, and its state.

    The state of a shuffle buffer lacks the samples in it. Such a part is read from its beginning instead.
    """

    def __init__(self, inner: Any) -> None:
        draws, seeks = bool(getattr(inner, "draws_random", True)), not _has_shuffle_buffer(inner)
        super().__init__(inner.num_shards, type(inner).__name__, draws, has_state=seeks)
        self._inner = inner

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        dataset = self._inner.shard(self.parts, part) if self.parts > 1 else copy.deepcopy(self._inner)
        dataset.set_epoch(epoch)
        resumes = start > 0 and state is not None and self.has_state
        if resumes:
            dataset.load_state_dict(copy.deepcopy(state))
        return Opened(_Resumable(dataset), start if resumes else 0)

    def state(self, opened: Any) -> Any:
        return opened.dataset.state_dict()


def _is_hugging_face(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("num_shards", "shard", "state_dict", "load_state_dict", "set_epoch"))


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether a shuffle buffer is anywhere within the dataset, as `.shuffle()` puts it there."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        each = waiting.pop()
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return True
        waiting += [getattr(each, "ex_iterable", None)] if hasattr(each, "ex_iterable") else []
        waiting += list(getattr(each, "ex_iterables", []))
    return False


# Stages of webdataset: lockstep splits, and a part may be empty.
_LEFT_OUT = ("split_by_node", "single_node_only", "split_by_worker", "check_empty")


@final
class WebSource(StreamSource):
    """A webdataset pipeline over a list of URLs: one URL a part."""

    def __init__(self, inner: Any, urls: list[str]) -> None:
        super().__init__(len(urls), type(inner).__name__, bool(getattr(inner, "draws_random", True)))
        self._inner, self._urls = inner, urls

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        first, *rest = self._inner.pipeline
        pipeline = copy.copy(self._inner)
        one = copy.copy(first)
        one.urls = [self._urls[part]]
        pipeline.pipeline = [one, *(each for each in rest if getattr(each, "__name__", "") not in _LEFT_OUT)]
        return Opened(iter(pipeline), 0)


def _shard_urls(dataset: Any) -> list[str]:
    """Return the URLs that a webdataset pipeline starts with; [] for anything else."""
    pipeline = getattr(dataset, "pipeline", None)
    first = pipeline[0] if isinstance(pipeline, list) and pipeline else None
    is_list = type(first).__module__.startswith("webdataset.") and type(first).__name__ == "SimpleShardList"
    return [str(url) for url in first.urls] if is_list else []  # type: ignore[union-attr]
