"""Early stopping by a score that each rank has of its own shard (LS037), and what looks like it."""

import pytest

from lockstep_lint.config import Config, configure, default_codes
from lockstep_lint.runner import check_text

PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Stopper:
    def __init__(self):
        self.best, self.bad, self.stop = float("inf"), 0, False

    def __call__(self, score):
        self.bad = 0 if score < self.best else self.bad + 1
        self.best = min(score, self.best)
        self.stop = self.bad > 5


@torch.no_grad()
def evaluate(model, loader, criterion, device):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += criterion(model(x.to(device)), y.to(device)).item() * len(x)
        count += len(x)
    model.train()
    return total / count


def main(model, train_data, val_data, optimizer, criterion, device, limit):
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, batch_size=8, num_workers=2, sampler=sampler)
    val_loader = DataLoader(val_data, batch_size=8, num_workers=2, SAMPLER)
    model = DDP(model.to(device), device_ids=[device])
    best, bad, stopper = float("inf"), 0, Stopper()
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        score = evaluate(model, val_loader, criterion, device)
DECISION
"""
SHARD = "sampler=DistributedSampler(val_data, shuffle=False)"
COUNTER = """        bad = 0 if score < best else bad + 1
        best = min(best, score)
        if bad > 5:
            break"""
OBJECT = """        stopper(score)
        if stopper.stop:
            break"""


def findings(decision, sampler=SHARD):
    text = PROGRAM.replace("DECISION", decision).replace("SAMPLER", sampler)
    return [f for f in check_text(text, Config(default_codes(), frozenset())) if f.rule == "LS037"]


@pytest.mark.parametrize("decision", [COUNTER, OBJECT], ids=["counter", "object"])
def test_a_stop_by_the_own_shards_score_is_found(decision):
    (finding,) = findings(decision)
    assert "its own shard" in finding.message


@pytest.mark.parametrize(
    ("decision", "sampler"),
    [
        (COUNTER, "shuffle=False"),  # every rank evaluates everything
        (f"        score = torch.tensor(score)\n        dist.all_reduce(score)\n{COUNTER}", SHARD),
        ("        if epoch == limit:\n            break", SHARD),
        (f"        score = gather_mean(score)\n{COUNTER}", SHARD),
    ],
    ids=["whole set", "reduced", "by the epoch", "gathered elsewhere"],
)
def test_a_stop_that_all_ranks_take_alike_is_not(decision, sampler):
    assert findings(decision, sampler) == []


@pytest.mark.parametrize(("bar", "count"), [("tqdm(loader)", 0), ("tqdm(iterable=loader)", 0), ("shorter()", 1)])
def test_a_bar_around_the_loader_on_one_rank_changes_no_count(bar, count):
    text = f"""
import torch.distributed as dist
from tqdm import tqdm

def total(loader, value, shorter):
    if dist.get_rank() == 0:
        loader = {bar}
    for batch in loader:
        dist.all_reduce(value)
"""
    found = [f for f in check_text(text, Config(default_codes(), frozenset())) if f.rule == "LS037"]
    assert len(found) == count


# What they send says nothing of a score, and what converts layers sends nothing.
ELSE = ["broadcast_parameters", "broadcast_optimizer_state", "convert_syncbn_model", "sync_batchnorm", "SyncBatchNorm"]


@pytest.mark.parametrize(("name", "number"), [*((name, 1) for name in ELSE), ("broadcast_score", 0), ("sync_up", 0)])
def test_a_call_beside_the_decision_that_tells_nothing_of_it(name, number):
    assert len(findings(f"        other.{name}(model)\n{COUNTER}")) == number
    text = PROGRAM.replace("DECISION", COUNTER).replace("SAMPLER", SHARD)
    hidden = text.replace("import torch\n", f"import torch\nfrom mine import {name}\n", 1)
    hidden = hidden.replace("    best, bad,", f"    {name}(model)\n    best, bad,", 1)
    assert [f.rule for f in check_text(hidden, configure({}, "LS037", ""))] == ["LS037"] * number
    lone = "        stop = False\n        if dist.get_rank() == 0:\n            stop = score > 1\n"
    assert len(findings(f"{lone}            other.{name}(1)\n        if stop:\n            break")) == number


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("accelerator.wait_for_everyone()", 1),
        ("print(x)", 0),
        ("if accelerator.is_main_process: accelerator.wait_for_everyone()", 0),
    ],
)
def test_a_loop_in_which_accelerates_processes_wait(line, number):
    text = "import torch\nfrom accelerate import Accelerator\n\ndef main(items):\n    accelerator = Accelerator()\n"
    text += f"    for x in items:\n        {line}\n        if accelerator.is_main_process and x:\n            break\n"
    assert len(check_text(text, configure({}, "LS037", ""))) == number
