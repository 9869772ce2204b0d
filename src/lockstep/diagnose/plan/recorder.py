"""What a traced training holds and computes: bytes over all storages by phase, operations and the bytes they move.

    recorder = Recorder()
    with fake_world(...) as world, recorder:
        recorder.phase = "forward"
        ...
    recorder.peaks["forward"], recorder.work["forward"].flops

A storage counts from the operation that makes it to its end, with the bytes that it has: what an allocator is asked
for. FSDP2 empties storages that it keeps, and fills them again; both are seen.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lockstep.diagnose.plan.fakes import local

__all__ = ["Recorder", "Work"]

_ATEN: Any = torch.ops.aten
# The CPU's kernels of attention, whose operations are counted as FlashAttention's.
_ALIKE = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _ATEN._scaled_dot_product_flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _ATEN._scaled_dot_product_flash_attention_backward,
}
_Resize = Callable[[Any, int], Any]


@dataclass(slots=True)
class Work:
    """What one phase computes.

    Attributes:
        flops: operations of products, convolutions and attention: 2 for a multiplication with its addition.
        moved: bytes that all operations read and write, each by itself.
        calls: operations, views left out.
    """

    flops: float = 0.0
    moved: float = 0.0
    calls: float = 0.0


class _Cell:
    """Bytes of one storage."""

    __slots__ = ("__weakref__", "size")

    def __init__(self, size: int) -> None:
        self.size = size


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered.

    Args:
        parts: name -> tensors that are of that part now; asked at each new peak. None: peaks are not divided.
        real: tensors have values.

    Attributes:
        phase: what is counted goes to it.
        asked: whether operations may ask for numbers that are not there: they get 1.
        level, peaks: bytes now; the most of them by phase.
        parts: by phase, the bytes of each part at its peak.
        work: by phase.
        operation: the last one, for an error.
    """

    def __init__(self, parts: Callable[[], dict[str, list[Tensor]]] | None = None, real: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.asked, self.level = "start", True, 0
        self.peaks: dict[str, int] = {}
        self.parts: dict[str, dict[str, int]] = {}
        self.work: dict[str, Work] = {}
        self.operation = ""
        self.divide, self.real = parts, real
        self._cells: weakref.WeakKeyDictionary[Any, _Cell] = weakref.WeakKeyDictionary()
        self._ends: dict[int, Any] = {}
        self._resize: _Resize | None = None

    def begin(self) -> None:
        """Forgets what was counted by phase; what is held stays."""
        self.peaks, self.parts, self.work = {}, {}, {}

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        known, plain = self._cells, self._resize

        def resize_(storage: Any, size: int) -> Any:
            done = plain(storage, size)
            cell = known.get(storage)
            if cell is not None:
                self.level += size - cell.size
                cell.size = size
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[assignment, method-assign]
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operation = str(func)
        if self.asked and not self.real:
            if func is _ATEN._local_scalar_dense.default:
                return 1
            if func is _ATEN.equal.default:
                return True
        found = func(*args, **kwargs)
        fresh = False
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                fresh = self._take(leaf) or fresh
        self._count(func, args, kwargs, found)
        if fresh and self.level > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self.level
            if self.divide:
                self.parts[self.phase] = self._divided()
        return found

    def _take(self, tensor: Tensor) -> bool:
        """Whether its storage is new."""
        storage = local(tensor).untyped_storage()
        if storage in self._cells:
            return False
        cell = _Cell(storage.nbytes())
        self._cells[storage] = cell
        self.level += cell.size
        place = id(cell)

        def end(_: Any) -> None:
            self.level -= cell.size
            self._ends.pop(place, None)

        self._ends[place] = weakref.ref(storage, end)
        return True

    def _count(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        if func.is_view or func is _ATEN.detach.default:
            return
        work = self.work.setdefault(self.phase, Work())
        packet = _ALIKE.get(str(func._overloadpacket), func._overloadpacket)
        if packet in flop_registry:
            work.flops += flop_registry[packet](*args, **kwargs, out_val=found)
        work.calls += 1
        work.moved += sum(local(leaf).nbytes for leaf in tree_leaves((args, kwargs, found)) if _is_tensor(leaf))

    def _divided(self) -> dict[str, int]:
        """Bytes of each part, a storage once; "rest": of none."""
        seen, found = set[Any](), dict[str, int]()
        assert self.divide
        for name, tensors in self.divide().items():
            total = 0
            for tensor in tensors:
                storage = local(tensor).untyped_storage()
                if storage not in seen:
                    seen.add(storage)
                    total += storage.nbytes()
            found[name] = total
        return found | {"rest": self.level - sum(found.values())}


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
