"""Runs of micro-batches by what they cost: the best cut there is, and when it changes."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.distributed import balance
from lockstep.distributed.balance import Balancer, ShareReport, cut, loads
from lockstep.errors import LockstepError
from lockstep.run_state import RunState

COSTS = st.floats(0.01, 100.0)


def every_cut(count, most):
    """The sizes of all runs there can be."""
    for sizes in itertools.product(*(range(1, each + 1) for each in most)):
        if sum(sizes) == count:
            yield sizes


@settings(deadline=None)
@given(st.data())
def test_no_cut_ends_sooner(data):
    costs = data.draw(st.lists(COSTS, min_size=1, max_size=4))
    works = data.draw(st.lists(st.floats(0.1, 50.0), min_size=len(costs), max_size=7))
    most = data.draw(
        st.lists(st.integers(1, len(works)), min_size=len(costs), max_size=len(costs)).filter(
            lambda found: sum(found) >= len(works)
        )
    )
    found = cut(works, costs, most)
    assert [a for a, _ in found.runs] + [len(works)] == [0] + [b for _, b in found.runs]
    assert [b - a for a, b in found.runs] == list(found.slots)
    assert all(1 <= size <= own for size, own in zip(found.slots, most, strict=True))
    times = []
    for sizes in every_cut(len(works), most):
        ends = [0, *itertools.accumulate(sizes)]
        times.append(max(cost * sum(works[a:b]) for cost, (a, b) in zip(costs, itertools.pairwise(ends), strict=True)))
    assert max(loads(works, costs, found)) == pytest.approx(min(times), rel=1e-9)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 60), COSTS)
def test_equal_ranks_have_runs_that_differ_by_one_at_most(ranks, more, cost):
    found = cut([1.0] * (ranks + more), [cost] * ranks).slots
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize(
    ("count", "costs", "wanted"),
    [
        (8, [1.0, 1.9], (5, 3)),
        (8, [1.0, 2.0], (6, 2)),  # as long as 5 and 3, and the other one waits less
        (9, [1.0, 2.0], (6, 3)),
        (8, [1.0, 100.0], (7, 1)),
        (9, [1.0, 1.0, 40.0], (4, 4, 1)),  # the last decides how long it takes; the others are equal all the same
        (4000, [1.0, 3.0], (3000, 1000)),
    ],
)
def test_a_cut_in_numbers(count, costs, wanted):
    assert cut([1.0] * count, costs).slots == wanted


def test_what_may_be_too_much_is_not_given():
    assert cut([1.0] * 8, [1.0, 4.0], [4, 8]).slots == (4, 4)
    assert cut([1.0] * 300, [1.0, 1e4], [100, 300]).slots == (100, 200)


class Ranks:
    """A run of ranks that need so many seconds for a unit of work, as their balancers hear of it."""

    def __init__(self, costs, micro_batches=8, works=None, state=None, copies=1, start=0):
        self.costs, self.start, self.step = list(costs), start, start
        self.works = works or (lambda step: (1.0,) * micro_batches)
        self.balancers = [Balancer(micro_batches, len(costs), start, works, state) for _ in range(copies)]
        self.spent = [[0.0, 0.0, 0.0] for _ in costs]

    def take(self, steps, factor=lambda rank, step: 1.0):
        """The lines that were said in these steps, with an exchange after each, for the next two."""
        found = []
        for _ in range(steps):
            shares = self.balancers[0].at(self.step)
            for rank, (a, b) in enumerate(shares.runs):
                work, cost = self.works(self.step), self.costs[rank] * factor(rank, self.step)
                self.spent[rank][1] += 0.4 * cost * sum(work[a:b])
                self.spent[rank][2] += 0.6 * cost * sum(work[a : b - 1])
            self.step += 1
            check = self.balancers[0].check(self.step, self.step + 2)
            reports = [ShareReport(self.step - self.start, *spent, check) for spent in self.spent]
            said = {balancer.update(reports, self.step + 2) for balancer in self.balancers}
            assert len(said) == 1  # alike on all ranks
            found += [line for line in said if line]
        return found

    def slots(self):
        return self.balancers[0].at(self.step + 2).slots


def test_a_slow_rank_gets_less_once_two_windows_have_shown_it():
    ranks = Ranks([0.01, 0.019], copies=2)
    assert ranks.slots() == (4, 4)
    assert ranks.take(16) == []
    assert ranks.take(1) == ["shares 5,3 after step 19: rank 1 takes 1.9 times as long per micro-batch as rank 0"]
    assert [ranks.balancers[0].at(step).slots for step in (18, 19)] == [(4, 4), (5, 3)]
    assert ranks.take(200) == []


def test_and_more_again_when_it_is_fast_again():
    ranks = Ranks([0.01, 0.02])
    ranks.take(30)
    ranks.costs = [0.01, 0.01]
    [line] = ranks.take(60)
    assert line.startswith("shares 4,4 after step ")


def test_rank_with_one_micro_batch_is_measured_by_its_forward():
    ranks = Ranks([1.0, 50.0])
    ranks.take(30)
    assert ranks.slots() == (7, 1)
    ranks.costs = [1.0, 1.9]
    ranks.take(60)
    assert ranks.slots() == (5, 3)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 5), st.integers(0, 60), st.integers(0, 10**6))
def test_equal_ranks_never_change(ranks, more, seed):
    """Two percent of noise in each step, and now and then a step that takes ten times as long."""
    draw = random.Random(seed)
    noise = lambda rank, step: 10.0 if draw.random() < 0.01 else draw.uniform(0.99, 1.01)  # noqa: E731
    assert Ranks([0.01] * ranks, micro_batches=ranks + 1 + more).take(80, noise) == []


def test_what_comes_once_changes_nothing():
    ranks = Ranks([0.01, 0.01], micro_batches=32)
    for _ in range(6):
        slow = range(ranks.step, ranks.step + 8)
        slowed = lambda rank, step: 3.0 if rank and step in slow else 1.0  # noqa: B023, E731
        assert ranks.take(24, slowed) == []


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.5, 3.0), min_size=2, max_size=4), st.integers(5, 40))
def test_it_settles(costs, micro_batches):
    """Ranks that keep their speed are measured once: nothing goes to and fro."""
    ranks = Ranks(costs, micro_batches)
    assert len(ranks.take(150)) <= 1
    even = [1.0] * micro_batches
    best = max(loads(even, costs, cut(even, costs)))
    assert max(loads(even, costs, ranks.balancers[0].at(ranks.step))) <= best / 0.95 + 1e-9


def lengths(step):
    return tuple(float(1 + (7 * step + 5 * micro) % 11) for micro in range(8))


def test_each_step_is_cut_by_its_own_lengths():
    ranks = Ranks([1.0, 1.0], works=lengths)
    assert ranks.take(60) == []
    for step in range(60, 80):
        assert ranks.balancers[0].at(step) == cut(lengths(step), [1.0, 1.0])
    assert len({ranks.balancers[0].at(step).slots for step in range(60)}) > 1


def test_and_by_the_ranks_speeds():
    ranks = Ranks([0.01, 0.03], works=lengths)
    [line] = ranks.take(60)
    speeds, why = line.split(" after step 19: ")
    assert speeds == "shares by length for speeds of 1, 0.33"
    assert why == "rank 1 takes 3 times as long for the same work as rank 0"
    assert ranks.balancers[0].at(70) == cut(lengths(70), [1.0, 3.0])


def test_a_step_has_the_same_shares_whenever_it_is_asked_for():
    ranks = Ranks([0.01, 0.03], works=lengths)
    before = {}
    for _ in range(60):
        before |= {step: ranks.balancers[0].at(step) for step in (ranks.step, ranks.step + 1)}
        ranks.take(1)
    assert before == {step: ranks.balancers[0].at(step) for step in before}


def test_a_resume_begins_with_what_was_decided():
    first = Ranks([0.01, 0.019])
    first.take(30)
    state = RunState(shares=first.balancers[0].state).copy().shares
    again = Ranks([0.01, 0.019], state=state, start=30)
    assert again.slots() == (5, 3)
    assert again.take(60) == []
    assert Ranks([0.01] * 3, state=state).slots() == (3, 3, 2)  # on other ranks nothing is known


def test_a_bound_holds_from_its_step_on():
    ranks = Ranks([0.01, 0.04])
    balancer = ranks.balancers[0]
    balancer.bound([5, 8], 4)
    ranks.take(60)
    assert balancer.at(60).slots == (5, 3)
    assert balancer.state.most == [5, 8]
    assert Ranks([0.01, 0.04], state=balancer.state).slots() == (5, 3)


def test_step_keeps_its_shares_with_changes_still_to_come():
    """Many loader processes ask for steps far ahead, so that a change is decided long before it holds."""
    balancer = Balancer(8, 2)
    for first in range(1, 100):
        balancer.bound([4 - first % 3, 8], 40 + first)
        assert balancer.at(40 + first).slots[0] == 4 - first % 3
        assert balancer.at(min(first, 40)).slots == (4, 4)
    assert balancer.at(0).slots == (4, 4)


def test_what_was_asked_for_cannot_be_changed():
    balancer = Balancer(8, 2)
    balancer.at(7)
    with pytest.raises(LockstepError, match="step 8"):
        balancer.bound([4, 4], 7)
    balancer.bound([4, 4], 8)


@pytest.mark.parametrize("works", [None, lengths])
def test_who_only_looks_ahead_binds_nobody(works):
    balancer = Balancer(8, 2, work_of=works)
    assert balancer.guess(30) == cut(works(30) if works else [1.0] * 8, [1.0, 1.0])
    balancer._add(balance._CutRule(20, (1.0, 3.0), ()))
    now = cut(works(30) if works else [1.0] * 8, [1.0, 3.0])
    assert balancer.guess(30) == balancer.at(30) == balancer.guess(30) == now


def test_ranks_that_share_out_differently_are_told():
    one, other = Balancer(8, 2, work_of=lengths), Balancer(8, 2, work_of=lambda step: lengths(step + 1))
    reports = [ShareReport(1, 0.0, 1.0, 1.0, each.check(0, 4)) for each in (one, other)]
    with pytest.raises(LockstepError, match="--shares auto"):
        one.update(reports, 4)


def test_late_seconds_of_a_device_count_for_their_own_steps():
    """Seconds of 25 steps come at once; the steps since then were heard of, and nothing is known of them."""
    balancer = Balancer(8, 2)
    known = [[0.0, 0.0], [0.0, 0.0]]
    read, lines = 0, []
    for step in range(400):
        if step % 25 == 0:
            slots = [[balancer.at(each).slots[rank] for each in range(read, step)] for rank in range(2)]
            for rank, cost in enumerate((1.0, 1.9)):
                known[rank][0] += cost * sum(slots[rank])
                known[rank][1] += cost * sum(slot - 1 for slot in slots[rank])
            read = step
        reports = [ShareReport(read, 0.0, *seconds, balancer.check(step, step + 2)) for seconds in known]
        lines.append(balancer.update(reports, step + 2))
    assert [line for line in lines if line] == [
        f"shares 5,3 after step {lines.index(max(lines)) + 2}: rank 1 takes 1.9 times as long per micro-batch as rank 0"
    ]
