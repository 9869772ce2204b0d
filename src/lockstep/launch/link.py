"""Send messages between two launchers, without ever blocking one of them.

link = Link(socket.create_connection((host, port)))
link.send({"living": ["2", "3"]})
link.receive()                          # the messages that have arrived; [] for none
link.is_open                            # False as soon as the other end has closed, or died
"""

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Link"]

_LIMIT = 1 << 20  # bytes of one line


class Link:
    """A connection between two launchers: one JSON object per line. Never blocks.

    Attributes:
        is_open: False once the other end closed it, or sent nonsense.
        heard: when the last bytes came, on the monotonic clock.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._incoming, self._outgoing = connection, b"", b""
        self.is_open, self.heard = True, time.monotonic()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, now or with the next call."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived."""
        self._flush()
        try:
            while self.is_open and len(self._incoming) <= _LIMIT:
                data = self._connection.recv(1 << 16)
                self._incoming += data
                self.is_open = bool(data)
                self.heard = time.monotonic() if data else self.heard
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._incoming = self._incoming.split(b"\n")
        self.is_open = self.is_open and len(self._incoming) <= _LIMIT
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            self.is_open = False
            return []

    def wait_for_message(self, seconds: float) -> list[dict[str, Any]]:
        """Return the messages that have arrived, once there are any, or [] after some seconds."""
        until = time.monotonic() + seconds
        while not (messages := self.receive()) and self.is_open and time.monotonic() < until:
            time.sleep(0.01)
        return messages

    def close(self) -> None:
        """Close this end."""
        self._flush()
        self.is_open = False
        self._connection.close()

    def _flush(self) -> None:
        try:
            while self.is_open and self._outgoing:
                self._outgoing = self._outgoing[self._connection.send(self._outgoing) :]
        except BlockingIOError:
            self.is_open = len(self._outgoing) <= _LIMIT
        except OSError:
            self._outgoing = b""  # what it has sent can still be read
