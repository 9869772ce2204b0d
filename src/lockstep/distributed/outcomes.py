"""Turn each rank's value or error into what the ranks exchange, and back."""

from collections.abc import Sequence
from typing import Any

from lockstep.distributed.progress import rank_label
from lockstep.errors import LockstepError, PeerError

__all__ = [
    "compare",
    "outcome",
    "results",
]


def compare(subject: str, ranks: list[dict[str, Any]], names: Sequence[int] = ()) -> None:
    """Raise LockstepError unless all ranks gathered equal values; see `World.check_same`.

    Args:
        subject: what they are, for the error.
        ranks: each rank's values.
        names: the number of each rank in the run, if these are some of its ranks.
    """
    names = names or range(len(ranks))
    first = rank_label(names[0])
    for rank, values in zip(names, ranks, strict=True):
        keys = []
        for key in ranks[0]:
            if values.get(key) != ranks[0].get(key):
                keys.append(key)
        if keys:
            differences = ", ".join(f"{key} ({ranks[0].get(key)!r} on {first}, {values.get(key)!r})" for key in keys)
            raise LockstepError(
                f"the {subject} of {rank_label(rank)} differs from {first}'s: {differences}; start all ranks alike"
            )


def outcome(value: Any, error: Exception | None) -> list[Any]:
    """Return what a rank sends about an action.

    Returns:
        [value, None], or [None, [message, exit code, smaller size]] for an error.
    """
    if error is None:
        return [value, None]
    return [None, [str(error) or type(error).__name__, getattr(error, "exit_code", 1), getattr(error, "smaller", 0)]]


def results(outcomes: list[list[Any]], error: Exception | None, names: Sequence[int] = ()) -> list[Any]:
    """Return the values of all outcomes. Raises `error`, or a PeerError about the first failed; `names` as above."""
    if error is not None:
        raise error
    for rank, (_, failure) in zip(names or range(len(outcomes)), outcomes, strict=True):
        if failure:
            message, code, smaller = failure
            problem = PeerError(f"{rank_label(rank)}: {message}")
            problem.exit_code = code
            problem.relayed = True
            problem.smaller = smaller
            raise problem
    return [value for value, _ in outcomes]
