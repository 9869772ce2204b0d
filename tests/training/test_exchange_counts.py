"""How many exchanges a start, a resume and an end of a run make: at a thousand ranks each costs milliseconds."""

import threading

import pytest
import torch
from ranks import run
from small_runs import config

import lockstep
from lockstep.distributed.world import World
from lockstep.training import trainer
from lockstep.training.step.components import StepComponents

MOST = {"start": 12, "resume": 16, "end": 2}


class Line(lockstep.Task):
    """A task with everything that a trial tries."""

    def model(self):
        return torch.nn.Linear(1, 1, dtype=torch.float64)

    def dataset(self, split):
        values = torch.linspace(-1, 1, 24 if split == "train" else 8, dtype=torch.float64)[:, None]
        return torch.utils.data.TensorDataset(values, 2 * values)

    def count(self, batch):
        return len(batch[0])

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()

    def metrics(self, model, batch):
        return {"error": ((model(batch[0]) - batch[1]).abs().sum(), len(batch[0]))}


def gathers(world, folder, **changes):
    """The exchanges of this rank until the first step, and from the last one on."""
    counts = {"start": 0, "steps": 0, "end": 0}
    part, real, iterate, finish = ["start"], World._gather, StepComponents.iterate, trainer._finish

    def count(self, value):
        if part[0] == "start" or threading.current_thread() is threading.main_thread():  # else a save's thread
            counts[part[0]] += 1
        return real(self, value)

    def begin(*args):
        part[0] = "steps"
        return iterate(*args)

    def end(*args):
        part[0] = "end"
        return finish(*args)

    World._gather, StepComponents.iterate, trainer._finish = count, begin, end
    try:
        lockstep.train(config(folder, **changes), Line(), world)
    finally:
        World._gather, StepComponents.iterate, trainer._finish = real, iterate, finish
    return counts


def run_and_resume(world, folder, engine):
    first = gathers(world, folder, engine=engine, max_steps=3)
    return first, gathers(world, folder, engine=engine, extend_to=6, max_steps=6)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_start_makes_at_most_twelve_gathers(tmp_path, engine):
    for new, resumed in run(run_and_resume, 2, tmp_path, engine):
        assert new["start"] <= MOST["start"]
        # One more proves the loss again where parameters are sharded: no rank can tell alone.
        assert resumed["start"] <= MOST["resume"] + (engine == "fsdp")
        assert max(new["end"], resumed["end"]) <= MOST["end"]
