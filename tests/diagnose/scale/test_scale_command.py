"""`lockstep scale`: what is planned, what is refused, what is said of the samples; and one real run of two sizes."""

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import warm
from hypothesis import given
from hypothesis import strategies as st
from shell import environment

from lockstep import cli
from lockstep.config.schema import Config
from lockstep.diagnose.scale import command, report, runs
from lockstep.diagnose.scale import runs as machine
from lockstep.diagnose.scale.report import Outcome, describe_growth
from lockstep.diagnose.scale.rows import rows_of
from lockstep.diagnose.scale.runs import (
    STRONG,
    WEAK,
    Machine,
    RunFailed,
    RunSample,
    ScaleRequest,
    Setting,
    ascending,
    machine_for,
    order,
)
from lockstep.errors import ConfigError, LockstepError

ALONE = Machine(devices=8, cores=2, threads=1)
TWO_CORES = Machine(devices=0, cores=2, threads=1)


def asked(*sizes, **more):
    config = more.pop("config", Config(batch_size=16, micro_batch_size=2))
    return ScaleRequest(more.pop("flags", ()), config, sizes, **more)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text", ["", "1,", "2,1", "1,1,2", "0,1", "-1,2", "1,two", "1.5,2", "1;2", "²,3"])
def test_sizes_are_ascending_numbers(text):
    with pytest.raises(ConfigError, match="--world-sizes is '"):
        ascending("--world-sizes", text)
    assert ascending("--world-sizes", "1, 2,16") == (1, 2, 16)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--world-sizes", "2"], "has 1 size: scaling is a ratio"),
        (["--world-sizes", "2,1"], "must be ascending numbers"),
        (["--world-sizes", "1,2", "--rounds", "0"], "--rounds is 0"),
        (["--world-sizes", "1,2", "--steps", "3"], "--steps is 3: it must be at least 4"),
        (["--lr", "1"], "unknown flag --lr"),
        (["--world-size", "1,2"], "did you mean --world-sizes"),
        (["train"], "`--` is missing before `train`"),
        (["--", "--engine", "single"], "--engine single is one process"),
        (["--runs", "a", "b", "--", "--lr", "1"], "takes no flags of train"),
        (["--runs", "a", "b"], "--runs: a is not a complete run folder"),
        (["--", "--batch-sise", "4"], "did you mean --batch-size"),
        (
            ["--", "train", "--batch-size", "5", "--micro-batch-size", "6"],
            "--micro-batch-size 6 is larger than --batch",
        ),
        (["--world-sizes", "1,4", "--", "--batch-size", "4", "--micro-batch-size", "2"], "would compute nothing"),
        (["--", "--shares", "9,7"], "--shares 9,7 fits one number of ranks"),
        (
            ["--weak", "--world-sizes", "2,4", "--", "--batch-size", "6", "--micro-batch-size", "2"],
            "which 2 ranks cannot share equally",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line_before_any_start(monkeypatch, argv, line):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        cli.dispatch(["scale", *argv])
    assert "\n" not in str(caught.value)


def test_it_is_not_started_by_a_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # half of what a launcher sets
    with pytest.raises(ConfigError, match="a launcher has set WORLD_SIZE"):
        machine_for("cpu", (1, 2), exact=False)


def test_devices_that_are_not_there(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine_for("auto", (1, 2), exact=False).devices == 2
    with pytest.raises(ConfigError, match="this node shows 2 devices: give 2 at most"):
        machine_for("auto", (1, 4), exact=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine_for("auto", (1, 4), exact=False).devices == 0
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        machine_for("cuda", (1, 4), exact=False)


def test_cores_and_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    assert machine_for("cpu", (1, 2, 4), exact=False) == Machine(0, 12, 3)
    assert machine_for("cpu", (1, 4), exact=True).threads == 1
    quota.write_text("150000 100000\n")
    found = machine_for("cpu", (1, 2, 4), exact=False)
    assert found == Machine(0, 1.5, 1)
    assert [found.count_concurrent(size) for size in (1, 2, 4)] == [1, 1.5, 1.5]
    assert not found.shares_cores(1)
    assert found.shares_cores(2)
    quota.write_text("max 100000\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert machine_for("cpu", (1, 2), exact=False) == Machine(0, 12, 5)


def test_what_is_run_and_in_which_order():
    request = asked(1, 2, 4)
    assert request.settings() == [Setting(1, 16), Setting(2, 16), Setting(2, 32), Setting(4, 16), Setting(4, 64)]
    assert request.settings(WEAK) == [Setting(1, 16), Setting(2, 32), Setting(4, 64)]
    assert asked(2, 6, modes=(WEAK,)).settings() == [Setting(2, 16), Setting(6, 48)]
    a, b = Setting(1, 16), Setting(2, 16)
    assert order([a, b], 3) == [(0, a), (0, b), (1, b), (1, a), (2, a), (2, b)]


@given(st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True), st.integers(1, 6))
def test_every_setting_is_run_once_a_round(sizes, rounds):
    settings = asked(*sorted(sizes), modes=(STRONG,)).settings()
    found = order(settings, rounds)
    assert sorted(found) == sorted((number, setting) for number in range(rounds) for setting in settings)


def test_a_runs_flags_win_over_the_given_ones(tmp_path):
    flags = ("--max-steps", "7", "--wandb", "--optim.schedule", "plateau", "--eval-freq", "2", "--patience", "3")
    words = asked(1, 2, flags=flags, steps=10).train_flags(Setting(2, 32), str(tmp_path), 2)
    config = Config.from_args(words)
    assert (config.batch_size, config.micro_batch_size, config.save_dir) == (32, 2, str(tmp_path))
    assert (config.stop_at, config.log_freq) == (15, 3)
    assert config.max_steps > config.stop_at
    assert config.eval_freq > config.stop_at
    assert not config.wandb
    assert Config.from_args(asked(1, 2).train_flags(Setting(1, 16), "x", 0, windows=0)).stop_at == 2


def test_one_rank_runs_without_a_launcher_unless_required():
    assert runs.command_of("auto", 1, ["--lr", "1"])[3:] == ["train", "--lr", "1"]
    for engine, ranks in (("auto", 2), ("zero", 1)):
        found = runs.command_of(engine, ranks, ["--lr", "1"])[3:]
        assert found == ["launch", "--nproc-per-node", str(ranks), "--max-losses", "0", "--", "train", "--lr", "1"]


def samples_of(rates, rounds=3, total=10.0, drift=(1.0, 0.9, 1.2)):
    """A sample a setting and round; the machine is `drift` as fast in each round."""
    return [
        RunSample(setting, number, [rate * drift[number]], total, {"forward": 4.0, "backward": 6.0})
        for setting, rate in rates.items()
        for number in range(rounds)
    ]


def test_efficiency_is_within_a_round_with_published_bands():
    rates = {Setting(1, 16): 100.0, Setting(2, 16): 180.0, Setting(4, 16): 200.0}
    request = asked(1, 2, 4, modes=(STRONG,))
    rows = rows_of(request, ALONE, samples_of(rates), {}, 2)
    assert [row.efficiency for row in rows] == pytest.approx([1, 0.9, 0.5])
    assert [row.low for row in rows] == pytest.approx([row.high for row in rows])  # though the machine drifted
    assert [row.band for row in rows] == [None, (0.9, 0.95), (0.85, 0.95)]
    assert [row.allowed for row in rows] == [None, None, None]
    assert rows[2].step_ms == pytest.approx(rows[0].step_ms / 2)
    shared = rows_of(request, TWO_CORES, samples_of(rates), {}, 2)
    assert [row.allowed for row in shared] == [None, None, 2]
    assert shared[2].of_cores == pytest.approx(1)


def test_weak_scaling_grows_the_batch():
    rates = {Setting(1, 16): 100.0, Setting(2, 32): 190.0}
    rows = rows_of(asked(1, 2, modes=(WEAK,)), ALONE, samples_of(rates), {}, 2)
    assert rows[1].efficiency == pytest.approx(0.95)
    assert rows[1].step_ms == pytest.approx(rows[0].step_ms / 0.95)
    assert (rows[1].micro_batches, rows[1].work, rows[1].full) == (16, 8, 1)


def test_uneven_micro_batches_are_said():
    rates = {Setting(1, 16): 100.0, Setting(3, 16): 260.0}
    request = asked(1, 3, modes=(STRONG,))
    rows = rows_of(request, ALONE, samples_of(rates), {}, 2)
    assert rows[1].full == pytest.approx(8 / 9)
    assert any("3 ranks do not divide 8 micro-batches" in line for line in Outcome(request, ALONE, 2, rows).notes())


def test_records_of_the_start_are_left_out():
    records = [
        {"global_step": 5, "items_per_second": 1.0, "time/total": 900.0, "time/forward": 900.0},
        {"global_step": 10, "items_per_second": 8.0, "time/total": 4.0, "time/forward": 3.0},
        {"global_step": 10, "evaluation/loss": 1.0},
        {"global_step": 15, "items_per_second": 6.0, "time/total": 6.0, "time/forward": 5.0, "time/audit": 2.0},
    ]
    kept = runs.windows_of(records, after=5)
    assert [record["items_per_second"] for record in kept] == [8, 6]
    assert runs.parts_of(kept) == {"total": 5, "forward": 4, "audit": 1}


def test_the_first_error_of_a_run_is_what_is_said():
    said = "warning\nlockstep: error: rank 1 (host): RuntimeError: boom\nlockstep: error: another\n"
    assert runs.first_error(said, 1) == "rank 1 (host): RuntimeError: boom"
    assert runs.first_error("Traceback\n  x\nValueError: no\n\n", 1) == "ValueError: no"
    assert runs.first_error("", -9) == "exited with code -9 without output"


@pytest.fixture
def measured(monkeypatch):
    """Runs that are not made: what each setting's rate is, or why it fails."""
    rates, seen = {}, []

    def measure(request, setting, machine, size, number=0):
        seen.append(setting)
        if isinstance(rates[setting], str):
            raise RunFailed(rates[setting])
        return RunSample(setting, number, [rates[setting]], 10.0, {"forward": 4.0, "backward": 6.0 * setting.ranks})

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "micro_batch_of", lambda request, machine: 2)
    return rates, seen


def test_a_size_that_fails_is_told_once_and_the_others_are_shown(measured, capsys):
    rates, seen = measured
    rates |= {Setting(1, 16): 100.0, Setting(2, 16): "rank 1: no", Setting(4, 16): 390.0}
    request = asked(1, 2, 4, modes=(STRONG,), config=Config(batch_size=16, device="cpu"))
    with pytest.raises(
        LockstepError, match=r"not every size could be measured: 2 ranks, 16 samples a step: rank 1: no"
    ):
        command.run(request, as_json=True)
    assert seen.count(Setting(2, 16)) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["error"] for row in found["rows"]] == ["", "rank 1: no", ""]
    assert found["rows"][1]["efficiency"] is None
    assert found["rows"][2]["efficiency"] == pytest.approx(0.975)


def test_without_the_smallest_size_there_is_no_ratio(measured, capsys):
    rates, _ = measured
    rates |= {Setting(1, 16): "no", Setting(2, 16): 200.0}
    request = asked(1, 2, modes=(STRONG,), config=Config(batch_size=16, device="cpu"))
    with pytest.raises(LockstepError, match="1 rank, 16 samples"):
        command.run(request, as_json=False)
    assert "no base" in capsys.readouterr().out


def test_a_slow_size_is_explained_by_the_parts_that_grew(measured, capsys, monkeypatch):
    rates, _ = measured
    monkeypatch.setattr(command, "profile_row", lambda *_: None)
    monkeypatch.setattr(command, "machine_for", lambda *_, **__: ALONE)
    rates |= {Setting(1, 16): 100.0, Setting(2, 16): 120.0}
    assert command.run(asked(1, 2, modes=(STRONG,)), as_json=False) == 0
    said = capsys.readouterr().out
    assert "2 ranks (strong) are below 80 %: of the 16 ms of a step on rank 0" in said
    assert "grew: backward by 9 ms, forward by 2 ms; the backward includes the exchange" in said


def test_shared_cores_name_only_growth_beyond_the_crowd():
    rates = {Setting(1, 16): 100.0, Setting(4, 64): 150.0}
    parts = {1: {"forward": 10.0, "backward": 20.0}, 4: {"forward": 20.0, "backward": 55.0}}  # four on two cores
    samples = [RunSample(setting, 0, [rate], 30.0, parts[setting.ranks]) for setting, rate in rates.items()]
    rows = rows_of(asked(1, 4, modes=(WEAK,)), TWO_CORES, samples, {}, 2)
    assert describe_growth(rows[1], rows[0], TWO_CORES, samples).partition("grew: ")[2].startswith("backward by 15 ms;")


def test_the_profile_of_a_slow_size_is_read(monkeypatch, tmp_path):
    seen, verdicts = [], []

    def started(request, setting, flags, machine, folder):
        seen.append(flags)
        if verdicts[-1]:
            place = folder / "run" / "profile" / "5-9"
            place.mkdir(parents=True)
            (place / "verdict.json").write_text(verdicts[-1])

    monkeypatch.setattr(report, "run_training", started)
    monkeypatch.setattr(report.cli, "option_list", lambda: ["lr", "profile"])
    request = asked(1, 2, modes=(STRONG,), steps=100)
    row = rows_of(request, ALONE, samples_of({Setting(1, 16): 100.0, Setting(2, 16): 120.0}), {}, 2)[1]
    for verdict, found in (
        ('{"sentence": "Slow.", "parts": {"compute": 3.0}}', {"sentence": "Slow.", "parts": {"compute": 3.0}}),
        ('{"sentence": 3}', None),
        ("[]", None),
        ("{", None),
        ("", None),
    ):
        verdicts.append(verdict)
        assert report.profile_row(request, row, ALONE, 2) == found
    assert seen[0][-2:] == ["--profile", "26:35"]
    monkeypatch.setattr(report.cli, "option_list", lambda: ["lr"])
    assert report.profile_row(request, row, ALONE, 2) is None


def test_the_verdict_of_a_profile_comes_first(measured, capsys, monkeypatch):
    rates, _ = measured
    found = {"sentence": "The exchange is 40% of the step.", "next": {"what": "--micro-batch-size 8", "gain": 1.3}}
    monkeypatch.setattr(command, "profile_row", lambda *_: found)
    monkeypatch.setattr(command, "machine_for", lambda *_, **__: ALONE)
    rates |= {Setting(1, 16): 100.0, Setting(2, 16): 120.0}
    command.run(asked(1, 2, modes=(STRONG,)), as_json=True)
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict == {"mode": "strong", "ranks": 2, "sentence": found["sentence"], "profile": found}


def test_a_healthy_machine_has_no_verdict(measured, capsys):
    rates, _ = measured
    rates |= {Setting(1, 16): 100.0, Setting(2, 16): 190.0, Setting(2, 32): 195.0}
    command.run(asked(1, 2, config=Config(batch_size=16, device="cpu")), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] is None
    assert any("gloo" in line for line in found["notes"])
    assert not any("differ by" in line or "above 100" in line for line in found["notes"])


def test_doubtful_numbers_are_said():
    rates = {Setting(1, 16): 100.0, Setting(2, 16): 260.0}
    request = asked(1, 2, modes=(STRONG,))
    notes = Outcome(request, ALONE, 2, rows_of(request, ALONE, samples_of(rates), {}, 2)).notes()
    assert any("ranks are above 100 %" in line for line in notes)
    assert any("differ by 33%" in line for line in notes)


TASK = """
import torch, lockstep

class Mine(lockstep.Task):
    def model(self): return torch.nn.Linear(4, 1)
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.ones(40, 4)) if split == "train" else None
    def loss(self, model, batch): return model(batch[0]).square().sum()
"""


def test_two_sizes_are_really_measured(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    own = ["--world-sizes", "1,2", "--strong", "--rounds", "1", "--steps", "8", "--json"]
    done = subprocess.run(
        [warm.python(), "-m", "lockstep", "scale", *own, "--", "--task", "mine.py:Mine", "--device", "cpu"],
        env=environment(TMPDIR=str(tmp_path)), cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [row["ranks"] for row in found["rows"]] == [1, 2]
    assert all(math.isfinite(row["efficiency"]) and row["rate"] > 0 for row in found["rows"])
    assert found["micro_batch_size"] == 2
    assert not [*tmp_path.glob("lockstep-*"), *tmp_path.glob("outputs")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_its_run_and_its_files(tmp_path, number):
    (tmp_path / "mine.py").write_text(TASK)
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a test run in the background ignores
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "scale", "--", "--task", "mine.py:Mine", "--device", "cpu"],
        env=environment(TMPDIR=str(tmp_path)), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heard,
    ) as scale:  # fmt: skip
        while not list(tmp_path.glob("lockstep-scale-*/output.txt")):
            assert scale.poll() is None
            time.sleep(0.02)
        (folder,) = tmp_path.glob("lockstep-scale-*")
        scale.send_signal(number)
        _, said = scale.communicate(timeout=60)
    assert scale.returncode == 128 + number, said
    assert not list(tmp_path.glob("lockstep-*"))
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert str(folder).encode() not in process.read_bytes()


def test_what_train_refuses_late_is_one_line_too(tmp_path):
    (tmp_path / "mine.py").write_text(TASK.replace("torch.ones(40, 4)", "torch.ones(0, 4)"))
    done = subprocess.run(
        [warm.python(), "-m", "lockstep", "scale", "--", "--task", "mine.py:Mine"],
        env=environment(TMPDIR=str(tmp_path)), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "lockstep: error: train on 1 rank: the training set is empty" in done.stderr
