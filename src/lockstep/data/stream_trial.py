"""Try a stream before step 1: seeks, a second epoch, and generators.

A generator must not continue from one reading to the next.

with preserve(source):                          # in the training process: a trial must change nothing
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

# Most samples of a reading.
_TRIAL_SAMPLES = 64
# Seconds after which a reading ends.
_TRIAL_SECONDS = 1.0
# Samples of the next epoch.
_NEXT_EPOCH_SAMPLES = 4
# Samples at the position of a checkpoint.
_PLACE_SAMPLES = 4
# Most samples before it, in a part that cannot seek.
_READ_PAST = 1_000


def try_source(
    source: StreamSource, seed: int, digest: Callable[[Any], Any], alike: Callable[[Any, Any], bool]
) -> None:
    """Read some samples, some of the next epoch, and the first ones again.

    The second time from the middle of a part.

    A resume does the same. The caller restores what the readings change in the user's object.

    Args:
        digest: makes a small value of a sample.
        alike: compares two such values.

    Raises:
        DataError: the readings differ, or a generator of the user's object continues from one to the next.
    """
    # Use one sample per micro-batch, so that a position is known after each.
    lanes = Lanes(source.parts, 1, 1, seed)
    user_objects = reachable({"it": source.inner})
    generators = {}
    for path, generator_or_states in user_objects:
        if isinstance(generator_or_states, _GENERATORS):
            generators[path] = generator_or_states
    states = [_generator_states(generators)]
    first_reading = _read_each(source, lanes, 0, START, _TRIAL_SAMPLES, digest)
    states.append(_generator_states(generators))
    # A source that carries its state begins the second epoch with the end of the first.
    if not source.carries:
        _read_each(source, lanes, 1, START, _NEXT_EPOCH_SAMPLES, digest)
    positions = [after for _, after in first_reading]
    middle = []
    for k, position in enumerate(positions[:-1]):
        if 0 < position.offset < positions[k + 1].offset:
            middle.append(k)
    begin = middle[len(middle) // 2] + 1 if middle else 0
    again = _read_each(
        source, lanes, 0, positions[begin - 1] if begin else START, len(first_reading) - begin, digest, endless=True
    )
    states.append(_generator_states(generators))
    pairs = zip(first_reading[begin:], again, strict=False)
    odd = -1
    for k, (one, other) in enumerate(pairs):
        if not alike(one[0], other[0]):
            odd = k
            break
    if odd >= 0 or len(again) < len(first_reading) - begin:
        whole = _read_each(source, lanes, 0, START, len(first_reading), digest, endless=True)
        repeats = len(whole) == len(first_reading) and all(
            alike(one[0], other[0]) for one, other in zip(first_reading, whole, strict=True)
        )
        raise _unlike(source, lanes, positions, begin, max(odd, 0), repeats=repeats)
    for path in generators:
        before, after, later = (generator_or_states[path] for generator_or_states in states)
        if before != after != later:
            raise DataError(
                f"the stream {source.name} draws from {path}, a generator that continues from one reading to the next, "
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
    """Read the samples at a checkpoint's position twice.

    A shuffle may begin after the samples of `try_source`.

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
    first_reading, again = readings
    if len(first_reading) != len(again) or not all(map(alike, first_reading, again)):
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
    readings = list[tuple[Any, Cursor]]()
    ends = time.monotonic() + (_FOREVER if endless else _TRIAL_SECONDS)
    with closing(reader):
        while len(readings) < count and (len(readings) < 2 or time.monotonic() < ends):
            samples, cursor = reader.read(lanes.count, cursor.number, 1, epoch=epoch, cursor=cursor)
            if not samples:
                break
            readings.append((digest(samples[0]), cursor))
    return readings


def _unlike(
    source: StreamSource, lanes: Lanes, places: list[Cursor], begin: int, odd: int, *, repeats: bool
) -> DataError:
    """Describe a reading that differs from the first one.

    Args:
        repeats: a second reading from the start has the samples of the first.
    """
    position = places[begin - 1] if begin else START
    part_number = lanes.parts_of(0, lanes.count)[position.place]
    start = (
        f"the stream {source.name}: part {part_number}, opened at sample {position.offset}, has another sample "
        f"{position.offset + odd} than when it is read from its start, so a resume would lose or repeat samples"
    )
    if repeats and source.has_state and position.state is not None:
        return DataError(
            f"{start}; `state_dict()` after n samples must lead to number n: count a sample before its `yield`"
        )
    if repeats and source.seeks and begin:
        return DataError(f"{start}; `iter(part, start)` must pass over the first `start` samples of the part")
    return DataError(
        f"two readings of the stream {source.name} differ from sample {position.offset + odd} of part "
        f"{part_number} on, so a resume would lose or repeat some; give its shuffles a seed, and draw from torch, "
        "numpy or random alone"
    )


# Seconds: no limit.
_FOREVER = 1e9
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _generator_states(generators: Mapping[str, Any]) -> dict[str, str]:
    return {path: _state_of(generator) for path, generator in generators.items()}


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
    """Restore what a trial changes in the user's own objects.

    Counters, generators, and files that are opened in between.
    """
    state = ObjectState({stream.name: stream.inner for stream in sources_of(source)}, late=True)
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
        return {"the dataset": [stream.inner for stream in self.sources]}

    def __getitem__(self, key: Any) -> tuple[Any, float]:
        for stream in self.sources:
            try_source(stream, self.seed, self.digest, self.alike)
            if self.place:
                try_place(stream, self.place, self.digest, self.alike)
        return None, 0
