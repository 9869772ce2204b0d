"""Metrics that call the model a different number of times on each rank: the same numbers under every engine."""

import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn

import lockstep
from lockstep.engines.fsdp.forwards import equal_forwards

WIDTH = 4


class Searching(lockstep.Task):
    """`steps` of a batch's metric: forwards until the output is small, which depends on the samples."""

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()

    def dataset(self, split):
        x = torch.linspace(0.01, 4.0, 16, dtype=torch.float64)[:, None] * torch.ones(WIDTH, dtype=torch.float64)
        return torch.utils.data.TensorDataset(x)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def metrics(self, model, batch):
        forwards, norms = 0.0, 0.0
        for x in batch[0]:
            while x.norm() > 0.5:
                x = x - 0.7 * x / x.norm() + 0.0 * model(x[None])[0]
                forwards, norms = forwards + 1, norms + float(model(x[None]).norm())
        return {"forwards": (forwards, len(batch[0])), "norms": (norms, len(batch[0]))}


def evaluated(world, folder, engine, task):
    changes = {"experiment_name": engine, "engine": engine, "max_steps": 2, "eval_freq": 1, "eval_micro_batch_size": 2}
    result = lockstep.train(config(folder, **changes, timeout=20.0), task, world)
    return result.evaluation.metrics


def test_the_numbers_are_those_of_one_process(tmp_path):
    wanted = evaluated(lockstep.World(), tmp_path, "single", Searching())
    assert wanted["forwards"] > 1
    for found in run(evaluated, 2, tmp_path, "fsdp", Searching()):
        assert found == pytest.approx(wanted, rel=1e-9)


def ends(world, error):
    """Return the class of what ends each rank, where rank 1 fails before its first forward."""
    model = nn.Linear(WIDTH, WIDTH)
    model.unshard = None  # counts as sharded
    try:
        with equal_forwards(model, world):
            if world.rank == 1:
                raise error
            model(torch.ones(WIDTH))
    except BaseException as caught:
        return type(caught).__name__
    return ""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_rank_failing_before_its_first_forward_keeps_its_error(error):
    assert run(ends, 2, error) == ["PeerError", error.__name__]
