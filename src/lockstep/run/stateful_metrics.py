"""Metrics that are more than a sum over a count: a `torchmetrics.Metric` that the task updates with each batch.

    state = taken(metric)                   # what one micro-batch left in it, as plain values; the metric is reset
    check_mergeable(name, metric, state)    # what can be told of one micro-batch
    value = merged(name, metric, states)    # of the whole set: the states in the order of the micro-batches

Each micro-batch begins with an empty metric and the states are merged in order, so the value does not depend on the
number of ranks. Nothing here imports torchmetrics: what has its methods is one.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError

__all__ = ["check_mergeable", "is_metric", "merged", "taken"]

_NEEDED = ("metric_state", "merge_state", "reset", "compute", "clone")


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric with a state of its own."""
    return all(hasattr(value, name) for name in _NEEDED)


def taken(metric: Any) -> dict[str, Any]:
    """The metric's state as plain values that JSON keeps; the metric is reset. Waits for the device."""
    state = {name: _plain(value) for name, value in metric.metric_state.items()}
    metric.reset()
    return state


def merged(name: str, metric: Any, states: list[dict[str, Any]]) -> float:
    """The value of `metric` over all `states`, on this rank alone: every rank has them all.

    Raises:
        ConfigError: it cannot be merged, or computes no single number.
    """
    with _one_number(name, metric):
        return float(_whole(metric, states).compute() if states else math.nan)


def check_mergeable(name: str, metric: Any, state: dict[str, Any]) -> None:
    """Looks at the `state` of a single micro-batch, which may be too little for the metric to compute (R2 needs two
    samples, a correlation more than one value): that is passed over.

    Raises:
        ConfigError: it cannot be merged, or computes no single number.
    """
    with _one_number(name, metric):
        whole = _whole(metric, [state])
    try:
        with _quiet():
            value = whole.compute()
    except Exception:
        return
    with _one_number(name, metric):
        float(value)


def _whole(metric: Any, states: list[dict[str, Any]]) -> Any:
    whole = metric.clone().cpu()
    whole.reset()
    whole.distributed_available_fn = _never  # or torchmetrics would add up what every rank has already
    for state in reversed(states):  # each is put before what is there
        whole.merge_state({key: _tensors(value) for key, value in state.items()})
    return whole


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "compute before update": it was merged
        yield


@contextlib.contextmanager
def _one_number(name: str, metric: Any) -> Iterator[None]:
    try:
        with _quiet():
            yield
    except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the task's metric '{name}' ({type(metric).__name__}) does not give one number over merged batches: "
            f"{line}; choose an average, or return (sum, count)"
        ) from error


def _never() -> bool:
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "v": value.tolist()}
    return [_plain(each) for each in value]


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["v"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    return [_tensors(each) for each in value]
