"""Start workers for the launcher: fork them from a preloaded process, in a private folder.

folder = private_folder()       locked; also removes those of launchers that are gone
path = life_pipe(folder)        the system closes it when this process ends

`Preloaded` is the launcher's handle of a process that has loaded torch and the run's modules, so that a lost rank's
replacement starts fast. This module is also that process's program (`_serve`).
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import threadpoolctl

from lockstep.distributed.membership import STOP_SIGNALS
from lockstep.errors import LockstepError

__all__ = [
    "Preloaded",
    "life_pipe",
    "private_folder",
]


# The start of a command that can be forked.
_MODULE = ("-m", "lockstep")
# Modules that a run loads on demand.
_LATER = ("lockstep.training.start.named_task",)
# Single bytes: the preloaded process is ready, and the forked one may begin.
_READY = b"r"
_BEGIN = b"b"
# Bytes of a request's length.
_LENGTH = 8
_BLAS = "OPENBLAS_NUM_THREADS"
# Seconds for a fork.
_ANSWER = 2.0
# Bytes, enough for any process id.
_PID = 32
# Numbers of linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# Bytes of a process's name, the kernel's limit.
_NAME = 15


class ForkedProcess:
    """A forked process, with the part of `subprocess.Popen` that the launcher uses.

    Attributes:
        pid: its process id; it leads a session of its own.
        returncode: its exit code, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The launcher's handle of the preloaded process. The launcher must adopt orphans.

    Attributes:
        process: the preloaded one.
    """

    def __init__(self) -> None:
        self._socket, child_end = socket.socketpair()
        command = [sys.executable, "-m", "lockstep.launch.workers", str(child_end.fileno())]
        # OpenBLAS starts its threads when numpy is loaded, and a process with threads cannot be forked safely.
        environment = os.environ | {_BLAS: "1"}
        self.process = subprocess.Popen(command, pass_fds=[child_end.fileno()], env=environment, start_new_session=True)
        child_end.close()
        self._socket.settimeout(0.0)
        self._ready = False

    @staticmethod
    def can_fork(command: Sequence[str]) -> bool:
        """Whether `python COMMAND` can be forked: a command of lockstep's own, not a script."""
        return tuple(command[:2]) == _MODULE

    def is_ready(self) -> bool:
        """Whether the process has loaded everything, and is alive."""
        if not self._ready:
            with contextlib.suppress(OSError):
                self._ready = self._socket.recv(1) == _READY
        return self._ready and self.process.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str], stderr: str = "") -> ForkedProcess | None:
        """Start `python COMMAND` by a fork.

        Args:
            stderr: file for its standard error; "": the launcher's.

        Returns:
            None if the command cannot be forked, loading has not finished, or no answer comes in time.
        """
        if not self.can_fork(command) or not self.is_ready():
            return None
        own_end, child_end = socket.socketpair()
        with own_end:
            own_end.settimeout(_ANSWER)
            with child_end:
                request = {"argv": list(command[2:]), "environment": dict(environment), "stderr": stderr}
                if not self._request(request, child_end.fileno()):
                    return None
            try:
                pid = own_end.recv(_PID)
            except OSError:
                # The preloaded process is gone, or too slow.
                pid = b""
            if not pid:
                return None
            # The new process may have ended already; its exit code will show that.
            with contextlib.suppress(OSError):
                own_end.sendall(_BEGIN)
            return ForkedProcess(int(pid))

    def _request(self, request: Mapping[str, object], answers: int) -> bool:
        """Send a request and the descriptor for the answer; return whether that succeeded."""
        text = json.dumps(request).encode()
        self._socket.settimeout(_ANSWER)
        try:
            socket.send_fds(self._socket, [len(text).to_bytes(_LENGTH, "big")], [answers])
            self._socket.sendall(text)
        except OSError:
            # The rest of a truncated request would be read as the next one, so end the process.
            self.end()
            return False
        return True

    def end(self) -> None:
        """End the process; those forked from it continue."""
        self._ready = False
        self.process.kill()
        self.process.wait()
        self._socket.close()


def _serve(own: socket.socket) -> list[str]:
    """Load everything, then fork on request.

    Returns:
        In a new process, its arguments; [] in one that the launcher no longer needs.

    Raises:
        ConnectionError: the launcher is gone.
    """
    # The kernel ends this process when the launcher dies. Forks do not inherit that.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    importlib.import_module("lockstep.commands.train").import_training()
    for module in _LATER:
        importlib.import_module(module)
    for number in STOP_SIGNALS:
        # A terminal sends signals to all its processes; the launcher ends this one itself.
        signal.signal(number, signal.SIG_IGN)
    # A fork copies one thread only: locks that other threads hold would stay locked.
    if len(os.listdir("/proc/self/task")) > 1:
        return []
    own.sendall(_READY)
    while True:
        head, descriptors, _, _ = socket.recv_fds(own, _LENGTH, 1, socket.MSG_WAITALL)
        if head:
            text = own.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        else:
            text = b""
        if not text:
            return []
        request: dict[str, Any] = json.loads(text)
        with socket.socket(fileno=descriptors[0]) as launcher:
            # Fork twice: the new process becomes an orphan, which the launcher adopts as its own child.
            middle = os.fork()
            if middle:
                os.waitpid(middle, 0)
                continue
            middle = os.getpid()
            if os.fork():
                # Makes the new process an orphan.
                os._exit(0)
            own.close()
            # Wait until the launcher has adopted this process, since it polls the process as its child.
            while os.getppid() == middle:
                time.sleep(0.001)
            _reset_process(request["environment"], request["stderr"])
            launcher.sendall(str(os.getpid()).encode())
            # The launcher may have given up in the meantime. Then this process ends without running anything.
            if launcher.recv(1) == _BEGIN:
                return list(request["argv"])
            return []


def _reset_process(environment: dict[str, str], stderr: str) -> None:
    """Give a forked process the environment of a newly started one.

    Its standard error goes to the file `stderr`, if one is given.
    """
    if stderr:
        file = os.open(stderr, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 2)
        os.close(file)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setsid()
    # The command line stays that of this module, so the name shows which rank it is.
    name = f"lockstep {environment.get('RANK', '')}".encode()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name[:_NAME])
    os.environ.clear()
    os.environ.update(environment)
    threads = (environment.get(_BLAS) or environment.get("OMP_NUM_THREADS", "")).partition(",")[0]
    if threads.isdigit():
        count = int(threads)
    else:
        count = len(os.sched_getaffinity(0))
    # OpenBLAS was loaded with one thread.
    if count > 1:
        threadpoolctl.threadpool_limits(count, user_api="blas")


if __name__ == "__main__":
    _argv = list[str]()
    # The launcher was killed.
    with contextlib.suppress(ConnectionError):
        _argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _argv:
        sys.argv[1:] = _argv
        runpy.run_module("lockstep", run_name="__main__", alter_sys=True)

_PREFIX = "lockstep-launch-"
# Seconds. Between creation and lock a folder has no visible owner.
_YOUNG = 60.0


def private_folder() -> Path:
    """Create a folder readable by this user only, locked until this process ends.

    Also removes the folders of launchers that are gone.
    """
    # The folder has the mode 0700.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # The lock lasts until this process ends: no process started here inherits the descriptor.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)
    for candidate in folder.parent.glob(f"{_PREFIX}*"):
        # A folder of another user, or of a running launcher, cannot be removed.
        with contextlib.suppress(OSError):
            if candidate != folder and time.time() - candidate.lstat().st_mtime > _YOUNG:
                _remove(candidate)
    return folder


def life_pipe(folder: Path) -> Path:
    """Create the pipe that `end_with_launcher` waits on, open until this process ends.

    Raises:
        LockstepError: the folder's file system has no named pipes.
    """
    path = folder / "launcher"
    try:
        os.mkfifo(path, 0o600)
        # No process started here inherits the descriptor. O_WRONLY would wait for a reader.
        os.open(path, os.O_RDWR)
    except OSError as error:
        raise LockstepError(f"cannot create a named pipe in {folder}: {error}; set TMPDIR to a local folder") from error
    return path


def _remove(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
