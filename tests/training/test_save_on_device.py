"""Saves of a run on a CUDA device that is not there: what the computing stream copies, and what the host waits for."""

import threading

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.write import HostBuffer
from lockstep.distributed.world import World

GIVEN = {"max_steps": 7, "ckpt_freq": 3, "precision": "float32", "exact": True, "compile": False}


def second_save(folder, cuda, **changes):
    """(bytes of the parameters, what the computing stream copied to the host, what the host waited for)."""
    run = lockstep.Run(
        config(folder, **GIVEN | changes), Ragged(dropout=0.1, dtype=torch.float32), World(device=DEVICE)
    )
    for step in run:
        if step.global_step == 6:  # which is saved after its body
            del cuda.to_host[:], cuda.waits[:]
        if step.global_step == 7:
            copies, waits = list(cuda.to_host), [wait for wait in cuda.waits if wait.file.startswith("checkpoint/")]
            parameters = sum(parameter.nbytes for parameter in run.model.parameters())
    return parameters, [size for stream, size in copies if stream == 0], copies, waits


def waits_of_a_step(folder, free):
    """Events for which the computing stream waits in a save and the next step; those of batches too."""
    with FakeCuda(fast=False) as cuda:
        cuda.free = free
        run = lockstep.Run(config(folder, **GIVEN), Ragged(dtype=torch.float32), World(device=DEVICE))
        for step in run:
            if step.global_step == 3:
                begin = len(cuda.log)
            if step.global_step == 4:
                asked = cuda.log[begin:]
    return sum(line.startswith("stream 0 waits for event") for line in asked)


def test_device_waits_for_state_copies_only_without_room(tmp_path):
    assert waits_of_a_step(tmp_path / "a", 1 << 20) == waits_of_a_step(tmp_path / "b", 1 << 39) + 1


@pytest.mark.parametrize("room", [True, False])
def test_computing_stream_copies_to_host_only_without_room(tmp_path, room):
    with FakeCuda(fast=False) as cuda:
        cuda.free = 1 << (39 if room else 20)
        parameters, computing, copies, waits = second_save(tmp_path / "cuda", cuda)
    assert sum(computing) == (0 if room else parameters)
    assert sum(size for _, size in copies) >= 3 * parameters  # AdamW's moments too
    assert waits == []
    lockstep.train(config(tmp_path / "cpu", **GIVEN), Ragged(dropout=0.1, dtype=torch.float32))
    for step in (3, 6, 7):
        found, wanted = (checkpoint.path_of(tmp_path / name / "r", step) for name in ("cuda", "cpu"))
        assert checkpoint.fingerprint(found) == checkpoint.fingerprint(wanted)


def test_the_first_save_finds_its_memory_locked_by_a_thread(tmp_path):
    with FakeCuda(fast=False) as cuda:
        run = lockstep.Run(config(tmp_path, **GIVEN), Ragged(dtype=torch.float32), World(device=DEVICE))
        for step in run:
            if step.global_step == 1:
                for thread in threading.enumerate():
                    if thread.name == "lockstep-pin":
                        thread.join(20)
                begun = dict(cuda.locked)
            if step.global_step == 3:
                assert cuda.locked == begun
    assert [name for _, name in begun.values()] == ["lockstep-pin"]


@pytest.mark.parametrize("mode", ["sync", "none"])
def test_no_memory_is_locked_where_no_thread_saves(tmp_path, mode, monkeypatch):
    asked = []
    monkeypatch.setattr(HostBuffer, "prepare", lambda *given: asked.append(given))
    with FakeCuda(fast=False) as cuda:
        run = lockstep.Run(
            config(tmp_path, **GIVEN, checkpoint={"mode": mode}), Ragged(dtype=torch.float32), World(device=DEVICE)
        )
        for step in run:
            if step.global_step == 2:
                run.abandon()
    assert not asked
    assert not cuda.locked
