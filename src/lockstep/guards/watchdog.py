"""Watch for hangs and lost ranks.

`HangWatchdog` ends a process that makes no progress, with an error that names the rank to blame. The ranks publish
heartbeats in their rendezvous store, without a collective; `Inquiry` polls the ranks after an exchange failed, and
`dump` writes the stacks of a hanging process.
"""

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

# torch exports TCPStore only from its private module.
from torch._C._distributed_c10d import TCPStore

from lockstep.distributed import collectives, exchange, membership, world
from lockstep.distributed.exchange import REGROUP, SAVE_AND_END, StepExchange
from lockstep.distributed.launcher import launcher_is_gone
from lockstep.distributed.membership import Member, has_lost_peers
from lockstep.distributed.progress import (
    COMPUTING,
    FOLDER_VARIABLE,
    IN_BODY,
    READING,
    WAITING,
    Progress,
    RankProgress,
    rank_label,
)
from lockstep.distributed.world import World, meeting_point
from lockstep.errors import ConfigError, LockstepError, PeerError

__all__ = [
    "HangWatchdog",
    "Heartbeats",
    "all_do",
    "read_alone",
    "waited_for",
]


# --- heartbeats and stacks

# Seconds between two checks whether all ranks have requested something, in a small world.
_REQUEST_INTERVAL = 0.005
# The same in a large world: seconds for each rank, since all ranks ask one store.
_REQUEST_SHARE = 1e-4
# Seconds between two checks of the other ranks' heartbeats.
_PLACES_INTERVAL = 0.5
# Seconds between two heartbeats of a rank, in a small world.
_HEARTBEAT_INTERVAL = 1.0
# The same in a large world: seconds for each rank.
_HEARTBEAT_SHARE = 0.02


class Heartbeats:
    """Each rank's current position, in the rendezvous store under `keys`."""

    def __init__(self, store: TCPStore, keys: str, size: int) -> None:
        self.store = store
        self.keys = keys
        self.size = size

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats of a rank.

        The interval grows with the ranks, so that one store serves any number of them.
        """
        return max(_HEARTBEAT_INTERVAL, _HEARTBEAT_SHARE * self.size)

    def tell(self, rank: int, place: RankProgress) -> None:
        """Publish the position of `rank`. Raises RuntimeError if the store is gone."""
        self.store.set(f"{self.keys}/at/{rank}", f"{place.step} {place}")

    def place_of(self, rank: int) -> str:
        """Return the last position of `rank` in words; "" for none."""
        return self.value(f"at/{rank}").partition(" ")[2]

    def value(self, key: str) -> str:
        """Return the value of `key`; "" for none."""
        full = f"{self.keys}/{key}"
        if self.store.check([full]):
            return self.store.get(full).decode()
        return ""

    def append(self, key: str, text: str) -> None:
        """Append to the value of `key`."""
        # torch's type stub lacks the method.
        store: Any = self.store
        store.append(f"{self.keys}/{key}", text)

    def find_passed(self, step: int) -> list[int]:
        """Return the ranks that are past `step`, or at the end.

        Takes two requests to the store, for any number of ranks.

        Empty until every rank has published a heartbeat, which it does as it starts.
        """
        keys = [f"{self.keys}/at/{rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            return []
        steps = []
        for heartbeat in self.store.multi_get(keys):
            steps.append(int(heartbeat.partition(b" ")[0]))
        return [rank for rank, at in enumerate(steps) if at > step]


def all_do(heartbeats: Heartbeats | None, action: str, step: int, patience: Callable[[], float]) -> bool:
    """Return whether every rank requests `action` in the body of a step.

    Call it once per rank and step.

    Uses no collective: a rank without the request waits in the next step for this one, which its heartbeat shows.

    Args:
        heartbeats: None in a world of one.
        patience: seconds to wait for silent ranks, called again and again.

    Returns:
        True if all requested it; False if one is past the step, or after `patience`.
    """
    if heartbeats is None:
        return True
    request = f"{action}-{step}"
    began = looked = time.monotonic()
    by_all = [f"{heartbeats.keys}/{request}/all"]
    with suppress(RuntimeError):
        # The store is gone, and the other ranks with it, so RuntimeError is ignored here.
        if heartbeats.store.add(f"{heartbeats.keys}/{request}/ranks", 1) >= heartbeats.size:
            heartbeats.store.set(by_all[0], "")
        while not heartbeats.store.check(by_all):
            time_now = time.monotonic()
            if time_now - looked > max(_PLACES_INTERVAL, heartbeats.interval / 4):
                looked = time_now
                if heartbeats.find_passed(step) and not heartbeats.store.check(by_all):
                    return False
            if time_now - began > patience():
                return False
            time.sleep(max(_REQUEST_INTERVAL, _REQUEST_SHARE * heartbeats.size))
        return True
    return False


def waited_for(heartbeats: Heartbeats, step: int, patience: float = 2.5) -> list[int]:
    """Return the ranks that pass `step` within `patience` seconds."""
    end = time.monotonic() + patience
    with suppress(RuntimeError):
        # A RuntimeError shows that the store is gone.
        while time.monotonic() < end:
            if ahead := heartbeats.find_passed(step):
                return ahead
            time.sleep(_PLACES_INTERVAL / 5)
    return []


def read_alone(rank: int, global_step: int, ahead: list[int]) -> str:
    """Format the error for a loss that `rank` read but the ranks `ahead` did not."""
    ranks = " and ".join(f"rank {peer}" for peer in ahead[:8])
    return (
        f"rank {rank}: the loss was read after step {global_step}, and not on {ranks}: read it on every rank, and "
        "print it on one alone"
    )


# Entries of the flight recorder that are shown.
_COLLECTIVES = 20
# Modules that wait for other ranks.
_WAITING = (collectives, exchange, membership, world)
_WAITING_CODE = (__file__, *(str(module.__file__) for module in _WAITING))
_WAITS = ("torch/distributed/", "torch/autograd/graph.py", "torch/cuda/", *_WAITING_CODE)
_OUTSIDE = ("/threading.py", "/torch/nn/modules/module.py", "/torch/_tensor.py")


def dump(logs: Path, rank: int, reason: str) -> Path:
    """Append all threads' stacks and the last collectives to a hang file.

    Returns:
        Its path, `logs`/hang-00000.txt with the rank's number.
    """
    path = logs / f"hang-{rank:05d}.txt"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with contextlib.suppress(OSError), open(os.open(path, flags, 0o644), "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} rank {rank}, process {os.getpid()}: {reason}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.writelines(line + "\n" for line in _collectives())
    return path


def _collectives() -> list[str]:
    """Return the flight recorder's last entries, oldest first, or why there are none."""
    # Private to torch; from 2.13 on also for gloo.
    recorder: Any = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if recorder is None or os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return ["no record of collectives: set TORCH_FR_BUFFER_SIZE=1000 (lockstep launch does)"]
    try:
        entries = json.loads(recorder()).get("entries", [])
    except (RuntimeError, ValueError, TypeError) as error:
        return [f"no record of collectives: {error}"]
    return [f"the last {min(len(entries), _COLLECTIVES)} collectives, oldest first:"] + [
        f"  {entry.get('process_group', '')} #{entry.get('collective_seq_id', '?')} {entry.get('profiling_name', '?')} "
        f"{entry.get('input_sizes', '')} {entry.get('state', '?')}"
        for entry in entries[-_COLLECTIVES:]
    ]


def where_main() -> tuple[str, bool]:
    """Return the main thread's line, and whether it waits for other ranks or the device."""
    # Private to Python: the only way to see another thread's frame.
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = frame is not None and any(module_path in frame.f_code.co_filename for module_path in _WAITS)
    while frame and frame.f_back and any(frame.f_code.co_filename.endswith(module_path) for module_path in _OUTSIDE):
        frame = frame.f_back
    if frame is None:
        return "an unknown place", False
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}", waits


_LOG = logging.getLogger("lockstep")

# Seconds in which the ranks must answer a call, in a small world.
_ANSWER_TIME = 0.6
# Further seconds for each rank.
_ANSWER_SHARE = 0.002
# Seconds between two checks for a call: well below the time to answer.
_CALL_INTERVAL = 0.25
# How often the rank that called looks at the answers, within the time to answer.
_ANSWER_LOOKS = 12
# Seconds after that in which its verdict arrives.
_PUBLISH_TIME = 0.5
# Seconds; torch treats 0 as no limit.
_LEAST_WAIT = 0.01
# Time limit of a request to the store.
_STORE = timedelta(seconds=1.0)


class Inquiry:
    """A poll of all ranks for their position, after one made no progress.

    The first rank to call collects the answers and publishes the verdict; the others read it. Ranks answer from their
    heartbeat thread, also those that wait for the device or other ranks. All answers are in one list of the store, so
    that each rank sends a few requests, whatever their number.

    Args:
        world: the ranks.
        progress: position of this process.
        folder: of the run; stacks go to its logs.

    Attributes:
        called: whether another rank polls for missing ranks.
        heartbeats: the store connection for this rank's heartbeats; None in a world of one or without a store.
    """

    def __init__(self, world: World, progress: Progress, folder: Path) -> None:
        self._world = world
        self._progress = progress
        self._folder = folder
        self._keys = world.name("watch")
        self.heartbeats = self.connect(timedelta(seconds=world.timeout))
        self.called = False
        self._calling = threading.Lock()
        self._answering = threading.Lock()
        self._verdict = ""
        self._has_answered = False

    @property
    def answer_time(self) -> float:
        """Seconds in which all living ranks answer a call."""
        return _ANSWER_TIME + _ANSWER_SHARE * self._world.size

    def tell(self, heartbeats: Heartbeats) -> None:
        """Publish this rank's position."""
        with contextlib.suppress(RuntimeError):
            heartbeats.tell(self._world.rank, self._progress.place)

    def listen(self, heartbeats: Heartbeats) -> None:
        """Answer if another rank has called."""
        with contextlib.suppress(RuntimeError):
            if not self.called and heartbeats.store.check([f"{self._keys}/call"]):
                self._answer(heartbeats, *where_main())
                self.called = True

    def verdict(self, reason: str) -> str:
        """Poll all ranks, and return who is missing. Once per process."""
        with self._calling:
            if not self._verdict:
                self._verdict = self._run_inquiry(reason)
            return self._verdict

    def _run_inquiry(self, reason: str) -> str:
        position = self._progress.place
        line, waits = where_main()
        if threading.current_thread() is threading.main_thread():
            line = "its exchange with the others"
            waits = True
        dump(self._folder / "logs", self._world.rank, f"{reason}; {position}, {line}")
        _LOG.warning("%s: in %s, at %s", reason, position, line, extra={"only_file": True})
        if self.heartbeats is None:
            return f"{rank_label(self._world.rank)} made no progress: it is in {position}, at {line}"
        verdicts: list[str] = []
        asking = threading.Thread(target=self._ask, args=(line, waits, verdicts), daemon=True)
        asking.start()
        asking.join(self.answer_time + _STORE.total_seconds())
        if verdicts:
            return verdicts[0]
        return self._describe_silence()

    def _ask(self, line: str, waits: bool, verdicts: list[str]) -> None:
        """Append the verdict on the ranks' answers to `verdicts`.

        Appends nothing if the store does not answer.
        """
        end = time.monotonic() + self.answer_time
        # Use the existing connection: opening a thousand at once takes the store seconds.
        heartbeats = self.heartbeats
        while heartbeats and not verdicts:
            with contextlib.suppress(RuntimeError):
                verdicts.append(self._verdict_from(heartbeats, line, waits, end))
                return
            # After a timeout a connection may take the late answer for that of the next request.
            heartbeats = self.connect()

    def _verdict_from(self, heartbeats: Heartbeats, line: str, waits: bool, end: float) -> str:
        """Answer, and return the verdict on all answers.

        The first rank that calls collects the answers and publishes the verdict. The others wait for it.
        """
        store = heartbeats.store
        key = f"{self._keys}/verdict"
        self._answer(heartbeats, line, waits)
        if store.add(f"{self._keys}/call", 1) == 1:
            verdict = self._describe_missing(self._collect_answers(heartbeats, end), heartbeats)
            store.set(key, verdict)
            return verdict
        # If the verdict does not come in time, the rank that called first is gone, too.
        with contextlib.suppress(RuntimeError):
            store.wait([key], timedelta(seconds=max(_LEAST_WAIT, end + _PUBLISH_TIME - time.monotonic())))
        if store.check([key]):
            return store.get(key).decode()
        return self._describe_missing(self._collect_answers(heartbeats, end), heartbeats)

    def _answer(self, heartbeats: Heartbeats, line: str, waits: bool) -> None:
        """Publish where this rank is, once per process."""
        with self._answering:
            if not self._has_answered:
                position = self._progress.place
                answer: dict[str, Any] = {"rank": self._world.rank, "step": position.step, "number": position.number}
                # A rank that has lost its peers has waited, and is on its way out.
                answer |= {"line": line, "waits": waits or has_lost_peers()}
                heartbeats.append("answers", json.dumps(answer) + "\n")
                self._has_answered = True

    def _collect_answers(self, heartbeats: Heartbeats, end: float) -> dict[int, dict[str, Any]]:
        """Return the answers by rank once all are there, or at the time `end`."""
        while True:
            lines = heartbeats.store.get(f"{self._keys}/answers").decode().splitlines()
            answers = {answer["rank"]: answer for answer in map(json.loads, lines)}
            if len(answers) >= self._world.size or time.monotonic() >= end:
                return answers
            time.sleep(self.answer_time / _ANSWER_LOOKS)

    def _describe_silence(self) -> str:
        """Describe a store without an answer.

        It is evidence about its node alone, not about the ranks.
        """
        host, port, _ = meeting_point()
        return (
            f"the rendezvous store at {host}:{port}, on the node of {rank_label(0)}, does not answer"
            f"{self._last_position(0)}: that node or the network to it is down"
        )

    def _describe_missing(self, answers: dict[int, dict[str, Any]], heartbeats: Heartbeats) -> str:
        missing = []
        for rank in range(self._world.size):
            if rank not in answers:
                missing.append(rank)
        if missing:
            return " and ".join(
                f"{rank_label(rank)} did not arrive{self._last_position(rank, heartbeats)}" for rank in missing[:8]
            )
        busy = [rank for rank, answer in answers.items() if not answer["waits"]]
        behind = min(answer["step"] for answer in answers.values())
        late = busy or [rank for rank, answer in answers.items() if answer["step"] == behind]
        lines = []
        for rank in sorted(late)[:8]:
            answer = answers[rank]
            lines.append(f"{rank_label(rank)} did not arrive: it is in step {answer['number']}, at {answer['line']}")
        return " and ".join(lines)

    def _last_position(self, rank: int, heartbeats: Heartbeats | None = None) -> str:
        """Describe the last position of a silent rank.

        Read from the launcher's folder on this machine, or from its last heartbeat.
        """
        if self._world.is_first:
            folder = os.environ.get(FOLDER_VARIABLE)
        else:
            folder = None
        position = RankProgress.read(Path(folder) / str(rank)) if folder else None
        if position:
            return f": it was in {position}"
        heartbeat = heartbeats.place_of(rank) if heartbeats else ""
        if heartbeat:
            return f": it was in {heartbeat} at its last heartbeat"
        return ""

    def connect(self, wait: timedelta = _STORE) -> Heartbeats | None:
        """Open another connection to the store.

        A thread may be blocked in an earlier one.

        None in a world of one, or without a rendezvous store: then the ranks end by their timeouts, without names.
        """
        if self._world.size == 1 or self._world.control is None:
            return None
        try:
            host, port, _ = meeting_point()
            store = TCPStore(host, port, None, False, wait, wait_for_workers=False)
            store.set_timeout(_STORE)
        except (RuntimeError, ValueError, ConfigError):
            return None
        return Heartbeats(store, self._keys, self._world.size)


# --- watchdog

# Seconds between two checks of the progress.
_CHECK_INTERVAL = 0.25
# Seconds between two checks for a replacement process.
_REPLACEMENT_INTERVAL = 0.25
# Seconds between two checks for the file STOP.
_STOP_FILE_INTERVAL = 1.0
# Seconds in which the main thread may notice a problem by itself.
_GRACE = 1.0
# Seconds after `--timeout` in which a wait for a lost rank must end.
_LOSS_GRACE = 5.0
# Seconds after twice its longest phase that a rank without a launcher may block.
_ORPHAN = 1.0
_MISSED = "another rank reports a missing rank"
# Seconds after which a rank that reads the loss checks whether the other ranks continued.
_READ_ALONE_AFTER = 1.0
_ORPHANED = "the launcher is gone and this rank is blocked; restart the command"


class HangWatchdog:
    """Context that ends hangs, and reports lost ranks by name.

    Args:
        world: the ranks.
        exchange: their exchange.
        folder: of the run; stacks go to its logs, and its file STOP is a request to save and end.
        report: prints the error before this object ends the process; None: the log does.
        member: of a run that survives lost ranks. Then an error about a lost rank passes unchanged, at once, and a main
            thread that waits for a lost rank gets time to notice.
    """

    def __init__(
        self, world: World, exchange: StepExchange, folder: Path, report: Any = None, member: Member | None = None
    ) -> None:
        self._world = world
        self._exchange = exchange
        self._folder = folder
        self._report = report
        self._member = member
        self._ended = threading.Event()
        self._inquiry = Inquiry(world, exchange.progress, folder)
        self._failed_since = 0.0
        self._warned = False
        # Time of the last look at the other ranks' heartbeats.
        self._looked = 0.0
        # Start and duration of the current phase; and the longest duration of the others.
        self._present = (0.0, 0.0)
        self._longest = 0.0
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)

    def __enter__(self) -> Self:
        self._exchange.progress.at(self._exchange.progress.step, COMPUTING)
        self._thread.start()
        # A thread of its own: a file system may answer late, or never.
        if self._world.is_main:
            threading.Thread(target=self._watch_stop_file, name="lockstep-stop", daemon=True).start()
        if self._member and self._world.is_main:
            threading.Thread(
                target=self._watch_replacements, args=(self._member,), name="lockstep-wish", daemon=True
            ).start()
        heartbeats = self._inquiry.heartbeats
        # A thread of its own: a store that is gone may never answer.
        if heartbeats is not None:
            threading.Thread(
                target=self._publish_heartbeats, args=(heartbeats,), name="lockstep-tell", daemon=True
            ).start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, PeerError):
            named_error = self._name_lost_rank(error)
        else:
            named_error = None
        self._ended.set()
        self._thread.join()
        if named_error:
            raise named_error from error

    def _name_lost_rank(self, error: PeerError) -> PeerError | None:
        """Return an error that names the lost rank.

        None if `error` names it, or if the run handles the loss differently.
        """
        if self._world.size == 1 or self._member or error.relayed:
            return None
        verdict = self._inquiry.verdict(f"lost the other ranks: {error}")
        return PeerError(f"{verdict}; see its log for the cause")

    def _run(self) -> None:
        while not self._ended.wait(_CHECK_INTERVAL):
            reason = self._reason()
            if reason:
                self._leave(reason)

    def _watch_stop_file(self) -> None:
        """Watch for the file STOP on rank 0, and pass the request to the others."""
        while not self._ended.wait(_STOP_FILE_INTERVAL):
            # The file is missing, or the file system fails.
            with contextlib.suppress(OSError):
                os.lstat(self._folder / "STOP")
                self._exchange.stop(SAVE_AND_END)

    def _reason(self) -> str | LockstepError:
        """Return why this process must end, or the error itself; "" if all is well."""
        progress = self._exchange.progress
        time_now = time.monotonic()
        idle = time_now - progress.since
        limit = self._world.timeout + (_LOSS_GRACE if self._member else 0.0)
        if progress.since != self._present[0]:
            self._longest = max(self._longest, self._present[1])
        self._present = progress.since, idle
        # A process that is blocked in a collective does not see the launcher's signal.
        if launcher_is_gone():
            limit = min(limit, _ORPHAN + 2 * self._longest)
        watched = (WAITING, COMPUTING, READING) if self._world.size == 1 else (WAITING, COMPUTING, READING, IN_BODY)
        if progress.phase == IN_BODY and IN_BODY in watched and idle > limit / 2 and not self._warned:
            self._warned = True
            message = f"{rank_label(self._world.rank)} has been in the body of the caller's loop for {idle:.0f} s"
            _LOG.warning("%s; the other ranks wait for it, and end the run after --timeout %g s", message, limit)
        if progress.phase in watched and idle > limit:
            return LockstepError(_ORPHANED) if launcher_is_gone() else f"no progress for {limit:g} s"
        heartbeats = self._inquiry.heartbeats
        if heartbeats is None:
            return ""
        # All ranks may wait here, and each looks at all others, so look rarely in a large world.
        pause = max(_CHECK_INTERVAL, heartbeats.interval / 4)
        if progress.phase == READING and idle > _READ_ALONE_AFTER and time_now - self._looked >= pause:
            self._looked = time_now
            with contextlib.suppress(RuntimeError):
                ahead = heartbeats.find_passed(progress.step)
                if ahead:
                    return LockstepError(read_alone(self._world.rank, progress.step + 1, ahead))
        if self._member:
            return ""
        self._failed_since = (self._failed_since or time_now) if self._exchange.has_failed() else 0.0
        if self._failed_since and time_now - self._failed_since > _GRACE:
            return "an exchange failed"
        return _MISSED if self._inquiry.called else ""

    def _publish_heartbeats(self, heartbeats: Heartbeats) -> None:
        next_heartbeat = 0.0
        while True:
            if time.monotonic() >= next_heartbeat:
                self._inquiry.tell(heartbeats)
                next_heartbeat = time.monotonic() + heartbeats.interval
            self._inquiry.listen(heartbeats)
            if self._ended.wait(_CALL_INTERVAL):
                return

    def _watch_replacements(self, member: Member) -> None:
        """Watch on rank 0 for a replacement process, and pass the request to the others."""
        with contextlib.suppress(RuntimeError):
            # A RuntimeError shows that the launcher is gone.
            store = member.connection()
            while not self._ended.wait(_REPLACEMENT_INTERVAL):
                if member.has_candidate(store):
                    self._exchange.stop(REGROUP)

    def _leave(self, reason: str | LockstepError) -> None:
        """End this process, whatever its main thread does."""
        if isinstance(reason, LockstepError):
            error = reason
        else:
            verdict = self._inquiry.verdict(reason)
            if self._ended.wait(_GRACE if reason == _MISSED else 0.0):
                # The main thread has noticed by itself.
                return
            error = PeerError(
                f"{verdict}; the run ends after {self._world.timeout:g} s without progress; raise --timeout "
                "for slow steps or data"
            )
        try:
            _LOG.error("%s", error, extra={"only_file": self._report is not None})
            if self._report:
                self._report(error)
            for handler in _LOG.handlers:
                handler.flush()
            sys.stderr.flush()
        finally:
            # Also if the disk is full and the log cannot be written.
            os._exit(1)

    def connect(self) -> Heartbeats | None:
        """Open another connection to the store; None if there is none."""
        return self._inquiry.connect()
