"""Merge the states of a `torchmetrics.Metric`; the one rule for all merged metrics.

    merge(metric, [state of one micro-batch, state of the next, ...])     # the metric then has them all

A state is `metric.metric_state`. The module does not import torchmetrics: any object with its methods is a metric.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["merge", "obstacle"]

_RULES = ("dim_zero_sum", "dim_zero_mean", "dim_zero_max", "dim_zero_min", "dim_zero_cat")
_PACKAGE = "torchmetrics"


def merge(metric: Any, states: list[dict[str, Any]]) -> None:
    """Fill an empty metric with the states, in their order.

    The metric's own `merge_state` is used if it has one; else the reduction of each state, as torchmetrics merges the
    states of ranks.
    """
    metric.reset()
    if _merges_itself(metric):
        # `merge_state` puts the other state before the metric's own, so the last one comes first.
        for state in reversed(states):
            metric.merge_state(state)
        return
    for name, reduction in metric._reductions.items():
        values = [_to_device(state[name], metric.device) for state in states]
        setattr(metric, name, _merge_values(values, reduction))
    # Private in torchmetrics: without a count `compute` warns that nothing was added.
    metric._update_count = len(states)
    metric._computed = None


def obstacle(metric: Any, state: dict[str, Any]) -> str:
    """Return why a metric's states of several batches cannot be merged; "" if they can.

    Args:
        state: of one batch.
    """
    if _merges_itself(metric):
        return ""
    if any(hasattr(child, "metric_state") for child in list(metric.modules())[1:]):
        return "it contains other metrics: return each of them separately"
    # The classes of torchmetrics itself can be merged: a test covers each of them.
    from_torchmetrics = type(metric).__module__.partition(".")[0] == _PACKAGE
    if not from_torchmetrics and getattr(metric, "full_state_update", None) is not False:
        return "its `full_state_update` is not False: set it to False if `update` needs no earlier batch"
    for name, reduction in metric._reductions.items():
        rule = getattr(reduction, "__name__", "")
        value = state[name]
        if reduction is not None and rule not in _RULES:
            return f"its state '{name}' has a custom reduction: define `merge_state`"
        if reduction is None and isinstance(value, Tensor) and not from_torchmetrics:
            return f"its state '{name}' has no reduction: set one in add_state, or define `merge_state`"
        if rule == "dim_zero_mean" and not _same(value, metric._defaults[name]):
            return f"its state '{name}' is a mean of unknown weight: store a sum and a count"
    return ""


def _merges_itself(metric: Any) -> bool:
    method: Any = getattr(type(metric), "merge_state", None)
    inherited = method is None or method.__module__ == f"{_PACKAGE}.metric"
    return not (isinstance(metric, nn.Module) and inherited)


def _merge_values(values: list[Any], reduction: Any) -> Any:
    """Merge the states of one name, as torchmetrics does between ranks."""
    rule = getattr(reduction, "__name__", "")
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if rule == "dim_zero_cat":
        return torch.cat([value.reshape(1) if not value.ndim else value for value in values])
    together = torch.stack(values)
    if rule == "dim_zero_sum":
        return together.sum(0)
    if rule == "dim_zero_mean":
        if all(torch.equal(value, values[0]) for value in values):
            return values[0]
        return together.mean(0)
    if rule in ("dim_zero_max", "dim_zero_min"):
        if rule == "dim_zero_max":
            return together.amax(0)
        return together.amin(0)
    if reduction is None:
        return together
    return reduction(together)


def _same(value: Any, default: Any) -> bool:
    # The state was read from JSON, so it is in host memory.
    return isinstance(value, Tensor) and isinstance(default, Tensor) and torch.equal(value.cpu(), default.cpu())


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [tensor.to(device) for tensor in value]
