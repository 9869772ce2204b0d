"""A fused Adam's step is torch's own, bit for bit, and torch takes every step that is not a plain one."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.engines.fused_step import fused_step
from lockstep.engines.optimizer_step import OptimizerStep, UpdateSpec
from lockstep.engines.request import EngineRequest


def made(kind=AdamW, **settings):
    """(parameters, optimizer): two groups, one of them of float64; the second parameter never gets a gradient."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(7, 5), nn.Linear(3, 2)])
    model[1].double()
    decayed = {"params": list(model[0].parameters()), "lr": 0.1, "weight_decay": 0.3}
    rest = {"params": list(model[1].parameters()), "betas": (0.5, 0.7), "weight_decay": 0.0}
    return list(model.parameters()), kind([decayed, rest], lr=0.01, fused=True, **settings)


def grow(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for place, parameter in enumerate(parameters):
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if place == 1 else drawn


def contents(parameters, optimizer):
    return [*parameters, *(value for p in parameters for value in optimizer.state.get(p, {}).values())]


SETTINGS = {
    "AdamW": (AdamW, {}),
    "Adam": (Adam, {"weight_decay": 0.1}),
    "Adam with AdamW's decay": (Adam, {"decoupled_weight_decay": True}),
    "maximize": (AdamW, {"maximize": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("flagged", [False, True])
def test_the_step_is_torchs_own_bit_for_bit(name, flagged):
    kind, settings = SETTINGS[name]
    (parameters, optimizer), (own, reference) = made(kind, **settings), made(kind, **settings)
    for step in range(5):
        for each, instance in ((parameters, optimizer), (own, reference)):
            grow(each, step)
            instance.param_groups[0]["lr"] = 0.1 / (step + 1)
            if flagged:  # as with float16: the kernel unscales, and skips step 3
                instance.grad_scale, instance.found_inf = torch.tensor(4.0), torch.tensor(float(step == 3))
        taken = fused_step(optimizer)
        assert taken is (step > 0)  # the first one makes the states
        if not taken:
            optimizer.step()
        reference.step()
        for mine, other in zip(contents(parameters, optimizer), contents(own, reference), strict=True):
            assert torch.equal(mine, other)


def sparse(parameters, optimizer):
    parameters[0].grad = parameters[0].grad.to_sparse()


def hooked(parameters, optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)


CASES = {
    "amsgrad": lambda parameters, optimizer: optimizer.param_groups[1].update(amsgrad=True),
    "unfused": lambda parameters, optimizer: optimizer.param_groups[1].update(fused=False),
    "a rate that is a tensor": lambda parameters, optimizer: optimizer.param_groups[1].update(lr=torch.tensor(0.1)),
    "sparse": sparse,
    "a hook": hooked,
    "a scheduler": lambda parameters, optimizer: LambdaLR(optimizer, lambda step: 1.0),
    "a lost state": lambda parameters, optimizer: optimizer.state.pop(parameters[2]),
    "dtypes in a group": lambda parameters, optimizer: optimizer.param_groups[0]["params"].append(parameters[2]),
    "own step": lambda parameters, optimizer: setattr(optimizer, "step", lambda: None),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_takes_an_unusual_step(name):
    parameters, optimizer = made()
    grow(parameters, 0)
    optimizer.step()
    CASES[name](parameters, optimizer)
    before = [value.detach().clone() for value in contents(parameters, optimizer)]
    assert not fused_step(optimizer)
    assert all(map(torch.equal, before, contents(parameters, optimizer)))


def test_torchs_step_is_used_when_it_is_observed():
    parameters, optimizer = made()
    grow(parameters, 0)
    optimizer.step()
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert not fused_step(optimizer)
    handle.remove()
    with torch.profiler.profile(acc_events=True):
        assert not fused_step(optimizer)
    assert not fused_step(SGD(parameters, lr=0.1))
    assert fused_step(optimizer)


@pytest.mark.parametrize("times", [0.5, 0.98, 0.99, 0.995, 1 - 2**-23, 1.0, 1 + 2**-23, 1.5])
def test_gradient_below_the_limit_is_as_clipping_leaves_it(times):
    torch.manual_seed(0)
    model = nn.Linear(9, 4)
    update = OptimizerStep(model, SGD(model.parameters(), lr=1.0), EngineRequest(clip=0.7), UpdateSpec())
    gradients = [torch.randn_like(p) for p in model.parameters()]
    norm = torch.tensor(0.7 * times)
    expected = [g * torch.clamp(0.7 / (norm + 1e-6), max=1.0) for g in gradients]
    update._scale_gradients(gradients, norm)
    assert all(map(torch.equal, gradients, expected))
