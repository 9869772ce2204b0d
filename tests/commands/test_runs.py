"""`lockstep runs`: what the folders of real runs say, and what damaged and foreign ones do."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import warm
from shell import environment
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.cli import dispatch
from lockstep.errors import ConfigError
from lockstep.logging.jsonl import read
from lockstep.training.runs import list_runs
from lockstep.training.state.run_dir import RunFolder, RunLock

SLOW = """
import sys, time
sys.path.insert(0, {tests!r})
import lockstep
from small_runs import config
from toys import Ragged
for step in lockstep.Run(config({folder!r}, experiment_name="slow", log_freq=1), Ragged()):
    if step.global_step >= 3:
        print("ready", flush=True)
        time.sleep(0.05 if {quick} else 60)
"""


def rows(folder):
    return {row.name: row for row in list_runs(folder)}


def test_runs_say_how_far_how_good_and_how_they_ended(tmp_path, capsys):
    lockstep.train(config(tmp_path, experiment_name="whole", eval_freq=6), Ragged())
    lockstep.train(config(tmp_path, experiment_name="halted", stop_at=5), Ragged())
    for step in lockstep.Run(config(tmp_path, experiment_name="left"), Ragged()):
        if step.global_step == 4:
            break
    with pytest.raises(ZeroDivisionError):
        lockstep.train(config(tmp_path, experiment_name="broken"), Breaks())
    found = rows(tmp_path)
    assert list(found) == ["broken", "halted", "left", "whole"]
    assert [found[name].state for name in found] == ["failed", "stopped", "stopped", "finished"]
    assert [(found[name].step, found[name].steps) for name in ("halted", "left", "whole")] == [
        (5, 12),
        (4, 12),
        (12, 12),
    ]
    whole = found["whole"]
    records = read(tmp_path / "whole" / "metrics.jsonl")
    evaluations = [record for record in records if "evaluation/loss" in record]
    best = min(evaluations, key=lambda record: record["evaluation/loss"])
    assert (whole.best_step, whole.best_loss) == (best["global_step"], best["evaluation/loss"])
    assert whole.last_loss == [record["running_loss"] for record in records if "lr" in record][-1]
    assert whole.epoch == pytest.approx(12 * 8 / 40)
    assert abs(whole.last_record - time.time()) < 600
    capsys.readouterr()
    assert dispatch(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "epoch", "best", "loss", "time", "last", "record"]
    assert lines[4].split()[:4] == ["whole", "finished", "12/12", "2.40"]
    assert dispatch(["runs", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told[3]["best_loss"] == whole.best_loss
    assert told[3]["step"] == 12
    assert told[1]["best_loss"] is None
    assert dispatch(["runs", str(tmp_path / "whole"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [told[3]]


def test_the_best_is_the_one_that_the_run_was_judged_by(tmp_path, capsys):
    wanted = {"eval_freq": 3, "best_metric": "accuracy:max", "lr": 0.3}
    result = lockstep.train(config(tmp_path, experiment_name="judged", **wanted), Ragged())
    accuracy = max(
        record["evaluation/accuracy"]
        for record in read(tmp_path / "judged" / "metrics.jsonl")
        if "evaluation/accuracy" in record
    )
    row = rows(tmp_path)["judged"]
    assert (row.best_metric, row.best_value, row.best_step) == ("accuracy", accuracy, result.best.step)
    assert row.best_loss == result.best.loss
    capsys.readouterr()
    assert dispatch(["runs", str(tmp_path)]) == 0
    assert f"accuracy {accuracy:.5g} at {result.best.step}" in " ".join(capsys.readouterr().out.split())
    assert dispatch(["runs", str(tmp_path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["best_metric"], told["best_value"], told["seconds"]) == ("accuracy", accuracy, row.seconds)


def test_the_time_is_that_of_the_recorded_steps_over_all_starts(tmp_path, capsys):
    for stop in (5, 0):
        lockstep.train(config(tmp_path, stop_at=stop, eval_freq=4), Ragged())
    records = [record for record in read(tmp_path / "r" / "metrics.jsonl") if "time/total" in record]
    assert [record["global_step"] for record in records] == [2, 4, 6, 8, 10, 12]
    spent = math.fsum(2 * record["time/total"] for record in records) / 1e3
    assert rows(tmp_path)["r"].seconds == pytest.approx(spent)
    lines = [
        '{"global_step": 10, "time/total": 250000}',
        "torn",
        '{"global_step": 12, "time/total": "nan"}',
        '{"global_step": 15, "time/total": 250000, "note": "time/total"}',
        '{"global_step": 15, "evaluation/loss": 1, "why": "time/total"}',
        '{"global_step": 15, "time/total": 1}',
    ]
    (tmp_path / "r" / "metrics.jsonl").write_text("\n".join(lines))
    assert rows(tmp_path)["r"].seconds == 10 * 250 + 5 * 250
    assert dispatch(["runs", str(tmp_path)]) == 0
    assert " 1:02:30 " in capsys.readouterr().out


class Breaks(Ragged):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss if model.training is False else 1 / 0


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGKILL, "failed"), (signal.SIGTERM, "preempted"), (signal.SIGINT, "interrupted")]
)
def test_a_run_that_goes_on_and_one_that_a_signal_ended(tmp_path, number, state):
    quick = number != signal.SIGKILL
    code = SLOW.format(tests=os.path.dirname(os.path.dirname(__file__)), folder=str(tmp_path), quick=quick)
    python = warm.python() if quick else sys.executable
    process = subprocess.Popen([python, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert any(line == "ready\n" for line in process.stdout)
        assert rows(tmp_path)["slow"].state == "running"
        assert rows(tmp_path)["slow"].step >= 2
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    row = rows(tmp_path)["slow"]
    assert row.state == state
    assert (f"process {process.pid} on" in row.note) == (not quick)


def test_damaged_and_foreign_folders_are_rows(tmp_path, capsys):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, content in (
        ("torn", b'{"global_step": 1'),
        ("list", b"[]"),
        ("bytes", b"\xff\xfe\x00"),
        ("deep", b"[" * 100000),
        ("vast", b'{"global_step": 1, "running_loss": 1%s, "time/total": 1e300}' % (b"0" * 400)),
        ("odd", b'{"global_step": "x", "plan": 3, "best": [], "epoch": true}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_bytes(content)
        (tmp_path / name / "ended.json").write_bytes(content)
        (tmp_path / name / "config.toml").write_bytes(content)
        (tmp_path / name / "metrics.jsonl").write_bytes(content)
    (tmp_path / "folders" / "state.json").mkdir(parents=True)
    (tmp_path / "folders" / "metrics.jsonl").mkdir()
    (tmp_path / "folders" / "run.lock").mkdir()
    os.mkdir(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    os.mkfifo(tmp_path / "pipe" / "run.lock")
    (tmp_path / "evil\x1b[31m").mkdir()
    found = rows(tmp_path)
    assert {row.state for row in found.values()} == {"unknown"}
    assert "run's folder" in found["foreign"].note
    for name in ("torn", "list", "bytes", "deep", "folders"):
        assert found[name].note == "state.json is damaged"
    assert dispatch(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == len(found) + 1


def test_a_loss_that_is_no_number_is_a_word_in_json(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"global_step": 3, "running_loss": "nan"}\n')
    assert math.isnan(rows(tmp_path)["a"].last_loss)
    assert dispatch(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["last_loss"] == "nan"


def test_no_folder_is_one_line_and_an_empty_one_is_no_error(tmp_path, capsys):
    with pytest.raises(ConfigError, match="No such file or directory; give the folder"):
        dispatch(["runs", str(tmp_path / "nowhere")])
    assert dispatch(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert dispatch(["runs", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_looking_does_not_stand_in_the_way_of_a_start(tmp_path):
    folder = RunFolder(str(tmp_path), "a")
    assert folder.owner == ("", False)
    folder.claim()
    owner, holds = folder.owner
    assert holds
    assert owner.startswith(f"process {os.getpid()} on {socket.gethostname()}")
    folder.release()
    assert folder.owner == ("", False)
    (folder.path / "run.lock").write_text(f"process 999999999 on {socket.gethostname()}, started x\n")
    assert folder.owner == (f"process 999999999 on {socket.gethostname()}, started x", False)
    lock = RunLock(folder.path / "run.lock")
    assert lock.acquire(make=True).startswith("process 999999999")
    lock.release()


def test_it_loads_no_torch(tmp_path):
    lockstep.train(config(tmp_path, max_steps=2), Ragged())
    code = (
        "import sys\nfrom lockstep import cli\n"
        f"cli.dispatch(['runs', {str(tmp_path)!r}]); cli.dispatch(['runs', {str(tmp_path)!r}, '--json'])\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
