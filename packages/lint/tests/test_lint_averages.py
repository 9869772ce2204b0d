"""LS064: means over the wrong count, results of the last batch; LS026: a rank's result, followed to its report."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

class Config:
    limit = 3

def validate(model, data, sampler, crit):
    loader = DataLoader(data, batch_size={size}, sampler=sampler)
    criterion = torch.nn.CrossEntropyLoss({options})
    model.eval()
    total, seen, right = 0.0, 0, 0
    losses = []
    with torch.no_grad():
        for step, (x, y) in enumerate(loader):
            out = model(x)
            loss = {loss}
            guess = out.argmax(1)
            {also}
            total += {add}
            right += (guess == y).sum().item()
            seen += {count}
    {then}
"""
USUAL = {
    "size": "64", "options": "", "loss": "criterion(out, y)", "also": "pass", "add": "loss.item()", "count": "len(y)",
    "then": "return total / len(loader)",
}  # fmt: skip
SAMPLES, BATCHES, INDEX, LAST = "number of samples, not", "count of matches", "last index", "last batch"


def told(script, changes, rule="LS064"):
    found = [each.message for each in check_text(script.format(**USUAL | changes), configure({}, rule, ""))]
    assert len(found) < 2
    return found[0] if found else ""


@pytest.mark.parametrize(
    "then",
    [
        "return total / len(loader.dataset)", "return total / len(data)", "total /= len(data)\n    return total",
        "print(f'loss {total / seen:.3f}')", "n = len(data)\n    return total / n", "return total / max(seen, 1)",
        "return total / float(len(sampler))",
    ],
)  # fmt: skip
def test_means_over_samples(then):
    assert SAMPLES in told(SCRIPT, {"then": then})
    assert told(SCRIPT, {"then": then, "add": "loss.item() * x.size(0)"}) == ""


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, True),
        ({"options": "reduction='mean'"}, True),
        ({"loss": "F.cross_entropy(out, y)"}, True),
        ({"loss": "(out - y).pow(2).mean()"}, True),
        ({"add": "loss.sum().item()"}, True),
        ({"count": "y.size(0)"}, True),
        ({"count": "x.shape[0]"}, True),
        ({"loss": "criterion(out, y) + F.mse_loss(out, x)"}, True),
        ({"options": "reduction='sum'"}, False),
        ({"options": "size_average=False"}, False),
        ({"loss": "F.cross_entropy(out, y, reduction='sum')"}, False),
        ({"loss": "crit(out, y)"}, False),
        ({"loss": "(out - y).pow(2).sum()"}, False),
        ({"also": "loss = loss * len(y)"}, False),
        ({"also": "loss *= len(y)"}, False),
        ({"count": "1"}, False),
        ({"size": "1"}, False),
        ({"size": "None"}, False),
        ({"then": "return total / seen * Config.batch_size"}, False),
    ],
)
def test_what_is_a_mean_of_a_batch(changes, wrong):
    assert (SAMPLES in told(SCRIPT, {"then": "return total / seen", **changes})) is wrong


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"then": "return right / len(loader)"}, BATCHES),
        ({"then": "return right / len(data)"}, ""),
        ({"then": "return right / seen"}, ""),
        ({"then": "return right / seen", "count": "1"}, BATCHES),
        ({"then": "return total / step"}, INDEX),
        ({"then": "return total / (step + 1)"}, ""),
        ({"then": "return total / step", "also": "if step == 3: break"}, ""),
        ({"then": "return total / step", "also": "if x is None: continue"}, ""),
        ({"then": "print(loss.item())", "add": "0"}, LAST),
        ({"then": "print(loss.item())"}, ""),
        ({"then": "return loss", "loss": "crit(out, y)", "add": "0"}, LAST),
        ({"then": "return loss, total", "also": "losses.append(loss)"}, ""),
        ({"then": "return (guess == y).float().mean()"}, ""),
        ({"then": "print(loss.item())", "add": "0", "also": "break"}, ""),
        ({"then": "print(loss.item())", "add": "0", "size": "len(data)"}, ""),
        ({"then": "return out"}, ""),
    ],
)
def test_other_counts(changes, expected):
    found = told(SCRIPT, changes)
    assert expected in found
    assert bool(found) is bool(expected)


OUTSIDE = """
import torch

def evaluate(model, loader):
    right, seen = 0, 0
    for x, y in loader:
        guess = model(x).argmax(1)
{indent}    right += (guess == y).sum().item()
{indent}    seen += len(y)
    return right / seen
"""


@pytest.mark.parametrize(("indent", "expected"), [("", LAST), ("    ", "")])
def test_a_score_that_fell_out_of_its_loop(indent, expected):
    found = told(OUTSIDE, {"indent": indent})
    assert expected in found
    assert bool(found) is bool(expected)


METERS = """
from collections import defaultdict, deque
import torch

class Smooth:
    def __init__(self, window=20):
        self.recent = deque(maxlen=window)
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.recent.append(value)
        self.total += value
        self.count += 1

    @property
    def avg(self):
        return torch.tensor(list(self.recent)).mean().item()

    @property
    def global_avg(self):
        return self.total / self.count

class Log:
    def __init__(self):
        self.meters = defaultdict(Smooth)

    def update(self, **values):
        for key, value in values.items():
            self.meters[key].update(value)

def evaluate(model, loader):
    log = Log()
    for x, y in loader:
        log.update(acc=(model(x) == y).float().mean().item())
        print(log.meters["acc"].avg)
    return log.meters["acc"].{name}
"""


@pytest.mark.parametrize(("name", "wrong"), [("avg", True), ("global_avg", False)])
def test_the_mean_of_a_window(name, wrong):
    assert ("last values" in told(METERS, {"name": name})) is wrong


RANKS = """
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

def evaluate(model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in loader:
            {each}
            losses.append(model(x, y))
    {within}
    return torch.stack(losses).mean(), len(losses)

def show(value, epoch):
    text = f"{{value}}"
    print(epoch, text)

def main(model, held_out, scheduler):
    accelerator = Accelerator()
    loader = {loader}
    best = 1e9
    for epoch in range(9):
        loss, count = evaluate(model, loader)
        {then}
"""
PREPARED = {
    "each": "pass", "within": "pass", "loader": "accelerator.prepare(DataLoader(held_out))",
    "then": "accelerator.log({'loss': loss})",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, True),
        ({"loader": "accelerator.prepare(held_out.loader())"}, True),
        ({"loader": "accelerator.prepare_data_loader(held_out)"}, True),
        ({"then": "best = min(best, loss) if loss < best else best"}, True),
        ({"then": "scheduler.step(loss)"}, True),
        ({"then": "row = {}\n        row['loss'] = loss.item()\n        accelerator.log(row)"}, True),
        ({"then": "show(loss, epoch)"}, True),
        ({"then": "print(count)"}, False),
        ({"then": "print(f'rank {accelerator.process_index}: {loss}')"}, False),
        ({"then": "loss = accelerator.gather(loss).mean()\n        accelerator.log({'loss': loss})"}, False),
        ({"then": "if accelerator.is_main_process:\n            pass"}, False),
        ({"within": "losses = [accelerator.reduce(each) for each in losses]"}, False),
        ({"each": "x = accelerator.gather_for_metrics(x)"}, False),
        ({"loader": "DataLoader(held_out)"}, False),
        ({"loader": "held_out.loader()"}, False),
    ],
)
def test_a_ranks_result_is_followed(changes, wrong):
    found = check_text(RANKS.format(**PREPARED | changes), configure({}, "LS026", ""))
    assert bool(found) is wrong
