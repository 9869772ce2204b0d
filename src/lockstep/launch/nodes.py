"""Carry the decisions about lost processes over several nodes.

    decisions = open_decisions(job, describe, folder)   # before the first rendezvous; None: a loss ends the run
    decisions.begin(token, names, group)                # after each rendezvous
    reason = decisions.update(living, ended)            # at each poll of this node's processes

The launcher of node 0 decides for all nodes (`Coordinator`, which holds the `losses.Membership`). The others report
their processes to it and obey (`Follower`). Each keeps a TCP connection to it, with one JSON object per line. A store
would not show that a launcher has ended; the system closes a connection at once. A launcher that only falls silent is
lost when the others wait for its ranks.
"""

import contextlib
import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Only this private module types the stores; the names are the same since torch 2.11.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lockstep.distributed.failures import ProcessFailure
from lockstep.distributed.launcher import FOLLOWER_VARIABLE, listen
from lockstep.distributed.progress import MEETING_VARIABLE, RankProgress, read_end
from lockstep.errors import LockstepError, StorageError
from lockstep.launch.job import Job
from lockstep.launch.link import Link
from lockstep.launch.losses import Membership
from lockstep.launch.rendezvous import join_seconds
from lockstep.launch.secret import NO_SECRET, Secret

__all__ = ["Coordinator", "Decisions", "Follower", "Seat", "open_decisions"]

# Key of each launcher's address, in the round's store.
_INFO = "lockstep/launcher"
# Seconds for all launchers of a round to write it.
_INFO_SECONDS = 60.0
# Key of the current run's address, in the rendezvous' store, for a node that rejoins.
_RUN = "lockstep/run"
# Seconds in which a loss is usually handled: no report of waiting is printed before.
_SEAT_SECONDS = 2.0
# Seconds between two requests for a place, and between two reports of waiting.
_SEAT_PAUSE = 0.5
_REPORT_SECONDS = 15.0
# Seconds to connect to node 0's launcher.
_CONNECT_SECONDS = 10.0
# Seconds for a connection's first message.
_HELLO_SECONDS = 5.0
# Longest time between two lines, in seconds.
_BEAT = 1.0
# The message that shows only that the launcher is alive.
_NOTHING_NEW: dict[str, Any] = {}
# Names of processes, sent once to the node that has them.
_ORDERS = ("replace", "silent", "refused")
# Seconds without a line, after which a node whose ranks do not report is lost.
_DEAF = 5.0
# Seconds without a line, after which the screen shows it.
_QUIET = 30.0
# The same, once this node's ranks have ended; and for node 0, once a rank here has failed.
_LEAVE = 15.0


class Seat(NamedTuple):
    """The place of a node that rejoins a run.

    Attributes:
        node, nodes: its number, and how many there are.
        names: of its processes, by local rank.
        world: number of ranks at the start.
        token: of the round.
    """

    node: int
    nodes: int
    names: list[str]
    world: int
    token: str


class Decisions(Protocol):
    """Decisions about this node's processes, wherever they are made.

    Attributes:
        members: names by rank, of all nodes.
        number: of the generation.
        causes: failures that were losses; [] if they are not known here.
        fatal: the failure that ended the run; None if it was one of this node, or none did.
        replace, silent, refused: names of this node, as in `losses.Membership`; the caller empties them.
        is_over: the members have ended well, so no process is waited for.
        code: exit code of a run that saved before its end, once it is over.
        stop_signal: the signal that requests the end, which reaches all nodes; 0: none. Set here and by the caller.
        is_orphaned: node 0's launcher is lost, so this one cannot restart anything.
        printer: the node whose rank 0 prints the run's progress, in words; "": not known.
    """

    @property
    def members(self) -> list[str]: ...
    @property
    def number(self) -> int: ...
    @property
    def causes(self) -> list[ProcessFailure]: ...

    fatal: ProcessFailure | None
    replace: list[str]
    silent: list[str]
    refused: list[str]
    is_over: bool
    code: int
    stop_signal: int
    is_orphaned: bool
    printer: str

    def rejoin(self, processes: int) -> Seat | None:
        """Call before each rendezvous.

        Args:
            processes: number of them on this node.

        Returns:
            The place that this node had in a run under way, which needs no rendezvous; None: it has none.
        """
        ...

    def begin(self, round_: str, names: list[str], group: Any) -> bool:
        """Reset for a new start of all processes; return whether a loss is survived.

        Args:
            round_: the token of the launchers' round.
            names: of this node's processes.
            group: torch's WorkerGroup.
        """
        ...

    def rank_of(self, name: str) -> int | None: ...
    def add_new(self, name: str) -> None: ...
    def update(self, living: set[str], ended: Mapping[str, ProcessFailure]) -> str: ...
    def close(self) -> None: ...


def open_decisions(
    job: Job, describe: Callable[[ProcessFailure], str], folder: Path, say: Callable[[str], None] = print
) -> Decisions | None:
    """Open the meeting point of a run that survives losses, or follow node 0's.

    Args:
        describe: describes a failure for the log.
        folder: where this node's ranks record their progress.
        say: prints a line.

    Returns:
        None: a loss ends the run.
    """
    for name in (MEETING_VARIABLE, FOLLOWER_VARIABLE):
        # Another launcher around this one may have set them.
        os.environ.pop(name, None)
    several = job.nodes[1] > 1
    if several and not job.is_host:
        if job.backend == "c10d":
            return Follower(job, folder, say)
        # Only the c10d backend has the store through which a follower finds node 0's launcher.
        return None
    host = job.endpoint.rpartition(":")[0]
    listener = listen(host, 0) if job.losses else None
    if listener is None:
        if several and job.backend == "c10d":
            return Coordinator(None, "", None, folder, job.run_secret, say)
        return None
    # The ranks meet at any free port of the address that the launchers use.
    port = listener.getsockname()[1]
    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    membership = Membership(store, least=job.least, most=job.losses, describe=describe)
    os.environ[MEETING_VARIABLE] = meeting = f"{host}:{port}"
    return Coordinator(membership, meeting, listen(host, 0) if several else None, folder, job.run_secret, say)


@dataclasses.dataclass(slots=True)
class _Node:
    """Another node, as its launcher reports it.

    Attributes:
        number: torch's, of this round.
        label: the number in messages: --node-rank, where it was given.
    """

    number: int
    label: int
    host: str
    link: Link
    slots: list[str]
    living: set[str]
    failed: dict[str, ProcessFailure] = dataclasses.field(default_factory=dict)
    is_lost: bool = False
    is_quiet: bool = False
    code: int = 0
    stop_signal: int = 0
    # Version of the state that was sent last.
    version: int = -1
    sent_at: float = 0.0


class Coordinator:
    """Node 0's launcher: decides for all nodes. Attributes as in `Decisions`.

    Args:
        membership: None: a loss ends the run, which the other launchers must learn too.
        meeting: address of the ranks' meeting point.
        listener: for the other launchers; None on one node.
        folder: where this node's ranks record their progress.
        secret: of the launchers.
        say: prints a line.
    """

    def __init__(
        self,
        membership: Membership | None,
        meeting: str,
        listener: socket.socket | None,
        folder: Path,
        secret: Secret = NO_SECRET,
        say: Callable[[str], None] = print,
    ) -> None:
        self._say = say
        self._membership = membership
        self._meeting = meeting
        self._listener = listener
        self._folder = folder
        if listener:
            listener.setblocking(False)
        self._secret = secret
        self._round_secret = secret
        self._token = ""
        # The rendezvous' store, while this run's address is in it.
        self._published: Any = None
        # The last number in the names of another node's process, by the process's rank at the start.
        self._newest: dict[str, int] = {}
        # Connections without a first message.
        self._waiting: list[Link] = []
        # The numbers of this round's connections: a number that comes twice was recorded and sent again.
        self._met: set[str] = set()
        self._nodes: list[_Node] = []
        self._world: set[str] = set()
        self._own: set[str] = set()
        # Running processes of all nodes, computed again only where something changed.
        self._everyone: set[str] = set()
        self._own_living: set[str] = set()
        self._is_stale = True
        # What all nodes are to know.
        self._state: dict[str, Any] = {}
        # Version of `_state`: a node that has it gets a beat in its place.
        self._version = 0
        self.replace: list[str] = []
        self.silent: list[str] = []
        self.refused: list[str] = []
        self.fatal: ProcessFailure | None = None
        self.is_over = self.is_orphaned = False
        self.code = self.stop_signal = 0
        self.printer = ""

    @property
    def members(self) -> list[str]:
        """Names by rank."""
        if self._membership:
            return self._membership.members
        return []

    @property
    def number(self) -> int:
        """The generation's number."""
        if self._membership:
            return self._membership.number
        return 0

    @property
    def causes(self) -> list[ProcessFailure]:
        """The failures that were losses, oldest first."""
        if self._membership:
            return self._membership.causes
        return []

    def begin(self, round_: str, names: list[str], group: Any) -> bool:
        """Reset for a new start of all processes; return whether a loss is survived."""
        # All processes start again, and so do the connections: their secret is of the round.
        self._close_links()
        self._waiting = []
        self._met = set()
        self._nodes = []
        self._own = set(names)
        self._is_stale = True
        self.replace = []
        self.silent = []
        self.refused = []
        self.fatal = None
        self.is_over = False
        self.code = self.stop_signal = 0
        ranks = [str(rank) for rank in range(group.workers[0].world_size)]
        self._world = set(ranks)
        if self._membership:
            self._membership.begin(round_, ranks)
        if group.group_world_size > 1 or self._listener:
            info = None
            if self._membership and self._listener:
                # Each round has a secret of its own, so nothing signed in an earlier round is accepted.
                number = secrets.token_hex(16)
                self._round_secret = self._secret.derive(number)
                host = self._meeting.rpartition(":")[0]
                port = self._listener.getsockname()[1]
                info = {"meeting": self._meeting, "host": host, "port": port, "number": number}
            _exchange(group, info, self._secret)
            if info and isinstance(group.store, PrefixStore):
                # A node that rejoins finds the run's address here, without a rendezvous.
                self._published = group.store.underlying_store
                self._published.set(_RUN, self._secret.sign("run", info).decode())
        self._token = round_
        self._newest = {}
        return self._membership is not None

    def rejoin(self, processes: int) -> Seat | None:
        """Withdraw the address: a node that rejoins now takes part in the rendezvous."""
        if self._published:
            self._published.set(_RUN, self._secret.sign("run", None).decode())
            self._published = None
        return None

    def rank_of(self, name: str) -> int | None:
        """Return a member's current rank; None if it is not a member."""
        if self._membership:
            return self._membership.rank_of(name)
        return None

    def add_new(self, name: str) -> None:
        """Add a new process of this node, which has not joined yet."""
        assert self._membership is not None
        self._membership.add_new(name)

    def update(self, living: set[str], ended: Mapping[str, ProcessFailure]) -> str:
        """Record the new losses on all nodes, and decide whether the run continues.

        Args:
            living: names of running processes of this node.
            ended: failures by name, of this node.

        Returns:
            As `Membership.update`.
        """
        membership = self._membership
        assert membership is not None
        self._accept()
        # No rank of this node is left, so a silent launcher of another node need not be waited for.
        is_last = not living and not ended
        for node in self._nodes:
            self._hear(node, is_last=is_last)
        everyone = self._living_everywhere(living)
        failures = dict(ended)
        for node in self._nodes:
            if node.failed:
                failures |= node.failed
        self.is_over = not any(name in everyone or name in failures for name in membership.members)
        self.stop_signal = max([self.stop_signal, *(node.stop_signal for node in self._nodes)])
        if self.is_over:
            self.code = max([read_end(self._folder), *(node.code for node in self._nodes)])
        reason = "" if self.is_over else membership.update(everyone, failures)
        # A failure of this node's own process is described by the agent, which has its note.
        if membership.fatal in ended.values():
            self.fatal = None
        else:
            self.fatal = membership.fatal
        self._instruct(reason, membership)
        return reason

    def _living_everywhere(self, living: set[str]) -> set[str]:
        """Return the names of running processes of all nodes.

        A node that has not reported yet counts as running.
        """
        if self._is_stale or living != self._own_living:
            heard = set[str]().union(*(node.slots for node in self._nodes))
            unheard = self._world - self._own - heard
            self._everyone = set[str].union(living, unheard, *(node.living for node in self._nodes))
            self._own_living = set(living)
            self._is_stale = False
        return self._everyone

    def close(self) -> None:
        """Close all connections."""
        self._close_links()
        if self._listener:
            self._listener.close()

    def _close_links(self) -> None:
        for link in [*self._waiting, *(node.link for node in self._nodes)]:
            link.close()

    def _accept(self) -> None:
        """Accept other launchers, each once its first message is signed."""
        # Nobody waits for a connection.
        with contextlib.suppress(OSError):
            while self._listener:
                self._waiting.append(Link(self._listener.accept()[0], self._round_secret, is_server=True))
        for link in list(self._waiting):
            messages = link.receive()
            if messages:
                self._waiting.remove(link)
                # The number was used before: somebody recorded the connection and sends it again.
                if link.number in self._met:
                    link.close()
                    continue
                self._met.add(link.number)
                self._add_node(link, messages[0])
            elif not link.is_open or time.monotonic() - link.opened > _HELLO_SECONDS:
                self._waiting.remove(link)
                link.close()

    def _add_node(self, link: Link, hello: dict[str, Any]) -> None:
        if "processes" in hello:
            seat = self._give_seat(link, hello)
            link.send({"seat": seat, "why": "" if seat else self._explain_no_seat(hello["processes"])})
            if seat is None:
                link.close()
            return
        self._is_stale = True
        names = [str(name) for name in hello["names"]]
        number = int(hello["node"])
        label = int(hello["label"])
        self._nodes.append(_Node(number, label or number, str(hello["host"]), link, names, set(names)))

    def _give_seat(self, link: Link, hello: dict[str, Any]) -> Seat | None:
        """Return a lost node's place for one that rejoins.

        Returns:
            None while no lost node has as many processes.
        """
        present = {name.partition(".")[0] for name in self.members}
        for node in self._nodes:
            # The lost node's ranks must have left the members before their names are used again.
            if node.is_lost and len(node.slots) == hello["processes"] and not present & set(node.slots):
                names = [f"{slot}.{self._newest.get(slot, 0) + 1}" for slot in node.slots]
                self._is_stale = True
                self._nodes.remove(node)
                label = int(hello["label"]) or node.label
                self._nodes.append(_Node(node.number, label, str(hello["host"]), link, node.slots, set()))
                return Seat(node.number, len(self._nodes) + 1, names, len(self._world), self._token)
        return None

    def _explain_no_seat(self, processes: int) -> str:
        lost = [node for node in self._nodes if node.is_lost]
        if not lost:
            hosts = ", ".join([socket.gethostname(), *(node.host for node in self._nodes)])
            return f"none of its {len(self._nodes) + 1} nodes ({hosts}) is lost"
        sizes = sorted({len(node.slots) for node in lost})
        if processes not in sizes:
            return f"the lost node had {' or '.join(map(str, sizes))} processes, and --nproc-per-node is {processes}"
        return "the others have not left the lost node's ranks yet"

    def _hear(self, node: _Node, *, is_last: bool) -> None:
        if node.is_lost:
            return
        for report in node.link.receive():
            heard = set(report["living"])
            # Compute the names of all nodes again only if this node's have changed.
            self._is_stale = self._is_stale or heard != node.living
            node.living = heard
            node.failed = {name: _failure(values) for name, values in report["failed"].items()}
            node.code = report["code"]
            node.stop_signal = report["stop"]
            for name in report["new"]:
                self.add_new(name)
                slot, _, number = name.partition(".")
                self._newest[slot] = int(number)
        quiet = time.monotonic() - node.link.heard
        if quiet > _QUIET and not node.is_quiet:
            text = f"node {node.label} ({node.host}): its launcher has not answered for {_QUIET:g} s"
            self._say(f"{text}: it is stopped, or the node cannot be reached and is lost after --timeout")
        node.is_quiet = quiet > _QUIET
        if not node.link.is_open:
            self._lose(node, "its launcher has ended")
        elif is_last and quiet > _LEAVE:
            # The ranks here ended well, which they do only together with all others.
            self._say(f"node {node.label} ({node.host}): its launcher is silent; the run has ended without it")
            node.link.close()
            node.is_lost = True
            node.living = set()
            self._is_stale = True

    def _lose(self, node: _Node, why: str) -> None:
        """Count a node's processes as lost, once; a process that ended well stays so."""
        node.is_lost = True
        # All its processes had ended well, so nothing is lost.
        if not node.living:
            node.link.close()
            return
        places = [self.rank_of(name) for name in sorted(node.living)]
        ranks = sorted(rank for rank in places if rank is not None)
        if ranks:
            named = f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
        else:
            named = "no rank"
        message = f"node {node.label} ({node.host}, with {named}) is lost: {why}"
        # The launcher may only be stopped: it reads this once it runs again.
        node.link.send({"lost": message})
        node.link.close()
        failure = ProcessFailure(
            ranks[0] if ranks else 0, 1, message, when=time.time(), place=_progress(self._folder), shared=True
        )
        node.failed |= dict.fromkeys(node.living, failure)
        node.living = set()
        self._is_stale = True

    def _instruct(self, reason: str, membership: Membership) -> None:
        """Send each node the decisions about its processes, and keep this node's."""
        time_now = time.monotonic()
        self.printer = self._find_printer(membership.members)
        state = {
            "printer": self.printer,
            "members": membership.members,
            "number": membership.number,
            "over": self.is_over,
            "code": self.code,
            "stop": self.stop_signal,
            "end": reason,
            "cause": _values(membership.fatal) if reason and membership.fatal else None,
        }
        if state != self._state:
            # Copy the members: the list changes later, and must differ from this state then.
            self._state = state | {"members": [*membership.members]}
            self._version = self._version + 1
        has_orders = bool(membership.replace or membership.silent or membership.refused)
        for node in self._nodes:
            if has_orders:
                self._order(node, membership, time_now)
            if node.is_lost:
                continue
            if node.version != self._version:
                node.link.send(self._state)
                node.version = self._version
                node.sent_at = time_now
            elif time_now - node.sent_at > _BEAT:
                # Nothing is new. A beat shows that this launcher is alive.
                node.link.send(_NOTHING_NEW)
                node.sent_at = time_now
        for name in _ORDERS:
            setattr(self, name, _of(self._own, getattr(membership, name)))
            setattr(membership, name, [])

    def _find_printer(self, members: list[str]) -> str:
        slot = members[0].partition(".")[0] if members else ""
        for node in self._nodes:
            if slot in node.slots:
                return f"node {node.label} ({node.host})"
        return f"node 0 ({socket.gethostname()})"

    def _order(self, node: _Node, membership: Membership, now: float) -> None:
        """Send a node the orders for its processes, if there are any."""
        slots = set(node.slots)
        orders = {name: _of(slots, getattr(membership, name)) for name in _ORDERS}
        # The node's ranks do not report, and its launcher is silent: do not wait for it any longer.
        if orders["silent"] and now - node.link.heard > _DEAF and not node.is_lost:
            self._lose(node, "its launcher is silent")
        if any(orders.values()) and not node.is_lost:
            node.link.send(orders)


class Follower:
    """Another node's launcher: reports to node 0's, and obeys. Attributes as in `Decisions`.

    Args:
        job: gives the address of the rendezvous, this node's number and the launchers' secret.
        folder: where this node's ranks record their progress.
        say: prints a line.
    """

    def __init__(self, job: Job, folder: Path, say: Callable[[str], None]) -> None:
        self._endpoint = job.endpoint
        self._folder = folder
        self._secret = job.run_secret
        self._say = say
        self._label = job.node_rank
        self._patience = join_seconds(job)
        self._link: Link | None = None
        self._new: list[str] = []
        self._end = self._lost = ""
        self._seat: Seat | None = None
        self._has_begun = self._has_warned = False
        self._sent: dict[str, Any] = {}
        self._sent_at = 0.0
        self.members: list[str] = []
        self.number = 0
        self.causes: list[ProcessFailure] = []
        self.fatal: ProcessFailure | None = None
        self.replace: list[str] = []
        self.silent: list[str] = []
        self.refused: list[str] = []
        self.is_over = self.is_orphaned = False
        self.code = self.stop_signal = 0
        self.printer = ""

    def begin(self, round_: str, names: list[str], group: Any) -> bool:
        """Connect to node 0's launcher; return whether a loss is survived.

        Raises:
            LockstepError: it cannot be reached.
        """
        seat = self._seat
        self._seat = None
        self._has_begun = True
        self.members = []
        self.number = 0
        self._new = []
        self._end = ""
        self._lost = ""
        self._sent = {}
        self.replace = []
        self.silent = []
        self.refused = []
        self.fatal = None
        self.is_over = self.is_orphaned = False
        self.code = self.stop_signal = 0
        # This launcher is connected since it asked for its place.
        if seat:
            self._new = list(names)
            return True
        self.close()
        for name in (MEETING_VARIABLE, FOLLOWER_VARIABLE):
            os.environ.pop(name, None)
        info = _exchange(group, None, self._secret)
        if info is None:
            return False
        try:
            self._connect(info, {"node": group.group_rank, "names": names})
        except OSError as error:
            raise LockstepError(
                f"node 0's launcher cannot be reached at {info['host']}:{info['port']} ({error.strerror or error}); "
                "open the ports between the nodes, or start all launchers with --max-losses 0"
            ) from error
        return True

    def rejoin(self, processes: int) -> Seat | None:
        """Wait for the place of a lost node in a current run; see `Decisions`.

        Raises:
            LockstepError: the run had no place for this launcher, or has ended.
        """
        if self._has_begun:
            return None
        host, _, port = self._endpoint.rpartition(":")
        began = time.monotonic()
        report = _SEAT_SECONDS
        why = ""
        try:
            store = TCPStore(host, int(port), None, False, timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False)
            while (seconds := time.monotonic() - began) < self._patience:
                if store.check([_RUN]):
                    info = self._secret.read("run", store.get(_RUN))
                else:
                    info = None
                # No run is in progress, so this node takes part in the rendezvous.
                if info is None:
                    return None
                why = self._ask_for_seat(info, processes)
                if self._seat:
                    return self._seat
                if seconds > report:
                    report += _REPORT_SECONDS
                    seconds_left = self._patience - seconds
                    self._say(f"waiting for a place in the run at {self._endpoint}: {why}; {seconds_left:.0f} s left")
                time.sleep(_SEAT_PAUSE)
        except RuntimeError as error:
            # The store has gone with node 0's launcher.
            ended = f"the run at {self._endpoint} ended while this launcher waited for a place in it"
            raise LockstepError(f"{ended} ({why})" if why else f"{ended}") from error
        raise LockstepError(
            f"the run at {self._endpoint} had no place for this launcher within {self._patience:g} s: {why}; end this "
            "launcher, or give another run a --master-port of its own"
        )

    def _ask_for_seat(self, info: dict[str, Any], processes: int) -> str:
        """Ask for a place once, and return why there is none."""
        why = f"node 0's launcher does not answer at {info['host']}:{info['port']}"
        try:
            for message in self._connect(info, {"processes": processes}).wait_for_message(_CONNECT_SECONDS):
                self._seat = Seat(*message["seat"]) if message["seat"] else None
                why = str(message["why"])
                break
        except OSError as error:
            why += f" ({error.strerror or error})"
        if self._seat is None:
            self.close()
        return why

    def _connect(self, info: dict[str, Any], hello: dict[str, Any]) -> Link:
        connection = socket.create_connection((info["host"], info["port"]), timeout=_CONNECT_SECONDS)
        os.environ[MEETING_VARIABLE] = info["meeting"]
        os.environ[FOLLOWER_VARIABLE] = "1"
        self._link = Link(connection, self._secret.derive(info["number"]), is_server=False)
        self._link.send({"host": socket.gethostname(), "label": self._label} | hello)
        return self._link

    def rank_of(self, name: str) -> int | None:
        """Return a member's current rank; None if it is not a member."""
        # No message has arrived yet: the ranks are those of the start.
        if not self.members:
            if name.isdigit():
                return int(name)
            return None
        if name in self.members:
            return self.members.index(name)
        return None

    def add_new(self, name: str) -> None:
        """Add a new process of this node, which has not joined yet."""
        self._new.append(name)

    def update(self, living: set[str], ended: Mapping[str, ProcessFailure]) -> str:
        """Report this node's processes, and receive the decisions about them.

        Returns as `Membership.update`.
        """
        assert self._link is not None
        report: dict[str, Any] = {
            "living": sorted(living),
            "failed": {name: _values(failure) for name, failure in ended.items()},
            "code": 0 if living else read_end(self._folder),
            "stop": self.stop_signal,
        }
        time_now = time.monotonic()
        # Send what has changed, or a beat.
        if self._new or report != self._sent or time_now - self._sent_at > _BEAT:
            self._link.send(report | {"new": self._new})
            self._new = []
            self._sent = report
            self._sent_at = time_now
        for message in self._link.receive():
            self._lost = message.get("lost", self._lost)
            for name in _ORDERS:
                getattr(self, name).extend(message.get(name, []))
            # Only a message with the state has this key; a beat and orders have not.
            if "members" not in message:
                continue
            self.members = message["members"]
            self.number = message["number"]
            self.printer = message["printer"]
            self.is_over = message["over"]
            self.code = message["code"]
            self._end = message["end"]
            self.stop_signal = max(self.stop_signal, message["stop"])
            self.fatal = _failure(message["cause"]) if message["cause"] else None
        # The agent describes a failure of this node's own process, from its note.
        if self.fatal and _values(self.fatal) in report["failed"].values():
            self.fatal = None
        if self._end:
            return self._end
        is_silent = time_now - self._link.heard > _LEAVE
        has_left = is_silent or not self._link.is_open
        # Ranks end well only together, so a launcher that has left ended its run well too.
        self.is_over = self.is_over or (has_left and not living and not ended)
        # If only node 0's launcher fails, all ranks save themselves. A failure here shows that they could not.
        if not ended or not has_left:
            self._warn(time_now)
            return ""
        self.is_orphaned = True
        self.fatal = ProcessFailure(
            0,
            StorageError.exit_code,
            self._explain_end(is_silent=self._link.is_open),
            when=time.time(),
            place=next(iter(ended.values())).place,
            shared=True,
        )
        return "-"

    def _explain_end(self, *, is_silent: bool) -> str:
        """Explain why this launcher cannot continue.

        It has lost its place in the run, or node 0's launcher makes no decisions.
        """
        if self._lost:
            return f"{self._lost}; the others continue without it, and the same command takes its place again"
        how = f"has not answered for {_LEAVE:g} s" if is_silent else "is lost"
        return (
            f"node 0's launcher at {self._endpoint} {how}, and no other decides who continues; the same command "
            "resumes from the newest checkpoint"
        )

    def _warn(self, now: float) -> None:
        """Report once that node 0's launcher does not answer; it may be stopped."""
        assert self._link is not None
        is_silent = now - self._link.heard > _QUIET
        if is_silent and not self._has_warned:
            self._say(f"node 0's launcher has not answered for {_QUIET:g} s; the ranks continue until one fails")
        self._has_warned = is_silent

    def close(self) -> None:
        """Close the connection."""
        if self._link:
            self._link.close()
            self._link = None


def _exchange(group: Any, own: dict[str, Any] | None, secret: Secret) -> dict[str, Any] | None:
    """Exchange the launchers' addresses in a round's store.

    Returns:
        The coordinator's address; None if there is none.
    """
    store = group.store
    size = group.group_world_size
    keys = [f"{_INFO}/{number}" for number in range(size)]
    store.set(keys[group.group_rank], secret.sign("addresses", own).decode())
    # Every launcher of the round writes its key, so all wait for the slowest.
    store.wait(keys, timedelta(seconds=_INFO_SECONDS))
    infos = [secret.read("addresses", value) for value in store.multi_get(keys)]
    return next((info for info in infos if info), None)


def _progress(folder: Path) -> RankProgress | None:
    """Return the progress of this node's most advanced rank."""
    places = []
    for path in folder.iterdir():
        if path.name.isdigit():
            places.append(RankProgress.read(path))
    return max((place for place in places if place), key=lambda place: place.step, default=None)


def _of(slots: set[str], names: list[str]) -> list[str]:
    inside = []
    for name in names:
        if name.partition(".")[0] in slots:
            inside.append(name)
    return inside


def _values(failure: ProcessFailure) -> dict[str, Any]:
    values = dataclasses.asdict(failure)
    return values | {"place": list(failure.place) if failure.place else None}


def _failure(values: dict[str, Any]) -> ProcessFailure:
    progress = values["place"]
    return ProcessFailure(**(values | {"place": RankProgress(*progress) if progress else None}))
