"""A Python that has torch loaded: commands of tests start in a tenth of a second in place of three.

    subprocess.run([warm.python(), "-m", "lockstep", "train", ...])        # as with sys.executable

`python()` is the path of a small client. It hands arguments, environment, folder and standard streams to a server,
forked from the one that ranks are forked from. The server forks a process that becomes what a new interpreter would
be: `-c`, `-m` or a script as `__main__`, in a session of its own and in the client's namespaces (network, host name and
mounts). The client passes signals on and ends as that process does. Processes that the command starts with
`sys.executable` are forked too. What the client does not know (other flags, inherited files) it leaves to the real
interpreter.

Not for tests of how a process starts or is killed: the command's process is no child of whoever started it.
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import importlib
import io
import json
import multiprocessing
import os
import platform
import random
import runpy
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

import torch
from ranks import forget_exact_runs, run

from lockstep.trace.record import imports

__all__ = ["python"]

_CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys

words, code = sys.argv[1:], None
alone = not words or words[0] not in ("-c", "-m", "-u") and words[0].startswith("-")
if alone or any(int(name) > 2 and os.path.exists("/proc/self/fd/" + name) for name in os.listdir("/proc/self/fd")):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({place!r})
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
asked = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
server.sendmsg([len(asked).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(asked)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 32))
said = server.recv(4)
code = int.from_bytes(said, "big", signed=True) if said else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """The path of an interpreter whose processes are forked from one that has loaded torch and lockstep."""
    run(_nothing, 1)  # the server of ranks
    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    client, place = Path(folder, "python"), f"{folder}/socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen(64)
    client.write_text(_CLIENT.format(python=sys.executable, place=place))
    client.chmod(0o755)
    context = multiprocessing.get_context("forkserver")
    forget_exact_runs()
    context.Process(target=_serve, args=(listening, str(client)), daemon=True).start()
    listening.close()
    return str(client)


def _nothing(world):
    pass


def _serve(listening, client):
    """Fork a process for each client, until the tests end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        ready = wait([listening, multiprocessing.parent_process().sentinel])
        if listening not in ready:
            os._exit(0)
        connection = listening.accept()[0]
        if not os.fork():
            _keep(connection, client)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(connection, client):
    """Run what a client asks for; pass its signals on, and the exit code back."""
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    left, asked = int.from_bytes(head, "big"), b""
    while len(asked) < left:
        asked += connection.recv(left - len(asked))
    pid = os.fork()
    if not pid:
        caller = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        _become(client, caller, files, *json.loads(asked))
    for file in files:
        os.close(file)
    ended, watched = os.pidfd_open(pid), [connection]
    while ended not in (ready := wait([ended, *watched])):
        signals = _read(connection) if connection in ready else b""
        for number in signals:
            os.kill(pid, number)
        if not signals:  # the client was killed
            watched = []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _read(connection):
    try:
        return connection.recv(16)
    except OSError:
        return b""


def _become(client, caller, files, words, environment, folder):
    """Be the interpreter that the process `caller` asked for, to its end."""
    code = 70
    try:
        os.setsid()
        _enter_namespaces(caller)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 4096)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        _forget()
        buffered = words[:1] != ["-u"] and not environment.get("PYTHONUNBUFFERED")
        _open_streams(buffered)
        sys.executable = client
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        code = _run(words[1:] if words[:1] == ["-u"] else words)
    except BaseException:
        traceback.print_exc()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _enter_namespaces(pid):
    """Move into the namespaces of a process, such as those of a node of tests/namespaces.py."""
    for name in ("net", "uts", "mnt"):  # the last one brings other folders
        path = f"/proc/{pid}/ns/{name}"
        if os.readlink(path) != os.readlink(f"/proc/self/ns/{name}"):
            with open(path) as file:
                assert not ctypes.CDLL(None).setns(file.fileno(), 0), path


def _forget():
    """Lose what was inherited from the processes that this one was forked from."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    main = multiprocessing.process.BaseProcess.__new__(multiprocessing.process.BaseProcess)
    key = multiprocessing.process.AuthenticationString(os.urandom(32))
    main.__dict__ |= {"_identity": (), "_name": "MainProcess", "_parent_pid": None, "_popen": None, "_closed": False}
    main._config = {"authkey": key, "semprefix": "/mp"}
    multiprocessing.process._current_process, multiprocessing.process._parent_process = main, None
    multiprocessing.process._children, multiprocessing.process.ORIGINAL_DIR = set(), os.getcwd()
    multiprocessing.set_start_method(None, force=True)
    forkserver._forkserver.__init__()
    for name in ("_fd", "_pid"):
        setattr(resource_tracker._resource_tracker, name, None)
    random.seed()
    platform._uname_cache = None  # the host name of the tests
    for name in ("huggingface_hub.constants", "datasets.config"):  # what they are, variables said at their import
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    for name in [name for name in sys.modules if name == "__mp_main__" or name in ("warm", "ranks")]:
        del sys.modules[name]


def _open_streams(buffered):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        binary = open(  # noqa: SIM115
            number, "rb" if number == 0 else "wb", -1 if buffered or not number else 0, closefd=False
        )
        lines = number == 2 or os.isatty(number)
        errors = "backslashreplace" if number == 2 else None
        stream = io.TextIOWrapper(binary, errors=errors, line_buffering=lines, write_through=not buffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words):
    """The exit code of the program."""
    try:
        _site()
        sys.argv = ["-c", *words[2:]] if words[0] == "-c" else words[1:] if words[0] == "-m" else words
        module = sys.modules["__main__"] = ModuleType("__main__")
        module.__builtins__ = builtins
        if words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(words[1])
        elif words[0] == "-c":
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), module.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            module.__file__ = words[0]
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), module.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:  # Python honours it there too
            code = end.code
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code if code < 0 else code & 0xFF


def _site():
    """What Python does at its start with PYTHONPATH and a `sitecustomize` there, such as that of `lockstep trace`."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    for finder in [each for each in sys.meta_path if isinstance(each, imports._Finder)]:
        # loaded before it could watch; torch first, from which on a listener exists
        for name in sorted(finder._pending & sys.modules.keys(), key=lambda name: name != "torch"):
            finder._attach(sys.modules[name], name)
