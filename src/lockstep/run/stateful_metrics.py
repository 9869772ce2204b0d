"""Metrics that are more than a sum over a count: a `torchmetrics.Metric` that the task updates with each batch.

    state = taken(metric)                   # what one micro-batch left in it, as plain values; the metric is reset
    names = check_mergeable(name, metric, state)    # what can be told of one micro-batch
    values = merged(name, metric, states)   # of the whole set: the states in the order of the micro-batches

Each micro-batch begins with an empty metric and the states are merged in order, so the value does not depend on the
number of ranks. Nothing here imports torchmetrics: what has its methods is one. One that says `several = True` computes
a dict, name -> number, each of which is a metric by its own name.
"""

import base64
import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError, LockstepError
from lockstep.tasks.metric_states import merge, obstacle

__all__ = ["ANY", "check_mergeable", "is_metric", "merged", "taken"]

ANY = "*"  # among the names of metrics: there are others, which only the whole set will tell

_NEEDED = ("metric_state", "merge_state", "reset", "compute", "clone")


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric with a state of its own."""
    return all(hasattr(value, name) for name in _NEEDED)


def taken(metric: Any) -> dict[str, Any]:
    """The metric's state as plain values that JSON keeps; the metric is reset. Waits for the device."""
    state = {name: _plain(value) for name, value in metric.metric_state.items()}
    metric.reset()
    return state


def merged(name: str, metric: Any, states: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of `metric` over all `states`, by name, on this rank alone: every rank has them all.

    Raises:
        ConfigError: it cannot be merged, or computes no number.
    """
    with _one_number(name, metric):
        return _named(name, metric, _whole(metric, states).compute() if states else math.nan)


def check_mergeable(name: str, metric: Any, state: dict[str, Any]) -> list[str]:
    """The names of the metric's numbers, by the `state` of a single micro-batch.

    That may be too little for the metric to compute (R2 needs two samples, a correlation more than one value), which
    is passed over; the names of several numbers are not known then.

    Raises:
        ConfigError: it cannot be merged, or computes no number.
    """
    if reason := obstacle(metric, {key: _tensors(value) for key, value in state.items()}):
        raise ConfigError(
            f"the task's metric '{name}' ({type(metric).__name__}) cannot be merged over batches: {reason}; or return "
            "(sum, count)"
        )
    with _one_number(name, metric):
        whole = _whole(metric, [state])
    try:
        with _quiet():
            value = whole.compute()
    except LockstepError:
        raise
    except Exception:
        return [ANY] if _is_several(metric) else [name]
    with _one_number(name, metric):
        if not _is_several(metric):
            _named(name, metric, _whole(metric, [state] * 3).compute())  # some break at the third
        return list(_named(name, metric, value))


def _named(name: str, metric: Any, value: Any) -> dict[str, float]:
    if not _is_several(metric):
        return {name: float(value)}
    return {key: float(each) for key, each in value.items()} if isinstance(value, dict) else {}


def _is_several(metric: Any) -> bool:
    return bool(getattr(metric, "several", False))


def _whole(metric: Any, states: list[dict[str, Any]]) -> Any:
    whole = metric.clone().cpu()
    whole.distributed_available_fn = _never  # or torchmetrics would add up what every rank has already
    merge(whole, [{key: _tensors(value) for key, value in state.items()} for state in states])
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
    except (LockstepError, MemoryError):
        raise
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the task's metric '{name}' ({type(metric).__name__}) does not give one number over merged batches: "
            f"{line}; choose an average, or return (sum, count)"
        ) from error


def _never() -> bool:
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()  # waits for the device
        text = base64.b64encode(
            held.reshape(-1).view(torch.uint8).numpy().tobytes()
        ).decode()  # a third more than it takes
        return {"dtype": str(held.dtype).removeprefix("torch."), "shape": list(held.shape), "v": text}
    return [_plain(each) for each in value]


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        held = bytearray(base64.b64decode(value["v"]))
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(held, dtype=dtype) if held else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    return [_tensors(each) for each in value]
