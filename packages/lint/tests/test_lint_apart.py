"""What ranks do apart: turns that some skip, trackers without a run, options that torchrun leaves at their default."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def lines(text, code):
    """The lines of a script at which a rule tells something."""
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


LOOP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, optimizer, rank, show, ends):
    dist.init_process_group("nccl")
    model = DDP(model.to(rank), device_ids=[rank])
    for step, batch in enumerate(loader):
        {before}
        model(batch).sum().backward()
        optimizer.step()
        if {test}:
            show(step)
            {skip}
        {after}
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("test", "skip", "after", "number"),
    [
        ("step % 9 == 0 and rank == 0", "continue", "if ends(step): break", 1),
        ("(step % 9 == 0) & (rank == 0)", "continue", "if ends(step): break", 1),
        ("step % 9 == 0 and rank == 0", "continue", "dist.barrier()", 1),
        ("step % 9 == 0 and rank == 0", "continue", "show(step)", 0),
        ("step % 9 == 0 and rank == 0", "pass", "if ends(step): break", 0),
        ("step % 9 == 0", "continue", "if ends(step): break", 0),
    ],
)
def test_a_turn_that_one_rank_skips(test, skip, after, number):
    assert len(lines(LOOP.format(before="pass", test=test, skip=skip, after=after), "LS037")) == number


def test_a_step_that_one_rank_skips():
    text = LOOP.format(before="if step % 9 == 0 and rank == 0: continue", test="step", skip="pass", after="pass")
    assert lines(text, "LS037") == [9]


TRACKED = """
import torch.distributed as dist
import wandb

def main(losses, args):
    dist.init_process_group("nccl")
    if {begin}:
        wandb.init(project="net")
    for loss in losses:
        loss.backward()
        {log}
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("begin", "log", "number"),
    [
        ("dist.get_rank() == 0", "wandb.log({'a': 1})", 1),
        ("dist.get_rank() == 0 and args.track", "if args.track: wandb.log({'a': 1})", 1),
        ("dist.get_rank() == 0", "if wandb.run is not None: wandb.log({'a': 1})", 0),
        ("dist.get_rank() == 0", "if dist.get_rank() == 0: wandb.log({'a': 1})", 0),
        ("dist.get_rank() == 0", "wandb.finish()", 0),
        ("dist.get_rank() == 0", "if args.wandb: wandb.log({'a': 1})", 0),
        ("args.track", "wandb.log({'a': 1})", 0),
    ],
)
def test_a_tracker_without_a_run(begin, log, number):
    assert len(lines(TRACKED.format(begin=begin, log=log), "LS045")) == number


GROUPED = """
import os
import torch.distributed as dist

def main(args, train):
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if args.distributed:
        dist.init_process_group("nccl")
    {other}
    {asked}
    train(args)
    if args.distributed:
        dist.destroy_process_group()
"""
ALONE = "else:\n        print('one process')"


@pytest.mark.parametrize(
    ("other", "asked", "number"),
    [
        (ALONE, "args.rank = dist.get_rank()", 1),
        (ALONE, "if dist.get_rank() == 0: print(args)", 1),
        (ALONE, "args.rank = dist.get_rank() if args.distributed else 0", 0),
        (ALONE, "if args.distributed and dist.get_rank() == 0: print(args)", 0),
        (ALONE, "if args.distributed: dist.barrier()", 0),
        ("pass", "args.rank = dist.get_rank()", 0),
        ("else:\n        raise SystemExit", "args.rank = dist.get_rank()", 0),
        ("else:\n        args.start()", "args.rank = dist.get_rank()", 0),
    ],
)
def test_a_question_to_a_group_that_may_not_be_there(other, asked, number):
    assert len(lines(GROUPED.format(other=other, asked=asked), "LS024")) == number


LAUNCHED = '''
"""torchrun --nproc_per_node 4 train.py"""
import argparse
import os
import torch
import torch.distributed as dist

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default={default})
    args = parser.parse_args()
    {read}
    dist.init_process_group("nccl")
    torch.cuda.set_device(args.local_rank)
    dist.destroy_process_group()
'''


@pytest.mark.parametrize(
    ("default", "read", "number"),
    [("0", "pass", 1), ("0", "args.local_rank = int(os.environ['LOCAL_RANK'])", 0), ("None", "pass", 0)],
)
def test_an_option_that_torchrun_leaves_at_its_default(default, read, number):
    assert len(lines(LAUNCHED.format(default=default, read=read), "LS007")) == number
    old = LAUNCHED.replace("torchrun", "python -m torch.distributed.launch")
    assert lines(old.format(default=default, read=read), "LS007") == []


SPAWNED = """
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

class Solver:
    def __init__(self, model, loader):
        self.model, self.loader, self.stop = model, loader, False

    def train(self, rank, optimizer):
        net = DDP(self.model.to(rank), device_ids=[rank])
        for batch in self.loader:
            net(batch).sum().backward()
            optimizer.step()
        {stop}

def work(rank, solver, optimizer):
    dist.init_process_group("nccl", rank=rank, world_size=2)
    for epoch in range(9):
        solver.train(rank, optimizer)
        if solver.stop:
            break
    dist.destroy_process_group()

def main(model, loader, optimizer):
    mp.spawn(work, nprocs=2, args=(Solver(model, loader), optimizer))
"""


@pytest.mark.parametrize(
    ("stop", "number"),
    [("if rank == 0: self.stop = self.model.done()", 1), ("self.stop = len(self.loader) > 9", 0)],
)
def test_an_object_that_is_handed_to_spawned_processes(stop, number):
    assert len(lines(SPAWNED.format(stop=stop), "LS037")) == number


MADE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.layer = nn.Linear(size, 2)

    def forward(self, x):
        return self.layer(x){more}

def score(net, loader, device):
    net.eval()
    for x, y in loader:
        yield net(x.to(device)), y

def main(loader, ema, helper):
    device = {device}
    net = {made}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    {use}
    return list(score(net, loader, device)), optimizer
"""
GPU = "torch.device('cuda' if torch.cuda.is_available() else 'cpu')"


@pytest.mark.parametrize(
    ("device", "made", "use", "more", "number"),
    [
        (GPU, "Net()", "print(net)", "", 1),
        ("'cuda:0'", "Net(size=4)", "net.train()", "", 1),
        ("'cpu'", "Net()", "print(net)", "", 0),
        ("helper.device", "Net()", "print(net)", "", 0),
        (GPU, "Net().to(device)", "pass", "", 0),
        (GPU, "Net()", "net.to(device)", "", 0),
        (GPU, "Net()", "net = net.to(device)", "", 0),
        (GPU, "Net()", "net = helper(net)", "", 0),
        (GPU, "Net()", "ema(net)", "", 0),
        (GPU, "Net()", "for part in net.parameters(): part.data = part.data.to(device)", "", 0),
        (GPU, "Net()", "net.train().to(device)", "", 0),
        (GPU, "Net()", "same = net.train()\n    same.to(device)", "", 0),
        (GPU, "Net()", "net.layer.to(device)", "", 0),
        (GPU, "Net()", "net._apply(lambda part: part.to(device))", "", 0),
        (GPU, "Net()", "net.register_forward_pre_hook(helper)", "", 0),
        (GPU, "Net()", "[part.to(device) for part in (net, ema)]", "", 0),
        (GPU, "Net()", "net = helper", "", 0),
        (GPU, "Net()", "ema.net = net", "", 0),
        (GPU, "Net()", "torch.set_default_device('cuda')", "", 0),
        (GPU, "Net()", "net.load_state_dict(torch.load('a.pt'), assign=True)", "", 0),
        (GPU, "Net()", "net.place()", "\n\n    def place(self):\n        self.cuda()", 0),
        (GPU, "nn.DataParallel(Net())", "pass", "", 0),
    ],
)
def test_a_model_that_is_never_moved(device, made, use, more, number):
    text = MADE.format(device=device, made=made, use=use, more=more)
    assert len(lines(text, "LS066")) == number
    within = f"    with torch.device(device):\n        net = {made}\n"
    assert not lines(text.replace(f"    net = {made}\n", within), "LS066")


SAMPLES = """
import random
import numpy as np
import torch
from torch.utils.data import Dataset

SEED = 3

class {name}(Dataset):
    def __init__(self, rows, seed=None, number=7):
        self.rows, self.seed, self.number = rows, seed, number

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        {seed}
        return self.rows[index] + {draw}
"""


@pytest.mark.parametrize(
    ("name", "seed", "draw", "number"),
    [
        ("Rows", "np.random.seed(SEED)", "np.random.rand()", 1),
        ("Rows", "np.random.seed(self.number)", "np.random.rand()", 1),
        ("Rows", "rng = np.random.default_rng(0)", "rng.normal()", 1),
        ("Rows", "np.random.seed(self.seed)", "np.random.rand()", 0),
        ("Rows", "np.random.seed()", "np.random.rand()", 0),
        ("Rows", "np.random.seed(index)", "np.random.rand()", 0),
        ("Rows", "np.random.seed(SEED + index)", "np.random.rand()", 0),
        ("Rows", "np.random.seed(SEED)", "1", 0),
        ("Rows", "random.seed(SEED)", "np.random.rand()", 0),
        ("TestRows", "np.random.seed(SEED)", "np.random.rand()", 0),
        ("Rows", "if self.split == 'val': np.random.seed(SEED)", "np.random.rand()", 0),
    ],
)
def test_one_draw_for_all_samples(name, seed, draw, number):
    assert len(lines(SAMPLES.format(name=name, seed=seed, draw=draw), "LS067")) == number
