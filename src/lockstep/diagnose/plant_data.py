"""Planted faults of data and randomness."""

from collections.abc import Iterator
from typing import Any, final

import numpy as np
from torch import nn

from lockstep.config import Config
from lockstep.data.batches import Batches, MicroBatch, seed_everything
from lockstep.data.order import Order, Shuffled
from lockstep.diagnose.fault import Fault, Seed, Site
from lockstep.diagnose.tasks import Around
from lockstep.errors import ConfigError
from lockstep.loop import seeder
from lockstep.seeds import derive

__all__ = ["DroppedOnResume", "OverlappingShards", "PaddedEvaluation", "RankSeed", "TiedDropout"]


@final
class RankSeed(Fault):
    name, stage = "per-rank-seed", "randomness"
    text = "each rank seeds its generators with the run's seed plus its rank"

    def seed(self, seed: Seed, site: Site) -> Seed:
        return seeder(site.config.seed + site.world.rank, "micro", site.world.device)


@final
class TiedDropout(Fault):
    name, stage = "rank-dropout", "randomness"
    text = "the model draws its dropout from a generator that is tied to the rank"

    def task(self, task: Any, site: Site) -> Any:
        return _Tied(task, derive(site.config.seed, "rank", site.world.rank))


class _Tied(Around):
    def __init__(self, inner: Any, key: int) -> None:
        super().__init__(inner)
        self._key = key

    def model(self) -> nn.Module:
        model: nn.Module = self.inner.model()
        model.register_forward_pre_hook(lambda module, _: seed_everything(self._key) if module.training else None)
        return model


@final
class OverlappingShards(Fault):
    name, stage = "overlapping-data", "data"
    text = "every rank reads the samples of rank 0"

    def task(self, task: Any, site: Site) -> Any:
        config, world = site.config, site.world
        each = -(-config.micro_batches // world.size) * config.micro_batch_size
        return _Ordered(task, lambda samples: np.roll(samples, world.rank * each), ahead=0)


@final
class DroppedOnResume(Fault):
    name, stage, moment = "dropped-sample", "data", "resume"
    text = "a resume begins one sample too late"

    def task(self, task: Any, site: Site) -> Any:
        return _Ordered(task, lambda samples: samples, ahead=int(site.resumed))

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not resume:
            raise ConfigError(f"--plant {self.name} needs a resume: leave --resume-at out")


class _Ordered(Around):
    """A task whose stream of samples is another on this rank."""

    def __init__(self, inner: Any, change: Any, ahead: int) -> None:
        super().__init__(inner)
        self._change, self._ahead = change, ahead

    def order(self, samples: int, seed: int) -> Order:
        inner: Order = getattr(self.inner, "order", Shuffled)(samples, seed)
        return _Changed(inner, self._change, self._ahead)


class _Changed:
    def __init__(self, inner: Order, change: Any, ahead: int) -> None:
        self._inner, self._change, self._ahead = inner, change, ahead

    def at(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, samples = self._inner.at(start + self._ahead, stop + self._ahead)
        return epochs, self._change(samples)


@final
class PaddedEvaluation(Fault):
    name, stage, moment = "padded-evaluation", "evaluation", "end"
    text = "the evaluation set is padded with duplicates, which count"

    def evaluation(self, batches: Batches, site: Site) -> Any:
        return _Padded(batches, site)


class _Padded:
    """Every rank computes one micro-batch more, a repeat; it counts on the last rank."""

    def __init__(self, inner: Batches, site: Site) -> None:
        self._inner, self._counts = inner, float(site.is_victim)
        self.cut, self.world_size = inner.cut, inner.world_size

    def micro(self, start: int) -> Iterator[tuple[int, MicroBatch]]:
        step, micro = start, None
        for found in self._inner.micro(start):
            step, batch = found
            micro = batch if batch.weight or micro is None else micro
            yield found
        if micro is not None:
            yield step, MicroBatch(micro.data, micro.index, micro.items, self._counts)
