"""Who takes part in a run whose lost processes are replaced: what each one tells the launcher, and hears from it.

    member = Member.of_this_process()           # None where the launcher replaces nobody
    member.ready()                              # from now on a loss need not end the others
    ...                                         # a rank is lost: collectives fail
    found = member.regroup(report, wait=60.0)   # who goes on, in the order of their new ranks

The launcher holds the meeting point, so that no rank's end takes it along, and it alone knows for certain which of its
processes live. So it decides: each member says once that it has left its groups, and reads once who takes part in the
next generation. These are a few messages a member, whatever their number.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Self

from torch._C._distributed_c10d import TCPStore

from lockstep.distributed.progress import MEETING_VARIABLE, MEMBER_VARIABLE
from lockstep.distributed.rank_label import renumber
from lockstep.errors import PeerError

__all__ = ["Generation", "Member", "Report", "keys_of"]


def keys_of(restart: str | int) -> str:
    """What begins the keys of this start of the processes in the meeting point."""
    return f"lockstep/members/{restart}"


class Report(NamedTuple):
    """What a member says when it has left its groups.

    Attributes:
        taken: steps that its state holds; -1: it has none, as within a rollback.
        evaluated: the step after which it evaluated last.
        plan: what must be the same on all members, as a digest.
        waited: it waited for the others for a whole `--timeout`, so that nobody who is silent needs more time.
        patience: seconds to wait for those that are silent; `--timeout`.
    """

    taken: int
    evaluated: int
    plan: str
    waited: bool
    patience: float


class Generation(NamedTuple):
    """Who takes part from now on.

    Attributes:
        number: 1 for the first after the start.
        members: their names, by their new rank: who was there before first, in the order before.
        reports: of each of them, by name.
        fresh: the names of those that were not there before.
        lost: a line for each that was lost.
    """

    number: int
    members: list[str]
    reports: dict[str, Report]
    fresh: list[str]
    lost: list[str]

    @classmethod
    def read(cls, text: str) -> Self:
        """From what the launcher wrote."""
        found = json.loads(text)
        reports = {name: Report(*values) for name, values in found["reports"].items()}
        return cls(found["number"], found["members"], reports, found["fresh"], found["lost"])

    def written(self) -> str:
        """For the members to read."""
        reports = {name: list(report) for name, report in self.reports.items()}
        return json.dumps(self._asdict() | {"reports": reports})


@dataclass
class Member:
    """This process as a member.

    Attributes:
        name: of this process; with a dot where it came in the place of a lost one.
        generation: the number of the present one; -1: it takes part in none yet.
    """

    name: str
    generation: int
    _keys: str
    _address: tuple[str, int]
    _store: TCPStore | None = None

    @classmethod
    def of_this_process(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """What the launcher's variables say; None where lost processes are not replaced."""
        name = variables.get(MEMBER_VARIABLE) or variables.get("RANK", "")
        host, _, port = variables.get(MEETING_VARIABLE, "").rpartition(":")
        if not name or not host:
            return None
        keys = keys_of(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(name, -1 if "." in name else 0, keys, (host, int(port)))

    @property
    def is_new(self) -> bool:
        """Whether it comes in the place of a lost process, and has not joined the others yet."""
        return self.generation < 0

    def ready(self, why_not: str = "", experiment: str = "") -> None:
        """Tells the launcher that the others may go on without this process, or why they cannot; and the run's name."""
        self._connected().set(f"{self._keys}/experiment", experiment)
        self._connected().set(f"{self._keys}/ready/{self.name}", why_not or "yes")

    def experiment(self) -> str:
        """The name of the run that the others train."""
        key, store = f"{self._keys}/experiment", self._connected()
        return store.get(key).decode() if store.check([key]) else ""

    def ends(self, why: str = "the run is at its end") -> None:
        """Tells the launcher why this process, should it end from now on, is not replaced."""
        self._connected().set(f"{self._keys}/ready/{self.name}", why)

    def is_wished(self, store: TCPStore) -> bool:
        """Whether somebody waits to be taken in. For another thread, over a connection of its own."""
        return bool(store.check([f"{self._keys}/wish/{self.generation}"]))

    def regroup(self, report: Report, wait: float) -> Generation:
        """Who goes on together. To be called once all groups of before are left; waits for all who live to do so.

        Args:
            wait: seconds, at most.

        Raises:
            PeerError: the launcher does not go on, or without this process.
        """
        store = self._connected()
        place = f"{self._keys}/seat/{self.name}" if self.is_new else f"{self._keys}/members/{self.generation + 1}"
        try:
            here = "new" if self.is_new else f"here/{self.generation + 1}"
            store.set(f"{self._keys}/{here}/{self.name}", json.dumps(list(report)))
            store.wait([place], timedelta(seconds=wait))
            found = store.get(place).decode()
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            raise PeerError(f"the launcher did not say within {wait:g} s who goes on: {line}") from error
        if not found.startswith("{"):
            raise PeerError(found)
        generation = Generation.read(found)
        if self.name not in generation.members:
            raise PeerError("the others went on without this process, which was silent for too long")
        self.generation = generation.number
        renumber(generation.members)
        return generation

    def connection(self) -> TCPStore:
        """A new connection to the meeting point, for one thread."""
        return TCPStore(*self._address, None, False, timedelta(seconds=60.0), wait_for_workers=False)

    def _connected(self) -> TCPStore:
        """This process's own connection, which outlives every group."""
        if self._store is None:
            self._store = self.connection()
        return self._store
