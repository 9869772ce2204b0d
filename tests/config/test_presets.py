"""Presets set defaults and nothing else; the source document's schedule is torch's own."""

import dataclasses

import pytest
import torch
from refusals import refuses

from lockstep.config.cli import PRESETS, describe_preset, flatten, parse, read_toml, to_toml
from lockstep.config.fields import is_hub_name
from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.optim.schedule import factor

HUB = ["--model-name", "openai-community/gpt2", "--dataset-name", "tatsu-lab/alpaca"]


def test_the_preset_is_taken_where_model_and_data_are_on_the_hub():
    assert parse(HUB).preset == "source"
    assert (parse(HUB).lr, parse(HUB).ckpt_freq, parse(HUB).optim.floor) == (3e-5, 500, 0.01)
    assert parse(HUB[:2]).preset == parse([]).preset == parse([*HUB, "--model.pretrained"]).preset == "auto"
    assert parse([*HUB, "--preset", "none"]).lr == Config().lr
    assert parse(["--preset", "source"]).lr == 3e-5
    assert flatten(parse([])) == flatten(Config())


def test_flags_and_files_win_over_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("lr = 0.5\nbatch_size = 4\n[optim]\nperiod = 7\n")
    config = parse([*HUB, "--config", str(file), "--batch-size", "6"])
    assert (config.lr, config.batch_size, config.optim.period, config.num_epochs) == (0.5, 6, 7, 100)
    assert "batch 6" in describe_preset(config)
    assert "up to 1024 tokens" in describe_preset(config)
    assert "blocks of 32 tokens" in describe_preset(parse([*HUB, "--seq-len", "32"]))
    assert "over 7 steps" in describe_preset(config)


def test_what_has_no_effect_beside_a_flag_is_left_out_of_it():
    linear = parse([*HUB, "--optim.schedule", "linear"])
    assert (linear.optim.period, linear.optim.floor, linear.optim.beta2) == (0, 0.01, 0.999)
    assert "(linear to 1%)" in describe_preset(linear)
    assert parse([*HUB, "--optim.name", "sgd"]).optim == dataclasses.replace(
        parse(HUB).optim, name="sgd", beta2=Config().optim.beta2
    )
    with refuses(ConfigError, "--optim.period", "--optim.schedule linear"):
        parse([*HUB, "--optim.schedule", "linear", "--optim.period", "1000"])


def test_every_preset_option_exists_and_is_read_back(tmp_path):
    for name, values in PRESETS.items():
        config = parse(["--preset", name])
        assert values.items() <= flatten(config).items()
        (tmp_path / "config.toml").write_text(to_toml(config))
        assert parse(["--config", str(tmp_path / "config.toml")]) == config
        assert read_toml(tmp_path / "config.toml")["preset"] == name


def test_a_hub_name_is_owner_and_name_and_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert is_hub_name("openai-community/gpt2")
    for name in ("gpt2", "builtin:nano", "./a/b", "../a", "/a/b", "a/b/c", "here/model", "a/", ""):
        assert not is_hub_name(name)


@pytest.mark.parametrize(("period", "floor"), [(1000, 0.01), (7, 0.0)])
def test_the_periodic_cosine_is_torchs(period, floor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=period, eta_min=3e-5 * floor)
    for step in range(3 * period):
        mine = 3e-5 * factor(step, period, 0, floor, "cosine-periodic")
        assert mine == pytest.approx(schedule.get_last_lr()[0], rel=1e-6, abs=1e-12)
        optimizer.step()
        schedule.step()
