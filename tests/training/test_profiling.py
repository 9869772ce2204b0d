"""`--profile`: the same bits with and without, traces of every rank, a verdict, and what is refused."""

import dataclasses
import gzip
import json
import threading
import time

import pytest
import torch
from ranks import run
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.clock import HostClock, MarkingClock, make_clock, trace_mark
from lockstep.config.schema import Config
from lockstep.diagnose.profile.reading import read, read_all, understood
from lockstep.diagnose.profile.tracing import (
    ThreadUsage,
    cold_ms,
    fused_ns,
    handover_ms,
    operations_us,
    page_us,
    positions,
    threads_gain,
)
from lockstep.errors import ConfigError
from lockstep.logging.jsonl import read as records


def go(world, settings, task=None):
    """The parameters after a run, by name."""
    run = lockstep.Run(settings, task or Ragged(dropout=0.1), world)
    run()
    return {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}


def traced(tmp_path, steps="5:8", **more):
    return dataclasses.replace(config(tmp_path, **more), profile=steps)


def marks_of(path):
    held = json.loads(gzip.decompress(path.read_bytes()))
    return [event["name"] for event in held["traceEvents"] if str(event.get("name", "")).startswith("lockstep:")]


@pytest.mark.parametrize("exact", [False, True])
def test_the_same_bits_with_and_without(tmp_path, exact):
    plain = go(None, config(tmp_path / "a", exact=exact))
    with_trace = go(None, traced(tmp_path / "b", exact=exact, ckpt_freq=6, eval_freq=6))
    assert plain.keys() == with_trace.keys()
    assert all(torch.equal(plain[name], with_trace[name]) for name in plain)
    folder = tmp_path / "b" / "r" / "profile" / "5-8"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json.gz", "verdict.json"]
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["steps"], verdict["world_size"]) == ([5, 8], 1)
    assert sum(verdict["parts"].values()) == pytest.approx(verdict["step_ms"], abs=1e-2)
    assert verdict["parts"]["evaluation"] > 0
    assert verdict["parts"]["checkpoint"] > 0
    assert verdict["padding"] > 0  # labels are masked
    found = marks_of(folder / "rank-0.json.gz")
    assert [name for name in found if name.startswith("lockstep:step")] == [f"lockstep:step {k}" for k in range(5, 9)]
    for part in ("data", "load", "forward", "backward", "exchange", "update", "save", "evaluate", "record"):
        assert f"lockstep:{part}" in found, part
    log = (tmp_path / "b" / "r" / "logs" / "rank-00000.log").read_text()
    assert verdict["sentence"] in log
    plain = [r["running_loss"] for r in records(tmp_path / "a" / "r" / "metrics.jsonl") if "running_loss" in r]
    assert [r["running_loss"] for r in records(tmp_path / "b" / "r" / "metrics.jsonl") if "running_loss" in r] == plain


@pytest.mark.parametrize(("steps", "taken"), [("1:3", [1, 3]), ("1:12", [1, 12]), ("12:12", [12, 12])])
def test_the_first_and_the_last_steps_too(tmp_path, steps, taken):
    go(None, traced(tmp_path, steps))
    (folder,) = (tmp_path / "r" / "profile").iterdir()
    assert json.loads((folder / "verdict.json").read_text())["steps"] == taken


def test_run_that_stops_or_resumes_within_the_profiled_steps(tmp_path):
    wanted = go(None, config(tmp_path / "plain"))
    settings = traced(tmp_path, "5:8")
    go(None, dataclasses.replace(settings, stop_at=6))
    folder = tmp_path / "r" / "profile" / "5-8"
    assert read(folder / "rank-0.json.gz").about["steps"] == [5, 6]
    found = go(None, settings)
    assert read(folder / "rank-0.json.gz").about["steps"] == [7, 8]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_resume_behind_the_steps_leaves_their_traces_alone(tmp_path):
    settings = traced(tmp_path, "3:4")
    go(None, dataclasses.replace(settings, stop_at=6))
    path = tmp_path / "r" / "profile" / "3-4" / "rank-0.json.gz"
    before = path.read_bytes()
    go(None, settings)
    assert path.read_bytes() == before


def test_steps_past_the_end_are_refused_before_writing(tmp_path):
    with pytest.raises(ConfigError, match="12 steps"):
        go(None, traced(tmp_path, "10:13"))
    assert not (tmp_path / "r").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "profile").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write to"):
        go(None, traced(tmp_path))
    assert not (tmp_path / "r" / "checkpoints").exists()


def test_a_disk_that_refuses_costs_the_verdict_and_not_the_run(tmp_path, monkeypatch):
    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    go(None, traced(tmp_path))
    log = (tmp_path / "r" / "logs" / "rank-00000.log").read_text()
    assert "no verdict: rank 0" in log
    assert "No space left" in log
    assert not list((tmp_path / "r" / "profile" / "5-8").iterdir())


class Again(Ragged):
    """Its own forward is checkpointed, which no option says."""

    def loss(self, model, batch):
        again = torch.utils.checkpoint.checkpoint(super().loss, model, batch, use_reentrant=False)
        return again * 1.0


def test_forwards_that_are_computed_again_are_seen(tmp_path):
    go(None, traced(tmp_path), Again())
    go(None, traced(tmp_path, experiment_name="plain"))
    found, plain = (read(tmp_path / name / "profile" / "5-8" / "rank-0.json.gz") for name in ("r", "plain"))
    slots = found.about["slots"]
    assert len(found.again) >= found.steps * slots
    assert not len(plain.again)
    assert found.about["page_us"] > 0.0
    assert found.about["tracing_ms"] >= 0.0
    assert len(found.about["queued_by_step"]) == found.steps
    assert found.about["idle_ms"] > -100.0
    assert found.about["queued"].keys() == found.about["cpu"].keys()
    assert found.about["usage"].keys() >= {"system", "minor", "major", "busy", "others", "queued"}


def test_probes_leave_threads_and_random_numbers_alone():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert threads_gain(1) > 0.0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert 0.0 < operations_us() < 1e6
    assert 0.0 < page_us() < 1e6
    assert 0.0 < fused_ns(torch.device("cpu")) < 1e6
    assert 0.0 <= cold_ms(1.0, 20_000) < 1e6
    assert torch.equal(torch.get_rng_state(), state)


def test_handover_by_a_loader_process_is_timed_without_one():
    row = torch.zeros(4)
    assert 0.0 < handover_ms({"x": row, "y": [row.expand(2, 4), torch.zeros(2)]}) < 1e6
    assert handover_ms("no tensor") < 1.0
    assert not [each for each in threading.enumerate() if "_serve" in each.name]  # what hands out has ended
    assert not row.is_shared()  # the batch is left as it is


def test_what_a_step_had_of_the_system_is_its_usual():
    noted = [ThreadUsage(0.0, minor, 0.0) for minor in (0, 900, 910, 920)]
    assert ThreadUsage.median_step(noted).minor == 10
    assert ThreadUsage.median_step(noted[:2]) == ThreadUsage()  # one step says nothing
    ran = [ThreadUsage(busy=busy) for busy in (0.0, 9.0, 14.0, 22.0)]
    assert ThreadUsage.min_busy(ran) == 5.0
    assert ThreadUsage.min_busy(ran[:2]) == 0.0


class Fails(Ragged):
    """Its 6th step fails."""

    calls = 0

    def loss(self, model, batch):
        if model.training:
            self.calls += 1
        if self.calls > 22:
            raise ValueError("enough")
        return super().loss(model, batch)


def test_run_failing_in_the_profiled_steps_leaves_no_profiler(tmp_path):
    with pytest.raises(ValueError, match="enough"):
        go(None, traced(tmp_path), Fails(dropout=0.1))
    assert not torch.autograd._profiler_enabled()
    go(None, traced(tmp_path / "again"))  # another profiler can begin
    assert (tmp_path / "again" / "r" / "profile" / "5-8" / "verdict.json").exists()


@pytest.mark.parametrize("text", ["5", "8:5", "0:3", "a:b", "5:8:9", "-1:3", "1:5000"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match="profile"):
        Config(profile=text)


class Slow(Ragged):
    """Rank 1 needs 60 ms more for each forward; or every rank for each sample."""

    def __init__(self, rank=0, loading=0.0):
        super().__init__()
        self.wait, self.loading = 0.06 * (rank == 1), loading

    def loss(self, model, batch):
        time.sleep(self.wait if model.training else 0.0)
        return super().loss(model, batch)

    def dataset(self, split):
        return Waiting(super().dataset(split), self.loading if split == "train" else 0.0)


class Waiting(torch.utils.data.Dataset):
    draws_random = False

    def __init__(self, held, seconds):
        self.held, self.seconds = held, seconds

    def __len__(self):
        return len(self.held)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.held[index]


def on_ranks(world, folder, exact):
    settings = dataclasses.replace(config(folder, exact=exact), profile="5:8")
    return {name: tensor.tolist() for name, tensor in go(world, settings, Slow(world.rank)).items()}


@pytest.mark.parametrize("exact", [False, True])
def test_a_slow_rank_is_named(tmp_path, exact):
    found = run(on_ranks, 2, tmp_path, exact)
    assert found[0] == found[1]
    folder = tmp_path / "r" / "profile" / "5-8"
    assert len(read_all(folder)) == 2
    verdict = json.loads((folder / "verdict.json").read_text())
    kept = [record for record in records(tmp_path / "r" / "metrics.jsonl") if "time/backward" in record]
    assert all(record["time/exchange"] >= 0 and record["time/backward"] >= 0 for record in kept)
    if not exact:  # rank 0 waits for the other in its last backward; with --exact in the update
        assert max(record["time/exchange"] for record in kept) > 50
    assert verdict["bottleneck"] == "imbalance"
    assert "rank 1" in verdict["sentence"]
    assert verdict["ranks"][0]["imbalance"] > 50 > verdict["ranks"][1]["imbalance"]


def test_a_slow_loader_is_named(tmp_path):
    go(None, traced(tmp_path), Slow(loading=0.03))
    verdict = json.loads((tmp_path / "r" / "profile" / "5-8" / "verdict.json").read_text())
    assert verdict["bottleneck"] == "data"
    assert "--data.workers" in verdict["next"]["what"]
    assert verdict["parts"]["data"] > 200


def test_clock_marks_parts_in_order_and_measures_as_before():
    clock = MarkingClock(HostClock())
    laps = ("data", "forward", "backward/alone", "forward", "backward", "audit", "data", "update", "data")

    def step():
        clock.start()
        for lap in laps:
            clock.lap(lap)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        clock.trace(7)
        step()
        clock.end()
        step()
    marks = [event.name for event in sorted(profiler.events(), key=lambda event: event.time_range.start)]
    parts = ("data", "forward", "backward", "forward", "backward", "exchange", "exchange", "update", "exchange")
    assert marks == ["lockstep:step 7", *(f"lockstep:{part}" for part in parts)]
    assert clock.steps == 3
    assert clock.read().keys() == {"data", "forward", "backward", "audit", "update"}


def test_a_part_is_marked_where_a_profiler_runs_alone():
    with trace_mark("save") as nothing:
        assert nothing is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, trace_mark("save"):
        pass
    assert "lockstep:save" in {event.name for event in profiler.events()}


def test_positions_that_hold_nothing():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert positions({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": mask}, 3) == (6, 3)
    assert positions((torch.ones(2, 8, dtype=torch.long), torch.ones(2)), 10) == (16, 6)
    assert positions((torch.ones(2, 8), torch.ones(2, dtype=torch.long)), 2) == (0, 0)  # images and classes
    assert positions([torch.ones(2, 8, dtype=torch.long)], 2) == (0, 0)  # items are rows
    assert positions("text", 1) == (0, 0)


def test_a_trace_that_is_foreign_is_said_so():
    with pytest.raises(ConfigError, match="not a trace of lockstep"):
        understood({"traceEvents": []})


@pytest.mark.parametrize(("ranks", "wanted"), [(1, {"backward": 11.0}), (2, {"backward": 6.0, "exchange": 5.0})])
def test_the_exchange_is_told_apart_from_the_last_backward(monkeypatch, ranks, wanted):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = make_clock(torch.device("cpu"), ranks)
    for last in (6e-3, 8e-3):  # beside two of 2 ms each
        clock.start()
        for name, spent in (("forward", 1e-3), ("backward/alone", 2e-3), ("backward/alone", 2e-3), ("backward", last)):
            now[0] += spent
            clock.lap(name)
    assert clock.read() == pytest.approx({"forward": 1.0, **wanted})
    assert clock.spent() == pytest.approx({"forward": 2e-3, "backward/alone": 8e-3, "backward": 14e-3})
    clock.start()
    now[0] += 3e-3
    clock.lap("backward")  # one micro-batch: what it takes by itself is not known
    assert clock.read() == pytest.approx({"backward": 3.0})
