"""The guards at their thresholds: just below and just above, and what makes them forget."""

import math
import os
import pty
import signal
from types import SimpleNamespace

import pytest
import torch
from ranks import run
from torch import nn

from lockstep.data.batches import MicroBatch
from lockstep.distributed.exchange import INTERRUPT, SAVE_AND_END, BusySeconds
from lockstep.distributed.membership import STOP_SIGNALS, leave_terminal
from lockstep.distributed.progress import COMPUTING, SAVING, WAITING
from lockstep.distributed.world import World
from lockstep.errors import DifferenceError
from lockstep.guards import desync, preemption, startup
from lockstep.guards.nonfinite import ReadStep, origin
from lockstep.guards.preemption import Preemption
from lockstep.guards.samples import RetryingDataset, loading_failures
from lockstep.guards.spike import Spike
from lockstep.guards.startup import check_weights
from lockstep.guards.straggler import Straggler
from lockstep.guards.watchdog import HangWatchdog
from lockstep.records import StepRecord
from lockstep.run_state import RunState


class Run:
    """A spike guard that is told the norms of steps 0, 1, 2, ..."""

    def __init__(self, *norms):
        self.spike, self.step = Spike(), 0
        assert not any([self.sees(norm) for norm in norms])  # noqa: C419 - each must be seen

    def sees(self, norm, times=1):
        """Whether any of so many norms is a spike."""
        found = [self.spike.sees(self.step + k, norm) for k in range(times)]
        self.step += times
        return any(found)

    @property
    def limit(self):
        """What the step after the next must stay below: an estimate holds from there on, read at once or late."""
        return self.spike.limit(self.step + 1)


def test_the_limit_of_even_norms_is_three_times_the_median():
    assert Run(*[2.0] * 32).limit == 6.0


def test_limit_of_uneven_norms_is_eight_deviations_over_median():
    """1 to 32: the median is 17, its median deviation 8, and 17 + 8 x 1.4826 x 8 is more than 51."""
    assert Run(*range(1, 33)).limit == pytest.approx(17 + 8 * 1.4826 * 8)


def test_a_norm_below_the_limit_is_none_and_one_at_it_is():
    """As an engine has it: a norm that is not below the limit is not applied."""
    run = Run(*[2.0] * 33)
    assert not run.sees(math.nextafter(6.0, 5.0))
    assert run.sees(6.0)
    assert run.sees(math.inf)


def test_an_estimate_holds_from_the_step_after_the_next():
    run = Run(*[2.0] * 32)  # steps 0 to 31
    assert [run.spike.limit(step) for step in (31, 32, 33)] == [math.inf, math.inf, 6.0]


def test_first_limit_comes_with_32_norms_and_the_next_16_later():
    run = Run(*[2.0] * 31)
    assert run.limit == math.inf
    run.sees(2.0)
    assert run.limit == 6.0
    assert not run.sees(2.2, 16)
    assert run.limit == 6.0  # 32 of 2.0 and 16 of 2.2: the median stays, so does its deviation
    assert not run.sees(2.2, 15)
    assert run.limit == 6.0
    assert not run.sees(2.2)
    assert run.limit == pytest.approx(3 * 2.2)  # at 64 norms, as many of both: the upper one


def test_recently_risen_norms_raise_the_limit_step_by_step():
    run = Run(*[2.0] * 40)
    assert not run.sees(5.0, 3)
    assert run.limit == 6.0  # 5 of the last 8 are 2.0
    assert not run.sees(5.0)
    assert run.limit == 12.5  # as many of both: the upper one
    assert not run.sees(5.0)
    assert not run.sees(math.nextafter(12.5, 0.0))
    assert run.sees(12.5)
    assert not run.sees(2.0, 4)
    assert run.limit == 12.5
    assert not run.sees(2.0)
    assert run.limit == 6.0


def test_only_the_last_128_norms_count():
    run = Run(*[2.0] * 128)
    assert not run.sees(2.2, 63)
    assert run.limit == 6.0
    assert not run.sees(2.2, 17)  # 80 of the last 128, and less than half of all
    assert run.limit == 3 * 2.2


def test_nothing_is_learnt_from_a_norm_of_zero_or_from_a_spike():
    run = Run(*[2.0] * 31)
    assert not run.sees(0.0, 40)
    assert run.limit == math.inf
    run.sees(2.0, 2)
    assert run.limit == 6.0
    assert run.sees(100.0, 200)
    assert run.limit == 6.0


def test_a_resumed_guard_goes_on_as_the_one_before():
    """Between two estimates, with one that holds and one that is to come."""
    norms = [1.0 + 0.37 * (step * step % 11) for step in range(200)]
    for stop in (20, 31, 32, 33, 47, 48, 49, 100, 130):
        run, other = Run(*norms[:stop]), Spike()
        other.load(RunState(spike=run.spike.state(0)).copy().spike)
        for step in range(stop, 200):
            assert other.limit(step) == run.spike.limit(step)
            assert other.sees(step, norms[step]) == run.spike.sees(step, norms[step])


class Windows:
    """A straggler that hears, window by window, the seconds of computing of each rank."""

    def __init__(self, ratio, first=3):
        self.straggler, self.exchange, self.step = (
            Straggler(ratio),
            SimpleNamespace(count=first - 1, busy_by_rank=[]),
            0,
        )

    def hear(self, seconds, kind="computing"):
        """What it says in a window of five steps, in each of which all ranks are heard."""
        said = []
        for _ in range(5):
            self.step += 1
            self.exchange.count += 1
            self.exchange.busy_by_rank = [BusySeconds(**{kind: second}) for second in seconds]
            said.append(self.straggler.after(self.step, self.exchange))
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
    assert said.startswith("rank 1 is slow: 125.0 ms per step of computing, the others 100.0 ms")


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
    exchange = SimpleNamespace(count=1, busy_by_rank=[BusySeconds(computing=9.0), BusySeconds(computing=0.1)])
    straggler = Straggler(1.2)
    lines = []
    for step in range(1, 40):
        if step > 2:
            exchange.busy_by_rank = [BusySeconds(computing=0.1)] * 2
        lines.append(straggler.after(step, exchange))
        exchange.count += 1
    assert not any(lines)


def test_of_the_start_not_one_exchange_is_measured():
    """With the second the first window would have two slow steps of four, and be the first of three."""
    straggler, exchange, said = Straggler(1.2), SimpleNamespace(count=0), []
    for step in range(1, 21):
        exchange.count += 1
        slow = step in (1, 2, 3) or step > 5
        exchange.busy_by_rank = [BusySeconds(computing=0.2 if slow else 0.1), BusySeconds(computing=0.1)]
        said.append(bool(straggler.after(step, exchange)))
    assert said == [False] * 19 + [True]


def test_each_kind_of_slowness_is_told_once():
    windows = Windows(1.2)
    for _ in range(3):
        said = windows.hear(SLOW)
    assert "of computing" in said
    for _ in range(3):
        said = windows.hear(SLOW, "data")
    assert "of loading data" in said
    assert not any(windows.hear(SLOW, kind) for kind in ("data", "computing") for _ in range(3))


@pytest.mark.parametrize(
    ("phase", "seconds", "hangs"),
    [(COMPUTING, 7.9, False), (COMPUTING, 8.1, True), (WAITING, 8.1, True), (SAVING, 80.0, False)],
)
def test_a_hang_is_noticed_after_one_timeout(tmp_path, monkeypatch, phase, seconds, hangs):
    progress = SimpleNamespace(phase=phase, since=100.0, step=3)
    watch = HangWatchdog(World(timeout=8.0), SimpleNamespace(progress=progress), tmp_path)
    monkeypatch.setattr("lockstep.guards.watchdog.time", SimpleNamespace(monotonic=lambda: 100.0 + seconds))
    assert bool(watch._reason()) == hangs


@pytest.mark.parametrize(("stands", "gone", "hangs"), [(4.9, True, False), (5.1, True, True), (5.1, False, False)])
def test_rank_without_a_launcher_waits_as_long_as_its_steps(tmp_path, monkeypatch, stands, gone, hangs):
    """The longest phase before took two seconds; how long the present one has lasted does not count."""
    progress = SimpleNamespace(phase=WAITING, since=100.0, step=3)
    watch, clock = HangWatchdog(World(timeout=600.0), SimpleNamespace(progress=progress), tmp_path), [102.0]
    monkeypatch.setattr("lockstep.guards.watchdog.time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert not watch._reason()
    progress.since, clock[0] = 102.0, 102.0 + stands
    assert not watch._reason()
    monkeypatch.setattr("lockstep.guards.watchdog.launcher_is_gone", lambda: gone)
    assert bool(watch._reason()) == hangs


def begun(world, metas, differ):
    """What is said of weights that differ, or not, some ranks' being without memory still."""
    model = nn.Linear(2, 2, device="meta" if world.rank in metas else "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 + differ * world.rank)
    try:
        check_weights(world, {"model": model})
    except DifferenceError as error:
        return str(error)
    return ""


def all_begun(world, cases):
    return [begun(world, *case) for case in cases]


def test_weights_that_rank_0_hands_out_are_not_compared():
    cases = [((1,), 1.0), ((0, 1), 1.0), ((), 1.0), ((), 0.0)]
    for said in run(all_begun, 2, cases):
        assert [bool(each) for each in said] == [False, False, True, False]
        assert "the initial weights differ: rank 0 and rank 1 differ" in said[2]


def test_a_second_ctrl_c_ends_now_whatever_came_between():
    wishes, before = [], [signal.getsignal(number) for number in STOP_SIGNALS]
    with Preemption(SimpleNamespace(stop=wishes.append)) as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)
        assert wishes == [SAVE_AND_END, INTERRUPT, SAVE_AND_END, SAVE_AND_END]
        assert not signals.ends_now
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signals.ends_now
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("heeded", [True, False], ids=["a terminal", "nohup"])
def test_the_end_of_the_terminal_is_a_wish_and_under_nohup_none(heeded, monkeypatch):
    wishes, left = [], []
    monkeypatch.setattr(preemption, "leave_terminal", lambda: left.append(len(wishes)))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL if heeded else signal.SIG_IGN)
    try:
        with Preemption(SimpleNamespace(stop=wishes.append)):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_DFL if heeded else signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (wishes, left) == (([SAVE_AND_END] * 2, [1]) if heeded else ([SAVE_AND_END], []))


def test_output_of_a_lost_terminal_is_dropped_and_files_written(tmp_path):
    master, terminal = pty.openpty()
    file = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        os.dup2(file, 1)
        os.dup2(terminal, 2)
        leave_terminal()
        found = [os.fstat(descriptor).st_rdev for descriptor in (1, 2)]
        os.write(1, b"kept")
    finally:
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        for descriptor in (master, terminal, file):
            os.close(descriptor)
    assert (tmp_path / "out").read_bytes() == b"kept"
    assert found[1] == os.stat(os.devnull).st_rdev


class Nested(nn.Module):
    """Gives what it is told to, around its input."""

    def __init__(self, around):
        super().__init__()
        self.around = around

    def forward(self, x):
        return self.around(x)


@pytest.mark.parametrize(
    "around",
    [
        lambda x: (torch.ones(2), x),
        lambda x: [x, torch.ones(2)],
        lambda x: {"a": torch.ones(2), "b": (None, x, "text", torch.ones(2, dtype=torch.int64))},
    ],
    ids=["tuple", "list", "dict"],
)
def test_not_finite_number_is_found_in_whatever_a_module_returns(around):
    model = nn.Sequential(Nested(around), Nested(lambda x: torch.ones(2)))
    for value, named in ((math.nan, True), (1.0, False)):
        micro = [MicroBatch(torch.full((2,), value), 0, 1, 1.0)]
        step = ReadStep(StepRecord(7, 4, [], None, 1.0), micro, math.nan, [1.0])
        found = origin(step, model, lambda b: model(b.data).sum(), lambda *_: None, lambda *_: [5], World())
        assert ("is of module '0'" in found) == named
        assert found.startswith("micro-batch 0 (samples 5) on rank 0: ") == named


def test_samples_of_the_first_bad_micro_batch_are_named_up_to_16():
    model = Nested(lambda x: x)
    micro = [MicroBatch(torch.tensor(v), i, 1, w) for i, (v, w) in enumerate([(math.nan, 0.0), (1.0, 1.0), (2.0, 1.0)])]
    step = ReadStep(StepRecord(7, 4, [], None, 1.0), micro, math.nan, [math.inf, math.nan])
    seeded, chosen = [], []
    for count, end in ((16, "15"), (17, "15, ...")):
        chosen[:] = range(count)
        found = origin(
            step, model, lambda b: model(b.data).sum(), lambda *at: seeded.append(at), lambda *_: chosen, World()
        )
        assert found.startswith("micro-batch 1 (samples 0, 1, ")  # an empty slot has no loss, and is no sample's fault
        assert f"{end}) on rank 0: its loss was not finite, but is when recomputed" in found
    assert seeded == [(7, 0), (7, 1), (7, 2)] * 2  # as in the loop


def test_failures_of_loading_are_counted_by_kind():
    dataset = RetryingDataset([1, 2], retries=0, skips=0, rank=0)
    assert loading_failures([]) == loading_failures([dataset]) == [0.0, 0.0, 0.0]
    dataset.counts += torch.tensor([3, 1])
    assert loading_failures([dataset, SimpleNamespace(restarts=2)]) == [3.0, 1.0, 2.0]
    assert loading_failures([SimpleNamespace(restarts=2)]) == [0.0, 0.0, 2.0]


def test_the_codes_mark_is_of_every_files_text(tmp_path):
    (tmp_path / "deep").mkdir()
    marks = set()
    for name, text in (("__init__.py", "a"), ("deep/b.py", "b"), ("deep/b.py", "c"), ("deep/b.txt", "not read")):
        (tmp_path / name).write_text(text)
        marks.add(startup._digest(tmp_path))
    assert len(marks) == 3


def test_what_takes_no_memory_has_no_fingerprint():
    held = {"a": torch.ones(2), "b": torch.ones(2, device="meta")}
    assert desync.fingerprints(held).keys() == {"a"}
