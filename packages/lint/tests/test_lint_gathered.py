"""LS026: means of what a function of the project gathers; samplers for held-out data that a flag or an arm makes."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import pickle
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def all_gather(value):
    {gather}
    return parts

def make_sampler(dataset, shuffle, split):
    {sampler}

def make(dataset, is_train):
    if is_train:
        shuffle = True
    else:
        shuffle = {held}
    return DataLoader(dataset, batch_size=8, sampler=make_sampler(dataset, shuffle, "all"))

@torch.no_grad()
def validate(model, loader):
    total = 0
    for x in loader:
        total += model(x).item()
    val_loss = all_gather(total / len(loader))
    {after}
    return val_loss
"""
OBJECTS = "parts = [None] * dist.get_world_size(); dist.all_gather_object(parts, value)"
PICKLED = """data = torch.cat((pickle.dumps(value), torch.zeros(9)))
    dist.all_gather([data], data)
    parts = [pickle.loads(each) for each in data]"""
JOINED = "parts = []; dist.all_gather(parts, value); parts = torch.cat(parts)"
ARMS = """if split == "train":
        return DistributedSampler(dataset)
    return None if split is None else DistributedSampler(dataset, shuffle={})"""
USUAL = {
    "gather": OBJECTS,
    "sampler": "return DistributedSampler(dataset, shuffle=shuffle)",
    "held": "False",
    "after": "val_loss = sum(val_loss) / len(val_loss)",
}


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 1),
        ({"gather": PICKLED}, 1),
        ({"gather": JOINED}, 0),
        ({"gather": "parts = [value]"}, 0),
        ({"after": "val_loss = sum(val_loss)"}, 0),
        ({"after": "val_loss = sum(val_loss) / 9"}, 0),
        # which samplers divide held-out data
        ({"held": "True"}, 0),
        ({"sampler": 'return DistributedSampler(dataset, shuffle=split == "train")', "held": "True"}, 1),
        ({"sampler": 'return DistributedSampler(dataset, shuffle=split == "all")', "held": "True"}, 0),
        ({"sampler": ARMS.format("False"), "held": "True"}, 1),
        ({"sampler": ARMS.format("True"), "held": "True"}, 0),
    ],
)
def test_the_mean_of_what_is_gathered(change, number):
    assert len(check_text(SCRIPT.format(**(USUAL | change)), configure({}, "LS026", ""))) == number
