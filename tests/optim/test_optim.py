"""The decay rule, and which AdamW is taken."""

import pytest
import torch
from torch import nn
from toys import Ragged

from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.optim.groups import groups
from lockstep.optim.optimizers import adamw, make_optimizer, sgd
from lockstep.training.start.resolve import Facts, resolve

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decay_embeddings": False}


def small():
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, heads=2, width=16, vocab_size=64, context=8))


def test_matrices_decay_and_all_else_does_not():
    decayed, plain = groups(small(), weight_decay=0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decayed["names"][:2] == ["blocks.0.attention.inputs.weight", "blocks.0.attention.output.weight"]
    assert len(decayed["names"]) == 2 * 4
    assert plain["names"][:3] == ["tokens.weight", "positions.weight", "blocks.0.attention_norm.weight"]
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])


def test_every_trainable_parameter_is_in_one_group_by_name():
    model = small()
    found = {name: p for group in groups(model, 0.1) for name, p in zip(group["names"], group["params"], strict=True)}
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name] is expected[name] for name in expected)


def test_embeddings_decay_on_request():
    decayed = groups(small(), 0.1, decay_embeddings=True)[0]["names"]
    assert {"tokens.weight", "positions.weight"} <= set(decayed)


def test_a_tied_head_counts_as_an_embedding():
    model = nn.ModuleDict({"head": nn.Linear(4, 10, bias=False), "table": nn.Embedding(10, 4)})
    model["table"].weight = model["head"].weight
    (only,) = groups(model, 0.1)
    assert only["names"] == ["head.weight"]
    assert only["weight_decay"] == 0.0


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert [group["names"] for group in groups(model, 0.1)] == [["1.weight"], ["1.bias"]]


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="requires_grad"):
        groups(nn.Linear(2, 2).requires_grad_(False), 0.1)


def stepped(model, **chosen):
    optimizer = adamw(model, **SETTINGS, **chosen)
    for step in range(3):
        model(torch.arange(8).view(1, 8) + step).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, [parameter.detach() for parameter in model.parameters()]


def test_fused_and_unfused_agree():
    fused, first = stepped(small().double(), fused=None)
    unfused, second = stepped(small().double(), fused=False)
    assert fused.defaults["fused"] is True
    assert (unfused.defaults["fused"], unfused.defaults["foreach"]) == (False, True)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_unfused_has_the_bits_of_the_plain_loop():
    _, ours = stepped(small(), fused=False)
    model = small()
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(3):
        model(torch.arange(8).view(1, 8) + step).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, model.parameters(), strict=True))


def test_parameter_without_a_fused_kernel_takes_the_unfused():
    assert adamw(nn.Linear(2, 2, device="meta"), **SETTINGS).defaults["fused"] is False


def test_torch_refuses_a_negative_rate():
    with pytest.raises(ValueError, match="learning rate"):
        adamw(small(), **{**SETTINGS, "lr": -1.0})


def test_the_state_is_restored_with_its_names():
    optimizer, _ = stepped(small())
    other = adamw(small(), **SETTINGS)
    other.load_state_dict(optimizer.state_dict())
    assert [group["names"] for group in other.param_groups] == [group["names"] for group in groups(small(), 0.1)]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs_over_the_same_groups(momentum, nesterov):
    mine, other = small(), small()
    ours = sgd(mine, lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.01)
    theirs = torch.optim.SGD(groups(other, 0.01), lr=0.1, momentum=momentum, nesterov=nesterov, foreach=False)
    for step in range(3):
        for model, optimizer in ((mine, ours), (other, theirs)):
            model(torch.arange(8).view(1, 8) + step).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))


def test_nesterov_without_a_momentum_is_refused():
    with pytest.raises(ConfigError, match="--optim.nesterov .*--optim.momentum"):
        sgd(small(), lr=0.1, momentum=0.0, nesterov=True)


@pytest.mark.parametrize("exact", [False, True])
def test_the_configurations_optimizer(exact):
    optim = Optim(beta1=0.8, beta2=0.7, eps=1e-6, weight_decay=0.3, decay_embeddings=True)
    made = make_optimizer(small(), Config(lr=0.5, optim=optim, exact=exact))
    values = {key: made.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay", "fused")}
    assert values == {"lr": 0.5, "betas": (0.8, 0.7), "eps": 1e-6, "weight_decay": 0.3, "fused": not exact}
    assert "tokens.weight" in made.param_groups[0]["names"]
    config = resolve(
        Config(optim=Optim(name="sgd", momentum=0.5), exact=exact), Facts.of(Ragged(), small(), 100)
    ).config
    plain = make_optimizer(small(), config)
    assert (type(plain).__name__, plain.param_groups[0]["momentum"], plain.param_groups[0]["lr"]) == ("SGD", 0.5, 0.01)
