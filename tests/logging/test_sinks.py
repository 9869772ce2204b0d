"""The combining sink, metrics.jsonl and the log files."""

import json
import logging
import math
import os
import re
import sys

import numpy as np
import pytest
import torch

from lockstep.logging import Sinks
from lockstep.logging.console import Console
from lockstep.logging.jsonl import JsonLines, read
from lockstep.logging.log import close_log, open_log
from lockstep.training.state import run_dir

PLANTED = "Zq7-planted_Value/9"


@pytest.fixture(autouse=True)
def _closed_log():
    yield
    close_log()


class Recorder:
    def __init__(self, fails=()):
        self.calls = []
        self._fails = fails

    def _call(self, name, value):
        self.calls.append((name, value))
        if name in self._fails:
            raise RuntimeError(f"no {name}")

    def start(self, info):
        self._call("start", info)

    def log(self, record):
        self._call("log", record)

    def close(self, summary):
        self._call("close", summary)


def run(*sinks):
    both = Sinks(sinks)
    both.start({"a": 1})
    both.log({"global_step": 1})
    both.log({"global_step": 2})
    both.close(None)


def test_every_sink_is_called_in_order():
    first, second = Recorder(), Recorder()
    run(first, second)
    assert first.calls == second.calls
    assert [name for name, _ in first.calls] == ["start", "log", "log", "close"]


def test_a_failing_sink_is_reported_once_and_tried_again(caplog):
    broken, whole = Recorder(fails=("log", "close")), Recorder()
    run(broken, whole)
    assert len(caplog.records) == 1
    assert "Recorder failed" in caplog.text
    assert "RuntimeError: no log" in caplog.text
    assert [name for name, _ in broken.calls] == ["start", "log", "log", "close"]
    assert len(whole.calls) == 4


def test_a_sink_that_does_not_start_gets_no_records(caplog):
    broken, whole = Recorder(fails=("start",)), Recorder()
    run(broken, whole)
    assert [name for name, _ in broken.calls] == ["start"]
    assert len(caplog.records) == 1
    assert len(whole.calls) == 4


class Shown(Recorder):
    def progress(self, step, evaluated):
        self._call("progress", (step, evaluated))

    def best(self, text):
        self._call("best", text)


def test_only_sinks_that_show_it_are_told_how_far_the_run_is():
    plain, shown, broken = Recorder(), Shown(), Shown(fails=("start",))
    both = Sinks([plain, broken, shown])
    both.progress(0)  # not started: nobody
    both.start({})
    both.progress(1)
    both.progress(2, (3, 4))
    both.best("loss 2 at 3")
    assert shown.calls[1:] == [("progress", (1, None)), ("progress", (2, (3, 4))), ("best", "loss 2 at 3")]
    assert [name for name, _ in plain.calls + broken.calls] == ["start", "start"]


def test_ctrl_c_in_a_sink_passes():
    class Interrupted(Recorder):
        def log(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Interrupted())


# metrics.jsonl


def write(path, *records, resume_step=None):
    sink = JsonLines(path, resume_step)
    sink.start({})
    for record in records:
        sink.log(record)
    sink.close(None)


def steps(path):
    return [record["global_step"] for record in read(path)]


def test_records_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read(path) == []
    records = [{"global_step": 1, "running_loss": 2.5, "lr": 1e-5}, {"global_step": 2, "evaluation/loss": 3.0}]
    write(path, *records)
    assert read(path) == records
    assert path.read_text().count("\n") == 2


def test_a_record_is_in_the_file_at_once(tmp_path):
    sink = JsonLines(tmp_path / "m")
    sink.log({"global_step": 1})
    assert steps(tmp_path / "m") == [1]
    sink.close(None)
    sink.close(None)


def test_what_is_not_finite_stays_valid_json(tmp_path):
    path = tmp_path / "m"
    write(path, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(math.inf), "e": None})
    text = path.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": "nan", "b": "inf", "c": "-inf", "d": "inf", "e": None}
    found = read(path)[0]
    assert math.isnan(found["a"])
    assert (found["b"], found["c"]) == (math.inf, -math.inf)


def test_numbers_of_numpy_and_torch_become_plain(tmp_path):
    path = tmp_path / "m"
    write(path, {"a": torch.tensor(1.5), "b": np.float32(0.5), "c": np.int64(3), "d": True})
    assert json.loads(path.read_text()) == {"a": 1.5, "b": 0.5, "c": 3, "d": True}


def test_a_resume_forgets_later_records_and_a_torn_line(tmp_path):
    path = tmp_path / "m"
    write(path, *({"global_step": step} for step in (10, 20, 20, 30, 40)), {"note": 1})
    with open(path, "ab") as file:
        file.write(b'{"global_step": 5')
    path.chmod(0o644)
    write(path, {"global_step": 30}, resume_step=20)
    assert [record.get("global_step") for record in read(path)] == [10, 20, 20, None, 30]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_a_torn_line_goes_without_a_resume_too(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"global_step": 1}\n\xff{"global_step"')
    write(path, {"global_step": 2})
    assert path.read_bytes() == b'{"global_step": 1}\n{"global_step": 2}\n'


def test_a_whole_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "m"
    write(path, {"global_step": 1})
    before = path.stat().st_ino
    write(path, {"global_step": 2}, resume_step=1)
    assert path.stat().st_ino == before
    assert steps(path) == [1, 2]


def test_link_planted_at_the_temporary_name_is_not_followed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"global_step": 1}\n{"global_step": 2}\n')
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".metrics.jsonl.part").symlink_to(tmp_path / "precious")
    JsonLines(path, 1).close(None)
    assert (tmp_path / "precious").read_text() == "mine"
    assert [record["global_step"] for record in read(path)] == [1]


def test_a_write_cut_short_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "m"
    sink = JsonLines(path)
    sink.log({"global_step": 1})
    whole = sink._file

    class Full:
        closed, fileno = False, whole.fileno

        def write(self, line):
            whole.write(line[:5])
            raise OSError(28, "No space left on device")

    sink._file = Full()
    with pytest.raises(OSError, match="No space"):
        sink.log({"global_step": 2})
    assert path.read_bytes() == b'{"global_step": 1}\n'  # at once: it may have been the last record
    sink._file = whole
    sink.log({"global_step": 3})
    sink.close(None)
    assert path.read_bytes() == b'{"global_step": 1}\n{"global_step": 3}\n'


def test_a_folder_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(OSError):
        JsonLines(tmp_path / "none" / "m")


# logs

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 rank (\d+) ([A-Z]+) (.*)")


def lines_of(folder, rank=0):
    lines = (folder / "logs" / f"rank-{rank:05d}.log").read_text().splitlines()
    return [LINE.fullmatch(line).groups() for line in lines]


def test_every_line_has_date_rank_and_level(tmp_path, capsys):
    logger = open_log(tmp_path, 3)
    logger.info("forged\n2026 line \x1b[31m")
    logger.getChild("part").warning("number %d", 5)
    logger.debug("not shown")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("it broke")
    found = lines_of(tmp_path, 3)
    assert found[0] == ("3", "INFO", "forged\\n2026 line \\x1b[31m")
    assert found[1] == ("3", "WARNING", "number 5")
    assert found[2] == ("3", "ERROR", "it broke")
    assert found[3][2].startswith("Traceback")
    assert found[-1] == ("3", "ERROR", "second")
    assert capsys.readouterr().err == "rank 3: warning: number 5\nrank 3: error: it broke\n"


def test_stderr_of_rank_0_has_info(tmp_path, capsys):
    logger = open_log(tmp_path, 0)
    logger.info("hello\x1b[2J")
    logger.warning("mind")
    assert capsys.readouterr().err == "hello\\x1b[2J\nwarning: mind\n"


def test_stderr_only_where_asked(tmp_path, capsys):
    open_log(tmp_path, 0, stderr=False).warning("x")
    assert capsys.readouterr().err == ""


def test_opening_twice_writes_once_and_appends(tmp_path):
    open_log(tmp_path, 0, stderr=False).info("one")
    open_log(tmp_path, 0, stderr=False).info("two")
    assert [text for _, _, text in lines_of(tmp_path)] == ["one", "two"]
    close_log()
    close_log()
    open_log(tmp_path, 0, stderr=False).info("three")
    assert len(lines_of(tmp_path)) == 3


def test_the_root_logger_is_left_alone(tmp_path, caplog):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    logger = open_log(tmp_path, 0, stderr=False)
    logger.warning("not for the root")
    assert (root.level, list(root.handlers)) == before
    assert not caplog.records
    close_log()
    assert (logger.handlers, logger.propagate, logger.level) == ([], True, logging.NOTSET)


def test_what_cannot_be_encoded_is_written_out(tmp_path):
    open_log(tmp_path, 0, stderr=False).info("%s é", "\ud800")
    assert lines_of(tmp_path)[0][2] == "\\ud800 é"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_reported_once(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00000.log").symlink_to("/dev/full")
    logger = open_log(tmp_path, 0, stderr=False)
    logger.info("lost")
    logger.info("lost")
    close_log()
    assert capsys.readouterr().err.count("incomplete: OSError") == 1


def test_a_closed_stderr_stops_nothing(tmp_path, monkeypatch):
    logger = open_log(tmp_path, 0)
    monkeypatch.setattr(sys, "stderr", None)
    logger.info("still in the file")
    assert lines_of(tmp_path)[0][2] == "still in the file"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(OSError):
        open_log(tmp_path, 0)


# secrets


def test_planted_secrets_reach_no_file_and_no_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    monkeypatch.setenv("NCCL_EXTRA", f"via={PLANTED}")
    monkeypatch.setattr(sys, "argv", ["lockstep", "train", "--hub-token", "tok3n-argv", f"--x={PLANTED}"])
    url = "https://me:passw0rd@host/x?token=query-s3cret"
    logger = open_log(tmp_path, 0)
    logger.info("arguments %s", sys.argv)
    logger.info("data from %s", url)
    try:
        raise OSError(f"no access with {PLANTED} to {url}")
    except OSError:
        logger.exception("failed")
    run_dir.write_description(tmp_path / "environment.json", run_dir.describe_process())
    sinks = Sinks([Console(10), JsonLines(tmp_path / "metrics.jsonl")])
    sinks.start({"url": url})
    sinks.log({"global_step": 1, "running_loss": 1.0, "note": PLANTED})
    sinks.close({"experiment": PLANTED, "files": {"data": url, PLANTED: "x"}, "next": f"--hub-token tok3n-argv {url}"})
    close_log()
    shown = capsys.readouterr()
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] + [shown.out, shown.err]
    assert len(texts) == 5
    for text in texts:
        assert text
        for secret in (PLANTED, "tok3n-argv", "passw0rd", "query-s3cret"):
            assert secret not in text


def test_logs_during_a_pending_record_come_after_it(tmp_path):
    sinks = Sinks([JsonLines(tmp_path / "metrics.jsonl")])
    there = lambda: [record["n"] for record in read(tmp_path / "metrics.jsonl")]  # noqa: E731
    sinks.write_expected({"n": 0})
    sinks.expect()
    sinks.log({"n": 2})
    sinks.expect()
    sinks.log({"n": 4})
    assert there() == [0]
    sinks.write_expected({"n": 1})
    assert there() == [0, 1, 2]
    sinks.write_expected({"n": 3})
    sinks.log({"n": 5})
    assert there() == [0, 1, 2, 3, 4, 5]
    sinks.expect()
    sinks.log({"n": 7})
    sinks.close(None)  # the run failed before it came
    assert there() == [0, 1, 2, 3, 4, 5, 7]
