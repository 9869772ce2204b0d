"""What follows a step, in absolute numbers: records, evaluations, which checkpoint is kept, and the run's state."""

import contextlib
import json
import math
import re
import resource
import signal
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from ranks import run
from refusals import names
from torch import nn
from toys import taken

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.config.sections import Checkpoint, Data, Optim
from lockstep.data.sampler import Shuffled
from lockstep.distributed.progress import ENDING, EVALUATING, SAVING, Progress
from lockstep.errors import SETTINGS, LockstepError, PeerError
from lockstep.guards.nonfinite import ReadStep
from lockstep.logging import Sinks
from lockstep.logging.console import loss_text
from lockstep.logging.jsonl import read
from lockstep.optim.schedule import factor
from lockstep.records import StepRecord
from lockstep.run_state import Position, RunState
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.step.recorder import Meter, RunRecorder, peak_memory

SAMPLES, BATCH, MICRO = 20, 6, 2  # a step may lie across two epochs


class Point(nn.Module):
    """One number."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.place * x


@dataclass
class Task(lockstep.Task):
    """Training: the loss of sample n is (n + 1) * place, so its gradient is n + 1 and the place goes down for ever.

    Evaluation: the distance to `wanted` squared, plus 3. `scripted` gives the losses of the evaluations instead.
    """

    wanted: float = 0.0
    scripted: tuple = ()
    evaluations: int = 0
    begun: bool = False  # the training has; what is tried before it does not count
    reduction = "sum"

    def model(self):
        return Point()

    def dataset(self, split):
        return [(split, float(n + 1)) for n in range(SAMPLES if split == "train" else 5)]

    def collate(self, samples):
        return samples[0][0], torch.tensor([value for _, value in samples], dtype=torch.float64)

    def count(self, batch):
        return len(batch[1])

    def loss(self, model, batch):
        split, values = batch
        if split == "train":
            self.begun = self.begun or model.training
            return model(values).sum()
        if self.scripted and not self.begun:
            return model(values).sum() * 0 + self.scripted[0] * len(values)
        if self.scripted:
            place, self.evaluations = self.evaluations // 3, self.evaluations + 1  # five samples are three forwards
            return model(values).sum() * 0 + self.scripted[place] * len(values)
        return ((model(torch.ones_like(values)) - self.wanted).square() + 3).sum()

    def metrics(self, model, batch):
        return {"mean": (batch[1].sum(), torch.tensor(len(batch[1])))}


def settings(folder, **changes):
    common = {"experiment_name": "r", "save_dir": str(folder), "precision": "float64", "log_freq": 3, "max_steps": 11}
    common |= {"batch_size": BATCH, "micro_batch_size": MICRO, "lr": 0.5, "ckpt_freq": 0}
    return Config(**common | {"optim": Optim(warmup_steps=2, clip=0.0, weight_decay=0.0)} | changes)


def go(world, config, task):
    return taken(config, task, world)[0]


def records(folder):
    return read(folder / "r" / "metrics.jsonl")


def state_of(folder):
    return json.loads((folder / "r" / "state.json").read_text())


def by_hand(steps=11, lr=0.5):
    """For each step: the mean loss, the gradient, the rate; and where the point stands after it."""
    place = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([place], lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    rows = []
    for step in range(steps):
        _, samples = Shuffled(SAMPLES, 0).at(step * BATCH, (step + 1) * BATCH)
        mean = (sum(samples.tolist()) + BATCH) / BATCH
        loss = mean * place.item()
        place.grad = torch.full((1,), mean, dtype=torch.float64)
        rate = lr * factor(step, steps, 2, 0.1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        rows.append((loss, mean, rate, place.item()))
    return rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_records_hold_the_numbers_of_known_steps(tmp_path, ranks):
    run(go, ranks, settings(tmp_path), Task())
    found, wanted = [r for r in records(tmp_path) if "lr" in r], by_hand()
    assert [r["global_step"] for r in found] == [3, 6, 9, 11]  # the last is of the run's end
    for record in found:
        done = record["global_step"]
        window = wanted[done - (done % 3 or 3) : done]
        assert record["running_loss"] == pytest.approx(sum(row[0] for row in window) / len(window), rel=1e-9)
        assert record["grad_norm"] == pytest.approx(window[-1][1], rel=1e-9)
        assert record["lr"] == pytest.approx(window[-1][2], rel=1e-12)
        assert "skipped_steps" not in record
        assert not [name for name in record if name.startswith(("loading/", "steps_left"))]
    places = [(r["epoch"], r["epoch_progress"], r["num_batches_remaining"]) for r in found]
    # 18, 36, 54 and 66 samples of epochs of 20
    assert places == [(0, 0.9, 1), (1, 0.8, 1), (2, 0.7, 1), (3, 0.3, 3)]
    state = state_of(tmp_path)
    assert state["running_loss"] == pytest.approx(
        wanted[9][0] + wanted[10][0], rel=1e-9
    )  # an extension goes on with these
    assert (state["global_step"], state["position"], state["epoch"], state["epoch_step"]) == (11, 66, 3, 1)
    assert (state["world_size"], state["best"]["step"]) == (ranks, 11)


def test_a_stop_adds_no_record_and_its_summary_has_the_last_loss(tmp_path, capsys):
    schedule = {"optim": Optim(schedule="constant", warmup_steps=0, clip=0.0, weight_decay=0.0)}
    go(None, settings(tmp_path, stop_at=4, **schedule), Task())
    stopped = capsys.readouterr().out
    assert [r["global_step"] for r in records(tmp_path) if "lr" in r] == [3]
    shown_loss = re.search(r"training loss +(\S+)", stopped)[1]
    go(None, settings(tmp_path, **schedule), Task())
    go(None, settings(tmp_path, extend_to=13, **schedule), Task())
    go(None, settings(tmp_path, experiment_name="each", log_freq=1, max_steps=13, **schedule), Task())
    each = [r["running_loss"] for r in read(tmp_path / "each" / "metrics.jsonl") if "lr" in r]
    assert shown_loss == loss_text(each[3])
    found = {r["global_step"]: r["running_loss"] for r in records(tmp_path) if "lr" in r}
    assert list(found) == [3, 6, 9, 11, 12, 13]
    assert found[12] == pytest.approx(sum(each[9:12]) / 3, rel=1e-9)  # as if the run had not ended at 11


def test_a_changed_frequency_counts_the_steps_of_the_window(tmp_path):
    go(None, settings(tmp_path, stop_at=5), Task())
    go(None, settings(tmp_path, log_freq=4), Task())
    found = {r["global_step"]: r["running_loss"] for r in records(tmp_path) if "lr" in r}
    assert list(found) == [3, 8, 11]
    assert found[8] == pytest.approx(sum(row[0] for row in by_hand()[3:8]) / 5, rel=1e-9)


def test_what_is_paused_is_not_counted_to_the_rate(monkeypatch):
    now = iter([10.0, 14.0, 15.0, 25.0])
    monkeypatch.setattr("lockstep.training.step.recorder.time", SimpleNamespace(perf_counter=lambda: next(now)))
    exchange = SimpleNamespace(totals=lambda values, losses: values)
    clock = SimpleNamespace(read=lambda: {"data": 2.0, "forward": 5.0})
    meter = Meter(exchange, clock, torch.device("cpu"))
    for step, items in enumerate((20, 12)):
        meter.add(ReadStep(StepRecord(step, items, [], None, 1.0), [], 7.0 + step, [3.0 * items]))
    meter.pause(1.0)  # an evaluation
    found, _ = meter.read(2)  # at 14: four seconds, one of them paused
    assert (found["items_per_second"], found["running_loss"], found["grad_norm"]) == (32 / 3, 3.0, 8.0)
    assert (found["time/data"], found["time/forward"], found["time/total"]) == (2.0, 5.0, 7.0)
    meter.add(ReadStep(StepRecord(2, 5, [], None, 1.0, applied=False), [], 1.0, [15.0]))
    found, counts = meter.read(1, [4.0])  # at 15: the window before does not count any more
    assert (found["items_per_second"], found["running_loss"], found["skipped_steps"]) == (5.0, 3.0, 1)
    assert counts == [4.0]
    meter.add(ReadStep(StepRecord(3, 20, [], None, 1.0), [], 1.0, []))
    assert meter.read(1)[0]["skipped_steps"] == 1  # of this start
    meter.pause(0.5, "saves")
    assert meter.seconds == {"steps": 0.014, "data": 0.004, "exchange": 0.0, "saves": 0.5}  # but for the first window


def test_evaluations_come_after_the_right_steps_and_numbers(tmp_path):
    go(None, settings(tmp_path, eval_freq=4), Task(wanted=-1.0))
    found = [r for r in records(tmp_path) if "evaluation/loss" in r]
    assert [r["global_step"] for r in found] == [4, 8, 11]
    for record in found:
        place = by_hand()[record["global_step"] - 1][3]
        assert record["evaluation/loss"] == pytest.approx((place + 1) ** 2 + 3, rel=1e-9)
        assert record["evaluation/items"] == 5
        assert record["evaluation/mean"] == 3.0


def test_end_waits_for_a_save_but_not_for_a_lost_rank():
    given = []
    recorder = SimpleNamespace(
        saver=SimpleNamespace(abandon=lambda seconds, leave: given.append((seconds, leave))),
        _built=SimpleNamespace(world=SimpleNamespace(timeout=600.0)),
        _survives_loss=False,
    )
    lost = PeerError("rank 0 lost the other ranks")
    for error in (None, LockstepError("a"), RuntimeError("Connection closed by peer"), lost):
        RunRecorder.__exit__(recorder, None, error, None)
    assert given == [(600.0, True)] * 3 + [(1.0, True)]
    recorder._survives_loss = True
    for error in (LockstepError("a"), lost):
        RunRecorder.__exit__(recorder, None, error, None)
    assert given[4:] == [(600.0, True), (0.2, False)]  # the groups are handed out


def test_without_a_frequency_evaluation_comes_only_at_the_end(tmp_path):
    go(None, settings(tmp_path, stop_at=7), Task())
    assert not [r for r in records(tmp_path) if "evaluation/loss" in r]
    go(None, settings(tmp_path), Task())
    assert [r["global_step"] for r in records(tmp_path) if "evaluation/loss" in r] == [11]


class Sleepy:
    """20 samples, each of which takes two milliseconds to load."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(0.002)
        return "train", float(index + 1)


def test_loader_processes_are_proposed_once_unless_chosen(tmp_path, monkeypatch, capsys):
    class Slow(Task):
        def dataset(self, split):
            return Sleepy() if split == "train" else None

    counts = []
    for name, typed in (("open", {}), ("chosen", {"data.workers": 0})):
        monkeypatch.setattr(SETTINGS, "typed", typed)
        lockstep.train(settings(tmp_path, experiment_name=name, log_freq=10, max_steps=40), Slow())
        counts.append(capsys.readouterr().err.count("loading samples takes"))
    assert counts == [1, 0]


def by_loss(step, loss):
    return {"step": step, "loss": loss, "metric": "loss", "value": loss}


def test_best_of_twelve_is_kept_outside_the_newest(tmp_path):
    """The point passes the wanted place after its fourth step and goes on."""
    wanted = by_hand(12)[3][3]
    keep = Checkpoint(keep=2)
    go(None, settings(tmp_path, max_steps=12, eval_freq=1, ckpt_freq=1, checkpoint=keep), Task(wanted))
    assert state_of(tmp_path)["best"] == by_loss(4, pytest.approx(3.0, abs=1e-12))
    assert checkpoint.list_steps(tmp_path / "r") == [4, 11, 12]


def test_the_best_survives_a_resume(tmp_path):
    wanted = by_hand(12)[3][3]
    common = {"max_steps": 12, "eval_freq": 1, "ckpt_freq": 1, "checkpoint": Checkpoint(keep=1)}
    go(None, settings(tmp_path, stop_at=6, **common), Task(wanted))
    assert checkpoint.list_steps(tmp_path / "r") == [4, 6]
    go(None, settings(tmp_path, **common), Task(wanted))
    assert state_of(tmp_path)["best"]["step"] == 4
    assert checkpoint.list_steps(tmp_path / "r") == [4, 12]


def test_an_evaluation_that_is_best_is_saved_and_no_other(tmp_path):
    losses = (5.0, 4.0, 6.0, 4.0, 3.0, 7.0)  # after steps 1, 3, 5, ...; the same once more is not better
    go(
        None,
        settings(tmp_path, max_steps=13, eval_freq=2, checkpoint=Checkpoint(keep=9)),
        Task(scripted=(*losses, 9.0)),
    )
    assert checkpoint.list_steps(tmp_path / "r") == [2, 4, 10, 13]
    assert state_of(tmp_path)["best"] == by_loss(10, pytest.approx(3.0))


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    losses = (math.nan, 4.0, math.nan, -math.inf, 5.0, 9.0)
    go(None, settings(tmp_path, max_steps=10, eval_freq=2), Task(scripted=losses))
    assert state_of(tmp_path)["best"] == by_loss(4, pytest.approx(4.0))


def test_each_checkpoint_has_its_own_step_with_a_slow_writer(tmp_path, monkeypatch):
    write = checkpoint.write_share

    def slow(*given, **named):
        time.sleep(0.3)
        return write(*given, **named)

    monkeypatch.setattr(checkpoint, "write_share", slow)
    go(None, settings(tmp_path, ckpt_freq=2, eval_freq=3, checkpoint=Checkpoint(keep=9)), Task(wanted=-100.0))
    steps = checkpoint.list_steps(tmp_path / "r")
    assert steps == [2, 3, 4, 6, 8, 9, 10, 11]
    whole = by_hand()
    for step in steps:
        state = checkpoint.read_state(checkpoint.path_of(tmp_path / "r", step))
        assert (state["global_step"], state["position"]) == (step, step * BATCH)
        assert state["running_loss"] == pytest.approx(sum(row[0] for row in whole[step // 3 * 3 : step]), abs=1e-9)
        known = step if step == 11 else step // 3 * 3  # a save comes after the evaluation and the loop's body
        assert (state["best"] or {"step": 0})["step"] == known


def test_restarts_add_up(tmp_path, monkeypatch):
    def start(job, count, stop):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        go(None, settings(tmp_path, stop_at=stop), Task())
        return state_of(tmp_path)["restarts"]

    assert [start("a", 0, 2), start("a", 2, 4), start("a", 3, 5)] == [0, 2, 3]
    assert [start("b", 0, 6), start("b", 1, 7)] == [3, 4]  # another launcher begins to count anew


def test_the_summary_says_what_to_do_now(tmp_path, capsys):
    go(None, settings(tmp_path, stop_at=4), Task())
    assert "stopped: saved after step 4 of 11;" in capsys.readouterr().out
    go(None, settings(tmp_path), Task())
    assert names(
        capsys.readouterr().out, "finished", f"lockstep evaluate {tmp_path / 'r'}", "test_run_recorder.py:Task"
    )


class Sampled(Task):
    """Shows what it makes."""

    def sample(self, model, device):
        return f"made on {device}"


class Told:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.bests, self.evaluated, self.summary = [], [], {}

    def start(self, info):
        self.info = info

    def log(self, record):
        pass

    def progress(self, step, evaluated):
        self.evaluated += [(step, *evaluated)] if evaluated else []

    def best(self, text):
        self.bests.append(text)

    def close(self, summary):
        self.summary = summary


@pytest.mark.parametrize("left", [False, True])
def test_what_a_sink_is_told(tmp_path, monkeypatch, left):
    told = Told()
    sinks = Sinks([told])
    sinks.start({})
    monkeypatch.setattr("lockstep.training.trainer.open_sinks", lambda built: sinks)
    scripted = (5.0, 4.0, 6.0)
    run = lockstep.Run(settings(tmp_path, eval_freq=4, max_steps=12), Sampled(scripted=scripted))
    for step in run:
        if left and step.global_step == 9:
            break
    evaluated = [4, 8] if left else [4, 8, 12]
    assert told.evaluated == [(step, done, 3) for step in evaluated for done in (1, 2, 3)]
    assert told.bests == ["best loss 5 at 4", "best loss 4 at 8", "best loss 4 at 8"][: len(evaluated)]
    found = {
        name: told.summary[name] for name in ("experiment", "global_step", "best", "sample", "world_size", "engine")
    }
    assert found == {
        "experiment": "r",
        "global_step": 9 if left else 12,
        "best": "loss 4 after step 8",
        "sample": "" if left else "made on cpu",
        "world_size": 1,
        "engine": "single",
    }
    assert told.summary["seconds"] > 0
    assert told.summary["files"]["checkpoint"].name == f"step-{found['global_step']:08}"


@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.parametrize(("is_main", "is_best", "saved"), [(1, 1, 4), (1, 0, 4), (1, 0, 0), (0, 1, 4), (0, 0, 4)])
def test_the_end_is_written_by_rank_0_alone_and_sampled_by_all(code, is_main, is_best, saved, monkeypatch):
    monkeypatch.setattr("lockstep.training.step.recorder.on_all_ranks", lambda world, call: call())
    wrote, order, summary = [], [], {}
    model = torch.nn.Identity()
    model.reshard = lambda: order.append("at rest")  # as fsdp's modules have it
    task = SimpleNamespace(sample=lambda model, device: order.append("sample") or "text")
    built = SimpleNamespace(
        world=SimpleNamespace(
            is_main=bool(is_main), leads_folder=bool(is_main), device="cpu", size=2, replica=SimpleNamespace(size=1)
        ),
        engine=SimpleNamespace(model=model),
        pipeline=None,
        task=task,
        state=RunState(),
        switched=None,
        config=Config(experiment_name="r", report=False, data=Data(workers=2)),
        run_plan=SimpleNamespace(step_plan=SimpleNamespace(steps=4)),
        place=Position,
        setup=SimpleNamespace(
            remote=None,
            folder=SimpleNamespace(
                write_state=lambda state: wrote.append("state"), path=RunFolder("a", "r").path, metrics=0
            ),
        ),
    )
    recorder = SimpleNamespace(
        _built=built,
        saved_step=saved,
        _saves=True,
        is_best=bool(is_best),
        _start=0.0,
        _engine_name="ddp",
        saver=SimpleNamespace(settle=lambda last: order.append(("settled", last))),
        _exchange=SimpleNamespace(progress=Progress()),
        _sinks=SimpleNamespace(close=summary.update),
        _meter=SimpleNamespace(seconds={"steps": 100.0, "data": 40.0}, mean_loss=math.nan, spikes=0),
        _write_state_and_prune=lambda state: wrote.append("state, and old checkpoints"),
        _next=str,
        _uploader=None,
        _sample=lambda: task.sample(model, "cpu"),
    )
    RunRecorder.finish(recorder)
    RunRecorder.close(recorder, code)
    assert wrote == ([] if not is_main or not saved else ["state, and old checkpoints"] if is_best else ["state"])
    assert order == [("settled", True), *([] if code else ["sample"]), "at rest"]
    assert summary["waits"].startswith(
        "40.0% of the time in steps, saves and evaluations was spent waiting for samples or for another rank"
    )
    assert (summary["sample"], summary["next"], summary["best"]) == ("" if code else "text", str(code), None)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_mode_says_whether_the_next_steps_wait_for_a_save(tmp_path, monkeypatch, mode):
    write, gate = checkpoint.write_share, threading.Event()

    def waits(*given, **named):
        gate.wait(10)
        return write(*given, **named)

    monkeypatch.setattr(checkpoint, "write_share", waits)
    if mode == "sync":
        gate.set()
    keep = Checkpoint(mode=mode)
    for step in lockstep.Run(settings(tmp_path, ckpt_freq=2, max_steps=4, checkpoint=keep), Task()):
        if step.global_step == 3:
            assert checkpoint.list_steps(tmp_path / "r") == ([2] if mode == "sync" else [])
            gate.set()


@pytest.mark.parametrize("known", [True, False])
def test_a_resume_has_each_evaluation_once_in_the_records(tmp_path, known):
    """Also where it is not known that the one after the newest checkpoint was made, and it is made again."""
    go(None, settings(tmp_path, eval_freq=4, stop_at=8), Task(wanted=-1.0))
    if not known:
        (tmp_path / "r" / "checkpoints" / "evaluated.json").unlink()
    go(None, settings(tmp_path, eval_freq=4), Task(wanted=-1.0))
    assert [r["global_step"] for r in records(tmp_path) if "evaluation/loss" in r] == [4, 8, 11]


@dataclass
class Failing(Task):
    """Its ninth forward of a start fails: in the third step."""

    fails: bool = False
    error: type = ValueError

    def loss(self, model, batch):
        self.evaluations += torch.is_grad_enabled()
        if self.fails and self.evaluations == 9:
            raise self.error("of the task's own")
        return super().loss(model, batch)


@pytest.mark.parametrize("left", [False, True])
def test_the_folder_tells_of_the_end_once_the_last_save_is_whole(tmp_path, monkeypatch, left):
    settle, seen = checkpoint.Saver.settle, []

    def settles(saver, *, last=False):
        seen.extend([(tmp_path / "r" / "ended.json").exists()] * last)
        settle(saver, last=last)

    monkeypatch.setattr(checkpoint.Saver, "settle", settles)
    for _ in lockstep.Run(settings(tmp_path, max_steps=2), Task()):
        if left:
            break
    assert seen == [False]
    assert (tmp_path / "r" / "ended.json").exists()


@pytest.mark.parametrize("error", [PeerError, LockstepError, ValueError])
def test_who_shows_an_error_shows_it_once(tmp_path, capfd, error):
    """The command, or the caller's program, prints it; the rank's log has it too."""
    with pytest.raises(error):
        lockstep.train(settings(tmp_path), Failing(fails=True, error=error))
    assert "of the task's own" not in capfd.readouterr().err
    assert "of the task's own" in (tmp_path / "r" / "logs" / "rank-00000.log").read_text()


def test_the_folder_tells_how_a_start_ended(tmp_path):
    def ended():
        found = RunFolder(str(tmp_path), "r").read_end()
        return found["status"], found["code"], found["step"]

    for step in lockstep.Run(settings(tmp_path), Failing()):
        if step.global_step == 4:
            break
    assert ended() == ("stopped", 0, 4)
    with pytest.raises(ValueError, match="of the task's own"):
        go(None, settings(tmp_path), Failing(fails=True))
    assert ended() == ("failed", 1, 4)
    go(None, settings(tmp_path), Failing())
    assert ended() == ("finished", 0, 11)


def test_evaluations_and_saves_pause_the_clock_and_are_shown(tmp_path, monkeypatch):
    """The hang watch must not take an evaluation for a hang, nor the rate count it."""
    paused, phases = [], []
    pause, at = Meter.pause, Progress.at

    def paused_for(meter, seconds, part):
        paused.append((part, seconds))
        pause(meter, seconds, part)

    def stands_at(progress, step, phase):
        phases.append((step, phase))
        at(progress, step, phase)

    monkeypatch.setattr(Meter, "pause", paused_for)
    monkeypatch.setattr(Progress, "at", stands_at)
    go(None, settings(tmp_path, eval_freq=4, ckpt_freq=5, max_steps=10), Task())
    shown = [place for place in phases if place[1] in (EVALUATING, SAVING, ENDING)]
    evaluated = [(4, EVALUATING), (4, SAVING), (5, SAVING), (8, EVALUATING)]  # the first is the best, the next is not
    assert shown == [*evaluated, (10, EVALUATING), (10, SAVING), (10, ENDING)]
    kinds = {EVALUATING: "evaluation", SAVING: "saves"}
    assert [part for part, _ in paused] == [kinds[phase] for _, phase in shown if phase != ENDING]
    assert all(0 < seconds < 60 for _, seconds in paused)


@pytest.mark.parametrize("platform", ["linux", "no /proc", "darwin"])
def test_the_memory_of_this_process_is_counted_in_bytes(monkeypatch, tmp_path, platform):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # bytes already where the system is darwin
    if platform != "linux":
        monkeypatch.setattr("lockstep.diagnose.profile.tracing._STATUS", str(tmp_path / "none"))
    if platform == "darwin":
        monkeypatch.setattr("lockstep.diagnose.profile.tracing.sys", SimpleNamespace(platform=platform))
        peak //= 1024
    assert peak / 2 < peak_memory(torch.device("cpu")) < peak * 2


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 75, "ended by a signal"), (signal.SIGINT, 130, "interrupted")]
)
def test_run_ended_by_a_signal_saves_the_step_and_says_so(tmp_path, capsys, monkeypatch, number, code, word):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run, steps = lockstep.Run(settings(tmp_path), Task()), 0
    with contextlib.suppress(KeyboardInterrupt):
        for step in run:
            steps = step.global_step
            if steps == 4:
                signal.raise_signal(number)
    assert run.result.exit_code == code
    assert steps in (4, 5)  # the wish is agreed on in this step or the next
    assert state_of(tmp_path)["global_step"] == steps
    assert f"{word}: saved after step {steps} of 11;" in capsys.readouterr().out
    go(None, settings(tmp_path), Task())
    assert state_of(tmp_path)["global_step"] == 11
