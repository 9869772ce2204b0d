"""The straggler guard at its edges, and what the ranks tell each other of their own work."""

import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from ranks import run
from torch import nn

from lockstep.clock import HostClock
from lockstep.distributed.exchange import BusySeconds, StepExchange
from lockstep.errors import LockstepError
from lockstep.guards.startup import check_weights
from lockstep.guards.straggler import Straggler


def lines(windows, ratio=1.2, others=0.02):
    """What is said after windows of five steps in which rank 2 computes for so many seconds a step."""
    straggler, exchange = Straggler(ratio), SimpleNamespace(count=2, busy_by_rank=[])
    found = []
    for step in range(5 * len(windows)):
        slow = windows[step // 5]
        exchange.count, exchange.busy_by_rank = (
            exchange.count + 1,
            [BusySeconds(0.0, slow if rank == 2 else others) for rank in range(4)],
        )
        found.append(straggler.after(step, exchange))
    return [line for line in found if line]


def test_three_slow_windows_in_a_row_are_told():
    assert lines([0.03] * 4)[0].startswith("rank 2 is slow: 30.0 ms per step of computing, the others 20.0 ms")


def test_an_exchange_counts_once_however_many_steps_it_is_for():
    """In each window one is for four steps, in which rank 2 is slow, and two for the fifth, in which it is not."""
    straggler, exchange = Straggler(1.2), SimpleNamespace(count=2, busy_by_rank=[])
    for step in range(60):
        if step % 5 in (0, 4):
            exchange.count += 1 + (step % 5 == 4)
            slow = 0.03 if step % 5 == 0 else 0.0205
            exchange.busy_by_rank = [BusySeconds(0.0, slow if rank == 2 else 0.022) for rank in range(4)]
        assert not straggler.after(step, exchange)


def test_a_good_window_clears_the_strikes():
    assert not lines([0.03, 0.03, 0.02] * 6)


def test_another_kind_or_rank_clears_them_too():
    straggler, exchange = Straggler(1.2), SimpleNamespace(count=2, busy_by_rank=[])
    for step in range(120):
        slow = step // 5 % 4  # each rank in turn
        exchange.count, exchange.busy_by_rank = (
            exchange.count + 1,
            [BusySeconds(0.0, 0.03 if rank == slow else 0.02) for rank in range(4)],
        )
        assert not straggler.after(step, exchange)


@pytest.mark.parametrize(
    ("slow", "others", "told"),
    [(0.0241, 0.02, True), (0.0239, 0.02, False), (0.0031, 0.001, True), (0.0029, 0.001, False)],
    ids=["above the ratio", "below it", "above 2 ms", "below them"],
)
def test_the_edges(slow, others, told):
    assert bool(lines([slow] * 6, 1.2, others)) == told


@pytest.mark.parametrize(("kind", "told"), [("data", False), ("computing", False), ("writing", True)])
def test_a_rank_whose_share_is_about_to_be_smaller_is_no_news(kind, told):
    """What grows with its share, that is; one that has little already is."""
    for relieved, wanted in ((lambda rank, step: rank == 2, told), (lambda rank, step: rank != 2, True)):
        straggler, exchange, found = Straggler(1.2, relieved), SimpleNamespace(count=2), ""
        for step in range(30):
            exchange.count += 1
            exchange.busy_by_rank = [BusySeconds(**{kind: 0.03 if rank == 2 else 0.02}) for rank in range(4)]
            found += straggler.after(step, exchange)
        assert bool(found) == wanted


def _told_busy(world):
    """What each rank tells of itself where rank 1 computes for long and rank 0 waits for it."""
    clock = HostClock()
    spent = lambda: BusySeconds(clock.spent().get("data", 0.0), clock.spent().get("forward", 0.0))  # noqa: E731
    exchange = StepExchange(world, lambda step: 1, None, busy=spent)
    found = []
    for step in range(10):
        clock.start()
        exchange.global_items(step)
        clock.lap("data")
        time.sleep(0.06 if world.rank else 0.001)
        clock.lap("forward")
        exchange.send(step)
        clock.lap("data")
        clock.lap("update")
        exchange.receive()
        clock.lap("data")
        found.append([tuple(vitals) for vitals in exchange.busy_by_rank])
    return found, exchange.wait_seconds


def test_a_rank_that_waits_reports_no_busy_time():
    found, waited = run(_told_busy, 2)[0]
    assert waited > 0.2
    data, computing = zip(*[(waiting[0], waiting[1]) for waiting, _ in found[2:]], strict=True)
    assert min(data) < 0.03  # the least of them: this machine may be busy with something else
    assert min(computing) < 0.03
    assert min(busy[1] for _, busy in found[2:]) > 0.05


class Drawn(nn.Module):
    """Its weights are numpy's."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.from_numpy(numpy.random.rand(3)))


def _began(world, own):
    numpy.random.seed(world.rank if own else 0)
    try:
        check_weights(world, {"model": Drawn()})
    except LockstepError as error:
        return str(error)
    return ""


def test_a_numpy_seed_of_each_ranks_own_is_named():
    assert run(_began, 2, False) == ["", ""]
    for said in run(_began, 2, True):
        assert said.startswith("before step 1: the initial weights differ: ")
        assert "scale" in said
        assert "rank 1" in said
