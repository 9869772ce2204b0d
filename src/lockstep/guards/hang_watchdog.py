"""Who is missing: a thread that watches this process's progress, and asks all ranks when something does not come.

    with HangWatchdog(world, exchange, folder):
        ...                             # an error that only says that a peer is gone leaves as one that names it

When a rank has made no progress for `world.timeout` seconds, or an exchange has failed, every rank writes its stacks
and its place, and the one that says nothing, or that stands where nobody waits, is named. A main thread that hangs in a
collective cannot be freed: the watching thread ends the process.

The body of the caller's loop (a debugger in it, a cell of a notebook) may take as long as it likes in a world of one.
Other ranks wait for it no longer than for a step; they are told when half of that time has passed.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from lockstep.distributed.launcher_watch import launcher_is_gone
from lockstep.distributed.members import Member
from lockstep.distributed.progress import COMPUTING, IN_BODY, READING, WAITING
from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.step_exchange import REGROUP, SAVE_AND_END, StepExchange
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, PeerError
from lockstep.guards.inquiry import Inquiry
from lockstep.guards.told import Told, read_alone

__all__ = ["HangWatchdog"]

_LOG = logging.getLogger("lockstep")

_LOOK = 0.25  # seconds between two looks at the progress
_WISH = 0.25  # seconds between two looks for a process that waits to be taken in
_STOP = 1.0  # seconds between two looks for the file STOP
_TELL = 1.0  # seconds between two words to the others, in a small world
_GIVE = 1.0  # seconds that the main thread has to find out by itself
_HEARING = 5.0  # seconds beyond `--timeout` until a wait for a rank that is lost must have ended
_ORPHAN = 1.0  # seconds beyond two of its longest phases that a rank without a launcher may stand still
_MISSED = "another rank misses one of us"
_ALONE = 1.0  # seconds after which a rank that reads the loss looks whether the others went on
_ORPHANED = "the launcher is gone, and this rank waits for something that does not come; start the command again"


class HangWatchdog:
    """Within it hangs end, and the loss of a rank is told by name.

    Args:
        world, beat: the ranks and their exchange.
        folder: of the run; its logs take the stacks, and its file STOP is a wish to save and end.
        note: called with the error before the process is ended from here.
        member: of a run that goes on after the loss of a rank. An error that says that one is gone then leaves as it
            is, at once, and a main thread that waits for a lost rank is left time to hear of it.
    """

    def __init__(
        self, world: World, exchange: StepExchange, folder: Path, note: Any = None, member: Member | None = None
    ) -> None:
        self._world, self._exchange, self._folder, self._note = world, exchange, folder, note
        self._member = member
        self._ended = threading.Event()
        self._inquiry = Inquiry(world, exchange.progress, folder)
        self._failed_since, self._warned = 0.0, False
        self._present, self._longest = (0.0, 0.0), 0.0  # when the present phase began and how long it lasts; of others
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)

    def __enter__(self) -> Self:
        self._exchange.progress.at(self._exchange.progress.step, COMPUTING)
        self._thread.start()
        if self._world.is_main:  # a thread of its own: a file system may answer late, or never
            threading.Thread(target=self._heed_file, name="lockstep-stop", daemon=True).start()
        if self._member and self._world.is_main:
            threading.Thread(target=self._heed_wish, args=(self._member,), name="lockstep-wish", daemon=True).start()
        told = self._inquiry.told
        if told is not None:  # a thread of its own: a meeting point that is gone may never answer
            threading.Thread(target=self._tell, args=(told,), name="lockstep-tell", daemon=True).start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        named = self._named(error) if isinstance(error, PeerError) else None
        self._ended.set()
        self._thread.join()
        if named:
            raise named from error

    def _named(self, error: PeerError) -> PeerError | None:
        """The error that names the lost rank; None where `error` does, or another way is taken."""
        if self._world.size == 1 or self._member or error.relayed:
            return None
        verdict = self._inquiry.verdict(f"lost the other ranks: {error}")
        return PeerError(f"{verdict}; its own log says why, if it could still tell")

    def _run(self) -> None:
        while not self._ended.wait(_LOOK):
            reason = self._reason()
            if reason:
                self._leave(reason)

    def _heed_file(self) -> None:
        """Rank 0 looks for the file STOP; the others hear of the wish from it."""
        while not self._ended.wait(_STOP):
            with contextlib.suppress(OSError):  # not there, or a file system that fails now
                os.lstat(self._folder / "STOP")
                self._exchange.stop(SAVE_AND_END)

    def _reason(self) -> str | LockstepError:
        """Return why this process has to end, or the error itself; "" while all is well."""
        progress, now = self._exchange.progress, time.monotonic()
        stands, limit = now - progress.since, self._world.timeout + (_HEARING if self._member else 0.0)
        if progress.since != self._present[0]:
            self._longest = max(self._longest, self._present[1])
        self._present = progress.since, stands
        if launcher_is_gone():  # who hangs in a collective does not hear of the signal
            limit = min(limit, _ORPHAN + 2 * self._longest)
        watched = (WAITING, COMPUTING, READING) if self._world.size == 1 else (WAITING, COMPUTING, READING, IN_BODY)
        if progress.phase == IN_BODY and IN_BODY in watched and stands > limit / 2 and not self._warned:
            self._warned = True
            where = f"{rank_label(self._world.rank)} has been in the body of the caller's loop for {stands:.0f} s"
            _LOG.warning("%s; the other ranks wait for it, and end the run after --timeout %g s", where, limit)
        if progress.phase in watched and stands > limit:
            return LockstepError(_ORPHANED) if launcher_is_gone() else f"no progress for {limit:g} s"
        told = self._inquiry.told
        if told is None:
            return ""
        if progress.phase == READING and stands > _ALONE:
            with contextlib.suppress(RuntimeError):
                others = told.passed(progress.step)
                if others:
                    return LockstepError(read_alone(self._world.rank, progress.step + 1, others))
        if self._member:
            return ""
        self._failed_since = (self._failed_since or now) if self._exchange.broken() else 0.0
        if self._failed_since and now - self._failed_since > _GIVE:
            return "an exchange failed"
        return _MISSED if self._inquiry.called else ""

    def _tell(self, told: Told) -> None:
        while not self._ended.wait(max(_TELL, 0.02 * self._world.size)):
            self._inquiry.tell(told)

    def _heed_wish(self, member: Member) -> None:
        """Rank 0 hears from the launcher of a process that waits to be taken in; the others hear of it from rank 0."""
        with contextlib.suppress(RuntimeError):  # the launcher is gone
            store = member.connection()
            while not self._ended.wait(_WISH):
                if member.is_wished(store):
                    self._exchange.stop(REGROUP)

    def _leave(self, reason: str | LockstepError) -> None:
        """Ends this process, whatever its main thread does."""
        if isinstance(reason, LockstepError):
            error = reason
        else:
            verdict = self._inquiry.verdict(reason)
            if self._ended.wait(_GIVE if reason == _MISSED else 0.0):
                return  # the main thread found out by itself
            error = PeerError(
                f"{verdict}; after {self._world.timeout:g} s without progress the run ends; for slow steps "
                "or data raise --timeout"
            )
        try:
            _LOG.error("%s", error)
            if self._note:
                self._note(error)
            for handler in _LOG.handlers:
                handler.flush()
            sys.stderr.flush()
        finally:  # a full disk is no reason to hang on
            os._exit(1)

    def connect(self) -> Told | None:
        """A connection of one's own to the ranks' meeting point; None where there is none."""
        return self._inquiry.connect()
