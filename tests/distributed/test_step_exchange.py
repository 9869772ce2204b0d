"""The exchange: items of the whole step, agreement on stopping, and what a lost rank looks like."""

import math
import os
import random
import re
import statistics
import time
from datetime import timedelta
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run
from refusals import names, refuses
from toys import Ragged, parts

from lockstep import counts as exact
from lockstep.clock import make_clock
from lockstep.counts import total
from lockstep.distributed.exchange import (
    CONTINUE,
    INTERRUPT,
    MOST_STEPS,
    SAVE_AND_END,
    BusySeconds,
    StepExchange,
    _exact_sums,
)
from lockstep.distributed.progress import COMPUTING, WAITING
from lockstep.distributed.world import World
from lockstep.errors import PeerError
from lockstep.loop import StepControl, seeder, steps


def _items(world, count, pause, constant):
    """What each step was told, with the lengths of the beats."""
    ahead = lambda step: (step * 7 + world.rank * 3) % 11 if step < count else 0  # noqa: E731
    exchange = StepExchange(world, ahead, (lambda step: 100 + step) if constant else None)
    found, lengths = [], []
    for step in range(count):
        found.append(exchange.global_items(step))
        lengths.append(exchange._result.length)
        time.sleep(pause)
    return found, lengths


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_items_are_summed_over_the_ranks(world_size):
    wanted = [sum((step * 7 + rank * 3) % 11 for rank in range(world_size)) for step in range(50)]
    assert [found for found, _ in run(_items, world_size, 50, 0.0, False)] == [wanted] * world_size


def test_it_beats_every_long_step_and_rarely_in_short_ones():
    (_, slow), _ = run(_items, 2, 12, 0.03, False)
    (_, fast), (_, other) = run(_items, 2, 200, 0.0005, False)
    assert set(slow) == {1}
    assert max(fast) > 4
    assert max(fast) <= MOST_STEPS
    assert fast == other  # all ranks derive the same rule


def test_known_items_are_not_asked_for():
    found, _ = run(_items, 2, 30, 0.0, True)[0]
    assert found == [100 + step for step in range(30)]


def _stop(world, wishes, pause=0.001, when="backward"):
    """The step after which all end, as each rank learns it, and with which wish. The wish comes in step 5."""
    exchange = StepExchange(world, lambda step: 1, None)
    for step in range(200):
        exchange.global_items(step)
        time.sleep(pause)
        if step == 5 and world.rank in wishes and when == "backward":
            exchange.stop(wishes[world.rank])
        exchange.send(step)
        if step == 5 and world.rank in wishes and when == "update":
            exchange.stop(wishes[world.rank])
        if found := exchange.receive():
            return step, found
    return None, CONTINUE


@pytest.mark.parametrize(
    ("wishes", "stop_agreed"),
    [({2: SAVE_AND_END}, SAVE_AND_END), ({0: SAVE_AND_END, 1: INTERRUPT}, INTERRUPT), ({}, CONTINUE)],
)
def test_all_ranks_stop_at_the_same_step(wishes, stop_agreed):
    found = run(_stop, 3, wishes)
    assert len(set(found)) == 1
    assert found[0][1] == stop_agreed
    if stop_agreed:
        assert 5 <= found[0][0] <= 5 + 2 * MOST_STEPS


@pytest.mark.parametrize(("when", "last"), [("backward", 5), ("update", 6)])
def test_a_wish_in_a_long_step_ends_the_run_after_it(when, last):
    assert run(_stop, 2, {1: SAVE_AND_END}, 0.05, when) == [(last, SAVE_AND_END)] * 2


@pytest.mark.parametrize("when", ["backward", "update"])
def test_a_world_of_one_stops_at_once(when):
    assert _stop(World(), {0: INTERRUPT}, when=when) == (5, INTERRUPT)


class Asking(Ragged):
    """Asks to stop in its third step, on rank 1."""

    def loss(self, model, batch):
        type(self).seen = getattr(type(self), "seen", 0) + 1
        if self.seen == 2 * 4 + 1:  # of four micro-batches a step
            self.exchange.stop(SAVE_AND_END)
        time.sleep(0.01)
        return super().loss(model, batch)


def _trained(world):
    task = Asking()
    made, batches = parts(world, task, count=6, size=4 * world.size)
    feed = batches.from_step(0)
    exchange = StepExchange(world, feed.items, None)
    task.exchange = exchange if world.rank == world.size - 1 else StepExchange(World(), feed.items, None)
    plan = StepControl(lambda step: 1.0, seeder(0, "micro", world.device), make_clock(world.device))
    return [(record.step, record.stop_agreed) for record in steps(made, task, feed, exchange, plan)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_loop_says_so_in_the_record_of_that_step(world_size):
    found = run(_trained, world_size)
    assert [[stop_agreed for _, stop_agreed in each[:3]] for each in found] == [[0, 0, SAVE_AND_END]] * world_size


def _lost(world, how):
    world.timeout = 2.0
    exchange = StepExchange(world, lambda step: 1, None)
    for step in range(100):
        if step == 5 and world.rank == 1:
            if how == "kill":
                os._exit(9)
            time.sleep(20)
        exchange.global_items(step)
        time.sleep(0.03)  # long enough for a beat at every step


@pytest.mark.parametrize("how", ["kill", "sleep"])
def test_rank_that_does_not_come_is_one_line_in_the_timeout(how):
    """Rank 0 says so itself, long before rank 1 would wake up or the helper's own 60 s are over."""
    with pytest.raises(AssertionError) as found:
        run(_lost, 2, how)
    line = next(line for line in str(found.value).splitlines() if "PeerError: " in line)
    assert re.search(r"rank 0 .*before step \d+\b", line)
    assert names(line, "--timeout")
    assert not any(word in line for word in ("127.0.0.1", "pair.cc", "gloo"))  # none of the backend's own text


def _totals(world):
    exchange = StepExchange(world, lambda step: 1, None)
    return exchange.totals([float(world.rank), 0.1, 1e100 if world.rank == 0 else -1e100 if world.rank == 1 else 1.0])


def test_totals_are_exactly_rounded_sums():
    assert run(_totals, 4) == [[6.0, 0.4, 2.0]] * 4
    assert _totals(World()) == [0.0, 0.1, 1e100]


def _busy(world):
    """What is heard of two ranks, of which the first is often waited for: each counts seconds of work by the step."""

    def spent():
        step, share = exchange.progress.step, 1.0 + world.rank
        return BusySeconds(exchange.wait_seconds + 0.25 * step * share, 0.5 * step * share, 0.125 * step * share)

    exchange, heard = StepExchange(world, lambda step: 1, None, busy=spent), []
    for step in range(40):
        exchange.global_items(step)
        heard.append(exchange.busy_by_rank)
        time.sleep(0.0 if world.rank else 0.005)
    return heard, exchange.wait_seconds


def test_a_rank_that_waits_reports_no_busy_time():
    """The clock counts the waiting to the loading of data, since there it happens."""
    found = run(_busy, 2)
    assert found[1][1] > 0.05  # it waited: forty times up to five milliseconds
    for heard, _ in found:
        for one, other in heard[5:]:
            assert one == pytest.approx((0.25, 0.5, 0.125), rel=1e-6)
            assert other == pytest.approx((0.5, 1.0, 0.25), rel=1e-6)


def _told(world, constant):
    """How many steps each exchange was for, of steps that take 30 ms."""
    exchange, found = StepExchange(world, lambda step: 1, (lambda step: 1) if constant else None), []
    for step in range(40):
        exchange.global_items(step)
        found.append(exchange.count)
        time.sleep(0.03)
        exchange.send(step)
        exchange.receive()
    return found


def test_beats_follow_the_mean_length_of_a_step():
    """Every quarter of a second: after eight steps of 30 ms, one is 30 ms and not eight times as long."""
    counts = run(_told, 2, True)[0]
    lengths = [counts.count(value) for value in sorted(set(counts))]
    assert statistics.median(lengths) >= 4  # the first ones know no length yet


def _counted(world, steps):
    exchange = StepExchange(world, lambda step: world.rank + 1 if step < steps else 0, None, steps)
    found = []
    for step in range(steps):
        found.append(exchange.global_items(step))
        time.sleep(0.03)  # long enough for an exchange in every step
        exchange.send(step)
        exchange.receive()
    return found, exchange.count


def test_a_step_is_exchanged_once():
    for items, count in run(_counted, 2, 8):
        assert items == [3] * 8
        assert count <= 8 + 1  # one for each step, and one before the first


class Wire:
    """Stands in for torch.distributed, and for the clock: rank 0 of two, the other of which always says the same."""

    def __init__(self):
        self.now, self.wait, self.over, self.error = 100.0, 0.5, True, None
        self.groups, self.sent, self.phases, self.ended = [], [], [], []
        self.busy = 0.005  # how long a step takes the other rank

    def perf_counter(self):
        return self.now

    def new_group(self, ranks, backend, timeout, use_local_synchronization):
        self.groups.append((backend, timeout))
        return "own"

    def get_rank(self):
        return 0

    def barrier(self, group):
        assert group == "own"

    def destroy_process_group(self, group):
        self.ended.append(group)

    def all_gather(self, rows, sent, group=None, async_op=False):
        self.sent.append((sent.tolist(), group, async_op))
        other = [0.0, self.busy, 20.0, 1.0, 2.0, 3.0, *(100.0 if each else 0.0 for each in sent.tolist()[6:])]

        def arrived():
            self.phases.append(self.exchange.progress.phase)
            self.now, self.wait = self.now + self.wait, 0.0
            if self.error:
                raise self.error
            for row, values in zip(rows, (sent, torch.tensor(other[: len(sent)], dtype=torch.float64)), strict=True):
                row.copy_(values)

        if not async_op:
            return arrived()
        return SimpleNamespace(wait=arrived, is_completed=lambda: self.over)

    def items(self):
        return [[int(value) for value in row[6:] if value] for row, _, _ in self.sent]


@pytest.fixture
def wire(monkeypatch):
    made, spent = Wire(), BusySeconds(0.5, 0.25, 0.125)
    monkeypatch.setattr("lockstep.distributed.exchange.dist", made)
    monkeypatch.setattr("lockstep.distributed.collectives.dist", made)
    monkeypatch.setattr("lockstep.distributed.world.dist", made)
    monkeypatch.setattr("lockstep.distributed.exchange.time", made)
    ahead = lambda step: 10 + step if step < 20 else 0  # noqa: E731
    made.exchange = StepExchange(World(size=2, timeout=7.0), ahead, None, 20, lambda: spent)
    return made


def test_what_is_exchanged_in_numbers(wire):
    exchange, found = wire.exchange, []
    assert wire.groups == [("gloo", timedelta(seconds=7))]
    assert (exchange.wait_seconds, exchange.count, exchange.busy_by_rank, exchange.has_failed()) == (0.0, 0, [], False)
    for step in range(11):
        found.append(exchange.global_items(step))
        if step == 0:
            assert exchange.busy_by_rank == [BusySeconds(0.5, 0.25, 0.125), BusySeconds(1.0, 2.0, 3.0)]
        wire.now += 0.01
        exchange.send(step)
        assert exchange.receive() == CONTINUE
        assert exchange.progress.phase == COMPUTING
    assert found == [110 + step for step in range(11)]
    # One is for 20 ms: four steps where all that is known is the other's 5 ms, two where this rank's are 10 ms.
    assert wire.items() == [[10], [11, 12, 13, 14], [15, 16, 17, 18], [19, 20], [21, 22]]
    assert [row[1] for row, _, _ in wire.sent] == pytest.approx([0.0, 0.0, 0.01, 0.01, 0.01])
    assert (exchange.wait_seconds, exchange.count) == (0.5, 5)  # what came after the others was there
    assert exchange.busy_by_rank[0] == BusySeconds()  # nothing was spent since
    assert set(wire.phases) == {WAITING}
    assert exchange.totals([1.5, 2.5]) == [1.5, 2.505]
    assert {(group, meanwhile) for _, group, meanwhile in wire.sent[:5]} == {("own", True)}
    assert wire.sent[5:] == [([1.5, 2.5], "own", False)]


def test_further_numbers_arrive_with_their_own_steps(wire):
    """The other rank tells none of its own here: its row is of hundreds wherever this rank's is not 0."""
    asked = []

    def further(step, stop, waited):
        asked.append((step, stop, waited))
        return [7.0, 8.0]

    exchange = wire.exchange = StepExchange(World(size=2), lambda step: 10 + step, None, 20, extra=further)
    for step in range(6):
        assert exchange.global_items(step) == 110 + step
        assert exchange.extra_by_rank == [[7.0, 8.0], [100.0, 100.0]]
        wire.now += 0.01
        exchange.send(step)
        exchange.receive()
        assert exchange.horizon == asked[-1][1]  # what was asked for ends there
    firsts, stops, waited = zip(*asked, strict=True)
    assert firsts == (0, *stops[:-1])
    assert waited == (0.0, 0.5, 0.5)


def test_other_thread_sees_a_known_failure_without_waiting(wire):
    exchange = wire.exchange
    exchange.global_items(0)
    exchange.send(0)
    wire.over, wire.error = False, RuntimeError("connection closed\nby the peer")
    assert not exchange.has_failed()
    wire.over = True
    assert exchange.has_failed()
    with refuses(PeerError, "rank 0", "before step 2", "--timeout") as caught:
        exchange.receive()
    assert caught.value.__cause__ is wire.error
    assert "connection" not in str(caught.value)
    wire.error = None
    assert not exchange.has_failed()


def test_surviving_run_ends_its_step_before_it_is_told(wire):
    exchange = StepExchange(World(size=2, timeout=7.0), lambda step: 1, None, 20, survives_loss=True)
    wire.exchange = exchange
    exchange.global_items(0)
    exchange.send(0)
    wire.error = RuntimeError("connection closed")
    assert exchange.receive() == CONTINUE
    assert exchange.receive() == CONTINUE
    for _ in range(2):
        with refuses(PeerError, "rank 0", "before step 2"):
            exchange.global_items(1)
    assert (exchange.release_group(), exchange.release_group(), wire.ended) == ("own", None, [])
    exchange.close()
    assert wire.ended == []  # who was handed the group leaves it


def test_group_is_returned_once_and_after_pending_work(wire):
    exchange = wire.exchange
    exchange.global_items(0)
    exchange.send(0)
    waited, wire.error = len(wire.phases), RuntimeError("lost")
    for _ in range(2):
        exchange.close()
    assert len(wire.phases) == waited + 1
    assert wire.ended == ["own"]


def test_busy_seconds_are_divided_by_the_steps_done():
    """It tells of a step after it: by then the host is further, by one step or by two."""
    spent, known = [0.0], [0]
    exchange = StepExchange(
        *(World(), lambda step: 1, None),
        busy=lambda: BusySeconds(computing=spent[0]),
        timed_steps=lambda: known[0],
    )
    found = []
    for step, done in enumerate((0, 1, 1, 3, 4, 4, 6)):
        exchange.progress.at(step, COMPUTING)
        spent[0], known[0] = 0.5 * done, done
        found.append(exchange._busy_seconds().computing)
    assert found == [0.0, *[0.5] * 6]  # by the host's steps it would be 0, 0.5, 0, 1, 0.5, 0, 1


_COUNTS = [[random.Random(31 * step + k).expovariate(1.0) for k in range(9)] for step in range(20)]


def _weights(world):
    """The items of steps whose micro-batches are shared out by turns, of counts that are no whole numbers."""
    mine = [total(counts[world.rank :: world.size]) for counts in _COUNTS]
    exchange = StepExchange(world, lambda step: mine[step] if step < len(mine) else 0, None, len(mine))
    found = []
    for step in range(len(mine)):
        found.append(exchange.global_items(step))
        exchange.send(step)
        exchange.receive()
    return found


def test_fractional_counts_add_up_bitwise_on_any_ranks():
    alone = _weights(World())
    assert alone == [math.fsum(counts) for counts in _COUNTS]
    for ranks in (2, 3):
        assert run(_weights, ranks) == [alone] * ranks


@pytest.mark.parametrize("whole", [True, False])
def test_sums_of_a_thousand_ranks_are_bitwise_in_any_order(whole):
    draw = random.Random(3)
    counts = [[draw.randrange(2**40) if whole else draw.random() * 2.0 ** draw.randrange(50) for _ in range(16)]]
    counts = [[each * draw.randrange(1, 9) for each in counts[0]] for _ in range(1024)]
    rows = np.array([part for row in counts for part in zip(*map(exact.parts, row), strict=True)])
    found = _exact_sums(rows)
    assert found == [float(sum(map(Fraction, column), Fraction(0))) for column in zip(*counts, strict=True)]
    assert _exact_sums(rows[::-1]) == found == _exact_sums(np.random.default_rng(0).permutation(rows))
