"""Track the state that `training_step` accumulates on the module: list attributes and torchmetrics.

with Leavings.undone(module): ...                # changes are undone at the end
with leavings.noted(module, (step, index)): ...  # appended items are recorded with their micro-batch
with leavings.gathered(module, gather): ...      # every rank sees the items and states of all ranks, in order

It also packs nested values for other ranks and for checkpoints, without pickle.
"""

import ast
import base64
import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.tasks.metric_states import merge
from lockstep.tensors import host_bytes

__all__ = [
    "Leavings",
    "apart",
    "is_metric",
    "list_at",
    "lists_of",
    "merged_results",
    "metrics_of",
    "pack",
    "put_back",
    "put_together",
    "set_aside",
    "taken_apart",
    "unpack",
    "was_updated",
]


# Modules between a collective and its caller on the stack.
_INSIDE = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", __name__)
# Collectives with gradients, which are meant for a loss.
_FOR_STEPS = "torch.distributed.nn."
_OWN_ATTRIBUTES = ("torch.", "lockstep.")


@contextlib.contextmanager
def apart(step: str) -> Iterator[None]:
    """Refuse collectives that user code calls, in a context.

    Raises:
        ConfigError: code outside torch and lockstep calls a collective.
    """
    if not dist.is_initialized():
        yield
        return
    inside: Any = c10d
    # Private in torch: every collective calls it first, however the collective was imported.
    plain = inside._rank_not_in_group

    def check(*args: Any) -> Any:
        called, caller = _find_caller()
        from_user = caller.startswith(_FOR_STEPS) or not caller.startswith(_OWN_ATTRIBUTES)
        # Reading a rank or a world size is allowed.
        if from_user and not called.startswith("get_"):
            raise ConfigError(
                f"from_lightning: {step} calls torch.distributed.{called}, whose result depends on the number of "
                "ranks: compute within the micro-batch, log a sum, or write the loss over all samples of a step as "
                "`outputs` and `step_loss` of a lockstep.Task"
            )
        return plain(*args)

    inside._rank_not_in_group = check
    try:
        yield
    finally:
        inside._rank_not_in_group = plain


def _find_caller() -> tuple[str, str]:
    """Return the collective that is called, and the module that calls it."""
    frame = sys._getframe(2)
    name = ""
    while frame.f_back is not None and frame.f_globals.get("__name__", "") in _INSIDE:
        if frame.f_globals["__name__"] == _INSIDE[0]:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name, str(frame.f_globals.get("__name__", ""))


# Deepest nesting of containers that is converted, which also ends cycles.
_MAX_DEPTH = 8
# Attributes of torch and Lightning in which a step accumulates nothing.
_SKIPPED = ("_parameters", "_buffers", "_modules", "_fabric_optimizers", "_forward_hooks", "_backward_hooks")
# Attributes that Lightning or torch sets while a step runs.
_VOLATILE = (
    "training",
    "_current_fx_name",
    "_metric_attributes",
    "_trainer",
)

Key = tuple[int, int]


class _NoPlainValue(ConfigError):
    """A step leaves a value of a `kind` that other ranks cannot receive."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        super().__init__(
            f"from_lightning: a step leaves a {kind} in self.{name}, which cannot be merged over micro-batches: use "
            "tensors, numbers, strings, and lists and dicts of them"
        )


@final
class Leavings:
    """Items that this rank's micro-batches appended to lists of the module in this epoch."""

    def __init__(self) -> None:
        self._records: dict[str, list[tuple[Key, int]]] = {}

    def clear(self) -> None:
        self._records.clear()

    @staticmethod
    @contextlib.contextmanager
    def undone(module: nn.Module) -> Iterator[None]:
        """Undo appended items, assigned plain attributes and metric updates, in a context."""
        metrics = metrics_of(module)
        lists = lists_of(module)
        plain = dict(vars(module))
        lengths = {name: len(items) for name, items in lists.items()}
        aside = {name: set_aside(metric) for name, metric in metrics.items()}
        try:
            yield
        finally:
            for name, metric in metrics.items():
                put_back(metric, aside[name])
            for name, items in lists.items():
                del items[lengths[name] :]
            current = vars(module)
            for name in [name for name in current if name not in plain]:
                del current[name]
            for name, value in plain.items():
                if name not in _VOLATILE:
                    current[name] = value

    @contextlib.contextmanager
    def note(self, module: nn.Module, key: Key) -> Iterator[None]:
        """Record appended items as those of the micro-batch `key`, in a context."""
        before = {name: len(items) for name, items in lists_of(module).items()}
        yield
        for name, items in lists_of(module).items():
            if len(items) > before.get(name, 0):
                self._records.setdefault(name, []).append((key, len(items) - before.get(name, 0)))

    @contextlib.contextmanager
    def gather(self, module: nn.Module, gather: Callable[[Any], list[Any]]) -> Iterator[None]:
        """Give lists and metrics the contents of all ranks, in a context. Collective.

        List items are in the order of the micro-batches.

        Raises:
            ConfigError: a value that cannot be sent.
        """
        lists = lists_of(module)
        metrics = metrics_of(module)
        active = {}
        for name, metric in metrics.items():
            if was_updated(metric):
                active[name] = metric
        records = {}
        for name, notes in self._records.items():
            if _matches(notes, lists.get(name)):
                records[name] = notes
        # Collective over all ranks, once an epoch: contents follow only if a rank has any.
        sizes = gather([sorted(records), sorted(active)])
        if len(sizes) > 1 and any(names for pair in sizes for names in pair):
            row: list[Any] = []
            items = []
            for name in records:
                for key, values in _split_items(records[name], lists[name]):
                    items.append([name, list(key), taken_apart(values, row, name)])
            states = {}
            for name, metric in active.items():
                states[name] = taken_apart(dict(metric.metric_state), row, name)
            # Collective over all ranks, if any of them has items or states.
            parts = gather([items, states, [_encode(tensor) for tensor in row]])
            _fill(parts, module, metrics)
        yield


def merged_results(
    module: nn.Module, metrics: Mapping[str, Any], gather: Callable[[Any], list[Any]]
) -> dict[str, Tensor]:
    """Return the results of the module's metrics over all ranks. Collective.

    Their states stay as they are.

    Args:
        metrics: name that the result gets -> metric.
    """
    all_metrics = metrics_of(module)
    row = list[Any]()
    attributes = {id(metric): attribute for attribute, metric in all_metrics.items()}
    forms = {}
    for name, metric in metrics.items():
        if id(metric) in attributes and was_updated(metric):
            forms[name] = [attributes[id(metric)], taken_apart(dict(metric.metric_state), row, name)]
    # Collective over all ranks, once an evaluation.
    parts = gather([forms, [_encode(tensor) for tensor in row]])
    states: dict[tuple[str, str], list[Any]] = {}
    for forms_of_rank, texts in parts:
        tensors = [_decode(text) for text in texts]
        for name, (attribute, form) in forms_of_rank.items():
            states.setdefault((name, attribute), []).append(put_together(form, tensors))
    results: dict[str, Tensor] = {}
    for (name, attribute), parts_of_metric in states.items():
        aside = set_aside(all_metrics[attribute])
        try:
            merge(all_metrics[attribute], parts_of_metric)
            results[name] = all_metrics[attribute].compute()
        finally:
            put_back(all_metrics[attribute], aside)
    return results


def is_metric(value: Any) -> bool:
    """Whether this is a torchmetrics.Metric, without importing it."""
    methods = ("metric_state", "update", "reset", "compute")
    return isinstance(value, nn.Module) and all(hasattr(type(value), name) for name in methods)


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's metrics by name, with their own synchronisation turned off.

    lockstep merges the states of the ranks. The compute groups of a MetricCollection are turned off too, so that each
    metric has its own state.
    """
    submodule: Any
    for submodule in module.modules():
        if is_metric(submodule):
            submodule.sync_on_compute = submodule.dist_sync_on_step = submodule._to_sync = False
        if type(submodule).__name__ == "MetricCollection" and getattr(submodule, "_enable_compute_groups", False):
            # Private in torchmetrics: grouped metrics would share one state.
            submodule._enable_compute_groups = False
            submodule._groups_checked = False
            submodule._groups = {}
    return {name: submodule for name, submodule in module.named_modules() if is_metric(submodule)}


def lists_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return the lists among the module's attributes, and those in its dict attributes."""
    lists: dict[str, list[Any]] = {}
    for name, value in vars(module).items():
        if name in _SKIPPED:
            continue
        if type(value) is list:
            lists[name] = value
        elif isinstance(value, dict):
            for key, items in value.items():
                if type(items) is list:
                    lists[f"{name}[{key!r}]"] = items
    return lists


def list_at(module: nn.Module, name: str) -> list[Any]:
    """Return the list named by `lists_of`; create it if only another rank has its key."""
    items = lists_of(module).get(name)
    if items is None:
        attribute, _, key = name.removesuffix("]").partition("[")
        items = vars(module)[attribute][ast.literal_eval(key)] = []
    return items


def was_updated(metric: Any) -> bool:
    return bool(getattr(metric, "_update_count", 0))


def set_aside(metric: Any) -> tuple[dict[str, Any], int, Any] | None:
    """Return and reset the state of a metric; None if it is already empty."""
    if not was_updated(metric):
        return None
    values = {name: copy.copy(value) for name, value in metric.metric_state.items()}
    state = values, metric._update_count, metric._computed
    metric.reset()
    return state


def put_back(metric: Any, state: tuple[dict[str, Any], int, Any] | None) -> None:
    """Restore the state that `set_aside` returned."""
    if was_updated(metric):
        metric.reset()
    if state is None:
        return
    for name, value in state[0].items():
        setattr(metric, name, value)
    metric._update_count = state[1]
    metric._computed = state[2]


def taken_apart(value: Any, row: list[Any], name: str, deep: int = 0) -> Any:
    """Convert a nested value to JSON form. Waits for the device.

    Its tensors are appended to `row`.

    Raises:
        ConfigError: a value that cannot be sent to the other ranks.
    """
    if isinstance(value, Tensor):
        # Waits for the device, once for each tensor.
        row.append(value.detach().cpu())
        return {"tensor": len(row) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        row.append(torch.as_tensor(value))
        return {"array": len(row) - 1}
    if isinstance(value, dict) and deep < _MAX_DEPTH and all(isinstance(key, str | int) for key in value):
        return {"dict": [[key, taken_apart(item, row, name, deep + 1)] for key, item in value.items()]}
    fields = _fields(value)
    if fields is not None and deep < _MAX_DEPTH:
        inside = []
        for key, item in fields.items():
            inside.append([key, taken_apart(item, row, name, deep + 1)])
        return {"object": [type(value).__module__, type(value).__qualname__, inside]}
    if isinstance(value, list | tuple) and deep < _MAX_DEPTH:
        sequence_type = "tuple" if isinstance(value, tuple) else "list"
        return {sequence_type: [taken_apart(item, row, name, deep + 1) for item in value]}
    raise _NoPlainValue(type(value).__name__, name)


def put_together(form: Any, row: list[Any]) -> Any:
    """Rebuild a value from the form of `taken_apart`; its tensors are on the host."""
    ((tag, content),) = form.items()
    if tag == "tensor":
        return row[content]
    if tag == "dtype":
        return getattr(torch, content)
    if tag == "array":
        array = row[content].numpy()
        if array.ndim:
            return array
        return array[()]
    if tag == "dict":
        return {key: put_together(item, row) for key, item in content}
    if tag == "object":
        return _rebuild(content[0], content[1], {key: put_together(item, row) for key, item in content[2]})
    if tag in ("list", "tuple"):
        parts = [put_together(item, row) for item in content]
        if tag == "tuple":
            return tuple(parts)
        return parts
    return content


def pack(value: Any, hook: str) -> list[Any]:
    """Convert a nested value with tensors to plain values.

    Raises:
        ConfigError: a value that has no such form; the message names the hook.
    """
    row: list[Any] = []
    try:
        form = taken_apart(value, row, hook)
    except _NoPlainValue as error:
        raise ConfigError(
            f"from_lightning: {hook} puts a {error.kind} into the checkpoint, which has no pickled values: use "
            "tensors, numbers, strings, and lists and dicts of them; of a module its state_dict()"
        ) from None
    return [form, [_encode(tensor) for tensor in row]]


def unpack(content: list[Any]) -> Any:
    """Rebuild the value of `pack`; its tensors are on the host."""
    return put_together(content[0], [_decode(text) for text in content[1]])


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass or named tuple of a module; else None."""
    if "<locals>" in type(value).__qualname__ or isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    return None


def _rebuild(module: str, name: str, fields: dict[str, Any]) -> Any:
    """Rebuild an object from its class and fields.

    A dataclass is rebuilt without `__post_init__`, which has already run.
    """
    target_class: Any = sys.modules[module]
    for attribute in name.split("."):
        target_class = getattr(target_class, attribute)
    if not dataclasses.is_dataclass(target_class):
        return target_class(**fields)
    # mypy cannot know the class. `__post_init__` is skipped: it has already run.
    instance = object.__new__(target_class)  # type: ignore[arg-type]
    for key, value in fields.items():
        object.__setattr__(instance, key, value)
    return instance


def _fill(parts: list[Any], module: nn.Module, metrics: dict[str, Any]) -> None:
    """Put the values of all ranks into the module's lists and metrics."""
    rows = []
    for _, _, texts in parts:
        rows.append([_decode(text) for text in texts])
    items_by_name: dict[str, list[tuple[list[int], list[Any]]]] = {}
    for (items, _, _), row in zip(parts, rows, strict=True):
        for name, key, form in items:
            items_by_name.setdefault(name, []).append((key, put_together(form, row)))
    for name, pieces in items_by_name.items():
        if name.partition("[")[0] in vars(module):
            # Sorted by (step, micro-batch): the order is the same on any number of ranks.
            list_at(module, name)[:] = [item for _, piece in sorted(pieces, key=lambda pair: pair[0]) for item in piece]
    for name, metric in metrics.items():
        states = []
        for (_, forms, _), row in zip(parts, rows, strict=True):
            if name in forms:
                states.append(put_together(forms[name], row))
        if states:
            metric.reset()
            merge(metric, states)


def _matches(notes: list[tuple[Key, int]], items: list[Any] | None) -> bool:
    """Whether the list has exactly the recorded items."""
    return items is not None and sum(count for _, count in notes) == len(items)


def _split_items(notes: list[tuple[Key, int]], items: list[Any]) -> Iterator[tuple[Key, list[Any]]]:
    start = 0
    for key, count in notes:
        yield key, items[start : start + count]
        start += count


def _encode(tensor: Tensor) -> list[Any]:
    """Convert a host tensor to plain values."""
    raw = host_bytes(tensor)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(raw).decode()]


def _decode(content: list[Any]) -> Tensor:
    dtype_name, shape, text = content
    raw = bytearray(base64.b64decode(text))
    dtype = getattr(torch, dtype_name)
    if raw:
        flat = torch.frombuffer(raw, dtype=dtype)
    else:
        flat = torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
