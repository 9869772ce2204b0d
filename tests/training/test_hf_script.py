"""`lockstep train --hf-script`: a script that makes a Trainer, run as it stands, and what it finds afterwards."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run
from refusals import refuses

from lockstep import checkpoint, cli
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, UsageError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lockstep.adapters.hf_trainer.flags import Script  # noqa: E402
from lockstep.training.hf_script import run_script  # noqa: E402

# As those of the examples folder: arguments by HfArgumentParser, a file beside it, main() and what follows training.
SCRIPT = """import json
import os
import sys
from dataclasses import dataclass

import beside
from transformers import HfArgumentParser, TrainingArguments


@dataclass
class Mine:
    rows: int = 40


def main():
    parser = HfArgumentParser((Mine, TrainingArguments))
    assert len(sys.argv) == 2
    mine, args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    trainer = beside.made(mine.rows, args)
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=None)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": mine.rows}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
"""
BESIDE = """import sys

sys.path.append({tests!r})
import hf_trainers
from transformers import Trainer


def made(rows, args):
    data = hf_trainers.causal_rows(rows)
    return Trainer(hf_trainers.causal_model(), args, hf_trainers.padded, data, data[:10])
"""


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before, train = torch.get_num_threads(), transformers.Trainer.train
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
    sys.modules.pop("beside", None)
    assert transformers.Trainer.train is train


def written(folder, text=SCRIPT, **more):
    folder.mkdir(exist_ok=True)
    (folder / "run.py").write_text(text)
    (folder / "beside.py").write_text(BESIDE.format(tests=str(Path(__file__).parents[1] / "adapters")))
    given = {"output_dir": str(folder / "out"), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    given |= {"logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "do_train": True}
    (folder / "args.json").write_text(json.dumps({**given, **more}))
    return Script(folder / "run.py", folder / "args.json")


def losses(folder):
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in history if "loss" in entry]


def test_the_script_has_what_its_trainer_would_have_given_it(tmp_path, monkeypatch):
    theirs = written(tmp_path / "theirs", do_eval=True)
    monkeypatch.setattr(sys, "argv", ["run.py", str(theirs.arguments)])
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(theirs.path.parent))
        names = {"__name__": "__main__"}
        exec(compile(SCRIPT, "run.py", "exec"), names)
    sys.modules.pop("beside")
    ours = written(tmp_path / "ours", do_eval=True)
    assert run_script(ours, {}) == 0
    assert [place for place, *_ in losses(tmp_path / "ours")] == [1, 2, 3, 4]
    for mine, other in zip(losses(tmp_path / "ours"), losses(tmp_path / "theirs"), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    found = {who: json.loads((tmp_path / who / "out" / "all_results.json").read_text()) for who in ("ours", "theirs")}
    for name in ("train_loss", "eval_loss", "epoch", "train_samples"):
        assert found["ours"][name] == pytest.approx(found["theirs"][name], abs=1e-5)
    saved = [transformers.GPT2LMHeadModel.from_pretrained(tmp_path / who / "out") for who in ("ours", "theirs")]
    for (name, mine), other in zip(saved[0].named_parameters(), saved[1].parameters(), strict=True):
        if name.endswith("c_attn.bias"):  # the keys' has a gradient of 0 but for rounding, which Adam makes a step of
            mine, other = (torch.cat([bias[:16], bias[32:]]) for bias in (mine, other))
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    state = json.loads((tmp_path / "ours" / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert checkpoint.list_steps(tmp_path / "ours" / "out") == [4]


def test_options_of_the_run_win_and_it_is_resumed_by_its_folder(tmp_path):
    script = written(tmp_path / "a", num_train_epochs=3, save_strategy="steps", save_steps=2)
    assert run_script(script, {"stop_at": 2, "optim.clip": 0.5, "experiment_name": "mine"}) == 0
    assert checkpoint.list_steps(tmp_path / "a" / "mine") == [2]
    assert "clip = 0.5" in (tmp_path / "a" / "mine" / "config.toml").read_text()
    assert run_script(script, {"num_epochs": 1, "experiment_name": "whole"}) == 0  # of ten steps, in place of max_steps
    assert checkpoint.list_steps(tmp_path / "a" / "whole")[-1] == 10
    assert run_script(script, {"optim.clip": 0.5, "experiment_name": "mine"}) == 0
    assert losses(tmp_path / "a")[-1][0] == 4
    assert len(losses(tmp_path / "a")) == 4  # those of the first start too


@pytest.mark.parametrize("more", [{}, {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True}])
def test_a_run_that_is_shorter_than_its_log_has_a_loss(tmp_path, more):
    """With a collator that the script itself defines, in a loader process."""
    text = SCRIPT.replace("    if args.do_train:", "    trainer.data_collator = padded\n    if args.do_train:")
    text = text.replace("@dataclass", "def padded(rows):\n    return beside.hf_trainers.padded(rows)\n\n\n@dataclass")
    script = written(tmp_path / "a", text, logging_steps=500, dataloader_num_workers=1, **more)
    assert run_script(script, {}) == 0
    found = json.loads((tmp_path / "a" / "out" / "all_results.json").read_text())
    assert 3 < found["train_loss"] < 5


def on_ranks(world, script):
    world.leave()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    code = run_script(Script(*script), {"engine": "fsdp", "exact": True, "batch_size": 8})
    dist.destroy_process_group()
    return code


@pytest.mark.slow
def test_on_two_ranks_under_fsdp_the_script_saves_the_whole_model(tmp_path):
    assert run_script(written(tmp_path / "one"), {"exact": True, "batch_size": 8}) == 0
    assert run(on_ranks, 2, tuple(written(tmp_path / "two")), timeout=180.0) == [0, 0]
    saved = [transformers.GPT2LMHeadModel.from_pretrained(tmp_path / who / "out") for who in ("one", "two")]
    for mine, other in zip(*(model.parameters() for model in saved), strict=True):
        assert torch.equal(mine, other)


def test_the_best_model_is_what_the_script_goes_on_with(tmp_path):
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 5.0}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    assert run_script(written(tmp_path / "a", **more), {}) == 0
    state = json.loads((tmp_path / "a" / "out" / "trainer_state.json").read_text())
    step = int(Path(state["best_model_checkpoint"]).name.removeprefix("step-"))
    assert step < 4  # a rate of 5 does harm
    history = {entry["step"]: entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry}
    assert history[step] == min(history.values()) == state["best_metric"]
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "a" / "out")
    kept = {f"model/{name}": torch.empty_like(tensor) for name, tensor in saved.state_dict().items()}
    checkpoint.load(Path(state["best_model_checkpoint"]), kept, World(), verified=True)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, kept[f"model/{name}"]), name


@pytest.mark.parametrize(
    ("text", "more", "error", "cause"),
    [
        (SCRIPT, {"do_train": False, "do_eval": True}, UsageError, ("--hf-script", "trainer.train", '"do_train"')),
        (SCRIPT, {"learning_rat": 1}, ConfigError, ("--hf-args", "args.json", "learning_rat")),
        (SCRIPT, {"neftune_noise_alpha": 5.0}, ConfigError, ("neftune_noise_alpha=5.0",)),
        (
            SCRIPT.replace("checkpoint=None", "checkpoint='out/c-1'"),
            {},
            ConfigError,
            ("trainer.train(resume_from_checkpoint='out/c-1')",),
        ),
        (SCRIPT.replace("resume_from_checkpoint=None", "trial=1"), {}, ConfigError, ("trainer.train(trial=...)",)),
    ],
)
def test_what_is_refused(tmp_path, text, more, error, cause):
    with refuses(error, *cause) as caught:
        run_script(written(tmp_path / "a", text, **more), {})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a" / "out" / "checkpoints").exists()


def test_the_scripts_own_end_is_kept(tmp_path):
    for end in (7, "enough"):
        with pytest.raises(SystemExit) as caught:
            run_script(written(tmp_path / str(end), f"import sys\nsys.exit({end!r})\n"), {})
        assert caught.value.code == end
    with pytest.raises(ZeroDivisionError):
        run_script(written(tmp_path / "c", "1 / 0\n"), {})
    with pytest.raises(UsageError, match="without a call"):
        run_script(written(tmp_path / "d", "import sys\nsys.exit(0)\n"), {})


@dataclasses.dataclass
class Bad:
    flags: list
    said: str


@pytest.mark.parametrize(
    "bad",
    [
        Bad(["--hf-args", "a/args.json"], "--hf-script run_clm.py"),
        Bad(["--hf-script", "a/run.py"], "--hf-args args.json"),
        Bad(["--hf-script", "a/ran.py", "--hf-args", "a/args.json"], "no such Python file"),
        Bad(["--hf-script", "a/args.json", "--hf-args", "a/args.json"], "no such Python file"),
        Bad(["--hf-script", "a/run.py", "--hf-args", "a/none.json"], "none.json: No such file"),
        Bad(["--hf-script", "a/run.py", "--hf-args", "a/run.py"], "ends in .json"),
        Bad(["--hf-script", "a/run.py", "--hf-args", "broken.json"], "is not a JSON file"),
        Bad(["--hf-script", "a/run.py", "--hf-args", "list.json"], "must be one JSON object"),
        Bad(["--hf-script", "a/run.py", "--hf-args", "untrained.json"], '"do_train" is false'),
        Bad(["--hf-script", "a/run.py", "--hf-args", "a/args.json", "--model-name", "x"], "--model-name"),
        Bad(["--hf-script", "a/run.py", "--hf-args", "a/args.json", "--task", "m.py:T"], "--task"),
        Bad(
            ["--hf-script", "a/run.py", "--hf-args", "a/args.json", "--show-groups"],
            "--show-groups cannot be used with --hf-script",
        ),
    ],
    ids=lambda bad: bad.said,
)
@pytest.mark.parametrize("before", [[], ["launch", "--dry-run", "--"]], ids=["train", "launch"])
def test_a_bad_flag_is_one_line(tmp_path, monkeypatch, bad, before):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a")
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[]")
    Path("untrained.json").write_text('{"do_train": false}')
    if before and "--show-groups" in bad.flags:
        bad = dataclasses.replace(bad, said="unknown flag --show-groups")
    with pytest.raises(ConfigError) as caught:
        cli.dispatch([*before, "train", *bad.flags])
    assert bad.said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_second_training_in_the_folder_of_the_first_is_refused(tmp_path):
    text = SCRIPT.replace("        trainer.save_model()", "        beside.made(mine.rows, args).train()")
    assert text != SCRIPT
    with refuses(ConfigError, "trainer.train", "output_dir", "a/out"):
        run_script(written(tmp_path / "a", text), {})
    assert checkpoint.list_steps(tmp_path / "a" / "out") == [4]
