"""`lockstep plan`: what it prints, its exit codes, and what it refuses."""

import json

import pytest
import torch

from lockstep import cli
from lockstep.config import cli as options
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


def test_each_of_several_sizes_and_whether_launches_bound_it(capsys):
    sizes = ("--json", "--fast", "--device", "h100-80", "--world-sizes", "1,2", "--seq-len", "8")
    code, text = said(capsys, *sizes, "--batch-size", "2", "--micro-batch-size", "1")
    one, two = json.loads(text)
    assert code == 0
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["launches_bound"]
    assert one["step_parts"]["compute"] == one["launching_seconds"] > two["launching_seconds"]


def test_flags_of_the_table_are_those_of_train(capsys):
    code, text = said(
        capsys, "--json", "--world-sizes", "2", "--device", "l4-24", "--batch-size", "8", "--seq-len", "32"
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
    flags = ("--world-sizes", "16", "--engine", "fsdp", "--precision", "bf16-true", "--seq-len", "2048")
    code, text = said(capsys, "--model-name", str(tmp_path), "--device", "h100-80", "--json", "--fast", *flags)
    found = json.loads(text)
    assert code == 0
    assert found["parameters"] == 6_738_415_616
    assert found["layers"] == 32
    assert found["parts"]["optimizer states"] == pytest.approx(2 * 2 * found["parameters"] / 16, rel=0.01)
    tokens = 2048  # a step of 16 samples has one on each device
    assert found["flops"] == pytest.approx(6 * found["parameters"] * tokens, rel=0.25)  # and attention's


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--world-sizes", "0"], "--world-sizes is '0'"),
        (["--world-size", "2"], "unknown flag --world-size: did you mean --world-sizes"),
        (["--world-sizes", "1000000000"], "from 1 to 131072"),
        (["--device", ""], "--device '' is unknown: choose from cpu"),
        (["--device", "h100-80", "--memory", "1GB"], "take 1 GiB of it"),
        (["--device", "h1000"], "--device 'h1000' is unknown: did you mean h100-80"),
        (["--memory", "lots"], "--memory 'lots'"),
        (["--engine", "single", "--world-sizes", "2"], "--engine single with 2"),
        (["--engine", "deepspeed", "--world-sizes", "2", "--engine.zero-stage", "3"], "cannot be planned in stage 3"),
        (["--engine", "deepspeed", "--world-sizes", "2", "--engine.cpu-offload"], "states in host memory"),
        (["--engine", "data-parallel"], "--engine data-parallel cannot be planned"),
        (["--model-name", "builtin:gtp2"], "did you mean"),
        (["--seq-len", "1e6"], "--seq-len"),
        (["--exact", "--world-sizes", "4", "--batch-size", "2"], "--exact needs a micro-batch for each of 4 processes"),
        (["--no-such-flag"], "unknown flag"),
    ],
)
def test_bad_input_is_one_line(flags, text):
    with pytest.raises(UsageError) as error:
        cli.dispatch(["plan", "--fast", *flags])
    assert text in str(error.value)
    assert "\n" not in str(error.value)


WRONG = """
import torch
from torch import nn
import lockstep

class Odd(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, place):
        raise KeyError(place)

class Fine(lockstep.Task):
    def model(self):
        return nn.Linear(4, 1)

    def dataset(self, split):
        return torch.ones(64, 4)

    def loss(self, model, batch):
        return model(batch).sum()

class Model(Fine):
    def model(self):
        return undefined

class Nothing(Fine):
    def model(self):
        return None

class Data(Fine):
    def dataset(self, split):
        raise FileNotFoundError("data.bin")

class None_(Fine):
    def dataset(self, split):
        return None

class Sample(Fine):
    def dataset(self, split):
        return Odd()

class Long(torch.utils.data.Dataset):
    def __len__(self):
        raise OSError("odd")

    def __getitem__(self, place):
        return torch.ones(4)

class Length(Fine):
    def dataset(self, split):
        return Long()

class Collate(Fine):
    def collate(self, samples):
        raise TypeError("odd")

class Count(Fine):
    def count(self, batch):
        raise IndexError("odd")

class Uncounted(Fine):
    def count(self, batch):
        return None

class Blocks(Fine):
    def blocks(self, model):
        raise ValueError("odd")

class Shape(Fine):
    def loss(self, model, batch):
        return model(batch[:, :3]).sum()

class Key(Fine):
    def loss(self, model, batch):
        return model(batch).sum() * {}["b"]

class Rates(Fine):
    def model(self):
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
        return nn.Sequential(*(nn.Linear(4, 4) for _ in rates))

class Drawn(Fine):
    def model(self):
        made = nn.Linear(4, 1)
        self.sum = made.weight.detach().numpy().sum()
        return made
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Model", "`model` failed at its plan: NameError: name 'undefined' is not defined (wrong.py:"),
        ("Nothing", "`model` returned None: it must return a torch.nn.Module"),
        ("Data", "`dataset` failed at its plan: FileNotFoundError: data.bin (wrong.py:"),
        ("None_", "dataset('train') returned NoneType"),
        ("Sample", "`dataset` failed at its plan: KeyError: 0 (wrong.py:"),
        ("Length", "`dataset` failed at its plan: OSError: odd (wrong.py:"),
        ("Collate", "`collate` failed at its plan: TypeError: odd (wrong.py:"),
        ("Count", "`count` failed at its plan: IndexError: odd (wrong.py:"),
        ("Uncounted", "`count` failed at its plan: TypeError: "),
        ("Blocks", "`blocks` failed at its plan: ValueError: odd (wrong.py:"),
        ("Shape", "`loss` failed at its plan: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("Key", "`loss` failed at its plan: KeyError: 'b' (wrong.py:"),
    ],
)
def test_a_task_that_fails_is_one_line(name, text, tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    for size in ("1", "2"):
        with pytest.raises(UsageError) as error:
            cli.dispatch(["plan", "--fast", "--task", f"wrong.py:{name}", "--device", "cpu", "--world-sizes", size])
        assert text in str(error.value)
        assert "\n" not in str(error.value)


def test_a_model_that_asks_for_numbers_while_it_is_made(capsys, tmp_path, monkeypatch):
    """Rates of stochastic depth are read from a tensor: no shape depends on them. What asks numpy is measured."""
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    for name, measured in (("Rates", False), ("Drawn", True)):
        code, text = said(capsys, "--fast", "--task", f"wrong.py:{name}", "--device", "cpu")
        assert code == 0
        assert ("measured on this machine" in text) == measured


def test_a_batch_that_this_machine_cannot_hold_is_one_line(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "ones", refuse)
    with pytest.raises(ConfigError, match=r"--micro-batch-size 8: .* 32 tokens .*; lower it"):
        cli.dispatch(["plan", "--fast", "--seq-len", "32", "--batch-size", "8", "--micro-batch-size", "8"])


def test_a_gpu_that_is_not_here_is_not_planned_as_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda:0: .* h100-80"):
        cli.dispatch(["plan", "--fast", "--device", "cuda:0"])


def test_a_model_that_asks_for_numbers_is_measured(capsys, tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text(ASKING)
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, "--task", "asking.py:Asking", "--device", "cpu")
    assert code == 0
    assert "aten._local_scalar_dense" in text
    assert "measured" in text


def test_nothing_stays_behind(capsys):
    before = torch.nn.Module._apply, torch.UntypedStorage.resize_, torch.nn.functional.scaled_dot_product_attention
    said(capsys, "--fast", "--world-sizes", "2", "--device", "cpu")
    after = torch.nn.Module._apply, torch.UntypedStorage.resize_, torch.nn.functional.scaled_dot_product_attention
    assert before == after
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError):
        cli.dispatch(["plan", "--device", "nothing"])
