"""Models of `transformers`: the same numbers as the package's own, the same bits on every rank, no code unasked."""

import json
import subprocess
import sys

import hub_files
import pytest
import torch
from ranks import run

from lockstep import checkpoint
from lockstep.errors import ConfigError
from lockstep.models.chunked_loss import summed_cross_entropy
from lockstep.models.hf import HubModel, HubTokenizer, logits_of, repeated_blocks
from lockstep.transforms import prepare

pytestmark = pytest.mark.usefixtures("no_network")

IDS = torch.arange(24).reshape(2, 12) * 11 % 300


def opened(folder, tmp_path, **settings):
    return HubModel(str(folder), cache=tmp_path, say=print, **settings)


def bits(model):
    return checkpoint.fingerprint_of(model.state_dict())


def test_logits_and_loss_are_those_of_the_package(weights_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = opened(weights_folder, tmp_path).build(vocab_size=300, dtype=torch.float32, pretrained=True).eval()
    theirs = AutoModelForCausalLM.from_pretrained(weights_folder).eval()
    expected = theirs(input_ids=IDS, labels=IDS)
    found = logits_of(model, IDS)
    assert torch.equal(found, expected.logits)
    labels = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)  # what a sample of blocks holds
    mean = summed_cross_entropy(found, labels) / (labels != -100).sum()
    torch.testing.assert_close(mean, expected.loss)


def test_a_model_is_drawn_from_the_default_generator(model_folder, tmp_path):
    source = opened(model_folder, tmp_path)
    assert (source.vocab_size, source.context, source.revision) == (300, 64, "")
    marks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = source.build(vocab_size=300, dtype=torch.float32)
        marks.append(bits(model))
    assert marks[0] == marks[1] != marks[2]
    assert model.training
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"
    assert [type(block).__name__ for block in repeated_blocks(model)] == ["GPT2Block", "GPT2Block"]
    assert repeated_blocks(torch.nn.Linear(1, 1)) == []


def test_a_model_takes_the_dtype_and_another_vocabulary(model_folder, tmp_path):
    model = opened(model_folder, tmp_path).build(vocab_size=270, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert logits_of(model, IDS % 270).shape == (2, 12, 270)


def test_rotary_frequencies_are_not_rounded(tmp_path):
    from transformers import LlamaConfig

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=300, architectures=["LlamaForCausalLM"], **shape).save_pretrained(tmp_path / "llama")
    model, wanted = (
        prepare(
            opened(tmp_path / "llama", tmp_path).build(vocab_size=300, dtype=dtype),
            precision=precision,
            compile_model=False,
            device=torch.device("cpu"),
        )
        for dtype, precision in ((torch.bfloat16, "bf16-true"), (torch.float32, "float32"))
    )
    tables = dict(wanted.named_buffers())
    assert tables
    assert all(torch.equal(tables[name], table) for name, table in model.named_buffers())
    assert logits_of(model, IDS).dtype is torch.bfloat16


def pretrained_bits(world, folder, cache):
    return bits(opened(folder, cache).build(vocab_size=300, dtype=torch.float32, pretrained=True))


def test_pretrained_weights_are_bitwise_on_one_and_two_ranks(weights_folder, tmp_path):
    from safetensors.torch import load_file

    [one] = run(pretrained_bits, 1, weights_folder, tmp_path)
    assert run(pretrained_bits, 2, weights_folder, tmp_path) == [one, one]
    model = opened(weights_folder, tmp_path).build(vocab_size=300, dtype=torch.float32, pretrained=True)
    assert bits(model) == one
    for name, tensor in load_file(weights_folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor)


MEASURE = """
import resource, sys, torch
from pathlib import Path
from lockstep.models.hf import HubModel
source = HubModel(sys.argv[1], cache=Path(sys.argv[1]), say=print)
import transformers.models.gpt2.modeling_gpt2, safetensors.torch
before = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")][0]
model = source.build(vocab_size=0, dtype=torch.float32, pretrained=True)
peak = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")][0]
size = sum(p.numel() * 4 for p in model.parameters()) / 1024
print((peak - before) / size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_in_a_ranks_memory_once(tmp_path):
    hub_files.write_model(tmp_path, weights=True, n_embd=512, n_layer=12)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    private = float(done.stdout.split()[0])
    assert private < 1.3, done.stdout  # of the parameters' size; the file's own pages belong to all ranks of the node


CODE = """
import pathlib
from transformers import GPT2Config, GPT2LMHeadModel
pathlib.Path(r"{mark}").touch()

class OddConfig(GPT2Config):
    model_type = "odd"

class OddModel(GPT2LMHeadModel):
    config_class = OddConfig
"""


@pytest.fixture
def odd_folder(tmp_path, monkeypatch):
    """A model that brings code, which leaves a file behind when it runs."""
    folder = tmp_path / "odd"
    hub_files.write_model(folder)
    values = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddModel"}
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "odd", "auto_map": auto}))
    (folder / "odd.py").write_text(CODE.format(mark=tmp_path / "ran"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_code_that_a_model_brings_runs_only_when_asked_for(odd_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"Python code.*--model.trust-remote-code.*--model.revision"):
        opened(odd_folder, tmp_path)
    assert not (tmp_path / "ran").exists()
    model = opened(odd_folder, tmp_path, trust_remote_code=True).build(vocab_size=300, dtype=torch.float32)
    assert (tmp_path / "ran").exists()
    assert type(model).__name__ == "OddModel"


def test_weights_that_could_hold_code_are_not_read(tmp_path, model_folder):
    folder = hub_files.write_model(tmp_path / "pickled")
    source = opened(model_folder, tmp_path)
    torch.save(source.build(vocab_size=300, dtype=torch.float32).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no safetensors weights"):
        opened(folder, tmp_path).build(vocab_size=300, dtype=torch.float32, pretrained=True)


def test_a_missing_package_says_what_to_install(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="install the extra hf of torch-lockstep"):
        opened(model_folder, tmp_path)


def test_what_is_no_model_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match="--model-name") as caught:
        opened(tmp_path, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_a_network_ends_at_once(tmp_path):
    said = []
    with pytest.raises(ConfigError, match=r"hub is unreachable; .*hf download some-one/some-model.*HF_HOME") as caught:
        HubModel("some-one/some-model", cache=tmp_path, say=said.append)
    assert "\n" not in str(caught.value)
    assert len(said) == 1
    assert "does not answer" in said[0]


def test_a_tokenizer_is_what_it_was_saved_as(model_folder, tmp_path):
    tokenizer = HubTokenizer(str(model_folder), cache=tmp_path, say=print)
    [tokens] = tokenizer.encode_all(["three rivers köln"])
    assert tokenizer.decode([*tokens, tokenizer.separator]) == "three rivers köln"
    assert (tokenizer.vocab_size, tokenizer.separator) == (300, 0)
    tokenizer.save(tmp_path / "again")
    assert HubTokenizer(str(tmp_path / "again"), cache=tmp_path, say=print).fingerprint == tokenizer.fingerprint
