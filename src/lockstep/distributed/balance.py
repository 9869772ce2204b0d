"""Share out micro-batches by the ranks' measured speed (`--shares auto`), the same on all ranks.

    balancer = Balancer(micro_batches=8, ranks=2)
    schedule = ShareSchedule(balancer.at)
    line = balancer.update(reports, first=20)       # after an exchange; "" if the shares stay

A rank's cost per unit of work is its busy seconds divided by its work. All ranks know both for every rank (see
`ShareReport`), so all decide the same. A decision applies to steps that no rank has requested yet, so micro-batches
loaded ahead stay valid. Work is one per micro-batch, or the task's estimate from its samples (`Task.work`); then each
step is cut by its own work.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lockstep.distributed.progress import rank_label
from lockstep.errors import LockstepError
from lockstep.run_state import SharesState

__all__ = [
    "Balancer",
    "ShareReport",
    "ShareSchedule",
    "Shares",
    "check_same_shares",
    "equal_shares",
    "shares_of_counts",
]


class Shares(NamedTuple):
    """The micro-batches of a step that each rank computes.

    Attributes:
        runs: by rank, the first and the past-the-last of its consecutive micro-batches.
        slots: by rank, its number of forwards; those past the end of its run are empty.
    """

    runs: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]


def equal_shares(micro_batches: int, ranks: int) -> Shares:
    """Return ceil(M / ranks) slots per rank, so that collectives within a forward line up."""
    length = -(-micro_batches // ranks)
    ends = [min(rank * length, micro_batches) for rank in range(ranks + 1)]
    return Shares(tuple(itertools.pairwise(ends)), (length,) * ranks)


def shares_of_counts(counts: Sequence[int]) -> Shares:
    """Return the shares for this number of micro-batches per rank, without empty slots."""
    return Shares(tuple(itertools.pairwise(itertools.accumulate(counts, initial=0))), tuple(counts))


@final
class ShareSchedule:
    """The shares of each step, present and future.

    Attributes:
        at: step -> its shares; constant for a step, and the same on every rank.
        guess: the same, but shares of a future step may still change; for callers that only look ahead.
        step: the current step, set by the step loader.
    """

    def __init__(self, at: Callable[[int], Shares], guess: Callable[[int], Shares] | None = None) -> None:
        self.at = at
        self.guess = guess or at
        self.step = 0

    @property
    def varies(self) -> bool:
        """Whether shares may differ between steps."""
        return self.guess != self.at

    @property
    def now(self) -> Shares:
        """The shares of the current step."""
        return self.at(self.step)


_Numbers = NDArray[np.float64]

# Runs up to this length are always tried. Longer ones are tried up to twice the fair length for the rank's speed.
_BAND = 64


def cut(work: Sequence[float], costs: Sequence[float], most: Sequence[int] = ()) -> Shares:
    """Cut micro-batches into runs so that the slowest rank's load is smallest.

    Among such cuts, it picks the one with the most equal loads. Dynamic programming over the ranks (the "linear
    partition" problem of Kleinberg and Tardos) runs twice: first for the smallest possible largest load, then, within
    it, for the smallest sum of squared loads. Only operations that are the same on every processor decide, so ranks
    with the same arguments find the same cut.

    Args:
        work: work of each micro-batch, in any unit, above 0; M of them, at least as many as ranks.
        costs: by rank, its time for a unit of work, above 0.
        most: by rank, its largest number of micro-batches, M in all or more; (): no limit.
    """
    count = len(work)
    ends = np.array(list(itertools.accumulate(work, initial=0.0)))
    widths = _widths(count, costs, most or (count,) * len(costs))
    start_loads = np.full(count + 1, np.inf)
    start_loads[0] = 0.0
    # First pass: the smallest possible load of the slowest rank, for every number of micro-batches so far.
    best = start_loads
    for cost, width in zip(costs, widths, strict=True):
        best = np.maximum(_before(best, width), cost * _work(ends, width)).min(axis=1)
    limit = best[count]
    # Second pass: within that limit, the smallest sum of squared loads.
    best = start_loads
    choices = []
    for cost, width in zip(costs, widths, strict=True):
        load = cost * _work(ends, width)
        total = _before(best, width) + np.where(load <= limit, load * load, np.inf)
        # argmin of the reversed row picks the shortest of equally good runs, on every rank.
        shortest = total[:, ::-1].argmin(axis=1)
        best = total[np.arange(count + 1), width - 1 - shortest]
        choices.append(shortest + 1)
    # Walk back from the last rank: each choice fixes where the run before it ends.
    slots = []
    end = count
    for lengths in reversed(choices):
        slots.append(int(lengths[end]))
        end -= slots[-1]
    slots.reverse()
    return Shares(tuple(itertools.pairwise(itertools.accumulate(slots, initial=0))), tuple(slots))


def loads(work: Sequence[float], costs: Sequence[float], shares: Shares) -> list[float]:
    """Return, by rank, the time of its run."""
    seconds = []
    for cost, (a, b) in zip(costs, shares.runs, strict=True):
        seconds.append(cost * math.fsum(work[a:b]))
    return seconds


def _widths(count: int, costs: Sequence[float], most: Sequence[int]) -> list[int]:
    """Return the longest run to try on each rank; trying all would take too long."""
    speed = sum(1.0 / cost for cost in costs)
    fair = [math.ceil(2.0 * count / (cost * speed)) for cost in costs]
    widths = []
    for limit, fair_width in zip(most, fair, strict=True):
        widths.append(min(count, limit, max(_BAND, fair_width)))
    # Runs this short cannot cover all micro-batches: try every length within the limits.
    if sum(widths) >= count:
        return widths
    return [min(count, limit) for limit in most]


def _before(values: _Numbers, width: int) -> _Numbers:
    """Return the values at the starts of runs that end at each position.

    Returns:
        [count + 1, width]: row j has the values at j - width .. j - 1.
    """
    return sliding_window_view(np.concatenate([np.full(width, np.inf), values[:-1]]), width)


def _work(ends: _Numbers, width: int) -> _Numbers:
    """Return the work of runs that end at each position.

    Returns:
        [count + 1, width]; inf for impossible runs.
    """
    padded = np.concatenate([np.full(width, -np.inf), ends[:-1]])
    work: _Numbers = ends[:, None] - sliding_window_view(padded, width)
    return work


# A change must shorten the steps by this fraction, in two windows of measurements in a row.
GAIN = 0.05
# A window has at least so many reports and steps. _ENOUGH steps suffice with any number of reports.
_REPORTS = 4
_STEPS = 8
_ENOUGH = 64
# Last steps of a window, whose times under old and new shares are compared.
_COMPARED_STEPS = 16
# Cuts to cache: a device's seconds are known some steps late, and then need the cut of their step.
_CUTS = 1024


class ShareReport(NamedTuple):
    """A rank's measurements at an exchange, in total since the start.

    Attributes:
        steps: number of steps that the seconds below cover.
        data: seconds of loading, without waiting for others.
        forward: seconds of all forwards.
        backward: seconds of all backwards except each step's last, in which ranks wait for each other.
        check: checksum of the shares of the steps that the exchange covers; equal on every rank unless they diverge.
    """

    steps: float
    data: float
    forward: float
    backward: float
    check: float


class _CutRule(NamedTuple):
    """How to cut the steps from `first` on, until the next rule."""

    first: int
    costs: tuple[float, ...]
    most: tuple[int, ...]


class _UnitCost(NamedTuple):
    """Seconds per unit of work; `backward` is None if each step had a single micro-batch."""

    data: float
    forward: float
    backward: float | None


@final
class Balancer:
    """Measures the ranks' speed and decides their shares.

    Decides the same on every rank, given the same reports.

    Args:
        micro_batches: M.
        ranks: number of ranks; at most M.
        start: the first step.
        work_of: step -> the work of each of its M micro-batches, above 0; None: all equal.
        state: the `state` before a resume; ignored if the number of ranks differs.
        most: by rank, its largest number of micro-batches; (): no limit.

    Attributes:
        by_length: whether each step is cut by its own work.
    """

    def __init__(
        self,
        micro_batches: int,
        ranks: int,
        start: int = 0,
        work_of: Callable[[int], Sequence[float]] | None = None,
        state: SharesState | None = None,
        most: Sequence[int] = (),
    ) -> None:
        self._even = (1.0,) * micro_batches
        self._start = start
        self._work_of = work_of
        self.by_length = work_of is not None
        before = state or SharesState()
        costs = tuple(map(float, before.costs))
        bounds = tuple(before.most)
        if len(costs) != ranks:
            costs = (1.0,) * ranks
            bounds = ()
        # Bounds that a resume brings must still leave room for all micro-batches.
        if sum(bounds) < micro_batches:
            bounds = tuple(most)
        self._rules = [_CutRule(start, costs, bounds)]
        self._even_shares: dict[_CutRule, Shares] = {}
        self._cuts: dict[int, Shares] = {}
        self._last_request = start - 1
        self._base: Sequence[ShareReport] = ()
        self._window: list[list[_UnitCost]] = []
        self._window_steps: list[int] = []
        # Costs of the last window, if they called for a change.
        self._pending_costs: tuple[float, ...] = ()

    def at(self, step: int) -> Shares:
        """Return the shares of a step, the same on every call."""
        self._last_request = max(self._last_request, step)
        return self._at(step)

    def guess(self, step: int) -> Shares:
        """Return the shares of a step as decided now; they may still change."""
        if self._work_of is None or step in self._cuts:
            return self._at(step)
        rule = self._rule(step)
        return cut(self._work_of(step), rule.costs, rule.most)

    @property
    def costs(self) -> tuple[float, ...]:
        """By rank, its time for a unit of work, as last decided."""
        return self._rules[-1].costs

    @property
    def state(self) -> SharesState:
        """The state that a resume needs."""
        return SharesState(list(self.costs), list(self._rules[-1].most))

    def check(self, first: int, stop: int) -> float:
        """Return a checksum of the shares of first .. stop - 1, to compare ranks."""
        runs = dict.fromkeys(self.at(step).runs for step in range(first, stop))
        return float(zlib.crc32(repr(list(runs)).encode()))

    def can_relieve(self, rank: int, step: int) -> bool:
        """Whether the shares can give `rank` less work in `step`."""
        return self._at(step).slots[rank] > 1

    def bound(self, most: Sequence[int], first: int) -> None:
        """Limit each rank's micro-batches from the step `first` on."""
        self._add(_CutRule(first, self.costs, tuple(most)))

    def update(self, reports: Sequence[ShareReport], first: int) -> str:
        """Process all ranks' reports, and change the shares if that pays.

        Args:
            reports: by rank.
            first: the earliest step that no rank has requested yet; shares may change from there on.

        Returns:
            A line for the log if the shares change, else "".

        Raises:
            LockstepError: the ranks' shares of the coming steps differ.
        """
        check_same_shares([report.check for report in reports])
        if not self._base:
            # The first report has no forward time while a run warms up: start measuring with the next one.
            if all(report.forward > 0.0 for report in reports):
                self._base = reports
            else:
                self._base = ()
        elif all(_is_newer(*pair) for pair in zip(self._base, reports, strict=True)):
            # A device's times arrive late, so a window counts only reports that are newer on every rank.
            self._measure(self._base, reports)
            self._base = reports
        short = len(self._window) < _REPORTS or len(self._window_steps) < _STEPS
        if short and len(self._window_steps) < _ENOUGH:
            return ""
        costs = _costs(self._window)
        steps = self._window_steps[-_COMPARED_STEPS:]
        self._window = []
        self._window_steps = []
        return self._judge(costs, steps, first)

    def _rule(self, step: int) -> _CutRule:
        for rule in reversed(self._rules):
            if rule.first <= step:
                return rule
        return self._rules[0]

    def _at(self, step: int) -> Shares:
        rule = self._rule(step)
        if self._work_of is None:
            if rule not in self._even_shares:
                self._even_shares[rule] = cut(self._even, rule.costs, rule.most)
            return self._even_shares[rule]
        if step not in self._cuts:
            # Drop the oldest step's cut.
            while len(self._cuts) >= _CUTS:
                del self._cuts[min(self._cuts)]
            self._cuts[step] = cut(self._work_of(step), rule.costs, rule.most)
        return self._cuts[step]

    def _work(self, step: int) -> Sequence[float]:
        if self._work_of is None:
            return self._even
        return self._work_of(step)

    def _measure(self, before: Sequence[ShareReport], now: Sequence[ShareReport]) -> None:
        costs = []
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            runs = []
            for step in self._steps(old, new):
                runs.append((self._work(step), *self._at(step).runs[rank]))
            total = sum(sum(work[a:b]) for work, a, b in runs)
            # The last backward of a step contains waits for other ranks, so its micro-batch does not count.
            timed = sum(sum(work[a : b - 1]) for work, a, b in runs)
            backward = (new.backward - old.backward) / timed if timed else None
            data = max(0.0, new.data - old.data)
            forward = new.forward - old.forward
            costs.append(_UnitCost(data / total, forward / total, backward))
        self._window.append(costs)
        self._window_steps += self._steps(before[0], now[0])

    def _steps(self, old: ShareReport, new: ShareReport) -> range:
        return range(self._start + int(old.steps), self._start + int(new.steps))

    def _judge(self, costs: tuple[float, ...], steps: list[int], first: int) -> str:
        """Change the shares by the mean of two windows, if both call for it."""
        before = self._pending_costs
        self._pending_costs = ()
        if not self._gains(costs, steps):
            # One window may be a disturbance: change the shares only if the next one agrees.
            return ""
        if not before:
            self._pending_costs = costs
            return ""
        costs = tuple((old + new) / 2.0 for old, new in zip(before, costs, strict=True))
        if not self._gains(costs, steps):
            return ""
        self._add(_CutRule(first, costs, self._rules[-1].most))
        return self._describe()

    def _gains(self, costs: tuple[float, ...], steps: list[int]) -> bool:
        """Whether these costs shorten the steps by at least GAIN, compared with the current rule."""
        rule = self._rules[-1]
        changes = [new / old for new, old in zip(costs, rule.costs, strict=True)]
        # Ranks this close in relative speed cannot gain that much by any cut.
        if max(changes) <= (1.0 + GAIN) * min(changes):
            return False
        old = 0.0
        new = 0.0
        # Steps with equal work share one list: compare each list once.
        for work in {id(work): work for work in map(self._work, steps)}.values():
            old += max(loads(work, costs, cut(work, rule.costs, rule.most)))
            new += max(loads(work, costs, cut(work, costs, rule.most)))
        return new < (1.0 - GAIN) * old

    def _add(self, rule: _CutRule) -> None:
        # Every rank must use the new shares from the same step, so none may have loaded data for it already.
        if rule.first <= self._last_request:
            raise LockstepError(
                f"--shares auto: new shares start in step {rule.first + 1}, but step {self._last_request + 1} was "
                "already requested; this is a bug in lockstep"
            )
        self._rules.append(rule)

    def _describe(self) -> str:
        first_step, costs, _ = rule = self._rules[-1]
        fast = costs.index(min(costs))
        slow = costs.index(max(costs))
        unit = "for the same work" if self.by_length else "per micro-batch"
        ratio = costs[slow] / costs[fast]
        longer = f"{rank_label(slow)} takes {ratio:.2g} times as long {unit} as {rank_label(fast)}"
        why = longer if ratio > 1.0 else "all ranks are equally fast"
        if self.by_length:
            speeds = ", ".join(f"{costs[fast] / cost:.2g}" for cost in costs)
            return f"shares by length for speeds of {speeds} after step {first_step}: {why}"
        shares = cut(self._even, rule.costs, rule.most)
        return f"shares {','.join(map(str, shares.slots))} after step {first_step}: {why}"


def check_same_shares(checks: Sequence[float]) -> None:
    """Raise LockstepError if the ranks' checksums differ (see `Balancer.check`)."""
    if len(set(checks)) > 1:
        raise LockstepError(
            "--shares auto: the ranks disagree on the shares of the coming steps; the task's `work` must return the "
            "same for the same samples on every rank"
        )


def _is_newer(old: ShareReport, new: ShareReport) -> bool:
    """Whether a new measurement arrived: a device's times are known once its clock is read."""
    return new.steps > old.steps and new.forward > old.forward


def _costs(window: list[list[_UnitCost]]) -> tuple[float, ...]:
    """Return each rank's seconds per unit of work, as medians of a window.

    Medians are robust to single delays.

    A rank with one micro-batch per step has no timed backward; the other ranks' ratio to the forward is used.
    """
    ranks = []
    for rank in range(len(window[0])):
        ranks.append([costs[rank] for costs in window])
    forward = []
    for unit_costs in ranks:
        forward.append(median(value.forward for value in unit_costs))
    backwards = []
    for unit_costs in ranks:
        backwards.append([value.backward for value in unit_costs if value.backward is not None])
    pairs = []
    for value, ahead in zip(backwards, forward, strict=True):
        if value:
            pairs.append((median(value), ahead))
    # Estimate a missing backward time by the other ranks' ratio of backward to forward.
    if pairs:
        usual = sum(backward for backward, _ in pairs) / sum(ahead for _, ahead in pairs)
    else:
        usual = 0.0
    backward = []
    for value, ahead in zip(backwards, forward, strict=True):
        backward.append(median(value) if value else usual * ahead)
    data = []
    for unit_costs in ranks:
        data.append(median(value.data for value in unit_costs))
    return tuple(sum(parts) for parts in zip(data, forward, backward, strict=True))
