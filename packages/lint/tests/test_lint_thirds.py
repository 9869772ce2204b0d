"""Mistakes of the third held-out set: apex's scale_loss, start epochs, fixed numbers of ranks, keys of wrappers."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def count_findings(text, rule):
    """Count the findings of a rule in a script."""
    return len(check_text(text, configure({}, rule, "")))


APEX = """
import torch
from apex import amp

def step(model, optimizer, loss):
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        {inner}
    {after}
    optimizer.step()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)"


@pytest.mark.parametrize(("inner", "after", "number"), [(CLIP, "pass", 1), ("pass", CLIP, 0)])
def test_a_clip_before_apex_has_unscaled(inner, after, number):
    assert count_findings(APEX.format(inner=inner, after=after), "LS011") == number


EPOCHS = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

class Trainer:
    def __init__(self, model, data, optimizer):
        self.epoch = 0
        self.model, self.optimizer = model, optimizer
        self.loader = DataLoader(data, sampler=DistributedSampler(data))

    def resume(self, state):
        self.epoch = state["epoch"] + 1

    def run(self, epoch):
        self.loader.sampler.set_epoch({given})
        for x, y in self.loader:
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    def train(self, epochs):
        for e in range({start}, epochs):
            self.run(e)
            {last}
"""


@pytest.mark.parametrize(
    ("given", "start", "last", "number"),
    [
        ("self.epoch", "self.epoch", "pass", 1),
        ("epoch", "self.epoch", "pass", 0),
        ("self.epoch", "self.epoch", "self.epoch = e + 1", 0),
        ("self.epoch", "self.epoch", "self.epoch += 1", 0),
        ("self.epoch", "0", "pass", 0),
    ],
)
def test_the_epoch_that_the_loop_starts_with(given, start, last, number):
    assert count_findings(EPOCHS.format(given=given, start=start, last=last), "LS004") == number


DIVIDED = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def load(data, rank, count):
    return DataLoader(data, sampler=DistributedSampler(data, num_replicas={number}, rank={rank}))

dist.init_process_group("nccl")
{after}
"""


@pytest.mark.parametrize(
    ("number", "rank", "after", "found"),
    [
        ("2", "rank", "", 1),
        ("4", "dist.get_rank()", "", 1),
        ("count", "rank", "", 0),
        ("1", "rank", "", 0),
        ("2", "0", "", 0),
        ("2", "rank", "world_size = 2", 0),
        ("2", "rank", "WORLD_SIZE = 2", 0),
        ("2", "rank", "mp.spawn(main, nprocs=2)", 0),
    ],
)
def test_a_number_of_ranks_that_is_written_out(number, rank, after, found):
    assert count_findings(DIVIDED.format(number=number, rank=rank, after=after), "LS003") == found


PARTS = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from mine import Cached, divide

def main(local_rank, model, optimizer, criterion, config):
    dist.init_process_group("nccl")
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    files = {files}
    loader = DataLoader(Cached(data=files), batch_size=32, shuffle=True)
    for epoch in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("files", "number"), [("config.files", 1), ("divide(config.files, dist.get_world_size())[dist.get_rank()]", 0)]
)
def test_a_data_set_of_the_rank_s_own_files(files, number):
    assert count_findings(PARTS.format(files=files), "LS003") == number


ACCELERATED = """
from accelerate import Accelerator

def train(model, optimizer, loader):
    accelerator = Accelerator({given})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, batch in enumerate(loader):
        {with_}
            loss = model(batch)
            accelerator.backward(loss)
            {test}
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("given", "with_", "test", "number"),
    [
        ("gradient_accumulation_steps=2", "if True:", "if True:", 0),  # a test: left alone
        ("gradient_accumulation_steps=2", "with accelerator.accumulate(model):", "if True:", 0),
        ("gradient_accumulation_steps=2", "if True:", "if (i + 1) % 2 == 0:", 0),
        ("gradient_accumulation_steps=2", "with accelerator.autocast():", "with clock():", 1),
        ("gradient_accumulation_steps=1", "with accelerator.autocast():", "with clock():", 0),
        ("", "with accelerator.autocast():", "with clock():", 0),
    ],
)
def test_an_accelerator_that_divides_what_nothing_accumulates(given, with_, test, number):
    text = ACCELERATED.format(given=given, with_=with_, test=test)
    assert sum("accelerator.accumulate()" in f.message for f in check_text(text, configure({}, "LS012", ""))) == number


RESUMED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(rank, net, optimizer, loader, path):
    dist.init_process_group("nccl")
    net = DDP(net.to(rank), device_ids=[rank])
    if path:
        state = torch.load(path, map_location="cpu", weights_only=True)
        {load}
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    if rank == 0:
        torch.save({{"model": {save}, "step": 1}}, "last.pt")
"""
LOAD, BARE = 'net.load_state_dict(state["model"])', "net.module.state_dict()"


@pytest.mark.parametrize(
    ("load", "save", "number"),
    [
        (LOAD, BARE, 1),
        (LOAD, f"{BARE} if distributed else net.state_dict()", 1),
        ('net.module.load_state_dict(state["model"])', BARE, 0),
        ('net.load_state_dict(state["model"], strict=False)', BARE, 0),
        ('net.load_state_dict(state["other"])', BARE, 0),
        (LOAD, "net.state_dict()", 0),
    ],
)
def test_a_bare_state_that_is_loaded_into_the_wrapper(load, save, number):
    found = check_text(RESUMED.format(load=load, save=save), configure({}, "LS014", ""))
    assert sum("its DDP wrapper" in each.message for each in found) == number


LOCAL = """
import os
import torch.distributed as dist

def main(args):
    {address}
    dist.init_process_group("nccl", rank=args.local_rank{more})
"""


@pytest.mark.parametrize(
    ("address", "more", "number"),
    [
        ("pass", "", 1),
        ('os.environ["MASTER_ADDR"] = "localhost"', "", 0),
        ('os.environ["MASTER_ADDR"] = "node1"', "", 1),
        ('if "MASTER_ADDR" not in os.environ: os.environ["MASTER_ADDR"] = "localhost"', "", 1),
        ("pass", ', init_method="tcp://127.0.0.1:23456"', 0),
        ("pass", ', init_method="env://"', 1),
    ],
)
def test_ranks_that_meet_on_one_machine(address, more, number):
    assert count_findings(LOCAL.format(address=address, more=more), "LS044") == number


NAMED = """
import torch.distributed as dist

def main(rank, losses, verbose):
    dist.init_process_group("nccl")
    if rank == 0:
        speed = 1.0
    if {test}:
        print(speed)
"""


@pytest.mark.parametrize(("test", "number"), [("verbose", 0), ("losses", 1)])
def test_a_name_that_is_read_where_the_program_talks(test, number):
    assert count_findings(NAMED.format(test=test), "LS045") == number


THAWED = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(rank, model, optimizer, loader):
    dist.init_process_group("nccl")
    for name, weight in model.named_parameters():
        if "head" not in name:
            weight.requires_grad = {frozen}
    ddp = DDP(model.to(rank), device_ids=[rank])
    for step, (x, y) in enumerate(loader):
        if step == 1000:
            for weight in {model}.parameters():
                weight.requires_grad = True
            {again}
        optimizer.zero_grad()
        ddp(x, y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("frozen", "model", "again", "number"),
    [
        ("False", "model", "pass", 1),
        ("True", "model", "pass", 0),
        ("False", "teacher", "pass", 0),
        ("False", "model", "ddp = DDP(model, device_ids=[rank])", 0),
    ],
)
def test_parameters_that_are_unfrozen_under_the_wrapper(frozen, model, again, number):
    assert count_findings(THAWED.format(frozen=frozen, model=model, again=again), "LS031") == number
