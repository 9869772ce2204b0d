"""Open the rendezvous where the nodes of a run meet.

It is torch's, but its store listens on one address, and a broken link does not block the launcher.
"""

import contextlib
import socket
import threading
import time

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.distributed.launcher import listen
from lockstep.distributed.membership import check_store
from lockstep.errors import ConfigError
from lockstep.launch.job import Job

__all__ = ["local_address", "open_rendezvous"]

_GREETING_SECONDS = 60.0  # seconds for the meeting point's greeting
_READ_SECONDS = 5  # seconds to wait for the meeting point to answer


def open_rendezvous(job: Job) -> RendezvousHandler:
    """Return torch's rendezvous, with a store that listens on the endpoint's address only."""
    host, _, port = job.endpoint.rpartition(":")
    settings = RendezvousParameters(
        backend=job.backend,
        endpoint=job.endpoint,
        run_id=job.run_id,
        min_nodes=job.nodes[0],
        max_nodes=job.nodes[1],
        local_addr=local_address(job),
        **job.options,
    )
    if job.backend != "c10d" or not job.is_host:
        if job.backend == "c10d":
            check_store(host, int(port), _GREETING_SECONDS, f"--master-addr {host} --master-port {port}")
            settings.config.setdefault("is_host", "0")  # torch compares addresses, and two launchers may share a host
        settings.config.setdefault("read_timeout", str(_READ_SECONDS))
        return _count_in_thread(get_rendezvous_handler(settings))
    listener = listen(host, int(port))
    if listener is None:
        raise ConfigError(
            f"--master-addr {host} is not an address of this node, and --node-rank 0 needs one of its own"
        )
    store = TCPStore(
        host, listener.getsockname()[1], None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return create_handler(store, C10dRendezvousBackend(store, job.run_id), settings)


def _count_in_thread(handler: RendezvousHandler) -> RendezvousHandler:
    """Make a handler count waiting nodes in a thread, every second.

    Over a broken link the count takes minutes, in which the launcher would not poll its processes.
    """
    ask, result = handler.num_nodes_waiting, {"count": 0}
    threads: list[threading.Thread] = []

    def poll() -> None:
        with contextlib.suppress(RendezvousError):
            result["count"] = ask()
        time.sleep(1.0)

    def waiting() -> int:
        if not threads or not threads[0].is_alive():
            threads[:] = [threading.Thread(target=poll, daemon=True)]
            threads[0].start()
        count, result["count"] = result["count"], 0
        return count

    handler.num_nodes_waiting = waiting  # type: ignore[method-assign]
    return handler


def local_address(job: Job) -> str:
    """Return this node's address on the interface to the meeting point.

    Its host name may resolve to another interface.
    """
    host, _, port = job.endpoint.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port) or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--master-addr {host} cannot be reached from here: {error.strerror or error}") from error
