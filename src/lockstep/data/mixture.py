"""Mix datasets by weights, which may change with the step.

    data = lockstep.mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
    data = lockstep.mixture({"web": web, "code": code}, [(0, {"web": 1.0}), (10_000, {"web": 0.5, "code": 0.5})])

The positions of the run are cut into blocks. How many samples of each source a block has follows from the integral of
the weights: at the end of each block the counts are within 1 of it. Places in a block are permuted, and the i-th sample
of a source is that of the source's own order. So the source and the sample at any position are found at once, on any
number of ranks.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from lockstep.data.loader import check_dataset, draws
from lockstep.data.sampler import Indices, Shuffled, permute_groups
from lockstep.data.shard_order import ONE_LANE, Geometry, PlacedOrder, ShardOrder, lanes_of
from lockstep.errors import ConfigError
from lockstep.seeds import derive

__all__ = ["Mixture", "MixtureOrder", "mixture"]

Weights = Mapping[str, float]
Points = Sequence[tuple[int, Weights]]

_UNIT = 1_000_000  # weights are rounded to millionths, so that constant ones repeat after whole blocks
_BLOCK = 1000  # positions
_BLOCKS = 1000  # of all parts of a curriculum together, about


def mixture(sources: Mapping[str, Any], weights: Weights | Points | None = None) -> "Mixture":
    """Mix datasets: each step has about the weights' shares of samples from each source.

    A source that is used up begins again, in a new order. An epoch of the mixture is as many samples as all sources
    have together, whichever they come from.

    Args:
        sources: map-style datasets by name.
        weights: by name, in any unit; one that is left out is 0. Or points of a curriculum, (step, weights) in
            ascending order, with straight lines between them; the first and the last hold before and after. None: the
            sizes of the sources.

    Raises:
        ConfigError: a name or a weight is invalid.
        DataError: a source is not map-style.
    """
    if not sources:
        raise ConfigError("lockstep.mixture: no sources; give a dict of datasets by name")
    for name, dataset in sources.items():
        if isinstance(dataset, Mixture):
            raise ConfigError(f"lockstep.mixture: the source '{name}' is a mixture; give its sources instead")
        check_dataset(dataset, f"train (source {name})")
        if not len(dataset):
            raise ConfigError(f"lockstep.mixture: the source '{name}' is empty; leave it out")
    if weights is None:
        weights = {name: len(dataset) for name, dataset in sources.items()}
    points = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
    names = list(sources)
    steps = [step for step, _ in points]
    if not points or steps != sorted(set(steps)) or steps[0] < 0:
        raise ConfigError(f"lockstep.mixture: weights at the steps {steps}; give points of ascending steps, from 0 on")
    return Mixture(dict(sources), [(step, _millionths(names, each, step)) for step, each in points])


def _millionths(names: list[str], weights: Weights, step: int) -> list[int]:
    """Return the shares of the sources in millionths, which add up to a million.

    Raises:
        ConfigError: an unknown source, an invalid weight, or one that is too small.
    """
    start = f"lockstep.mixture: the weights at step {step}"
    for name, value in weights.items():
        if name not in names:
            raise ConfigError(f"{start} name '{name}', which is no source; the sources are {', '.join(names)}")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{start} have {value} for '{name}'; give a finite number, 0 or more")
    total = math.fsum(weights.values())
    if not (math.isfinite(total) and total > 0):
        raise ConfigError(f"{start} add up to {total}; give at least one above 0")
    exact = [weights.get(name, 0.0) / total * _UNIT for name in names]
    parts = [math.floor(value) for value in exact]
    by_rest = sorted(range(len(names)), key=lambda place: parts[place] - exact[place])
    for place in by_rest[: _UNIT - sum(parts)]:
        parts[place] += 1
    small = [name for name, part in zip(names, parts, strict=True) if not part and weights.get(name)]
    if small:
        raise ConfigError(f"{start} give '{small[0]}' less than a millionth; give 0 or more than that")
    return parts


@final
class Mixture:
    """Several datasets, one after the other, and the weights by which an order mixes them.

    Attributes:
        sources: the datasets by name.
        points: (step, shares in millionths) of a curriculum; one point: constant.
        draws_random: whether a sample must be seeded.
    """

    def __init__(self, sources: dict[str, Any], points: list[tuple[int, list[int]]]) -> None:
        self.sources, self.points = sources, points
        self._datasets = list(sources.values())
        self._starts = np.cumsum([0, *(len(each) for each in self._datasets)])
        self.draws_random = any(draws(each) for each in self._datasets)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect_right(self._starts, index) - 1
        return self._datasets[source][index - int(self._starts[source])]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples of a batch in order, those of each source at once."""
        samples: list[Any] = [None] * len(indices)
        which = np.searchsorted(self._starts, indices, side="right") - 1
        for source in np.unique(which).tolist():
            places, dataset = np.flatnonzero(which == source).tolist(), self._datasets[source]
            own = [indices[place] - int(self._starts[source]) for place in places]
            many = getattr(dataset, "__getitems__", None)
            loaded = many(own) if many else [dataset[index] for index in own]
            for place, sample in zip(places, loaded, strict=True):
                samples[place] = sample
        return samples

    @property
    def fingerprint(self) -> str:
        """Hex; of the weights and the sources, for a resume."""
        parts = [(name, len(each), getattr(each, "fingerprint", "")) for name, each in self.sources.items()]
        return xxhash.xxh3_64_hexdigest(repr((parts, self.points)).encode())

    @property
    def fetches(self) -> int:
        """Shards that this rank has fetched so far, of all sources."""
        return sum(int(getattr(each, "fetches", 0)) for each in self._datasets)

    def make_order(self, seed: int, shuffle_shards: int) -> "MixtureOrder":
        """Make the order that mixes the sources.

        Args:
            seed: the run's.
            shuffle_shards: for a source with shards, their number in a group; 0: shuffle all its samples.
        """
        orders: list[Shuffled | ShardOrder] = []
        for number, each in enumerate(self._datasets):
            key = derive(seed, "source", number)
            sizes = getattr(each, "shard_sizes", None) if shuffle_shards else None
            orders.append(Shuffled(len(each), key) if sizes is None else ShardOrder(sizes, key, shuffle_shards))
        return MixtureOrder(list(self.sources), orders, self.points, seed, in_lanes=bool(shuffle_shards))


class _Block(NamedTuple):
    """A block of positions.

    Attributes:
        start, stop: its positions.
        before: samples of each source before it. int64 [sources]
        counts: samples of each source in it. int64 [sources]
    """

    start: int
    stop: int
    before: Indices
    counts: Indices


class _Part:
    """A part of the schedule in which the weights are straight lines, or, at its end, constant.

    Args:
        start: its first position.
        length: its positions; 0: it is the last, which repeats without end.
        first, last: shares in millionths at its ends.
        before: samples of each source before it. int64 [sources]
        blocks: about how many blocks it may have.
    """

    def __init__(
        self, start: int, length: int, first: list[int], last: list[int], before: Indices, blocks: int = _BLOCKS
    ) -> None:
        self.start, self.length, self._before = start, length, before
        if not length:  # after so many blocks all counts are whole
            length = _BLOCK * (_UNIT // _BLOCK // math.gcd(_UNIT // _BLOCK, *first))
        size = max(_BLOCK, -(-length // blocks))
        self._bounds = [*range(0, length, size), length]
        # The integral of the weights at each bound, in units of 1 / (2 * _UNIT * length): Python integers.
        targets = np.array(
            [
                [2 * length * a * bound + (b - a) * bound * bound for a, b in zip(first, last, strict=True)]
                for bound in self._bounds
            ],
            dtype=object,
        )
        unit = 2 * _UNIT * length
        self._counts = _round(self._bounds, targets // unit, -(-targets // unit))

    @property
    def after(self) -> Indices:
        """Samples of each source at its end, or at that of its first period. int64 [sources]"""
        counts: Indices = self._before + self._counts[-1]
        return counts

    def block(self, position: int) -> _Block:
        """Return the block of a position."""
        periods, place = divmod(position - self.start, self._bounds[-1])
        number = bisect_right(self._bounds, place) - 1
        start = position - place + self._bounds[number]
        before = self._before + periods * self._counts[-1] + self._counts[number]
        counts = self._counts[number + 1] - self._counts[number]
        return _Block(start, start + self._bounds[number + 1] - self._bounds[number], before, counts)


def _round(bounds: list[int], floors: NDArray[Any], ceilings: NDArray[Any]) -> Indices:
    """Round the sources' counts at each bound to integers that never fall, and add up to the bound.

    A count stays between floor and ceiling of its exact value. Of the sources that may get one more, the one whose
    floor demands it first gets it: with this rule, earliest deadline first, none comes too late (Liu and Layland, 1973;
    Tijdeman, 1980). The largest remainder at each bound alone would let counts fall.

    Args:
        bounds: positions.
        floors, ceilings: of the exact counts. [bounds, sources]

    Returns:
        int64 [bounds, sources].
    """
    low, high = floors.astype(np.int64), ceilings.astype(np.int64)
    counts = np.zeros_like(low)
    for number in range(1, len(bounds)):
        now = np.maximum(counts[number - 1], low[number])
        missing = bounds[number] - int(now.sum())
        may = np.flatnonzero(now < high[number]).tolist()
        due = {source: int(np.searchsorted(low[:, source], now[source] + 1)) for source in may}
        now[sorted(may, key=lambda source: due[source])[:missing]] += 1
        counts[number] = now
    return counts


class _Schedule:
    """Assignment of the positions of an endless stream to sources and their samples.

    Args:
        points: (step, shares in millionths).
        width: positions in a step.
    """

    def __init__(self, points: list[tuple[int, list[int]]], width: int) -> None:
        before = np.zeros(len(points[0][1]), dtype=np.int64)
        points = points if points[0][0] == 0 else [(0, points[0][1]), *points]
        blocks = max(10, _BLOCKS // len(points))
        self._parts: list[_Part] = []
        for (step, first), (following, last) in pairwise(points):
            self._parts.append(_Part(step * width, (following - step) * width, first, last, before, blocks))
            before = self._parts[-1].after
        step, last = points[-1]
        self._parts.append(_Part(step * width, 0, last, last, before))
        self._starts = [part.start for part in self._parts]

    def block(self, position: int) -> _Block:
        """Return the block of a position."""
        return self._parts[bisect_right(self._starts, position) - 1].block(position)


@final
class MixtureOrder:
    """The order of a mixture's samples.

    Args:
        names: of the sources.
        orders: of the sources.
        points: (step, shares in millionths).
        seed: the run's.
        in_lanes: each micro-batch of a step is mixed by itself, so that the sources' shards are read by few ranks. The
            counts are then within 1 of the weights in each of them, and not in all together.
        geometry: of the steps.
        size: samples in an epoch; 0: those of all sources.

    Attributes:
        names: of the sources.
        size: samples in an epoch.
    """

    def __init__(
        self,
        names: list[str],
        orders: Sequence[Any],
        points: list[tuple[int, list[int]]],
        seed: int,
        *,
        in_lanes: bool,
        geometry: Geometry = ONE_LANE,
        size: int = 0,
    ) -> None:
        sizes = [order.size for order in orders]
        self.names, self.size = names, size or sum(sizes)
        self._orders, self._points, self._seed, self._in_lanes = orders, points, seed, in_lanes
        self._starts = np.cumsum([0, *sizes])
        self._geometry = geometry
        self._schedules: dict[int, _Schedule] = {}

    def placed(self, geometry: Geometry, size: int) -> "MixtureOrder":
        """Return the order for steps of this geometry, with epochs of `size` samples; 0: those of all sources."""
        orders = [order.placed(geometry, 0) if isinstance(order, PlacedOrder) else order for order in self._orders]
        return MixtureOrder(
            self.names, orders, self._points, self._seed, in_lanes=self._in_lanes, geometry=geometry, size=size
        )

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return the epochs of the sources, and the samples, of positions start .. stop - 1. int64 each"""
        sources, numbers = self._draw(start, stop)
        epochs, samples = np.empty_like(sources), np.empty_like(sources)
        for source in np.unique(sources).tolist():
            mask = sources == source
            epochs[mask], own = self._orders[source].of(numbers[mask])
            samples[mask] = own + self._starts[source]
        return epochs, samples

    def shares(self, start: int, stop: int) -> dict[str, float]:
        """Return each source's share of the positions start .. stop - 1, by name."""
        counts = np.zeros(len(self.names), dtype=np.int64)
        for first in range(start, stop, _SHARES_AT_ONCE):
            sources, _ = self._draw(first, min(first + _SHARES_AT_ONCE, stop))
            counts += np.bincount(sources, minlength=len(self.names))
        return {name: int(count) / max(1, stop - start) for name, count in zip(self.names, counts, strict=True)}

    def _draw(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return the source of each position, and the number of its sample in that source. int64 each"""
        positions = np.arange(start, stop, dtype=np.int64)
        if not self._in_lanes:
            return self._draw_from_lanes([(0, self._geometry.size, np.arange(len(positions)))], positions)
        lanes, micro_size = lanes_of(positions, self._geometry), self._geometry.micro_size
        by_lane = np.argsort(lanes.first, kind="stable")
        firsts, begins = np.unique(lanes.first[by_lane], return_index=True)
        members = [
            (first, min(micro_size, self._geometry.size - first), own)
            for first, own in zip(firsts.tolist(), np.split(by_lane, begins[1:]), strict=True)
        ]
        sources, drawn = self._draw_from_lanes(members, lanes.steps * lanes.width + lanes.within)
        steps, within = np.divmod(drawn, lanes.width)
        return sources, steps * self._geometry.size + lanes.first + within  # the same lane of the source's own order

    def _draw_from_lanes(self, lanes: list[tuple[int, int, Indices]], positions: Indices) -> tuple[Indices, Indices]:
        """Draw for positions in their lanes.

        Args:
            lanes: (number, positions in a step, places in `positions`) of each lane.
            positions: in their lanes, ascending in each.
        """
        group, blocks, keys = np.empty_like(positions), list[_Block](), list[int]()
        for lane, width, members in lanes:
            schedule, own, offset = self._schedule(width), positions[members], 0
            while offset < len(own):
                block = schedule.block(int(own[offset]))
                end = int(np.searchsorted(own, block.stop))
                group[members[offset:end]] = len(blocks)
                keys.append(derive(self._seed, "mixture", lane, block.start))
                blocks.append(block)
                offset = end
        if not blocks:
            return positions, positions
        starts = np.array([block.start for block in blocks])
        places = permute_groups(positions - starts[group], group, [block.stop - block.start for block in blocks], keys)
        counts, before = np.array([block.counts for block in blocks]), np.array([block.before for block in blocks])
        ends = np.cumsum(counts, axis=1)
        sources = (places[:, None] >= ends[group]).sum(1)
        return sources, before[group, sources] + places - (ends - counts)[group, sources]

    def _schedule(self, width: int) -> _Schedule:
        if width not in self._schedules:
            self._schedules[width] = _Schedule(self._points, width)
        return self._schedules[width]


_SHARES_AT_ONCE = 65_536  # positions
