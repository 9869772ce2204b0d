"""Weigh a loss that is written as a function, as the trial before step 1 does."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import lockstep
from lockstep.config.schema import Config
from lockstep.data.batches import MicroBatch
from lockstep.distributed.world import World
from lockstep.training.trial.evidence import HalvedSamples, weigh
from lockstep.training.trial.trial import Trial


class Written(lockstep.Task):
    """A task of a module and functions."""

    def __init__(self, module, loss, count=None):
        self.module, self.function, self.counting = module, loss, count

    def model(self):
        return self.module

    def dataset(self, split):
        return []

    def loss(self, model, batch):
        return self.function(model, batch)

    def count(self, batch):
        return float(self.counting(batch)) if self.counting else super().count(batch)


@dataclass
class Restoring:
    """Undoes what a loss leaves in an object, as the trial of a run does."""

    target: Any

    @contextlib.contextmanager
    def __call__(self):
        before = dict(vars(self.target))
        yield
        vars(self.target).update(before)


def trial_of(task, world=None, restoring: Callable[[], Any] | None = None, name="single", **config):
    world, model = world or World(), task.model()
    engine = lockstep.engine(name, model, lambda model: torch.optim.SGD(model.parameters(), 0.1), world)
    trial = Trial(engine, model, task, world, Config(engine=name, **config), print)
    if restoring:
        preserve = trial.preserve

        @contextlib.contextmanager
        def both():
            with preserve(), restoring():
                yield

        trial.preserve = both
    return trial


def halved(task, batch, samples):
    """A place of a collated batch and its halves by rows."""
    half = samples // 2

    def micro(start, stop):
        part = pytree.tree_map(lambda t: t[start * len(t) // samples : stop * len(t) // samples], batch)
        return MicroBatch(part, 0, task.count(part), 1.0)

    return HalvedSamples(micro(0, samples), (micro(0, half), micro(half, samples)), (half, samples - half))


def verdict_of(task, make, samples, places=(3, 4, 5), **options):
    """Weigh at some places.

    Args:
        make: (samples, seed) -> a batch.
    """
    return weigh(trial_of(task, **options), [halved(task, make(samples, place), samples) for place in places])
