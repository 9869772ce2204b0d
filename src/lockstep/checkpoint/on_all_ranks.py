"""What each rank does at the pace of its own disk, with nobody given up for being slow.

    result = on_all_ranks(world, lambda: read(path))

A collective that a peer does not join within the group's timeout fails, and a disk may need longer than that: so while
the action runs, a thread of each rank exchanges signs of life, several in each timeout, until all ranks have ended.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from lockstep.checkpoint.files import refusal_error
from lockstep.distributed.world import World
from lockstep.errors import LockstepError

__all__ = ["on_all_ranks"]

T = TypeVar("T")

_SIGN = 5.0  # seconds between two signs of life, or a quarter of the timeout where that is less


def on_all_ranks(
    world: World,
    action: Callable[[], T],
    *,
    done: Callable[[], int] = lambda: 0,
    heard: Callable[[list[int]], None] = lambda counts: None,
) -> T:
    """What `action` returns, once it has succeeded on every rank, however long that takes. Collective.

    The group of `world` must not be used by another thread meanwhile.

    Args:
        done: how much of the action is done, in any unit; called in another thread.
        heard: called with every rank's `done` at each sign of life, in another thread.

    Raises:
        CheckpointError: the file system refused `action` on this rank.
        StorageError: the same, since the storage does not answer.
        PeerError: it failed on another rank, which is named, or a rank was lost.
    """
    signs = _Signs(world, done, heard) if world.size > 1 else None
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except OSError as found:
        error = refusal_error(found)
        error.__cause__ = found
    except Exception as found:  # a bug on one rank must not leave the others waiting
        error = found
    except BaseException:  # Ctrl-C: this rank has left, and the others find that out by the timeout
        if signs:
            signs.leave()
        raise
    if signs and (lost := signs.wait()):
        raise error or lost
    world.check(error)  # collective
    return result  # type: ignore[return-value]


class _Signs:
    """The thread that tells the other ranks that this one is at work, or has ended, until all have."""

    def __init__(self, world: World, done: Callable[[], int], heard: Callable[[list[int]], None]) -> None:
        self._world, self._done, self._heard = world, done, heard
        self._ended = threading.Event()
        self._left = False
        self._lost: LockstepError | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-signs", daemon=True)
        self._thread.start()

    def wait(self) -> LockstepError | None:
        """Returns when every rank has ended: None, or what went wrong with the exchange itself."""
        self._ended.set()
        self._thread.join()
        return self._lost

    def leave(self) -> None:
        """Says nothing more."""
        self._left = True
        self._ended.set()

    def _run(self) -> None:
        pause = min(_SIGN, self._world.timeout / 4)
        try:
            while True:
                ended = self._ended.wait(pause)
                if self._left:
                    return
                found = self._world.gather([ended, self._done()])  # collective
                self._heard([count for _, count in found])
                if all(each for each, _ in found):
                    return
        except LockstepError as error:
            self._lost = error
