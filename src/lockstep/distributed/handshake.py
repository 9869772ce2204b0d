"""Whether what listens on the meeting point's port is a store of torch's, asked before torch's client connects.

    check_store("10.0.0.1", 29400, wait=600.0, named="MASTER_PORT 29400")       # raises for an HTTP server, sshd, ...

torch's client tries again and again, writes a page of C++ each time, and waits for ever where a service is silent.
"""

import random
import socket
import struct
import time
from enum import Enum
from functools import cache

from torch._C._distributed_c10d import TCPStore

from lockstep.errors import ConfigError

__all__ = ["check_store"]

_VALIDATE, _PING = 0, 13  # c10d's TCPStoreBackend.hpp: the first byte of what a client asks
_MAGIC = 0x3C85F7CE
_CONNECT = 5.0  # seconds
_TRIES, _PAUSE = 4, 0.5  # for a store that is just closed or begun


class _Answer(Enum):
    RIGHT = "a store's"
    WRONG = "another service's, or none in time"
    CLOSED = "the connection was closed: by another service, or by a store that ends or begins"
    NOBODY = "nobody listens"


def check_store(host: str, port: int, wait: float, named: str) -> None:
    """Refuse another service in the place of torch's store. Where nobody listens yet, torch's client is to wait.

    Args:
        wait: seconds for an answer.
        named: host and port as the user gave them.

    Raises:
        ConfigError: another service listens there.
    """
    answer = _ask(host, port, wait)
    for _ in range(_TRIES):
        if answer is not _Answer.CLOSED:
            break
        time.sleep(_PAUSE)
        answer = _ask(host, port, wait)
    if answer not in (_Answer.RIGHT, _Answer.NOBODY) and _knows_protocol():
        raise ConfigError(
            f"{named}: another service listens there, and no meeting point of ranks; give all ranks a port that is "
            "free on the node of rank 0"
        )


def _ask(host: str, port: int, wait: float) -> _Answer:
    """Greet as torch's client does."""
    number = random.SystemRandom().getrandbits(31)
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT)
    except OSError:
        return _Answer.NOBODY
    with connection:
        connection.settimeout(wait)
        found = b""
        try:
            connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, number))
            while len(found) < 4 and (more := connection.recv(4 - len(found))):
                found += more
        except TimeoutError:
            return _Answer.WRONG
        except OSError:
            return _Answer.CLOSED
    if not found:
        return _Answer.CLOSED
    return _Answer.RIGHT if found == struct.pack("=I", number) else _Answer.WRONG


@cache
def _knows_protocol() -> bool:
    """Whether this torch's own store answers as is expected here."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return _ask("127.0.0.1", store.port, _CONNECT) is _Answer.RIGHT
