"""Run an action on every rank, and raise on all of them if it fails on one.

    path = on_all_ranks(world, open_folder)                 # its result, once it succeeded everywhere
    paths = gather_results(world, open_folder)              # the results of all ranks
    on_all_ranks(world, copy_files, signs=LONG)             # one that may take any time

A value crosses as JSON. The error of another rank is a PeerError that names it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.distributed.outcomes import outcome, results
from lockstep.distributed.world import World
from lockstep.errors import LockstepError
from lockstep.files import refusal_error

__all__ = [
    "LONG",
    "Signs",
    "gather_results",
    "on_all_ranks",
]


T = TypeVar("T")

# Seconds between two signs of life, or a quarter of the timeout if that is less.
_SIGN = 5.0


def _no_progress() -> int:
    return 0


def _ignore(counts: list[int]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Signs:
    """Functions to call while an action runs that may take longer than the timeout.

    A thread calls them. Every few seconds it gathers with the other ranks, so that they see this rank is alive. No
    other thread may use the world's group meanwhile.

    Attributes:
        progress: returns how much of the action is done, in any unit.
        on_progress: called with every rank's `progress` at each sign of life.
        on_wait: called with the ranks that have not ended.
    """

    progress: Callable[[], int] = _no_progress
    on_progress: Callable[[list[int]], None] = _ignore
    on_wait: Callable[[list[int]], None] = _ignore


# For an action that may take long, and reports no progress.
LONG = Signs()


def on_all_ranks(world: World, action: Callable[[], T], *, signs: Signs | None = None) -> T:
    """Run `action`, and return its result once it succeeded on all ranks; else raise. Collective.

    In `World.together` an action without `signs` returns at once: the next gather raises the errors of the others.

    Args:
        signs: of an action that may take long; None: the others wait for it at most the timeout.

    Raises:
        CheckpointError: the file system refused an action with `signs` on this rank.
        StorageError: the storage did not respond to it on this rank.
        PeerError: it failed on another rank, which is named, or a rank was lost.
    """
    if signs is None and world.is_deferring:
        return action()
    box: list[T] = []
    # Only this rank needs its result, which may be no JSON value.
    gather_results(world, lambda: box.append(action()), signs=signs)  # collective
    return box[0]


def gather_results(world: World, action: Callable[[], Any], *, signs: Signs | None = None) -> list[Any]:
    """Run `action`, and return all ranks' results in rank order. Collective.

    Args:
        action: returns a JSON value.
        signs: as for `on_all_ranks`.

    Raises:
        LockstepError: as `on_all_ranks`, on every rank.
    """
    thread = _SignThread(world, signs) if signs else None
    error: Exception | None = None
    value: Any = None
    try:
        value = action()
    except OSError as caught:
        error = caught
        if thread:
            error = refusal_error(caught)
            error.__cause__ = caught
    except Exception as caught:
        # A bug on one rank must not leave the others waiting.
        error = caught
    except BaseException:
        # Ctrl-C: this rank leaves, and the others notice by the timeout.
        if thread:
            thread.leave()
        raise
    # All ranks: one whose action failed still joins, so that none waits.
    if thread is None:
        return world.gather_checked(value, error)  # collective
    outcomes = thread.wait(outcome(value, error))
    if isinstance(outcomes, LockstepError):
        raise error or outcomes
    return results(outcomes, error)


class _SignThread:
    """A thread that sends signs of life until all ranks have an outcome."""

    def __init__(self, world: World, signs: Signs) -> None:
        self._world = world
        self._signs = signs
        self._ended = threading.Event()
        self._is_silent = False
        self._own: list[Any] = []
        self._outcomes: list[list[Any]] | LockstepError = []
        self._thread = threading.Thread(target=self._run, name="lockstep-signs", daemon=True)
        self._thread.start()

    def wait(self, own: list[Any]) -> list[list[Any]] | LockstepError:
        """Wait until every rank has ended.

        Args:
            own: this rank's outcome.

        Returns:
            All outcomes, in rank order, or the error of the exchange.
        """
        self._own = own
        self._ended.set()
        self._thread.join()
        return self._outcomes

    def leave(self) -> None:
        """Stop sending."""
        self._is_silent = True
        self._ended.set()

    def _run(self) -> None:
        pause = min(_SIGN, self._world.timeout / 4)
        try:
            while True:
                ended = self._ended.wait(pause)
                if self._is_silent:
                    return
                reply = self._own if ended else None
                # Each gather is a sign of life. The last one carries the outcome of every rank.
                replies = self._world.gather([self._signs.progress(), reply])
                self._signs.on_progress([count for count, _ in replies])
                waits_for = []
                for rank, (_, result) in enumerate(replies):
                    if not result:
                        waits_for.append(rank)
                if not waits_for:
                    self._outcomes = [result for _, result in replies]
                    return
                self._signs.on_wait(waits_for)
        except LockstepError as error:
            self._outcomes = error
