"""What ranks tell each other: values by name in their meeting point, without a collective, so nobody hangs in it.

board = Board(store, rank=0, size=2)
told = board.gather("versions", {"torch": "2.13"}, seconds=5.0)     # by rank; None of one that said nothing in time
"""

import json
import time
from typing import Any, Protocol

from lockstep.errors import LockstepError

__all__ = ["Board", "Store"]

_LOOK = 0.005  # seconds


class Store(Protocol):
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

    def __init__(self, store: Store | None, rank: int, size: int, scope: str = "") -> None:
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
