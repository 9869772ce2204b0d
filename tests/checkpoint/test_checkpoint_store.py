import errno
import os
import resource
import shutil
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import xxhash
from ranks import RankError, run

from lockstep import checkpoint
from lockstep.checkpoint import files, write
from lockstep.checkpoint.layout import owners_of
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, PeerError


def save(folder, step, value=1.0, size=4):
    return checkpoint.save(folder, step, {"model/a": torch.full((size,), value)}, {}, World(), engine="single")


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


CALLS = ["mkdir", "open", "fsync", "chmod", "rename", "close"]


def killed_at(world, folder, victim, number, replaced):
    """Saves step 2; `victim` is killed (signal 9) just before its file-system call of this number."""
    if world.rank == victim:
        count = 0

        def counting(real, *args, **kwargs):
            nonlocal count
            count += 1
            if count > number:
                os.kill(os.getpid(), 9)
            return real(*args, **kwargs)

        for name in CALLS:
            setattr(os, name, partial(counting, getattr(os, name)))
        write.bytes_of = partial(counting, write.bytes_of)  # between two tensors of a file
    tensors = {"model/a": torch.full((64,), 2.0), "model/b": torch.full((64,), 2.0)}
    checkpoint.save(folder, 2, tensors, {"replaced": replaced}, world, engine="single")
    for name in CALLS:
        if world.rank == victim:
            setattr(os, name, getattr(os, name).args[0])
    return count if world.rank == victim else 0


@pytest.mark.parametrize(("size", "victim"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_kill_at_any_phase_of_a_save_loses_nothing(tmp_path, size, victim, replaced):
    save(tmp_path / "count", 1)
    calls = run(killed_at, size, tmp_path / "count", victim, 10**6, False)[victim]
    assert calls >= (10 if victim == 0 else 3)
    # Every phase on one rank; on more ranks, and over a damaged folder, each offset starts at another one.
    numbers = range(replaced + victim, calls, 1 if size == 1 and not replaced else 5)
    for number in numbers:
        folder = tmp_path / str(number)
        first = save(folder, 1)
        if replaced:
            (save(folder, 2, 9.0) / "state.json").unlink()
        with pytest.raises(RankError, match=f"rank {victim} of {size}: died"):
            run(killed_at, size, folder, victim, number, replaced)
        found = checkpoint.newest(folder, say=lambda line: None)
        assert found in (first, checkpoint.path_of(folder, 2)), number
        wanted = {name: torch.zeros(4) for name in ["model/a"]}
        if found == first:
            checkpoint.load(found, wanted, None)
            assert wanted["model/a"].tolist() == [1.0] * 4
        else:
            assert checkpoint.verify(found) == []
        checkpoint.clean(folder)
        assert all(name.startswith("step-") for name in names(folder))
        again = checkpoint.save(folder, 2, {"model/a": torch.full((4,), 2.0)}, {}, World(), engine="single")
        assert checkpoint.newest(folder, say=print) == again


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "lockstep-test", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


FORESEEN = r"small has [\d.]+ [KM]?i?B free and a checkpoint takes 4 MiB; make room"
MET = r"rank-00000.safetensors: No space left on device; check the free space"


@pytest.mark.parametrize("line", [FORESEEN, MET], ids=["foreseen", "met"])
def test_a_full_disk_leaves_the_older_ones(small, monkeypatch, line):
    first = save(small, 1)
    with monkeypatch.context() as patch:
        if line == MET:  # somebody else fills the disk after it was looked at
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
        with pytest.raises(CheckpointError, match=line):
            save(small, 2, size=1 << 20)
    assert names(small) == [first.name]
    assert checkpoint.newest(small, say=pytest.fail) == first
    save(small, 2)


def full_on_one(world, folder):
    tensors = {f"model/{letter}": torch.ones(8) for letter in "abcd"}
    checkpoint.save(folder, 1, tensors, {}, world, engine="ddp")
    if world.rank == 1:
        real = os.fsync

        def fsync(handle):
            os.fsync = real
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = fsync
    with pytest.raises(PeerError if world.rank == 0 else CheckpointError, match="No space left on device") as found:
        checkpoint.save(folder, 2, tensors, {}, world, engine="ddp")
    assert found.value.exit_code == 2
    checkpoint.save(folder, 3, tensors, {}, world, engine="ddp")


def test_a_disk_full_on_one_rank_fails_on_all(tmp_path):
    run(full_on_one, 2, tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_file_size_limit_is_an_error_and_not_a_signal(tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: File too large"):
            save(tmp_path, 1, size=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"run.*(Not a directory|File exists)"):
        save(tmp_path / "run", 1)


def test_nothing_is_written_through_a_planted_link(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "state.json").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"state\.json"):
        files.write_file(tmp_path / "state.json", [b"x"])
    assert (tmp_path / "target").read_text() == "precious"


def test_link_in_place_of_a_checkpoint_is_moved_and_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "keep").write_text("precious")
    (tmp_path / "checkpoints").mkdir()
    checkpoint.path_of(tmp_path, 1).symlink_to(target)
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]
    assert (target / "keep").exists()


def test_an_interrupt_removes_the_temporary_folder(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "_write_share", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_newest_says_each_one_that_it_skips(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (checkpoint.path_of(tmp_path, 3) / "manifest.json").unlink()
    (checkpoint.path_of(tmp_path, 2) / "state.json").write_text("{  }")
    said = []
    assert checkpoint.newest(tmp_path, say=said.append) == checkpoint.path_of(tmp_path, 1)
    assert [line.split(":")[0] for line in said] == [
        "skipped checkpoint step-00000003",
        "skipped checkpoint step-00000002",
    ]
    assert "manifest.json is missing" in said[0]
    assert "state.json has 4 bytes" in said[1]
    assert checkpoint.newest(tmp_path / "nothing", say=said.append) is None


def test_clean_removes_only_leftovers(tmp_path):
    save(tmp_path, 1)
    for name in (
        ".step-00000002.tmp-0123456789abcdef",
        ".step-00000001.old-0123456789abcdef",
        ".mine",
        "step-3",
        "notes",
    ):
        (tmp_path / "checkpoints" / name / "below").mkdir(parents=True)
    assert checkpoint.list_steps(tmp_path) == [1]
    assert checkpoint.newest(tmp_path, say=pytest.fail) == checkpoint.path_of(tmp_path, 1)
    assert len(checkpoint.clean(tmp_path)) == 2
    assert names(tmp_path) == [".mine", "notes", "step-00000001", "step-3"]
    assert checkpoint.clean(tmp_path / "nothing") == []


def test_retain_keeps_the_last_the_best_and_every_nth(tmp_path):
    for step in range(1, 11):
        (checkpoint.path_of(tmp_path, step)).mkdir(parents=True)
    assert checkpoint.retain(tmp_path, last=2, best=3, every=4) == [1, 2, 5, 6, 7]
    assert checkpoint.list_steps(tmp_path) == [3, 4, 8, 9, 10]
    assert checkpoint.retain(tmp_path, last=1, best=checkpoint.path_of(tmp_path, 4), every=0) == [3, 8, 9]
    assert names(tmp_path) == ["step-00000004", "step-00000010"]
    with pytest.raises(ValueError, match="last"):
        checkpoint.retain(tmp_path, last=0, best=None, every=0)


def test_folders_get_the_permissions_of_their_parent(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints").chmod(0o750)
    assert save(tmp_path, 1).stat().st_mode & 0o777 == 0o750
    (tmp_path / "checkpoints").chmod(0o3750)
    assert save(tmp_path, 2).stat().st_mode & 0o7777 == 0o2750  # its group goes on; who may delete there does not


def test_a_file_is_written_and_checked_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", 8)
    monkeypatch.setattr(files, "_WRITE_CHUNK", 8)
    chunks, seen = [bytes(range(20)), b"", bytes(range(100, 109))], []
    written = files.write_file(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)
    assert written == {"size": 29, "xxh3_64": xxhash.xxh3_64_hexdigest(b"".join(chunks))}
    assert files.file_damage(tmp_path / "file", 29, written["xxh3_64"], seen.append) is None
    assert seen == [8, 8, 8, 5]
    assert "29 bytes instead of 28" in files.file_damage(tmp_path / "file", 28, None)


def test_largest_tensors_go_first_to_the_rank_with_least_work():
    assert owners_of([(1, "a"), (1, "b"), (2, "c")], 2) == {"c": 0, "b": 1, "a": 1}
    assert owners_of([(5, "a"), (4, "b"), (3, "c"), (3, "d"), (3, "e")], 2) == {"a": 0, "b": 1, "e": 1, "d": 0, "c": 1}


def test_the_fingerprint_sees_names_shapes_dtypes_and_order():
    a, b = torch.arange(4.0), torch.ones(4)
    states = [
        {"x": a, "y": b},
        {"x": b, "y": a},
        {"x": a, "z": b},
        {"x": a.reshape(2, 2), "y": b},
        {"x": a.view(torch.int32), "y": b},
        {"x": a},
    ]
    found = [checkpoint.fingerprint_of(state) for state in states]
    assert len(set(found)) == len(states)
    assert checkpoint.fingerprint_of({"y": b, "x": a}) == found[0]
    assert found[0].startswith("sha256:")
    assert len(found[0]) == 71


def test_a_fingerprint_without_a_model_is_an_error(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"optimizer/a": torch.ones(2)}, {}, World(), engine="single")
    with pytest.raises(CheckpointError, match="model/"):
        checkpoint.fingerprint(path)
