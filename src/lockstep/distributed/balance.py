"""`--shares auto`: runs of micro-batches by the ranks' measured speed, decided by all ranks alike.

    balancer = Balancer(micro_batches=8, ranks=2)
    sharing = Sharing(balancer.at)
    line = balancer.heard(reports, first=20)        # after an exchange; "" but where the shares change

What a unit of work takes a rank is the seconds in which it computed by itself, over the work that it had: both are
known of every rank alike (see `Report`). A decision is for steps that no rank has asked for yet, so that what was
loaded ahead stays as it was. Work is a micro-batch, or what the task says of its samples (`Task.work`): then each step
is cut by its own.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple, final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lockstep.distributed.progress import rank_label
from lockstep.errors import LockstepError

__all__ = [
    "Balancer",
    "ShareReport",
    "Shares",
    "Sharing",
    "check_alike",
    "cut",
    "equal_shares",
    "given_shares",
    "loads",
]


class Shares(NamedTuple):
    """Who computes what of a step.

    Attributes:
        runs: by rank, the first and the past-the-last of its micro-batches, which follow each other.
        slots: by rank, how many forwards it makes; those past the end of its run are empty.
    """

    runs: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]


def equal_shares(micro_batches: int, ranks: int) -> Shares:
    """ceil(M / ranks) slots on every rank, so that collectives within a forward line up."""
    each = -(-micro_batches // ranks)
    ends = [min(rank * each, micro_batches) for rank in range(ranks + 1)]
    return Shares(tuple(itertools.pairwise(ends)), (each,) * ranks)


def given_shares(counts: Sequence[int]) -> Shares:
    """So many micro-batches on each rank, and no empty slot."""
    return Shares(tuple(itertools.pairwise(itertools.accumulate(counts, initial=0))), tuple(counts))


@final
class Sharing:
    """Who computes what, step by step: what loads the micro-batches asks for a step to come, an engine for the present.

    Attributes:
        at: step -> its shares; always the same ones for a step, and the same on every rank.
        guess: the same, but those of a step to come may still change: for who only looks ahead.
        step: the present one, which the step loader says.
    """

    def __init__(self, at: Callable[[int], Shares], guess: Callable[[int], Shares] | None = None) -> None:
        self.at, self.guess, self.step = at, guess or at, 0

    @property
    def now(self) -> Shares:
        """Those of the present step."""
        return self.at(self.step)


_Numbers = NDArray[np.float64]

_BAND = 64  # runs up to this length are all tried; longer ones up to twice what the rank's speed says


def cut(works: Sequence[float], costs: Sequence[float], most: Sequence[int] = ()) -> Shares:
    """The runs of which the longest takes least; of several such cuts the one whose loads are most alike.

    Found by dynamic programming over the ranks, the "linear partition" of Kleinberg and Tardos, twice: first the least
    possible longest load, then among the cuts within it the least sum of squared loads. Only numbers decide, by
    operations that are the same on every processor, so all ranks that are given the same find the same.

    Args:
        works: of each micro-batch, in any unit, above 0; M of them, at least as many as ranks.
        costs: by rank, what a unit of work takes it, above 0.
        most: by rank, micro-batches that it may have at most, M in all or more; (): as many as there are.
    """
    count = len(works)
    ends = np.array(list(itertools.accumulate(works, initial=0.0)))
    widths = _widths(count, costs, most or (count,) * len(costs))
    first = np.full(count + 1, np.inf)
    first[0] = 0.0
    best = first
    for cost, width in zip(costs, widths, strict=True):
        best = np.maximum(_before(best, width), cost * _work(ends, width)).min(axis=1)
    limit, best, choices = best[count], first, []
    for cost, width in zip(costs, widths, strict=True):
        load = cost * _work(ends, width)
        total = _before(best, width) + np.where(load <= limit, load * load, np.inf)
        shortest = total[:, ::-1].argmin(axis=1)  # of equal ones
        best = total[np.arange(count + 1), width - 1 - shortest]
        choices.append(shortest + 1)
    slots, end = [], count
    for lengths in reversed(choices):
        slots.append(int(lengths[end]))
        end -= slots[-1]
    slots.reverse()
    return Shares(tuple(itertools.pairwise(itertools.accumulate(slots, initial=0))), tuple(slots))


def loads(works: Sequence[float], costs: Sequence[float], shares: Shares) -> list[float]:
    """By rank, what its run takes it."""
    return [cost * math.fsum(works[a:b]) for cost, (a, b) in zip(costs, shares.runs, strict=True)]


def _widths(count: int, costs: Sequence[float], most: Sequence[int]) -> list[int]:
    """The longest run that is tried on each rank: for many micro-batches all lengths would take too long."""
    speed = sum(1.0 / cost for cost in costs)
    fair = [math.ceil(2.0 * count / (cost * speed)) for cost in costs]
    found = [min(count, own, max(_BAND, each)) for own, each in zip(most, fair, strict=True)]
    return found if sum(found) >= count else [min(count, own) for own in most]


def _before(values: _Numbers, width: int) -> _Numbers:
    """[count + 1, width]: row j has the values at j - width .. j - 1, where a run that ends at j may begin."""
    return sliding_window_view(np.concatenate([np.full(width, np.inf), values[:-1]]), width)


def _work(ends: _Numbers, width: int) -> _Numbers:
    """[count + 1, width]: the work of the runs that end at j and begin there; inf for what is no run."""
    padded = np.concatenate([np.full(width, -np.inf), ends[:-1]])
    work: _Numbers = ends[:, None] - sliding_window_view(padded, width)
    return work


GAIN = 0.05  # a change must make the steps so much shorter, as a share, in two windows of measurements in a row
_REPORTS, _STEPS, _ENOUGH = 4, 8, 64  # in a window, at least; so many steps are enough with any number of reports
_COMPARED = 16  # steps of a window, the last ones, whose lengths under old and new shares are compared
_CUTS = 1024  # that are remembered: a device's seconds are known late


class ShareReport(NamedTuple):
    """What a rank tells of itself at an exchange, in all since the start.

    Attributes:
        steps: of which the seconds below are known.
        data: seconds of loading, without those of waiting for others.
        forward: seconds of all forwards.
        backward: seconds of all backwards but each step's last one, in which ranks wait for each other.
        check: of the shares of the steps that the exchange is for; the same on every rank, or they would drift apart.
    """

    steps: float
    data: float
    forward: float
    backward: float
    check: float


class _CutRule(NamedTuple):
    """How steps from `first` on are cut, until the next rule."""

    first: int
    costs: tuple[float, ...]
    most: tuple[int, ...]


class _Throughput(NamedTuple):
    """Seconds per unit of work; `backward` None where each step had one micro-batch alone."""

    data: float
    forward: float
    backward: float | None


@final
class Balancer:
    """Measures and decides. The same on every rank, since all are told the same.

    Args:
        micro_batches: M.
        ranks: how many; at most M.
        start: the first step.
        works: step -> the work of each of its M micro-batches, above 0; None: all alike.
        state: what `state` was before a resume; another number of ranks begins anew.
        most: by rank, micro-batches that it may have at most; (): as many as there are.

    Attributes:
        by_length: whether each step is cut by its own work.
    """

    def __init__(
        self,
        micro_batches: int,
        ranks: int,
        start: int = 0,
        works: Callable[[int], Sequence[float]] | None = None,
        state: dict[str, Any] | None = None,
        most: Sequence[int] = (),
    ) -> None:
        self._even, self._start, self._works = (1.0,) * micro_batches, start, works
        self.by_length = works is not None
        before = state or {}
        costs, bounds = tuple(map(float, before.get("costs", ()))), tuple(map(int, before.get("most", ())))
        if len(costs) != ranks:
            costs, bounds = (1.0,) * ranks, ()
        if sum(bounds) < micro_batches:
            bounds = tuple(most)
        self._rules = [_CutRule(start, costs, bounds)]
        self._whole: dict[_CutRule, Shares] = {}
        self._cuts: dict[int, Shares] = {}
        self._asked = start - 1
        self._base: Sequence[ShareReport] = ()
        self._window: list[list[_Throughput]] = []
        self._covered: list[int] = []  # steps of the window
        self._called: tuple[float, ...] = ()  # costs of the window before, where they called for a change

    def at(self, step: int) -> Shares:
        """The shares of a step: the same ones whenever it is asked for."""
        self._asked = max(self._asked, step)
        return self._at(step)

    def guess(self, step: int) -> Shares:
        """The shares of a step as they would be by what is decided now; those of a step ahead may still change."""
        if self._works is None or step in self._cuts:
            return self._at(step)
        rule = self._rule(step)
        return cut(self._works(step), rule.costs, rule.most)

    @property
    def costs(self) -> tuple[float, ...]:
        """By rank, what a unit of work takes it, as decided last."""
        return self._rules[-1].costs

    @property
    def state(self) -> dict[str, Any]:
        """What a resume begins with: numbers for JSON."""
        return {"costs": list(self.costs), "most": list(self._rules[-1].most)}

    def check(self, first: int, stop: int) -> float:
        """A number that ranks whose shares of the steps first .. stop - 1 differ do not have in common."""
        runs = dict.fromkeys(self.at(step).runs for step in range(first, stop))
        return float(zlib.crc32(repr(list(runs)).encode()))

    def relieves(self, rank: int, step: int) -> bool:
        """Whether a rank that is slow in `step` could be given less."""
        return self._at(step).slots[rank] > 1

    def bound(self, most: Sequence[int], first: int) -> None:
        """From the step `first` on, micro-batches that each rank may have at most."""
        self._add(_CutRule(first, self.costs, tuple(most)))

    def heard(self, reports: Sequence[ShareReport], first: int) -> str:
        """Takes what each rank told; where the shares change, one line that says so, else "".

        Args:
            reports: by rank.
            first: the earliest step that no rank has asked for yet: from there on the shares may change.

        Raises:
            LockstepError: the ranks do not share out the coming steps alike.
        """
        check_alike([report.check for report in reports])
        if not self._base:
            self._base = reports if all(report.forward > 0.0 for report in reports) else ()  # a run warms up till then
        elif all(_later(*pair) for pair in zip(self._base, reports, strict=True)):
            self._measure(self._base, reports)
            self._base = reports
        short = len(self._window) < _REPORTS or len(self._covered) < _STEPS
        if short and len(self._covered) < _ENOUGH:
            return ""
        costs, steps = _costs(self._window), self._covered[-_COMPARED:]
        self._window, self._covered = [], []
        return self._judged(costs, steps, first)

    def _rule(self, step: int) -> _CutRule:
        return next((rule for rule in reversed(self._rules) if rule.first <= step), self._rules[0])

    def _at(self, step: int) -> Shares:
        rule = self._rule(step)
        if self._works is None:
            if rule not in self._whole:
                self._whole[rule] = cut(self._even, rule.costs, rule.most)
            return self._whole[rule]
        if step not in self._cuts:
            while len(self._cuts) >= _CUTS:
                del self._cuts[min(self._cuts)]
            self._cuts[step] = cut(self._works(step), rule.costs, rule.most)
        return self._cuts[step]

    def _work(self, step: int) -> Sequence[float]:
        return self._even if self._works is None else self._works(step)

    def _measure(self, before: Sequence[ShareReport], now: Sequence[ShareReport]) -> None:
        found = []
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            runs = [(self._work(step), *self._at(step).runs[rank]) for step in self._steps(old, new)]
            whole = sum(sum(work[a:b]) for work, a, b in runs)
            alone = sum(sum(work[a : b - 1]) for work, a, b in runs)
            backward = (new.backward - old.backward) / alone if alone else None
            data, forward = max(0.0, new.data - old.data), new.forward - old.forward
            found.append(_Throughput(data / whole, forward / whole, backward))
        self._window.append(found)
        self._covered += self._steps(before[0], now[0])

    def _steps(self, old: ShareReport, new: ShareReport) -> range:
        return range(self._start + int(old.steps), self._start + int(new.steps))

    def _judged(self, costs: tuple[float, ...], steps: list[int], first: int) -> str:
        """Whether two windows in a row call for a change; their mean is what is decided by."""
        before, self._called = self._called, ()
        if not self._gains(costs, steps):
            return ""
        if not before:
            self._called = costs
            return ""
        costs = tuple((one + other) / 2.0 for one, other in zip(before, costs, strict=True))
        if not self._gains(costs, steps):
            return ""
        self._add(_CutRule(first, costs, self._rules[-1].most))
        return self._described()

    def _gains(self, costs: tuple[float, ...], steps: list[int]) -> bool:
        """Whether shares by these costs would make such steps shorter by GAIN than those that were decided last."""
        rule = self._rules[-1]
        changes = [new / old for new, old in zip(costs, rule.costs, strict=True)]
        if max(changes) <= (1.0 + GAIN) * min(changes):  # then no cut can be better by so much
            return False
        old, new = 0.0, 0.0
        for work in {id(work): work for work in map(self._work, steps)}.values():
            old += max(loads(work, costs, cut(work, rule.costs, rule.most)))
            new += max(loads(work, costs, cut(work, costs, rule.most)))
        return new < (1.0 - GAIN) * old

    def _add(self, rule: _CutRule) -> None:
        if rule.first <= self._asked:
            raise LockstepError(
                f"--shares auto: new shares for step {rule.first}, and step {self._asked} was asked for already: a "
                "mistake in lockstep"
            )
        self._rules.append(rule)

    def _described(self) -> str:
        first, costs, _ = rule = self._rules[-1]
        fast, slow = costs.index(min(costs)), costs.index(max(costs))
        unit = "for the same work" if self.by_length else "a micro-batch"
        ratio = costs[slow] / costs[fast]
        longer = f"{rank_label(slow)} needs {ratio:.2g} times as long {unit} as {rank_label(fast)}"
        why = longer if ratio > 1.0 else "all are alike"
        if self.by_length:
            speeds = ", ".join(f"{costs[fast] / cost:.2g}" for cost in costs)
            return f"shares by length for speeds of {speeds} after step {first}: {why}"
        shares = cut(self._even, rule.costs, rule.most)
        return f"shares {','.join(map(str, shares.slots))} after step {first}: {why}"


def check_alike(checks: Sequence[float]) -> None:
    """Raises LockstepError where ranks have found another number than others (see `Balancer.check`)."""
    if len(set(checks)) > 1:
        raise LockstepError(
            "--shares auto: the ranks share out the coming steps differently; the task's `work` must say the same "
            "of the same samples on every rank"
        )


def _later(old: ShareReport, new: ShareReport) -> bool:
    """Whether something was measured since: a device's seconds are known where its clock is read."""
    return new.steps > old.steps and new.forward > old.forward


def _costs(window: list[list[_Throughput]]) -> tuple[float, ...]:
    """By rank, the seconds that a unit of work takes: the medians of a window, for what disturbs a rank once.

    Of a rank with one micro-batch alone in each step no backward is known: it is as much longer than the forward as
    those of the others are.
    """
    ranks = [[measured[rank] for measured in window] for rank in range(len(window[0]))]
    forward = [median(each.forward for each in own) for own in ranks]
    known = [[each.backward for each in own if each.backward is not None] for own in ranks]
    pairs = [(median(each), ahead) for each, ahead in zip(known, forward, strict=True) if each]
    usual = sum(back for back, _ in pairs) / sum(ahead for _, ahead in pairs) if pairs else 0.0
    back = [median(each) if each else usual * ahead for each, ahead in zip(known, forward, strict=True)]
    data = [median(each.data for each in own) for own in ranks]
    return tuple(sum(parts) for parts in zip(data, forward, back, strict=True))
