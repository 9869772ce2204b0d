"""Addresses where processes meet: whether they are ours, whether others reach them, a socket on one alone."""

import errno
import ipaddress
import socket

from lockstep.errors import ConfigError

__all__ = ["check_reachable", "listening", "own_address"]


def listening(host: str, port: int) -> socket.socket | None:
    """A socket that listens on `host` alone, any free port for 0; None where `host` is no address of this machine.

    Raises:
        ConfigError: the name does not resolve, or the port is taken.
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
            raise ConfigError(f"MASTER_PORT {port} on {host} is taken by another process; choose another") from error
        return None


def check_reachable(what: str, host: str) -> None:
    """Raises ConfigError where the name `host` of node 0 leads to this machine's loopback: other nodes cannot follow.

    Debian's installer writes such a line for the machine's own name. A loopback address that is given as a number, or
    as localhost, is meant: several "nodes" on one machine.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror:
        return  # who uses it says so
    address = ipaddress.ip_address(str(found).partition("%")[0])
    if address.is_loopback and host != "localhost" and host != str(found):
        raise ConfigError(
            f"{what} {host} is {address} on this node, where no other node can reach it (see /etc/hosts); give "
            "node 0's address on the network, and in GLOO_SOCKET_IFNAME the interface where host names lead to loopback"
        )


def own_address(host: str) -> bool:
    """Whether `host` is an address of this machine. Raises ConfigError where the name does not resolve."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.bind((host, 0))
    except socket.gaierror as error:
        raise ConfigError(f"--master-addr {host}: the name does not resolve ({error.strerror})") from error
    except OSError:
        return False
    return True
