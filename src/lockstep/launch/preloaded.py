"""A process that has loaded what `lockstep train` needs, and of which new ones are made in a moment, by a fork.

    preloaded = Preloaded()                                     # in the launcher: begins to load beside the run
    process = preloaded.start(command, environment)             # like a Popen; None: not ready, start it otherwise

Loading torch takes seconds of a processor, in which those who wait for a new rank compute what would be its work, and
which they lack where all processors are busy. The process has one thread and has computed nothing, so that a fork of it
is safe; it is asked over a socket, makes its children, and says how they ended. A child begins when the launcher has
heard of it and still wants it: one that came too late, when another way was taken, must not be there twice.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import threadpoolctl

__all__ = ["Forked", "Preloaded"]

_MODULE = ("-m", "lockstep")  # how a command begins that can be started here
_LATER = ("lockstep.tasks.named",)  # what a run loads when it needs it
_READY = {"ready": True}
_BLAS = "OPENBLAS_NUM_THREADS"
_ANSWER = 2.0  # seconds in which a fork is made
_PART = 1 << 16
_PR_SET_NAME, _NAME = 15, 15  # of linux/prctl.h; bytes of a name


class Forked:
    """A process that was forked: as much of `subprocess.Popen` as the launcher asks for.

    Attributes:
        pid: its process id; it is the first of a session of its own.
        returncode: its exit code, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int, preloaded: "Preloaded") -> None:
        self.pid, self._preloaded = pid, preloaded
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._preloaded.code_of(self.pid)
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
    """The launcher's side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "lockstep.launch.preloaded", str(theirs.fileno())]
        environment = os.environ | {_BLAS: "1"}  # whose threads begin when numpy is loaded
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self._socket.setblocking(False)
        self._rest, self._codes = b"", dict[int, int]()
        self._ready, self._pid, self._asked, self._wanted = False, 0, 0, 0

    @staticmethod
    def serves(command: Sequence[str]) -> bool:
        """Whether `python COMMAND` can be started here: a command of lockstep's own, and no script."""
        return tuple(command[:2]) == _MODULE

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Forked | None:
        """Starts `python COMMAND`; None where it is not served, nothing is loaded yet, or no answer comes in time."""
        self._hear()
        if not self._ready or not self.serves(command):
            return None
        self._asked += 1
        self._pid, self._wanted = 0, self._asked
        self._say({"number": self._asked, "argv": list(command[2:]), "environment": dict(environment)})
        until = time.monotonic() + _ANSWER
        while not self._pid and self._ready and time.monotonic() < until:
            select.select([self._socket], [], [], 0.05)
            self._hear()
        self._wanted = 0
        return Forked(self._pid, self) if self._pid else None

    def _say(self, said: Mapping[str, object]) -> None:
        try:
            self._socket.setblocking(True)
            _say(self._socket, said)
            self._socket.setblocking(False)
        except OSError:
            self._ready = False

    def code_of(self, pid: int) -> int | None:
        """The exit code of a child; None while it runs. A child whose end nobody can tell any more counts as killed."""
        self._hear()
        if pid not in self._codes and self._process.poll() is not None and not _lives(pid):
            return -int(signal.SIGKILL)
        return self._codes.get(pid)

    def end(self) -> None:
        """Ends the process; its children are ended by whoever started them."""
        self._ready = False
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _hear(self) -> None:
        """Takes in what the process has said."""
        with contextlib.suppress(BlockingIOError, OSError):
            while part := self._socket.recv(_PART):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            said: dict[str, Any] = json.loads(line)
            if said == _READY:
                self._ready = True
            elif "code" in said:
                self._codes[said["pid"]] = said["code"]
            else:
                wanted = said["number"] == self._wanted
                self._pid = said["pid"] if wanted else self._pid
                self._say({"number": said["number"], "begins": wanted})
        if self._process.poll() is not None:
            self._ready = False


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _serve(own: socket.socket) -> list[str]:
    """Loads, and forks when asked to. It returns what a child is to run, in the child; [] where it is of no use any
    more. Raises ConnectionError where the launcher is gone."""
    importlib.import_module("lockstep.commands.train").loaded()
    for module in _LATER:
        importlib.import_module(module)
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's are not meant for it; the launcher ends it
    if len(os.listdir("/proc/self/task")) > 1:
        return []  # a fork would not be safe
    _say(own, _READY)
    heard, waiting = b"", dict[int, int]()  # by number, what tells a child that waits
    while True:
        readable, _, _ = select.select([own.fileno(), wakes], [], [])
        if wakes in readable:
            os.read(wakes, _PART)
        while (ended := _ended()) is not None:
            _say(own, {"pid": ended[0], "code": ended[1]})
        if own.fileno() not in readable:
            continue
        part = own.recv(_PART)
        if not part:
            return []
        heard += part
        while b"\n" in heard:
            line, _, heard = heard.partition(b"\n")
            asked: dict[str, Any] = json.loads(line)
            if "begins" in asked:
                with contextlib.suppress(BrokenPipeError), open(waiting.pop(asked["number"]), "wb") as child:
                    child.write(b"+" if asked["begins"] else b"-")
                continue
            ready, begun = os.pipe()
            begins, waiting[asked["number"]] = os.pipe()
            pid = os.fork()
            if not pid:
                _be_new(asked["environment"])
                for descriptor in (own.detach(), wakes, wake, ready, begun, *waiting.values()):
                    os.close(descriptor)
                with open(begins, "rb") as told:
                    return list(asked["argv"]) if told.read(1) == b"+" else []
            os.close(begun)
            os.close(begins)
            os.read(ready, 1)  # until it has a session of its own, by which it is ended
            os.close(ready)
            _say(own, {"number": asked["number"], "pid": pid})


def _ended() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _be_new(environment: dict[str, str]) -> None:
    """What a process that was started, and not forked, would find."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
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


def _say(own: socket.socket, said: Mapping[str, object]) -> None:
    own.sendall(json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    _argv = list[str]()
    with contextlib.suppress(ConnectionError):  # the launcher was killed
        _argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _argv:
        sys.argv[1:] = _argv
        runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
