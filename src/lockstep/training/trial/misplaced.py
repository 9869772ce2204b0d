"""Find tensors on another device than the model's, and explain the error that they cause.

for tensor in find_misplaced(model, task, batch, device): ...   # MisplacedTensor("buffer 'norm.mean'", cpu, True)
explain_device_error(error, model, task, batch)     # "": it is another error
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.task import Task, user_task

__all__ = [
    "MisplacedTensor",
    "explain_device_error",
    "find_misplaced",
]


_DEVICE_ERROR = re.compile(
    r"on the same device|expected device|different devices|two devices|should be the same$|expected.* on (?:cpu|cuda)"
    r"|(?:FloatTensor|HalfTensor|BFloat16Tensor)\) and weight type|is on \w+(?::\d+)?,? but expected",
    re.MULTILINE,
)
# Levels of nested containers to search.
_MAX_DEPTH = 3
# Tensors that a message names.
_MAX_SHOWN = 4


class MisplacedTensor(NamedTuple):
    """A tensor that is not on the device of the run.

    Attributes:
        label: such as `buffer 'norm.mean'`, `the task's attribute 'scale'` or `batch[1]`.
        is_wrong: certainly wrong; False if its owner may move it before using it.
    """

    label: str
    device: torch.device
    is_wrong: bool


def find_misplaced(model: nn.Module, task: Task, batch: Any, device: torch.device) -> list[MisplacedTensor]:
    """Find the tensors of model, task and batch that are not on `device`.

    It searches parameters, buffers and tensors in plain attributes of the model and of the task's modules, and the
    batch of a loss. A whole model in host memory (offloaded) is accepted, and so are single numbers.
    """
    misplaced = list(_misplaced_in_module(model, "", device))
    owner = user_task(task)
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if isinstance(value, nn.Module) and value is not model:
            for entry in _misplaced_in_module(value, "", device):
                misplaced.append(entry._replace(label=f"the task's {name}: {entry.label}"))
        elif not isinstance(value, nn.Module):
            for path, tensor in _iterate_tensors(value, name):
                if _is_misplaced(tensor, device):
                    misplaced.append(MisplacedTensor(f"the task's attribute '{path}'", tensor.device, tensor.is_meta))
    for path, tensor in _iterate_tensors(batch, "batch"):
        if _is_misplaced(tensor, device):
            misplaced.append(MisplacedTensor(path, tensor.device, True))
    return misplaced


def _misplaced_in_module(module: nn.Module, prefix: str, device: torch.device) -> Iterator[MisplacedTensor]:
    places = {parameter.device.type for parameter in module.parameters()}
    offloaded = places == {"cpu"} and device.type != "cpu"
    for name, parameter in module.named_parameters():
        if not offloaded and not _same_device(parameter.device, device):
            yield MisplacedTensor(f"parameter '{prefix}{name}'", parameter.device, True)
    for name, buffer in module.named_buffers():
        if not offloaded and _is_misplaced(buffer, device):
            yield MisplacedTensor(f"buffer '{prefix}{name}'", buffer.device, True)
    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if attribute in ("_parameters", "_buffers", "_modules") or isinstance(value, nn.Module):
                continue
            for path, tensor in _iterate_tensors(value, attribute):
                if _is_misplaced(tensor, device):
                    location = f"{prefix}{name}.{path}" if name else f"{prefix}{path}"
                    yield MisplacedTensor(f"attribute '{location}', no buffer", tensor.device, tensor.is_meta)


def _iterate_tensors(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth < _MAX_DEPTH and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iterate_tensors(inner, f"{path}[{key!r}]", depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _iterate_tensors(inner, f"{path}[{index}]", depth + 1)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _is_misplaced(tensor: Tensor, device: torch.device) -> bool:
    # torch accepts a 0-dim tensor of the CPU on any device.
    is_number = tensor.ndim == 0 and tensor.device.type == "cpu"
    return not is_number and not _same_device(tensor.device, device)


def explain_device_error(error: BaseException, model: nn.Module, task: Task, batch: Any) -> str:
    """List the misplaced tensors if `error` is torch's error about devices; otherwise return ""."""
    if not isinstance(error, RuntimeError | TypeError | ValueError) or not _DEVICE_ERROR.search(str(error)):
        return ""
    counts = Counter(parameter.device for parameter in model.parameters())
    if not counts:
        return ""
    device = counts.most_common(1)[0][0]
    misplaced = find_misplaced(model, task, batch, device)
    if not misplaced:
        return f"model, task and batch are on {device}: the method creates a tensor on another device"
    listed = ", ".join(f"{entry.label} on {entry.device}" for entry in misplaced[:_MAX_SHOWN])
    if len(misplaced) > _MAX_SHOWN:
        more = f" and {len(misplaced) - _MAX_SHOWN} more"
    else:
        more = ""
    return f"the model is on {device}, but {listed}{more}; register_buffer() makes a tensor move with its module"
