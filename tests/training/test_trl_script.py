"""`lockstep train --hf-script`: the scripts that trl installs, as they are, with the YAML file of their `--config`."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch
from refusals import refuses

from lockstep import checkpoint
from lockstep.errors import ConfigError

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from lockstep.adapters.hf_trainer.flags import Script, find_script  # noqa: E402
from lockstep.training.hf_script import run_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "adapters")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def written(folder, kind, **more):
    return Script(*importlib.import_module("trl_trainers").write_script(folder, kind, **more))


def saved(folder):
    import safetensors.torch

    (file,) = (folder / "out").glob("*.safetensors")
    return safetensors.torch.load_file(file)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("dpo", {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "gradient_accumulation_steps": 2}),
        pytest.param("sft", {"packing": False}, marks=pytest.mark.slow),
        pytest.param("reward", {"center_rewards_coefficient": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_the_scripts_of_trl_save_what_trl_would_have_trained(tmp_path, monkeypatch, kind, more):
    theirs = written(tmp_path / "theirs", kind, **more)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", [str(theirs.path), "--config", str(theirs.arguments)])
        runpy.run_path(str(theirs.path), run_name="__main__")
    ours = written(tmp_path / "ours", kind, **more)
    assert run_script(ours, {}) == 0
    assert checkpoint.list_steps(tmp_path / "ours" / "out") == [4]
    expected = saved(tmp_path / "theirs")
    for name, tensor in saved(tmp_path / "ours").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=name)


def test_the_yaml_file_is_checked_before_torch_is_loaded(tmp_path):
    script = tmp_path / "run.py"
    script.touch()
    for text, said in (("a: [", "is not a YAML file"), ("- 1", "must be one JSON object")):
        (tmp_path / "args.yaml").write_text(text)
        with refuses(ConfigError, "--hf-args", said):
            find_script({"hf_script": str(script), "hf_args": str(tmp_path / "args.yaml")}, {})
    (tmp_path / "args.yaml").write_text("max_steps: 4\n")
    found = find_script({"hf_script": str(script), "hf_args": str(tmp_path / "args.yaml")}, {})
    assert found == Script(script, tmp_path / "args.yaml")
