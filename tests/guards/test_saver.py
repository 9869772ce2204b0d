"""Saving beside the training: what is saved is what was, and errors reach all ranks."""

import gc
import logging
import mmap
import platform
import re
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint import saver, write
from lockstep.checkpoint import write as writing
from lockstep.checkpoint.layout import in_file_order, share_out
from lockstep.distributed import agreement
from lockstep.distributed.agreement import LONG, Signs, on_all_ranks
from lockstep.distributed.world import World
from lockstep.engines.optimizer_step import OptimizerStep
from lockstep.errors import CheckpointError, LockstepError
from lockstep.training.step import recorder


def save(saver, folder, step, tensors, gate=None):
    def write(share, world):
        if gate:
            gate.wait(20)
        checkpoint.write_share(folder, step, share, {"step": step}, world, engine="t")

    saver.begin(tensors, write)


def loaded(folder, step, size):
    tensors = {"model/a": torch.empty(size)}
    checkpoint.load(checkpoint.path_of(folder, step), tensors, None)
    return tensors["model/a"]


def test_steps_that_go_on_meanwhile_are_not_in_the_checkpoint(tmp_path):
    saver, gate, tensor = checkpoint.Saver(World()), threading.Event(), torch.ones(1000)
    save(saver, tmp_path, 1, {"model/a": tensor}, gate)
    tensor.mul_(2)  # the next step, while the thread has written nothing
    gate.set()
    save(saver, tmp_path, 2, {"model/a": tensor})
    saver.settle()
    assert torch.equal(loaded(tmp_path, 1, 1000), torch.ones(1000))
    assert torch.equal(loaded(tmp_path, 2, 1000), torch.full((1000,), 2.0))


def test_the_caller_is_not_kept(tmp_path):
    saver, gate = checkpoint.Saver(World()), threading.Event()
    began = time.perf_counter()
    save(saver, tmp_path, 1, {"model/a": torch.ones(10)}, gate)
    assert time.perf_counter() - began < 1.0
    assert not checkpoint.list_steps(tmp_path)
    gate.set()
    saver.settle()
    assert checkpoint.list_steps(tmp_path) == [1]


def fails(share, world):
    raise CheckpointError("the disk is full")


def test_the_last_save_of_a_run_must_not_fail(caplog):
    saver = checkpoint.Saver(World())
    saver.begin({}, fails, 14, final=True)
    with pytest.raises(LockstepError, match=r"after step 14 failed on rank 0 \(\S+\): the disk is full; start"):
        saver.settle(last=True)
    (record,) = caplog.records
    assert record.only_file, "the terminal has the error alone"
    assert record.message.endswith("; the run ends")


@pytest.mark.parametrize(("policy", "allowed"), [("stop", 0), ("continue", 1)])
@pytest.mark.parametrize("background", [True, False])
def test_failures_follow_the_policy(tmp_path, policy, allowed, background):
    told = []
    saver = checkpoint.Saver(World(), background=background, policy=policy, on_failure=lambda: told.append(1))
    for _ in range(allowed):
        saver.begin({}, fails)
        saver.settle()
    saver.begin({}, fails)
    with pytest.raises(LockstepError, match="the disk is full"):
        saver.settle()
    assert told == [1]


def test_a_save_that_holds_forgives_the_one_before(tmp_path):
    saver = checkpoint.Saver(World())
    for step in range(3):
        saver.begin({}, fails)
        saver.settle()
        save(saver, tmp_path, step, {"model/a": torch.ones(3)})
    saver.settle()
    assert checkpoint.list_steps(tmp_path) == [0, 1, 2]


def beside(world, folder, victim):
    """A save goes on while the control group is used by the main thread; on one rank the writing fails."""
    saver = checkpoint.Saver(world, policy="stop")
    tensors = {"model/a": torch.arange(4000.0), "model/b": torch.ones(7)}

    def full(path, chunks):
        raise OSError(28, "No space left on device")

    def write(share, own):
        checkpoint.write_share(folder, 5, share, {}, own, engine="t")

    if world.rank == victim:
        writing.write_file = full

    saver.begin(tensors, write)
    sums = [sum(world.gather(number)) for number in range(200)]
    try:
        saver.settle()
    except LockstepError as error:
        return sums, str(error)
    return sums, ""


@pytest.mark.parametrize("victim", [None, 1])
def test_the_threads_group_is_its_own_and_errors_reach_all_ranks(tmp_path, victim):
    found = run(beside, 2, tmp_path, victim)
    assert [sums for sums, _ in found] == [[2 * number for number in range(200)]] * 2
    if victim is None:
        assert [said for _, said in found] == ["", ""]
        assert not checkpoint.verify(checkpoint.path_of(tmp_path, 5))
    else:
        assert all(f"failed on rank 1 ({socket.gethostname()}): " in said for _, said in found)
        assert not checkpoint.list_steps(tmp_path)


def hangs(world, folder, victim):
    """What rank 0 logs of a save whose writing takes long on one rank."""
    lines, real = [], writing.write_file
    logging.getLogger("lockstep").addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())

    def slow(path, chunks):
        time.sleep(1.0)
        return real(path, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_SIGN", 0.05)
        patch.setattr(writing, "_SLOW", 0.3)
        if world.rank == victim:
            patch.setattr(writing, "write_file", slow)
        checkpoint.save(folder, 5, {"model/a": torch.arange(40.0), "model/b": torch.ones(7)}, {}, world, engine="t")
    logging.getLogger("lockstep").removeHandler(handler)
    return lines


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 1)])
def test_slow_save_is_reported_once_with_rank_host_and_folder(tmp_path, ranks, victim):
    lines, *others = run(hangs, ranks, tmp_path, victim)
    assert others == [[]] * (ranks - 1)
    (line,) = lines
    place = re.escape(str(checkpoint.path_of(tmp_path, 5)))
    host = re.escape(platform.node())
    assert re.match(
        f"the save after step 5 has been writing to {place} for [01] s and waits for rank {victim} on {host};", line
    )


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(CheckpointError, match="has 0 B free and a checkpoint takes"):
        checkpoint.save(tmp_path, 1, {"model/a": torch.ones(1000)}, {}, World(), engine="t")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_thread_takes_its_device_before_it_waits_for_it(monkeypatch):
    """A thread begins on device 0: to wait there first would make each rank take memory on it."""
    order, world = [], World(device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append(device))
    ready = type("Event", (), {"synchronize": lambda self: order.append("waited")})()
    checkpoint.Saver(world)._work(None, ready, lambda share, own: order.append("written"))
    assert order == [world.device, "waited", "written"]


def test_threads_group_waits_like_the_world_and_is_returned(monkeypatch):
    made, ended = [], []
    monkeypatch.setattr(
        "torch.distributed.new_group", lambda ranks, **asked: made.append(asked) or f"group {len(made)}"
    )
    monkeypatch.setattr("torch.distributed.destroy_process_group", ended.append)
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    checkpoint.Saver(World()).abandon(0.0)
    first, second = (checkpoint.Saver(World(size=2, timeout=7.0)) for _ in range(2))
    assert [asked["timeout"].total_seconds() for asked in made] == [7.0, 7.0]
    gate = threading.Event()
    second._thread = threading.Thread(target=gate.wait, args=(20,))
    second._thread.start()
    for _ in range(2):
        first.abandon(0.0)
        second.abandon(0.0)
    assert ended == ["group 1"]
    gate.set()
    second.abandon(20.0)
    assert ended == ["group 1", "group 2"]


class OnDevice(torch.Tensor):
    """As a tensor on a device is seen by whoever copies it."""

    is_cuda = True

    def record_stream(self, stream):
        stream.order.append("kept")


class Cuda:
    """What stands in for torch.cuda: streams and events that note what is asked of them, and the driver's locks."""

    def __init__(self, monkeypatch, code=0, free=0, parts=100):
        self.order, self.locked, self.code, self.free, self.parts = [], {}, code, free, parts
        self.reserved, self.peak = 70 * 2**30, 69 * 2**30
        self.stream_now = Lane(self, "compute")
        for name, value in {
            "Event": lambda blocking: Happening(self),
            "Stream": lambda device: Lane(self, "beside"),
            "current_stream": lambda device=None: self.stream_now,
            "stream": self.on,
            "cudart": lambda: self,
            "mem_get_info": lambda device: (self.free, 2**40),
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peak,
            "set_device": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        copy = torch.Tensor.copy_

        def copied(held, local, non_blocking=False):
            if getattr(local, "is_cuda", False):
                assert non_blocking
                assert self.code or any(s <= held.data_ptr() < s + size for s, size in self.locked.items()), "locked"
                self.order.append(f"copy on {self.stream_now.name}")
            return copy(held, local.as_subclass(torch.Tensor))

        monkeypatch.setattr(torch.Tensor, "copy_", copied)
        empty = torch.empty
        monkeypatch.setattr(
            torch,
            "empty",
            lambda *size, device=None, **how: self.allocated(empty(*size, **how)) if device else empty(*size, **how),
        )

    def allocated(self, found):
        if not self.parts:
            raise torch.cuda.OutOfMemoryError
        self.parts -= 1
        self.order.append(f"snapshot on {self.stream_now.name}")
        return on_device(found)

    @contextmanager
    def on(self, stream):
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def cudaHostRegister(self, start, size, flags):
        if not self.code:
            self.locked[start] = size
        return self.code

    def cudaHostUnregister(self, start):
        del self.locked[start]


class Lane:
    def __init__(self, cuda, name):
        self.order, self.name = cuda.order, name

    def wait_stream(self, other):
        self.order.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.order.append(f"{self.name} waits for the copies")


class Happening:
    def __init__(self, cuda):
        self.order = cuda.order

    def record(self, stream):
        self.order.append(f"noted on {stream.name}")

    def synchronize(self):
        self.order.append("the thread waits")


def on_device(tensor):
    return tensor.as_subclass(OnDevice)


STATES = {
    "model/a": on_device(torch.ones(3)),
    "model/c": torch.ones(1),
    "optimizer/a/exp_avg": on_device(torch.ones(3)),
    "optimizer/a/step": torch.ones(()),
}
RESTING = {name for name in STATES if name.startswith("optimizer/")}


def test_what_rests_is_copied_beside_and_the_next_update_waits(monkeypatch):
    cuda = Cuda(monkeypatch)
    saver, update = checkpoint.Saver(World()), lambda: cuda.order.append("update")
    share, ready = saver._copy(share_out(STATES, World()), RESTING)
    cuda.order.append("forward")
    for _ in range(2):
        saver.order()
        update()
    assert cuda.order == [
        "copy on compute",
        "beside waits for compute",
        "copy on beside",
        "kept",
        "noted on beside",
        "forward",
        "compute waits for the copies",
        "update",
        "update",
    ]
    assert {piece.name: piece.local.tolist() for piece in share.pieces} == {
        "model/a": [1.0] * 3,
        "model/c": [1.0],
        "optimizer/a/exp_avg": [1.0] * 3,
        "optimizer/a/step": 1.0,
    }
    saver._world = World(device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: cuda.order.append(device))
    del cuda.order[:]
    saver._work(share, ready, lambda share, own: cuda.order.append("written"))
    assert cuda.order == [torch.device("cuda", 1), "the thread waits", "written"]
    assert checkpoint.Saver(World())._copy(share_out({"model/a": torch.ones(3)}, World()))[1] is None


WITHOUT_ROOM = ["copy on compute", "beside waits for compute", "copy on beside", "kept", "noted on beside"]
WITH_ROOM_FOR_SOME = [
    *("snapshot on compute", "beside waits for compute"),
    *("copy on beside", "kept", "noted on beside"),  # what rests, for which alone the next update waits
    *("copy on beside", "kept", "noted on beside"),
]
WITH_ROOM = [
    *["snapshot on compute"] * 2,
    *("beside waits for compute", *("copy on beside", "kept") * 2, "noted on beside"),
]


@pytest.mark.parametrize(
    ("free", "expected", "waits"),
    # Twice 12 bytes are copied; a GiB is left alone, and the allocator has one that no step used so far.
    [(24, WITH_ROOM, 0), (23, WITH_ROOM_FOR_SOME, 1), (12, WITH_ROOM_FOR_SOME, 1), (11, WITHOUT_ROOM, 1)],
)
def test_copies_come_from_snapshots_where_there_is_room(monkeypatch, free, expected, waits):
    cuda = Cuda(monkeypatch, free=free)
    saver = checkpoint.Saver(World())
    share, _ = saver._copy(share_out(STATES, World()), RESTING)
    assert cuda.order == expected
    saver.order()
    assert cuda.order[len(expected) :] == ["compute waits for the copies"] * waits
    assert {piece.name: piece.local.tolist() for piece in share.pieces} == {
        "model/a": [1.0] * 3,
        "model/c": [1.0],
        "optimizer/a/exp_avg": [1.0] * 3,
        "optimizer/a/step": 1.0,
    }


def test_device_without_room_is_copied_from_directly(monkeypatch):
    cuda = Cuda(monkeypatch, free=2**30, parts=0)
    states = STATES | {"model/b": on_device(torch.full((5,), 2.0))}
    share, _ = checkpoint.Saver(World())._copy(share_out(states, World()), RESTING)
    assert cuda.order == ["copy on compute", *WITHOUT_ROOM]
    assert {piece.name: piece.local.tolist() for piece in share.pieces}["model/b"] == [2.0] * 5


def test_next_save_has_the_room_of_the_last_snapshots(monkeypatch):
    cuda = Cuda(monkeypatch, free=24)
    saver = checkpoint.Saver(World())
    for peak in (24, 0, 24):  # a step reached its peak with the snapshots there, or without
        del cuda.order[:]
        saver._copy(share_out(STATES, World()), RESTING)
        assert cuda.order == WITH_ROOM
        cuda.free, cuda.reserved, cuda.peak = 0, 70 * 2**30 + 24, 69 * 2**30 + peak


def test_snapshots_are_made_and_copied_in_parts(monkeypatch):
    cuda = Cuda(monkeypatch, free=2**30)
    monkeypatch.setattr(saver, "_PART", 40)
    tensors = {f"model/{place}": on_device(torch.full((size,), float(size))) for place, size in enumerate((3, 5, 20))}
    tensors |= {"model/half": on_device(torch.ones(3, 5, dtype=torch.bfloat16)), "model/n": on_device(torch.ones(()))}
    share, _ = checkpoint.Saver(World())._copy(share_out(tensors, World()))
    assert cuda.order.count("snapshot on compute") == cuda.order.count("copy on beside") == 3  # 12 + 20, 80, 4 + 30
    assert len(share.pieces) == 5
    for piece in share.pieces:
        assert torch.equal(piece.local, tensors[piece.name].as_subclass(torch.Tensor))


def test_a_snapshot_is_gone_once_its_copies_are_ordered(monkeypatch):
    cuda = Cuda(monkeypatch, free=2**30)
    saver = checkpoint.Saver(World())
    before = {id(found) for found in gc.get_objects() if type(found) is OnDevice}
    share, ready = saver._copy(share_out(STATES, World()), RESTING)
    assert cuda.order.count("snapshot on compute") == 2
    assert ready
    assert share.pieces
    assert {id(found) for found in gc.get_objects() if type(found) is OnDevice} <= before


def test_the_next_save_comes_after_the_copies_of_the_one_before(monkeypatch):
    """They go into the same memory."""
    cuda = Cuda(monkeypatch)
    saver = checkpoint.Saver(World())
    for _ in range(2):
        saver._copy(share_out(STATES, World()), RESTING)
    assert cuda.order.count("compute waits for the copies") == 1
    assert len(cuda.locked) == 1


def test_run_orders_updates_bodies_and_evaluations_after_copies(monkeypatch, tmp_path):
    seen, begin = [], checkpoint.Saver.begin
    update, evaluate = OptimizerStep.__call__, recorder.evaluate_all

    def noted(name, call):
        return lambda *args, **settings: seen.append(name) or call(*args, **settings)

    def begun(saver, tensors, write, step, resting, *, final):
        seen.append("save")
        assert resting == {name for name in tensors if name.startswith(("optimizer/", "average/"))}
        assert len(resting) < len(tensors)
        assert final == (step == 2)
        begin(saver, tensors, write, step, resting, final=final)

    monkeypatch.setattr(checkpoint.Saver, "order", lambda saver: seen.append("order"))
    monkeypatch.setattr(checkpoint.Saver, "begin", begun)
    monkeypatch.setattr(OptimizerStep, "__call__", noted("update", update))
    monkeypatch.setattr(recorder, "evaluate_all", noted("evaluate", evaluate))
    how = {"max_steps": 2, "ckpt_freq": 1, "optim": {"ema": 0.5}}
    lockstep.train(config(tmp_path, **how), Ragged())
    kept = seen[:]
    del seen[:]
    seen.extend("body" for _ in lockstep.Run(config(tmp_path, experiment_name="loop", **how), Ragged()))
    for found in (kept, seen):
        copies = False
        for call in found:
            assert call in ("save", "order") or not copies, found
            copies = call == "save" or (copies and call != "order")
    assert {"update", "evaluate", "save"} <= set(kept)
    assert "body" in seen


def test_no_more_is_locked_than_is_copied_and_it_is_given_back(monkeypatch):
    cuda = Cuda(monkeypatch)
    sizes = [50257 * 3, 1025, 700, 3, 4097, 5]  # which a power of two for each would nearly double
    tensors = {f"model/{place}": on_device(torch.ones(size)) for place, size in enumerate(sizes)}
    tensors["model/half"] = on_device(torch.ones(3, 5, dtype=torch.bfloat16))
    tensors["model/number"] = on_device(torch.ones((), dtype=torch.float64))
    saver = checkpoint.Saver(World())
    share, _ = saver._copy(share_out(tensors, World()))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert list(cuda.locked.values()) == [saver._pinned.nbytes]
    assert total <= saver._pinned.nbytes <= 1.1 * total
    for piece in share.pieces:
        assert torch.equal(piece.local, torch.Tensor(tensors[piece.name]).as_subclass(torch.Tensor))
    places = [piece.local.data_ptr() for piece in share.pieces]
    again, _ = saver._copy(share_out(tensors, World()))
    assert [piece.local.data_ptr() for piece in again.pieces] == places
    del tensors["model/0"]
    saver._copy(share_out(tensors, World()))
    assert list(cuda.locked.values()) == [saver._pinned.nbytes]
    del saver, share, again
    gc.collect()
    assert not cuda.locked


def test_memory_is_made_ahead_by_a_thread_with_its_device(monkeypatch):
    cuda, order, device = Cuda(monkeypatch), [], torch.device("cuda", 1)
    lock = cuda.cudaHostRegister
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: order.append((device, threading.current_thread().name))
    )
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *given: order.append("locked") or lock(*given), raising=False)
    saver = checkpoint.Saver(World(device=device))
    saver.prepare(STATES)
    saver._pinned._thread.join(20)
    assert order == [(device, "lockstep-pin"), "locked"]
    share, _ = saver._copy(share_out(STATES, World()), RESTING)
    assert len(order) == 2
    assert share.pieces[0].local.tolist() == [1.0] * 3


def test_host_tensor_that_changes_shape_is_not_locked_again(monkeypatch):
    cuda, locks = Cuda(monkeypatch), []
    lock = cuda.cudaHostRegister
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *given: locks.append(given) or lock(*given), raising=False)
    saver = checkpoint.Saver(World())
    for size in (1, 2, 3):
        share, _ = saver._copy(share_out(STATES | {"kept.history/seen": torch.ones(size)}, World()), RESTING)
        assert {piece.name: piece.local.tolist() for piece in share.pieces}["kept.history/seen"] == [1.0] * size
    assert len(locks) == 1


def test_a_save_waits_for_memory_that_is_being_made(monkeypatch):
    cuda, gate = Cuda(monkeypatch), threading.Event()
    lock = cuda.cudaHostRegister
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *given: gate.wait(20) and lock(*given), raising=False)
    saver = checkpoint.Saver(World())
    saver.prepare(STATES)
    threading.Timer(0.1, gate.set).start()
    saver._copy(share_out(STATES, World()), RESTING)
    assert len(cuda.locked) == 1


def test_memory_that_could_not_be_made_ahead_is_made_by_the_save(monkeypatch):
    cuda = Cuda(monkeypatch)

    def fails(device):
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "set_device", fails)
    saver = checkpoint.Saver(World())
    saver.prepare(STATES)
    saver._copy(share_out(STATES, World()), RESTING)
    assert len(cuda.locked) == 1


@pytest.mark.parametrize("sizes", [(1500, 1500, 7, 3000, 2), (2048, 2048, 1024, 1024, 2)], ids=["any", "of pages"])
def test_memory_is_locked_in_parts_between_which_no_tensor_lies(monkeypatch, sizes):
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(write, "_SEGMENT", 8192)
    tensors = [on_device(torch.full((size,), float(size))) for size in sizes]
    held = write.HostBuffer()
    places = held.places(tensors)
    assert len(cuda.locked) in (3, 4)
    copied = [write.span(places[run.start : run.stop]) for run in write.contiguous_runs(places)]  # what snapshots go to
    for place in (*places, *copied):
        first, size = place.data_ptr(), place.nbytes
        assert any(start <= first and first + size <= start + many for start, many in cuda.locked.items())
    assert all(start % mmap.PAGESIZE == 0 for start in cuda.locked)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what it does with memory")
def test_no_forked_process_inherits_the_memory(monkeypatch):
    Cuda(monkeypatch)
    held = write.HostBuffer()
    [place] = held.places([on_device(torch.ones(3 * 2**20))])
    found, flags = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            begin, end = (int(each, 16) for each in head.split("-"))
            found = begin <= place.data_ptr() < end
        elif found and head == "VmFlags:":
            flags = line.split()
    assert "dc" in flags
    assert "sh" not in flags


def test_memory_that_the_driver_does_not_lock_is_still_used(monkeypatch, caplog):
    Cuda(monkeypatch, code=2)
    share, _ = checkpoint.Saver(World())._copy(share_out(STATES, World()))
    assert "did not page-lock 24 bytes" in caplog.text
    assert share.pieces[0].local.tolist() == [1.0] * 3


def test_the_seconds_that_the_caller_waited_are_counted(monkeypatch):
    """They are among a rank's busy seconds: see the straggler."""
    clock = SimpleNamespace(now=0.0)

    def wait(seconds):
        clock.now += seconds

    monkeypatch.setattr("lockstep.checkpoint.saver.time", SimpleNamespace(perf_counter=lambda: clock.now))
    saver = checkpoint.Saver(World(), background=False)
    for number in (1, 2):
        saver.begin({"model/a": torch.ones(2)}, lambda share, world: wait(3.0))
        assert (saver.blocked, saver.writing) == (3.0 * number, 3.0 * number)
    saver = checkpoint.Saver(World())
    for number in (1, 2):
        saver.begin({"model/a": torch.ones(2)}, lambda share, world: None)
        saver._thread.join()
        saver._thread = SimpleNamespace(join=lambda: wait(5.0))  # a slow disk
        saver.settle()
        assert (saver.blocked, saver.writing) == (5.0 * number, 0.0)


def test_a_failure_that_was_told_is_not_counted_again():
    saver = checkpoint.Saver(World())
    saver.begin({}, fails)
    for _ in range(3):
        saver.settle()


def test_host_copy_is_made_once_for_each_shape_and_dtype():
    saver, tensor, places = checkpoint.Saver(World()), torch.ones(4), []
    for each in (tensor, tensor + 1, tensor.double(), tensor.double()[:2]):
        saver.begin({"model/a": each}, lambda share, world: places.append(share.pieces[0].local))
        saver.settle()
    assert places[0] is places[1]
    assert [held.dtype for held in places] == [torch.float32, torch.float32, torch.float64, torch.float64]
    assert [held.tolist() for held in places] == [[2.0] * 4, [2.0] * 4, [1.0] * 4, [1.0] * 2]


def test_copy_of_many_tensors_is_one_and_the_file_is_the_same(tmp_path):
    """Each piece that is written by itself takes the interpreter's lock from the loop."""
    tensors = {f"model/{place}": torch.arange(float(place)) for place in range(40)}  # also an empty one
    tensors |= {f"model/half/{place}": torch.ones(place, 3, dtype=torch.bfloat16) for place in range(5)}
    tensors |= {"model/strided": torch.arange(12.0).view(3, 4).t(), "model/number": torch.ones(()).double()}
    saver, chunks = checkpoint.Saver(World()), []

    def write(share, world):
        chunks.extend(writing._safetensors(in_file_order(share.pieces)))
        checkpoint.write_share(tmp_path / "saver", 1, share, {}, world, engine="t")

    saver.begin(tensors, write)
    saver.settle(last=True)
    checkpoint.save(tmp_path / "save", 1, tensors, {}, World(), engine="t")
    _length, _header, content = chunks
    assert content.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    saved, wanted = (
        checkpoint.path_of(tmp_path / name, 1).joinpath("rank-00000.safetensors").read_bytes()
        for name in ("saver", "save")
    )
    assert saved == wanted


def test_what_does_not_follow_in_memory_is_no_run():
    flat, other = torch.arange(10.0), torch.arange(4.0)
    joined = [flat[:3], flat[3:5].view(torch.int32), flat[5:5], flat[5:8]]
    assert [list(run) for run in write.contiguous_runs([*joined, flat[9:], other, other])] == [
        [0, 1, 2, 3],
        [4],
        [5],
        [6],
    ]
    assert write.span(joined).tolist() == flat[:8].view(torch.uint8).tolist()
    assert [list(run) for run in write.contiguous_runs(joined, 20)] == [[0, 1, 2], [3]]
    complex_pair = torch.ones(2, dtype=torch.complex64)
    assert len(write.contiguous_runs([complex_pair[:1].conj(), complex_pair[1:]])) == 2
    assert len(write.contiguous_runs([flat.view(2, 5).t(), flat[9:]])) == 2
    assert write.contiguous_runs([]) == []


class Telling(World):
    """One of two ranks, of which the other has always ended; `told` is what this one told it."""

    def gather(self, value):
        self.told.append(value)
        return [value, [0, [None, None]]]


def test_interrupted_rank_does_not_report_its_end():
    """The others would take it for done, and go on to a collective in which it is not."""

    def interrupted():
        raise KeyboardInterrupt

    world, heard = Telling(size=2), []
    world.told = []
    assert on_all_ranks(world, lambda: 7, signs=Signs(progress=lambda: 3, on_progress=heard.append)) == 7
    assert (world.told, heard) == ([[3, [None, None]]], [[3, 0]])
    with pytest.raises(KeyboardInterrupt):
        on_all_ranks(world, interrupted, signs=LONG)
    for thread in threading.enumerate():
        if thread.name == "lockstep-signs":
            thread.join()
    assert world.told == [[3, [None, None]]]
