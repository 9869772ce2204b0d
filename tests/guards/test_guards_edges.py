"""The guards at their thresholds: just below and just above, and what makes them forget."""

import math
from types import SimpleNamespace

import pytest

from lockstep.guards.spike import Spike
from lockstep.guards.straggler import Straggler
from lockstep.heartbeat import Vitals


def taught(norms):
    spike = Spike()
    assert not any(spike.sees(norm) for norm in norms)
    return spike


def test_the_limit_of_even_norms_is_three_times_the_median():
    assert taught([2.0] * 32).limit == 6.0


def test_the_limit_of_uneven_norms_is_eight_deviations_above_the_median():
    """1 to 32: the median is 17, its median deviation 8, and 17 + 8 x 1.4826 x 8 is more than 51."""
    assert taught([float(n) for n in range(1, 33)]).limit == pytest.approx(17 + 8 * 1.4826 * 8)


def test_a_norm_at_the_limit_is_none_and_the_next_one_is():
    spike = taught([2.0] * 32)
    assert not spike.sees(6.0)
    assert spike.sees(math.nextafter(6.0, 7.0))


def test_the_first_limit_comes_with_32_norms_and_the_next_16_later():
    spike = taught([2.0] * 31)
    assert spike.limit == math.inf
    spike.sees(2.0)
    assert spike.limit == 6.0
    for _ in range(15):
        spike.sees(5.0)
    assert spike.limit == 6.0
    spike.sees(5.0)  # 32 of 2.0 and 16 of 5.0: the median stays, so does its deviation
    assert spike.limit == 6.0
    for _ in range(32):
        spike.sees(5.0)
    assert spike.limit == 15.0  # 32 of 2.0 and 48 of 5.0


def test_only_the_last_128_norms_count():
    spike = taught([2.0] * 128)
    for _ in range(63):
        spike.sees(4.0)
    assert spike.limit == 6.0
    for _ in range(17):
        spike.sees(4.0)  # 80 of 128 by now
    assert spike.limit == 12.0


def test_nothing_is_learnt_from_a_norm_of_zero_or_none():
    spike = taught([2.0] * 31)
    for _ in range(40):
        assert not spike.sees(0.0)
        assert not spike.sees(math.nan)
    assert spike.limit == math.inf
    spike.sees(2.0)
    assert spike.limit == 6.0


class Windows:
    """A straggler that hears, window by window, the seconds of computing of each rank."""

    def __init__(self, ratio, first=3):
        self.straggler, self.beat, self.step = Straggler(ratio), SimpleNamespace(count=first - 1, heard=[]), 0

    def hear(self, seconds, kind="computing"):
        """What it says in a window of five steps, in each of which all ranks are heard."""
        said = []
        for _ in range(5):
            self.step += 1
            self.beat.count += 1
            self.beat.heard = [Vitals(**{kind: second}) for second in seconds]
            said.append(self.straggler.after(self.step, self.beat))
        return "".join(said)


SLOW, EVEN = [0.1, 0.125, 0.1], [0.1, 0.1, 0.1]


def test_a_rank_is_called_slow_in_the_third_window_in_a_row():
    windows = Windows(1.2)
    assert [bool(windows.hear(SLOW)) for _ in range(5)] == [False, False, True, False, False]


def test_a_good_window_clears_the_strikes():
    windows = Windows(1.2)
    order = [SLOW, SLOW, EVEN, SLOW, SLOW, EVEN, SLOW, SLOW, SLOW]
    assert [bool(windows.hear(each)) for each in order] == [False] * 8 + [True]


def test_another_rank_begins_to_count_anew():
    windows = Windows(1.2)
    other = [0.125, 0.1, 0.1]
    assert [bool(windows.hear(each)) for each in [SLOW, SLOW, other, other, SLOW, SLOW]] == [False] * 6
    said = windows.hear(SLOW)
    assert said.startswith("rank 1 is slow: 125.0 ms a step of computing, the others 100.0 ms")


@pytest.mark.parametrize(
    ("ratio", "seconds", "slow"),
    [
        (1.25, 0.125, False),  # just the ratio
        (1.25, 0.1251, True),
        (1.001, 0.1019, False),  # less than two milliseconds are noise whatever the ratio
        (1.001, 0.1021, True),
        (0.0, 9.0, False),  # 0 never speaks
    ],
)
def test_the_ratio_and_the_least_difference(ratio, seconds, slow):
    windows = Windows(ratio)
    assert any(windows.hear([0.1, 0.1, seconds]) for _ in range(4)) == slow


def test_the_first_two_exchanges_measure_the_start():
    windows = Windows(1.2, first=1)
    said = [bool(windows.hear(SLOW)) for _ in range(3)]
    assert said == [False, False, True]
    beat = SimpleNamespace(count=1, heard=[Vitals(computing=9.0), Vitals(computing=0.1)])
    straggler = Straggler(1.2)
    lines = []
    for step in range(1, 40):
        if step > 2:
            beat.heard = [Vitals(computing=0.1)] * 2
        lines.append(straggler.after(step, beat))
        beat.count += 1
    assert not any(lines)


def test_each_kind_of_slowness_is_told_once():
    windows = Windows(1.2)
    for _ in range(3):
        said = windows.hear(SLOW)
    assert "of computing" in said
    for _ in range(3):
        said = windows.hear(SLOW, "data")
    assert "of loading data" in said
    assert not any(windows.hear(SLOW, kind) for kind in ("data", "computing") for _ in range(3))
