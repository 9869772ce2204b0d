"""Runs one after the other in a process, whose default groups are others."""

import importlib
import sys
import warnings

import torch
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


def test_torchs_collectives_with_gradients_use_the_group_of_the_present_run(tmp_path):
    wanted = [[1.0, 1.0], 2.0, 2.0, [2.0, 2.0], 4.0, 2.0]
    assert run(two_runs, 2, tmp_path) == [wanted * 2] * 2
