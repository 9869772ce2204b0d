"""Exchange values between ranks through the TCPStore, without collectives, so nobody hangs.

board = Board(store, rank=0, size=2)
values = board.gather("versions", {"torch": "2.13"}, seconds=5.0)   # by rank; None for one that sent nothing in time

The module also looks up network interfaces and their addresses.
"""

import contextlib
import ipaddress
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.distributed.launcher import address_of, interface_at
from lockstep.errors import LockstepError

__all__ = [
    "Board",
    "gloo_address",
    "infiniband",
    "interfaces",
    "is_loopback",
    "link_speed",
]


def interfaces(root: Path) -> list[str]:
    """List the names of the network interfaces."""
    try:
        return sorted(path.name for path in (root / "sys/class/net").iterdir())
    except OSError:
        return [name for _, name in socket.if_nameindex()]


def gloo_address(environ: Mapping[str, str], host: str) -> tuple[str, str]:
    """Return the address that torch gives gloo, and its interface ("" if unknown).

    It is that of GLOO_SOCKET_IFNAME; else the host name's, if that is an address of this machine; else loopback
    (torch's ProcessGroupGloo).
    """
    names = []
    for name in environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name:
            names.append(name)
    if names:
        return address_of(names[0]), names[0]
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind((address[0], 0))
                return str(address[0]), interface_at(str(address[0]))
    return "127.0.0.1", "lo"


def is_loopback(name: str) -> bool:
    """Whether a name or address resolves to this machine only.

    False if it does not resolve.
    """
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return False
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def link_speed(root: Path, interface: str) -> float:
    """Return the nominal bytes a second of an interface's link; 0 if unknown or virtual."""
    folder = root / "sys/class/net" / interface
    with contextlib.suppress(OSError, ValueError):
        speed = int((folder / "speed").read_text())
        # A virtual interface reports an arbitrary speed, and has no device.
        if speed > 0 and (folder / "device").exists():
            return speed * 1e6 / 8
    return 0.0


def infiniband(root: Path) -> list[str]:
    """List the active ports of InfiniBand or RoCE devices: `mlx5_0:1`."""
    ports = []
    for state in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                ports.append(f"{state.parents[2].name}:{state.parent.name}")
    return ports


# Seconds between two looks at a key.
_POLL = 0.005


class BoardStore(Protocol):
    """The methods of torch's TCPStore that are used."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys exist."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, initially 0, and return it."""


class Board:
    """Values of each rank, by name.

    Args:
        store: the ranks' store; None: a single process, which needs none.
        rank, size: of this process, and of the run.
        scope: prefix of all keys.

    Attributes:
        missing: ranks that did not answer in time; later calls do not wait for them.
    """

    def __init__(self, store: BoardStore | None, rank: int, size: int, scope: str = "") -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._scope = scope
        self.missing: set[int] = set()

    def put(self, name: str, value: Any) -> None:
        """Publish a value of plain JSON."""
        if self._store is not None:
            self._store.set(self._key(name, self._rank), json.dumps(value))

    def of(self, name: str, rank: int, seconds: float = 0.0) -> Any:
        """Return the value `name` of `rank`; None if there is none within `seconds`."""
        if self._store is None:
            return None
        key = self._key(name, rank)
        deadline = time.monotonic() + seconds
        while True:
            # Check first: torch's `get` would block for its whole timeout.
            if self._store.check([key]):
                return json.loads(self._store.get(key))
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL)

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Publish `value`, and return each rank's `name`; None for ranks without one within `seconds`."""
        if self._store is None:
            return [value]
        self.put(name, value)
        deadline = time.monotonic() + seconds
        values = []
        for rank in self._ranks():
            values.append(value if rank == self._rank else None)
        for rank in self._ranks():
            if rank == self._rank:
                continue
            # A rank that has missed one value is not waited for again.
            if rank in self.missing:
                remaining = 0.0
            else:
                remaining = max(0.0, deadline - time.monotonic())
            values[rank] = self.of(name, rank, remaining)
            if values[rank] is None:
                self.missing.add(rank)
        return values

    def count(self, name: str) -> int:
        """Count the processes that have called this with `name`, this one included."""
        if self._store is None:
            return 1
        return int(self._store.add(f"{self._scope}/count/{name}", 1))

    def note(self, name: str, value: Any) -> None:
        """Store a value that belongs to no rank."""
        if self._store is None:
            raise LockstepError("Board.note needs a store, and a single process has none")
        self._store.set(f"{self._scope}/{name}", json.dumps(value))

    def read_note(self, name: str) -> Any:
        """Return the value that `note` stored, or None."""
        if self._store is None or not self._store.check([f"{self._scope}/{name}"]):
            return None
        return json.loads(self._store.get(f"{self._scope}/{name}"))

    def _ranks(self) -> range:
        return range(self._size)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._scope}/{name}/{rank}"
