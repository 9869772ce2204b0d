"""Open the rendezvous where the launchers of a run's nodes meet.

    handler = open_rendezvous(job, say)        # waits until node 0's launcher listens
    handler.next_rendezvous()                  # reports every 15 s which nodes are missing

One launcher meets nobody, and opens no store for it. On several nodes it is torch's, but its state is signed JSON, its
store listens on one address, a broken link does not block the launcher, and a launcher that was started with other
settings is refused at once.
"""

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Only this private module types the stores; the names are the same since torch 2.11.
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.distributed.launcher import listen, route_to
from lockstep.distributed.membership import check_store
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.job import Job
from lockstep.launch.rendezvous_state import SignedBackend
from lockstep.launch.secret import SECRET_VARIABLE, Secret, SignatureError

__all__ = ["join_seconds", "local_address", "open_rendezvous"]

# Seconds for the meeting point's greeting.
_GREETING_SECONDS = 60.0
# Seconds to wait for the meeting point's answer while the processes are watched.
_READ_SECONDS = 5.0
# The same in a rendezvous, where a busy node may be late.
_MEET_SECONDS = 60.0
# Seconds after which a slow connection is reported, and seconds between two reports of waiting.
_SLOW_SECONDS = 3.0
_REPORT_SECONDS = 15.0
# Key of node 0's settings.
_SETTINGS = "lockstep/settings"
# Key of the last launcher with other settings.
_REFUSED = "lockstep/refused"
# Seconds for the launchers to meet; torch's own limit.
_JOIN_SECONDS = 600


def open_rendezvous(job: Job, say: Callable[[str], None]) -> RendezvousHandler:
    """Return the rendezvous of the launchers, with a store on the endpoint's address.

    The store listens on that address only.

    Raises:
        ConfigError: another service listens there, or this launcher's settings or secret differ from node 0's.
        LockstepError: node 0's launcher did not listen in time.
    """
    if job.nodes[1] == 1 and job.backend == "c10d":
        return OneNode(job)
    settings = RendezvousParameters(
        backend=job.backend,
        endpoint=job.endpoint,
        run_id=job.run_id,
        min_nodes=job.nodes[0],
        max_nodes=job.nodes[1],
        local_addr=local_address(job),
        **job.options,
    )
    if job.backend != "c10d":
        settings.config.setdefault("read_timeout", str(int(_READ_SECONDS)))
        return NodeRendezvous(get_rendezvous_handler(settings), job, None, say)
    if job.is_host and not job.secret and not _is_loopback(job.endpoint):
        say(
            f"no secret protects the launchers: whoever reaches {job.endpoint} can end this run or change it; give all "
            f"launchers the same --rdzv-secret-file, or {SECRET_VARIABLE}"
        )
    store = _open_store(job, say)
    _check_settings(job, store)
    host = job.run_secret.sign("host", socket.gethostname()).decode()
    # The other launchers name this host when they report who has come.
    store.set(_host_key(str(settings.local_addr), os.getpid()), host)
    backend = SignedBackend(store, job.run_id, job.run_secret)
    handler = create_handler(store, backend, settings)
    return NodeRendezvous(handler, job, store, say)


def _open_store(job: Job, say: Callable[[str], None]) -> TCPStore:
    host, _, port = job.endpoint.rpartition(":")
    wait = timedelta(seconds=_READ_SECONDS)
    if not job.is_host:
        _await_host(host, int(port), join_seconds(job), say)
        began = time.monotonic()
        store = TCPStore(host, int(port), None, False, wait, wait_for_workers=False)
        if (seconds := time.monotonic() - began) > _SLOW_SECONDS:
            text = f"connecting to node 0 took {seconds:.0f} s, and each process will wait as long; if the name server"
            say(f"{text} does not answer, add the line `{_map_address(host)} node0` to /etc/hosts")
        return store
    listener = listen(host, int(port))
    if listener is None:
        raise ConfigError(
            f"--master-addr {host} is not an address of this node, and --node-rank 0 needs one of its own; give "
            "every other node a --node-rank of its own"
        )
    port = listener.getsockname()[1]
    # torch would listen on every interface. It takes over this socket, which listens on one address.
    return TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach())


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0]
    with contextlib.suppress(OSError, ValueError):
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    return False


def _map_address(host: str) -> str:
    """Return the address that torch asks the name server about: IPv4 as IPv6."""
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if ":" in host:
        return host
    return f"::ffff:{host}"


def _await_host(host: str, port: int, limit: float, say: Callable[[str], None]) -> None:
    """Wait until node 0's launcher listens. Raises as `open_rendezvous`."""
    deadline = time.monotonic() + limit
    report = time.monotonic() + _REPORT_SECONDS
    while why := check_store(host, port, _GREETING_SECONDS, f"--master-addr {host} --master-port {port}"):
        advice = "check that its launcher runs, --master-addr, --master-port, and the firewall"
        remaining = deadline - time.monotonic()
        if remaining < 0:
            raise LockstepError(f"node 0 did not answer at {host}:{port} within {limit:g} s ({why}); {advice}")
        if time.monotonic() > report:
            report += _REPORT_SECONDS
            say(f"waiting for node 0, which does not answer at {host}:{port} ({why}); {advice}; {remaining:.0f} s left")
        time.sleep(min(1.0, remaining))


def _check_settings(job: Job, store: TCPStore) -> None:
    """Check that all launchers have the same settings.

    Node 0's launcher, which opened the store, writes its own.

    Raises:
        ConfigError: the settings or the secrets differ.
        LockstepError: node 0's launcher wrote none.
    """
    if job.nodes[0] == job.nodes[1]:
        nodes = str(job.nodes[0])
    else:
        nodes = f"{job.nodes[0]}:{job.nodes[1]}"
    settings = {"--nnodes": nodes, "--rdzv-id": job.run_id}
    # Overwrite the settings that a stranger may have written first.
    if job.is_host:
        store.set(_SETTINGS, job.secret.sign("settings", settings).decode())
        return
    try:
        theirs = job.secret.read("settings", store.get(_SETTINGS))
    except SignatureError as error:
        raise ConfigError(
            f"--rdzv-secret-file, or {SECRET_VARIABLE}: the secret here is not that of the launcher at {job.endpoint}; "
            "give all launchers the same one"
        ) from error
    except RuntimeError as error:
        raise LockstepError(
            f"no launcher has written its settings at {job.endpoint}; check that node 0's still runs, and --master-port"
        ) from error
    for flag, value in settings.items():
        if value != theirs[flag]:
            refused = f"{socket.gethostname()} with {flag} {value}"
            # Node 0 may belong to another run, so only report the difference.
            store.set(_REFUSED, job.secret.sign("refused", refused).decode())
            raise ConfigError(f"{flag} is {value} here, and {theirs[flag]} on node 0; start all launchers alike")


def _host_key(address: str, pid: int) -> str:
    return f"lockstep/host-{address}-{pid}"


def join_seconds(job: Job) -> float:
    """Return how long a launcher waits for the others."""
    return float(job.options.get("join_timeout", _JOIN_SECONDS))


class OneNode(RendezvousHandler):
    """The rendezvous of a single launcher, which meets nobody.

    Its stores are in this process, and nothing listens.

    Args:
        job: gives the address that ranks listen on.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin a round."""
        store = HashStore()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, local_address(self._job)))

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks share the launcher's store."""
        return False

    def get_backend(self) -> str:
        """Return the backend's name."""
        return "static"

    def is_closed(self) -> bool:
        """Whether no further round follows."""
        return False

    def set_closed(self) -> None:
        """Close the rendezvous: no further round follows."""

    def num_nodes_waiting(self) -> int:
        """Count the nodes that wait for the next round."""
        return 0

    def get_run_id(self) -> str:
        """Return --rdzv-id."""
        return self._job.run_id

    def shutdown(self) -> bool:
        """Close it, and return whether the others know."""
        return True


class NodeRendezvous(RendezvousHandler):
    """Torch's rendezvous, which also reports the missing nodes.

    Args:
        handler: torch's.
        store: that of its c10d backend; None with another backend.
        say: prints a line.
    """

    def __init__(
        self, handler: RendezvousHandler, job: Job, store: TCPStore | None, say: Callable[[str], None]
    ) -> None:
        self._handler = handler
        self._job = job
        self._store = store
        self._say = say
        self._counter = _WaitingCounter(handler)
        self._has_warned = False
        # The last description: torch removes those who waited for too long.
        self._last = ""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other launchers.

        Raises:
            LockstepError: not enough came in time.
            RendezvousError: the meeting point is closed or gone.
        """
        # A count from before this round would cause another round.
        self._counter = _WaitingCounter(self._handler)
        met = threading.Event()
        threading.Thread(target=self._report, args=(met,), name="lockstep-nodes", daemon=True).start()
        # A busy node may answer late. The longer timeout lasts for the rendezvous only.
        if self._store:
            self._store.set_timeout(timedelta(seconds=_MEET_SECONDS))
        try:
            return self._handler.next_rendezvous()
        except RendezvousTimeoutError as error:
            limit = join_seconds(self._job)
            raise LockstepError(
                f"the nodes did not meet within {limit:g} s: {self._last or self._describe()}"
            ) from error
        finally:
            met.set()
            # A short timeout again: this launcher must poll its processes.
            if self._store and not self._job.is_host:
                self._store.set_timeout(timedelta(seconds=_READ_SECONDS))

    def _report(self, met: threading.Event) -> None:
        deadline = time.monotonic() + join_seconds(self._job)
        while not met.wait(_REPORT_SECONDS):
            self._last = self._describe()
            self._say(f"waiting: {self._last}; {max(0.0, deadline - time.monotonic()):.0f} s left")

    def _describe(self) -> str:
        """Describe who has come, and what to check."""
        least, most = self._job.nodes
        # torch has no public access to the state. Both names are private, and the same since torch 2.11.
        holder: Any = getattr(self._handler, "_state_holder", None)
        if holder is None:
            return f"fewer than {least} nodes have come to {self._job.endpoint}; check the other launchers"
        state = holder.state
        this_node = getattr(self._handler, "_this_node", None)
        nodes = {*state.participants, *state.wait_list} | ({this_node} if this_node else set())
        names = sorted(map(self._name, nodes))
        came = f"{len(names)} of {least if least == most else f'{least} to {most}'} nodes came ({', '.join(names)})"
        if state.complete and len(state.participants) >= most and this_node not in state.participants:
            return f"{came}, and the run needs no more: end this launcher, or wait until a node is lost"
        if state.complete:
            return f"{came}; the others have not left the round before"
        if len(names) >= least:
            return f"{came}; more may come, within the last_call_timeout of --rdzv-conf"
        # A refused launcher has left a note for the others.
        if refused := self._read("refused", _REFUSED, self._job.secret):
            came += f"; refused: {refused}"
        return f"{came}; check that the launchers of the others run, with --master-addr and --master-port of this one"

    def _name(self, node: Any) -> str:
        host = self._read("host", _host_key(node.addr, node.pid), self._job.run_secret)
        return f"{host} {node.addr}".strip()

    def _read(self, purpose: str, key: str, secret: Secret) -> str:
        """Return a launcher's value; "" if there is none with this run's signature."""
        if self._store is None or not self._store.check([key]):
            return ""
        try:
            return str(secret.read(purpose, self._store.get(key)))
        except SignatureError:
            return ""

    def num_nodes_waiting(self) -> int:
        """Count the nodes that wait for the next round; 0 if that is not known."""
        if self._job.backend != "c10d" or not self._job.is_host:
            return self._counter.read()
        try:
            return int(self._handler.num_nodes_waiting())
        except RendezvousStateError:
            # The next round will fail because of it. This one needs no state.
            if not self._has_warned:
                text = f"at {self._job.endpoint} somebody without the launchers' secret has overwritten their state"
                self._say(f"{text}; the run continues, and can neither be restarted nor take nodes in")
            self._has_warned = True
            return 0

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks share the launcher's store."""
        return bool(self._handler.use_agent_store)

    def get_backend(self) -> str:
        """Return the backend's name."""
        return str(self._handler.get_backend())

    def is_closed(self) -> bool:
        """Whether no further round follows."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """Close the rendezvous: no further round follows."""
        # torch's method has no annotations.
        self._handler.set_closed()  # type: ignore[no-untyped-call]

    def get_run_id(self) -> str:
        """Return --rdzv-id."""
        return str(self._handler.get_run_id())

    def shutdown(self) -> bool:
        """Close it, and return whether the others know."""
        return bool(self._handler.shutdown())


class _WaitingCounter:
    """Counts the waiting nodes in a thread, every second.

    Over a broken link the count takes minutes, in which the launcher would not poll its processes.
    """

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler
        self._count = 0
        self._thread: threading.Thread | None = None

    def read(self) -> int:
        # Return each count once: torch starts a new round for it, and must not start a second one.
        """Return the newest count once, else 0."""
        count = self._count
        self._count = 0
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._poll, daemon=True)
            self._thread.start()
        return count

    def _poll(self) -> None:
        with contextlib.suppress(RendezvousError):
            self._count = self._handler.num_nodes_waiting()
        time.sleep(1.0)


def local_address(job: Job) -> str:
    """Return this node's address on the interface to the meeting point.

    Its host name may resolve to another interface.
    """
    host = job.endpoint.rpartition(":")[0]
    try:
        return route_to(host)
    except OSError as error:
        reason = f"{error.strerror or error}; check the address, and this node's network"
        raise ConfigError(f"--master-addr {host} cannot be reached from here: {reason}") from error
