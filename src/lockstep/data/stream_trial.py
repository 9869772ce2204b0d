"""Try a stream before step 1: seeks, a second epoch, and generators that go on from one reading to the next.

with preserve(source):                          # in the training process: a trial leaves no mark
    try_source(source, seed, digest, alike)
    try_place(source, place, digest, alike)     # before a resume
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.data.descriptors import reachable
from lockstep.data.stream_mixture import MixtureSource
from lockstep.data.streams import START, Cursor, LaneReader, Lanes, StreamSource
from lockstep.errors import DataError
from lockstep.object_state import ObjectState

__all__ = ["StreamTrial", "TrialPlace", "preserve", "sources_of", "try_place", "try_source"]

_TRIAL_SAMPLES = 64  # samples of a reading, at most
_TRIAL_SECONDS = 1.0  # after which a reading ends
_NEXT_EPOCH_SAMPLES = 4  # samples of the next epoch
_PLACE_SAMPLES = 4  # samples at the place of a checkpoint
_READ_PAST = 10_000  # samples before it, at most, in a part that cannot seek


def try_source(
    source: StreamSource, seed: int, digest: Callable[[Any], Any], alike: Callable[[Any, Any], bool]
) -> None:
    """Read a few samples, some of the next epoch, and the first ones again from the middle of a part.

    A resume does the same. The caller restores what the readings change in the user's object.

    Args:
        digest: makes a small value of a sample.
        alike: compares two such values.

    Raises:
        DataError: the readings differ, or a generator of the user's object goes on from one to the next.
    """
    # One sample a micro-batch, so that a place is known after each
    lanes = Lanes(source.parts, 1, 1, seed)
    found = reachable({"it": source.inner})
    generators = {path: each for path, each in found if isinstance(each, _GENERATORS)}
    states = [_generator_states(generators)]
    first = _read_each(source, lanes, 0, START, _TRIAL_SAMPLES, digest)
    states.append(_generator_states(generators))
    if not source.carries:  # its second epoch begins with the end of the first
        _read_each(source, lanes, 1, START, _NEXT_EPOCH_SAMPLES, digest)
    places = [after for _, after in first]
    middle = []
    for k, place in enumerate(places[:-1]):
        if 0 < place.offset < places[k + 1].offset:
            middle.append(k)
    begin = middle[len(middle) // 2] + 1 if middle else 0
    again = _read_each(
        source, lanes, 0, places[begin - 1] if begin else START, len(first) - begin, digest, endless=True
    )
    states.append(_generator_states(generators))
    pairs = zip(first[begin:], again, strict=False)
    odd = next((k for k, (one, other) in enumerate(pairs) if not alike(one[0], other[0])), -1)
    if odd >= 0 or len(again) < len(first) - begin:
        whole = _read_each(source, lanes, 0, START, len(first), digest, endless=True)
        repeats = len(whole) == len(first) and all(
            alike(one[0], other[0]) for one, other in zip(first, whole, strict=True)
        )
        raise _unlike(source, lanes, places, begin, max(odd, 0), repeats=repeats)
    for path in generators:
        before, after, later = (each[path] for each in states)
        if before != after != later:
            raise DataError(
                f"the stream {source.name} draws from {path}, a generator that goes on from one reading to the next, "
                "so a resume would lose or repeat samples: seed it where a reading begins, as by the argument of "
                "set_epoch(epoch), or draw from torch, numpy or random"
            )


class TrialPlace(NamedTuple):
    """A place within a part, from which a checkpoint continues."""

    lanes: Lanes
    lane: int
    epoch: int
    cursor: Cursor


def try_place(
    source: StreamSource, place: TrialPlace, digest: Callable[[Any], Any], alike: Callable[[Any, Any], bool]
) -> None:
    """Read the samples at a checkpoint's place twice: a shuffle may begin after those of `try_source`.

    In a part that cannot seek they are at most `_READ_PAST` samples from its start. Arguments as `try_source`.

    Raises:
        DataError: the readings differ.
    """
    lanes, lane, epoch, cursor = place
    if not source.seeks and cursor.state is None:
        past = max(0, cursor.offset - _READ_PAST) // lanes.micro_size * lanes.micro_size
        cursor = cursor._replace(number=cursor.number - past, offset=cursor.offset - past)
    readings = []
    for _ in range(2):
        with closing(LaneReader(source, lanes)) as reader:
            samples, _ = reader.read(lane, cursor.number, _PLACE_SAMPLES, epoch=epoch, cursor=cursor)
        readings.append([digest(sample) for sample in samples])
    first, again = readings
    if len(first) != len(again) or not all(map(alike, first, again)):
        raise DataError(
            f"two readings of the stream {source.name} differ at sample {cursor.offset} of part "
            f"{lanes.parts_of(epoch, lane)[cursor.place]}, so this resume would lose or repeat samples; give its "
            "shuffles a seed that no reading changes, as by the argument of set_epoch(epoch), and start a new run"
        )


def _read_each(
    source: StreamSource,
    lanes: Lanes,
    epoch: int,
    cursor: Cursor,
    count: int,
    digest: Callable[[Any], Any],
    *,
    endless: bool = False,
) -> list[tuple[Any, Cursor]]:
    """Read up to `count` samples one by one: (digest, the place after it) of each."""
    reader = LaneReader(source, lanes)
    found = list[tuple[Any, Cursor]]()
    ends = time.monotonic() + (_FOREVER if endless else _TRIAL_SECONDS)
    with closing(reader):
        while len(found) < count and (len(found) < 2 or time.monotonic() < ends):
            samples, cursor = reader.read(lanes.count, cursor.number, 1, epoch=epoch, cursor=cursor)
            if not samples:
                break
            found.append((digest(samples[0]), cursor))
    return found


def _unlike(
    source: StreamSource, lanes: Lanes, places: list[Cursor], begin: int, odd: int, *, repeats: bool
) -> DataError:
    """Describe a reading that differs from the first one.

    Args:
        repeats: a second reading from the start has the samples of the first.
    """
    place = places[begin - 1] if begin else START
    part = lanes.parts_of(0, lanes.count)[place.place]
    start = (
        f"the stream {source.name}: part {part}, opened at sample {place.offset}, has another sample "
        f"{place.offset + odd} than when it is read from its start, so a resume would lose or repeat samples"
    )
    if repeats and source.has_state and place.state is not None:
        return DataError(
            f"{start}; `state_dict()` after n samples must lead to number n: count a sample before its `yield`"
        )
    if repeats and source.seeks and begin:
        return DataError(f"{start}; `iter(part, start)` must pass over the first `start` samples of the part")
    return DataError(
        f"two readings of the stream {source.name} differ from sample {place.offset + odd} of part {part} on, so a "
        "resume would lose or repeat some; give its shuffles a seed, and draw from torch, numpy or random alone"
    )


_FOREVER = 1e9  # seconds
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _generator_states(generators: Mapping[str, Any]) -> dict[str, str]:
    return {path: _state_of(each) for path, each in generators.items()}


def _state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().numpy().tobytes().hex())
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state()
        return repr(state[1:])
    return repr(generator.bit_generator.state)


# --- in the process that reads the stream


def sources_of(source: StreamSource | MixtureSource) -> list[StreamSource]:
    """Return the sources of a mixture, or the stream alone."""
    if isinstance(source, MixtureSource):
        return source.sources
    return [source]


@contextmanager
def preserve(source: StreamSource | MixtureSource) -> Iterator[None]:
    """Restore what a trial changes in the user's own objects: counters, generators, what is opened in between."""
    state = ObjectState({each.name: each.inner for each in sources_of(source)}, late=True)
    try:
        with state.watching():
            yield
    finally:
        state.restore()


@dataclass(frozen=True)
class StreamTrial:
    """Fetching that tries the sources of a stream and loads nothing; arguments as `try_source`.

    Attributes:
        place: of the checkpoint of a resume, in the only source; None: there is none.
    """

    sources: list[StreamSource]
    seed: int
    digest: Callable[[Any], Any]
    alike: Callable[[Any, Any], bool]
    place: TrialPlace | None = None

    def inherited(self) -> dict[str, Any]:
        """Return what loader processes inherit of the user's: name -> object."""
        return {"the dataset": [each.inner for each in self.sources]}

    def __getitem__(self, key: Any) -> tuple[Any, float]:
        for each in self.sources:
            try_source(each, self.seed, self.digest, self.alike)
            if self.place:
                try_place(each, self.place, self.digest, self.alike)
        return None, 0
