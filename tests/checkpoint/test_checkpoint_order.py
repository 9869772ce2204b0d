"""In which order a save reaches the disk, what it holds when its writer is slow, and a file that is cut short in it."""

import os
import time
from functools import partial

import pytest
import torch
from ranks import run
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint import write
from lockstep.config.schema import Config
from lockstep.config.sections import Checkpoint
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, PeerError


def short(path, folder):
    """The path below `folder`, without the random part of a temporary name."""
    return os.path.relpath(path, folder).replace("checkpoints", "C").partition(".tmp-")[0] + (
        "/" + os.path.basename(path) if ".tmp-" in os.path.dirname(str(path)) else ""
    )


def recorded(world, folder, step):
    """Saves; [(when, event), ...] of this rank's calls that make something last or give it its name."""
    events = []

    def fsync(real, handle):
        real(handle)
        events.append((time.monotonic_ns(), f"sync {short(os.readlink(f'/proc/self/fd/{handle}'), folder)}"))

    def rename(real, source, target):
        before = time.monotonic_ns()  # what comes before it was done before it began
        real(source, target)
        events.append((before, f"rename {short(source, folder)} {short(target, folder)}"))

    real = os.fsync, os.rename
    os.fsync, os.rename = partial(fsync, real[0]), partial(rename, real[1])
    try:
        tensors = {"model/a": torch.ones(8), "model/b": torch.ones(8)}
        checkpoint.save(folder, step, tensors, {}, world, engine="ddp")
    finally:
        os.fsync, os.rename = real
    return events


@pytest.mark.parametrize("size", [1, 2])
def test_files_manifest_name_and_parent_are_synced_in_order(tmp_path, size):
    folder = tmp_path.resolve() / "run"
    found = run(recorded, size, folder, 7)
    events = [event for _, event in sorted(event for each in found for event in each)]
    files = [f"sync C/.step-00000007/rank-{rank:05d}.safetensors" for rank in range(size)]
    assert events[0] == "sync ."  # the folder of all checkpoints is new
    assert sorted(events[1 : 1 + size]) == files
    assert events[1 + size :] == [
        "sync C/.step-00000007/state.json",
        "sync C/.step-00000007/index.json",
        "sync C/.step-00000007/manifest.json",
        "sync C/.step-00000007",
        "rename C/.step-00000007 C/step-00000007",
        "sync C",
    ]


def test_damaged_checkpoint_stays_until_the_new_one_is_on_disk(tmp_path):
    folder = tmp_path.resolve() / "run"
    recorded(World(), folder, 7)
    (checkpoint.path_of(folder, 7) / "state.json").unlink()
    events = [event for _, event in recorded(World(), folder, 7)]
    assert events[-4].endswith("sync C/.step-00000007")
    assert events[-3].startswith("rename C/step-00000007 C/.step-00000007.old-")
    assert events[-2:] == ["rename C/.step-00000007 C/step-00000007", "sync C"]
    assert checkpoint.verify(checkpoint.path_of(folder, 7)) == []


def cut_short(world, folder, victim, by):
    """The file that `victim` wrote loses its last bytes before the manifest is written."""
    real = write._write_share

    def writing(temporary, share, rank):
        listed = real(temporary, share, rank)
        if rank == victim:
            (name,) = listed
            os.truncate(temporary / name, listed[name]["size"] - by)
        return listed

    write._write_share = writing
    tensors = {"model/a": torch.ones(8), "model/b": torch.ones(8)}
    name = f"rank-{victim:05d}.safetensors"
    with pytest.raises(
        PeerError if world.rank else CheckpointError, match=f"{name}: rank 0 sees another size"
    ) as found:
        checkpoint.save(folder, 2, tensors, {}, world, engine="ddp")
    write._write_share = real
    return str(found.value)


@pytest.mark.parametrize(("size", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_file_that_is_shortened_before_the_manifest_is_noticed(tmp_path, size, victim):
    first = checkpoint.save(tmp_path, 1, {"model/a": torch.ones(2)}, {}, World(), engine="single")
    run(cut_short, size, tmp_path, victim, 1)
    assert list((tmp_path / "checkpoints").iterdir()) == [first]


def kept_steps(folder, mode):
    """{step: (state, fingerprints of model and optimizer)} of the checkpoints of a short run."""
    settings = {"experiment_name": "r", "batch_size": 8, "micro_batch_size": 4, "lr": 0.1, "precision": "float64"}
    every = {"max_steps": 6, "ckpt_freq": 2, "eval_freq": 1, "log_freq": 1}
    config = Config(**settings, **every, save_dir=str(folder), checkpoint=Checkpoint(keep=9, mode=mode))
    for _ in lockstep.Run(config, Ragged()):
        pass
    paths = {step: checkpoint.path_of(folder / "r", step) for step in checkpoint.list_steps(folder / "r")}
    prints = {
        step: [checkpoint.fingerprint(path, kind) for kind in ("model/", "optimizer/")] for step, path in paths.items()
    }
    states = {step: checkpoint.read_state(path) for step, path in paths.items()}
    assert len({state.pop("run_id") for state in states.values()}) == 1  # drawn for each run
    return {step: (states[step], prints[step]) for step in paths}


def test_save_holds_its_own_step_even_with_a_slow_writer(tmp_path, monkeypatch):
    wanted = kept_steps(tmp_path / "at once", "sync")
    real = checkpoint.write_share

    def slow(*args, **kwargs):
        time.sleep(0.3)  # the steps until the next save are done in it
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_share", slow)
    assert kept_steps(tmp_path / "slow", "async") == wanted
    assert {2, 4, 6} <= wanted.keys()
    assert all(state["global_step"] == step for step, (state, _) in wanted.items())
    assert len({tuple(prints) for _, prints in wanted.values()}) == len(wanted)
