"""Decide how a run continues after losing a process.

    losses = Membership(store, least=1, most=8)
    losses.begin(restart=0, members=["0", "1", "2"])
    reason = losses.look(living, ended)     # at each poll of the processes; "" while the run may continue
    losses.replace                          # names to start a new process for

The others go on, and a replacement joins them. Membership is decided here only: members leave their groups and report
it, then read the names of those who continue (see distributed/membership.py). Only a process that has ended counts as
lost. A silent one is killed first, so a merely slow process can never return under its old name.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from lockstep.distributed.failures import ProcessFailure
from lockstep.distributed.membership import Generation, LeaveReport, key_prefix

__all__ = [
    "REPEATED",
    "Membership",
]

REPEATED = "the same line of code failed in the same step again"

_HOUR = 3600.0
_AGAIN = 3  # times as many regroupings without a loss are allowed: on a busy machine groups form slowly
_REFUSED = (
    "this process is not taken in: its configuration, data or code is another than that of the processes that it was "
    "to join, which go on without it"
)
_SLACK = 5.0  # seconds beyond `--timeout` for a silent member
_SHORT = 3.0  # the same, once another has waited for a whole `--timeout`


class MembershipStore(Protocol):
    """The methods of torch's TCPStore that are used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Membership:
    """The members of a run, and their losses.

    Args:
        store: the meeting point.
        least: with fewer members the run ends.
        most: with more losses within an hour the run ends.
        said: describes a failure.
        now: seconds on a monotonic clock.

    Attributes:
        members: names by rank, of the current generation.
        number: of the generation.
        replace: names of ended processes to be replaced; the caller empties it.
        silent: names of processes to be killed because they do not report; the caller does so.
        refused: names of new processes that may not join: they end, which is not a failure of the run.
    """

    def __init__(
        self,
        store: MembershipStore,
        *,
        least: int = 1,
        most: int = 8,
        said: Callable[[ProcessFailure], str] = str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._least, self._most, self._said, self._now = store, least, most, said, now
        self.members: list[str] = []
        self.number = 0
        self.replace: list[str] = []
        self.silent: list[str] = []
        self.refused: list[str] = []
        self._starting: list[str] = []  # new processes that have not joined yet
        self._down: dict[str, ProcessFailure] = {}  # lost members without a replacement yet
        self._times: list[float] = []  # of losses
        self._alarms: list[float] = []  # times of generations formed without a loss or a new process
        self._causes: list[ProcessFailure] = []
        self._since: float | None = None
        self._keys = ""

    def begin(self, restart: int, members: list[str]) -> None:
        """Begin a new start of all processes; keep only the losses of this hour."""
        self._keys, self.members, self.number = key_prefix(restart), members, 0
        self.replace, self.silent, self.refused, self._starting = [], [], [], []
        self._down, self._since = {}, None

    def rank_of(self, name: str) -> int | None:
        """Return a member's current rank; None if it does not take part yet."""
        return self.members.index(name) if name in self.members else None

    @property
    def causes(self) -> list[ProcessFailure]:
        """Failures of processes so far, oldest first."""
        return self._causes

    def started(self, name: str) -> None:
        """Record that a new process was started under this name."""
        self._starting.append(name)

    def look(self, living: set[str], ended: Mapping[str, ProcessFailure]) -> str:
        """Process the living and failed processes, and decide whether the run continues.

        Returns:
            The reason why the run cannot continue, worded to follow the failure; "-" if the failure says enough; ""
            while it continues.
        """
        now = self._now()
        for name, failure in ended.items():
            if name not in self._down and (name in self.members or name in self._starting):
                reason = self._lost(name, failure, living, now)
                if reason:
                    self._tell(reason)
                    return reason
        return self._decide(living, now)

    def _lost(self, name: str, failure: ProcessFailure, living: set[str], now: float) -> str:
        """Return why the run cannot continue after this loss; "" if it can."""
        if name in self.members:
            ready = self._value(f"ready/{name}")
            if ready != "yes":
                return ready or "-"
        again = any(failure.repeats(cause) for cause in self._causes)
        self._times = [when for when in self._times if now - when < _HOUR] + [now]
        self._causes.append(failure)
        if name in self.members:
            self._down[name] = failure
        else:  # no member waits for it
            self._starting.remove(name)
            self.replace.append(name)
        left = [member for member in self.members if member in living and member not in self._down]
        if len(left) < self._least:
            return f"{len(left)} of {len(self.members)} processes are left, and --min-ranks is {self._least}"
        if len(self._times) > self._most:
            return f"that is loss {len(self._times)} within an hour, and --max-losses is {self._most}"
        return REPEATED if again else ""

    def _tell(self, reason: str) -> None:
        """Send the reason to the members that wait for the next generation.

        They end with it.
        """
        text = f"the launcher ends the run{'' if reason == '-' else f': {reason}'}"
        self._store.set(f"{self._keys}/members/{self.number + 1}", text)
        for name in self._starting:
            self._store.set(f"{self._keys}/seat/{name}", text)

    def _decide(self, living: set[str], now: float) -> str:
        """Form the next generation once all survivors have left this one. Returns as `look`."""
        there = [member for member in self.members if member in living and member not in self._down]
        new = {name: report for name in self._starting if name in living and (report := self._report(f"new/{name}"))}
        said = {name: report for name in there if (report := self._report(f"here/{self.number + 1}/{name}"))}
        if not said:
            self._since = None
            if new and not self._down:
                self._store.set(f"{self._keys}/wish/{self.number}", "1")
            return ""
        self._since = now if self._since is None else self._since
        silent = [name for name in there if name not in said]
        if silent:
            waited = any(report.timed_out for report in said.values())
            most = _SHORT if waited else max(report.patience for report in said.values()) + _SLACK
            if now - self._since > most:
                self.silent = silent
            return ""
        return self._call(there, said, new)

    def _call(self, there: list[str], said: dict[str, LeaveReport], new: dict[str, LeaveReport]) -> str:
        plan = said[there[0]].plan
        fresh = [name for name, report in new.items() if report.plan == plan]
        for name in new.keys() - set(fresh):
            self.refused.append(name)
            self._store.set(f"{self._keys}/seat/{name}", _REFUSED)
        lost = [self._said(failure) for failure in self._down.values()]
        if not lost and not new:  # they lost contact though all live: limited like losses
            now = self._now()
            self._alarms = [when for when in self._alarms if now - when < _HOUR] + [now]
            if len(self._alarms) > _AGAIN * self._most:
                reason = f"the processes lost each other though all live, and --max-losses is {self._most}"
                self._tell(reason)
                return reason
        self.number += 1
        self.members = there + fresh
        reports = said | {name: new[name] for name in fresh}
        text = Generation(self.number, self.members, reports, fresh, lost).to_json()
        self._starting = [name for name in self._starting if name not in new]
        self.replace += list(self._down)
        self._down, self._since = {}, None
        self._store.set(f"{self._keys}/members/{self.number}", text)
        for name in fresh:
            self._store.set(f"{self._keys}/seat/{name}", text)
        return ""

    def _report(self, key: str) -> LeaveReport | None:
        text = self._value(key)
        return LeaveReport(*json.loads(text)) if text else None

    def _value(self, key: str) -> str:
        full = f"{self._keys}/{key}"
        return self._store.get(full).decode() if self._store.check([full]) else ""
