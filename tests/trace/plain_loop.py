"""A training loop as people write it, on one process or under DDP, with mistakes to be found. Run by tests/ranks.py."""

import contextlib
import copy
import json
import os
from pathlib import Path

import padded_loop
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from lockstep.trace.compare.reading import FOLDER_FILE, FORMAT
from lockstep.trace.record import hooks


class Ragged(Dataset):
    """Rows of 6 numbers, of which the last `kept` labels count."""

    def __init__(self, samples, ragged):
        make = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, 6, generator=make)
        self.y = torch.randint(0, 4, (samples, 5), generator=make)
        if ragged:
            for row in range(samples):
                self.y[row, 1 + row * 7 % 5 :] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Nudge(nn.Module):
    """Another kernel: the same within rounding."""

    def forward(self, x):
        return x * (1 + 2e-7)


class Net(nn.Module):
    detached = False  # of its first layer

    def __init__(self, norm=False, dropout=0.0, own=None, noise=False):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.own = own
        self.last = nn.Linear(16, 20)
        self.noise = nn.Parameter(torch.zeros(400, 5, 1)) if noise else None

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        hidden = hidden.detach() if self.detached else hidden
        if self.own is not None and self.training:
            hidden = hidden * (torch.rand(hidden.shape, generator=self.own) > 0.3)
        out = self.last(self.dropout(hidden)).view(len(x), 5, 4).clone()  # FSDP warns of views
        return out if self.noise is None else out + self.noise.sum(0)  # which the loss does not depend on


def recorded(world, folder, mistake="", **settings):
    """Trains with the recorder attached, as `lockstep trace` would; what is left of the weights."""
    os.environ["LOCKSTEP_TRACE"] = str(folder)
    os.environ["LOCKSTEP_TRACE_DEBUG"] = "1"  # what fails in the recorder fails the test
    for name, value in settings.pop("variables", {}).items():
        os.environ[name] = value
    if world.rank == 0:
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / FOLDER_FILE).write_text(json.dumps({"format": FORMAT}))
    if world.size > 1:
        dist.barrier()
    hooks.attach(torch)
    found = (padded_loop.train if settings.pop("padded", False) else train)(mistake, **settings)
    hooks.detach()
    return found


def plainly(world, mistake="", **settings):
    """The same without a recorder."""
    return train(mistake, **settings)


def train(
    mistake="",
    steps=6,
    dropout=0.0,
    norm=False,
    ragged=False,
    clip=0.0,
    scale=1.0,
    begin=0,
    saved=None,
    epochs=1,
    micro=1,
    shard="",
    noise=False,
    sam=0.0,
    dtype="",
    generator="",
):
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    wrong, last = distributed, rank == world - 1
    torch.manual_seed(1)
    own = torch.Generator().manual_seed(3 + rank * (generator != "same")) if generator else None
    model = bare = Net(norm, dropout, own, noise)
    torch.manual_seed(1 + rank * (mistake != "same-seed"))  # other masks for other samples
    bare.detached = mistake == "detached"
    if mistake == "same-masks" and wrong:  # seeded within the forward
        bare.first.register_forward_hook(lambda *_: torch.manual_seed(100 + rank) and None)
    if distributed and shard:
        model = sharded(bare, shard, world)
        bare = model if shard == "fsdp1" else bare
    elif distributed and mistake != "no-ddp":
        model = DistributedDataParallel(bare)
    if mistake == "per-rank-weights" and last and wrong:
        with torch.no_grad():
            bare.first.weight.add_(0.1)
    rate = 0.05 * (world if mistake == "world-rate" else 1)
    if mistake == "no-rate":
        rate = 0.0
    trained = copy.deepcopy(bare) if mistake == "other-parameters" else bare
    bare.first.bias.requires_grad_(mistake != "frozen")
    given = [p for name, p in trained.named_parameters() if mistake != "outside" or name != "first.bias"]
    optimizer = torch.optim.AdamW(given, rate, eps=1e-15)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.9**count)
    if saved is not None and Path(saved).exists():
        state = torch.load(saved, weights_only=True)
        bare.load_state_dict(state["model"])
        if mistake == "made-state":
            get_optimizer_state_dict(bare, optimizer)
        if mistake != "no-state":
            optimizer.load_state_dict(state["optimizer"])
        if mistake != "no-schedule":
            schedule.load_state_dict(state["schedule"])
    samples = Ragged(48, ragged)
    readers, reader = {"tensor": (1, 0), "2d": (world // 2, rank // 2)}.get(shard, (world, rank))  # apart in data
    shards = (1, 0) if mistake == "overlapping-data" else (readers, reader)
    sampler = DistributedSampler(samples, *shards, seed=2 + (rank if mistake == "other-shuffle" else 0))
    loader = DataLoader(samples, 8 // (1 if mistake == "batch-size" else readers) // micro, sampler=sampler)
    step = 0
    for epoch in range(epochs):
        if mistake != "set-epoch" or not wrong:
            sampler.set_epoch(epoch)
        model.train()
        batches = iter(loader)
        for _ in range(steps):
            if step < begin + (mistake == "late-resume") and mistake != "early-resume":
                for _ in range(micro):
                    next(batches)
                step += 1
                continue
            for _ in range(micro):
                x, y = next(batches)
                quiet = mistake == "no-sync" or (mistake == "unsent-gradient" and step == 2)
                with model.no_sync() if wrong and quiet else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                        out = (bare if mistake == "bare-call" else model)(x)
                    out = out.float()
                    if mistake == "one-class":
                        out, y = out[..., :1], y * 0
                    loss = F.cross_entropy(out.flatten(0, 1), y.reshape(-1), ignore_index=-100, reduction="sum")
                    items = (y != -100).sum()
                    if distributed and mistake != "rank-average":
                        dist.all_reduce(items)
                        items = items / world
                    (loss / items * scale / (micro if mistake != "accumulation" or not wrong else 1)).backward()
                    if sam:  # a second pass, at the weights that are moved along the gradient
                        away = perturb(bare, sam)
                        out = model(x)
                        loss = F.cross_entropy(out.flatten(0, 1), y.reshape(-1), ignore_index=-100, reduction="sum")
                        (loss / items).backward()
                        if mistake != "no-restore":
                            torch._foreach_sub_([p.data for p in bare.parameters()], away)
            if mistake == "kernel" and step == 2:
                bare.norm = Nudge()
            if mistake == "clip-before-unscale" and wrong:
                nn.utils.clip_grad_norm_(bare.parameters(), clip)
            for p in bare.parameters():
                if p.grad is not None:  # FSDP 1 leaves a rank without a part of a tensor
                    p.grad /= scale
            if clip and not (mistake == "clip-before-unscale" and wrong):
                nn.utils.clip_grad_norm_(bare.parameters(), clip)
            if mistake == "other-rate" and wrong and last and step == 3:
                optimizer.param_groups[0]["lr"] *= 1.5
            optimizer.step()
            if mistake == "extra-step" and wrong and last and step == 3:
                optimizer.step()
            if mistake == "bit-flip" and wrong and last and step == 3:
                bare.last.bias.data.view(torch.int32)[1] ^= 1
            if mistake != "no-zero-grad":
                optimizer.zero_grad()
            schedule.step()
            if mistake == "schedule" and wrong:
                schedule.step()
            step += 1
    whole = model if shard == "fsdp1" else getattr(model, "module", model)
    evaluate(whole, mistake, distributed, readers, reader)
    if saved is not None and not Path(saved).exists() and rank == 0:
        state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state, saved)
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().tolist() for p in bare.parameters()]


def perturb(model, length):
    """Moves the weights by `length` along their gradient, which is cleared; how far each tensor went."""
    gradients = [p.grad for p in model.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    away = [gradient * (length / norm) for gradient in gradients]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), away)
    model.zero_grad()
    return away


def sharded(model, kind, world):
    """FSDP 1 or 2, tensor parallelism (by columns, then by rows), or FSDP 2 over that of two ranks each."""
    both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor")) if kind == "2d" else None
    mesh = init_device_mesh("cpu", (world,)) if both is None else both["tensor"]
    if kind == "fsdp1":
        settings = {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy([nn.Linear])}
        return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), **settings)
    if kind == "fsdp2":
        return fully_shard(model, mesh=mesh)
    model = parallelize_module(model, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    return model if both is None else fully_shard(model, mesh=both["data"])


def evaluate(model, mistake, distributed, world, rank):
    samples = Ragged(21, False)
    model.eval()
    if mistake == "padded-evaluation":
        sampler = DistributedSampler(samples, world, rank, shuffle=False)
        loader = DataLoader(samples, 4, sampler=sampler)
    else:
        loader = DataLoader(Subset(samples, range(rank, 21, world)), 4)
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            hits = model(x)
            total += torch.tensor([(hits.argmax(-1) == y).sum(), y.numel()])
    if distributed and mistake != "own-score":
        dist.all_reduce(total)
