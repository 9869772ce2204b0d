"""Compute a run's length and a step's batches as another library counts them.

length = plan_of(config, samples)               # epochs and steps
begins, ends = turn_ranges(slot, slots, turns)  # batches of the other library, of a rank's micro-batch
"""

import math
from typing import NamedTuple

from lockstep.config.fields import in_batches
from lockstep.config.schema import Config

__all__ = [
    "TrainerLength",
    "plan_of",
    "turn_ranges",
]


class TrainerLength(NamedTuple):
    """The length of a run in a Trainer's terms.

    Attributes:
        samples: of an epoch.
        in_epoch: steps of an epoch, rounded up.
        steps: of the whole run.
        max_epochs, max_steps: -1 for the one that does not end the run.
    """

    samples: int
    in_epoch: int
    steps: int
    max_epochs: int
    max_steps: int


def plan_of(config: Config, samples: int) -> TrainerLength:
    """Compute the length of a run with `samples` samples or groups in an epoch."""
    size = config.batch_size
    if config.limit_train_batches:
        samples = min(samples, in_batches(config.limit_train_batches, samples / size) * size)
    in_epoch = -(-samples // size)
    if config.max_steps:
        epochs = math.ceil(config.max_steps * size / samples)
        return TrainerLength(samples, in_epoch, config.max_steps, epochs, config.max_steps)
    return TrainerLength(samples, in_epoch, -(-config.num_epochs * samples // size), config.num_epochs, -1)


def turn_ranges(slot: int, slots: int, turns: int) -> tuple[range, range]:
    """Return the ranges of turns that begin and that end with a rank's slot.

    Each turn of a step begins and ends once, however many slots there are.
    """
    # With fewer slots than turns a slot has several turns; with more, a turn spans several slots.
    starts = [turn * slots // turns for turn in range(turns)]
    ends = []
    for turn, start in enumerate(starts):
        ends.append(max(start, (turn + 1) * slots // turns - 1))
    begin_turns = []
    for turn, start in enumerate(starts):
        if start == slot:
            begin_turns.append(turn)
    end_turns = []
    for turn, end in enumerate(ends):
        if end == slot:
            end_turns.append(turn)
    return _as_range(begin_turns), _as_range(end_turns)


def _as_range(turns: list[int]) -> range:
    if turns:
        return range(turns[0], turns[-1] + 1)
    return range(0)
