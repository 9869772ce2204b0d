"""Open the rendezvous where the nodes of a run meet.

Torch's own, but its store listens on one address, and a broken link does not block the launcher.
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

__all__ = ["local_address", "meeting"]

_ANSWERED = 60.0  # seconds for the meeting point's greeting
_READ = 5  # seconds to wait for the meeting point to answer


def meeting(job: Job) -> RendezvousHandler:
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
            check_store(host, int(port), _ANSWERED, f"--master-addr {host} --master-port {port}")
        settings.config.setdefault("read_timeout", str(_READ))
        return _patient(get_rendezvous_handler(settings))
    listener = listen(host, int(port))
    if listener is None:
        raise ConfigError(f"--master-addr {host} is no address of this node, and --node-rank 0 must hold it")
    store = TCPStore(
        host, listener.getsockname()[1], None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return create_handler(store, C10dRendezvousBackend(store, job.run_id), settings)


def _patient(handler: RendezvousHandler) -> RendezvousHandler:
    """Make a handler count waiting nodes in a thread, every second.

    Over a broken link the count takes minutes. The launcher would not look at its processes until then, and they know
    better what is wrong.
    """
    ask, known = handler.num_nodes_waiting, {"count": 0}
    asking: list[threading.Thread] = []

    def find() -> None:
        with contextlib.suppress(RendezvousError):
            known["count"] = ask()
        time.sleep(1.0)

    def waiting() -> int:
        if not asking or not asking[0].is_alive():
            asking[:] = [threading.Thread(target=find, daemon=True)]
            asking[0].start()
        found, known["count"] = known["count"], 0
        return found

    handler.num_nodes_waiting = waiting  # type: ignore[method-assign]
    return handler


def local_address(job: Job) -> str:
    """Return this node's address on the interface to the meeting point.

    Its host name may resolve to another interface.
    """
    host, _, port = job.endpoint.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port) or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(address)  # sends nothing
            return str(towards.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--master-addr {host} cannot be reached from here: {error.strerror or error}") from error
