"""Run one function on N processes of this machine, each a rank.

    def total(world, say, number):                          # at module level
        return sum(world.gather(number + world.rank))

    results = start(total, 2, (10,), patience=60.0)         # [21, 21], by rank

Used by proofs, tests and benchmarks. The processes are forked from a server that has torch loaded, so a start takes a
fraction of a second. A rank that fails, dies or is silent for `patience` seconds ends all of them. No process outlives
the call, or the process that made the call. `lockstep.launch` starts a user's own function the same way
(`as_launcher`).

What a notebook's cell defines is not importable, so cloudpickle sends it by value.
"""

import contextlib
import faulthandler
import gc
import importlib
import math
import multiprocessing
import multiprocessing.reduction
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch

# torch's stub lacks the name.
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lockstep.distributed.launcher import compile_threads
from lockstep.distributed.world import World
from lockstep.errors import SETTINGS, ConfigError, LockstepError, UsageError, user_traceback

__all__ = ["RankFailure", "dump_result", "is_importable_main", "start"]

# Seconds until a process runs: the very first waits for the server to load torch.
_START = 180.0
# Seconds for the other ranks to report, after one has failed.
_GRACE = 5.0
# DTensor imports _dynamo, which takes 1.5 s: load it once, in the server.
_PRELOADED = ("torch", "torch._dynamo", "torch.distributed.tensor", "lockstep.distributed.world")


class RankFailure(LockstepError):
    """A rank raised an error, died or was silent.

    Attributes:
        rank: the first such rank.
        usage: the request is invalid, so the code is not at fault.
        details: by rank, information in addition to the message: a traceback, or the stack of a silent rank.
    """

    def __init__(self, message: str, rank: int, usage: bool = False, details: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.usage = usage
        if usage:
            self.exit_code = UsageError.exit_code
        self.details = details or {}


class _RankSpec(NamedTuple):
    """The arguments of one process.

    Attributes:
        work: the function and its arguments.
    """

    work: Any
    environment: dict[str, str]
    device: str
    patience: float
    folder: Path
    logged: bool
    before: Callable[[], None] | None
    # Whether messages name settings as flags, as in the calling process.
    flags: bool
    # The calling process's, for the rank's own processes; None: Python's default.
    start_method: str | None
    as_launcher: bool


class _FailureReport(NamedTuple):
    """One rank's failure; the smallest caused the others."""

    follows: bool
    when: float
    rank: int
    text: str
    usage: bool
    details: str


# A public function: its many settings are keywords with defaults.
def start(  # noqa: PLR0913
    function: Callable[..., Any],
    size: int,
    args: tuple[Any, ...] = (),
    *,
    device: str = "cpu",
    patience: float = 60.0,
    folder: Path | None = None,
    preload: Sequence[str] = (),
    before: Callable[[], None] | None = None,
    name: str = "the function",
    as_launcher: bool = False,
) -> list[Any]:
    """Run `function(world, say, *args)` on `size` ranks; return the results by rank.

    Args:
        function: at module level; calls `say()` to show that its rank is alive.
        size: number of ranks.
        args: picklable arguments.
        device: see `World.join`.
        patience: seconds without a sign of life from any rank before giving up; also the timeout of their collectives.
        folder: where each rank's output goes, as `rank-SIZE-RANK.log`; None: with the caller's.
        preload: modules that the server loads once for all ranks; no effect if it is already running.
        before: called in each process before it joins the others.
        name: the caller's name for `function` with its arguments, for errors.
        as_launcher: run `function(*args)`, which joins the ranks itself, as under `lockstep launch`: ranks may be
            silent for any time, and receive the signals of this process.

    Raises:
        RankFailure: names the first rank that failed.
        KeyboardInterrupt: a second Ctrl-C, or one before all ranks run.
        ConfigError: `args` cannot be pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *preload])
    # Listen on loopback only, on any free port; the store takes the socket over.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    wait_for = timedelta(seconds=patience)
    store = TCPStore(
        "127.0.0.1", port, None, True, wait_for, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    ranks: list[tuple[Any, Connection]] = []
    running: set[int] = set()
    work = _sendable((function, args), name)
    limit = math.inf if as_launcher else patience
    with tempfile.TemporaryDirectory() as temporary:
        output_folder = folder or Path(temporary)
        try:
            for rank in range(size):
                receiver, sender = context.Pipe(duplex=False)
                variables = _environment(rank, size, port)
                spec = _RankSpec(
                    *(
                        work,
                        variables,
                        device,
                        patience,
                        output_folder,
                        folder is not None,
                        before,
                        SETTINGS.flags,
                    ),
                    multiprocessing.get_start_method(allow_none=True),
                    as_launcher,
                )
                # The process is no daemon, because it may have loader processes of its own.
                process = context.Process(target=_run_rank, args=(sender, spec))
                ranks.append((process, receiver))
                _launch(process, name)
                sender.close()
            with _forward_signals(ranks, running) if as_launcher else contextlib.nullcontext():
                return _collect(ranks, limit, output_folder, folder is not None, running)
        finally:
            for process, pipe in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
                pipe.close()
            # Close the store after the ranks: it is their meeting point.
            del store


class _ByValue:
    """A pickle that defines classes and functions, loaded where it arrives."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


def is_importable_main() -> bool:
    """Whether new processes can import this program: not where a user types it, as in a notebook."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None


def _sendable(work: Any, name: str) -> Any:
    """Return `work`, by value if it may refer to what other processes cannot import.

    Raises:
        ConfigError: it cannot be pickled, or cloudpickle is missing.
    """
    if is_importable_main():
        return work
    with contextlib.suppress(Exception):
        # A class or function of a module is found there by its name.
        if b"__main__" not in pickle.dumps(work):
            return work
    try:
        return _ByValue(importlib.import_module("cloudpickle").dumps(work))
    except ImportError:
        raise ConfigError(
            f"{name} is defined in a notebook or at a prompt, where other processes cannot import it: install "
            "cloudpickle (the extra notebook of torch-lockstep), or write it into a file and import that"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to other processes ({error}): create what it uses within the function, or write it "
            "into a file and import that"
        ) from error


def dump_result(result: Any) -> bytes:
    """Pickle a rank's result, which may be an object of a class that was sent by value."""
    with contextlib.suppress(ImportError):
        return bytes(importlib.import_module("cloudpickle").dumps(result))
    return pickle.dumps(result)


@contextlib.contextmanager
def _forward_signals(ranks: list[tuple[Any, Connection]], running: set[int]) -> Iterator[None]:
    """Send Ctrl-C and SIGTERM on to the ranks, which save and end; a second Ctrl-C, or an early one, raises.

    Python sets signal handlers in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        # Before all ranks run there is nothing to save; the second time the user does not want to wait.
        if number == signal.SIGINT:
            interrupts.append(number)
            if len(interrupts) > 1 or len(running) < len(ranks):
                signal.default_int_handler(number, frame)
        for process, _ in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve() -> None:
    """Start the server unless it runs, with Ctrl-C ignored there and in its ranks.

    This process ends them.
    """
    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # Does not wait: torch loads in the server while the first rank is requested.
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _launch(process: Any, name: str) -> None:
    try:
        _serve()
        process.start()
    except OSError:
        raise
    except Exception as error:
        # multiprocessing sets the private `_inheriting` while a new process imports the caller's script.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A script without a main guard starts ranks in each rank: end here, and the parent reports it.
            raise SystemExit(1) from None
        if not _is_of_pickle(error):
            raise
        raise ConfigError(
            f"{name} cannot be sent to other processes ({error}): define its class at module level, or start the "
            "ranks with torchrun"
        ) from error


def _is_of_pickle(error: Exception) -> bool:
    """Whether an object could not be pickled, by the traceback: error classes vary too much."""
    modules = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        modules.append(frame.f_globals.get("__name__"))
    return multiprocessing.reduction.__name__ in modules


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # The store already runs in the calling process, so no rank opens another.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _collect(
    ranks: list[tuple[Any, Connection]], patience: float, folder: Path, logged: bool, running: set[int]
) -> list[Any]:
    """Collect all ranks' results; raise for the first rank that failed.

    Args:
        running: filled with the ranks that run.
    """
    pipes = [pipe for _, pipe in ranks]
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    failed: list[_FailureReport] = []
    deadline = time.monotonic() + _START
    while waiting and (ready := wait(list(waiting), _seconds_until(deadline))):
        for pipe in cast(list[Connection], ready):
            rank = waiting[pipe]
            try:
                event, content = pipe.recv()
            except EOFError:
                # The rank died without a report. Its time 0.0 sorts it before the errors that it caused in others.
                text = _describe_death(ranks[rank][0], folder, len(pipes), rank, rank in running, logged)
                event = "failed"
                content = _FailureReport(False, 0.0, rank, text, rank not in running, "")
            if event == "alive":
                running.add(rank)
                # Importing torch may take long. The ranks' patience starts once all run.
                if len(running) == len(pipes) and not failed:
                    deadline = time.monotonic() + patience
                continue
            del waiting[pipe]
            if event == "failed":
                failed.append(content)
                deadline = min(deadline, time.monotonic() + _GRACE)
            else:
                results[rank] = content
    if failed:
        cause = min(failed)
        details = {}
        for report in sorted(failed):
            details[report.rank] = report.details or report.text
        raise RankFailure(f"rank {cause.rank} of {len(pipes)}: {cause.text}", cause.rank, cause.usage, details)
    if waiting:
        late = sorted(waiting.values())
        stacks = {rank: _text(_stack(folder, len(pipes), rank)) for rank in late}
        raise RankFailure(
            f"ranks {late} of {len(pipes)} gave no sign of life for {patience:g} s", late[0], details=stacks
        )
    return results


def _seconds_until(deadline: float) -> float | None:
    if deadline == math.inf:
        return None
    return max(0.0, deadline - time.monotonic())


def _describe_death(process: Any, folder: Path, size: int, rank: int, ran: bool, logged: bool) -> str:
    """Describe a rank that died; one that never ran failed in an import."""
    if not ran:
        text = "its process could not import the calling script or the module of the task: a script that starts "
        return text + 'processes must do so under `if __name__ == "__main__":`'
    if not logged:
        # Its pipe closes a little before the process has ended.
        process.join(_GRACE)
        code = process.exitcode
        if code is None:
            how = "killed"
        else:
            if code < 0:
                how = f"killed by {signal.Signals(-code).name}"
            else:
                how = f"exit code {code}"
        return f"died without an exception ({how})"
    lines = _text(_log(folder, size, rank)).strip().splitlines()
    return f"died; the end of its output: {lines[-1][:300] if lines else 'nothing'}"


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _log(folder: Path, size: int, rank: int) -> Path:
    return folder / f"rank-{size}-{rank}.log"


def _stack(folder: Path, size: int, rank: int) -> Path:
    return folder / f"rank-{size}-{rank}.stack"


def _run_rank(pipe: Connection, spec: _RankSpec) -> None:
    """Run one rank, and exit without Python's teardown.

    The teardown could wait for a dead peer.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= spec.environment
    SETTINGS.flags = spec.flags
    # Python passes the start method on. A spawned loader process would load torch again; a run's are forked.
    multiprocessing.set_start_method(spec.start_method, force=True)
    rank = int(spec.environment["RANK"])
    size = int(spec.environment["WORLD_SIZE"])
    # The caller was interrupted while it started this process, and has removed the folder.
    if not spec.folder.exists():
        os._exit(1)
    if spec.logged:
        output = os.open(_log(spec.folder, size, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
    stack = _stack(spec.folder, size, rank).open("w")
    lock = threading.Lock()

    def send(*word: Any) -> None:
        with lock:
            pipe.send(word)

    def say() -> None:
        if spec.as_launcher:
            send("alive", None)
            return
        # Write the stack of a silent rank a little before the caller gives up.
        faulthandler.dump_traceback_later(0.9 * spec.patience, file=stack)
        send("alive", None)

    if spec.as_launcher:
        # A terminal and a notebook signal the whole group, and the calling process sends the signal on.
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Leaving a world ends with a garbage collection: exempt the objects inherited from the server.
    gc.freeze()
    say()
    # Kernels split their sums by the number of threads, so one thread gives the same bits for any number of cores.
    torch.set_num_threads(1)
    _share_compilers(spec.device, size)
    try:
        if spec.before:
            spec.before()
        function, args = spec.work
        if spec.as_launcher:
            result = function(*args)
        else:
            world = World.join(spec.device, spec.patience)
            result = function(world, say, *args)
            world.leave()
        # A compilation leaves semaphores, and Python would warn of them. There is no public call for these finalizers.
        cast(Any, multiprocessing.util)._run_finalizers(0)
        faulthandler.cancel_dump_traceback_later()
        send("ended", result)
    except BaseException as error:
        faulthandler.cancel_dump_traceback_later()
        if spec.logged and not spec.as_launcher:
            traceback.print_exc()
        send("failed", _failure(rank, error, spec.as_launcher))
    pipe.close()
    os._exit(0)


def _share_compilers(device: str, ranks: int) -> None:
    """Compile kernels in the rank itself; on CUDA with its share of cores.

    The server has loaded torch's settings, so setting the variable alone has no effect. Processes that compile end
    with their rank, when their pipe breaks.
    """
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    by_device = device != "cpu" and torch.cuda.is_available()
    if by_device:
        threads = os.environ.get(name, str(compile_threads(ranks)))
    else:
        threads = "1"
    os.environ[name] = threads
    # No public name sets the number of compiling processes after torch's settings are loaded.
    settings: Any = importlib.import_module("torch._inductor.config")
    settings.compile_threads = int(threads)


def _failure(rank: int, error: BaseException, as_launcher: bool) -> _FailureReport:
    details = user_traceback(error) if as_launcher else traceback.format_exc()
    if isinstance(error, LockstepError):
        text = str(error)
        if as_launcher:
            details = ""
    else:
        text = f"{type(error).__name__}: {error}"
    # A relayed error comes after its cause, so it sorts behind it.
    follows = bool(getattr(error, "relayed", False))
    usage = getattr(error, "exit_code", 1) == 2
    return _FailureReport(follows, time.monotonic(), rank, text.strip().splitlines()[0], usage, details)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        # The sentinel is readable once the parent has ended, however it ended.
        wait([parent.sentinel])
        os._exit(1)
