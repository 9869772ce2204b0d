"""LS026 and its kin where data is divided by hand, behind a progress bar, or scored in another function."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, SubsetRandomSampler
"""


def told(text, code):
    return [finding.rule for finding in check_text(HEAD + text, configure({}, code, ""))]


BY_HAND = """
@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right, count = torch.zeros(()), 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum()
        count += len(x)
    return right / count

def main(rank, world_size, data, model):
    {part}
    score = evaluate(model, make(val_part, 8))
    {exchange}
    if rank == 0:
        print(score)
"""
MEAN = "dist.all_reduce(score, op=dist.ReduceOp.AVG)"


@pytest.mark.parametrize(
    ("part", "exchange", "found"),
    [
        ("val_part = data.val.split(len(data) // world_size)[rank]", MEAN, True),
        ("val_part = torch.arange(100).chunk(world_size)[rank]", MEAN, True),
        ("val_part = data.val[rank::world_size]", MEAN, True),
        ("val_part = Subset(data, range(rank, len(data), world_size))", MEAN, True),
        ("val_part = data.shard(num_shards=world_size, index=rank)", MEAN, True),
        ("val_part = split_dataset_by_node(data, rank, world_size)", MEAN, True),
        ("val_part = data.val[rank::world_size]", "dist.all_reduce(score); score /= dist.get_world_size()", True),
        ("val_part = dgl.distributed.node_split(data.val_mask, book)", MEAN, True),
        ("val_part = node_split(data.val_mask, book)", MEAN, False),
        ("val_part = data.val", MEAN, False),  # every rank evaluates the whole: the mean is the score
        ("val_part = data.val.split(8)[0]", MEAN, False),
        ("val_part = data.val[1::2]", MEAN, False),
        ("train_part, val_part = data.train[rank::world_size], data.val", MEAN, False),
        ("val_part = data.val[rank::world_size]", "dist.all_reduce(score)", False),
    ],
)
def test_held_out_data_that_is_divided_by_hand(part, exchange, found):
    assert told(BY_HAND.format(part=part, exchange=exchange), "LS026") == ["LS026"] * found


ALONE = """
@torch.no_grad()
def validate(model, val_loader, rank):
    total, count = 0.0, 0
    for x, y in val_loader:
        total += model(x).sum()
        count += len(x)
    {end}

def say(rank, text):
    if rank == 0:
        print(text)

def note(text):
    return text.upper()

def main(rank, world_size, data, model):
    val_loader = DataLoader({given}, batch_size=8, num_workers=2)
    validate(model, val_loader, rank)
"""
SHARE = "Subset(data, range(rank, len(data), world_size))"


@pytest.mark.parametrize(
    ("given", "end", "found"),
    [
        (SHARE, "return total / count", True),
        (SHARE, "say(rank, total / count)", True),
        (SHARE, "print(total / count)", True),
        ("data, sampler=SubsetRandomSampler(torch.arange(rank, len(data), world_size))", "return total", True),
        ("data, sampler=DistributedSampler(data)", "say(rank, total / count)", True),
        (SHARE, "note(total)", False),  # nobody is told
        (SHARE, "dist.all_reduce(total); return total", False),
        ("Subset(data, range(0, len(data), 2))", "return total / count", False),
        ("data", "say(rank, total / count)", False),
    ],
)
def test_a_score_of_one_part_that_is_told_for_the_whole(given, end, found):
    assert told(ALONE.format(given=given, end=end), "LS026") == ["LS026"] * found


BARS = """
def main(rank, model, data, world_size):
    train_loader = DataLoader(data, batch_size=8, num_workers=2, sampler=DistributedSampler(data))
    val_loader = DataLoader(data, batch_size=8, num_workers=2, sampler=DistributedSampler(data, shuffle=False))
    for epoch in range(3):
        bar = {train}
        for x in bar:
            loss = model(x).mean()
            loss.backward()
            {step}
        with torch.no_grad():
            bar = {val}
            for x in bar:
                loss = model(x).mean()
                {reduce}
"""
USUAL = {"train": "tqdm(train_loader)", "val": "tqdm(val_loader)", "step": "pass"}
AVERAGE = "dist.all_reduce(loss, op=dist.ReduceOp.AVG)"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"reduce": AVERAGE}, True),
        ({"reduce": AVERAGE, "val": "tqdm(val_loader, disable=rank != 0)"}, True),
        ({"reduce": AVERAGE, "val": "tqdm(iterable=val_loader, desc='x')"}, True),
        ({"reduce": AVERAGE, "val": "enumerate(tqdm(val_loader))"}, True),
        ({"reduce": "dist.all_reduce(loss)"}, False),
        ({"reduce": "pass", "step": AVERAGE}, False),  # the loss of a step of training
        ({"reduce": AVERAGE, "val": "tqdm(train_loader)"}, False),
    ],
)
def test_a_progress_bar_shows_what_it_runs_over(change, found):
    assert told(BARS.format(**(USUAL | change)), "LS026") == ["LS026"] * found


NORMS = """
from torch.nn import BatchNorm1d as Norm, LayerNorm as Calm
from torch.nn import BatchNorm2d

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = {body}

def main(local_rank):
    model = Net().to(local_rank)
    if local_rank >= 0:
        {wrap}
    return model
"""
WRAP = "model = DDP(model, device_ids=[local_rank])"


@pytest.mark.parametrize(
    ("body", "wrap", "found"),
    [
        ("Norm(4)", WRAP, True),
        ("nn.Sequential(nn.Linear(4, 4), Norm(4))", WRAP, True),
        ("BatchNorm2d(4)", "model = DDP(\n            model,\n            device_ids=[local_rank],\n        )", True),
        ("Calm(4)", WRAP, False),
        ("nn.GroupNorm(2, 4)", WRAP, False),
        ("Norm(4)", "model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model))", False),
    ],
)
def test_batch_norm_by_another_name(body, wrap, found):
    assert told(NORMS.format(body=body, wrap=wrap), "LS005") == ["LS005"] * found


AVERAGED = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def average(model):
    for p in model.parameters():
        dist.all_reduce({summed})

def main(model, loader, optimizer, rank):
    dist.init_process_group("gloo")
    {wrap}
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        average(model)
        optimizer.step()
    {save}
    dist.destroy_process_group()

if __name__ == "__main__":
    main(make(), [], None, 0)
"""
WRITE = "torch.save(model.state_dict(), 'model.pt')"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"summed": "p.grad"}, True),
        ({"save": f"if loader.best: {WRITE}"}, True),
        ({"save": f"if rank == 0: {WRITE}"}, False),
        ({"save": "torch.save(model.state_dict(), f'model{rank}.pt')"}, False),
        ({"summed": "p.norm()"}, False),  # nothing says that every rank has the same model
        ({"wrap": "model = FSDP(model)", "save": WRITE}, False),
    ],
)
def test_ranks_that_average_by_hand_and_write_one_file(change, found):
    usual = {"summed": "p.grad.data", "wrap": "pass", "save": WRITE}
    assert told(AVERAGED.format(**(usual | change)), "LS014") == ["LS014"] * found
