"""Rules for groups: patterns, layer-wise decay, freezing, each against a table by hand; and what is wrong in them."""

import math
import warnings

import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config, mark
from torch import nn
from toys import Ragged, taken

import lockstep
from lockstep import cli
from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.engines.blocks import repeated_layers
from lockstep.errors import ConfigError
from lockstep.optim.groups import GroupRule, Rules, freeze, groups, parse
from lockstep.optim.optimizers import adam, make_optimizer
from lockstep.training.summary import show_groups


class Deep(nn.Module):
    """Three layers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, x):
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(x))


def table(model, text="", layer_decay=1.0, lr=1.0, weight_decay=0.1):
    """{name: (rate, decay)} of what is trained."""
    rules = Rules(parse(text), layer_decay, repeated_layers(model))
    freeze(model, rules)
    found = groups(model, weight_decay, rules=rules, lr=lr)
    return {name: (group.get("lr", lr), group["weight_decay"]) for group in found for name in group["names"]}


PLAIN = {
    "tokens.weight": (1.0, 0.0),
    **{f"layers.{k}.weight": (1.0, 0.1) for k in range(3)},
    **{f"layers.{k}.bias": (1.0, 0.0) for k in range(3)},
    "norm.weight": (1.0, 0.0),
    "norm.bias": (1.0, 0.0),
    "head.weight": (1.0, 0.1),
}


def test_first_matching_pattern_sets_rate_decay_or_frozen():
    assert table(Deep()) == PLAIN
    found = table(Deep(), "layers.0.*: lr=10x ;*.bias: decay=0.5, lr=0.25;  head.*: lr=3x; tokens.*: freeze")
    wanted = PLAIN | {
        "layers.0.weight": (10.0, 0.1),
        "layers.0.bias": (10.0, 0.0),
        "layers.1.bias": (0.25, 0.5),
        "layers.2.bias": (0.25, 0.5),
        "norm.bias": (0.25, 0.5),
        "head.weight": (3.0, 0.1),
    }
    del wanted["tokens.weight"]
    assert found == wanted
    assert parse("a: lr=0; b*: lr=2x, decay=0") == [GroupRule("a", lr=0.0), GroupRule("b*", times=2.0, decay=0.0)]
    assert parse(" ; ") == []


def test_layers_decay_by_their_depth_and_none_exceeds_the_base():
    """d ** (L + 1 - k) by hand: embeddings 1/16, layers 1/8, 1/4, 1/2, what comes after 1."""
    found = table(Deep(), layer_decay=0.5, lr=2.0)
    assert {name: rate for name, (rate, _) in found.items()} == {
        "tokens.weight": 2.0 / 16,
        **{f"layers.{k}.{each}": 2.0 / (8, 4, 2)[k] for k in range(3) for each in ("weight", "bias")},
        **dict.fromkeys(("norm.weight", "norm.bias", "head.weight"), 2.0),
    }
    tied = Deep()
    tied.head.weight = tied.tokens.weight
    assert table(tied, layer_decay=0.5)["tokens.weight"] == (1 / 16, 0.0), "a tied head is the embedding"
    both = table(Deep(), "layers.1.*: lr=10x; head.*: lr=7", layer_decay=0.5)
    assert (both["layers.1.weight"][0], both["head.weight"][0]) == (10 / 4, 7.0)  # a rate of its own is just that


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("head", "'head' is not of the form PATTERN: lr=RATE, decay=NUMBER; or PATTERN: freeze"),
        (": lr=1", "is not of the form"),
        ("head.*:", "is not of the form"),
        ("head.*: rate=1", "'rate=1' is none of lr=RATE, lr=NUMBERx, decay=NUMBER, freeze"),
        ("head.*: lr", "--optim.groups .*'' is not a"),
        ("head.*: lr=x", "--optim.groups .*'x'"),
        ("head.*: lr=-1", "--optim.groups .*'-1'"),
        ("head.*: decay=inf", "--optim.groups .*'inf'"),
        ("head.*: lr=1, freeze", "--optim.groups .*frozen"),
        ("hed.*: lr=1", r"'hed.\*' matches no parameter; did you mean head.\*\?"),
        ("zzzz: lr=1", "--optim.groups: 'zzzz' .*tokens.weight"),
        ("*: lr=1; head.*: lr=2", r"--optim.groups: 'head.\*' .*'\*' before it"),
    ],
)
def test_what_is_wrong_with_a_rule_is_one_line(text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        table(Deep(), text)
    assert "\n" not in str(caught.value)


def test_nothing_to_train_and_missing_layers_are_refused():
    with pytest.raises(ConfigError, match="requires_grad"):
        table(Deep(), "*: freeze")
    with pytest.raises(ConfigError, match=r"--optim.layer-decay: the model has no list of repeated layers"):
        table(nn.Linear(2, 2), layer_decay=0.5)


def test_adam_is_torchs_with_its_own_decay():
    mine, other = Deep(), Deep()
    other.load_state_dict(mine.state_dict())
    ours = adam(mine, lr=0.1, weight_decay=0.01, fused=False)
    theirs = torch.optim.Adam(groups(other, 0.01), lr=0.1, foreach=False)
    for step in range(3):
        for model, optimizer in ((mine, ours), (other, theirs)):
            model((torch.arange(8) + step) % 8).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))
    made = make_optimizer(Deep(), Config(lr=0.1, optim=Optim(name="adam", weight_decay=0.0, beta2=0.99)))
    assert (type(made).__name__, made.param_groups[0]["betas"]) == ("Adam", (0.9, 0.99))


RULED = {"groups": "*.bias: lr=4x, decay=0; *embedding*: freeze", "layer_decay": 0.5}


def ruled(world, folder, engine, exact, dtype=torch.float32):
    settings = Config(
        experiment_name="r",
        save_dir=str(folder),
        engine=engine,
        exact=exact,
        max_steps=5,
        batch_size=8,
        micro_batch_size=2,
        lr=0.01,
        ckpt_freq=0,
        optim=RULED,
    )
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    taken(settings, Ragged(dtype=dtype), world)
    return mark(folder)[0]


def test_rules_are_bitwise_on_every_engine_and_world(tmp_path):
    alone = ruled(None, tmp_path / "one", "single", True)
    for engine in ("ddp", "zero", "fsdp"):
        assert run(ruled, 2, tmp_path / engine, engine, True) == [alone, alone]


def test_a_task_with_its_own_optimizer_has_its_own_groups(tmp_path):
    class Own(Ragged):
        def optimizer(self, model, config):
            return torch.optim.SGD(model.parameters(), lr=0.1)

    for optim, flag in ((RULED, "--optim.groups"), ({"layer_decay": 0.5}, "--optim.layer-decay")):
        config = Config(save_dir=str(tmp_path), max_steps=1, optim=optim | {"groups": optim.get("groups", "")})
        with refuses(ConfigError, flag):
            lockstep.train(config, Own())
    assert not list(tmp_path.iterdir())


def _file(folder):
    path = folder / "mine.py"
    path.write_text(
        "import lockstep, torch\nfrom test_groups import Deep\n\n\nclass Mine(lockstep.Task):\n"
        "    def model(self):\n        return Deep()\n\n"
        "    def dataset(self, split):\n        return [torch.arange(3) + k for k in range(4)]\n\n"
        "    def loss(self, model, batch):\n        return model(batch).logsumexp(-1).sum()\n"
    )
    return path


def test_show_groups_asks_no_run_that_lies_there(tmp_path, capsys):

    lockstep.train(config(tmp_path, max_steps=1, task=f"{_file(tmp_path)}:Mine"))
    capsys.readouterr()
    show_groups(config(tmp_path, max_steps=1, task=f"{tmp_path}/mine.py:Mine", optim={"layer_decay": 0.5}))
    assert "layers.0.weight" in capsys.readouterr().out


def test_show_groups_prints_them_and_trains_nothing(tmp_path, monkeypatch, capsys):
    _file(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ["--task", "mine.py:Mine", "--optim.layer-decay", "0.5", "--optim.groups", "tokens.*: freeze", "--lr", "1"]
    assert cli.dispatch(["train", "--show-groups", *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["group", "tensors", "parameters", "lr", "weight", "decay", "names"]
    assert [row[:6] for row in rows[1:] if row[0] == "0"] == [["0", "1", "16", "0.125", "0.01", "layers.0.weight"]]
    assert [row[:4] for row in rows if row[0] == "frozen"] == [["frozen", "1", "32", "tokens.weight"]]
    assert math.prod(float(row[3]) for row in rows[1:] if row[0].isdigit()) > 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py"]
