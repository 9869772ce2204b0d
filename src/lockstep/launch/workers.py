"""The launcher's temporary folder, which does not outlive it for ever, and the pipe by which its processes know it.

folder = private_folder()       held by a lock; those of launchers that are gone are removed
path = life_pipe(folder)        closed by the system when this process ends
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
    "Forked",
    "Preloaded",
    "life_pipe",
    "private_folder",
]


_MODULE = ("-m", "lockstep")  # how a command begins that can be started here
_LATER = ("lockstep.training.named_task",)  # what a run loads when it needs it
_READY, _BEGIN = b"r", b"b"
_LENGTH = 8  # bytes that give the length of a request
_BLAS = "OPENBLAS_NUM_THREADS"
_ANSWER = 2.0  # seconds in which a fork is made
_PID = 32  # bytes, more than any takes
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # of linux/prctl.h
_NAME = 15  # bytes of a name


class Forked:
    """A process that was forked: as much of `subprocess.Popen` as the launcher asks for.

    Attributes:
        pid: its process id; it is the first of a session of its own.
        returncode: its exit code, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The launcher's side; the launcher adopts orphans.

    Attributes:
        process: the one that is forked.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "lockstep.launch.workers", str(theirs.fileno())]
        environment = os.environ | {_BLAS: "1"}  # whose threads begin when numpy is loaded
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self._socket.settimeout(0.0)
        self._ready = False

    @staticmethod
    def serves(command: Sequence[str]) -> bool:
        """Whether `python COMMAND` can be started here: a command of lockstep's own, and no script."""
        return tuple(command[:2]) == _MODULE

    def is_ready(self) -> bool:
        """Whether it has loaded everything, and lives."""
        if not self._ready:
            with contextlib.suppress(OSError):
                self._ready = self._socket.recv(1) == _READY
        return self._ready and self.process.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Forked | None:
        """Start `python COMMAND`; None where it is not served, nothing is loaded yet, or no answer comes in time."""
        if not self.serves(command) or not self.is_ready():
            return None
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_ANSWER)
            with theirs:
                if not self._ask({"argv": list(command[2:]), "environment": dict(environment)}, theirs.fileno()):
                    return None
            try:
                pid = ours.recv(_PID)
            except OSError:
                pid = b""
            if not pid:
                return None
            with contextlib.suppress(OSError):  # it is gone already, as its code will say
                ours.sendall(_BEGIN)
            return Forked(int(pid))

    def _ask(self, request: Mapping[str, object], answers: int) -> bool:
        """Send a request and the descriptor that takes the answer; whether all of it was taken."""
        text = json.dumps(request).encode()
        self._socket.settimeout(_ANSWER)
        try:
            socket.send_fds(self._socket, [len(text).to_bytes(_LENGTH, "big")], [answers])
            self._socket.sendall(text)
        except OSError:  # the rest of a request that was cut off would be read as the next one
            self.end()
            return False
        return True

    def end(self) -> None:
        """End the process. Those that were forked from it live on."""
        self._ready = False
        self.process.kill()
        self.process.wait()
        self._socket.close()


def _serve(own: socket.socket) -> list[str]:
    """Load, and fork when asked to.

    Returns:
        What a new process is to run, in that process; [] in one that is of no use.

    Raises:
        ConnectionError: the launcher is gone.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # of the launcher; a fork is without it
    importlib.import_module("lockstep.commands.train").loaded()
    for module in _LATER:
        importlib.import_module(module)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a terminal's are not meant for it; the launcher ends it
    if len(os.listdir("/proc/self/task")) > 1:
        return []  # a fork would not be safe
    own.sendall(_READY)
    while True:
        head, descriptors, _, _ = socket.recv_fds(own, _LENGTH, 1, socket.MSG_WAITALL)
        text = own.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL) if head else b""
        if not text:
            return []
        request: dict[str, Any] = json.loads(text)
        with socket.socket(fileno=descriptors[0]) as launcher:
            middle = os.fork()
            if middle:
                os.waitpid(middle, 0)
                continue
            middle = os.getpid()
            if os.fork():
                os._exit(0)  # which makes an orphan of the new process
            own.close()
            while os.getppid() == middle:
                time.sleep(0.001)
            _be_new(request["environment"])
            launcher.sendall(str(os.getpid()).encode())
            return list(request["argv"]) if launcher.recv(1) == _BEGIN else []


def _be_new(environment: dict[str, str]) -> None:
    """What a process that was started, and not forked, would find."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setsid()
    named = f"lockstep {environment.get('RANK', '')}".encode()  # its command line stays that of this module
    ctypes.CDLL(None).prctl(_PR_SET_NAME, named[:_NAME])
    os.environ.clear()
    os.environ.update(environment)
    threads = (environment.get(_BLAS) or environment.get("OMP_NUM_THREADS", "")).partition(",")[0]
    wanted = int(threads) if threads.isdigit() else len(os.sched_getaffinity(0))
    if wanted > 1:
        threadpoolctl.threadpool_limits(wanted, user_api="blas")


if __name__ == "__main__":
    _argv = list[str]()
    with contextlib.suppress(ConnectionError):  # the launcher was killed
        _argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _argv:
        sys.argv[1:] = _argv
        runpy.run_module("lockstep", run_name="__main__", alter_sys=True)

_PREFIX = "lockstep-launch-"
_YOUNG = 60.0  # seconds; between its making and its lock a folder is nobody's


def private_folder() -> Path:
    """A new folder that only this user can look into, locked until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # 0700
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)  # no process started here inherits it
    for other in folder.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or a launcher's that lives
            if other != folder and time.time() - other.lstat().st_mtime > _YOUNG:
                _remove(other)
    return folder


def life_pipe(folder: Path) -> Path:
    """Make the pipe that `distributed.launcher_watch` waits on; its writing end is open until this process ends.

    Raises:
        LockstepError: the folder's file system has no named pipes.
    """
    path = folder / "launcher"
    try:
        os.mkfifo(path, 0o600)
        os.open(path, os.O_RDWR)  # no process started here inherits it; O_WRONLY would wait for a reader
    except OSError as error:
        raise LockstepError(f"cannot make a named pipe in {folder}: {error}; set TMPDIR to a local folder") from error
    return path


def _remove(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
