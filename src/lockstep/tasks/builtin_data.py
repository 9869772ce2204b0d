"""Data that needs no download. The only file that needs `scikit-learn`.

images, labels = digits("--dataset-name builtin:digits")
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.data.order import Shuffled
from lockstep.errors import ConfigError

__all__ = ["diabetes", "digits", "parted"]

_SPLIT_SEED = 0  # not the run's: runs with other seeds are evaluated on the same samples


def digits(flag: str) -> tuple[Tensor, Tensor]:
    """Handwritten digits: uint8 [1797, 1, 8, 8], in 17 steps of grey from 0 to 255, and their classes, int64 [1797].

    The test set of "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).

    Raises:
        ConfigError: scikit-learn is not installed; `flag` is what needs it.
    """
    found = _datasets(flag).load_digits()
    pixels = torch.from_numpy(found.images).reshape(-1, 1, 8, 8) * 255 / 16
    return pixels.round().to(torch.uint8), torch.from_numpy(found.target).long()


def diabetes(flag: str) -> dict[str, list[float]]:
    """442 patients: ten columns of measurements, and "target", how far the disease had gone a year later.

    Efron et al., "Least Angle Regression", The Annals of Statistics 32 (2004), in the units in which they were taken.

    Raises:
        ConfigError: scikit-learn is not installed; `flag` is what needs it.
    """
    found = _datasets(flag).load_diabetes(scaled=False)
    columns = {name: found.data[:, place].tolist() for place, name in enumerate(found.feature_names)}
    return {**columns, "target": found.target.tolist()}


def parted(samples: int, fraction: float) -> tuple[list[int], list[int]]:
    """The samples for training and those for evaluation, each in their own order, drawn alike for every seed.

    At least one each; `samples` is two or more.
    """
    count = min(max(round(samples * fraction), 1), samples - 1)
    evaluated = sorted(Shuffled(samples, _SPLIT_SEED).at(0, count)[1].tolist())
    apart = set(evaluated)
    return [sample for sample in range(samples) if sample not in apart], evaluated


def _datasets(flag: str) -> Any:
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package scikit-learn: pip install 'torch-lockstep[images]'") from error
    return datasets
