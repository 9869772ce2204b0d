"""The one helper of all distributed tests: a plain function, run on N processes.

    def total(world, number):                       # at module level
        return sum(world.gather(number + world.rank))

    assert run(total, 2, 10) == [21, 21]            # the results by rank

The processes are forked from a server that has torch loaded already, so that a start costs a fraction of a second. A
hang is a failure, and no process outlives its test.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from lockstep.world import World

__all__ = ["RankError", "run"]

_processes = multiprocessing.get_context("forkserver")
# torch._dynamo is what the first DTensor would otherwise import in every process, for 1.5 s.
_processes.set_forkserver_preload(
    ["pytest", "hypothesis", "torch", "torch._dynamo", "torch.distributed.tensor", "lockstep.world"]
)

_START = 120.0  # seconds that a process may take to start
_GRACE = 5.0  # seconds that the other ranks have to end after one has failed


class RankError(AssertionError):
    """A rank raised, died or did not end. `rank` is the one that did so first; the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, device: str = "cpu"
) -> list[Any]:
    """What `function(world, *args)` returned on each of `world_size` processes (gloo, one thread each), by rank.

    Raises:
        RankError: a rank raised (its traceback is in the message), died, or had not ended after `timeout` seconds.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # any free port, on loopback only
    port = listener.getsockname()[1]
    wait_for = timedelta(seconds=timeout)
    store = TCPStore(
        "127.0.0.1", port, None, True, wait_for, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    stacks = tempfile.TemporaryDirectory()
    ranks = []
    try:
        for rank in range(world_size):
            mine, theirs = _processes.Pipe(duplex=False)
            given = (theirs, function, rank, world_size, port, timeout, stacks.name, device, args)
            process = _processes.Process(target=_rank, args=given, daemon=True)
            ranks.append((process, mine))
            process.start()
            theirs.close()
        return _collect([pipe for _, pipe in ranks], timeout, Path(stacks.name))
    finally:
        for process, pipe in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
            pipe.close()
        stacks.cleanup()
        del store  # after the ranks: it is their meeting point


def _collect(pipes: list[Connection], timeout: float, stacks: Path) -> list[Any]:
    for pipe in pipes:
        with contextlib.suppress(EOFError):  # it died; seen again below
            if pipe.poll(_START):
                pipe.recv()  # it runs; the first one of all waits until the server has loaded torch
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failed: list[tuple[float, int, str]] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                when, problem, result = pipe.recv()  # type: ignore[union-attr]
            except EOFError:  # it died without a word: whatever the others say, this came first
                when, problem, result = 0.0, "died without an exception (killed, or os._exit)", None
            results[rank] = result
            if problem:
                failed.append((when, rank, problem))
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failed:
        _, rank, problem = min(failed)
        others = "".join(f"\n--- then rank {other}: {text}" for _, other, text in sorted(failed)[1:])
        raise RankError(rank, f"rank {rank} of {len(pipes)}: {problem}{others}")
    if waiting:
        late = sorted(waiting.values())
        raise RankError(
            late[0], f"ranks {late} of {len(pipes)} had not ended after {timeout:g} s\n{_stack(stacks, late)}"
        )
    return [results[rank] for rank in range(len(pipes))]


def _stack(stacks: Path, ranks: list[int]) -> str:
    found = [(rank, stacks / str(rank)) for rank in ranks]
    return "\n".join(f"--- rank {rank} stood here:\n{file.read_text()}" for rank, file in found if file.exists())


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    timeout: float,
    stacks: str,
    device: str,
    args: tuple[Any, ...],
) -> None:
    """The life of one process. It leaves without Python's teardown, which could wait for a dead peer."""
    import torch

    pipe.send("started")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already, in the test's process
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    warnings.simplefilter("error" if device == "cpu" else "default")  # CUDA libraries have warnings of their own
    hung = open(f"{stacks}/{rank}", "w")  # noqa: SIM115 - held until the process ends
    faulthandler.dump_traceback_later(0.9 * timeout, file=hung)
    problem = result = None
    try:
        world = World.join(device=device, timeout=timeout)
        result = function(world, *args)
        world.leave()
    except BaseException:
        problem = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    try:
        pipe.send((time.monotonic(), problem, None if problem else result))
    except Exception:  # a result that cannot be sent
        pipe.send((time.monotonic(), traceback.format_exc(), None))
    pipe.close()
    os._exit(1 if problem else 0)
