"""Record the memory by phase, the operations and the traffic of a traced training.

    recorder = OperationRecorder()
    with fake_world(...) as world, recorder:
        recorder.phase = "forward"
        ...
    recorder.peaks["forward"], recorder.work["forward"].flops

A storage counts from its creation to its end, with its bytes: the request to an allocator. FSDP2 empties storages that
it keeps, and fills them again; both are recorded.
"""

import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lockstep.diagnose.plan.fakes import UNKNOWN, Unwatched, fake_device, local, result

__all__ = ["OperationRecorder", "Work"]

_ATEN: Any = torch.ops.aten
# Growth of a peak, as a share, below which it is not divided again.
_MIN_GROWTH = 0.002
_DEVICE: Any = torch.ops.prim.device.default
# The CPU's attention kernels, counted as FlashAttention's operations.
_ALIKE = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _ATEN._scaled_dot_product_flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _ATEN._scaled_dot_product_flash_attention_backward,
}
_Resize = Callable[[Any, int], Any]
# Messages within a replica -> the places of the process group and of what a rank brings among the arguments, and how
# often a rank sends that: ranks -> times.
_MESSAGES: dict[Any, tuple[int, int, Callable[[int], float]]] = {
    # A ring passes each part of the tensor around twice.
    torch.ops.c10d.allreduce_.default: (1, 0, lambda ranks: 2 * (ranks - 1) / ranks),
    torch.ops.c10d.allgather_.default: (2, 1, lambda ranks: ranks - 1),
    torch.ops.c10d.alltoall_base_.default: (2, 1, lambda ranks: (ranks - 1) / ranks),
    # Hidden states of a pipeline, or their gradient, to one neighbour.
    torch.ops.c10d.send.default: (1, 0, lambda ranks: 1),
}


@dataclass(slots=True)
class Work:
    """The work of a phase.

    Attributes:
        flops: operations of products, convolutions and attention: 2 for a multiply-add.
        moved: bytes that all operations read and write, each by itself.
        calls: operations without views.
        sent: bytes that a rank sends to the others of its replica, in rings or to a neighbour.
        messages: within the replica, those that it takes part in or sends.
    """

    flops: float = 0.0
    moved: float = 0.0
    calls: float = 0.0
    sent: float = 0.0
    messages: float = 0.0

    @classmethod
    def of_each(cls, function: Callable[..., float], *works: "Work") -> "Work":
        """Return the function of each quantity of the works."""
        return cls(*map(function, *map(astuple, works)))


class _Cell:
    """Bytes of a storage."""

    __slots__ = ("__weakref__", "size")

    def __init__(self, size: int) -> None:
        self.size = size


# torch's dispatch modes have no annotations, so their methods are untyped here too.
class OperationRecorder(Unwatched):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts memory and work.

    Args:
        parts: returns name -> tensors of that part now; called at each new peak. None: peaks are not divided.
        real: tensors have values.

    Attributes:
        phase: the phase to count for.
        asked: operations may read numbers of fake tensors: they get 1.
        level: current bytes.
        peaks: the maximum bytes by phase.
        levels: by phase, the bytes after each operation that made a storage, in order.
        parts: by phase, the bytes of each part at its peak.
        work: by phase.
        operation: the last one, for an error.
        replica_groups: names of the process groups within the replica.
    """

    def __init__(self, parts: Callable[[], dict[str, list[Tensor]]] | None = None, real: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "start"
        self.asked = True
        self.level = 0
        self.peaks: dict[str, int] = {}
        self.levels: dict[str, list[int]] = {}
        self.parts: dict[str, dict[str, int]] = {}
        self.work: dict[str, Work] = {}
        self._last: Any = ""
        self._kinds: dict[Any, tuple[bool, Any]] = {}
        self.divide = parts
        self.real = real
        self.replica_groups: frozenset[str] = frozenset()
        self._divided_at: dict[str, int] = {}
        self._cells: weakref.WeakKeyDictionary[Any, _Cell] = weakref.WeakKeyDictionary()
        self._ends: dict[int, Any] = {}
        self._resize: _Resize | None = None

    @property
    def operation(self) -> str:
        return str(self._last)

    def begin(self) -> None:
        """Reset the counts by phase; live storages stay."""
        self.peaks = {}
        self.levels = {}
        self.parts = {}
        self.work = {}

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        cells = self._cells
        plain = self._resize

        # FSDP2 empties storages that it keeps and fills them again, which no operation shows.
        def resize_(storage: Any, size: int) -> Any:
            value = plain(storage, size)
            cell = cells.get(storage)
            if cell is not None:
                self.level += size - cell.size
                cell.size = size
            return value

        # mypy forbids the assignment to a method of torch.
        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[assignment, method-assign]
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This operation is frequent and does no work, so it is answered first.
        if func is _DEVICE:
            device = fake_device(args[0])
            if device is not None:
                return device
        kwargs = kwargs or {}
        self._last = func
        if self.asked and not self.real:
            if func is _ATEN._local_scalar_dense.default:
                return 1
            if func is _ATEN.equal.default:
                return True
        output = UNKNOWN if self.real else result(func, args, kwargs)
        if output is UNKNOWN:
            output = func(*args, **kwargs)
        fresh = False
        leaves = _tensors(output)
        for leaf in leaves:
            fresh = self._track(leaf) or fresh
        self._count(func, args, kwargs, output, leaves)
        if fresh:
            levels = self.levels.get(self.phase)
            if levels is None:
                levels = self.levels[self.phase] = []
            levels.append(self.level)
        if fresh and self.level > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self.level
            if self.divide:
                self._divide()
        return output

    def _track(self, tensor: Tensor) -> bool:
        """Track a tensor's storage, and return whether it is new."""
        local_tensor = local(tensor)
        storage = local_tensor.untyped_storage()
        if storage in self._cells:
            return False
        # DeepSpeed has tensors on the meta device that describe a shape only.
        if (fake_device(local_tensor) or local_tensor.device).type == "meta":
            return False
        cell = _Cell(storage.nbytes())
        self._cells[storage] = cell
        self.level += cell.size
        key = id(cell)

        # A weak reference without a callback would not show when the storage ends.
        def end(_: Any) -> None:
            self.level -= cell.size
            self._ends.pop(key, None)

        self._ends[key] = weakref.ref(storage, end)
        return True

    def _count(self, func: Any, args: Any, kwargs: Any, output: Any, outputs: list[Tensor]) -> None:
        traits = self._kinds.get(func)
        if traits is None:
            packet = _ALIKE.get(str(func._overloadpacket), func._overloadpacket)
            traits = self._kinds[func] = (func.is_view or func is _ATEN.detach.default, flop_registry.get(packet))
        view, flops = traits
        if view:
            return
        work = self.work.get(self.phase)
        if work is None:
            work = self.work[self.phase] = Work()
        if flops is not None:
            work.flops += flops(*args, **kwargs, out_val=output)
        work.calls += 1
        if func in _MESSAGES:
            self._count_sent(func, args, work)
        if kwargs:
            tensors = _tensors(args) + _tensors(kwargs) + outputs
        else:
            tensors = _tensors(args) + outputs
        work.moved += sum([local(tensor).nbytes for tensor in tensors])

    def _count_sent(self, func: Any, args: Any, work: Work) -> None:
        group_at, tensors_at, times = _MESSAGES[func]
        group = dist.ProcessGroup.unbox(args[group_at])
        if group.group_name not in self.replica_groups:
            return
        work.messages += 1
        work.sent += times(group.size()) * sum([local(tensor).nbytes for tensor in _tensors(args[tensors_at])])

    def _divide(self) -> None:
        """Divide the phase's new peak into parts.

        It is done again only if the peak is higher by a little, since most of the growth has no name.
        """
        parts = self.parts.get(self.phase)
        if parts is None or self.level > self._divided_at[self.phase] * (1 + _MIN_GROWTH):
            self._divided_at[self.phase] = self.level
            parts = self.parts[self.phase] = self._part_sizes()
        parts["rest"] = self.level - sum(size for name, size in parts.items() if name != "rest")

    def _part_sizes(self) -> dict[str, int]:
        """Return the bytes of each part; a storage counts once."""
        storages = set[Any]()
        sizes = dict[str, int]()
        assert self.divide
        for name, tensors in self.divide().items():
            part_storages = {local(tensor).untyped_storage() for tensor in tensors} - storages
            storages |= part_storages
            sizes[name] = sum([storage.nbytes() for storage in part_storages])
        return sizes


def _tensors(nested: Any) -> list[Tensor]:
    """Return the tensors of an operation's arguments or result, nested or not."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = nested.values()
    elif not isinstance(nested, (tuple, list)):
        return []
    tensors = []
    for value in nested:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list, dict)):
            tensors += _tensors(value)
    return tensors
