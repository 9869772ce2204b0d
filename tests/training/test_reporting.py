"""The page at the end of a run: written where the run has ended, never where it goes on, and never a reason to fail."""

import re
import time

import pytest
from ranks import run
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.errors import LockstepError
from lockstep.report.facts import gather
from lockstep.report.page import page
from lockstep.training import trainer


def test_a_run_leaves_its_page_and_the_command_writes_the_same(tmp_path, capsys):
    lockstep.train(config(tmp_path, eval_freq=4), Ragged())
    folder = tmp_path / "r"
    html = (folder / "report.html").read_text()
    assert "Finished: 12 of 12 steps" in html
    assert page([gather(folder)]) == html
    assert f"report      {folder / 'report.html'}" in capsys.readouterr().out
    lockstep.train(config(tmp_path, experiment_name="none", report=False), Ragged())
    assert not (tmp_path / "none" / "report.html").exists()


def test_a_loop_that_is_left_and_one_that_fails(tmp_path):
    for step in lockstep.Run(config(tmp_path, experiment_name="left"), Ragged()):
        if step.global_step == 5:
            break
    assert "Stopped after 5 of 12 steps" in (tmp_path / "left" / "report.html").read_text()

    class Breaks(Ragged):
        def collate(self, samples):
            self.calls = getattr(self, "calls", 0) + 1
            return super().collate(samples if self.calls < 40 else 1 / 0)

    with pytest.raises((LockstepError, ZeroDivisionError)):
        lockstep.train(config(tmp_path, experiment_name="failed"), Breaks())
    html = (tmp_path / "failed" / "report.html").read_text()
    assert "Failed after" in html
    assert "division by zero" in html  # the log's line


def test_a_page_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(trainer._LOG, "warning", lambda text, *rest: warned.append(text % rest))
    (tmp_path / "r" / "report.html").mkdir(parents=True)
    assert lockstep.train(config(tmp_path), Ragged()).status == "finished"
    monkeypatch.setattr(trainer, "write", lambda *_: 1 / 0)
    assert lockstep.train(config(tmp_path, experiment_name="other"), Ragged()).status == "finished"
    assert [line[:27] for line in warned] == ["report.html was not written"] * 2
    assert "ZeroDivisionError" in warned[1]


class Slow(Ragged):
    def collate(self, samples):
        time.sleep(0.04)
        return super().collate(samples)


def test_where_time_was_lost_is_said_at_the_end_and_in_the_page(tmp_path, monkeypatch, capsys):
    lockstep.train(config(tmp_path, experiment_name="short", max_steps=4, ckpt_freq=0), Slow())
    assert "waiting for samples" not in capsys.readouterr().out
    assert "waiting for samples" not in (tmp_path / "short" / "report.html").read_text()
    monkeypatch.setattr("lockstep.report.goodput._MIN_SECONDS", 0.0)
    lockstep.train(config(tmp_path, max_steps=6, ckpt_freq=0), Slow())
    *_, line, last = filter(None, capsys.readouterr().out.splitlines())
    assert re.search("was spent waiting for samples: set (--)?data.workers to 1", line)
    assert last.startswith("finished")
    assert "of the wall time was spent waiting for samples" in (tmp_path / "r" / "report.html").read_text()


def two(world, settings):
    return lockstep.train(settings, Ragged(), world).status


def test_two_ranks_leave_one_page(tmp_path):
    assert run(two, 2, config(tmp_path, exact=True)) == ["finished"] * 2
    lockstep.train(config(tmp_path, experiment_name="alone", exact=True), Ragged())
    html = (tmp_path / "r" / "report.html").read_text()
    prints = {
        each.fingerprint for name in ("r", "alone") for each in gather(tmp_path / name).checkpoints if each.step == 12
    }
    assert len(prints) == 1  # and so the two pages show the same proof
    assert prints.pop() in html
    assert '<td class="n">2</td><td>finished</td>' in html
