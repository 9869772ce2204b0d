import os
import time

import pytest
from ranks import RankError, run


def place(world, text):
    return [text, world.rank, world.size, world.gather(world.rank)]


def fail(world):
    if world.rank == 1:
        raise KeyError("the reason")
    world.barrier()


def crash(world):
    if world.rank == 1:
        os._exit(7)
    world.barrier()


def hang(world, pids):
    (pids / str(world.rank)).write_text(str(os.getpid()))
    if world.rank == 0:
        time.sleep(600)


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_by_rank(size):
    assert run(place, size, "x") == [["x", rank, size, list(range(size))] for rank in range(size)]


def test_an_exception_names_its_rank_and_line():
    with pytest.raises(RankError, match="rank 1 of 2") as caught:
        run(fail, 2)
    assert caught.value.rank == 1
    assert "in fail" in str(caught.value)
    assert "the reason" in str(caught.value).splitlines()[-1] or "then rank 0" in str(caught.value)


def test_a_process_that_dies_is_named_before_those_that_noticed():
    with pytest.raises(RankError, match="rank 1 of 2: died") as caught:
        run(crash, 2)
    assert caught.value.rank == 1


def test_a_hang_is_a_failure_and_nothing_is_left(tmp_path):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"had not ended after 2 s[^$]*in hang"):
        run(hang, 2, tmp_path, timeout=2.0)
    assert time.monotonic() - began < 8
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
