"""What ranks tell each other: values by name in their meeting point, without a collective, so nobody hangs in it.

board = Board(store, rank=0, size=2)
told = board.gather("versions", {"torch": "2.13"}, seconds=5.0)     # by rank; None of one that said nothing in time
"""

import contextlib
import fcntl
import ipaddress
import json
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import LockstepError

__all__ = [
    "Board",
    "BoardStore",
    "address_of",
    "gloo_address",
    "infiniband",
    "interfaces",
    "is_loopback",
    "link_speed",
]


_SIOCGIFADDR = 0x8915  # of linux/sockios.h


def interfaces(root: Path) -> list[str]:
    """Their names."""
    try:
        return sorted(path.name for path in (root / "sys/class/net").iterdir())
    except OSError:
        return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """Its IPv4 address; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return ""


def _interface_at(address: str) -> str:
    """The interface that has this IPv4 address; "" for none."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), "")


def gloo_address(environ: Mapping[str, str], host: str) -> tuple[str, str]:
    """The address that torch gives gloo, and its interface ("" where it is not known).

    That of GLOO_SOCKET_IFNAME; else what the host's name resolves to, where that is an address of this machine; else
    loopback (torch's ProcessGroupGloo).
    """
    named = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if named:
        return address_of(named[0]), named[0]
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
                tried.bind((address[0], 0))
                return str(address[0]), _interface_at(str(address[0]))
    return "127.0.0.1", "lo"


def is_loopback(name: str) -> bool:
    """Whether a name or an address leads to this machine alone; False where it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return False
    return ipaddress.ip_address(str(found).partition("%")[0]).is_loopback


def link_speed(root: Path, interface: str) -> float:
    """Bytes a second that an interface's link should carry; 0 where it does not say, or is no piece of hardware."""
    folder = root / "sys/class/net" / interface
    with contextlib.suppress(OSError, ValueError):
        speed = int((folder / "speed").read_text())
        if speed > 0 and (folder / "device").exists():  # what a virtual one says is made up
            return speed * 1e6 / 8
    return 0.0


def infiniband(root: Path) -> list[str]:
    """The ports of InfiniBand or RoCE devices that are up: `mlx5_0:1`."""
    found = []
    for state in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.append(f"{state.parents[2].name}:{state.parent.name}")
    return found


_LOOK = 0.005  # seconds


class BoardStore(Protocol):
    """The part of torch's TCPStore that is used."""

    def set(self, key: str, value: str) -> None:
        """Keeps a value."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 at first, and returns it."""


class Board:
    """Values of each rank, by name.

    Args:
        store: the ranks' meeting point; None: one process, which needs none.
        rank, size: of this process, and of the run.
        scope: what all keys begin with.

    Attributes:
        missing: ranks that did not say something in time; nobody waits for them again.
    """

    def __init__(self, store: BoardStore | None, rank: int, size: int, scope: str = "") -> None:
        self._store, self._rank, self._size, self._scope = store, rank, size, scope
        self.missing: set[int] = set()

    def put(self, name: str, value: Any) -> None:
        """Says a value, of plain JSON."""
        if self._store is not None:
            self._store.set(self._key(name, self._rank), json.dumps(value))

    def of(self, name: str, rank: int, seconds: float = 0.0) -> Any:
        """What `rank` said of `name`; None where it says nothing within `seconds`."""
        if self._store is None:
            return None
        key, deadline = self._key(name, rank), time.monotonic() + seconds
        while True:
            if self._store.check([key]):
                return json.loads(self._store.get(key))
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK)

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Says `value`, and returns what each rank says of `name`; None of one that says nothing within `seconds`."""
        if self._store is None:
            return [value]
        self.put(name, value)
        deadline, found = time.monotonic() + seconds, [value if rank == self._rank else None for rank in self._others()]
        for rank in self._others():
            if rank == self._rank:
                continue
            left = 0.0 if rank in self.missing else max(0.0, deadline - time.monotonic())
            found[rank] = self.of(name, rank, left)
            if found[rank] is None:
                self.missing.add(rank)
        return found

    def count(self, name: str) -> int:
        """How many processes have called this with `name`, this one included."""
        if self._store is None:
            return 1
        return int(self._store.add(f"{self._scope}/count/{name}", 1))

    def note(self, name: str, value: Any) -> None:
        """Keeps a value that is of no rank."""
        if self._store is None:
            raise LockstepError("one process has no board")
        self._store.set(f"{self._scope}/{name}", json.dumps(value))

    def noted(self, name: str) -> Any:
        """What `note` kept; None for nothing."""
        if self._store is None or not self._store.check([f"{self._scope}/{name}"]):
            return None
        return json.loads(self._store.get(f"{self._scope}/{name}"))

    def _others(self) -> range:
        return range(self._size)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._scope}/{name}/{rank}"
