"""Which micro-batches of a step each rank computes.

equal_shares(8, ranks=3).runs       # ((0, 3), (3, 6), (6, 8)), in 3 slots each
given_shares((5, 3)).runs           # ((0, 5), (5, 8)), in 5 slots and in 3
sharing = Sharing(lambda step: given_shares((5, 3)))        # of every step; all parts of a rank hold this one object
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

__all__ = ["Shares", "Sharing", "equal_shares", "given_shares"]


class Shares(NamedTuple):
    """Who computes what of a step.

    Attributes:
        runs: by rank, the first and the past-the-last of its micro-batches, which follow each other.
        slots: by rank, how many forwards it makes; those past the end of its run are empty.
    """

    runs: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]


def equal_shares(micro_batches: int, ranks: int) -> Shares:
    """ceil(M / ranks) slots on every rank, so that collectives within a forward line up."""
    each = -(-micro_batches // ranks)
    ends = [min(rank * each, micro_batches) for rank in range(ranks + 1)]
    return Shares(tuple(itertools.pairwise(ends)), (each,) * ranks)


def given_shares(counts: Sequence[int]) -> Shares:
    """So many micro-batches on each rank, and no empty slot."""
    return Shares(tuple(itertools.pairwise(itertools.accumulate(counts, initial=0))), tuple(counts))


@final
class Sharing:
    """Who computes what, step by step: what loads the micro-batches asks for a step to come, an engine for the present.

    Attributes:
        at: step -> its shares; always the same ones for a step, and the same on every rank.
        guess: the same, but those of a step to come may still change: for who only looks ahead.
        step: the present one, which the step loader says.
    """

    def __init__(self, at: Callable[[int], Shares], guess: Callable[[int], Shares] | None = None) -> None:
        self.at, self.guess, self.step = at, guess or at, 0

    @property
    def now(self) -> Shares:
        """Those of the present step."""
        return self.at(self.step)
