"""What the steps of a module leave behind in it: items that they append to its lists, and states of its metrics.

with Leavings.undone(module): ...               # nothing of it is left behind
with leavings.noted(module, (step, index)): ...     # what is appended is known by its micro-batch
with leavings.gathered(module, gather): ...     # on every rank all that was left on any, in order
"""

import ast
import base64
import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.tasks.metric_states import merge

__all__ = [
    "Leavings",
    "apart",
    "is_metric",
    "list_at",
    "lists_of",
    "metrics_of",
    "packed",
    "put_back",
    "put_together",
    "set_aside",
    "taken_apart",
    "unpacked",
    "was_updated",
]


_INSIDE = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", __name__)
_FOR_STEPS = "torch.distributed.nn."  # collectives with gradients, for whoever computes with them
_OWN_ATTRIBUTES = ("torch.", "lockstep.")


@contextlib.contextmanager
def apart(step: str) -> Iterator[None]:
    """Within it a collective that is called from elsewhere than torch and lockstep raises ConfigError."""
    if not dist.is_initialized():
        yield
        return
    inside: Any = c10d
    plain = inside._rank_not_in_group  # which every collective asks first, however it was imported

    def asked(*given: Any) -> Any:
        called, caller = _called()
        speaks = caller.startswith(_FOR_STEPS) or not caller.startswith(_OWN_ATTRIBUTES)
        if speaks and not called.startswith("get_"):  # a rank and the like may be asked for
            raise ConfigError(
                f"from_lightning: {step} calls torch.distributed.{called}, and what it computes then depends on the "
                "number of ranks: compute within the micro-batch, log a sum, or write the loss over all samples of a "
                "step as `outputs` and `step_loss` of a lockstep.Task"
            )
        return plain(*given)

    inside._rank_not_in_group = asked
    try:
        yield
    finally:
        inside._rank_not_in_group = plain


def _called() -> tuple[str, str]:
    """The collective that is called, and the module that calls it."""
    frame, name = sys._getframe(2), ""
    while frame.f_back is not None and frame.f_globals.get("__name__", "") in _INSIDE:
        name = frame.f_code.co_name if frame.f_globals["__name__"] == _INSIDE[0] else name
        frame = frame.f_back
    return name, str(frame.f_globals.get("__name__", ""))


_DEEP = 8  # containers within each other
_OWN = ("_parameters", "_buffers", "_modules", "_fabric_optimizers", "_forward_hooks", "_backward_hooks")
_MOVING = ("training", "_current_fx_name", "_metric_attributes", "_trainer")  # attributes that are not the user's

Key = tuple[int, int]


class _NoPlainValue(ConfigError):
    """A step leaves something of a `kind` that cannot be sent to the other ranks."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        super().__init__(
            f"from_lightning: a step leaves a {kind} in self.{name}, which cannot be put together with that of other "
            "micro-batches: leave tensors, numbers, texts, and lists and dicts of them"
        )


@final
class Leavings:
    """What the micro-batches of this rank left in lists of the module since an epoch began."""

    def __init__(self) -> None:
        self._noted: dict[str, list[tuple[Key, int]]] = {}

    def clear(self) -> None:
        self._noted.clear()

    @staticmethod
    @contextlib.contextmanager
    def undone(module: nn.Module) -> Iterator[None]:
        """What is appended, assigned to plain attributes or counted by metrics within it is taken back."""
        metrics, lists, plain = metrics_of(module), lists_of(module), dict(vars(module))
        lengths = {name: len(held) for name, held in lists.items()}
        aside = {name: set_aside(metric) for name, metric in metrics.items()}
        try:
            yield
        finally:
            for name, metric in metrics.items():
                put_back(metric, aside[name])
            for name, held in lists.items():
                del held[lengths[name] :]
            now = vars(module)
            for name in [name for name in now if name not in plain]:
                del now[name]
            now.update({name: value for name, value in plain.items() if name not in _MOVING})

    @contextlib.contextmanager
    def noted(self, module: nn.Module, key: Key) -> Iterator[None]:
        """What is appended within it is known as that of the micro-batch `key`."""
        before = {name: len(held) for name, held in lists_of(module).items()}
        yield
        for name, held in lists_of(module).items():
            if len(held) > before.get(name, 0):
                self._noted.setdefault(name, []).append((key, len(held) - before.get(name, 0)))

    @contextlib.contextmanager
    def gathered(self, module: nn.Module, gather: Callable[[Any], list[Any]]) -> Iterator[None]:
        """Within it the lists hold what all ranks have put in, in the order of micro-batches, and metrics all states.

        Collective. Raises ConfigError for what cannot be sent.
        """
        lists, metrics = lists_of(module), metrics_of(module)
        used = {name: metric for name, metric in metrics.items() if was_updated(metric)}
        known = {name: notes for name, notes in self._noted.items() if _fits(notes, lists.get(name))}
        sizes = gather([sorted(known), sorted(used)])  # collective
        if len(sizes) > 1 and any(names for pair in sizes for names in pair):
            row: list[Any] = []
            items = [
                [name, list(key), taken_apart(part, row, name)]
                for name in known
                for key, part in _cut(known[name], lists[name])
            ]
            states = {name: taken_apart(dict(metric.metric_state), row, name) for name, metric in used.items()}
            parts = gather([items, states, [_sent(tensor) for tensor in row]])  # collective
            _fill(parts, module, metrics)
        yield


def is_metric(value: Any) -> bool:
    """Whether this is a torchmetrics.Metric, without importing it."""
    needed = ("metric_state", "update", "reset", "compute")
    return isinstance(value, nn.Module) and all(hasattr(type(value), name) for name in needed)


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """The module's metrics by name; those of a collection with their states apart from each other.

    They compute what they hold: whoever puts the states of ranks together does it here, and not they themselves.
    """
    each: Any
    for each in module.modules():
        if is_metric(each):
            each.sync_on_compute = each.dist_sync_on_step = each._to_sync = False
        if type(each).__name__ == "MetricCollection" and getattr(each, "_enable_compute_groups", False):
            each._enable_compute_groups, each._groups_checked = False, False  # or one's state would stand for others'
            each._groups = {}
    return {name: each for name, each in module.named_modules() if is_metric(each)}


def lists_of(module: nn.Module) -> dict[str, list[Any]]:
    """Lists that are attributes of the module, and those in dicts that are."""
    found: dict[str, list[Any]] = {}
    for name, value in vars(module).items():
        if name in _OWN:
            continue
        if type(value) is list:
            found[name] = value
        elif isinstance(value, dict):
            found |= {f"{name}[{key!r}]": each for key, each in value.items() if type(each) is list}
    return found


def list_at(module: nn.Module, name: str) -> list[Any]:
    """The list that `lists_of` calls so; where only another rank has come by a key of a dict yet, a new one."""
    held = lists_of(module).get(name)
    if held is None:
        attribute, _, key = name.removesuffix("]").partition("[")
        held = vars(module)[attribute][ast.literal_eval(key)] = []
    return held


def was_updated(metric: Any) -> bool:
    return bool(getattr(metric, "_update_count", 0))


def set_aside(metric: Any) -> tuple[dict[str, Any], int, Any] | None:
    """The state of a metric, which is empty afterwards; None where it is empty already."""
    if not was_updated(metric):
        return None
    held = {name: copy.copy(value) for name, value in metric.metric_state.items()}
    kept = held, metric._update_count, metric._computed
    metric.reset()
    return kept


def put_back(metric: Any, kept: tuple[dict[str, Any], int, Any] | None) -> None:
    """Gives a metric the state that `set_aside` took."""
    if was_updated(metric):
        metric.reset()
    if kept is None:
        return
    for name, value in kept[0].items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = kept[1], kept[2]


def taken_apart(value: Any, row: list[Any], name: str, deep: int = 0) -> Any:
    """The form of a nested value as JSON keeps it, whose tensors are put into `row`. Waits for the device.

    Raises:
        ConfigError: something that cannot be sent to the other ranks.
    """
    if isinstance(value, Tensor):
        row.append(value.detach().cpu())  # waits for the device
        return {"tensor": len(row) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        row.append(torch.as_tensor(value))
        return {"array": len(row) - 1}
    if isinstance(value, dict) and deep < _DEEP and all(isinstance(key, str | int) for key in value):
        return {"dict": [[key, taken_apart(each, row, name, deep + 1)] for key, each in value.items()]}
    fields = _fields(value)
    if fields is not None and deep < _DEEP:
        inside = [[key, taken_apart(each, row, name, deep + 1)] for key, each in fields.items()]
        return {"object": [type(value).__module__, type(value).__qualname__, inside]}
    if isinstance(value, list | tuple) and deep < _DEEP:
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [taken_apart(each, row, name, deep + 1) for each in value]}
    raise _NoPlainValue(type(value).__name__, name)


def put_together(form: Any, row: list[Any]) -> Any:
    """What `taken_apart` took apart; its tensors lie on the host."""
    ((kind, found),) = form.items()
    if kind == "tensor":
        return row[found]
    if kind == "dtype":
        return getattr(torch, found)
    if kind == "array":
        array = row[found].numpy()
        return array if array.ndim else array[()]
    if kind == "dict":
        return {key: put_together(each, row) for key, each in found}
    if kind == "object":
        return _made(found[0], found[1], {key: put_together(each, row) for key, each in found[2]})
    if kind in ("list", "tuple"):
        parts = [put_together(each, row) for each in found]
        return tuple(parts) if kind == "tuple" else parts
    return found


def packed(value: Any, hook: str) -> list[Any]:
    """A nested value, tensors and all, as plain values. Raises ConfigError for what is none, by the hook it is of."""
    row: list[Any] = []
    try:
        form = taken_apart(value, row, hook)
    except _NoPlainValue as error:
        raise ConfigError(
            f"from_lightning: {hook} puts a {error.kind} into the checkpoint, which holds nothing that is pickled: put "
            "tensors, numbers, texts, and lists and dicts of them; of a module its state_dict()"
        ) from None
    return [form, [_sent(tensor) for tensor in row]]


def unpacked(held: list[Any]) -> Any:
    """What `packed` gave, as it was; its tensors lie on the host."""
    return put_together(held[0], [_received(text) for text in held[1]])


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or a named tuple of a module; None for anything else."""
    if "<locals>" in type(value).__qualname__ or isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
    return dict(value._asdict()) if isinstance(value, tuple) and hasattr(value, "_asdict") else None


def _made(module: str, name: str, fields: dict[str, Any]) -> Any:
    """One of the class with these fields, as it was: `__post_init__` has run already."""
    kind: Any = sys.modules[module]
    for part in name.split("."):
        kind = getattr(kind, part)
    if not dataclasses.is_dataclass(kind):
        return kind(**fields)
    made = object.__new__(kind)  # type: ignore[arg-type]
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made


def _fill(parts: list[Any], module: nn.Module, metrics: dict[str, Any]) -> None:
    """Puts what the ranks sent into the module's lists and metrics."""
    rows = [[_received(text) for text in texts] for _, _, texts in parts]
    found: dict[str, list[tuple[list[int], list[Any]]]] = {}
    for (items, _, _), row in zip(parts, rows, strict=True):
        for name, key, form in items:
            found.setdefault(name, []).append((key, put_together(form, row)))
    for name, pieces in found.items():
        if name.partition("[")[0] in vars(module):
            list_at(module, name)[:] = [each for _, piece in sorted(pieces, key=lambda pair: pair[0]) for each in piece]
    for name, metric in metrics.items():
        states = [put_together(held[name], row) for (_, held, _), row in zip(parts, rows, strict=True) if name in held]
        if states:
            metric.reset()
            merge(metric, states)


def _fits(notes: list[tuple[Key, int]], held: list[Any] | None) -> bool:
    """Whether the list has what was noted, and nothing else."""
    return held is not None and sum(count for _, count in notes) == len(held)


def _cut(notes: list[tuple[Key, int]], held: list[Any]) -> Iterator[tuple[Key, list[Any]]]:
    start = 0
    for key, count in notes:
        yield key, held[start : start + count]
        start += count


def _sent(tensor: Tensor) -> list[Any]:
    """A tensor on the host as plain values."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(raw).decode()]


def _received(sent: list[Any]) -> Tensor:
    kind, shape, text = sent
    raw, dtype = bytearray(base64.b64decode(text)), getattr(torch, kind)
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
