"""Names that hold another word by chance (`example` an `amp`, `parameters` a `meter`) say nothing of it."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

STEP = """
import torch
import torch.nn.functional as F

def train(model, loader, optimizer, args, example):
    model.cuda()
    train_loss, best = 0.0, 9.0
    for x, y in loader:
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {last}
"""

RANKED = """
import torch
import torch.distributed as dist

def main(args, config):
    dist.init_process_group("nccl")
    {last}
    dist.destroy_process_group()

main(None, None)
"""

SHARD = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def evaluate(model, loader):
    device = next(model.{parameters}()).device
    right, count = 0, 0
    for x, y in loader:
        right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        count += len(x)
    return right / count

def main(model, test_data):
    dist.init_process_group("nccl")
    loader = DataLoader(test_data, 8, num_workers=2, sampler=DistributedSampler(test_data))
    print(evaluate(model, loader))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        # tests that are the same in every step, and those that are not
        ("LS036", STEP.format(last="if args.amp: print(loss.item())"), True),
        ("LS036", STEP.format(last="if example in y: print(loss.item())"), False),
        ("LS036", STEP.format(last="if train_loss < best: print(loss.item())"), False),
        ("LS036", STEP.format(last="if args.criterion == 1: print(loss.item())"), True),
        ("LS036", STEP.format(last="if args.iteration == 1: print(loss.item())"), False),
        # the rank, and what only sounds like it
        ("LS028", RANKED.format(last="if args.gpu == 0: print('x')"), False),
        ("LS028", RANKED.format(last="if args.n_gpu > 0: print('x')"), True),
        ("LS028", RANKED.format(last="if config.lora_rank > 0: print('x')"), True),
        ("LS028", RANKED.format(last="if config.node_rank == 0: print('x')"), False),
        ("LS028", RANKED.format(last="if config.device == 0: print('x')"), False),
        ("LS028", RANKED.format(last="if config.device == 'cuda': print('x')"), True),
        # what may bring the ranks' values together
        ("LS026", SHARD.format(parameters="parameters"), True),
        ("LS026", SHARD.format(parameters="meters"), False),
    ],
)
def test_a_word_within_another(code, text, told):
    assert bool(check_text(text, configure({}, code, ""))) is told


TARGETS = """
import torch
import torch.nn.functional as F
from torch import nn
from losses import Own

def train(model, loader, optimizer):
    model.cuda()
    criterion = {criterion}
    for inputs, targets in loader:
        inputs = inputs.cuda()
        loss = {loss}
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("criterion", "loss", "told"),
    [
        ("nn.CrossEntropyLoss()", "criterion(model(inputs), targets)", True),
        ("None", "F.cross_entropy(model(inputs), targets)", True),
        ("nn.CTCLoss()", "criterion(model(inputs), targets, 3, 4)", False),  # its targets may be on the CPU
        ("None", "F.ctc_loss(model(inputs), targets, 3, 4)", False),
        ("Own()", "criterion(model(inputs), targets)", False),  # may move them
        ("nn.CrossEntropyLoss()", "criterion(model(inputs), targets.cuda())", False),
    ],
)
def test_whose_targets_must_be_on_the_device(criterion, loss, told):
    assert bool(check_text(TARGETS.format(criterion=criterion, loss=loss), configure({}, "LS006", ""))) is told
