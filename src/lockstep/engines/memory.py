"""Count the memory that an engine holds, and explain out-of-memory errors in one line.

    with explain_out_of_memory(engine, world):
        ...                                 # out of memory is raised as a LockstepError

An explanation first looks for tensors or processes on the wrong device, then suggests a change, with the bytes. The
memory is a GPU's, or the host's when training there. `footprint` counts a rank's parameters, gradients and states.
"""

import dis
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.ddp import shorten
from lockstep.errors import LockstepError
from lockstep.files import bytes_text
from lockstep.tensors import local_of
from lockstep.transforms.weight_copies import copies_of

__all__ = [
    "Footprint",
    "add_counter",
    "count_bytes",
    "describe",
    "explain_out_of_memory",
    "footprint",
    "is_out_of_memory",
]


class Footprint(NamedTuple):
    """Bytes on this rank, on any device; tensors that are gathered temporarily are not counted.

    Attributes:
        parameters: with buffers and copies of weights.
        gradients: those present, else those that a backward leaves after its exchange.
        states: of the optimizer, and the average of the weights.
    """

    parameters: int
    gradients: int
    states: int


_COUNTERS = "lockstep_bytes"  # attribute of an engine's `model`


def add_counter(model: nn.Module, counter: Callable[[], Footprint]) -> None:
    """Register a counter for `footprint`, where a state_dict is not distributed as it is held.

    Args:
        model: the engine's.
        counter: counts a part of this rank's memory; all counters together count all of it.
    """
    setattr(model, _COUNTERS, [*getattr(model, _COUNTERS, ()), counter])


def footprint(engine: Engine) -> Footprint:
    """Count the bytes that this rank holds now. Collective; most accurate after the first step."""
    counters = getattr(engine.model, _COUNTERS, ())
    if counters:
        return Footprint(*map(sum, zip(*(counter() for counter in counters), strict=True)))
    state = engine.state_dict()
    parameters = []
    for p in engine.model.parameters():
        if p.requires_grad:
            parameters.append(p)
    gradients = []
    for p in parameters:
        if p.grad is not None:
            gradients.append(p.grad)
    copies = copies_of(engine.model)
    weights = []
    for name, tensor in state.items():
        if name.startswith("model/"):
            weights.append(tensor)
    return Footprint(
        count_bytes([*weights, *(copies.tensors if copies else ())]),
        count_bytes(gradients or parameters),
        count_bytes(tensor for name, tensor in state.items() if name.startswith(("optimizer/", "average/"))),
    )


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the tensors' local parts, each piece of memory once."""
    sizes: dict[tuple[Any, ...], int] = {}
    for tensor in tensors:
        local = local_of(tensor)
        sizes[local.data_ptr(), local.device, local.shape] = local.nbytes
    return sum(sizes.values())


def describe(name: str, ranks: list[Any]) -> str:
    """Describe the footprints of all ranks in one line; they may have passed through JSON."""
    words = ("parameters", "gradients", "optimizer states")
    texts = []
    for word, sizes in zip(words, zip(*ranks, strict=True), strict=True):
        low = min(sizes)
        high = max(sizes)
        texts.append(f"{word} {bytes_text(high) if low == high else f'{bytes_text(low)} to {bytes_text(high)}'}")
    return f"engine {name} holds per rank: {', '.join(texts)}"


# The instructions of a `raise` statement.
_RAISES = ("RAISE_VARARGS", "RERAISE")
# A share of the device: its driver or a desktop may use that much without being reported.
_STRAY = 0.05


class DeviceMemory(NamedTuple):
    """Bytes of a device: in total, free, and held by this process."""

    total: int
    free: int
    own: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Query the device now.

        On a host, all memory that this process has not used at its peak counts as free, since caches give way.
        """
        if device.type != "cuda":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            # Linux reports the peak in KiB.
            used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return cls(total, total - used, used)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


@contextmanager
def explain_out_of_memory(engine: Engine | None, world: World) -> Iterator[None]:
    """Turn running out of memory into a LockstepError of one line.

    `engine` is None while none exists yet.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is the former
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, engine, world, DeviceMemory.of(world.device)) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error is a failed allocation on a device or the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _is_of_host_allocator(error)


def _is_of_host_allocator(error: Exception) -> bool:
    """Whether torch failed to allocate host memory.

    It has no error class for that, but no `raise` statement raises it either.
    """
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    # An error from C++ has no `raise` instruction at the end of its traceback.
    stated = trace is not None and dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in _RAISES
    return not stated and type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)


def out_of_memory(error: Exception, engine: Engine | None, world: World, device: DeviceMemory) -> LockstepError:
    """Return the error that explains `error`."""
    amount = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
    if by_host := re.search(r"tried to allocate (\d+) bytes", str(error)):
        amount = bytes_text(int(by_host[1]))
    begin = f"{world.label} ran out of memory on {world.device}" + (f", asking for {amount}" if amount else "")
    return LockstepError(f"{begin}: {_describe_misplaced(engine, world, device) or _advice(engine, device)}")


def _describe_misplaced(engine: Engine | None, world: World, device: DeviceMemory) -> str:
    """Describe tensors on the wrong device, or memory held by other processes; "" if none."""
    if engine:
        tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    else:
        tensors = []
    # Tensors in host memory may be there on purpose: CPU offload.
    wrong = []
    for name, tensor in tensors:
        if tensor.device.type != "cpu" and tensor.device != world.device:
            wrong.append(name)
    if wrong:
        return f"{shorten(wrong)} of the model are on another GPU than {world.device}; build the model on world.device"
    foreign = device.total - device.free - device.own
    if foreign > _STRAY * device.total:
        return (
            f"other processes hold {bytes_text(foreign)} of its {bytes_text(device.total)}; give each rank its own "
            "GPU (--nproc-per-node at most their number), and stop other programs there"
        )
    return ""


def _advice(engine: Engine | None, device: DeviceMemory) -> str:
    if engine is None:
        return (
            f"the model is not built yet ({bytes_text(device.own)} of {bytes_text(device.total)} held); --engine fsdp "
            "with --engine.meta-init builds it block by block, sharded over the ranks; else use a smaller model"
        )
    estimate = _estimate(engine)
    total = sum(estimate)
    summary = (
        f"parameters {bytes_text(estimate.parameters)}, gradients {bytes_text(estimate.gradients)}, "
        f"optimizer {bytes_text(estimate.states)}"
    )
    beginning = (
        f"everything is on the right device ({bytes_text(device.own)} of {bytes_text(device.total)} held; {summary}); "
    )
    # More than half of the memory persists between steps, so fewer activations would not help.
    if 2 * total > device.own:
        return (
            beginning + "shard it over more ranks: --engine fsdp, or zero for the optimizer alone; else a smaller model"
        )
    return (
        beginning
        + "the rest is activations: lower --micro-batch-size, use activation checkpointing, or lower --seq-len"
    )


def _estimate(engine: Engine) -> Footprint:
    """Estimate `footprint` without a collective, with states as twice the gradients.

    Other ranks may be elsewhere.
    """
    parameters = sum(local_of(p).nbytes for p in engine.model.parameters())
    gradients = 0
    for p in engine.model.parameters():
        if p.requires_grad:
            gradients += local_of(p).nbytes
    return Footprint(parameters, gradients, 2 * gradients)
