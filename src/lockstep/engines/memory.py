"""Out of memory, in one line: first whether something is where it should not be, then what to change, with the bytes.

    with explained(engine, world):
        ...                                 # running out of memory leaves as a LockstepError

The memory is a GPU's, or the host's where the model trains there.
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

from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.ddp import listed
from lockstep.errors import LockstepError
from lockstep.files import bytes_text
from lockstep.files import bytes_text as shown
from lockstep.tensors import local_of
from lockstep.transforms.weight_copies import copies_of

__all__ = [
    "DeviceMemory",
    "Footprint",
    "add_counter",
    "count_bytes",
    "described",
    "explained",
    "footprint",
    "is_out_of_memory",
    "out_of_memory",
]


class Footprint(NamedTuple):
    """Bytes on this rank, wherever they lie; what is gathered for a moment is not counted.

    Attributes:
        parameters: with buffers, and copies of weights where there are any.
        gradients: those that are there, else those that a backward leaves after its exchange.
        states: of the optimizer, and the average of the weights where there is one.
    """

    parameters: int
    gradients: int
    states: int


_COUNTERS = "lockstep_bytes"  # attribute of an engine's `model`


def add_counter(model: nn.Module, counter: Callable[[], Footprint]) -> None:
    """Have `footprint` ask this, where a state_dict is not shared out over the ranks as it is held.

    Args:
        model: that of the engine.
        counter: counts a part of what the rank holds; together they count all of it.
    """
    setattr(model, _COUNTERS, [*getattr(model, _COUNTERS, ()), counter])


def footprint(engine: Engine) -> Footprint:
    """Count what this rank holds now. Collective, best after the first step."""
    counters = getattr(engine.model, _COUNTERS, ())
    if counters:
        return Footprint(*map(sum, zip(*(counter() for counter in counters), strict=True)))
    state = engine.state_dict()
    parameters = [p for p in engine.model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters if p.grad is not None]
    copies = copies_of(engine.model)
    weights = [tensor for name, tensor in state.items() if name.startswith("model/")]
    return Footprint(
        count_bytes([*weights, *(copies.tensors if copies else ())]),
        count_bytes(gradients or parameters),
        count_bytes(tensor for name, tensor in state.items() if name.startswith(("optimizer/", "average/"))),
    )


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the tensors' parts on this rank, each piece of memory once."""
    found: dict[tuple[Any, ...], int] = {}
    for tensor in tensors:
        local = local_of(tensor)
        found[local.data_ptr(), local.device, local.shape] = local.nbytes
    return sum(found.values())


def described(name: str, ranks: list[Any]) -> str:
    """One line on the footprints of all ranks, which may have come through JSON."""
    words = ("parameters", "gradients", "optimizer states")
    parts = []
    for word, sizes in zip(words, zip(*ranks, strict=True), strict=True):
        low, high = min(sizes), max(sizes)
        parts.append(f"{word} {bytes_text(high) if low == high else f'{bytes_text(low)} to {bytes_text(high)}'}")
    return f"--engine {name} holds per rank: {', '.join(parts)}"


_RAISES = ("RAISE_VARARGS", "RERAISE")  # instructions of `raise`
_STRAY = 0.05  # share of a device that others may hold (its driver, a desktop) without being named


class DeviceMemory(NamedTuple):
    """Bytes of a device: all, those that nobody holds, and those that this process holds."""

    total: int
    free: int
    own: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """The device as it is now. Of a host's memory all that this process has not counts as free: caches give way."""
        if device.type != "cuda":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            own = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return cls(total, total - own, own)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


@contextmanager
def explained(engine: Engine | None, world: World) -> Iterator[None]:
    """Turns running out of memory into a LockstepError of one line; `engine` is None while there is none yet."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is the former
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, engine, world, DeviceMemory.of(world.device)) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory left for what was asked."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _is_of_host_allocator(error)


def _is_of_host_allocator(error: Exception) -> bool:
    """Whether torch could not get host memory: it has no class for that, but no `raise` statement makes it either."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    stated = trace is not None and dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in _RAISES
    return not stated and type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)


def out_of_memory(error: Exception, engine: Engine | None, world: World, device: DeviceMemory) -> LockstepError:
    """The error that says what `error` means here."""
    asked = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
    if by_host := re.search(r"tried to allocate (\d+) bytes", str(error)):
        asked = shown(int(by_host[1]))
    begin = f"{rank_label(world.rank)} ran out of memory on {world.device}" + (f", asking for {asked}" if asked else "")
    return LockstepError(f"{begin}: {_misplaced(engine, world, device) or _advice(engine, device)}")


def _misplaced(engine: Engine | None, world: World, device: DeviceMemory) -> str:
    """What is on the wrong device, if anything."""
    named = [*engine.model.named_parameters(), *engine.model.named_buffers()] if engine else []
    # What lies in host memory may have been put there, by CPU offload.
    wrong = [name for name, tensor in named if tensor.device.type != "cpu" and tensor.device != world.device]
    if wrong:
        return f"{listed(wrong)} of the model lie on another GPU than {world.device}; make the model on world.device"
    others = device.total - device.free - device.own
    if others > _STRAY * device.total:
        return (
            f"other processes hold {shown(others)} of its {shown(device.total)}; give each rank a GPU of its own "
            "(one process a GPU, --nproc-per-node at most their number), and end what else runs there"
        )
    return ""


def _advice(engine: Engine | None, device: DeviceMemory) -> str:
    if engine is None:
        return (
            f"the model is not made yet ({shown(device.own)} of {shown(device.total)} held); --engine fsdp "
            "with --engine.meta-init makes it block by block, split over the ranks; else take a smaller model"
        )
    held = _held(engine)
    kept = sum(held)
    parts = f"parameters {shown(held.parameters)}, gradients {shown(held.gradients)}, optimizer {shown(held.states)}"
    first = f"everything is on the right device ({shown(device.own)} of {shown(device.total)} held; {parts}); "
    if 2 * kept > device.own:  # most of it stays between the steps
        return first + "split it over more ranks: --engine fsdp, or zero for the optimizer alone; else a smaller model"
    return first + "the rest is activations: lower --micro-batch-size, use activation checkpointing, or lower --seq-len"


def _held(engine: Engine) -> Footprint:
    """As `footprint`, but without a word to other ranks, who may be elsewhere: states as the gradients' double."""
    parameters = sum(local_of(p).nbytes for p in engine.model.parameters())
    gradients = sum(local_of(p).nbytes for p in engine.model.parameters() if p.requires_grad)
    return Footprint(parameters, gradients, 2 * gradients)
