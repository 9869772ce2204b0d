"""Hold out a part of a dataset for evaluation, the same in every run.

train, evaluation = lockstep.hold_out(dataset, 0.1)
"""

from numbers import Real
from typing import Any

from torch.utils.data import Subset

from lockstep.data.sampler import Shuffled
from lockstep.errors import ConfigError, DataError

__all__ = ["hold_out", "split_samples"]


def hold_out(dataset: Any, share: float = 0.1, *, seed: int = 0) -> tuple[Subset[Any], Subset[Any]]:
    """Split a dataset at random into a training and an evaluation part.

    The parts depend on the number of samples, the share and `seed` alone: they are the same on every rank, in every
    resume, and in runs with another `--seed`.

    Args:
        dataset: with `len(dataset)` and `dataset[index]`.
        share: of the samples for evaluation, above 0 and below 1; each part has at least one sample.
        seed: another number gives another split.

    Returns:
        (training, evaluation), each in the dataset's order.

    Raises:
        ConfigError: `share` is not between 0 and 1.
        DataError: the dataset has no index, or fewer than two samples.
    """
    if not isinstance(share, Real) or not 0 < share < 1:
        raise ConfigError(f"lockstep.hold_out: share is {share!r}: it must be above 0 and below 1, such as 0.1")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"lockstep.hold_out: {type(dataset).__name__} has no len() or no index; give the dataset of a DataLoader, "
            "list(...) of a small stream, or hold out files of a large one"
        )
    if len(dataset) < 2:
        raise DataError(f"lockstep.hold_out: a dataset of {len(dataset)} samples; it needs at least two")
    train, evaluation = split_samples(len(dataset), share, seed)
    return Subset(dataset, train), Subset(dataset, evaluation)


def split_samples(samples: int, fraction: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Split samples into (training, evaluation), each in the data's order and with at least one.

    Args:
        samples: two or more.
        fraction: of the samples for evaluation.
        seed: not the run's, so that runs with other seeds are evaluated on the same samples.
    """
    # Neither part may be empty, whatever the share.
    count = min(max(round(samples * fraction), 1), samples - 1)
    evaluated = sorted(Shuffled(samples, seed).at(0, count)[1].tolist())
    # A list would be searched once for each sample.
    excluded = set(evaluated)
    return [sample for sample in range(samples) if sample not in excluded], evaluated
