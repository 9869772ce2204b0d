"""Who is missing: each rank tells the ranks' meeting point where it stands, and one that misses somebody asks all.

inquiry = Inquiry(world, exchange.progress, folder)
inquiry.tell(inquiry.told)              # every second; `inquiry.called` when another rank has asked
inquiry.verdict("no progress for 60 s") # "rank 1 did not arrive: it stood in step 7, its forward and backward"
"""

import contextlib
import json
import logging
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from lockstep.distributed.progress import FOLDER_VARIABLE, Place, Progress
from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World, meeting_point
from lockstep.errors import ConfigError
from lockstep.guards.stacks import dump, where_main
from lockstep.guards.told import Told

__all__ = ["Inquiry"]

_LOG = logging.getLogger("lockstep")

_CALL = 0.6  # seconds that the ranks have to answer
_STORE = timedelta(seconds=1.0)


class Inquiry:
    """One rank's part in it.

    Args:
        world: the ranks.
        progress: where this process stands.
        folder: of the run; its logs take the stacks.

    Attributes:
        called: another rank misses one of us.
        told: the connection over which this rank tells where it stands; None where there is nobody to tell.
    """

    def __init__(self, world: World, progress: Progress, folder: Path) -> None:
        self._world, self._progress, self._folder = world, progress, folder
        self._keys = world.name("watch")
        self.told = self.connect(timedelta(seconds=world.timeout))
        self.called = False
        self._calling = threading.Lock()
        self._verdict = ""
        self._heard: dict[int, str] = {}

    def tell(self, told: Told) -> None:
        """Tells the others where this rank stands, and hears whether one of them misses somebody."""
        with contextlib.suppress(RuntimeError):
            told.tell(self._world.rank, str(self._progress.place))
            self.called = self.called or bool(told.value("call"))

    def verdict(self, reason: str) -> str:
        """Asks all ranks where they stand, says where this one does, and returns who is missing. Once a process."""
        with self._calling:
            if not self._verdict:
                self._verdict = self._asked(reason)
            return self._verdict

    def _asked(self, reason: str) -> str:
        place, (line, waits) = self._progress.place, where_main()
        if threading.current_thread() is threading.main_thread():
            line, waits = "its exchange with the others", True
        dump(self._folder / "logs", self._world.rank, f"{reason}; {place}, {line}")
        _LOG.warning("%s: stands in %s, at %s", reason, place, line, extra={"only_file": True})
        if self.told is None:
            return f"{rank_label(self._world.rank)} made no progress: it stands in {place}, at {line}"
        mine = {"step": place.step, "phase": place.phase, "line": line, "waits": waits}
        answers: dict[int, str] = {}
        asking = threading.Thread(target=self._ask, args=(json.dumps(mine), answers), daemon=True)
        asking.start()
        asking.join(_CALL + _STORE.total_seconds())
        if len(answers) < self._world.size:
            return f"{rank_label(0)} did not arrive{self._last(0)}: it holds the meeting point, which is silent"
        return self._judged({rank: json.loads(text) if text else None for rank, text in answers.items()})

    def _ask(self, mine: str, answers: dict[int, str]) -> None:
        """Says where this rank stands, gives the others time to do so, and collects what they said."""
        told = self.connect()  # the first one may be waiting for an answer for ever
        if told is None:
            return
        with contextlib.suppress(RuntimeError):
            told.store.set(f"{self._keys}/alive/{self._world.rank}", mine)
            told.store.set(f"{self._keys}/call", "1")
            time.sleep(_CALL)
            found = {rank: told.value(f"alive/{rank}") for rank in range(self._world.size)}
            self._heard = {rank: told.place_of(rank) for rank, text in found.items() if not text}
            answers |= found

    def _judged(self, answers: dict[int, dict[str, Any] | None]) -> str:
        missing = [rank for rank, answer in answers.items() if answer is None]
        if missing:
            return " and ".join(f"{rank_label(rank)} did not arrive{self._last(rank)}" for rank in missing[:8])
        known = {rank: answer for rank, answer in answers.items() if answer is not None}
        busy = [rank for rank, answer in known.items() if not answer["waits"]]
        behind = min(answer["step"] for answer in known.values())
        late = busy or [rank for rank, answer in known.items() if answer["step"] == behind]
        shown = [
            f"{rank_label(rank)} did not arrive: it stands in step {known[rank]['step']}, at {known[rank]['line']}"
            for rank in late[:8]
        ]
        return " and ".join(shown)

    def _last(self, rank: int) -> str:
        """Where a silent rank stood: from the launcher's folder on this machine, else what it last told."""
        folder = os.environ.get(FOLDER_VARIABLE) if self._world.is_first else None
        place = Place.read(Path(folder) / str(rank)) if folder else None
        if place:
            return f": it stood in {place}"
        found = self._heard.get(rank)
        return f": it stood in {found} when last heard" if found else ""

    def connect(self, wait: timedelta = _STORE) -> Told | None:
        """A connection of one's own to the ranks' meeting point: another thread may sit in the first one.

        None in a world of one, and where the ranks met in another way: they end by their timeouts, without names.
        """
        if self._world.size == 1 or self._world.control is None:
            return None
        try:
            host, port, _ = meeting_point()
            store = TCPStore(host, port, None, False, wait, wait_for_workers=False)
            store.set_timeout(_STORE)
        except (RuntimeError, ValueError, ConfigError):
            return None
        return Told(store, self._keys, self._world.size)
