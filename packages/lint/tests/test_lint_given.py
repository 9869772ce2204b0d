"""Values that a function is given: loaders in lists, iterators that are asked, classes to build of, tests."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""


def told(text, rule):
    """How often a rule is told in a script."""
    return len(check_text(HEAD + text, configure({}, rule, "")))


VITS = """
def run(rank, model, optimizer, data):
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    model = DDP(model.cuda(rank), device_ids=[rank])
    loader = DataLoader(data, batch_size=8, shuffle=True{more})
    held_out = DataLoader(data, batch_size=8)
    for epoch in range(3):
        {name}(model, optimizer, {given})

def {name}(model, optimizer, loaders):
    {taken} = loaders
    for x, y in loader:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "given", "taken", "more", "number"),
    [
        ("train", "[loader, held_out]", "loader, _", "", 1),
        ("train_and_evaluate", "[loader, None]", "loader, _", "", 1),
        ("train", "(held_out, loader)", "_, loader", "", 1),
        ("train", "[loader, held_out]", "loader, _", ", sampler=sampler(data)", 0),
        ("evaluate", "[loader, held_out]", "loader, _", "", 0),
        ("train", "pair(loader)", "loader, _", "", 0),
    ],
)
def test_loaders_that_are_handed_on_in_a_list(name, given, taken, more, number):
    text = VITS.format(name=name, given=given, taken=taken, more=more).replace("(data,", "(Images(data),")
    text += "\nclass Images:\n    def __init__(self, data):\n        self.data = data\n"
    found = check_text(HEAD + text, configure({}, "LS003", ""))
    assert [finding.message for finding in found if "every rank reads" in finding.message][number:] == []
    assert len([f for f in found if "every rank reads" in f.message]) == number


@pytest.mark.parametrize(
    ("first", "number"),
    [("[]", 1), ("make(rank)", 0), ("list(rank)", 0)],
)
def test_data_that_is_chosen_later(first, number):
    text = """
class Images:
    def __init__(self, path):
        self.path = path

def run(rank, model, optimizer, path):
    dist.init_process_group("nccl")
    model = DDP(model.cuda(rank), device_ids=[rank])
    data = FIRST
    if path:
        data = Images(path)
    loader = DataLoader(data, batch_size=8)
    for x in loader:
        loss = model(x)
        loss.backward()
        optimizer.step()
"""
    assert told(text.replace("FIRST", first), "LS003") == number


HELPED = """
from utils import NativeScaler

def train(model, loader, optimizer, rank, n):
    model = DDP(model.cuda(rank), device_ids=[rank])
    loss_scaler = NativeScaler()
    for i, x in enumerate(loader):
        loss = model(x) / n
        loss_scaler(loss, optimizer, parameters=model.parameters(){more})
        if (i + 1) % n == 0:
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("more", "number"),
    [
        (", update_grad=(i + 1) % n == 0", 1),
        (", need_update=(i + 1) % n == 0 or i + 1 == len(loader)", 1),
        (", update_grad=True", 0),
        ("", 0),
    ],
)
def test_scalers_that_are_told_when_to_step(more, number):
    assert told(HELPED.format(more=more), "LS009") == number


ASKED = """
def train(model, data, optimizer):
    loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=True)
    source = {make}
    model.cuda()
    for step in range(100):
        {ask}
        images, labels = batch
        loss = model(images.cuda()).sum()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("make", "ask", "number"),
    [
        ("iter(loader)", "batch = source.__next__()", 1),
        ("enumerate(loader)", "_, batch = source.__next__()", 1),
        ("enumerate(loader)", "_, batch = next(source)", 1),
        ("iter(loader)", "batch = next(source)", 1),
        ("iter(range(9))", "batch = source.__next__()", 0),
        ("enumerate(names)", "_, batch = source.__next__()", 0),
    ],
)
def test_batches_that_an_iterator_is_asked_for(make, ask, number):
    assert told(ASKED.format(make=make, ask=ask), "LS022") == number


BUILT = """
from torchvision import models

class Block(nn.Module):
    def __init__(self):
        self.bn = nn.BatchNorm2d(8)

class Plain(nn.Module):
    def __init__(self):
        self.conv = nn.Conv2d(3, 8, 1)

class MoCo(nn.Module):
    def __init__(self, base_encoder, width=1):
        super().__init__()
        self.query = {body}

def main(rank):
    model = MoCo({given}).cuda(rank)
    return DDP(model, device_ids=[rank])
"""


@pytest.mark.parametrize(
    ("body", "given", "number"),
    [
        ("base_encoder(width)", "Plain", 0),
        ("base_encoder(width)", "models.vit_b_16", 0),
        ("[base_encoder]", "Block", 0),
        ("base_encoder(width)", "Plain, Block", 0),
    ],
)
def test_models_that_are_built_of_a_class(body, given, number):
    assert told(BUILT.format(body=body, given=given), "LS005") == number


STEP = """
def train(model, loader, optimizer, scheduler, draw):
    model.cuda()
    for x, y in loader:
        x = x.cuda()
        loss = step(model, x)
        loss.backward()
        optimizer.step()

def step(model, x, optim=None):
    flow = model(x)
    size = {size}
    {test}
    return flow.mean()
"""


@pytest.mark.parametrize(
    ("size", "test", "number"),
    [
        ("1", "assert not torch.isnan(flow).any()", 1),
        ("1", "assert torch.isfinite(flow[0]).all() and True", 1),
        ("1", "assert flow.shape.any()", 0),
        ("(torch.rand(4) * 8).long().tolist()", "pass", 0),
        ("torch.randint(4, (2,)).tolist()", "pass", 0),
        ("torch.rand(4, device='cuda').tolist()", "pass", 1),
        ("(torch.rand(4).cuda() * 8).tolist()", "pass", 1),
        ("torch.rand(4).to(x.device).tolist()", "pass", 1),
        ("1", "crop = torch.rand(4) * 8; print(crop.tolist())", 0),
        ("1", "if optim == None: flow.sum().item()", 1),
        ("1", "if optim is not None: flow.sum().item()", 0),  # no call gives one
    ],
)
def test_what_a_step_reads(size, test, number):
    assert told(STEP.format(size=size, test=test), "LS036") == number


MICRO = """
def train(model, batches, optimizer, n):
    for step in range(100):
        {outer}
        for micro_step in range(n):
            {inner}
            loss = model(batches.next()) / n
            loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("outer", "inner", "number"),
    [
        ("optimizer.zero_grad()", "optimizer.zero_grad()", 1),
        ("pass", "optimizer.zero_grad()", 1),
        ("optimizer.zero_grad()", "pass", 0),
        ("pass", "if micro_step == 0: optimizer.zero_grad()", 0),
    ],
)
def test_gradients_that_are_cleared_in_every_micro_batch(outer, inner, number):
    assert told(MICRO.format(outer=outer, inner=inner), "LS021") == number
