"""Send messages between two launchers, without ever blocking one of them.

link = Link(socket.create_connection((host, port)), secret, is_server=False)
link.send({"living": ["2", "3"]})
link.receive()                          # the messages that have arrived; [] for none
link.is_open                            # False as soon as the other end has closed, or died
"""

import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from lockstep.launch.secret import Secret, SignatureError

__all__ = ["Link"]

# Bytes of one line.
_LIMIT = 1 << 20


class Link:
    """A connection between two launchers, which never blocks.

    Sends one JSON object per line, signed with its position.

    The client's first line is a random number. It makes the connection's own secret, so what was recorded of another
    connection cannot be signed here. Who accepts connections must refuse a number that came before.

    Args:
        connection: a connected socket.
        secret: of this round; the other end has the same.
        is_server: this end has accepted the connection.

    Attributes:
        is_open: False once the other end closed it, or sent nonsense or what it did not sign.
        opened, heard: when it was opened, and when the last bytes came, on the monotonic clock.
        number: the random one; "" until it has come.
    """

    def __init__(self, connection: socket.socket, secret: Secret, *, is_server: bool) -> None:
        self._secret = secret
        self._ends = ("server", "client") if is_server else ("client", "server")
        # Messages so far. The number is signed, so none can be left out, repeated or sent back.
        self._sent = self._received = 0
        connection.setblocking(False)
        # A message is small and the answer is awaited, so send it at once.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._incoming = b""
        self._outgoing = b""
        self.is_open = True
        self.opened = time.monotonic()
        self.heard = self.opened
        self.number = ""
        if not is_server:
            self._meet(secrets.token_hex(16))
            self._outgoing = f"{self.number}\n".encode()

    def _meet(self, number: str) -> None:
        self.number = number
        self._secret = self._secret.derive(f"connection {number}")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, now or with the next call."""
        self._outgoing += self._secret.sign(f"message {self._sent} of the {self._ends[0]}", message) + b"\n"
        self._sent += 1
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
            # Nothing more has arrived.
            pass
        except OSError:
            self.is_open = False
        *lines, self._incoming = self._incoming.split(b"\n")
        # A line over the limit comes from another program, or somebody who wants to fill the memory.
        self.is_open = self.is_open and len(self._incoming) <= _LIMIT
        try:
            if lines and not self.number:
                self._meet(lines.pop(0).decode())
            return [self._read(line) for line in lines]
        except (SignatureError, ValueError, TypeError, RecursionError):
            self.is_open = False
            return []

    def _read(self, line: bytes) -> dict[str, Any]:
        message = self._secret.read(f"message {self._received} of the {self._ends[1]}", line)
        self._received += 1
        return dict(message)

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
            # The other end has closed. What it sent before can still be read.
            self._outgoing = b""
