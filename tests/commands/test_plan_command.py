"""`lockstep plan`: what it prints, its exit codes, and what it refuses."""

import json

import pytest
import torch

from lockstep import cli
from lockstep.config import options
from lockstep.errors import ConfigError, UsageError

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}

ASKING = """
import torch
from torch import nn
import lockstep

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, values):
        found = self.inner(values)
        return found * 2 if found.sum().item() > 0 else found

class Asking(lockstep.Task):
    def model(self):
        return Gate()

    def dataset(self, split):
        return torch.ones(64, 4)

    def loss(self, model, batch):
        return model(batch).sum()
"""


def said(capsys, *flags):
    code = cli.dispatch(["plan", *flags])
    return code, capsys.readouterr().out


def test_one_json_object(capsys):
    code, text = said(capsys, "--json", "--fast", "--device", "t4-16")
    found = json.loads(text)
    assert code == 0
    assert found["fits"]
    assert found["world_size"] == 1
    assert sum(found["parts"].values()) == pytest.approx(found["peak"])
    assert found["parts"]["optimizer states"] == pytest.approx(2 * found["parts"]["parameters"], rel=0.01)
    assert found["config"]["precision"] == "float32"  # this device multiplies no bf16


def test_flags_of_the_table_are_those_of_train(capsys):
    code, text = said(
        capsys, "--json", "--world-size", "2", "--device", "l4-24", "--batch-size", "8", "--seq-len", "32"
    )
    found = json.loads(text)
    assert code == 0
    assert found["ways"]
    assert found["ways"][0]["traced"]
    for way in found["ways"]:
        config = options.parse(way["flags"])
        assert config.batch_size == 8
        assert way["peak"] <= found["device"]["room"]
    rates = [way["samples_per_second"] for way in found["ways"]]
    assert rates == sorted(rates, reverse=True)
    assert found["largest"]["micro_batch_size"] == 8  # the batch


def test_what_does_not_fit_says_what_to_change(capsys, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    code, text = said(capsys, "--model-name", str(tmp_path / "config.json"), "--device", "t4-16", "--batch-size", "1")
    assert code == 3
    assert "does not fit" in text
    assert "change first: " in text


def test_a_model_of_a_file_alone(capsys, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    flags = ("--world-size", "16", "--engine", "fsdp", "--precision", "bf16-true", "--seq-len", "2048")
    code, text = said(capsys, "--model-name", str(tmp_path), "--device", "h100-80", "--json", "--fast", *flags)
    found = json.loads(text)
    assert code == 0
    assert found["parameters"] == 6_738_415_616
    assert found["layers"] == 32
    assert found["parts"]["optimizer states"] == pytest.approx(2 * 2 * found["parameters"] / 16, rel=0.01)
    tokens = 2 * 2048
    assert found["flops"] == pytest.approx(6 * found["parameters"] * tokens, rel=0.25)  # and attention's


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--world-size", "0"], "--world-size 0"),
        (["--device", "h1000"], "--device 'h1000' is not known: did you mean h100-80"),
        (["--memory", "lots"], "--memory 'lots'"),
        (["--engine", "single", "--world-size", "2"], "--engine single with 2"),
        (["--engine", "deepspeed", "--world-size", "2", "--engine.zero-stage", "3"], "cannot be planned in stage 3"),
        (["--engine", "deepspeed", "--world-size", "2", "--engine.cpu-offload"], "states in host memory"),
        (["--engine", "data-parallel"], "--engine data-parallel cannot be planned"),
        (["--model-name", "builtin:gtp2"], "did you mean"),
        (["--seq-len", "1e6"], "--seq-len"),
        (["--exact", "--world-size", "4", "--batch-size", "2"], "--exact cannot serve"),
        (["--no-such-flag"], "unknown flag"),
    ],
)
def test_bad_input_is_one_line(flags, text):
    with pytest.raises(UsageError) as error:
        cli.dispatch(["plan", "--fast", *flags])
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_that_asks_for_numbers_is_measured(capsys, tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text(ASKING)
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, "--task", "asking.py:Asking", "--device", "cpu")
    assert code == 0
    assert "aten._local_scalar_dense" in text
    assert "measured" in text


def test_nothing_stays_behind(capsys):
    before = torch.nn.Module._apply, torch.UntypedStorage.resize_, torch.nn.functional.scaled_dot_product_attention
    said(capsys, "--fast", "--world-size", "2", "--device", "cpu")
    after = torch.nn.Module._apply, torch.UntypedStorage.resize_, torch.nn.functional.scaled_dot_product_attention
    assert before == after
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError):
        cli.dispatch(["plan", "--device", "nothing"])
