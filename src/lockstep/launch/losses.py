"""Decide how a run continues after losing a process.

    membership = Membership(store, least=1, most=8)
    membership.begin("8f3a", members=["0", "1", "2"])       # the round's token
    reason = membership.update(living, ended)   # at each poll of the processes; "" while the run may continue
    membership.replace                          # names to start a new process for

The others continue, and a replacement joins them. Membership is decided here only: members leave their groups and
report it, then read the names of those who continue (see distributed/membership.py). Only a process that has ended
counts as lost. A silent one is killed first, so that a slow process can never return under its old name.

Before step 1 there is no state to save, and the ranks may be anywhere in their start: if a process is lost there, all
start again.

Where the states are split over the ranks of a replica, the members report its size. A replica with a loss leaves whole:
its other processes are killed, all are replaced, and the new ones join together.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from lockstep.distributed.failures import ProcessFailure, first_failure
from lockstep.distributed.membership import STARTING, STOP_SIGNALS, Generation, LeaveReport, key_prefix
from lockstep.errors import FINAL_CODES

__all__ = [
    "AGAIN",
    "REPEATED",
    "Membership",
]

AGAIN = "no rank had begun a step, so all start again"
REPEATED = "the same line of code failed in the same step again"

# Seconds to wait for a cause, after a process that only lost the others was the first to end.
_CAUSE_SECONDS = 2.0
# Seconds in which losses are counted against --max-losses.
_HOUR = 3600.0
# Regroupings without a loss to allow per allowed loss: on a busy machine groups form slowly.
_ALARMS_PER_LOSS = 3
_REFUSED = (
    "this process cannot join: its configuration, data or code differs from the running processes', which continue "
    "without it"
)
# Seconds beyond `--timeout` for a silent member.
_SLACK = 5.0
# The same, once another member has waited for a full `--timeout`.
_SHORT_SLACK = 3.0


class MembershipStore(Protocol):
    """The methods of torch's TCPStore that `Membership` uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Membership:
    """The members of a run, and the losses so far.

    Args:
        store: the meeting point.
        least: with fewer members the run ends.
        most: with more losses within an hour the run ends.
        describe: describes a failure for the log.
        now: seconds on a monotonic clock.

    Attributes:
        members: names by rank, of the current generation.
        number: of the generation.
        replace: names of ended processes to be replaced; the caller empties it.
        silent: names of processes to be killed, because they do not report or their replica has a loss; the caller does
            so.
        refused: names of new processes that may not join: they end, which is not a failure of the run.
        fatal: the failure that ended the run; None while it continues.
    """

    def __init__(
        self,
        store: MembershipStore,
        *,
        least: int = 1,
        most: int = 8,
        describe: Callable[[ProcessFailure], str] = str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._least = least
        self._most = most
        self._describe = describe
        self._now = now
        self.members: list[str] = []
        self.number = 0
        self.replace: list[str] = []
        self.silent: list[str] = []
        self.refused: list[str] = []
        self.fatal: ProcessFailure | None = None
        # New processes that have not joined yet.
        self._starting: list[str] = []
        # Lost members without a replacement yet.
        self._lost: dict[str, ProcessFailure] = {}
        # Members that leave with another of their replica.
        self._doomed: dict[str, ProcessFailure] = {}
        # Times of losses.
        self._times: list[float] = []
        # Times of generations formed without a loss or a new process.
        self._alarms: list[float] = []
        self._failures: list[ProcessFailure] = []
        # Ends before the steps, after which all started again.
        self._early: list[tuple[int | None, bool, int]] = []
        # When a process that only lost the others was the first to end, before the steps.
        self._first_end = 0.0
        # When the first member reported that it has left its groups.
        self._first_report: float | None = None
        # Number of ranks that together have one copy of the states; read at the first loss.
        self._replica_size = 1
        self._keys = ""

    def begin(self, round_: str, members: list[str]) -> None:
        """Reset for a new start of all processes; only the times of losses are kept."""
        self._keys = key_prefix(round_)
        self.members = members
        self.number = 0
        self.replace = []
        self.silent = []
        self.refused = []
        self._starting = []
        self._lost = {}
        self._doomed = {}
        self._first_report = None
        self.fatal = None
        self._replica_size = 1
        self._first_end = 0.0

    def rank_of(self, name: str) -> int | None:
        """Return a member's current rank; None if it is not a member."""
        if name in self.members:
            return self.members.index(name)
        return None

    @property
    def causes(self) -> list[ProcessFailure]:
        """The failures that were losses, oldest first."""
        return self._failures

    def add_new(self, name: str) -> None:
        """Add a new process, which has not joined yet."""
        self._starting.append(name)

    def update(self, living: set[str], ended: Mapping[str, ProcessFailure]) -> str:
        """Record the new losses, and decide whether the run continues.

        Args:
            living: names of running processes.
            ended: failures by name.

        Returns:
            Why the run cannot continue, to be appended to the failure; "-" if the failure is reason enough; "" while it
            continues.
        """
        time_now = self._now()
        # A cause with a final code fails on the others too, so it is no loss: it ends the run.
        errors = []
        for failure in ended.values():
            if failure.code in FINAL_CODES:
                errors.append(failure)
        if errors or (ended and not living) or self._is_starting(ended):
            self.fatal = first_failure(errors or ended.values())
            if living and self.fatal.follows and self._waits_for_cause(time_now):
                return ""
            if self._is_starting(ended):
                reason = self._start_again(self.fatal, time_now)
            else:
                reason = "-"
            self._announce_end(reason)
            return reason
        for name, failure in ended.items():
            # It left because another of its replica was lost: count that loss, not this end.
            if name in self._doomed:
                self._lost[name] = self._doomed[name]
            elif name not in self._lost and (name in self.members or name in self._starting):
                reason = self._record_loss(name, failure, living, time_now)
                if reason:
                    self.fatal = failure
                    self._announce_end(reason)
                    return reason
        return self._form_generation(living, time_now)

    def _is_starting(self, ended: Mapping[str, ProcessFailure]) -> bool:
        """Whether one of these processes has trained no step of its run.

        Then no other rank has trained one either.
        """
        return any(self._value(f"ready/{name}") == STARTING for name in ended if name in self.members)

    def _waits_for_cause(self, now: float) -> bool:
        """Whether to wait a moment for the cause of the first end.

        True if the first process to end only lost the others.
        """
        self._first_end = self._first_end or now
        return now - self._first_end < _CAUSE_SECONDS

    def _start_again(self, failure: ProcessFailure, now: float) -> str:
        """Return AGAIN after a loss before the steps; "-" where the run ends.

        It ends by an error of the program itself, by a signal that requests the end, or by the same end as the start
        before.
        """
        self._times = [when for when in self._times if now - when < _HOUR] + [now]
        # Any rank may be the one that only lost the others, so such ends count as the same.
        rank = None if failure.follows else failure.at_start
        end = (rank, failure.follows, failure.code)
        is_own = failure.is_error or failure.shared or -failure.code in STOP_SIGNALS
        if is_own or end in self._early or len(self._times) > self._most:
            return "-"
        self._early.append(end)
        return AGAIN

    def _record_loss(self, name: str, failure: ProcessFailure, living: set[str], now: float) -> str:
        """Record a loss; return why the run cannot continue after it, or ""."""
        if name in self.members:
            # The launcher learns at the start whether the others can continue without a process; else the answer is why
            # not.
            ready = self._value(f"ready/{name}")
            if ready != "yes":
                return ready or "-"
            self._replica_size = int(self._value("replica") or 1)
        repeats = any(failure.repeats(cause) for cause in self._failures)
        # The processes of a lost node share one failure, which is one loss.
        if failure not in self._failures:
            self._times = [when for when in self._times if now - when < _HOUR] + [now]
            self._failures.append(failure)
        if name in self.members:
            self._lost[name] = failure
            # Its mates have parts of the same states, which are not complete without it.
            mates = []
            for mate in self._survivors(living):
                if self._replica(mate) == self._replica(name):
                    mates.append(mate)
            self._doomed |= dict.fromkeys(mates, failure)
        else:
            # A new process that has not joined: no member waits for it.
            self._starting.remove(name)
            self.replace.append(name)
        survivors = self._survivors(living)
        if self._doomed and not survivors:
            return "no other replica of the states is complete"
        if len(survivors) < self._least:
            return f"{len(survivors)} of {len(self.members)} processes are left, but --min-ranks is {self._least}"
        if len(self._times) > self._most:
            return f"that is loss {len(self._times)} within an hour, but --max-losses is {self._most}"
        if repeats:
            return REPEATED
        return ""

    def _announce_end(self, reason: str) -> None:
        """Send the reason to members that wait for the next generation: they end."""
        text = f"the launcher ends the run{'' if reason == '-' else f': {reason}'}"
        self._store.set(f"{self._keys}/members/{self.number + 1}", text)
        for name in self._starting:
            self._store.set(f"{self._keys}/seat/{name}", text)

    def _form_generation(self, living: set[str], now: float) -> str:
        """Form the next generation once all survivors have left this one. Returns as `update`."""
        # First the mates of a lost rank must end.
        if doomed := [name for name in self._doomed if name in living]:
            self.silent = doomed
            return ""
        survivors = self._survivors(living)
        new = {name: report for name in self._starting if name in living and (report := self._report(f"new/{name}"))}
        # Ask the store once for each poll while nobody is lost, not once for each member.
        here = f"here/{self.number + 1}"
        has_reports = bool(survivors) and self._store.check([f"{self._keys}/{here}"])
        reports = {
            name: leave_report for name in survivors if has_reports and (leave_report := self._report(f"{here}/{name}"))
        }
        if not reports:
            self._first_report = None
            # New processes that complete a replica may join: tell the members, which then leave their groups.
            if not self._lost and self._whole(new):
                self._store.set(f"{self._keys}/wish/{self.number}", "1")
            return ""
        if self._first_report is None:
            self._first_report = now
        silent = [name for name in survivors if name not in reports]
        if silent:
            # A member that waited for the full timeout has given the silent ones their time already.
            timed_out = any(report.timed_out for report in reports.values())
            if timed_out:
                most = _SHORT_SLACK
            else:
                most = max(report.patience for report in reports.values()) + _SLACK
            if now - self._first_report > most:
                self.silent = silent
            return ""
        return self._announce(survivors, reports, new)

    def _announce(self, survivors: list[str], reports: dict[str, LeaveReport], new: dict[str, LeaveReport]) -> str:
        plan = reports[survivors[0]].plan
        # A new process must have the same configuration, data and code as the members.
        refused = []
        for name, report in new.items():
            if report.plan != plan:
                refused.append(name)
        fresh = self._whole(name for name in new if name not in refused)
        for name in refused:
            self.refused.append(name)
            self._store.set(f"{self._keys}/seat/{name}", _REFUSED)
        losses = []
        for failure in dict.fromkeys(self._lost.values()):
            losses.append(self._describe_loss(failure))
        # The members lost contact though all are alive. Limit this like losses.
        if not losses and not fresh and not refused:
            time_now = self._now()
            self._alarms = [when for when in self._alarms if time_now - when < _HOUR] + [time_now]
            if len(self._alarms) > _ALARMS_PER_LOSS * self._most:
                reason = f"the processes keep losing contact though all are alive, and --max-losses is {self._most}"
                self._announce_end(reason)
                return reason
        # Survivors keep their order; new processes get the ranks after them.
        self.number += 1
        self.members = survivors + fresh
        all_reports = reports | {name: new[name] for name in fresh}
        text = Generation(self.number, self.members, all_reports, fresh, losses).to_json()
        self._starting = [name for name in self._starting if name not in fresh and name not in refused]
        self.replace += list(self._lost)
        self._lost = {}
        self._doomed = {}
        self._first_report = None
        self._store.set(f"{self._keys}/members/{self.number}", text)
        for name in fresh:
            self._store.set(f"{self._keys}/seat/{name}", text)
        return ""

    def _survivors(self, living: set[str]) -> list[str]:
        # The usual case, at every poll: nobody is lost.
        if not self._lost and not self._doomed and living.issuperset(self.members):
            return self.members
        leaving = self._lost.keys() | self._doomed.keys()
        names = []
        for name in self.members:
            if name in living and name not in leaving:
                names.append(name)
        return names

    def _replica(self, name: str) -> int:
        """Return the number of a process's replica; its successor's is the same."""
        return _slot(name) // self._replica_size

    def _whole(self, names: Iterable[str]) -> list[str]:
        """Keep those of these new processes that form complete replicas."""
        replicas = {name: self._replica(name) for name in names}
        counts = Counter(replicas.values())
        return sorted((name for name, replica in replicas.items() if counts[replica] == self._replica_size), key=_slot)

    def _describe_loss(self, failure: ProcessFailure) -> str:
        """Describe a loss, and name the ranks of its replica that left with it."""
        ranks = []
        for name, cause in self._doomed.items():
            if cause is failure:
                ranks.append(self.members.index(name))
        if not ranks:
            return self._describe(failure)
        names = f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, sorted(ranks)))}"
        return f"{self._describe(failure)}; {names}, with other parts of the same replica, left with it"

    def _report(self, key: str) -> LeaveReport | None:
        text = self._value(key)
        if text:
            return LeaveReport(*json.loads(text))
        return None

    def _value(self, key: str) -> str:
        full = f"{self._keys}/{key}"
        if self._store.check([full]):
            return self._store.get(full).decode()
        return ""


def _slot(name: str) -> int:
    """Return the rank at the start of a process, or of its predecessor."""
    return int(name.partition(".")[0])
