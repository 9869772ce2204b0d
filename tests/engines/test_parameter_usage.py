"""Models whose backward visits a parameter twice, seldom or not at all: the weights are those of plain PyTorch."""

import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.data.sampler import Sequential
from lockstep.engines.fsdp.apply import FILLS_UNUSED
from lockstep.errors import LockstepError

STEPS, BATCH, CLIP, WIDTH = 5, 8, 0.5, 6
KINDS = ("tied", "twice", "outside too", "unused", "drops", "heads", "not in step 3")


class Paths(nn.Module):
    """Blocks under reentrant checkpoints, and two heads; the kind says which are used."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first = kind, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        if kind == "tied":
            self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, x, sample):
        step, place = int(sample[0]) // BATCH, int(sample[0]) % BATCH
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        for index in self.order(step, place):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        if self.kind == "outside too":
            x = x @ self.first.weight
        first, second = self.heads
        if self.kind == "late":  # one block on each rank from step 3 on
            return first(x) if step < 2 or place < 4 else second(x)
        if self.kind == "heads":  # other ones on the second rank, and in micro-batches
            return first(x) if (place // 2) % 2 or place < 4 else second(x)
        return first(x) if self.kind == "not in step 3" and step == 2 else first(x) + second(x)

    def order(self, step, place):
        if self.kind == "twice":
            return (0, 1, 1, 2)
        if self.kind == "unused":
            return (0, 1)
        return (0, 1) if self.kind == "drops" and (place // 2 + step) % 3 == 0 else (0, 1, 2)


class Fitted(lockstep.Task):
    reduction = "micro-batch"  # its first sample chooses the path

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Paths(self.kind).double()

    def dataset(self, split):
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(STEPS * BATCH, WIDTH, generator=generator, dtype=torch.float64)
        samples = torch.arange(len(x)) * (split == "train")  # an evaluation takes one path
        return torch.utils.data.TensorDataset(x, samples, x.roll(1, 0))

    def order(self, samples, seed):
        return Sequential(samples)

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)

    def loss(self, model, batch):
        return (model(batch[0], batch[1]) - batch[2]).square().mean()


def plain(kind, micro):
    """The weights of a loop by hand."""
    task = Fitted(kind)
    model, data = task.model(), task.dataset("train")
    optimizer = task.optimizer(model, None)
    for step in range(STEPS):
        for first in range(step * BATCH, (step + 1) * BATCH, micro):
            loss = task.loss(model, [column[first : first + micro] for column in data.tensors])
            (loss * micro / BATCH).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(world, folder, cases):
    """The weights of each (name, kind, changes), as lists, which travel between processes."""
    found = []
    for name, kind, changes in cases:
        optim = {"schedule": "constant", "warmup_steps": 0, "clip": CLIP}
        settings = config(folder, experiment_name=name, batch_size=BATCH, max_steps=STEPS, optim=optim, **changes)
        with lockstep.Run(settings, Fitted(kind), world) as made:
            for _ in made:
                pass
            state = dict(made.model.named_parameters())
            whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in state.items()}
        found.append({n.removeprefix("module."): p.tolist() for n, p in whole.items()})
    return found


def check(found, wanted, case):
    for name, value in wanted.items():
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=value.dtype), value, rtol=1e-9, atol=1e-9, msg=f"{case} {name}"
        )


@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
def test_the_weights_are_those_of_plain_pytorch(engine, tmp_path):
    kinds = KINDS if engine != "fsdp" else [kind for kind in KINDS if kind not in ("twice", "drops", "heads")]
    kinds = kinds if engine != "fsdp" or FILLS_UNUSED else kinds[:2]
    cases = [(kind.replace(" ", "-"), kind, {"engine": engine, "micro_batch_size": 2}) for kind in kinds]
    cases.append(("one-each", "tied", {"engine": engine, "micro_batch_size": 4}))
    found = run(trained, 2, tmp_path, cases)
    for case, *each in zip(cases, *found, strict=True):
        for state in each:
            check(state, plain(case[1], case[2]["micro_batch_size"]), case)


def refused(world, folder, kind):
    with refuses(LockstepError, "--engine fsdp", "--engine ddp"):
        trained(world, folder, [("r", kind, {"engine": "fsdp", "micro_batch_size": 2, "timeout": 20.0})])


@pytest.mark.parametrize("kind", ["drops", "heads", "late", "twice"])
def test_fsdp_refuses_what_it_would_train_wrongly(kind, tmp_path):
    """Ranks gather a block together: they would wait for each other, or compute with another block's weights."""
    run(refused, 2, tmp_path, kind)
