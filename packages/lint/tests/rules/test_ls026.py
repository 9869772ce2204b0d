"""LS026: metrics over uneven shards."""

import pytest
from rule_findings import count_in

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


HEAD_2 = """
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def main(model, train_data, test_data, rank):
    dist.init_process_group("nccl")
    train_loader, test_loader = make(train_data), make(test_data)
    for epoch in range(3):
        score = compute(model, test_loader)
        if rank == 0:
            print(score)
    dist.destroy_process_group()
"""


MAKE = """
def make(data):
    return DataLoader(data, batch_size=8, num_workers=2, sampler={sampler})
"""


SUM = """
def compute(model, loader):
    right, count = 0, 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum()
        count += len(x)
    {end}
    return right / count
"""


SHARD = MAKE.format(sampler="DistributedSampler(data)")


def found(text):
    return [finding.rule for finding in check_text(HEAD_2 + text, configure({}, "LS026", ""))]


ENDS = {
    "nothing": ("pass", True),
    "only waits": ("torch.cuda.synchronize()", True),
    "picks from a tensor": ("right = torch.gather(right, 0, count)", True),
    "picks with a method": ("right = right.gather(0, count)", True),
    "sums over the ranks": ("dist.all_reduce(right)", False),
    "a helper that is not here": ("right = reduce_values(right)", False),
    "a method that is not here": ("right = model.sync_scores(right)", False),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_happens_to_the_sums(name):
    end, told = ENDS[name]
    assert found(SHARD + SUM.format(end=end)) == ["LS026"] * told


def test_the_held_out_part_must_be_the_sharded_one():
    whole = HEAD_2.replace("make(test_data)", "DataLoader(test_data, num_workers=2)")
    assert check_text(whole + SHARD + SUM.format(end="pass"), configure({}, "LS026", "")) == []


MEANS = {
    "gathered and averaged": ("dist.all_gather(parts, score)\n    score = torch.stack(parts).mean()", True),
    "gathered objects": ("dist.all_gather_object(parts, score)\n    score = sum(parts) / len(parts)", True),
    "numpy": ("dist.all_gather_object(parts, score)\n    score = np.mean(parts)", True),
    "averaged by the reduction": ("dist.all_reduce(score, op=dist.ReduceOp.AVG)", True),
    "gathered samples": ("dist.all_gather(parts, score)\n    score = torch.cat(parts).mean()", False),
    "sums over counts": ("dist.all_gather(parts, score)\n    score = sum(parts) / len(test_data)", False),
    "another list": ("dist.all_gather(parts, score)\n    score = np.mean(others)", False),
    "a maximum": ("dist.all_reduce(score, op=dist.ReduceOp.MAX)", False),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_of_means(name):
    lines, told = MEANS[name]
    text = f"""
def evaluate(score, test_data, others):
    test_sampler = DistributedSampler(test_data)
    parts = [None] * dist.get_world_size()
    {lines}
    return score
"""
    assert found(text) == ["LS026"] * told


GROUP = "import os\nimport torch\nimport torch.distributed as dist\nimport logging\n"


MAIN = "\ndef main(rank):\n    dist.init_process_group('nccl')\n"


RUN = "\nif __name__ == '__main__':\n    main(int(os.environ['RANK']))\n"


LOADER = "from torch.utils.data import DataLoader, DistributedSampler\n"


VALIDATE = """
def validate(model, val_loader):
    losses = [model(x) for x in val_loader]
    val_loss = torch.stack(losses).mean()
    return {call}

def make(val_data):
    return DataLoader(val_data, sampler=DistributedSampler(val_data, shuffle=False), num_workers=2)
"""


@pytest.mark.parametrize(
    ("steps", "number"),
    [
        ("    every = torch.stack(parts, dim=0)\n    return every.mean(0)", 1),
        ("    return torch.stack(parts).mean()", 1),
        ("    every = torch.stack(parts)\n    mean = every.mean()\n    return mean", 1),
        ("    concat = torch.stack(parts, dim=0)\n    return concat.mean(0)", 1),
        ("    chain = torch.stack(parts)\n    return torch.mean(chain)", 1),
        ("    return torch.cat(parts).mean()", 0),
        ("    return np.concatenate(parts).mean()", 0),
        ("    every = torch.stack(parts)\n    return every.sum(0)", 0),
        ("    every = torch.cat(parts)\n    return every", 0),
        ("    every = torch.stack(parts)\n    return every.max()", 0),
    ],
)
def test_a_mean_that_another_function_makes_of_what_it_gathered(tmp_path, steps, number):
    helper = (
        "def over_ranks(value):\n    parts = [value.clone() for _ in range(dist.get_world_size())]\n"
        f"    dist.all_gather(parts, value)\n{steps}\n"
    )
    run = GROUP + LOADER + VALIDATE.format(call="over_ranks(val_loss)") + helper + MAIN + RUN
    assert count_in(tmp_path, "LS026", run=run) == number
