"""The largest of ascending sizes that fits, with as few estimates as may be."""

from collections.abc import Callable, Sequence

__all__ = ["largest"]

_TRIES = 7  # estimates in a search


def largest(
    evaluate: Callable[[int], float],
    candidates: Sequence[int],
    room: float,
    known: Sequence[tuple[int, float]] = (),
) -> int:
    """The largest of the ascending candidates whose bytes fit the room, each answer one that was evaluated; 0: none.

    Guesses lie on the line through the two that are nearest to the room, between one that fits and one that does not.

    Args:
        known: sizes, not of the candidates all, and bytes that are known of them: for a better first guess.
    """
    seen, found = dict(known), dict[int, bool]()

    def fits(place: int) -> bool:
        size = candidates[place]
        seen[size] = evaluate(size)
        found[place] = seen[size] <= room
        return found[place]

    low, high = -1, len(candidates)
    for _ in range(_TRIES):
        if high - low < 2:
            break
        guess = _guessed(seen, candidates, room) if len(seen) > 1 else 0 if low < 0 else low + 1
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    if low < 0:  # all guesses were too large: is the smallest?
        return candidates[0] if candidates and 0 not in found and fits(0) else 0
    return candidates[low]


def _guessed(seen: dict[int, float], candidates: Sequence[int], room: float) -> int:
    """The last place whose bytes should fit, by the two sizes that are nearest to the room."""
    one, other = sorted(sorted(seen, key=lambda size: abs(seen[size] - room))[:2])
    if seen[other] <= seen[one]:
        return len(candidates) - 1
    slope = (seen[other] - seen[one]) / (other - one)
    most = one + (room - seen[one]) / slope
    return sum(size <= most for size in candidates) - 1
