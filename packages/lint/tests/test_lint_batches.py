"""LS022: batches that were moved, replaced or chosen from before a move, and where loaders are said to pin."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

PIN_MEMORY = {constant}

def to_device(batch, device):
    return {{k: v.to(device, non_blocking=True) for k, v in batch.items()}}

def step(model, batch, device):
    return model(batch["x"].to(device)).sum()

def train(trainer, model, data, optimizer, device, rank):
    loader = DataLoader({data}, num_workers=2, pin_memory={pin})
    bar = enumerate(loader)
    if rank == 0:
        bar = tqdm(bar)
    for i, batch in {over}:
        {first}
        optimizer.zero_grad()
        loss = {loss}
        loss.backward()
        optimizer.step()
"""
USUAL = {
    "constant": "False",
    "data": "data",
    "pin": "True",
    "over": "enumerate(loader)",
    "first": "pass",
    "loss": "step(model, batch, device)",
}
MOVED = {"loss": "model(batch.to(device)).sum()"}


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 1),
        ({"first": "batch = to_device(batch, device)"}, 0),
        ({"first": "if rank == 0: batch = sorted(batch)"}, 1),
        (MOVED, 1),
        (MOVED | {"first": "batch = batch[batch[:, 0] > 0]"}, 0),  # a copy that is not pinned
        (MOVED | {"first": "batch = batch[:, 0]"}, 1),
        (MOVED | {"first": "batch = batch.cuda(non_blocking=True)"}, 0),  # is there already
        # a bar of its own on the first rank
        ({"over": "bar"}, 1),
        # begun anew in each step, a part of what that gives
        ({"loss": "0", "first": "one = next(enumerate(loader))[1]\n        one = one.to(device)"}, 1),
        ({"loss": "0", "first": "one = next(iter(loader))\n        one = one.to(device)"}, 1),
        ({"loss": "0", "first": "one = next(iter(data))\n        one = one.to(device)"}, 0),
        # where it is said
        ({"pin": "PIN_MEMORY"}, 0),
        ({"pin": "PIN_MEMORY", "constant": "str(os.getenv('PIN_MEMORY', False)).lower() == 'true'"}, 0),
        ({"pin": "PIN_MEMORY", "constant": "options.get('pin', True) == 'true'"}, 0),
        ({"pin": "trainer.args.dataloader_pin_memory", "constant": "dict(dataloader_pin_memory=False)"}, 0),
    ],
)
def test_moves(change, number):
    assert len(check_text(SCRIPT.format(**(USUAL | change)), configure({}, "LS022", ""))) == number


LOADED = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def train(model, x, y, optimizer):
    model.cuda()
    {first}
    for a, b in DataLoader({data}, batch_size=8):
        model(a, b).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("first", "data", "number"),
    [
        ("pass", "TensorDataset(x, y)", 1),
        ("x = x.cuda()", "TensorDataset(x, y)", 0),  # its workers could not hand that out
        ("data = TensorDataset(x.to('cuda'), y.to('cuda'))", "data", 0),
        ("data = TensorDataset(x.to('cpu'), y)", "data", 1),
        ("x = x.cuda()", "build(x, y)", 1),  # may bring them back
    ],
)
def test_data_that_is_on_the_device(first, data, number):
    told = check_text(LOADED.format(first=first, data=data), configure({}, "LS022", ""))
    assert len([finding for finding in told if "num_workers" in finding.message]) == number
