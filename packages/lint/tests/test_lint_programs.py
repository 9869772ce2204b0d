"""Rules in files of several programs, models that train themselves, and means over equal shards."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

DATA = """
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10

def make_loader():
    return DataLoader(CIFAR10("data"), batch_size=8)
{own}
"""
PLAIN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from data import make_loader

def main(model, optimizer):
    dist.init_process_group("nccl")
    model = DDP(model)
    for x, y in make_loader():
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()

main(None, None)
"""
LIGHTNING = """
import lightning
from data import make_loader

lightning.Trainer().fit(None, make_loader())
"""
ALONE = "if __name__ == '__main__':\n    print(len(make_loader()))"


@pytest.mark.parametrize(
    ("programs", "own", "told"),
    [
        ([PLAIN], "", True),
        ([PLAIN, LIGHTNING], "", True),
        ([PLAIN, LIGHTNING], ALONE, True),
        ([PLAIN + LIGHTNING], "", False),
        ([LIGHTNING], "", False),
    ],
)
def test_a_loader_of_several_programs(tmp_path, programs, own, told):
    (tmp_path / "data.py").write_text(DATA.format(own=own))
    for number, program in enumerate(programs):
        (tmp_path / f"train{number}.py").write_text(program)
    found = check_paths([str(tmp_path / "data.py")], configure({}, "LS003", ""))
    assert [finding.line for finding in found] == [6] * told


TWO = """
import torch
from torch import nn

class Judge(nn.Module):
    def update(self, loader, optimizer):
        {first}
        for x in loader:
            optimizer.zero_grad()
            self(x).mean().backward()
            optimizer.step()

    def reward(self, x):
        with torch.no_grad():
            self.eval()
            return self(x)

def main(policy, loader, optimizer):
    judge = Judge()
    for epoch in range(10):
        judge.update(loader, optimizer)
        rewards = judge.reward(torch.ones(3))
        for x in loader:
            optimizer.zero_grad()
            policy(x, rewards).mean().backward()
            optimizer.step()

main(None, [], None)
"""


@pytest.mark.parametrize(("first", "told"), [("self.train()", False), ("pass", True)])
def test_a_model_that_its_own_training_puts_back(first, told):
    assert bool(check_text(TWO.format(first=first), configure({}, "LS017", ""))) is told


EQUAL = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def make(val_data{flag}):
    sampler = DistributedSampler(val_data, shuffle=False)
    return DataLoader(val_data, sampler=sampler, drop_last={drop})

def validate(model, val_data):
    total = 0
    for x, y in make(val_data{given}):
        total += model(x, y)
    dist.all_reduce(total)
    return total / dist.get_world_size()
"""


@pytest.mark.parametrize(
    ("flag", "drop", "given", "told"),
    [
        ("", "True", "", False),
        ("", "False", "", True),
        (", drop=True", "drop", "", False),
        (", drop=True", "drop", ", False", True),
        (", drop=True", "drop", ", chosen", True),
    ],
)
def test_means_over_shards_of_equal_batches(flag, drop, given, told):
    text = EQUAL.format(flag=flag, drop=drop, given=given)
    assert bool(check_text(text, configure({}, "LS026", ""))) is told
