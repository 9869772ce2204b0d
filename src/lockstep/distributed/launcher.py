"""Read a launcher's environment variables, and configure the processes that it starts.

rank = launcher_number("RANK", 0)           # from the environment; 0 if it is not set

`torch_variables` chooses a rank's environment. `listen`, `check_reachable` and `is_own_address` check addresses of the
meeting point, `route_to` and `choose_interface` this machine's side of the way to it. `end_with_launcher` ends a worker
when its launcher dies.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from lockstep.distributed.cpus import cores
from lockstep.errors import ConfigError

__all__ = [
    "FOLLOWER_VARIABLE",
    "LAUNCHER_VARIABLE",
    "OPENCV_THREADS",
    "ROUND_VARIABLE",
    "address_of",
    "allocator_variables",
    "check_reachable",
    "choose_interface",
    "compile_threads",
    "die_with_launcher",
    "end_with_launcher",
    "interface_at",
    "is_own_address",
    "launcher_is_gone",
    "launcher_number",
    "limit_opencv",
    "listen",
    "route_to",
    "torch_variables",
]


_GIVE_ADDRESS = "give node 0's address, or a name that every node knows"


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
        raise ConfigError(
            f"MASTER_ADDR {host}: the name does not resolve ({error.strerror}); {_GIVE_ADDRESS}"
        ) from error
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
        # The process that connects to the address reports that.
        return
    address = ipaddress.ip_address(str(text).partition("%")[0])
    if address.is_loopback and host != "localhost" and host != str(text):
        raise ConfigError(
            f"{name} {host} is {address} on this node, where no other node can reach it (see /etc/hosts); pass node "
            "0's network address"
        )


def is_own_address(host: str) -> bool:
    """Whether `host` is an address of this machine. Raises ConfigError if it does not resolve."""
    try:
        # Only an address of this machine can be bound; port 0 asks for any free port.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except socket.gaierror as error:
        raise ConfigError(
            f"--master-addr {host}: the name does not resolve ({error.strerror}); {_GIVE_ADDRESS}"
        ) from error
    except OSError:
        return False
    return True


# The request number of linux/sockios.h.
_SIOCGIFADDR = 0x8915
# Has a line for each address: 32 hex digits, numbers, the interface.
_IPV6 = Path("/proc/net/if_inet6")


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # The kernel's struct ifreq: the name in 16 bytes, then a sockaddr with the address at byte 20.
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    return ""


def interface_at(address: str) -> str:
    """Return the interface that has this address, such as eth0; "" if unknown."""
    if ":" not in address:
        for _, name in socket.if_nameindex():
            if address_of(name) == address:
                return name
        return ""
    digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with contextlib.suppress(OSError):
        for line in _IPV6.read_text(encoding="ascii").splitlines():
            if line.startswith(digits):
                return line.split()[-1]
    return ""


def route_to(host: str) -> str:
    """Return this machine's address on the route to `host`.

    Its host name may resolve to another network's address, or to loopback.

    Raises:
        OSError: `host` does not resolve, or there is no route to it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only makes the kernel choose a route.
        probe.connect(address)
        return str(probe.getsockname()[0])


_INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_interface(host: str, environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface on the route to `host`, unless it is set.

    By default gloo uses what the machine's host name resolves to, which Debian's installer makes loopback.

    Raises:
        ConfigError: it is set to an interface that this machine lacks.
    """
    names = [name for name in environ.get(_INTERFACE, "").split(",") if name]
    if not names:
        with contextlib.suppress(OSError):
            if name := interface_at(route_to(host)):
                environ[_INTERFACE] = name
        return
    present = [name for _, name in socket.if_nameindex()]
    if not any(name in present for name in names):
        raise ConfigError(
            f"{_INTERFACE} is {environ[_INTERFACE]}, but {socket.gethostname()} has no such network interface "
            f"({', '.join(present)}); unset it, and the one that leads to {host} is used"
        )


# OpenCV reads the variable when it is imported.
OPENCV_THREADS = "OPENCV_FOR_THREADS_NUM"


def limit_opencv(environ: MutableMapping[str, str]) -> None:
    """Give OpenCV one thread, unless the user set another number; torchrun limits other libraries alone."""
    if OPENCV_THREADS in environ:
        return
    environ[OPENCV_THREADS] = "1"
    opencv = sys.modules.get("cv2")
    # By default it uses a thread for each core.
    if opencv is not None and opencv.getNumThreads() == opencv.getNumberOfCPUs():
        opencv.setNumThreads(1)


# torch's own limit.
_MAX_COMPILERS = 32


def compile_threads(ranks: int) -> int:
    """Return how many processes each rank may use to compile kernels.

    By default torch starts one per core in each rank.

    Args:
        ranks: number on this node.
    """
    return max(1, min(_MAX_COMPILERS, cores() // ranks))


# Set by `lockstep launch` to the path of its pipe.
LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"
# Set to a token of this start of the processes, the same on all nodes.
ROUND_VARIABLE = "LOCKSTEP_ROUND"
# Set where another node's launcher decides which ranks continue after a loss.
FOLLOWER_VARIABLE = "LOCKSTEP_FOLLOWER"

_LAUNCHER_ENDED = threading.Event()
_OTHERS_GO_ON = threading.Event()


def die_with_launcher(others_go_on: bool) -> None:
    """Choose whether this process is killed when its launcher dies.

    True if the other nodes' ranks continue without it. That applies only where another node's launcher decides;
    elsewhere all ranks save and end.
    """
    if others_go_on and FOLLOWER_VARIABLE in os.environ:
        _OTHERS_GO_ON.set()
    else:
        _OTHERS_GO_ON.clear()


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher dies, so that it saves.

    See `die_with_launcher` for SIGKILL in its place.

    Does nothing if `lockstep launch` did not start this process, or on a second call.
    """
    # Children must not inherit the variable: they have no part in the run.
    path = os.environ.pop(LAUNCHER_VARIABLE, "")
    if not path:
        return
    try:
        # Without O_NONBLOCK the call would wait until a launcher opens the other end.
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        # Another launcher removed the pipe after this one's died.
        _end()
        return
    os.set_blocking(pipe, True)
    threading.Thread(target=_wait, args=(pipe,), name="lockstep-launcher", daemon=True).start()


def launcher_is_gone() -> bool:
    """Whether the launcher that started this process has ended."""
    return _LAUNCHER_ENDED.is_set()


def _wait(pipe: int) -> None:
    # Nobody writes into the pipe: the call returns when the launcher's end is closed.
    os.read(pipe, 1)
    _end()


def _end() -> None:
    _LAUNCHER_ENDED.set()
    os.kill(os.getpid(), signal.SIGKILL if _OTHERS_GO_ON.is_set() else signal.SIGTERM)


_ALLOCATOR = "PYTORCH_ALLOC_CONF"
# CUDA's allocator reads these names first.
_OLD_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


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
        # Exact sums need it, and cuBLAS reads it only once in a process.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # By default each rank would start one compiling process per core.
        "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads(processes)),
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
