"""Observe the operations of a forward: their dtypes, their digests, and the first that differs.

with OperationLog(model) as log: ...
first_unequal(log.lines, other.lines)        the first operation with another result
"""

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
import xxhash
from torch import Tensor, nn

# torch's dispatch modes have no public module and no annotations; the name is the same since torch 2.11.
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.checkpoint.write import bytes_of
from lockstep.errors import LockstepError

__all__ = ["DtypeTracker", "OperationLog", "OutputLog", "coarsest", "digest", "first_unequal"]


# Module, operation, digests.
Line = tuple[str, str, list[str]]


def coarsest(dtypes: Iterable[torch.dtype]) -> str:
    """Return the name of the dtype that rounds most, such as "bfloat16"; default "float64"."""
    return str(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)).removeprefix("torch.")


class DtypeTracker(TorchDispatchMode):
    """Dispatch mode that records the floating-point and complex dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in _tensors(result):
            if t.is_floating_point() or t.is_complex():
                self.dtypes.add(t.dtype)
        return result

    @property
    def name(self) -> str:
        """The coarsest recorded dtype, such as "bfloat16"; "float64" if there was none."""
        return coarsest(self.dtypes)


class OperationLog(TorchDispatchMode):
    """Dispatch mode that records every operation's digest and its module. Waits for the device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[Line] = []
        self._inside: list[str] = []
        # mypy cannot tell the type of the hooks here.
        self._model, self._hooks = model, []  # type: ignore[var-annotated]

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            self._hooks.append(module.register_forward_pre_hook(lambda *_, shown=label: self._inside.append(shown)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        digests = []
        for tensor in _tensors(result):
            if not tensor.is_meta:
                digests.append(digest(tensor))
        # A new tensor without values has uninitialised memory, which differs from run to run.
        if digests and not str(function).startswith(("aten.empty", "aten.new_empty")):
            self.lines.append((self._inside[-1] if self._inside else "", str(function), digests))
        return result

    def _leave(self) -> None:
        # Must return None: torch would replace the module's output by any other value.
        self._inside.pop()


class OutputLog:
    """Context manager that records the size of every module's output, in the order of their ends.

    Attributes:
        outputs: call -> [shape, 2-norm, product with fixed numbers], which together change if the output does.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, list[Any]] = {}
        self._model = model
        self._hooks: list[Any] = []
        self._inside: list[str] = []

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            label = name or "the model"
            self._hooks.append(module.register_forward_pre_hook(lambda *_, shown=label: self._inside.append(shown)))
            self._hooks.append(module.register_forward_hook(lambda _, __, output: self._leave(output)))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        # A wrong plan may end in torch's message about two shapes, which names no layer.
        if isinstance(error, RuntimeError | IndexError) and self._inside:
            raise LockstepError(
                f"the forward of {self._inside[-1]} fails where the model is divided: {error}"
            ) from error

    def _leave(self, output: Any) -> None:
        name = self._inside.pop()
        tensor = next(_tensors(output), None)
        if tensor is None or not tensor.is_floating_point():
            return
        flat = tensor.detach().reshape(-1).double()
        # A norm alone is the same if heads are exchanged.
        along = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device).cos()
        calls = sum(call.partition(", ")[0] == name for call in self.outputs)
        call = f"{name}, call {calls + 1}" if calls else name
        # The host waits for the device here, in one micro-batch of a run.
        self.outputs[call] = [list(tensor.shape), float(flat.norm()), float(flat @ along)]


def first_unequal(first: list[Line], second: list[Line]) -> tuple[int, Line, Line] | None:
    """Return (index, line, line) of the first difference between two logs; None if they agree."""
    for index, (line, other_line) in enumerate(zip(first, second, strict=False)):
        if list(line) != list(other_line):
            return index, line, other_line
    if len(first) == len(second):
        return None
    longer = max(first, second, key=len)
    index = min(len(first), len(second))
    ended: Line = ("", "the end", [])
    if longer is first:
        return (index, longer[index], ended)
    return (index, ended, longer[index])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def digest(value: Tensor | bytes) -> str:
    """Return xxh3 of the bytes as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(bytes_of(value) if isinstance(value, Tensor) else value)
