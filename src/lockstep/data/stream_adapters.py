"""Open the parts of other libraries' streams, and of a user's own.

Of torch, Hugging Face datasets and webdataset.

    if is_stream(dataset):
        source = source_of(dataset)

No library is imported here: an object of it brings it along.
"""

import copy
import inspect
import random
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

# Private to torch: the type that `get_worker_info()` returns.
from torch.utils.data._utils.worker import WorkerInfo

from lockstep.data.stream_mixture import MixtureSource
from lockstep.data.stream_types import SplitStream, Stream, StreamMixture, has_class, refuse_divided
from lockstep.data.streams import Opened, StreamSource
from lockstep.errors import DataError, error_line

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
            list(dataset.sources), [_source_of(stream) for stream in dataset.sources.values()], dataset.points
        )
    return _source_of(dataset)


def _source_of(dataset: Any) -> StreamSource:
    inner = dataset.dataset if isinstance(dataset, SplitStream) else dataset
    name = type(inner).__name__
    if hasattr(inner, "__next__"):
        raise DataError(
            f"the task's dataset('train') returned {name}, an iterator, which can be read only once; return an object "
            "whose `__iter__` opens it again"
        )
    _refuse(inner)
    if _is_webdataset(inner):
        return WebSource(inner, dataset.parts if isinstance(dataset, SplitStream) else 0)
    if isinstance(dataset, SplitStream):
        return IterableSource(inner, dataset.parts, splits=True)
    if _is_own(dataset):
        return OwnSource(dataset)
    if _is_hugging_face(dataset):
        return HuggingFaceSource(dataset)
    return IterableSource(dataset, 1, splits=False)


def _refuse(dataset: Any) -> None:
    """Refuse a dataset that divides its samples between ranks or processes itself.

    The error has the line to write in its place.
    """
    refuse_divided(dataset, "the task's dataset('train')")
    first_stage = next(iter(getattr(dataset, "pipeline", None) or []), None)
    if isinstance(first_stage, DataLoader):
        raise DataError(
            f"the task's dataset('train') returned {type(dataset).__name__}, a pipeline around a DataLoader; return "
            "the data set inside: --data.workers starts loader processes, --micro-batch-size makes batches"
        )


def _is_own(dataset: Any) -> bool:
    """Whether the object has `parts` and `iter`.

    A Hugging Face dataset has an `iter` of batches, and no `parts`.
    """
    return hasattr(dataset, "parts") and callable(getattr(dataset, "iter", None))


@final
class OwnSource(StreamSource):
    """A user's own object with `parts` and `iter`."""

    seeks = True

    def __init__(self, inner: Stream) -> None:
        super().__init__(inner, inner.parts, has_state="state" in inspect.signature(inner.iter).parameters)

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        if callable(set_epoch := getattr(self.inner, "set_epoch", None)):
            set_epoch(epoch)
        if self.has_state and state is not None:
            resumed = {"state": state}
        else:
            resumed = {}
        return Opened(iter(self.inner.iter(part, start, **resumed)), start)

    def state(self, opened: Iterator[Any]) -> Any:
        state_dict = getattr(opened, "state_dict", None)
        if callable(state_dict):
            return state_dict()
        return None


@final
class IterableSource(StreamSource):
    """An iterable dataset: one part, or several if it splits itself by `get_worker_info()`.

    It cannot seek: a part is opened at its beginning. One with `state_dict()` and `load_state_dict()`, as torchdata's
    loader knows them, is opened at its state. That moves the dataset itself, so each open part has a copy, as in a
    loader process of its own; as one part it also begins an epoch with the state that the last one ended with.
    """

    def __init__(self, inner: Any, parts: int, *, splits: bool) -> None:
        super().__init__(inner, parts, has_state=_is_stateful(inner))
        self._splits = splits
        self.carries = self.has_state and parts == 1

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        instance = self._copy() if self.has_state else self.inner
        if callable(set_epoch := getattr(instance, "set_epoch", None)):
            set_epoch(epoch)
        if not self.has_state:
            return Opened(iter(instance), 0)
        if state is not None:
            instance.load_state_dict(_unpack(state["dataset"]))
        opened = _StatefulIterator(instance)
        if state is not None and "iterator" in state:
            opened.iterator.load_state_dict(_unpack(state["iterator"]))
        return Opened(opened, start if state is not None else 0)

    def state(self, opened: Any) -> Any:
        state = {"dataset": _pack(opened.dataset.state_dict())}
        if opened.iterator is not opened.dataset and _is_stateful(opened.iterator):
            state["iterator"] = _pack(opened.iterator.state_dict())
        return state

    def worker_info(self, part: int) -> Any:
        if self._splits:
            return WorkerInfo(id=part, num_workers=self.parts, seed=0, dataset=self.inner)
        return None

    def _copy(self) -> Any:
        try:
            return copy.deepcopy(self.inner)
        except Exception as error:
            raise DataError(
                f"the stream {self.name} has `load_state_dict`, and each open part needs a copy of it, but it cannot "
                f"be copied: {error_line(error)}; open files and connections in `__iter__`"
            ) from error


def _is_stateful(dataset: Any) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


class _StatefulIterator:
    """An iterator over a dataset with a state, and the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.iterator = iter(dataset)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def close(self) -> None:
        """Close the iterator's files."""
        if callable(close := getattr(self.iterator, "close", None)):
            close()


# JSON has no tuples, arrays, bytes or other keys than strings. Each becomes a dict with one key, its type's name.
_TUPLE = "*tuple"
_PAIRS = "*dict"
_ARRAY = "*array"
_BYTES = "*bytes"


def _pack(state: Any) -> Any:
    """Return a state in JSON's types.

    Anything that is no number, text, container, array or tensor stays, to be refused later.
    """
    if isinstance(state, dict):
        if all(type(key) is str for key in state) and not any(key.startswith("*") for key in state):
            return {key: _pack(value) for key, value in state.items()}
        return {_PAIRS: [[_pack(key), _pack(value)] for key, value in state.items()]}
    if isinstance(state, tuple):
        return {_TUPLE: [_pack(element) for element in state]}
    if isinstance(state, list):
        return [_pack(element) for element in state]
    if isinstance(state, bytes):
        return {_BYTES: state.hex()}
    if isinstance(state, np.ndarray | Tensor):
        array_type = "tensor" if isinstance(state, Tensor) else "ndarray"
        array = np.asarray(state)
        return {_ARRAY: [array_type, str(array.dtype), list(array.shape), array.tobytes().hex()]}
    if isinstance(state, np.generic):
        return state.item()
    return state


def _unpack(state: Any) -> Any:
    """Return the state from the result of `_pack`."""
    if isinstance(state, list):
        return [_unpack(element) for element in state]
    if not isinstance(state, dict):
        return state
    (name, value), *others = list(state.items()) or [("", None)]
    if others or not name.startswith("*"):
        return {key: _unpack(element) for key, element in state.items()}
    if name == _TUPLE:
        return tuple(_unpack(element) for element in value)
    if name == _PAIRS:
        return {_unpack(key): _unpack(element) for key, element in value}
    if name == _BYTES:
        return bytes.fromhex(value)
    array_type, dtype, shape, numbers = value
    array = np.frombuffer(bytes.fromhex(numbers), dtype=dtype).reshape(shape).copy()
    if array_type == "tensor":
        return torch.from_numpy(array)
    return array


class _Resumable:
    """An iterator over a Hugging Face dataset, with the dataset whose state it moves."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._iterator = cast(Generator[Any, None, None], iter(dataset))

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

    It is one part where the library's own division would give other samples: `take` and `skip` of each shard,
    `interleave_datasets` until a shard ends, batches of each shard. The state of a shuffle buffer lacks the samples in
    it; such a part is read from its beginning instead.
    """

    def __init__(self, inner: Any) -> None:
        stages = list(_stages(inner))
        whole = ""
        for stage in stages:
            if name := _over_all_shards(stage):
                whole = name
                break
        seeks = "BufferShuffledExamplesIterable" not in [type(stage_in_chain).__name__ for stage_in_chain in stages]
        super().__init__(inner, 1 if whole and inner.num_shards > 1 else inner.num_shards, has_state=seeks)
        if whole and inner.num_shards > 1:
            self.note = f"{whole} is over all {inner.num_shards} shards, so the stream is one part"

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        # A private copy: `load_state_dict` moves the dataset itself.
        if self.parts > 1:
            dataset = self.inner.shard(self.parts, part)
        else:
            dataset = copy.deepcopy(self.inner)
        dataset.set_epoch(epoch)
        resumes = start > 0 and state is not None and self.has_state
        if resumes:
            dataset.load_state_dict(copy.deepcopy(state))
        return Opened(_Resumable(dataset), start if resumes else 0)

    def state(self, opened: Any) -> Any:
        return opened.dataset.state_dict()


def _is_hugging_face(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("num_shards", "shard", "state_dict", "load_state_dict", "set_epoch"))


# Stages of `datasets`, also of older versions, whose division into shards gives the same samples.
_PER_SHARD_STAGES = frozenset(
    f"{name}Iterable"
    for name in (
        "Examples",
        "ArrowExamples",
        "RebatchedArrowExamples",
        "SelectColumns",
        "FormattedExamples",
        "TypedExamples",
        "MappedExamples",
        "FilteredExamples",
        "BufferShuffledExamples",
        "RepeatExamples",
        "InterleavedShardsExamples",
        "ShuffledDataSourcesExamples",
        "ShuffledDataSourcesArrowExamples",
        "VerticallyConcatenatedMultiSourcesExamples",
    )
)
# Stages whose result over all shards differs from the results of each shard.
_ALL_SHARD_STAGES = {
    "TakeExamplesIterable": ".take()",
    "SkipExamplesIterable": ".skip()",
    "CyclingMultiSourcesExamplesIterable": "interleave_datasets",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleave_datasets",
}


def _stages(dataset: Any) -> Iterator[Any]:
    """Yield the stages of a Hugging Face dataset, the last one first."""
    # Private to `datasets`: the chain of stages, which it does not publish.
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if stage is None:
            continue
        yield stage
        waiting += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", [])]


def _over_all_shards(stage: Any) -> str:
    """Return the stage's name if it works over all shards.

    "" if each shard may be read by itself.
    """
    stage_name = type(stage).__name__
    if stage_name not in _PER_SHARD_STAGES:
        return _ALL_SHARD_STAGES.get(stage_name, stage_name)
    if stage_name == "RepeatExamplesIterable" and getattr(stage, "num_times", None) is None:
        return ".repeat(None)"
    if getattr(stage, "with_indices", False):
        return "with_indices"
    if getattr(stage, "batched", False):
        function = getattr(stage, "function", None)
        function = getattr(function, "func", function)
        if getattr(stage, "drop_last_batch", False):
            return "drop_last_batch"
        if str(getattr(function, "__module__", "")).startswith("datasets."):
            return ".batch()"
    return ""


# --- webdataset

# Stages that divide the URLs between ranks and processes, which lockstep does itself; and a check that a part may fail.
_LEFT_OUT = frozenset(("split_by_node", "single_node_only", "split_by_worker", "check_empty"))
# Stages that treat each sample, or each URL, by itself: the parts together have the samples of the whole.
_PER_SAMPLE_STAGES = frozenset(
    (
        *("url_opener", "cached_url_opener", "tar_file_expander", "tarfile_samples", "group_by_keys", "StreamingOpen"),
        *("FileCache", "_shuffle", "detshuffle", "_rsample"),
        *("_map", "_decode", "_xdecode", "_select", "_rename", "_rename_keys", "_extract_keys", "_associate"),
        *("_map_dict", "_map_tuple", "_to_tuple", "_info", "_log_keys", "_unlisted", "_unbatched"),
    )
)
# Parts of a pipeline that resamples its URLs.
_RESAMPLED_PARTS = 8
# Fewest samples that such a part reads in an epoch. It starts again in each epoch, so of a tar that is longer it would
# read the first samples only.
_LEAST_RESAMPLED = 10_000
# The largest tar may have this many times the mean size.
_UNEVEN = 2.0


@final
class WebSource(StreamSource):
    """A webdataset pipeline.

    One that treats each sample by itself has a part for each URL. One that resamples has several parts, each with draws
    of its own. Any other, such as one with `.with_epoch(n)` or `.repeat()`, is one part, so that it keeps its meaning.
    Shuffles and draws that it would seed by the clock are seeded by the run; epochs that it would count are the run's.

    Args:
        inner: the pipeline.
        parts: into how many it splits itself by `get_worker_info()`; 0: it is not declared.
    """

    def __init__(self, inner: Any, parts: int) -> None:
        first_stage, *rest = inner.pipeline
        self._urls = [str(stage_of_rest) for stage_of_rest in getattr(first_stage, "urls", [])]
        self._resamples = type(first_stage).__name__ == "ResampledShards"
        self._declared = parts > 0
        whole = ""
        for stage_of_rest in rest:
            if (name := _stage_name(stage_of_rest)) not in _PER_SAMPLE_STAGES | _LEFT_OUT:
                whole = name
                break
        self._ends = inner.repetitions != 1 and inner.nsamples > 0
        if inner.repetitions != 1 and not self._resamples:
            whole = f".with_epoch({inner.nsamples})" if self._ends else ".repeat()"
        self._divides = not whole and not self._declared and type(first_stage).__name__ == "SimpleShardList"
        count = parts or (len(self._urls) if self._divides else 1)
        if self._resamples and self._ends and inner.nsamples < _RESAMPLED_PARTS * _LEAST_RESAMPLED:
            whole = f".with_epoch({inner.nsamples})"
        if self._resamples and not whole and not self._declared:
            count = _RESAMPLED_PARTS
        super().__init__(inner, count)
        if self._divides:
            self.sizes = _sizes(self._urls)
        elif whole and not self._declared and len(self._urls) > 1:
            self.note = (
                f"{whole} is over all {len(self._urls)} URLs of the pipeline, so it is one part; leave it out, or "
                "declare lockstep.stream(pipeline, parts=N) if it holds for each part by itself"
            )

    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        pipeline = copy.copy(self.inner)
        stages = []
        for stage in pipeline.pipeline:
            if self._is_kept(stage):
                stages.append(self._stage(stage, part, epoch))
        if self._divides:
            stages[0].urls = [self._urls[part]]
        if self._resamples and self._ends and self.parts > 1:
            pipeline.nsamples = len(range(part, self.inner.nsamples, self.parts))
        pipeline.pipeline = stages
        return Opened(iter(pipeline), 0)

    def worker_info(self, part: int) -> Any:
        if not self._declared:
            return None
        return WorkerInfo(id=part, num_workers=self.parts, seed=0, dataset=self.inner)

    def _is_kept(self, stage: Any) -> bool:
        name = _stage_name(stage)
        return name not in _LEFT_OUT or (self._declared and name == "split_by_worker")

    def _stage(self, stage: Any, part: int, epoch: int) -> Any:
        """Return a stage for one reading.

        A copy with a seed, if it has none, and with the run's epoch.
        """
        name = _stage_name(stage)
        if name == "_shuffle":
            return _seeded_shuffle(stage, part, epoch)
        if not isinstance(stage, IterableDataset) and not hasattr(stage, "run"):
            return stage
        stage = copy.copy(stage)
        if name == "detshuffle":
            stage.epoch += epoch
        elif name == "ResampledShards":
            if stage.deterministic:
                stage.epoch += epoch
            else:
                # Seeded by the part's seed, which `_enter` has set.
                stage.deterministic = True
                stage.seed = random.getrandbits(31)
            # By default each rank would get a seed of its own.
            if getattr(stage.worker_seed, "__name__", "") == "pytorch_worker_seed":
                stage.worker_seed = lambda: part
        elif callable(set_epoch := getattr(stage, "set_epoch", None)):
            set_epoch(epoch)
        return stage


def _seeded_shuffle(stage: Any, part: int, epoch: int) -> Any:
    """Return a `.shuffle()` that draws the same on each rank.

    With the seed that it has, or with that of the part.
    """
    given = dict(zip(("bufsize", "initial", "rng", "seed"), stage.args, strict=False)) | stage.kw
    generator = given.get("rng")
    if given.get("seed") is not None:
        return stage
    shuffle = copy.copy(stage)
    if generator is not None:
        base_seed = copy.deepcopy(generator).getrandbits(64)
    else:
        base_seed = random.getrandbits(64)
    drawn = random.Random(f"{base_seed} {part} {epoch}" if generator is not None else base_seed)
    if len(stage.args) > 2:
        shuffle.args = (*stage.args[:2], drawn, *stage.args[3:])
    else:
        shuffle.kw = {**stage.kw, "rng": drawn}
    return shuffle


def _stage_name(stage: Any) -> str:
    """Return the name of a stage of webdataset.

    For any other stage its type or name, which is in no list here.
    """
    function = getattr(stage, "f", None) or getattr(stage, "func", None) or stage
    is_own = str(getattr(function, "__module__", type(stage).__module__)).startswith("webdataset.")
    name = str(getattr(function, "__name__", type(stage).__name__))
    if is_own:
        return name
    return f"the stage {name}"


def _sizes(urls: list[str]) -> list[int]:
    """Return the bytes of local tars, if they are uneven; [] otherwise."""
    paths = [Path(url.removeprefix("file:")) for url in urls]
    if len(paths) < 2 or not all(path.is_file() for path in paths):
        return []
    sizes = [path.stat().st_size for path in paths]
    if max(sizes) > _UNEVEN * sum(sizes) / len(sizes):
        return sizes
    return []


def _is_webdataset(dataset: Any) -> bool:
    """Whether the object is a pipeline of webdataset that begins with a list of shards."""
    pipeline = getattr(dataset, "pipeline", None)
    return has_class(dataset, "webdataset", "DataPipeline") and isinstance(pipeline, list) and len(pipeline) > 1
