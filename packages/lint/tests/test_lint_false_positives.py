"""Code that looks like a pitfall and is none: every script here must stay silent."""

import pytest

from lockstep_lint.runner import check_text

HEAD = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
SILENT = {
    "print is replaced": """
import builtins

def quiet(rank):
    plain = builtins.print
    builtins.print = lambda *a, **k: plain(*a, **k) if rank == 0 else None

def main():
    dist.init_process_group("nccl")
    quiet(dist.get_rank())
    print("hello")
    dist.destroy_process_group()
""",
    "the guard is in the function that saves": """
def save_on_master(*args):
    if dist.get_rank() == 0:
        torch.save(*args)

def main(model, rank):
    dist.init_process_group("nccl")
    model = DDP(model.to(rank))
    save_on_master(model.module.state_dict(), "x.pt")
    dist.destroy_process_group()
""",
    "the level of the log depends on the rank": """
import logging

logger = logging.getLogger(__name__)

def main(args):
    logging.basicConfig(level=logging.INFO if args.local_rank in [-1, 0] else logging.WARN)
    dist.init_process_group("gloo")
    logger.info("hello")
    dist.destroy_process_group()
""",
    "a process beside the ranks": """
import torch.multiprocessing as mp

def watch(args):
    print("watching", args)

def worker(rank, args):
    dist.init_process_group("gloo", rank=rank)
    dist.destroy_process_group()

def main(args):
    watcher = mp.Process(target=watch, args=(args,))
    watcher.start()
    mp.spawn(worker, nprocs=2, args=(args,))
""",
    "the other ranks hand the function over": """
def objective(trial):
    score = torch.zeros(1)
    dist.all_reduce(score)
    return score.item()

def main(study):
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        study.optimize(objective, n_trials=1)
    else:
        objective(None)
    dist.destroy_process_group()
""",
    "gradients cleared by hand": """
def train(model, loader, optimizer):
    for x in loader:
        for p in model.parameters():
            p.grad = None
        model(x).sum().backward()
        optimizer.step()
""",
    "a decorator keeps other ranks out": """
def rank_zero_only(f):
    return f

@rank_zero_only
def say(text):
    print(text)

def main():
    dist.init_process_group("nccl")
    say("hello")
    dist.destroy_process_group()
""",
    "one rank first": """
from contextlib import contextmanager
from torchvision.datasets import MNIST

@contextmanager
def rank0_first():
    rank = dist.get_rank()
    if rank == 0:
        yield
    dist.barrier()
    if rank > 0:
        yield
    dist.barrier()

def main():
    dist.init_process_group("nccl")
    with rank0_first():
        MNIST("data", download=True)
    dist.destroy_process_group()
""",
    "a device of its own after set_device": """
def main(model):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(model.cuda())
    dist.destroy_process_group()
""",
    "the model is born on its device": """
def main(rank):
    with torch.device(f"cuda:{rank}"):
        model = nn.Linear(2, 2)
    return DDP(model, device_ids=[rank])
""",
    "the early return of other ranks comes after the collective": """
def log(loss):
    dist.all_reduce(loss)
    if dist.get_rank() != 0:
        return
    torch.save(loss, "loss.pt")
""",
    "eval by the caller": """
def evaluate(model, val_loader):
    return [model(x) for x in val_loader]

def main(model, val_loader):
    model.eval()
    with torch.no_grad():
        evaluate(model, val_loader)
    model.train()

if __name__ == "__main__":
    main(nn.Linear(2, 2), [])
""",
    "a sum that is differentiated": """
def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        total = 0
        for part in x:
            total = total + model(part).sum()
        total.backward()
        optimizer.step()
""",
    "two optimizers in turn": """
def train(g, d, loader, g_optimizer, d_optimizer, n):
    for i, x in enumerate(loader):
        d_optimizer.zero_grad()
        d(x).sum().backward()
        d_optimizer.step()
        if i % n == 0:
            g_optimizer.zero_grad()
            g(x).sum().backward()
            g_optimizer.step()
""",
    "a scheduler that counts steps, stepped in every step": """
def train(model, loader, optimizer, epochs):
    total = epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            scheduler.step()
""",
    "arguments through a dictionary": """
def loaders(data, rank, world_size):
    options = dict(batch_size=8, num_workers=2, pin_memory=False)
    options.update(sampler=DistributedSampler(data, world_size, rank, shuffle=False))
    return DataLoader(data, **options)
""",
    "accelerate does it": """
from accelerate import Accelerator

def main(model, optimizer, loader):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for x in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(x).sum())
                optimizer.step()
""",
    "lightning does it": """
import lightning as L

class Module(L.LightningModule):
    def training_step(self, batch, i):
        return self(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def main(data):
    L.Trainer(strategy="ddp").fit(Module(), DataLoader(data, shuffle=True, num_workers=2))
""",
    "both ranks' sides meet": """
def turn(rank):
    if rank == 0:
        dist.barrier()
    else:
        dist.barrier()
""",
}


@pytest.mark.parametrize("script", list(SILENT.values()), ids=list(SILENT))
def test_silent(script):
    assert [(f.rule, f.line, f.message) for f in check_text(HEAD + script)] == []


GUARDS = [
    "rank == 0",
    "not rank",
    "rank in (-1, 0)",
    "flag and rank == 0",
    "rank == 0 or not flag",
    "is_main_process()",
]


@pytest.mark.parametrize("guard", GUARDS)
def test_guards_that_keep_other_ranks_out(guard):
    script = f"""
def main(rank, flag, is_main_process):
    dist.init_process_group("nccl")
    if {guard}:
        print("hello")
    dist.destroy_process_group()
"""
    assert check_text(HEAD + script) == []


@pytest.mark.parametrize("guard", ["flag", "rank >= 0", "flag == 0"])
def test_guards_that_do_not(guard):
    script = f"""
def main(rank, flag):
    dist.init_process_group("nccl")
    if {guard}:
        print("hello")
    dist.destroy_process_group()
"""
    assert [finding.rule for finding in check_text(HEAD + script)] == ["LS028"]


def test_an_exit_behind_and_does_not_reserve_what_follows():
    script = """
def main(rank, count):
    dist.init_process_group("nccl")
    if count == 1 and rank != 0:
        raise ValueError(rank)
    print("hello")
    dist.destroy_process_group()
"""
    assert [finding.rule for finding in check_text(HEAD + script)] == ["LS028"]
