"""Out of memory, in one line: first whether something is where it should not be, then what to change, with the bytes.

with explained(engine, world):
    ...                                     # torch.OutOfMemoryError leaves as a LockstepError
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lockstep.engines.base import Engine
from lockstep.engines.footprint import Footprint, human
from lockstep.engines.unused import listed
from lockstep.errors import LockstepError
from lockstep.world import World

__all__ = ["Device", "explained", "out_of_memory"]

_STRAY = 0.05  # share of a device that others may hold (its driver, a desktop) without being named


class Device(NamedTuple):
    """Bytes of a device: all, those that nobody holds, and those that this process holds."""

    total: int
    free: int
    own: int

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """The device as it is now; all zeros for one that is no GPU."""
        if device.type != "cuda":
            return cls(0, 0, 0)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


@contextmanager
def explained(engine: Engine, world: World) -> Iterator[None]:
    """Turns running out of the device's memory into a LockstepError of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, engine, world, Device.of(world.device)) from error


def out_of_memory(error: Exception, engine: Engine, world: World, device: Device) -> LockstepError:
    """The error that says what `error` means here."""
    asked = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
    begin = f"rank {world.rank} ran out of memory on {world.device}" + (f", asking for {asked}" if asked else "")
    return LockstepError(f"{begin}: {_misplaced(engine, world, device) or _advice(engine, device)}")


def _misplaced(engine: Engine, world: World, device: Device) -> str:
    """What is on the wrong device, if anything."""
    model = engine.model
    named = [*model.named_parameters(), *model.named_buffers()]
    # What lies in host memory may have been put there, by CPU offload.
    wrong = [name for name, tensor in named if tensor.device.type != "cpu" and tensor.device != world.device]
    if wrong:
        return f"{listed(wrong)} of the model lie on another GPU than {world.device}; make the model on world.device"
    others = device.total - device.free - device.own
    if others > _STRAY * device.total:
        return (
            f"other processes hold {human(others)} of its {human(device.total)}; give each rank a GPU of its own "
            "(one process a GPU, --nproc-per-node at most their number), and end what else runs there"
        )
    return ""


def _advice(engine: Engine, device: Device) -> str:
    held = _held(engine)
    kept = sum(held)
    parts = f"parameters {human(held.parameters)}, gradients {human(held.gradients)}, optimizer {human(held.states)}"
    first = f"everything is on the right device ({human(device.own)} of {human(device.total)} held; {parts}); "
    if 2 * kept > device.own:  # most of it stays between the steps
        return first + "split it over more ranks: --engine fsdp, or zero for the optimizer alone; else a smaller model"
    return first + "the rest is activations: lower --micro-batch-size, use activation checkpointing, or lower --seq-len"


def _held(engine: Engine) -> Footprint:
    """As `footprint`, but without a word to other ranks, who may be elsewhere: states as the gradients' double."""
    parameters = sum(_local_bytes(p) for p in engine.model.parameters())
    gradients = sum(_local_bytes(p) for p in engine.model.parameters() if p.requires_grad)
    return Footprint(parameters, gradients, 2 * gradients)


def _local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes)
