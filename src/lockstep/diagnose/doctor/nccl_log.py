"""What NCCL chose, read from the log that NCCL_DEBUG=INFO makes it write.

chosen = read_log(Path("/tmp/nccl.node-a.417"))
chosen.network          # "IB", "Socket", a plugin's name; "" where it did not get so far
"""

import dataclasses
import json
import re
from pathlib import Path

__all__ = ["Chosen", "parse", "read_log"]

_LIMIT = 8 << 20  # bytes that are read
_VERSION = re.compile(r"NCCL version (\S+)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([^:\s]+):(\S+?)<")
_NETWORK = re.compile(r"Using network (\S+)")
_SOCKET = re.compile(r"NET/Socket ?: Using \[0\]([^:\s]+):")
_IB = re.compile(r"NET/IB ?: Using (\[0\].*?)(?: \[RO\]| ?;|$)")
_PORT = re.compile(r"\[\d+\]([\w.-]+:\d+)")
_VIA = re.compile(r"Channel \d+(?:/\d+)? ?: .*? via (\S+)")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a process's NCCL chose.

    Attributes:
        version: "2.27.5+cuda12.9".
        interface: that it meets the others at.
        network: between nodes: "IB", "Socket", a plugin's name.
        devices: of it: interfaces, or ports as "mlx5_0:1".
        ways: of the channels between ranks, by how many: "P2P/CUMEM", "SHM/direct/direct", "NET/IB/0/GDRDMA".
    """

    version: str = ""
    interface: str = ""
    network: str = ""
    devices: list[str] = dataclasses.field(default_factory=list)
    ways: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        through = f" ({', '.join(self.devices)})" if self.devices else ""
        ways = ", ".join(sorted(self.ways, key=lambda way: -self.ways[way]))
        said = (
            f"{self.version or 'of an unknown version'} meets at {self.interface or '?'}, network {self.network or '?'}"
        )
        return f"{said}{through}" + (f", channels by {ways}" if ways else "")

    def to_json(self) -> str:
        """As one JSON object."""
        return json.dumps(dataclasses.asdict(self))


def read_log(path: Path) -> Chosen:
    """What a log says; an empty `Chosen` where there is none."""
    try:
        with path.open("rb") as file:
            return parse(file.read(_LIMIT).decode("utf-8", "replace"))
    except OSError:
        return Chosen()


def parse(text: str) -> Chosen:
    """What the lines of a log say. Forms of NCCL 2.18 to 2.29."""
    version = _first(_VERSION, text)
    network = _first(_NETWORK, text)
    devices: list[str] = []
    if network == "Socket":
        devices = [found] if (found := _first(_SOCKET, text)) else []
    elif (ports := re.search(_IB.pattern, text, re.MULTILINE)) is not None:
        devices = _PORT.findall(ports[1])
    ways: dict[str, int] = {}
    for way in _VIA.findall(text):
        ways[way] = ways.get(way, 0) + 1
    return Chosen(version, _first(_BOOTSTRAP, text), network, devices, ways)


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
