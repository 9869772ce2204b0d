"""Detect lost ranks, and form the group that continues without them.

for number in STOP_SIGNALS: ...     SIGHUP among them, where heeds_hangup()
leave_terminal()                    on SIGHUP

`Member` is this process as the launcher's meeting point sees it; `Member.regroup` returns the `Generation` that
continues after a loss. `is_lost_peer` and `lost_peers` recognise the loss of a rank in torch's errors. `check_store`
refuses another service on the meeting point's port. STOP_SIGNALS ask a run to save and end; the launcher passes them
on.
"""

import contextlib
import json
import os
import random
import signal
import socket
import stat
import struct
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

# Only this private module types the stores; the names are the same since torch 2.11.
from torch._C._distributed_c10d import TCPStore

from lockstep.distributed.launcher import ROUND_VARIABLE
from lockstep.distributed.progress import MEETING_VARIABLE, MEMBER_VARIABLE, Progress, rank_label, renumber
from lockstep.errors import RESERVED_CODES, ConfigError, LockstepError, PeerError, error_line

__all__ = [
    "STARTING",
    "STOP_SIGNALS",
    "Generation",
    "LeaveReport",
    "Member",
    "check_store",
    "forget_lost_peers",
    "has_lost_peers",
    "heeds_hangup",
    "is_lost_peer",
    "key_prefix",
    "leave_terminal",
    "lost_peers",
    "translate_errors",
]


# From c10d's TCPStoreBackend.hpp: the first byte of a client's request, and the magic number after it.
_VALIDATE = 0
_PING = 13
_MAGIC = 0x3C85F7CE
# Seconds to connect to a listener.
_CONNECT = 5.0
# A store that is stopping or starting closes connections: attempts, and seconds between them.
_TRIES = 4
_PAUSE = 0.5
# Seconds for an answer beyond the store's own timeout.
_SLACK = 2.0
# Seconds between two looks of a new process at whether it may join.
_SEAT_PAUSE = 0.05


class _StoreReply(Enum):
    RIGHT = "a store's"
    WRONG = "another service's, or none in time"
    CLOSED = "the connection was closed: by another service, or by a store that is stopping or starting"
    NOBODY = "nobody listens"


def check_store(host: str, port: int, wait: float, address: str) -> str:
    """Raise ConfigError if another service listens where torch's store should.

    Args:
        wait: seconds for an answer.
        address: host and port as the user gave them.

    Returns:
        Why nothing listens there yet, such as "Connection refused"; "" if the store does.
    """
    answer, why = _ask(host, port, wait)
    for _ in range(_TRIES):
        if answer is not _StoreReply.CLOSED:
            break
        time.sleep(_PAUSE)
        answer, why = _ask(host, port, wait)
    # Another service answers differently. Blame it only if this version of torch speaks the protocol above.
    if answer not in (_StoreReply.RIGHT, _StoreReply.NOBODY) and _knows_protocol():
        raise ConfigError(
            f"{address}: another service listens there, not the ranks' meeting point; pass all ranks a port that is "
            "free on rank 0's node"
        )
    return why


def _ask(host: str, port: int, wait: float) -> tuple[_StoreReply, str]:
    """Send the greeting of torch's client, and classify the reply.

    Returns:
        The class of the reply, and why there is no connection, if there is none.
    """
    number = random.SystemRandom().getrandbits(31)
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT)
    except OSError as error:
        return _StoreReply.NOBODY, error.strerror or str(error) or "no answer"
    with connection:
        connection.settimeout(wait)
        reply = b""
        try:
            # VALIDATE with the magic number, then PING with a random number, which a store sends back.
            connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, number))
            while len(reply) < 4 and (more := connection.recv(4 - len(reply))):
                reply += more
        except TimeoutError:
            return _StoreReply.WRONG, ""
        except OSError:
            return _StoreReply.CLOSED, ""
    if not reply:
        return _StoreReply.CLOSED, ""
    return (_StoreReply.RIGHT if reply == struct.pack("=I", number) else _StoreReply.WRONG), ""


@cache
def _knows_protocol() -> bool:
    """Whether this version of torch uses this protocol."""
    # Ask a store of this process: a later torch may have changed its protocol.
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return _ask("127.0.0.1", store.port, _CONNECT)[0] is _StoreReply.RIGHT


# Modules in which torch communicates; DDP's reducer does so inside the backward.
_COMMUNICATING = ("torch.distributed.", "torch.nn.parallel.distributed", "torch.autograd.graph", "deepspeed.")
# Modules that wrap calls of the backend.
_WRAPPERS = ("torch._ops", "torch.utils._contextlib")
# Tag of a message that no rank sends.
_TAG = 0x6C6B
# Not empty once a collective has failed because other ranks are gone.
_NOTICED: list[bool] = []


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate lost peers to PeerError, and `sys.exit` and GeneratorExit of user code to LockstepError.

    Other errors pass, and so does the GeneratorExit with which Python closes one of lockstep's generators.
    """
    try:
        yield
    except SystemExit as error:
        raise _exit_error(error) from error
    except GeneratorExit as error:
        # Python raises GeneratorExit where it closes a generator. Pass it on if the generator is lockstep's.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if frames[-1].f_globals.get("__name__", "").startswith("lockstep."):
            raise
        raise LockstepError(
            f"{error_line(error)} was raised by the code itself; end the run with run.stop()"
        ) from error
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise lost_peers(dist.get_rank()) from error


def lost_peers(rank: int, when: str = "") -> PeerError:
    """Return the error of a collective that failed because another rank is gone.

    A rank that is late counts as gone.



    Args:
        rank: of this process.
        when: position in the run, as "before step 7"; "": the current one.
    """
    _NOTICED[:] = [True]
    when = when or (f"at {progress}" if (progress := Progress.present()) else "")
    error = PeerError(
        f"{rank_label(rank)} lost the other ranks{' ' if when else ''}{when}; the first error is in the log of the "
        "rank that failed; if none failed, raise --timeout"
    )
    error.names_nobody = True
    return error


def has_lost_peers() -> bool:
    """Whether a collective failed because other ranks are gone, since the groups were formed."""
    return bool(_NOTICED)


def forget_lost_peers() -> None:
    """Forget failed collectives, because the groups are new."""
    _NOTICED.clear()


def is_lost_peer(error: BaseException, *, in_collective: bool = False) -> bool:
    """Whether torch raised `error` because another rank is gone, or did not respond in time.

    Args:
        in_collective: a call of a collective raised it; else the traceback shows where it was raised.
    """
    if not in_collective and not _raised_in_collective(error):
        return False
    # Subclasses of RuntimeError mean other failures: out of memory, a failed kernel.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _has_closed_link())


def _raised_in_collective(error: BaseException) -> bool:
    """Whether the innermost code is one of the modules of torch that communicate."""
    modules = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        modules.append(frame.f_globals.get("__name__", ""))
    innermost = ""
    for name in reversed(modules):
        if name not in _WRAPPERS:
            innermost = name
            break
    return f"{innermost}.".startswith(_COMMUNICATING)


def _has_closed_link() -> bool:
    """Whether a gloo group of this process has a closed link.

    Its other end, or a timeout, closed it. Gloo refuses at once to receive over such a link. Over an open one the
    message never comes, since this process is ending.
    """
    # `_world.pg_map` lists every group of this process, DDP's and FSDP's too; torch has no public list.
    if dist.is_initialized():
        groups = list(dist.distributed_c10d._world.pg_map)
    else:
        groups = []
    for group in groups:
        # The group has no backend for CPU tensors.
        with suppress(RuntimeError):
            # A group may have several backends. The private `_get_backend` (the same since torch 2.11) returns gloo's.
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() == "gloo" and not all(_is_open(backend, peer) for peer in _peers(group)):
                return True
    return False


def _peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of the group, those at the distances of gloo's rings first.


    Gloo connects to any other rank only when it is asked. A thousand ranks ask so only if no link in use is closed.
    """
    distances = [1 << bit for bit in range(group.size().bit_length())]
    near = []
    for distance in distances:
        for sign in (1, -1):
            near.append((group.rank() + sign * distance) % group.size())
    return list(dict.fromkeys([*near, *range(group.size())]))


def _is_open(backend: Any, peer: int) -> bool:
    try:
        if peer != backend.rank():
            # Receive a message that no rank sends: over a closed link gloo raises at once, over an open one it returns.
            backend.recv([torch.empty(1)], peer, _TAG)
    except RuntimeError:
        return False
    return True


def _exit_error(call: SystemExit) -> LockstepError:
    """Return the error for a `sys.exit` in user code before the run's end."""
    frame = traceback.extract_tb(call.__traceback__)[-1]
    error = LockstepError(
        f"sys.exit({call.code!r}) was called before the run's end, in {Path(frame.filename).name}:{frame.lineno} "
        f"({frame.name}); raise an error there, or end the run with run.stop() on all ranks"
    )
    # A reserved code would be misread by the launcher, so it counts as 1.
    if isinstance(call.code, int) and call.code and call.code not in RESERVED_CODES:
        error.exit_code = call.code
    return error


# Takes the place of a reason why the others cannot continue.
STARTING = "starting"


def key_prefix(round_: str) -> str:
    """Return the prefix of this round's keys in the meeting point's store; see ROUND_VARIABLE."""
    return f"lockstep/members/{round_}"


class LeaveReport(NamedTuple):
    """A member's report once it has left its groups.

    Attributes:
        steps: number of steps in its state; -1: it has no valid state, as during a rollback.
        evaluated: the step after which it last evaluated.
        plan: a digest of what must be the same on all members.
        timed_out: it waited for the others for a full `--timeout`, so silent members need no more time.
        patience: seconds to wait for silent members; `--timeout`.
    """

    steps: int
    evaluated: int
    plan: str
    timed_out: bool
    patience: float


class Generation(NamedTuple):
    """The processes that continue together.

    Attributes:
        number: 1 for the first after the start.
        members: their names by new rank: survivors first, in their former order.
        reports: of each of them, by name.
        fresh: names of the new members.
        lost: a line for each lost process.
    """

    number: int
    members: list[str]
    reports: dict[str, LeaveReport]
    fresh: list[str]
    lost: list[str]

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse the launcher's JSON."""
        fields = json.loads(text)
        reports = {}
        for name, values in fields["reports"].items():
            reports[name] = LeaveReport(*values)
        return cls(fields["number"], fields["members"], reports, fields["fresh"], fields["lost"])

    def to_json(self) -> str:
        """Serialise to JSON for the members."""
        reports = {name: list(report) for name, report in self.reports.items()}
        return json.dumps(self._asdict() | {"reports": reports})


@dataclass
class Member:
    """This process as a member of the run.

    Attributes:
        name: of this process; with a dot if it replaces a lost one.
        generation: number of its current generation; -1: none yet.
    """

    name: str
    generation: int
    _keys: str
    _address: tuple[str, int]
    _store: TCPStore | None = None

    @classmethod
    def of_this_process(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """Read the launcher's variables; None if lost processes are not replaced."""
        name = variables.get(MEMBER_VARIABLE) or variables.get("RANK", "")
        host, _, port = variables.get(MEETING_VARIABLE, "").rpartition(":")
        if not name or not host:
            return None
        keys = key_prefix(variables.get(ROUND_VARIABLE, ""))
        return cls(name, -1 if "." in name else 0, keys, (host, int(port)))

    @property
    def is_new(self) -> bool:
        """Whether it replaces a lost process, and has not joined the others yet."""
        return self.generation < 0

    def report_start(self) -> None:
        """Report to the launcher that no step is trained yet.

        If a process fails now, all can start again.
        """
        self._connect().set(f"{self._keys}/ready/{self.name}", STARTING)

    def report_ready(self, why_not: str = "", experiment: str = "", replica: int = 1) -> None:
        """Report to the launcher the run's name, and whether others can continue without this process.

        Args:
            why_not: why they cannot; "": they can.
            experiment: the run's name.
            replica: number of ranks that together have one copy of the states.
        """
        self._connect().set(f"{self._keys}/experiment", experiment)
        self._connect().set(f"{self._keys}/replica", str(replica))
        self._connect().set(f"{self._keys}/ready/{self.name}", why_not or "yes")

    def experiment(self) -> str:
        """Return the name of the run that the others train; "" if none is known."""
        key = f"{self._keys}/experiment"
        store = self._connect()
        if store.check([key]):
            return store.get(key).decode()
        return ""

    def report_end(self, why: str = "the run is at its end") -> None:
        """Report to the launcher why this process must not be replaced if it ends."""
        self._connect().set(f"{self._keys}/ready/{self.name}", why)

    def has_candidate(self, store: TCPStore) -> bool:
        """Whether a replacement process is ready to join. For another thread, with its own connection."""
        return bool(store.check([f"{self._keys}/wish/{self.generation}"]))

    def regroup(self, report: LeaveReport, wait: float) -> Generation:
        """Return the generation that continues. Call after leaving all former groups; waits for all survivors.

        Args:
            wait: seconds for an answer; a new process waits as long as the launcher is there, since those that its
                replica still lacks may come late.

        Raises:
            PeerError: the launcher did not answer, ends the run, or continues without this process.
        """
        if self.is_new:
            answer_key = f"{self._keys}/seat/{self.name}"
        else:
            answer_key = f"{self._keys}/members/{self.generation + 1}"
        here = "new" if self.is_new else f"here/{self.generation + 1}"
        answers = list[str]()
        waits_since = [time.monotonic()]

        def ask() -> None:
            # The launcher is gone: the caller reports that there is no answer.
            with contextlib.suppress(RuntimeError):
                store = self._connect()
                store.set(f"{self._keys}/{here}/{self.name}", json.dumps(list(report)))
                # The launcher polls this one key, and looks for each rank's report once it is set.
                store.set(f"{self._keys}/{here}", "")
                # A new process has no deadline: those that its replica lacks may come late.
                while self.is_new and not store.check([answer_key]):
                    time.sleep(_SEAT_PAUSE)
                    waits_since[0] = time.monotonic()
                store.wait([answer_key], timedelta(seconds=wait))
                answers.append(store.get(answer_key).decode())

        # In a thread: over a broken link the store's client waits for many minutes, whatever its timeout.
        asking = threading.Thread(target=ask, name="lockstep-regroup", daemon=True)
        asking.start()
        while asking.is_alive() and (seconds_left := waits_since[0] + wait + _SLACK - time.monotonic()) > 0:
            asking.join(seconds_left)
        if not answers:
            raise PeerError(
                f"the launcher did not name the ranks that continue within {wait:g} s: it has ended, is stopped or "
                "cannot be reached; start the same command again"
            )
        # The launcher writes a reason in place of a generation when it ends the run.
        if not answers[0].startswith("{"):
            raise PeerError(answers[0])
        generation = Generation.read(answers[0])
        if self.name not in generation.members:
            raise PeerError("the others went on without this process, which was silent for too long")
        self.generation = generation.number
        renumber(generation.members)
        return generation

    def connection(self) -> TCPStore:
        """Return a new connection to the meeting point, for one thread."""
        return TCPStore(*self._address, None, False, timedelta(seconds=60.0), wait_for_workers=False)

    def _connect(self) -> TCPStore:
        """Return this process's own connection, which outlives every group."""
        if self._store is None:
            self._store = self.connection()
        return self._store


# SIGUSR1 and SIGUSR2 come from Slurm ahead of a time limit; SIGHUP from a closed terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def heeds_hangup() -> bool:
    """Whether this process reacts to the end of the terminal (SIGHUP); not under nohup."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def leave_terminal() -> None:
    """Redirect output to /dev/null where it went to a closed terminal: a write would raise."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
