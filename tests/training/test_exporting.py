"""`lockstep export` of whole runs: what transformers and peft open has the run's own logits, and its tokenizer."""

import warnings

import hub_files
import pytest
import torch
from refusals import refuses
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.cli import dispatch
from lockstep.config import cli
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.models.hf import HubTokenizer
from lockstep.training.inference import InferenceRequest, load_run

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytestmark = pytest.mark.usefixtures("no_network")

TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}  # the square of {i}\n\n" for i in range(900))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "code.txt").write_text(TEXT)
    return ["--dataset-name", str(tmp_path / "code.txt"), "--seq-len", "32", "--device", "cpu", "--log-freq", "1"]


def train(folder, text, *argv):
    argv = [*text, "--save-dir", str(folder), "--batch-size", "4", "--micro-batch-size", "2", *argv]
    return lockstep.train(cli.parse(argv))


def logits(model, ids):
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("task", [[], ["--task", "causal-lm"]], ids=["default", "named"])
def test_the_built_in_gpt_with_its_tokenizer(tmp_path, text, capsys, task):
    argv = ["--experiment-name", "gpt", "--max-steps", "4", "--data.vocab-size", "300", "--eval-freq", "2", *task]
    train(tmp_path, text, *argv, "--lr", "0.02")
    assert dispatch(["export", str(tmp_path / "gpt"), str(tmp_path / "hf"), "--format", "hf", "--best"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with load_run(InferenceRequest(str(tmp_path / "gpt"), "best")) as used:
        corpus, ids = used.task.corpus, torch.randint(299, (2, 31))
        assert torch.equal(logits(theirs, ids), logits(used.model.eval(), ids)), "bit for bit"
    written = "def function_7(x):\n    return x  # köln 🙂 can 't"
    assert tokenizer(written)["input_ids"] == corpus.encode(written)
    assert tokenizer.decode(corpus.encode(written)) == written
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (corpus.separator, corpus.separator)
    settings = theirs.generation_config
    assert (settings.eos_token_id, settings.temperature, settings.top_k) == (corpus.separator, 0.8, 50)


class Own(Ragged):
    def model(self):
        return GPT(GPTConfig(layers=1, heads=2, width=16, vocab_size=29, context=16))


def test_the_heads_of_an_own_gpt_are_those_that_it_had(tmp_path):
    run = lockstep.Run(config(tmp_path, max_steps=1, precision="float32"), Own())
    run()
    assert dispatch(["export", str(tmp_path / "r"), str(tmp_path / "hf"), "--format", "hf"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert theirs.config.n_head == 2
    ids = torch.randint(29, (2, 12))
    assert torch.equal(logits(theirs, ids), logits(run.model.eval(), ids))


def test_adapters_open_in_peft_and_merged_in_transformers(tmp_path, text, capsys):
    peft = pytest.importorskip("peft", reason="the extra peft is not installed")
    base = hub_files.write_model(tmp_path / "base", weights=True)
    argv = ["--model-name", str(base), "--model.pretrained", "--lora.rank", "2", "--lr", "0.05", "--max-steps", "3"]
    train(tmp_path, text, "--experiment-name", "tuned", *argv)
    run, ids = tmp_path / "tuned", torch.randint(300, (2, 20))
    with load_run(InferenceRequest(str(run))) as used:
        wanted = logits(used.model.eval(), ids)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    assert not torch.equal(wanted, logits(plain, ids))
    assert dispatch(["export", str(run), str(tmp_path / "adapters"), "--format", "peft"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    assert torch.equal(logits(theirs, ids), wanted)
    assert theirs.peft_config["default"].base_model_name_or_path == str(base)
    assert dispatch(["export", str(run), str(tmp_path / "whole"), "--format", "hf", "--merge"]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    torch.testing.assert_close(logits(whole, ids), wanted, rtol=1e-5, atol=1e-5)
    assert whole.generation_config.eos_token_id == 0
    mine, others = HubTokenizer(str(base), cache=tmp_path, say=print), tmp_path / "whole"
    assert (
        transformers.AutoTokenizer.from_pretrained(others)("three rivers")["input_ids"]
        == mine.encode_all(["three rivers"])[0]
    )
    with refuses(ConfigError, "--format hf", "--format peft", "--merge"):
        dispatch(["export", str(run), str(tmp_path / "no"), "--format", "hf"])
    capsys.readouterr()
    assert dispatch(["evaluate", str(run), "--json"]) == 0
    assert dispatch(["generate", str(run), "--prompt", "def ", "--max-tokens", "5"]) == 0
    assert dispatch(["checkpoint", "inspect", str(run)]) == 0
    assert "fingerprint sha256:" in capsys.readouterr().out


def test_what_does_not_go_together(tmp_path):
    lockstep.train(config(tmp_path, max_steps=1, precision="float32"), Ragged())
    for flags, kind, flag in (
        (["--merge"], ConfigError, "--merge"),
        (["--format", "peft"], CheckpointError, "--format hf"),
    ):
        with refuses(kind, flag):
            dispatch(["export", str(tmp_path / "r"), str(tmp_path / "out"), *flags])
    assert [each.name for each in tmp_path.iterdir()] == ["r"]
