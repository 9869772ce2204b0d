"""The watch: what ends a process that hangs, what does not, and whom it names."""

import errno
import os
import threading
import time

import pytest
import torch
from ranks import RankError, run
from toys import Ragged

import lockstep
from lockstep.config.schema import Config
from lockstep.distributed.exchange import CONTINUE, SAVE_AND_END, StepExchange
from lockstep.distributed.world import World
from lockstep.guards.watchdog import HangWatchdog, where_main


@pytest.fixture
def stale(monkeypatch):
    """A file system that fails in the first looks at a file STOP; the list of those who looked."""
    looks = []

    def failing(true):
        def look(path, *args, **kwargs):
            if str(path).endswith("STOP"):
                looks.append(time.monotonic())
                if len(looks) < 3:
                    raise OSError(errno.ESTALE, "Stale file handle")
            return true(path, *args, **kwargs)

        return look

    monkeypatch.setattr(os, "stat", failing(os.stat))
    monkeypatch.setattr(os, "lstat", failing(os.lstat))
    monkeypatch.setattr("lockstep.guards.watchdog._STOP_FILE_INTERVAL", 0.01)
    return looks


def test_file_stop_is_heeded_after_a_file_system_error(stale, tmp_path):
    exchange = StepExchange(World(), lambda step: 1, None)
    with HangWatchdog(World(), exchange, tmp_path):
        (tmp_path / "STOP").touch()
        deadline = time.monotonic() + 30
        while exchange.receive() == CONTINUE and time.monotonic() < deadline:
            time.sleep(0.01)
    assert exchange.receive() == SAVE_AND_END


def test_rank_0_alone_looks_for_the_file(stale, tmp_path):
    other = World(rank=1, size=2)
    with HangWatchdog(other, StepExchange(World(), lambda step: 1, None), tmp_path):
        time.sleep(1.0)  # four of the watch's looks at the progress
    assert not stale


def _slow_body(world, folder, seconds):
    """A run whose loop's body takes long in one step, on the last rank."""
    world.timeout = 3.0
    config = Config(save_dir=folder, batch_size=8, micro_batch_size=2, max_steps=4, device="cpu")
    steps = []
    for step in lockstep.Run(config, Ragged(dtype=torch.float32), world):
        steps.append(step.global_step - 1)
        if steps[-1] == 1 and world.rank == world.size - 1:
            time.sleep(seconds)
    return steps


def test_the_body_of_the_loop_may_take_long_in_a_world_of_one(tmp_path):
    assert run(_slow_body, 1, str(tmp_path), 5.0) == [[0, 1, 2, 3]]


def test_body_that_others_wait_for_ends_the_run_with_its_line(tmp_path):
    with pytest.raises(RankError):
        run(_slow_body, 2, str(tmp_path), 50.0)
    log = (tmp_path / "default" / "logs" / "rank-00001.log").read_text()
    assert "WARNING rank 1 has been in the body of the caller's loop for " in log
    assert "and end the run after --timeout 3 s" in log
    told = "".join(path.read_text() for path in (tmp_path / "default" / "logs").glob("rank-*.log"))
    assert "rank 1 did not arrive: it is in step 2, at test_hang.py:" in told


def test_a_loader_that_hangs_ends_a_world_of_one(tmp_path):
    with pytest.raises(RankError, match="died without an exception"):
        run(_hanging_loader, 1, str(tmp_path))
    assert "the run ends after 3 s without progress" in (tmp_path / "default" / "logs" / "rank-00000.log").read_text()


class Hanging(Ragged):
    trained = 0

    def loss(self, model, batch):
        self.trained += model.training
        return super().loss(model, batch)

    def collate(self, samples):
        if self.trained > 4:  # of four micro-batches a step
            time.sleep(50)
        return super().collate(samples)


def _hanging_loader(world, folder):
    world.timeout = 3.0
    config = Config(save_dir=folder, batch_size=8, micro_batch_size=2, max_steps=4, device="cpu", ckpt_freq=1)
    return [step.global_step for step in lockstep.Run(config, Hanging(dtype=torch.float32), world)]


def _where_a_rank_waits(world):
    exchange, seen = StepExchange(world, lambda step: 1, None, 3), []
    if world.is_main:
        time.sleep(1.0)
    else:
        threading.Timer(0.4, lambda: seen.append(where_main())).start()
    exchange.global_items(0)
    return seen


def test_rank_in_the_exchange_waits_and_is_not_late():
    [(line, waits)] = run(_where_a_rank_waits, 2)[1]
    assert line.startswith("exchange.py:")
    assert waits
