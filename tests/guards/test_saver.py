"""Saving beside the training: what is saved is what was, and errors reach all ranks."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import run

from lockstep import checkpoint
from lockstep.checkpoint import write as writing
from lockstep.checkpoint.layout import share_out
from lockstep.checkpoint.on_all_ranks import on_all_ranks
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, LockstepError


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


def test_the_last_save_of_a_run_must_not_fail(tmp_path):
    saver = checkpoint.Saver(World())
    saver.begin({}, fails, 14)
    with pytest.raises(LockstepError, match="the save after step 14 failed on rank 0: the disk is full; start again"):
        saver.settle(last=True)


@pytest.mark.parametrize(("policy", "allowed"), [("stop", 0), ("continue", 1)])
@pytest.mark.parametrize("background", [True, False])
def test_failures_follow_the_policy(tmp_path, policy, allowed, background):
    told = []
    saver = checkpoint.Saver(World(), background=background, policy=policy, failed=lambda: told.append(1))
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
        assert all("failed on rank 1: " in said for _, said in found)
        assert not checkpoint.list_steps(tmp_path)


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


def test_the_threads_group_waits_as_long_as_the_world_and_is_given_back_unless_a_save_still_uses_it(monkeypatch):
    made, ended = [], []
    monkeypatch.setattr("torch.distributed.new_group", lambda **asked: made.append(asked) or f"group {len(made)}")
    monkeypatch.setattr("torch.distributed.destroy_process_group", ended.append)
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


def test_copies_from_a_device_are_pinned_and_waited_for_by_one_event_after_the_last(monkeypatch):
    made, order, empty = [], [], torch.empty

    class Event:
        def __init__(self):
            made.append(self)

        def record(self):
            order.append([name for name, held in saver._buffers.items() if held.any()])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: order.append(pin_memory) or empty(*a, **k).zero_())
    saver = checkpoint.Saver(World())
    tensors = {"model/a": torch.ones(3), "model/b": torch.ones(2).as_subclass(OnDevice), "model/c": torch.ones(1)}
    tensors["model/d"] = torch.ones(2).as_subclass(OnDevice)
    share, ready = saver._copied(share_out(tensors, World()))
    assert made == [ready]
    assert order[:-1] == [piece.name[-1] in "bd" for piece in share.pieces]
    assert sorted(order[-1]) == list(tensors)
    assert saver._copied(share_out({"model/a": torch.ones(3)}, World()))[1] is None


def test_the_seconds_that_the_caller_waited_are_counted(monkeypatch):
    """They are among a rank's busy seconds: see the straggler."""
    clock = SimpleNamespace(now=0.0)

    def wait(seconds):
        clock.now += seconds

    monkeypatch.setattr("lockstep.checkpoint.background.time", SimpleNamespace(perf_counter=lambda: clock.now))
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


def test_the_copy_in_host_memory_is_made_once_for_each_shape_and_dtype():
    saver, tensor, places = checkpoint.Saver(World()), torch.ones(4), []
    for each in (tensor, tensor + 1, tensor.double(), tensor.double()[:2]):
        saver.begin({"model/a": each}, lambda share, world: places.append(share.pieces[0].local))
        saver.settle()
    assert places[0] is places[1]
    assert [held.dtype for held in places] == [torch.float32, torch.float32, torch.float64, torch.float64]
    assert [held.tolist() for held in places] == [[2.0] * 4, [2.0] * 4, [1.0] * 4, [1.0] * 2]


class Telling(World):
    """One of two ranks, of which the other has always ended; `told` is what this one told it."""

    def gather(self, value):
        self.told.append(value)
        return [value, [True, 0]]

    def check(self, error):
        assert error is None


def test_a_rank_that_was_interrupted_does_not_say_that_it_has_ended():
    """The others would take it for done, and go on to a collective in which it is not."""

    def interrupted():
        raise KeyboardInterrupt

    world, heard = Telling(size=2), []
    world.told = []
    assert on_all_ranks(world, lambda: 7, done=lambda: 3, heard=heard.append) == 7
    assert (world.told, heard) == ([[True, 3]], [[3, 0]])
    with pytest.raises(KeyboardInterrupt):
        on_all_ranks(world, interrupted)
    for thread in threading.enumerate():
        if thread.name == "lockstep-signs":
            thread.join()
    assert world.told == [[True, 3]]
