"""LS004: set_epoch missing."""

import pytest
from rule_findings import count

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

STEP = "            loss = model(x.to('cuda')).sum()\n            optimizer.zero_grad()\n            loss.backward()\n"
STEP += "            optimizer.step()\n"


TWICE = """
from torch.utils.data import DataLoader, DistributedSampler

def main(model, optimizer, train_set, val_set, keep):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, sampler=sampler)
    {between}
    {other}
    for epoch in range(9):
        {call}
        for x in loader:
"""


@pytest.mark.parametrize(
    ("between", "other", "call", "number"),
    [
        ("pass", "sampler = DistributedSampler(val_set, shuffle=False)", "sampler.set_epoch(epoch)", 1),
        ("pass", "val_sampler = DistributedSampler(val_set, shuffle=False)", "sampler.set_epoch(epoch)", 0),
        ("pass", "sampler = DistributedSampler(val_set, shuffle=False)", "loader.sampler.set_epoch(epoch)", 0),
        ("keep.append(sampler)", "sampler = DistributedSampler(val_set)", "sampler.set_epoch(epoch)", 0),
        ("first = sampler", "sampler = DistributedSampler(val_set)", "first.set_epoch(epoch)", 0),
        ("for x in loader: model(x)", "sampler = DistributedSampler(val_set)", "sampler.set_epoch(epoch)", 1),
        ("print(len(loader))", "sampler = DistributedSampler(val_set)", "sampler.set_epoch(epoch)", 1),
        ("pass", "sampler = DistributedSampler(val_set) if keep else None", "sampler.set_epoch(epoch)", 1),
        (
            "pass",
            "if keep:\n        sampler = DistributedSampler(train_set, shuffle=True)",
            "sampler.set_epoch(epoch)",
            0,
        ),
    ],
)
def test_a_sampler_whose_name_is_another_ones(between, other, call, number):
    text = TWICE.format(between=between, other=other, call=call) + STEP
    assert len(check_text(text, configure({}, "LS004", ""))) == number


APART = (
    """
from torch.utils.data import DataLoader, DistributedSampler

def fit(model, optimizer, loader{param}):
    {first}
    for epoch in range(9):
        {call}
        for x in loader:
"""
    + STEP
    + """
def main(model, optimizer, train_set, val_set):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, sampler=sampler)
    sampler = DistributedSampler(val_set, shuffle=False)
    fit(model, optimizer, loader{given})
"""
)


EACH = "for each_sampler in [loader.sampler]: each_sampler.set_epoch(epoch)"


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"param": ", sampler", "given": ", sampler"}, 1),
        ({"param": ", sampler", "given": ", loader.sampler"}, 0),
        ({"param": ", sampler=None", "first": "sampler = sampler or loader.sampler"}, 0),
        ({"first": "sampler = loader.sampler"}, 0),
        ({"first": "sampler = getattr(loader, 'sampler', None)"}, 0),
        ({"call": EACH}, 0),
    ],
)
def test_a_sampler_that_is_taken_from_its_loader(change, number):
    usual = {"param": "", "given": "", "first": "pass", "call": "sampler.set_epoch(epoch)"}
    assert len(check_text(APART.format(**usual | change), configure({}, "LS004", ""))) == number


@pytest.mark.parametrize(("call", "number"), [("pass", 1), ("sampler.set_epoch(epoch)", 0), ("begin(sampler)", 0)])
def test_a_method_of_that_name_that_nothing_calls(call, number):
    own = "class Even(DistributedSampler):\n    def set_epoch(self, epoch):\n        super().set_epoch(epoch)\n\n"
    own += "def begin(sampler):\n    getattr(sampler, 'set_epoch')(1)\n" if "begin" in call else ""
    text = TWICE.format(between="pass", other="pass", call=call) + STEP
    assert len(check_text(text.replace("def main", own + "def main"), configure({}, "LS004", ""))) == number


@pytest.mark.parametrize(("split", "number"), [("'first'", 1), ("'val'", 0), ("mode='test'", 0)])
def test_a_helper_that_is_told_for_which_part_it_makes_a_sampler(tmp_path, split, number):
    helper = "from torch.utils.data import DistributedSampler\n\ndef make_sampler(data, mode):\n"
    (tmp_path / "data.py").write_text(f"{helper}    return DistributedSampler(data)\n")
    text = TWICE.format(between="pass", other="sampler = DistributedSampler(keep)", call="sampler.set_epoch(epoch)")
    text = text.replace("sampler = DistributedSampler(train_set)", f"sampler = make_sampler(train_set, {split})")
    (tmp_path / "run.py").write_text(f"from data import make_sampler\n{text}{STEP}")
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS004", ""))) == number


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
        ("epoch", "self.epoch", "pass", 0),
        ("self.epoch", "self.epoch", "self.epoch = e + 1", 0),
        ("self.epoch", "self.epoch", "self.epoch += 1", 0),
        ("self.epoch", "0", "pass", 0),
    ],
)
def test_the_epoch_that_the_loop_starts(given, start, last, number):
    assert count(EPOCHS.format(given=given, start=start, last=last), "LS004") == number
