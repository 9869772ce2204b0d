"""Interfaces, their addresses and speeds, and InfiniBand ports, as the system's files tell them.

interfaces(Path("/"))           # ["eth0", "lo"]
gloo_address({}, "node-a")      # the address and interface that gloo would take
"""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

__all__ = ["address_of", "gloo_address", "infiniband", "interface_at", "interfaces", "is_loopback", "link_speed"]

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


def interface_at(address: str) -> str:
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
                return str(address[0]), interface_at(str(address[0]))
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
