"""Read a launcher's environment variables, and configure the processes that it starts.

rank = launcher_number("RANK", 0)           # from the environment; 0 if it is not set

`torch_variables` chooses a rank's environment. `listen`, `check_reachable` and `is_own_address` check addresses of the
meeting point. `end_with_launcher` ends a worker when its launcher dies.
"""

import errno
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping

from lockstep.errors import ConfigError

__all__ = [
    "LAUNCHER_VARIABLE",
    "OPENCV_THREADS",
    "allocator_variables",
    "check_reachable",
    "compile_threads",
    "cores",
    "end_with_launcher",
    "is_own_address",
    "launcher_is_gone",
    "launcher_number",
    "listen",
    "torch_variables",
]


def listen(host: str, port: int) -> socket.socket | None:
    """Listen on `host` alone; None if `host` is not an address of this machine.

    Args:
        port: 0 for any free port.

    Raises:
        ConfigError: the name does not resolve, or the port is in use or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"MASTER_ADDR {host}: the name does not resolve ({error.strerror})") from error
    try:
        return socket.create_server((address[0], port), family=family, backlog=512)
    except PermissionError as error:
        raise ConfigError(f"MASTER_PORT {port} on {host} is not allowed; choose one above 1023") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"MASTER_PORT {port} on {host} is in use by another process; choose another") from error
        return None


def check_reachable(name: str, host: str) -> None:
    """Raise ConfigError if node 0's name resolves to loopback on this node.

    Debian's installer writes such a line for the machine's own name. A loopback address given as a number, or as
    localhost, is intended: several "nodes" on one machine.
    """
    try:
        text = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror:
        return  # whoever connects to it reports that
    address = ipaddress.ip_address(str(text).partition("%")[0])
    if address.is_loopback and host != "localhost" and host != str(text):
        raise ConfigError(
            f"{name} {host} is {address} on this node, where no other node can reach it (see /etc/hosts); pass node "
            "0's network address, and set GLOO_SOCKET_IFNAME to the network interface if host names resolve to loopback"
        )


def is_own_address(host: str) -> bool:
    """Whether `host` is an address of this machine. Raises ConfigError if it does not resolve."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except socket.gaierror as error:
        raise ConfigError(f"--master-addr {host}: the name does not resolve ({error.strerror})") from error
    except OSError:
        return False
    return True


OPENCV_THREADS = "OPENCV_FOR_THREADS_NUM"  # read when OpenCV is imported

_MAX_COMPILERS = 32  # torch's own limit


def cores() -> int:
    """Count the cores that this process may run on.

    A Slurm without a task plugin binds nothing, so its count for this node is a limit too.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return min(count, int(granted)) if granted.isdecimal() and int(granted) else count


def compile_threads(ranks: int) -> int:
    """Return how many processes each rank may use to compile kernels.

    By default torch starts one per core in each rank.

    Args:
        ranks: number on this node.
    """
    return max(1, min(_MAX_COMPILERS, cores() // ranks))


LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"  # set by `lockstep launch` to the path of its pipe

_LAUNCHER_ENDED = threading.Event()


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher dies, so that it saves and ends.

    Does nothing if `lockstep launch` did not start this process, or on a second call.
    """
    path = os.environ.pop(LAUNCHER_VARIABLE, "")  # not inherited by this process's children
    if not path:
        return
    try:
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK it would wait for a launcher
    except FileNotFoundError:  # another launcher removed it after ours died
        _end()
        return
    os.set_blocking(pipe, True)
    threading.Thread(target=_wait, args=(pipe,), name="lockstep-launcher", daemon=True).start()


def launcher_is_gone() -> bool:
    """Whether the launcher that started this process has ended."""
    return _LAUNCHER_ENDED.is_set()


def _wait(pipe: int) -> None:
    os.read(pipe, 1)  # nobody writes: it returns when the launcher's end is closed
    _end()


def _end() -> None:
    _LAUNCHER_ENDED.set()
    os.kill(os.getpid(), signal.SIGTERM)


_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # CUDA's allocator reads these first


def allocator_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Let CUDA's allocator grow its segments, to avoid unusable gaps from varying shapes.

    Returns:
        {} if the user has configured it under any of its names, and on systems where torch would warn.
    """
    if sys.platform != "linux" or any(name in environ for name in (_ALLOCATOR, *_OLD_NAMES)):
        return {}
    return {_ALLOCATOR: "expandable_segments:True"}


def torch_variables(processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Choose the environment variables of a node's ranks.

    Args:
        processes: number of ranks on this node.
        environ: the launcher's.
    """
    return {
        **allocator_variables(environ),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # needed by exact sums, and read by cuBLAS only once in a process
        "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads(processes)),  # else each rank starts one per core
    }


def launcher_number(name: str, least: int) -> int:
    """Read a launcher's number from the environment; `least` if it is not set.

    Raises:
        ConfigError: it is not an integer of at least `least`.
    """
    text = os.environ.get(name, str(least))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(
            f"the environment variable {name} is '{text}'; it must be an integer >= {least}, as torchrun sets it"
        )
    return int(text)
