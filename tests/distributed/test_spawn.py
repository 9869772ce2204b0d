"""Processes that are started here: how long each is waited for, what a failure leaves to read, who ends with whom."""

import multiprocessing
import os
import time

import pytest

from lockstep.distributed import spawn
from lockstep.distributed.spawn import RankFailure, start
from lockstep.errors import ConfigError


class Pipe:
    """What one rank says, word after word; then it is dead."""

    def __init__(self, *words):
        self._words = list(words)

    def recv(self):
        if not self._words:
            raise EOFError
        return self._words.pop(0)


@pytest.fixture
def waits(monkeypatch):
    """The seconds that are given to each word, where none takes any; `order` says whose is next."""
    seconds = []

    def wait(pipes, timeout):
        seconds.append(timeout)
        return [waits.order.pop(0)] if waits.order else []

    waits = type("Waits", (), {"order": [], "seconds": seconds})
    monkeypatch.setattr(spawn, "wait", wait)
    monkeypatch.setattr(spawn.time, "monotonic", lambda: 0.0)
    return waits


ALIVE = ("alive", None)


def test_patience_begins_when_all_run(waits, tmp_path):
    pipes = [Pipe(ALIVE, ALIVE, ("ended", 7)), Pipe(ALIVE, ("ended", 8))]
    waits.order = [pipes[0], pipes[0], pipes[1], pipes[1], pipes[0]]
    assert spawn._collect([(None, pipe) for pipe in pipes], 33.0, tmp_path, False, set()) == [7, 8]
    assert waits.seconds == [spawn._START] * 3 + [33.0] * 2


def test_others_have_a_moment_to_end_after_a_failure(waits, tmp_path):
    failure = spawn._FailureReport(False, 1.0, 0, "the reason", False, "its stack")
    pipes = [Pipe(ALIVE, ("failed", failure)), Pipe(ALIVE, ALIVE)]
    waits.order = [pipes[0], pipes[0], pipes[1], pipes[1]]
    with pytest.raises(RankFailure, match="rank 0 of 2: the reason") as caught:
        spawn._collect([(None, pipe) for pipe in pipes], 33.0, tmp_path, False, set())
    assert waits.seconds == [spawn._START] * 2 + [spawn._GRACE] * 3
    assert (caught.value.rank, caught.value.details) == (0, {0: "its stack"})


class Unsendable:
    def __reduce__(self):
        raise RuntimeError("no copies of this")


@pytest.mark.parametrize(
    ("given", "broken", "raised"),
    [(Unsendable(), None, ConfigError), (7, RuntimeError("no more pickles"), RuntimeError)],
)
def test_unsendable_result_is_told_by_where_it_fails(monkeypatch, given, broken, raised):
    def ensured():
        if broken:
            raise broken

    monkeypatch.setattr(spawn.forkserver, "ensure_running", ensured)
    with pytest.raises(raised):
        start(fails, 1, (given,))


def fails(world, say):
    raise KeyError("the reason")


def test_where_the_output_is_kept_a_failures_stack_is_in_it(tmp_path):
    with pytest.raises(RankFailure, match="rank 0 of 1: KeyError: 'the reason'"):
        start(fails, 1, folder=tmp_path)
    assert "in fails" in (tmp_path / "rank-1-0.log").read_text()


def waits_for_ever(world, say, path):
    (path / "new").write_text(str(os.getpid()))
    (path / "new").rename(path / "pid")
    time.sleep(100)


def calls(path):
    start(waits_for_ever, 1, (path,))


def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_no_rank_outlives_the_process_that_started_it(tmp_path):
    caller = multiprocessing.get_context("forkserver").Process(target=calls, args=(tmp_path,))
    caller.start()
    until = time.monotonic() + 60.0
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.02)
    caller.kill()
    caller.join()
    rank = int((tmp_path / "pid").read_text())
    while not ended(rank) and time.monotonic() < until:
        time.sleep(0.02)
    assert ended(rank)


def start_method(world, say):
    return multiprocessing.get_start_method()


@pytest.mark.parametrize("method", [None, "spawn"])
def test_a_ranks_own_processes_start_as_its_callers_do(method):
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        assert start(start_method, 1) == [multiprocessing.get_start_method()]
    finally:
        multiprocessing.set_start_method(before, force=True)


def compiles_with(world, say, devices, cores):
    """Threads that torch's compiler has, and what a process that it starts would read."""
    import torch
    from torch._inductor import async_compile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        if devices:
            patch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
            spawn._share_compilers("auto", world.size)
        return async_compile.get_compile_threads(), os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


def test_rank_compiles_with_its_share_of_the_cores():
    """In a process that was forked from one that had read torch's settings already."""
    assert start(compiles_with, 2, (0, 16)) == [(1, "1")] * 2
    assert start(compiles_with, 2, (8, 16)) == [(8, "8")] * 2
    assert start(compiles_with, 2, (8, 1)) == [(1, "1")] * 2
