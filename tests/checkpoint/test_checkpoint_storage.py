"""A storage that does not answer is asked again, ends the run with 75, and is never taken for damage."""

import errno
import os
from pathlib import Path

import pytest
import torch
from ranks import run
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint, files
from lockstep.config.sections import Checkpoint
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, PeerError, StorageError
from lockstep.files import retry_io
from lockstep.run_state import Selection
from lockstep.training.state.run_dir import RunFolder

LOOKS = ("stat", "lstat", "listdir")
SILENT = [errno.ESTALE, errno.EIO, errno.ETIMEDOUT]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(files, "_PAUSES", (0.0, 0.0, 0.0))


class Failing:
    """Stands before a function of the file system and fails, for the files of a name, as often as it is told."""

    def __init__(self, real, name, number, times):
        self.real, self.name, self.number, self.left = real, name, number, times

    def __call__(self, path, *args, **kwargs):
        if self.left and str(path).endswith(self.name):
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), str(path))
        return self.real(path, *args, **kwargs)


def fail(patch, owner, function, name, number=errno.ESTALE, times=99):
    """Returns what stands there: `left` is how often it would fail yet."""
    stands = Failing(getattr(owner, function), name, number, times)
    patch.setattr(owner, function, lambda *args, **kwargs: stands(*args, **kwargs))
    return stands


@pytest.mark.parametrize("number", [*SILENT, errno.EACCES, errno.ENOSPC, errno.ENOENT])
@pytest.mark.parametrize("times", [1, 3, 4])
def test_the_number_decides_whether_it_is_tried_again(number, times):
    calls = []

    def action():
        calls.append(1)
        if len(calls) <= times:
            raise OSError(number, "Stale file handle")  # whatever it says
        return 7

    if number in SILENT and times <= 3:
        assert (retry_io(action), len(calls)) == (7, times + 1)
        return
    with pytest.raises(StorageError if number in SILENT else OSError) as found:
        retry_io(action)
    assert len(calls) == (4 if number in SILENT else 1)
    assert getattr(found.value, "exit_code", 75) == 75


def saved(folder, *steps):
    for step in steps:
        checkpoint.save(folder, step, {"model/a": torch.full((4,), float(step))}, {}, World(), engine="t")


@pytest.mark.parametrize("number", SILENT)
@pytest.mark.parametrize(
    "name", ["checkpoints", "step-00000002", "manifest.json", "rank-00000.safetensors", "index.json", "state.json"]
)
def test_what_cannot_be_read_now_is_no_damage(tmp_path, monkeypatch, number, name):
    saved(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        stands = [fail(patch, os, function, name, number, times=3) for function in LOOKS]
        assert checkpoint.find_resume(tmp_path, World(), pytest.fail)[0] == checkpoint.path_of(tmp_path, 2)
        assert min(each.left for each in stands) == 0
    for function in LOOKS:
        fail(monkeypatch, os, function, name, number)
    with pytest.raises(StorageError, match=name) as found:
        checkpoint.find_resume(tmp_path, World(), pytest.fail)
    assert found.value.exit_code == 75


def finds(world, folder):
    """Rank 1's storage is silent; how the ranks end."""
    files._PAUSES = (0.0,)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank:
            for function in LOOKS:
                fail(patch, os, function, "manifest.json")
        with pytest.raises(StorageError if world.rank else PeerError) as found:
            checkpoint.find_resume(folder, world, pytest.fail)
    return found.value.exit_code


def test_one_rank_whose_storage_is_silent_ends_all_with_75(tmp_path):
    saved(tmp_path, 1, 2)
    assert run(finds, 2, tmp_path) == [75, 75]


@pytest.mark.parametrize("number", [*SILENT, errno.ENOSPC])
def test_a_save_is_tried_again_and_the_run_ends_with_75(tmp_path, monkeypatch, number):
    real, failures = os.fsync, []

    def fsync(handle):
        if os.readlink(f"/proc/self/fd/{handle}").endswith(".safetensors") and len(failures) < limit:
            failures.append(1)
            raise OSError(number, os.strerror(number))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    limit = 3 if number in SILENT else 0
    saved(tmp_path, 1)
    assert checkpoint.verify(checkpoint.path_of(tmp_path, 1)) == []
    limit = 99
    made = config(tmp_path, ckpt_freq=1, checkpoint=Checkpoint(on_failure="stop"))
    with pytest.raises(StorageError if number in SILENT else LockstepError, match=r"rank-00000\.safetensors") as found:
        lockstep.train(made, Ragged())
    assert found.value.exit_code == (75 if number in SILENT else 1)
    assert not [*(tmp_path / "r" / "checkpoints").glob(".step-*")]


def test_unreachable_folder_is_no_mistake_in_the_flags(tmp_path, monkeypatch):
    folder = RunFolder(str(tmp_path), "r")
    with monkeypatch.context() as patch:
        fail(patch, os, "mkdir", "checkpoints", times=3)
        folder.claim()
    folder.release()
    (folder.path / "ended.json").write_text('{"code": 75}')
    for owner, function, name, call in (
        (os, "mkdir", "checkpoints", RunFolder(str(tmp_path), "new").claim),
        (os, "open", "run.lock", folder.claim),
        (Path, "read_text", "ended.json", folder.read_end),
    ):
        with monkeypatch.context() as patch:
            fail(patch, owner, function, name)
            with pytest.raises(StorageError):
                call()
    with monkeypatch.context() as patch:
        fail(patch, os, "open", "run.lock", errno.EROFS)
        with pytest.raises(ConfigError):
            folder.claim()
    assert folder.read_end() == {"code": 75}


def test_evaluation_that_cannot_be_noted_is_one_line(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("lockstep.training.state.run_dir.write_whole", full)
    with pytest.raises(LockstepError, match=r"step 4: .*evaluated\.json: No space left"):
        RunFolder(str(tmp_path), "r").write_evaluated(4, Selection())
