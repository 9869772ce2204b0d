"""Mix datasets by weights, which may change with the step.

    data = lockstep.mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
    data = lockstep.mixture({"web": web, "code": code}, [(0, {"web": 1.0}), (10_000, {"web": 0.5, "code": 0.5})])

`mixture_schedule.py` assigns each position of the run to a source; the i-th sample of a source is that of the source's
own order. So the source and the sample at any position are found at once, on any number of ranks. Streams are mixed by
`stream_mixture.py`.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import xxhash

from lockstep.data.loader import check_dataset, collate_draws, draws
from lockstep.data.mixture_schedule import UNIT, Draws, Schedule
from lockstep.data.rows import rows_of
from lockstep.data.sampler import Indices, Shuffled
from lockstep.data.shard_order import ONE_LANE, Geometry, PlacedOrder, ShardOrder, lanes_of
from lockstep.data.stream_adapters import is_stream, source_of
from lockstep.data.stream_types import StreamMixture
from lockstep.errors import ConfigError
from lockstep.seeds import derive

__all__ = ["Mixture", "MixtureOrder", "mixture"]

Weights = Mapping[str, float]
Points = Sequence[tuple[int, Weights]]


def mixture(sources: Mapping[str, Any], weights: Weights | Points | None = None) -> "Mixture | StreamMixture":
    """Mix datasets: each step has about the weights' shares of samples from each source.

    A source that is used up begins again, in a new order. An epoch of the mixture is as many samples as all sources
    have together, from any of them; streams have no epoch.

    Args:
        sources: map-style datasets by name, or streams.
        weights: by name, in any unit; one that is left out is 0. Or points of a curriculum, (step, weights) in
            ascending order, with straight lines between them; the first and the last hold before and after. None: the
            sizes of the sources.

    Raises:
        ConfigError: a name or a weight is invalid, or streams are mixed with other datasets.
        DataError: a source is neither map-style nor a stream.
    """
    if not sources:
        raise ConfigError("lockstep.mixture: no sources; give a dict of datasets by name")
    streams = []
    for name, dataset in sources.items():
        if is_stream(dataset):
            streams.append(name)
    for name, dataset in sources.items():
        if isinstance(dataset, Mixture | StreamMixture):
            raise ConfigError(f"lockstep.mixture: the source '{name}' is a mixture; give its sources instead")
        if name in streams:
            source_of(dataset)
            continue
        check_dataset(dataset, f"train (source {name})")
        if streams:
            raise ConfigError(
                f"lockstep.mixture: the source '{streams[0]}' is a stream, and '{name}' has an index; mix either kind "
                "alone: open the former with lockstep.shards, or iterate over the latter in an object with `parts` and "
                "`iter(part, start)`"
            )
        if not len(dataset):
            raise ConfigError(f"lockstep.mixture: the source '{name}' is empty; leave it out")
    points = _points(sources, weights, bool(streams))
    if streams:
        return StreamMixture(dict(sources), points)
    return Mixture(dict(sources), points)


def _points(
    sources: Mapping[str, Any], weights: Weights | Points | None, are_streams: bool
) -> list[tuple[int, list[int]]]:
    """Return the points of a curriculum, with shares in millionths.

    Raises:
        ConfigError: they are invalid, or missing for streams.
    """
    if weights is None and are_streams:
        raise ConfigError("lockstep.mixture: no weights, and streams have no sizes; give weights by name")
    if weights is None:
        weights = {name: len(dataset) for name, dataset in sources.items()}
    if isinstance(weights, Mapping):
        points = [(0, weights)]
    else:
        points = list(weights)
    steps = [step for step, _ in points]
    if not points or steps != sorted(set(steps)) or steps[0] < 0:
        raise ConfigError(f"lockstep.mixture: weights at the steps {steps}; give points of ascending steps, from 0 on")
    millionths = []
    for step, weights_at_step in points:
        millionths.append((step, _millionths(list(sources), weights_at_step, step)))
    return millionths


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
    exact = [weights.get(name, 0.0) / total * UNIT for name in names]
    shares = [math.floor(value) for value in exact]
    # The sources with the largest remainders get the missing millionths.
    by_rest = sorted(range(len(names)), key=lambda place: shares[place] - exact[place])
    for place in by_rest[: UNIT - sum(shares)]:
        shares[place] += 1
    small = []
    for name, share in zip(names, shares, strict=True):
        if not share and weights.get(name):
            small.append(name)
    if small:
        raise ConfigError(f"{start} give '{small[0]}' less than a millionth; give 0 or more than that")
    return shares


@final
class Mixture:
    """Several datasets, one after the other, and the weights by which an order mixes them.

    Attributes:
        sources: the datasets by name.
        points: (step, shares in millionths) of a curriculum; one point: constant.
        draws_random: whether a sample must be seeded.
        collation_draws: whether the collation must be.
    """

    def __init__(self, sources: dict[str, Any], points: list[tuple[int, list[int]]]) -> None:
        self.sources = sources
        self.points = points
        self._datasets = list(sources.values())
        self._starts = np.cumsum([0, *(len(dataset) for dataset in self._datasets)])
        self._rows = [rows_of(dataset) for dataset in self._datasets]
        self.draws_random = any(map(draws, self._datasets))
        self.collation_draws = any(map(collate_draws, self._datasets))

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
            positions = np.flatnonzero(which == source).tolist()
            dataset = self._datasets[source]
            local_indices = []
            for position in positions:
                local_indices.append(indices[position] - int(self._starts[source]))
            known = self._rows[source]
            get_items = getattr(dataset, "__getitems__", None)
            loaded = known.samples(local_indices) if known else None
            if loaded is None:
                loaded = get_items(local_indices) if get_items else [dataset[index] for index in local_indices]
            for position, sample in zip(positions, loaded, strict=True):
                samples[position] = sample
        return samples

    @property
    def fingerprint(self) -> str:
        """Hex; of the weights and the sources, for a resume."""
        entries = []
        for name, dataset in self.sources.items():
            entries.append((name, len(dataset), getattr(dataset, "fingerprint", "")))
        return xxhash.xxh3_64_hexdigest(repr((entries, self.points)).encode())

    @property
    def fetches(self) -> int:
        """Shards that this rank has fetched so far, of all sources."""
        return sum(int(getattr(dataset, "fetches", 0)) for dataset in self._datasets)

    def make_order(self, seed: int, shuffle_shards: int) -> "MixtureOrder":
        """Make the order that mixes the sources.

        Args:
            seed: the run's.
            shuffle_shards: for a source with shards, their number in a group; 0: shuffle all its samples.
        """
        orders: list[Shuffled | ShardOrder] = []
        for number, dataset in enumerate(self._datasets):
            key = derive(seed, "source", number)
            sizes = getattr(dataset, "shard_sizes", None) if shuffle_shards else None
            orders.append(Shuffled(len(dataset), key) if sizes is None else ShardOrder(sizes, key, shuffle_shards))
        return MixtureOrder(list(self.sources), orders, self.points, seed, in_lanes=bool(shuffle_shards))


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
        self.names = names
        self.size = size or sum(sizes)
        self._orders = orders
        self._points = points
        self._seed = seed
        self._in_lanes = in_lanes
        self._starts = np.cumsum([0, *sizes])
        self._geometry = geometry
        self._schedules: dict[int, Schedule] = {}
        self._draws = Draws(seed)

    def placed(self, geometry: Geometry, size: int) -> "MixtureOrder":
        """Return the order for steps of this geometry, with epochs of `size` samples.

        0: those of all sources.
        """
        orders = []
        for order in self._orders:
            if isinstance(order, PlacedOrder):
                orders.append(order.placed(geometry, 0))
            else:
                orders.append(order)
        return MixtureOrder(
            self.names, orders, self._points, self._seed, in_lanes=self._in_lanes, geometry=geometry, size=size
        )

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return the sources' epochs, and the samples, at positions start .. stop - 1.

        Two int64 arrays.
        """
        sources, numbers = self._draw(start, stop)
        epochs = np.empty_like(sources)
        samples = np.empty_like(sources)
        for source in np.unique(sources).tolist():
            mask = sources == source
            epochs[mask], source_samples = self._orders[source].of(numbers[mask])
            samples[mask] = source_samples + self._starts[source]
        return epochs, samples

    def shares(self, start: int, stop: int) -> dict[str, float]:
        """Return each source's share of the positions start .. stop - 1, by name."""
        counts = np.zeros(len(self.names), dtype=np.int64)
        for first_position in range(start, stop, _SHARES_AT_ONCE):
            sources, _ = self._draw(first_position, min(first_position + _SHARES_AT_ONCE, stop))
            counts += np.bincount(sources, minlength=len(self.names))
        fractions = {}
        for name, count in zip(self.names, counts, strict=True):
            fractions[name] = int(count) / max(1, stop - start)
        return fractions

    def _draw(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return the source of each position, and its sample's number in that source.

        Two int64 arrays.
        """
        positions = np.arange(start, stop, dtype=np.int64)
        if not self._in_lanes:
            return self._draws.at(0, self._schedule(self._geometry.size), positions)
        lanes = lanes_of(positions, self._geometry)
        micro_size = self._geometry.micro_size
        within = lanes.steps * lanes.width + lanes.within
        sources = np.empty_like(positions)
        drawn = np.empty_like(positions)
        # One call for each lane, since each lane has its own blocks.
        by_lane = np.argsort(lanes.first, kind="stable")
        firsts, begins = np.unique(lanes.first[by_lane], return_index=True)
        for lane_start, in_lane in zip(firsts.tolist(), np.split(by_lane, begins[1:]), strict=True):
            schedule = self._schedule(min(micro_size, self._geometry.size - lane_start))
            sources[in_lane], drawn[in_lane] = self._draws.at(lane_start, schedule, within[in_lane])
        steps, offsets = np.divmod(drawn, lanes.width)
        # Read the same lane of the source's own order.
        return sources, steps * self._geometry.size + lanes.first + offsets

    def _schedule(self, width: int) -> Schedule:
        if width not in self._schedules:
            self._schedules[width] = Schedule([(step * width, shares) for step, shares in self._points])
        return self._schedules[width]


# Positions that are looked up at a time, to bound the memory.
_SHARES_AT_ONCE = 65_536
