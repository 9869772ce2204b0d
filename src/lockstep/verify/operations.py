"""What a model computes, operation by operation, below autograd and modules.

with DtypeTracker() as seen: ...        seen.dtypes: floating-point and complex dtypes that came up
with OperationLog(model) as log: ...    log.lines: (module, operation, digest of the result), in order
"""

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
import xxhash
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.checkpoint.write import bytes_of

__all__ = ["DtypeTracker", "Line", "OperationLog", "coarsest", "digest", "first_unequal"]

Line = tuple[str, str, list[str]]  # module, operation, digests


def coarsest(dtypes: Iterable[torch.dtype]) -> str:
    """The name of the one that rounds most: "bfloat16"; "float64" where there is none."""
    return str(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)).removeprefix("torch.")


class DtypeTracker(TorchDispatchMode):
    """Notes the floating-point and complex dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.dtypes |= {t.dtype for t in _tensors(result) if t.is_floating_point() or t.is_complex()}
        return result

    @property
    def name(self) -> str:
        """The coarsest of them: "bfloat16"; "float64" where there was none."""
        return coarsest(self.dtypes)


class OperationLog(TorchDispatchMode):
    """Notes every operation's result by its digest, and the module in whose forward it ran. Waits for the device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[Line] = []
        self._inside: list[str] = []
        self._model, self._hooks = model, []  # type: ignore[var-annotated]

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            shown = f"{name or 'the model'} ({type(module).__name__})"
            self._hooks.append(module.register_forward_pre_hook(lambda *_, shown=shown: self._inside.append(shown)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [digest(tensor) for tensor in _tensors(result) if not tensor.is_meta]
        if found and not str(function).startswith(("aten.empty", "aten.new_empty")):  # whatever lay in that memory
            self.lines.append((self._inside[-1] if self._inside else "", str(function), found))
        return result

    def _leave(self) -> None:
        self._inside.pop()  # and returns None: a forward hook's value would take the place of the output


def first_unequal(one: list[Line], other: list[Line]) -> tuple[int, Line, Line] | None:
    """(place, line, line) where two logs first differ; None where they agree."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if list(mine) != list(theirs):
            return place, mine, theirs
    if len(one) == len(other):
        return None
    longer, place = max(one, other, key=len), min(len(one), len(other))
    ended: Line = ("", "the end", [])
    return (place, longer[place], ended) if longer is one else (place, ended, longer[place])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def digest(value: Tensor | bytes) -> str:
    """xxh3 of the bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(bytes_of(value) if isinstance(value, Tensor) else value)
