"""Which layers get adapters, and that every one of them is heard, in training and in an evaluation."""

import re

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.models.lora import Adapters, base_names, chosen_targets, inject, merge, plain_name, trained_names

pytest.importorskip("peft", reason="the extra peft is not installed")


def adapted(model, wanted="", dtype=torch.float64):
    targets = chosen_targets(model, wanted)
    inject(model, Adapters(2, 6.0, 0.0, targets.said, targets.turned), dtype)
    for name in trained_names(model, ()):
        nn.init.normal_(model.get_parameter(name))
    return targets


def test_an_evaluation_of_torchs_own_layers_hears_the_adapters():
    """Their fast path reads weights by itself, without calling the layers."""
    torch.manual_seed(0)
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        plain = {name: p.clone() for name, p in model.state_dict().items()}
        targets = adapted(model)
        assert targets.names == [f"layers.{k}.linear{n}" for k in (0, 1) for n in (1, 2)], "not the attention's own"
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        training = model.train()(x)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), training)
            whole = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            whole.load_state_dict(merge(model))
            torch.testing.assert_close(whole.eval()(x), training)
        assert {plain_name(name) for name in base_names(model, ())} == plain.keys()
        assert all(torch.equal(model.state_dict()[name], plain[plain_name(name)]) for name in base_names(model, ()))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Tower(nn.Module):
    """Layers whose last names are also those of others, and a head that is tied."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.up = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("", ["up.1", "up.2.0"]),
        ("up.1", ["up.1"]),
        ("0", ["up.2.0"]),
        ("up.*", ["up.1", "up.2.0"]),
        ("head, 1", ["up.1", "head"]),
    ],
)
def test_what_peft_adapts_is_what_was_chosen(wanted, names):
    model = Tower()
    targets = adapted(model, wanted)
    assert targets.names == names
    found = {name.partition(".lora_")[0] for name in trained_names(model, ())}
    assert found == set(names)
    if isinstance(targets.said, str):
        assert [name for name in names if not re.fullmatch(targets.said, name)] == []
    assert all(p.requires_grad is (".lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("model", "wanted", "line"),
    [
        (Tower(), "upp.1", "'upp.1' matches no linear layer; did you mean up.1"),
        (Tower(), "table", "'table' is table, a Embedding, "),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "", "--lora.rank: "),
    ],
)
def test_what_is_no_target_is_named(model, wanted, line):
    with pytest.raises(ConfigError, match=line):
        chosen_targets(model, wanted)
