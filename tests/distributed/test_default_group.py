"""Runs one after the other in a process, whose default groups are others."""

import importlib
import sys
import time
import warnings

import torch
import torch.distributed as dist
from ranks import run
from small_runs import config
from toys import Ragged

import lockstep


def two_runs(world, folder):
    world.leave()
    nn, found = None, []
    for name in ("one", "two"):
        for step in lockstep.Run(config(folder, experiment_name=name, max_steps=2), Ragged()):
            if not nn:  # it is imported while there is a group, as in a loss
                sys.modules.pop("torch.distributed.nn.functional", None)
                nn = importlib.import_module("torch.distributed.nn.functional")
            mine = torch.full((), float(step.global_step), requires_grad=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # they are deprecated, and everywhere
                every = torch.stack(nn.all_gather(mine))
                every.sum().backward()
                whole = nn.all_reduce(mine.detach())
            found += [every.tolist(), whole.tolist(), mine.grad.tolist()]
    return found


def test_torchs_collectives_with_gradients_use_the_runs_group(tmp_path):
    wanted = [[1.0, 1.0], 2.0, 2.0, [2.0, 2.0], 4.0, 2.0]
    assert run(two_runs, 2, tmp_path) == [wanted * 2] * 2


def one_leaves(world, folder):
    sys.modules.pop("torch.distributed.nn.functional", None)
    importlib.import_module("torch.distributed.nn.functional")
    noticed = folder / "noticed"
    if world.rank == 1:
        world.drop_groups([])
        until = time.monotonic() + 20
        while not noticed.exists() and time.monotonic() < until:
            time.sleep(0.01)
    else:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            noticed.touch()
            world.drop_groups([])
    return noticed.exists()


def test_rank_leaving_its_groups_is_noticed_despite_torchs_refs(tmp_path):
    assert run(one_leaves, 2, tmp_path) == [True, True]
