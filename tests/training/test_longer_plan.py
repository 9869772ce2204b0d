"""Training on after the end of the plan: what a longer plan is, that a resume agrees with it, and the schedule."""

import json

import pytest
import torch
from refusals import names, refuses
from small_runs import config, mark
from toys import Ragged, taken

from lockstep.errors import ConfigError, ResumeError
from lockstep.logging.jsonl import read


def rates(folder):
    return {record["global_step"]: record["lr"] for record in read(folder / "r" / "metrics.jsonl") if "lr" in record}


def go(folder, **changes):
    return taken(config(folder, log_freq=1, **changes), Ragged())[0]


def test_finished_run_extends_as_if_planned_so_from_there(tmp_path, capsys):
    settings = {"max_steps": 6, "optim": {"schedule": "linear", "warmup_steps": 2, "floor": 0.0}}
    assert go(tmp_path, **settings) == list(range(6))
    assert go(tmp_path, **settings) == []
    assert names(capsys.readouterr().err, "finished", "6 steps", "--extend-to")
    assert go(tmp_path, extend_to=12, stop_at=9, **settings) == [6, 7, 8]
    said = capsys.readouterr()
    assert "extended after step 6 from 6 to 12 steps: the schedule is stretched" in said.out + said.err
    assert "at a learning rate of 0.006" in said.out + said.err
    assert go(tmp_path, **settings) == [9, 10, 11], "a resume needs no flag"
    parted = mark(tmp_path)
    found = rates(tmp_path)
    assert [found[step] for step in (7, 12)] == pytest.approx([0.01 * 6 / 10, 0.01 * 1 / 10])
    assert go(tmp_path, extend_to=12, **settings) == [], "the same flag again is no other plan"
    whole = tmp_path / "whole"
    go(whole, **settings)
    go(whole, extend_to=12, **settings)
    assert mark(whole) == parted


def test_without_a_schedule_extension_equals_a_longer_run(tmp_path):
    settings = {"optim": {"schedule": "constant", "warmup_steps": 1}}
    go(tmp_path / "parts", max_steps=4, **settings)
    with pytest.raises(
        ResumeError, match=r"4 steps \(now 8 with .*max.steps 8\).*extend.to 8 in place of .*max.steps 8"
    ):
        go(tmp_path / "parts", max_steps=8, **settings)
    go(tmp_path / "parts", extend_to=8, **settings)
    go(tmp_path / "whole", max_steps=8, **settings)
    assert mark(tmp_path / "parts") == mark(tmp_path / "whole")


FILE = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_type": "linear"}}}
FILE["scheduler"]["params"] |= {"warmup_num_steps": 2, "warmup_max_lr": 0.01}


def test_plan_length_in_a_deepspeed_file_is_the_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.training.start.build.read_json", lambda path: FILE)
    settings = {"max_steps": 6, "lr": 0.01, "optim": {"schedule": "linear", "warmup_steps": 2, "floor": 0.0}}
    assert go(tmp_path, **settings) == list(range(6))
    assert go(tmp_path, extend_to=9, stop_at=8, **settings) == [6, 7]
    assert go(tmp_path, **settings) == [8]
    with refuses(ConfigError, "total_num_steps 6", "--max-steps 6", 7):
        go(tmp_path / "other", **{**settings, "max_steps": 7})


class Seen(Ragged):
    """Forty samples, and what was seen of them."""

    def __init__(self):
        super().__init__(samples=20)
        self.seen = []

    def collate(self, samples):
        self.seen += [int(sample["input"].sum()) for sample in samples]
        return super().collate(samples)


def test_epochs_go_on_where_a_short_last_step_ended(tmp_path):
    """20 samples in steps of 8: the third step has four, and the fourth begins the second epoch."""
    settings = {"max_steps": 0, "num_epochs": 1, "guards": {"desync_freq": 0}}
    task = Seen()
    wanted = sorted(int(task.dataset("train")[i]["input"].sum()) for i in range(20))
    assert taken(config(tmp_path, **settings), Seen())[0] == [0, 1, 2]
    task.seen.clear()
    assert taken(config(tmp_path, extend_to="3epochs", **settings), task)[0] == [3, 4, 5, 6, 7]
    state = json.loads((tmp_path / "r" / "state.json").read_text())
    assert (state["position"], state["extended"]["from"]) == (60, 3)
    assert sorted(set(task.seen)) == sorted(set(wanted))
    assert all(task.seen.count(value) >= 2 * wanted.count(value) for value in wanted)


@pytest.mark.parametrize(
    ("extend", "kind", "named"),
    [
        (6, ResumeError, ("--extend-to 6", "6 steps")),
        (3, ResumeError, ("--extend-to 3", "3 steps", 6)),
        ("150%", ConfigError, ("extend_to", "150", "3epochs")),
    ],
)
def test_a_plan_that_is_no_longer(tmp_path, extend, kind, named):
    go(tmp_path, max_steps=6, stop_at=2)
    before = (tmp_path / "r" / "state.json").read_bytes()
    with refuses(kind, *named):
        go(tmp_path, max_steps=6, extend_to=extend)
    assert (tmp_path / "r" / "state.json").read_bytes() == before


def test_there_must_be_a_run(tmp_path):
    with refuses(ConfigError, "--extend-to 8", "--max-steps"):
        go(tmp_path, max_steps=4, extend_to=8)
    assert not (tmp_path / "r").exists()


class Once(Ragged):
    """Its loss is not finite once, in the step after the extension."""

    due = False

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if torch.is_grad_enabled() and type(self).due:
            type(self).due = False
            return found * float("nan")
        return found


def test_a_rollback_to_before_the_extension(tmp_path):
    settings = {"max_steps": 4, "optim": {"schedule": "linear", "warmup_steps": 1}, "guards": {"nonfinite": "rollback"}}
    assert taken(config(tmp_path, **settings), Once())[0] == [0, 1, 2, 3]
    Once.due = True
    steps, code = taken(config(tmp_path, extend_to=7, **settings), Once())
    assert (steps[-3:], code) == ([4, 5, 6], 0)


def test_a_finished_runs_state_says_that_it_was_evaluated(tmp_path):
    """Also where the last evaluation was not the best, so that nothing is saved after it."""
    go(tmp_path, max_steps=4, eval_freq=2, lr=5.0, optim={"schedule": "constant", "warmup_steps": 0})
    state = json.loads((tmp_path / "r" / "state.json").read_text())
    assert state["best"]["step"] == 2
    assert "evaluation_due" not in state
