"""The checkpoint to resume from, found by all ranks together, however slow the disk is."""

import dataclasses
import io
import os
import time

import pytest
from ranks import RankError, run
from states import differing, full, sharded, zeros

from lockstep import checkpoint
from lockstep.checkpoint import files, find
from lockstep.checkpoint.check import data_files
from lockstep.checkpoint.format import Manifest
from lockstep.distributed.agreement import LONG, on_all_ranks
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, PeerError

IMPATIENT = 1.0  # seconds after which a collective of the impatient world fails


def impatient(world):
    group = dataclasses.replace(world, timeout=IMPATIENT).new_group()
    return dataclasses.replace(world, control=group, timeout=IMPATIENT)


class SlowFile(io.FileIO):
    """Eight blocks in more than twice the time that the others wait."""

    def readinto(self, buffer):
        time.sleep(IMPATIENT / 3)
        return super().readinto(buffer)


def slow_open(real, seen):
    def opened(file, mode="r", buffering=-1):
        if buffering:
            return real(file, mode, buffering)
        seen.append(os.readlink(f"/proc/self/fd/{file}").rpartition("/")[2])
        return SlowFile(file, mode) if seen[-1].endswith(".safetensors") else real(file, mode, buffering)

    return opened


def write(world, folder, step, value=0.0):
    tensors = {name: tensor + value if tensor.is_floating_point() else tensor for name, tensor in full().items()}
    return checkpoint.save(folder, step, tensors, {"step": step}, world, engine="ddp")


def found_slowly(world, folder):
    """Finds and loads with a reader that is slower than the timeout. Returns also what was read for its checksum."""
    world, seen, said = impatient(world), [], []
    files.open = slow_open(open, seen)
    files._CHUNK = max(file.stat().st_size for file in folder.rglob("*.safetensors")) // 6
    began = time.monotonic()
    path, state = checkpoint.find_resume(folder, world, said.append)
    took = time.monotonic() - began
    tensors = sharded(zeros(full()), world, "plain")
    checkpoint.load(path, tensors, world, verified=True)
    checked = [name for name in seen if name.endswith(".safetensors")]
    checkpoint.load(path, zeros(full()), world)  # an explicit load checks too, and is waited for too
    del files.open
    return path.name, state, took, checked, differing(tensors, full()), said


def test_a_disk_slower_than_the_timeout_is_waited_for(tmp_path):
    write(World(), tmp_path, 1)  # by one rank: rank 1 has nothing to read, and waits
    found = run(found_slowly, 2, tmp_path)
    for name, state, took, _, wrong, said in found:
        assert (name, state, wrong, said) == ("step-00000001", {"step": 1}, [], [])
        assert took > 2 * IMPATIENT
    assert [checked for _, _, _, checked, _, _ in found] == [["rank-00000.safetensors"], []]  # read once, by one rank


def falls_back(world, folder):
    said = []
    found = checkpoint.find_resume(folder, world, said.append)
    return found[0].name, found[1], checkpoint.find_newest(folder, world, said.append).name, said


def flip(file, at=-1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_all_ranks_fall_back_to_the_same_older_checkpoint(tmp_path):
    for step in range(1, 6):
        run(write, 2, tmp_path, step)
    paths = {step: checkpoint.path_of(tmp_path, step) for step in range(1, 6)}
    flip(paths[5] / "rank-00000.safetensors")
    flip(paths[4] / "rank-00001.safetensors")
    flip(paths[3] / "index.json")
    (paths[2] / "manifest.json").unlink()
    lines = [
        "skipped checkpoint step-00000005: step-00000005/rank-00000.safetensors is damaged: its checksum is not the "
        "manifest's",
        "skipped checkpoint step-00000004: step-00000004/rank-00001.safetensors is damaged: its checksum is not the "
        "manifest's",
        "skipped checkpoint step-00000003: step-00000003/index.json is damaged: its checksum is not the manifest's",
        "skipped checkpoint step-00000002: step-00000002/manifest.json is missing",
    ]
    for size in (1, 2, 3):
        found = run(falls_back, size, tmp_path)
        assert [each[:3] for each in found] == [("step-00000001", {"step": 1}, "step-00000001")] * size
        assert found[0][3] == lines * 2
        assert [each[3] for each in found[1:]] == [[]] * (size - 1)


def finds_none(world, folder):
    assert checkpoint.find_resume(folder / "new", world, pytest.fail) is None
    assert checkpoint.find_newest(folder / "new", world, pytest.fail) is None
    said = []
    with pytest.raises(
        PeerError if world.rank else CheckpointError, match="none of its 1 checkpoints is complete"
    ) as end:
        checkpoint.find_resume(folder, world, said.append)
    assert end.value.exit_code == 2
    return len(said)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path):
    flip(write(World(), tmp_path, 1) / "rank-00000.safetensors")
    assert run(finds_none, 2, tmp_path) == [1, 0]


def sees_another(world, folder):
    """Rank 1's view of the folder is another one: a file system that is not shared."""
    return checkpoint.find_newest(folder / str(world.rank), world, lambda line: None)


def test_ranks_that_see_other_files_do_not_resume(tmp_path):
    for rank in range(2):
        write(World(), tmp_path / str(rank), 1, value=rank)
    write(World(), tmp_path / "0", 2)
    assert run(sees_another, 2, tmp_path) == [None, None]


def fails_late(world, folder):
    world = impatient(world)
    began = time.monotonic()

    def action():
        time.sleep(2.5 * IMPATIENT * world.rank)
        if world.rank:
            raise OSError(13, "Permission denied", str(folder / "file"))

    with pytest.raises(CheckpointError if world.rank else PeerError, match=r"file: Permission denied") as found:
        on_all_ranks(world, action, signs=LONG)
    assert found.value.exit_code == 2
    return time.monotonic() - began


def test_an_error_after_more_than_the_timeout_reaches_every_rank(tmp_path):
    assert min(run(fails_late, 2, tmp_path)) > 2 * IMPATIENT


def is_lost(world, folder):
    world = impatient(world)
    if world.rank:
        os._exit(9)
    with pytest.raises(PeerError, match="rank 0 lost the other ranks"):
        on_all_ranks(world, lambda: time.sleep(2 * IMPATIENT), signs=LONG)
    (folder / "told").touch()


def test_a_rank_that_died_is_not_waited_for(tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2: died"):
        run(is_lost, 2, tmp_path)
    assert (tmp_path / "told").exists()


def test_a_long_reading_says_how_far_it_is(tmp_path, monkeypatch):
    lines = []
    reading = find._ReadProgress(tmp_path / "step-00000007", World(), lines.append)
    files = {name: {"size": 420 * 10**9, "xxh3_64": ""} for name in ("a.safetensors", "b.safetensors")}
    reading.begin(Manifest(1, 4, "ddp", 0, files))
    reading.report([10**9, 0])
    assert lines == []  # not yet long
    monkeypatch.setattr(find, "_REPORT_SECONDS", -1.0)
    reading.report([70 * 10**9, 50 * 10**9])
    assert lines == ["checking checkpoint step-00000007: 112 GiB of 782 GiB read"]
    for count in (3, 4, 5):
        reading.add(count)
    assert reading.bytes == 12


def test_ranks_share_what_is_to_be_read_by_bytes():
    sizes = {"rank-00000": 900, "rank-00001": 100, "rank-00002": 800, "rank-00003": 200}
    names = {f"{name}.safetensors": {"size": size, "xxh3_64": ""} for name, size in sizes.items()}
    manifest = Manifest(1, 4, "ddp", 0, names | {"state.json": {"size": 5000, "xxh3_64": ""}})
    shares = [data_files(manifest, rank, 2) for rank in range(2)]
    assert [sum(names[name]["size"] for name in share) for share in shares] == [1100, 900]
    assert sorted(shares[0] + shares[1]) == sorted(data_files(manifest)) == sorted(names)
