"""fsdp keeps 0-dim and empty parameters whole: weights as in plain PyTorch, on any ranks and after a resume."""

import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config
from torch import nn

import lockstep
from lockstep.config.engine_options import EngineOptions
from lockstep.data.sampler import Sequential
from lockstep.engines.fsdp.apply import FILLS_UNUSED
from lockstep.engines.registry import engine
from lockstep.errors import ConfigError

STEPS, BATCH, CLIP, RATE = 4, 12, 0.05, 0.03
OPTIM = {"schedule": "constant", "warmup_steps": 0, "clip": CLIP, "ema": 0.9}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gate = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return x + self.gate * torch.tanh(self.layer(x))


class Tempered(nn.Module):
    """0-dim parameters in each block and at the root, one is frozen, some micro-batches leave one out; an empty one."""

    def __init__(self, seldom):
        super().__init__()
        self.leaves_out = seldom and FILLS_UNUSED
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.seldom = nn.Parameter(torch.tensor(0.7))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        leaves_out = self.leaves_out and bool(x[0].sum() < 0.8)
        for block in self.blocks:
            x = block(x)
        x = self.head(x) * self.temperature.exp() * self.frozen + self.none.sum()
        return x if leaves_out else x * self.seldom


class Fitted(lockstep.Task):
    """The loss is a mean, which a trial proves; with `seldom` it depends on the micro-batch."""

    def __init__(self, seldom=False):
        self.seldom = seldom
        self.reduction = "micro-batch" if seldom else "auto"

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Tempered(self.seldom).double()

    def dataset(self, split):
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(STEPS * BATCH, 6, generator=generator, dtype=torch.float64)
        return torch.utils.data.TensorDataset(x, x[:, :3].roll(1, 0))

    def order(self, samples, seed):
        return Sequential(samples)

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def penalty(self, model):
        distance = (model.blocks[0].layer.weight - torch.eye(6, dtype=torch.float64)).square().sum()
        return 0.01 * (sum(p.abs().sum() for p in model.parameters() if p.requires_grad) + distance)


def settings(folder, name, **changes):
    sizes = {"batch_size": BATCH, "max_steps": STEPS, "experiment_name": name, "micro_batch_size": 2}
    return config(folder, **sizes | {"precision": "float64", "optim": OPTIM, "lr": RATE} | changes)


def oracle(seldom=False):
    task = Fitted(seldom)
    model, data = task.model(), task.dataset("train")
    optimizer, averages, norms = task.optimizer(model, None), {}, []
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        for first in range(step * BATCH, (step + 1) * BATCH, 2):
            loss = task.loss(model, [column[first : first + 2] for column in data.tensors])
            (loss * 2 / BATCH).backward()
        task.penalty(model).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        decay = min((1 + step) / (10 + step), 0.9)
        for name, p in model.named_parameters():
            averages[name].lerp_(p.detach(), 1 - decay)
    return {name: p.detach() for name, p in model.named_parameters()}, norms, averages


def trained(world, folder, name, changes, seldom=False):
    with lockstep.Run(settings(folder, name, **changes), Fitted(seldom), world) as made:
        norms = [step.norm for step in made]
        state = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in made.model.named_parameters()}
    return {name: p.tolist() for name, p in state.items()}, norms


def check(found, wanted):
    weights, norms, _ = wanted
    for name, value in weights.items():
        present = torch.tensor(found[0][name], dtype=value.dtype).view(value.shape)  # a list has no empty dimension
        torch.testing.assert_close(present, value, rtol=1e-9, atol=1e-9, msg=name)
    assert found[1] == pytest.approx(norms[-len(found[1]) :], rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"accumulate": "shard"}, {"sharding": "none"}, {"meta_init": True}])
def test_the_weights_and_the_norm_are_those_of_plain_pytorch(options, tmp_path):
    changes, seldom = {"engine": "fsdp", "engine_options": EngineOptions(**options)}, not options
    for found in run(trained, 2, tmp_path, "whole", changes, seldom):
        check(found, oracle(seldom))


def test_resume_on_other_ranks_and_engines_is_the_same_run(tmp_path):
    run(trained, 3, tmp_path, "hop", {"engine": "fsdp", "stop_at": 1})
    run(trained, 2, tmp_path, "hop", {"engine": "zero", "stop_at": 2})
    run(trained, 2, tmp_path, "hop", {"engine": "fsdp", "stop_at": 3})
    check(trained(lockstep.World(), tmp_path, "hop", {"engine": "single"}), oracle())
    averaged = lockstep.load(tmp_path / "hop", Fitted(), "last", ema=True)
    for name, value in oracle()[2].items():
        torch.testing.assert_close(averaged.get_parameter(name).detach(), value, rtol=1e-9, atol=1e-9, msg=name)


def refused(world, model, options):
    with refuses(ConfigError, *options.pop("named")):
        engine(
            "fsdp", model, lambda made: torch.optim.SGD(made.parameters(), 0.1), world, options=EngineOptions(**options)
        )


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Parameter(torch.tensor(1.0))


def test_a_model_of_scalars_alone_is_refused_by_name():
    run(refused, 2, Scalar(), {"named": ["--engine fsdp", "only"]})
