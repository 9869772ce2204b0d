"""N processes on this machine, each a rank of one function.

    messages = start(work, 2, (argument,), folder=folder, patience=60.0)

They are forked from a server that has torch loaded. A rank that fails, dies or is silent for `patience` seconds ends
all of them: no process outlives the call, and none outlives the process that made the call.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lockstep.errors import ConfigError, LockstepError
from lockstep.world import World

__all__ = ["RankFailed", "start"]

_START = 180.0  # seconds until a process runs: the first of all waits for the server to load torch
_GRACE = 5.0  # seconds in which the other ranks may still say what they know, after one has failed
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed.tensor", "lockstep.verify.worker"]


class RankFailed(LockstepError):
    """A rank raised, died or was silent. `usage`: what was asked for cannot be done, so it is no fault of the code."""

    def __init__(self, message: str, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage


def start(
    function: Callable[..., None], size: int, args: tuple[Any, ...], *, folder: Path, device: str, patience: float
) -> None:
    """Runs `function(world, say, *args)` on each of `size` ranks to the end; `say()` tells that a rank is alive.

    Args:
        function: at module level.
        args: what can be pickled.
        folder: where each rank's output goes, as `rank-SIZE-RANK.log`.
        device: see `World.join`.
        patience: seconds without a word of any rank after which they are given up; also their collectives' timeout.

    Raises:
        RankFailed: see there; the first rank that failed is named.
        ConfigError: `args` cannot be pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # without effect where the server runs already
    listener = socket.create_server(("127.0.0.1", 0))  # any free port, on loopback only
    port = listener.getsockname()[1]
    wait_for = timedelta(seconds=patience)
    store = TCPStore(
        "127.0.0.1", port, None, True, wait_for, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    ranks: list[tuple[Any, Connection]] = []
    try:
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            given = (theirs, function, _environment(rank, size, port), str(folder), device, patience, args)
            process = context.Process(target=_rank, args=given)  # not a daemon: it may have loader processes
            ranks.append((process, mine))
            _launch(process)
            theirs.close()
        _watch([pipe for _, pipe in ranks], patience, folder)
    finally:
        for process, pipe in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
            pipe.close()
        del store  # after the ranks: it is their meeting point


def _serve() -> None:
    """Starts the server, unless it runs. It and its ranks ignore Ctrl-C, which a terminal sends to all: we end them."""
    if threading.current_thread() is not threading.main_thread():  # where Python sets no handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()  # waits for nothing: torch is loaded while the first rank is asked for
    finally:
        signal.signal(signal.SIGINT, before)


def _launch(process: Any) -> None:
    try:
        _serve()
        process.start()
    except (AttributeError, TypeError, ImportError) as error:
        raise ConfigError(
            f"the task cannot be sent to other processes ({error}): define its class at the top of a module, or run "
            "verify under torchrun"
        ) from error
    except RuntimeError as error:
        if "bootstrapping phase" not in str(error):
            raise
        raise SystemExit(1) from None  # this is a rank, which imports a script without a guard: its parent says so
    except Exception as error:
        if "pickle" not in f"{type(error).__name__} {error}".lower():
            raise
        raise ConfigError(f"the task cannot be sent to other processes: {error}; define it in a module") from error


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {
        **{name: str(number) for name, number in own.items()},
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already, in the calling process
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the rank itself: helper processes would outlive it
    }


def _watch(pipes: list[Any], patience: float, folder: Path) -> None:
    """Until every rank has ended well; raises for the first that has not."""
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + _START + patience
    failed: list[tuple[float, int, str, bool]] = []
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in cast(list[Connection], ready):
            rank = waiting[pipe]
            try:
                word: tuple[Any, ...] = pipe.recv()
            except EOFError:  # it died without a word, which came before whatever the others say
                word = ("failed", 0.0, *_death(folder, len(pipes), rank))
            if word[0] == "alive" and not failed:
                deadline = time.monotonic() + patience
                continue
            if word[0] == "failed":
                failed.append((word[1], rank, word[2], word[3]))
                deadline = min(deadline, time.monotonic() + _GRACE)
            if word[0] != "alive":
                del waiting[pipe]
    if failed:
        _, rank, text, usage = min(failed)
        raise RankFailed(f"rank {rank} of {len(pipes)}: {text}", usage)
    if waiting:
        raise RankFailed(f"ranks {sorted(waiting.values())} of {len(pipes)} said nothing for {patience:g} s")


def _death(folder: Path, size: int, rank: int) -> tuple[str, bool]:
    """(what to say of a rank that died, whether the caller is wrong): before its log there is only the import."""
    if not _log(folder, size, rank).exists():
        text = "its process could not import the calling script or the module of the task: a script that calls "
        return text + 'lockstep.verify has to do so below `if __name__ == "__main__":`', True
    return f"died; the end of its output: {_tail(folder, size, rank)}", False


def _tail(folder: Path, size: int, rank: int) -> str:
    with contextlib.suppress(OSError):
        lines = _log(folder, size, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "nothing"
    return "nothing"


def _log(folder: Path, size: int, rank: int) -> Path:
    return folder / f"rank-{size}-{rank}.log"


def _rank(
    pipe: Connection,
    function: Callable[..., None],
    environment: dict[str, str],
    folder: str,
    device: str,
    patience: float,
    args: tuple[Any, ...],
) -> None:
    """The life of one process. It leaves without Python's teardown, which could wait for a dead peer."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= environment
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if not Path(folder).exists():  # the caller was interrupted while it asked for this process
        os._exit(1)
    output = os.open(_log(Path(folder), size, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)  # kernels cut their sums by the number of threads
    lock = threading.Lock()

    def say(*word: Any) -> None:
        with lock:
            pipe.send(word or ("alive",))

    try:
        world = World.join(device, patience)
        function(world, say, *args)
        world.leave()
        cast(Any, multiprocessing.util)._run_finalizers(0)  # a compilation's semaphores, or Python warns of them
        say("ended")
    except BaseException as error:
        traceback.print_exc()  # into the rank's log
        first = 1.0 if getattr(error, "relayed", False) else 0.0  # a relayed error comes after its cause
        text = str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
        usage = getattr(error, "exit_code", 1) == 2
        say("failed", first * 1e12 + time.monotonic(), text.strip().splitlines()[0], usage)
    pipe.close()
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
