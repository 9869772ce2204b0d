"""Where the tensors of a model, a task and a batch lie: found before torch stumbles over one, and named when it does.

for found in elsewhere(model, task, batch, device): ...     # Lying("buffer 'norm.mean'", cpu, sure=True)
line = explained(error, model, task, batch)                 # "" unless torch complained of devices
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.task import Task, written

__all__ = ["Lying", "elsewhere", "explained"]

_COMPLAINT = re.compile(
    r"on the same device|expected device|different devices|two devices|should be the same$|expected.* on (?:cpu|cuda)"
    r"|(?:FloatTensor|HalfTensor|BFloat16Tensor)\) and weight type|is on \w+(?::\d+)?,? but expected",
    re.MULTILINE,
)
_DEEP = 3  # containers within each other that are looked into
_SHOWN = 4


class Lying(NamedTuple):
    """A tensor that is not where the run computes.

    Attributes:
        what: `buffer 'norm.mean'`, `the model's attribute 'scale'`, `batch[1]`.
        where: its device.
        sure: it cannot be meant; else what holds it may move it when it is used.
    """

    what: str
    where: torch.device
    sure: bool


def elsewhere(model: nn.Module, task: Task, batch: Any, device: torch.device) -> list[Lying]:
    """The tensors that do not lie on `device`.

    Looked at are parameters and buffers of the model and of modules that the task holds (a criterion), tensors that are
    plain attributes of these, also in lists and dicts, which `model.to()` leaves where they are; and the batch, as the
    loss gets it. A whole model in host memory (offloaded) is meant, and so are single numbers there.
    """
    found = list(_of_module(model, "", device))
    own = written(task)
    for name, value in vars(own).items() if hasattr(own, "__dict__") else ():
        if isinstance(value, nn.Module) and value is not model:
            found += [each._replace(what=f"the task's {name}: {each.what}") for each in _of_module(value, "", device)]
        elif not isinstance(value, nn.Module):
            found += [
                Lying(f"the task's attribute '{path}'", tensor.device, tensor.is_meta)
                for path, tensor in _tensors(value, name)
                if _apart(tensor, device)
            ]
    found += [Lying(path, tensor.device, True) for path, tensor in _tensors(batch, "batch") if _apart(tensor, device)]
    return found


def _of_module(module: nn.Module, prefix: str, device: torch.device) -> Iterator[Lying]:
    places = {parameter.device.type for parameter in module.parameters()}
    offloaded = places == {"cpu"} and device.type != "cpu"
    for name, parameter in module.named_parameters():
        if not offloaded and not _same(parameter.device, device):
            yield Lying(f"parameter '{prefix}{name}'", parameter.device, True)
    for name, buffer in module.named_buffers():
        if not offloaded and _apart(buffer, device):
            yield Lying(f"buffer '{prefix}{name}'", buffer.device, True)
    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if attribute in ("_parameters", "_buffers", "_modules") or isinstance(value, nn.Module):
                continue
            for path, tensor in _tensors(value, attribute):
                if _apart(tensor, device):
                    where = f"{prefix}{name}.{path}" if name else f"{prefix}{path}"
                    yield Lying(f"attribute '{where}', no buffer", tensor.device, tensor.is_meta)


def _tensors(value: Any, path: str, deep: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif deep < _DEEP and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}[{key!r}]", deep + 1)
    elif deep < _DEEP and isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _tensors(inner, f"{path}[{place}]", deep + 1)


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _apart(tensor: Tensor, device: torch.device) -> bool:
    is_number = tensor.ndim == 0 and tensor.device.type == "cpu"  # torch takes such along
    return not is_number and not _same(tensor.device, device)


def explained(error: BaseException, model: nn.Module, task: Task, batch: Any) -> str:
    """What lies where, if `error` is torch's complaint of tensors on different devices; else ""."""
    if not isinstance(error, RuntimeError | TypeError | ValueError) or not _COMPLAINT.search(str(error)):
        return ""
    counts = Counter(parameter.device for parameter in model.parameters())
    if not counts:
        return ""
    device = counts.most_common(1)[0][0]
    found = elsewhere(model, task, batch, device)
    if not found:
        return f"all that was looked at lies on {device}: a tensor made inside the method lies elsewhere"
    shown = ", ".join(f"{each.what} on {each.where}" for each in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"the model lies on {device}, and elsewhere: {shown}{more}; register_buffer() has a tensor move with its module"
    )
