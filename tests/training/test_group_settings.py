"""Settings that a program writes into optimizer groups hold as in plain PyTorch, on every engine and after a resume."""

import importlib.util
import warnings

import numpy as np
import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config
from torch import nn

import lockstep
from lockstep.config.sections import Optim
from lockstep.engines.group_settings import settings_of
from lockstep.engines.wrappers import _carry_settings
from lockstep.errors import ConfigError

STEPS, SIZE = 10, 8
PLAIN = Optim(clip=0.0, schedule="constant", warmup_steps=0)
NONE = Optim(clip=0.0, schedule="none")


class Scaled(torch.optim.Optimizer):
    """SGD with decay, a key of its own, and a count that it keeps in its groups."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "scale": 1.0, "taken": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"] / group["taken"])
                    parameter.add_(parameter.grad, alpha=-group["lr"] * group["scale"])


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def groups_of(model):
    return [{"params": list(model[0].parameters()), "lr": 0.2}, {"params": list(model[2].parameters())}]


def rows(dtype):
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return x, x[:, :2].sin()


class Written(lockstep.Task):
    """Its optimizer is at hand for what a program writes into its groups."""

    reduction = "mean"

    def __init__(self, dtype=torch.float64, make=Scaled):
        self.dtype, self.make = dtype, make

    def model(self):
        return network(self.dtype)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(*rows(self.dtype)) if split == "train" else None

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def order(self, samples, seed):
        return range(samples)

    def optimizer(self, model, config):
        self.made = self.make(groups_of(model), lr=0.1)
        return self.made


def decayed(groups, step):
    """Write a decay each step, another key once, and restart a count."""
    groups[0]["weight_decay"] = 0.5 + 0.1 * step
    if step == 3:
        groups[1]["scale"], groups[0]["taken"] = 0.25, 1


def rated(groups, step):
    groups[0]["lr"], groups[1]["lr"] = 0.3 / (1 + step), 0.05 * (1 + step)


class Scheduled(Written):
    def set_groups(self, groups, step, steps):
        assert steps == STEPS
        rated(groups, step)
        groups[1]["weight_decay"] = step / steps


def by_hand(write, dtype=torch.float64):
    """Weights after the steps; `write` is called before each."""
    model, (x, y) = network(dtype), rows(dtype)
    made = Scaled(groups_of(model), lr=0.1)
    for step in range(STEPS):
        write(made.param_groups, step)
        part = slice(step % 4 * SIZE, (step % 4 + 1) * SIZE)
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        made.step()
        made.zero_grad()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def trained(folder, task, write=None, optim=PLAIN, start=0, **changes):
    """Weights, the steps' rates, and the first group's settings; the body of the loop writes for the next step."""
    settings = {"batch_size": SIZE, "micro_batch_size": 4, "max_steps": STEPS, "ckpt_freq": 2, "optim": optim}
    settings |= {"precision": "float64" if task.dtype is torch.float64 else "float32", "report": False} | changes
    rates = []
    with lockstep.Run(config(folder, **settings), task) as begun:
        if write:
            write(task.made.param_groups, start)
        for step in begun:
            rates.append(step.lr)
            if write:
                write(task.made.param_groups, step.global_step)
    model = lockstep.load(folder / "r", task, "last")
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return weights, rates, {k: v for k, v in task.made.param_groups[0].items() if k != "params"}


ENGINES = ["ddp", "zero", "fsdp"]


def close(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=0, atol=tolerance)


def test_loops_settings_train_as_in_pytorch_and_survive_a_resume(tmp_path):
    wanted = by_hand(decayed)
    found, _, settings = trained(tmp_path / "whole", Written(), decayed)
    close(found, wanted)
    trained(tmp_path / "parts", Written(), decayed, stop_at=6)
    again, _, resumed = trained(tmp_path / "parts", Written(), decayed, start=6)
    assert torch.equal(again, found)
    assert resumed == settings
    assert settings["taken"] == 8


def test_a_rate_that_a_loop_sets_is_an_error_in_that_step(tmp_path):
    with refuses(ConfigError, "group 0", "0.3", "0.2", "--optim.schedule none", "set_groups"):
        trained(tmp_path, Written(), rated)


def test_rates_without_a_schedule_are_as_in_plain_pytorch(tmp_path):
    wanted = by_hand(rated)
    found, rates, _ = trained(tmp_path / "loop", Written(), rated, NONE)
    close(found, wanted)
    assert rates == [0.3 / (1 + step) for step in range(STEPS)]
    trained(tmp_path / "parts", Written(), rated, NONE, stop_at=5)
    again, _, _ = trained(tmp_path / "parts", Written(), rated, NONE, start=5)
    assert torch.equal(again, found)

    def scheduled(groups, step):
        Scheduled().set_groups(groups, step, STEPS)

    found, own_rates, _ = trained(tmp_path / "own", Scheduled(), stop_at=3)
    again, own, _ = trained(tmp_path / "own", Scheduled())
    close(again, by_hand(scheduled))
    assert own_rates + own == rates


def test_a_rate_set_once_stays_after_a_resume(tmp_path):
    def once(groups, step):
        if step == 2:
            groups[0]["lr"] = 0.05

    found, *_ = trained(tmp_path / "whole", Written(), once, NONE)
    close(found, by_hand(once))
    trained(tmp_path / "parts", Written(), once, NONE, stop_at=6)
    again, *_ = trained(tmp_path / "parts", Written(), once, NONE, start=6)
    assert torch.equal(again, found)


def cycled(optimizer, step):
    """Step a torch optimizer's settings as a one-cycle schedule and a `set_groups` of the momentum do."""
    settings = settings_of(optimizer)
    settings.change = lambda groups: groups[0].update(momentum=0.1 * step)
    settings.write(0.5, momentum=0.9)
    return [group["momentum"] for group in optimizer.param_groups]


def test_set_groups_may_set_a_momentum_that_a_cycle_sets_too():
    made = torch.optim.SGD(groups_of(network(torch.float64)), lr=0.1, momentum=0.8)
    assert [cycled(made, step) for step in (1, 2, 3)] == [[0.1 * step, 0.9] for step in (1, 2, 3)]


def test_rates_are_written_into_the_groups_of_a_loaded_optimizer():
    made = torch.optim.SGD(groups_of(network(torch.float64)), lr=0.1)
    settings = settings_of(made)
    made.load_state_dict(made.state_dict())  # it has other groups now
    settings.write(0.5)
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.05]
    made.param_groups[1]["weight_decay"] = np.float32(0.5)
    assert settings.changes() == [{}, {"weight_decay": 0.5}]


def test_settings_follow_parameters_to_another_optimizers_groups():
    model = network(torch.float64)
    head = torch.optim.SGD([{"params": list(model[2].parameters())}], lr=0.1)
    settings_of(head).write(None)
    head.param_groups[0].update(lr=0.01, weight_decay=0.3)
    whole = torch.optim.SGD(groups_of(model), lr=0.1)
    _carry_settings(head, whole)
    assert [(group["lr"], group["weight_decay"]) for group in whole.param_groups] == [(0.2, 0), (0.01, 0.3)]


class Wrong(Written):
    def set_groups(self, groups, step, steps):
        groups[1]["lr"] = float("nan") if step else 0.1


def test_a_bad_rate_of_the_last_step_shows_before_the_first(tmp_path):
    with refuses(ConfigError, "`set_groups`", "group 1", f"step {STEPS}"):
        trained(tmp_path, Wrong())
    assert not list(tmp_path.iterdir())


def on_every_engine(world, folder):
    world.leave()
    found = {}
    for name in ENGINES:
        at = folder / name
        trained(at, Written(), decayed, engine=name, stop_at=6)
        found[name, "loop"] = trained(at, Written(), decayed, engine=name, start=6)[0].tolist()
        found[name, "own"] = trained(folder / f"{name}-own", Scheduled(), engine=name)[0].tolist()
    return found


def test_every_engine_takes_them_on_two_ranks(tmp_path):
    wanted = {"loop": by_hand(decayed), "own": by_hand(lambda g, step: Scheduled().set_groups(g, step, STEPS))}
    for found in run(on_every_engine, 2, tmp_path, timeout=120.0):
        assert len(found) == 2 * len(ENGINES)
        for (_, case), weights in found.items():
            close(torch.tensor(weights, dtype=torch.float64), wanted[case])


def on_deepspeed(world, folder, start):
    world.leave()
    warnings.simplefilter("ignore")  # the package's own
    options = {"engine": "deepspeed", "stop_at": 0 if start else 6, "start": start}
    return trained(folder, Scheduled(torch.float32), decayed, **options)[0].tolist()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
def test_deepspeed_takes_them_too(tmp_path):
    def both(groups, step):
        decayed(groups, step)
        Scheduled().set_groups(groups, step, STEPS)

    run(on_deepspeed, 2, tmp_path, 0, timeout=120.0)
    for weights in run(on_deepspeed, 2, tmp_path, 6, timeout=120.0):
        close(torch.tensor(weights), by_hand(both), 1e-5)
