"""What lies in a run's folder stays valid, whatever a disk or a killed process did to it."""

import errno
import fcntl
import os
import socket

import pytest
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.config.cli import read_toml
from lockstep.config.sections import Checkpoint
from lockstep.errors import ConfigError
from lockstep.training.state.run_dir import RunFolder, RunLock


def refused(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


OWNER = "process {} on {}, started 2026-01-01T00:00:00+0000\n"


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        ((1, "elsewhere"), "remove "),  # nobody here can ask
        ((os.getpid(), socket.gethostname()), "in use by process"),
        ((4194305, socket.gethostname()), ""),  # no such process
    ],
)
def test_lock_without_flock_says_how_to_clear_it(tmp_path, monkeypatch, owner, words):
    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "run.lock"
    path.write_text(OWNER.format(*owner))
    if not words:
        RunLock(path).acquire(make=True)
        return
    with pytest.raises(ConfigError, match=words) as found:
        RunLock(path).acquire(make=True)
    assert (str(path) in str(found.value)) == (words == "remove ")


def test_a_byte_order_mark_in_a_configuration_is_no_part_of_it(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbflr = 0.5\n")
    assert read_toml(path) == {"lr": 0.5}


def test_what_a_kill_left_of_a_write_goes_with_the_next_start(tmp_path):
    folder = tmp_path / "r"
    leftovers = [
        folder / ".state.json.tmp-0123456789abcdef",
        folder / "checkpoints" / ".skips.json.tmp-0123456789abcdef",
    ]
    (folder / "checkpoints").mkdir(parents=True)
    for path in leftovers:
        path.write_text("{")
    (folder / ".own.tmp-notes").write_text("mine")
    lockstep.train(config(tmp_path, max_steps=1), Ragged())
    assert not any(path.exists() for path in leftovers)
    assert (folder / ".own.tmp-notes").read_text() == "mine"


def test_a_state_file_that_cannot_be_written_is_no_failed_save(tmp_path, monkeypatch):
    def full(self, state):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / "state.json"))

    monkeypatch.setattr(RunFolder, "write_state", full)
    kept = Checkpoint(on_failure="stop")
    assert lockstep.train(config(tmp_path, checkpoint=kept), Ragged()).status == "finished"
    assert "state.json" in (tmp_path / "r" / "logs" / "rank-00000.log").read_text()
    assert checkpoint.verify(checkpoint.path_of(tmp_path / "r", 12)) == []


def test_records_that_cannot_be_opened_are_one_line(tmp_path):
    (tmp_path / "r" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        lockstep.train(config(tmp_path), Ragged())
