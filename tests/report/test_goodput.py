"""Where the wall time of a run went: by made-up timelines, and by those of real runs."""

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import timeline
from lockstep.cli import dispatch
from lockstep.errors import ConfigError, LockstepError
from lockstep.report.goodput import LABELS, duration, goodput


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(t, what, step, more=None, **spent):
    return {"t": t, "what": what, "step": step, "spent": spent, **(more or {})}


def parts(found):
    return {part: round(seconds, 6) for part, seconds in found.seconds.items() if seconds}


def test_each_second_has_its_part(tmp_path):
    path = write(
        tmp_path / "timeline.jsonl",
        line(1010.0, "start", 0, {"world": 2}, start=10.0),
        line(1030.0, "at", 10, training=12.0, loading=3.0, body=1.0, saves=4.0),
        line(1045.0, "at", 20, training=10.0, evaluation=5.0),
        line(1047.0, "end", 20, {"status": "stopped"}, ending=2.0),
        line(1160.0, "start", 15, {"world": 4}, start=13.0),  # 100 s later, from step 15
        line(1170.0, "at", 25, training=10.0),
        line(1171.0, "end", 25, {"status": "finished"}, ending=1.0),
    )
    found = goodput(path)
    assert parts(found) == {
        "training": 12.0 + 5.0 + 10.0,
        "redone": 7.5,  # half of what steps 10 to 20 took
        "loading": 3.0,
        "body": 1.0,
        "saves": 4.0,
        "evaluation": 2.5,
        "start": 23.0,
        "ending": 3.0,
        "lost": 100.0,
    }
    assert found.wall == pytest.approx(1171.0 - 1000.0)
    assert found.share == pytest.approx(27 / 171)
    assert [(each.first, each.last, each.world, each.ended) for each in found.starts] == [
        (0, 20, 2, "stopped"),
        (15, 25, 4, "finished"),
    ]


def test_a_finished_run_waits_for_nothing_until_its_extension(tmp_path):
    path = write(
        tmp_path / "timeline.jsonl",
        line(1010.0, "start", 0, start=10.0),
        line(1030.0, "end", 20, {"status": "finished"}, training=20.0),
        line(5010.0, "start", 20, start=10.0),  # --extend-to, an hour later
        line(5020.0, "end", 30, {"status": "finished"}, training=10.0),
    )
    found = goodput(path)
    assert parts(found) == {"training": 30.0, "start": 20.0}
    assert (found.wall, [each.lost for each in found.starts]) == (50.0, [0.0, 0.0])


def test_what_nobody_knows_is_called_so(tmp_path):
    begun = [line(10.0, "start", 0, start=10.0), line(20.0, "at", 5, training=10.0)]
    again = line(61.0, "start", 0, start=1.0)
    found = goodput(write(tmp_path / "a", *begun, again))  # killed, and begun again by hand
    assert parts(found) == {"start": 11.0, "redone": 10.0, "unknown": 40.0}
    found = goodput(write(tmp_path / "b", *begun, {**again, "ended": 24.0}))  # the launcher saw when it ended
    assert parts(found) == {"start": 11.0, "redone": 10.0, "unknown": 4.0, "lost": 36.0}
    found = goodput(write(tmp_path / "c", *begun, {**again, "ended": 19.0}))  # before its own last word: another's
    assert parts(found)["unknown"] == 40.0


def test_a_run_that_loses_a_rank_and_goes_on(tmp_path):
    path = write(
        tmp_path / "timeline.jsonl",
        line(10.0, "start", 0, {"world": 3}, start=10.0),
        line(20.0, "at", 5, training=10.0),
        line(27.0, "recovered", 5, {"world": 2}, recovery=3.0),  # by another process: 4 s are not accounted for
        line(30.0, "recovered", 5, {"world": 3}, recovery=2.0, training=1.0),
        line(35.0, "end", 9, {"status": "finished"}, training=5.0),
    )
    found = goodput(path)
    assert parts(found) == {"start": 10.0, "training": 16.0, "recovery": 5.0, "unknown": 4.0}
    assert [each.losses for each in found.starts] == [2]
    assert found.wall == pytest.approx(35.0)


def test_clock_set_back_between_two_starts_loses_nothing(tmp_path):
    path = write(
        tmp_path / "timeline.jsonl",
        line(1010.0, "start", 0, start=10.0),
        line(1020.0, "end", 4, {"status": "stopped"}, training=10.0),
        line(500.0, "start", 4, start=2.0),
        line(400.0, "end", 8, {"status": "finished"}, training=10.0),  # and within one
    )
    assert parts(goodput(path)) == {"start": 12.0, "training": 20.0}


starts = st.lists(
    st.tuples(
        st.integers(0, 40),  # where it resumes, at most
        st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5), st.floats(0, 2)), max_size=6),  # steps, seconds
        st.floats(0, 30),  # until the next start
        st.booleans(),  # whether it says its end
    ),
    min_size=1,
    max_size=6,
)


@given(starts)
def test_the_parts_add_up_to_the_wall_time_whatever_happens(tmp_path_factory, starts):
    now, taken, lines = 1000.0, 0, []
    for resumed, pieces, pause, said in starts:
        taken = min(taken, resumed)
        now += 1.0
        lines.append(line(now, "start", taken, start=1.0))
        for steps, training, evaluation in pieces:
            now, taken = now + training + evaluation, taken + steps
            lines.append(line(now, "at", taken, training=training, evaluation=evaluation))
        last = now
        if said:
            lines.append(line(now, "end", taken, {"status": "stopped"}))
        now += pause
    found = goodput(write(tmp_path_factory.mktemp("any") / "timeline.jsonl", *lines))
    assert found.wall == pytest.approx(last - 1000.0, abs=1e-6)
    assert min(found.seconds.values()) >= 0
    assert found.seconds.keys() == LABELS.keys()


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    path = tmp_path / "timeline.jsonl"
    good = [line(10.0, "start", 0, start=10.0), line(20.0, "at", 5, training=10.0)]
    bad = ['{"t": 15.0, "what": "at", "st', "[]", '"x"', '{"t": 1e300, "what": "at", "step": 1, "spent": {}}']
    bad += ['{"t": 1, "what": "at", "step": 1, "spent": {"training": -5}}', "\x00\xff", "[" * 5000, "x" * 200_000]
    bad += [
        '{"t": 1, "what": "at", "step": 1, "spent": {"training": NaN}}',
        '{"t": 1, "what": [], "step": 1, "spent": 3}',
    ]
    path.write_text("\n".join([json.dumps(good[0]), *bad, json.dumps(good[1])]))
    found = goodput(path)
    assert parts(found) == {"start": 10.0, "training": 10.0}
    assert "lines of the timeline could not be read" in found.notes[0]


def test_what_is_no_timeline_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="timeline.jsonl is missing"):
        dispatch(["goodput", str(tmp_path)])
    (tmp_path / "timeline.jsonl").write_text("nothing\n")
    with pytest.raises(ConfigError, match="timeline.jsonl has no timeline records"):
        dispatch(["goodput", str(tmp_path)])
    os.unlink(tmp_path / "timeline.jsonl")
    os.mkfifo(tmp_path / "timeline.jsonl")
    with pytest.raises(ConfigError, match="timeline.jsonl: not a regular file"):
        dispatch(["goodput", str(tmp_path)])


def test_a_long_file_is_read_in_bounded_memory(tmp_path, monkeypatch):
    """Neighbours are taken together; the sums stay, and a place to go back to is found as nearly."""
    monkeypatch.setattr("lockstep.report.goodput._MAX_PIECES", 16)
    many = [line(10.0 + k, "at", k, training=1.0) for k in range(1, 200)]
    path = write(tmp_path / "a", line(10.0, "start", 0, start=10.0), *many, line(209.0, "start", 100))
    assert parts(goodput(path)) == {"start": 10.0, "training": 100.0, "redone": 99.0}


def test_a_run_that_stops_sleeps_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timeline, "_STARTED", [True])  # this process began long before its first run
    began = time.time()
    for step in lockstep.Run(config(tmp_path, eval_freq=2), Ragged()):
        time.sleep(0.05)
        if step.global_step == 5:
            break
    time.sleep(0.3)
    lockstep.train(config(tmp_path, eval_freq=2), Ragged())
    found = goodput(tmp_path / "r" / "timeline.jsonl")
    spent = found.seconds
    assert spent["body"] >= 0.25
    assert spent["lost"] >= 0.3
    assert all(spent[part] > 0 for part in ("training", "loading", "evaluation", "saves", "start", "ending"))
    assert spent["redone"] == spent["unknown"] == spent["recovery"] == 0
    assert found.wall <= time.time() - began + 0.01
    assert [(each.first, each.last, each.ended) for each in found.starts] == [(0, 5, "stopped"), (5, 12, "finished")]
    capsys.readouterr()
    assert dispatch(["goodput", str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert "the caller's own loop body" in said
    assert "steps 6 to 12, 1 rank: finished" in said
    assert dispatch(["goodput", str(tmp_path / "r"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["wall_seconds"] == pytest.approx(sum(told["seconds"].values()))
    assert told["goodput"] == found.share


class Once(Ragged):
    """Its loss is NaN at the first try of a step."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        bad = model.training and bool((batch["input"] == self.row).all(-1).any())
        return loss * float("nan") if bad else loss


def test_a_rollback_undoes_steps_and_a_failure_is_said(tmp_path):
    task = Once()
    task.row = task.dataset("train")[17]["input"]
    with pytest.raises(LockstepError):
        lockstep.train(config(tmp_path, experiment_name="stops", ckpt_freq=2), task)
    assert [each.ended for each in goodput(tmp_path / "stops" / "timeline.jsonl").starts] == ["failed"]
    guards = {"nonfinite": "rollback"}
    lockstep.train(config(tmp_path, experiment_name="back", ckpt_freq=100, guards=guards), task)
    found = goodput(tmp_path / "back" / "timeline.jsonl")
    assert {each.ended for each in found.starts[:-1]} == {"rolled back"}
    assert found.starts[-1].ended == "finished"
    assert len(found.starts) > 1
    if found.starts[0].last > found.starts[1].first:
        assert found.seconds["redone"] > 0
    assert found.seconds["lost"] < 0.1


def test_unwritable_file_is_one_warning_and_no_more(tmp_path, caplog, monkeypatch):
    (tmp_path / "r").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "r" / "timeline.jsonl")
    warned = []
    monkeypatch.setattr(timeline._LOG, "warning", lambda text, *rest: warned.append(text % rest))
    assert lockstep.train(config(tmp_path), Ragged()).status == "finished"
    assert not (tmp_path / "elsewhere").exists()
    assert len([text for text in warned if "cannot write timeline.jsonl" in text]) == 1


def test_a_disk_that_was_full_loses_no_second(tmp_path, monkeypatch):
    kept, write, full = timeline.Timeline(), os.write, []
    kept.begin()
    kept.open(tmp_path / "t", 0, 1)

    def refuses(handle, data):
        if full:
            raise OSError(28, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(os, "write", refuses)
    kept.enter(timeline.TRAINING)
    full.append(True)
    kept.record_regroup(3, 1)
    full.clear()
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:30]))  # half a line
    kept.record_regroup(4, 1)
    monkeypatch.setattr(os, "write", write)
    kept.at(5)
    kept.close("finished")
    with (tmp_path / "t").open("a") as file:
        file.write('{"torn')
    again = timeline.Timeline()
    again.open(tmp_path / "t", 5, 1)
    again.close("finished")
    found = goodput(tmp_path / "t")
    assert [each.ended for each in found.starts] == ["finished", "finished"]
    assert found.seconds["training"] > 0
    assert len(found.notes) == 1


def test_lines_come_the_rarer_the_longer_the_file_is(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    kept = timeline.Timeline()
    kept.open(tmp_path / "t", 0, 1)
    kept.enter(timeline.TRAINING)
    for step in range(20_000):  # of half a second each
        now[0] += 0.5
        kept.at(step + 1)
    kept.close("finished")
    lines = (tmp_path / "t").read_text().splitlines()
    assert 2000 < len(lines) < 6000
    found = goodput(tmp_path / "t")
    assert found.seconds["training"] == pytest.approx(10_000.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (725, "12:05"), (11525, "3:12:05"), (357125, "4 d 03:12:05")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
