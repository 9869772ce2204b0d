"""Muon for hidden matrices with AdamW for the rest: which parameters are whose, and torch's own bits."""

import copy

import pytest
import torch
from refusals import refuses
from test_groups import Deep
from torch import nn
from toys import Ragged

from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.engines.blocks import repeated_layers
from lockstep.engines.registry import check_optimizer
from lockstep.errors import ConfigError
from lockstep.optim.groups import Rules, parse
from lockstep.optim.muon import MuonAdamW
from lockstep.optim.optimizers import make_optimizer, muon, rules_of
from lockstep.training.start.defaults import describe_optimizer
from lockstep.training.start.resolve import Facts, resolve
from lockstep.training.summary import group_rows


def made_for(model, text="", layer_decay=1.0, **settings):
    rules = Rules(parse(text), layer_decay, repeated_layers(model))
    return muon(model, rules=rules, **{"lr": 0.01, "muon_lr": 0.02, "fused": False, "weight_decay": 0.1} | settings)


def table(optimizer, model):
    """{name: (whether Muon's, rate, decay)}."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[p]: (group["muon"], group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


PLAIN = {
    "tokens.weight": (False, 1.0, 0.0),
    **{f"layers.{k}.weight": (True, 2.0, 0.1) for k in range(3)},
    **{f"layers.{k}.bias": (False, 1.0, 0.0) for k in range(3)},
    "norm.weight": (False, 1.0, 0.0),
    "norm.bias": (False, 1.0, 0.0),
    "head.weight": (False, 1.0, 0.1),
}


def test_matrices_within_layers_are_muons_and_all_else_is_adamws():
    model = Deep()
    assert table(made_for(model, lr=1.0, muon_lr=2.0), model) == PLAIN
    text = "layers.0.*: lr=10x; layers.1.weight: adamw; head.*: muon, lr=0.25; *.bias: lr=3x; layers.2.*: decay=0.5"
    found = table(made_for(model, text, lr=1.0, muon_lr=2.0), model)
    assert found == PLAIN | {
        "layers.0.weight": (True, 20.0, 0.1),
        "layers.0.bias": (False, 10.0, 0.0),
        "layers.1.weight": (False, 1.0, 0.1),
        "layers.1.bias": (False, 3.0, 0.0),
        "layers.2.weight": (True, 2.0, 0.5),
        "layers.2.bias": (False, 3.0, 0.0),
        "norm.bias": (False, 3.0, 0.0),
        "head.weight": (True, 0.25, 0.1),
    }
    found = table(made_for(model, layer_decay=0.5, lr=1.0, muon_lr=2.0), model)
    assert [found[f"layers.{k}.weight"][1] for k in range(3)] == [1 / 4, 1 / 2, 1.0]
    assert found["tokens.weight"][1] == 1 / 16
    assert [row[0] for row in group_rows(model, made_for(model))] == ["0", "1", "2 muon"]


def test_without_repeated_layers_the_last_matrix_is_the_head():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.Conv1d(6, 6, 3), nn.Linear(6, 5), nn.Linear(5, 2))
    found = table(made_for(model), model)
    assert [name for name, (muons, *_) in found.items() if muons] == ["1.weight", "3.weight"]


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        (nn.Linear(2, 2), "", "--optim.name muon: .*no hidden matrix.*--optim.name adamw.*--optim.groups"),
        (nn.Linear(2, 2), "*: muon", r"'\*: muon': bias .*\[2\]"),
        (Deep(), "layers.*: adamw", "no hidden matrix"),
        (Deep(), "head.*: muon, freeze", "--optim.groups .*frozen"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        made_for(model, text)
    assert "\n" not in str(caught.value)


def test_the_words_of_rules_are_muons_alone():
    with pytest.raises(ConfigError, match=r"--optim.groups 'head.\*: muon' .*--optim.name muon.*adamw"):
        rules_of(Config(optim=Optim(groups="head.*: muon")))


def inputs(step):
    return torch.arange(8).view(2, 4).roll(step)


def stepped(model, optimizers, steps=range(3)):
    for step in steps:
        model(inputs(step)).logsumexp(-1).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def pair(count=2):
    torch.manual_seed(0)
    model = Deep()
    return [copy.deepcopy(model) for _ in range(count)]


def theirs(model, scale="match_rms_adamw"):
    matrices = [layer.weight for layer in model.layers]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or name == "tokens.weight"]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": [model.head.weight]}]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=scale),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=True),
    ]


@pytest.mark.parametrize(("scale", "name"), [("match-rms", "match_rms_adamw"), ("original", "original")])
def test_the_bits_are_those_of_torchs_two_side_by_side(scale, name):
    mine, other = pair()
    stepped(mine, [made_for(mine, scale=scale)])
    stepped(other, theirs(other, name))
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))


def test_it_is_an_optimizer_like_any_other():
    """Its state goes through state_dict and pickle, a group can be added, and a scheduler sets its rates."""
    mine, other, third = pair(3)
    straight = made_for(mine)
    stepped(mine, [straight])
    broken = made_for(other)
    stepped(other, [broken], range(2))
    assert {tuple(sorted(state)) for state in broken.state.values()} == {
        ("momentum_buffer",),
        ("exp_avg", "exp_avg_sq", "step"),
    }
    again = made_for(third)
    third.load_state_dict(other.state_dict())
    again.load_state_dict(copy.deepcopy(broken.state_dict()))
    stepped(third, [again], range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), third.parameters(), strict=True))
    model, optimizer = copy.deepcopy((other, broken))
    stepped(model, [optimizer], range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), model.parameters(), strict=True))
    added = nn.Parameter(torch.ones(3, 3))
    optimizer.add_param_group({"params": [added], "muon": True, "lr": 0.5})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005, 0.01, 0.25]
    added.grad = torch.eye(3)
    optimizer.step()
    assert not torch.equal(added, torch.ones(3, 3))
    assert optimizer.step(lambda: 7) == 7


def test_the_configurations_muon():
    optim = Optim(name="muon", muon_lr=0.02, muon_scale="original", muon_momentum=0.9, ns_steps=3, beta1=0.8)
    run_plan = resolve(Config(optim=optim), Facts.of(Ragged(), Deep(), 100)).run_plan
    made = make_optimizer(Deep(), run_plan.config, [])
    wanted = {"muon": True, "lr": 0.02, "momentum": 0.9, "ns_steps": 3, "adjust_lr_fn": "original", "nesterov": True}
    assert wanted.items() <= made.param_groups[-1].items()
    assert {"muon": False, "lr": 1e-3, "betas": (0.8, 0.999)}.items() <= made.param_groups[0].items()
    assert describe_optimizer(run_plan).endswith("betas 0.8 and 0.999; matrices: lr 0.02, momentum 0.9")
    plain = resolve(Config(lr=0.5, optim=Optim(name="muon")), Facts.of(Ragged(), Deep(), 100)).config
    assert {group["lr"] for group in make_optimizer(Deep(), plain).param_groups} == {0.5}
    with refuses(ConfigError, "optim.muon_lr", "optim.name adamw", "muon"):
        Config(optim=Optim(muon_lr=0.1))
    with refuses(ConfigError, "optim.muon_scale original", "optim.muon_lr 0.02"):
        Config(optim=Optim(name="muon", muon_scale="original"))
    with pytest.raises(ConfigError, match="--engine deepspeed .*MuonAdamW"):
        check_optimizer("deepspeed", made, exact=False)


def test_a_group_for_muon_that_is_no_matrix_is_torchs_to_refuse():
    with pytest.raises(ValueError, match="only supports 2D"):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(3))], "muon": True}])
