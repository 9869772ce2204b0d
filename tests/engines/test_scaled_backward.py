"""The scaled backward: torch's own gradients, and its public call wherever somebody watches that."""

import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.engines.base import ScaledBackward


def gradients(backward, loss_scale=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    backward(loss_scale * model(torch.randn(4, 5, dtype=torch.float64)).square().mean())
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("factor", [1.0, 0.125, torch.tensor(3.0)])
def test_it_has_the_bits_of_a_backward_with_that_root(factor):
    found = gradients(lambda loss: ScaledBackward().run(loss, factor))
    wanted = gradients(lambda loss: loss.backward(torch.tensor(float(factor), dtype=torch.float64)))
    assert all(torch.equal(own, other) for own, other in zip(found, wanted, strict=True))


def test_a_loss_that_is_not_finite_makes_each_gradient_nan():
    found = gradients(lambda loss: ScaledBackward().run(loss, 1.0), math.inf)
    assert all(own.isnan().all() for own in found)


def test_hooks_and_graphs_are_torchs_own():
    x = torch.ones(3, requires_grad=True)
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    loss = (2 * x).exp().sum()
    ScaledBackward().run(loss, 0.5)
    assert torch.equal(seen[0], x.grad)
    with pytest.raises(RuntimeError):  # the graph is freed
        ScaledBackward().run(loss, 0.5)


@pytest.mark.parametrize(("owner", "name"), [(torch.autograd, "backward"), (torch.Tensor, "backward")])
def test_a_tool_that_wraps_torchs_backward_is_called(monkeypatch, owner, name):
    calls, public = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: calls.append(1) or public(*given, **named))
    gradients(lambda loss: ScaledBackward().run(loss, 1.0))
    assert calls == [1]


def test_a_mode_that_watches_functions_sees_it():
    class Watching(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []

    def backward(loss):
        with Watching():
            ScaledBackward().run(loss, 1.0)

    gradients(backward)
    assert torch.Tensor.backward in seen
