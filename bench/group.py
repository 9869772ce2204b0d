"""A group of processes for a benchmark: `together(2, function, *arguments)` runs function(world, *arguments) on each.

What rank 0 returned is returned.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore

from lockstep.world import World

__all__ = ["together"]


def together(size, function, *arguments):
    """What function(world, *arguments) returned on rank 0. Ends with an error if a process does."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, wait = listener.getsockname()[1], timedelta(seconds=600)
    store = TCPStore("127.0.0.1", port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach())
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(r, size, port, results, function, arguments)) for r in range(size)]
    for process in ranks:
        process.start()
    found = None
    while any(process.is_alive() for process in ranks) or not results.empty():
        if not results.empty():
            found = results.get()
        ranks[0].join(0.05)
    del store  # after the ranks: it is their meeting point
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"the processes ended with {[process.exitcode for process in ranks]}")
    return found


def _rank(rank, size, port, results, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)
    world = World.join(device="auto", timeout=600)
    found = function(world, *arguments)
    if rank == 0:
        results.put(found)
    world.leave()
