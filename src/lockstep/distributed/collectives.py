"""Issue collectives, and raise PeerError where one fails because another rank is lost.

    all_reduce(tensor, group=world.control)  # on the host; group=world.group: on the device
    wait(work)                              # of a collective with `async_op`
    full_tensor(parameter)                  # of a DTensor

All collectives of lockstep go through here or through `World`, so that every caller sees the same error. Those that
torch issues by itself, in the hooks of DDP and FSDP, are translated where forward and backward are called:
`membership.translate_errors`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.distributed.membership import is_lost_peer, lost_peers
from lockstep.tensors import as_bytes, from_bytes

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "full_tensor",
    "wait",
]


# dtypes that every backend can send.
_COMMON = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8}


def _issue(collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a collective of torch.

    Raises:
        PeerError: another rank is lost, or did not respond in time.
    """
    try:
        return collective(*args, **options)
    except RuntimeError as error:
        # Another RuntimeError, such as a wrong shape, is the caller's own and passes unchanged.
        if not is_lost_peer(error, in_collective=True):
            raise
        raise lost_peers(dist.get_rank()) from error


# Every caller names its group, so that it is a decision whose ranks take part. None: all ranks of the run.


def all_reduce(tensor: Tensor, *, group: ProcessGroup | None, **options: Any) -> Any:
    """Call `dist.all_reduce`. Collective."""
    return _issue(dist.all_reduce, tensor, group=group, **options)  # collective


def all_gather(tensors: list[Tensor], tensor: Tensor, *, group: ProcessGroup | None, **options: Any) -> Any:
    """Call `dist.all_gather`. Collective."""
    return _issue(dist.all_gather, tensors, tensor, group=group, **options)  # collective


def broadcast(tensor: Tensor, *, group: ProcessGroup | None, **options: Any) -> None:
    """Call `dist.broadcast`, as bytes where the backend lacks the dtype. Collective.

    Layouts that no backend sends, such as conjugates and views with gaps, also travel as bytes.
    """
    is_memory = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if is_memory and tensor.dtype in _COMMON:
        _issue(dist.broadcast, tensor, group=group, **options)  # collective
        return
    # `as_bytes` copies where the tensor is not contiguous, so the result is copied back.
    data = as_bytes(tensor)
    _issue(dist.broadcast, data, group=group, **options)  # collective
    if not is_memory:
        tensor.copy_(from_bytes(data, tensor.dtype, tensor.shape))


def all_to_all_single(output: Tensor, values: Tensor, *splits: list[int] | None, group: ProcessGroup | None) -> Any:
    """Call `dist.all_to_all_single`. Collective."""
    return _issue(dist.all_to_all_single, output, values, *splits, group=group)  # collective


def barrier(*, group: ProcessGroup | None, **options: Any) -> Any:
    """Call `dist.barrier`. Collective."""
    return _issue(dist.barrier, group=group, **options)  # collective


def wait(work: dist.Work, timeout: timedelta | None = None) -> None:
    """Wait for a collective that was issued with `async_op`; `timeout` is shorter than the group's."""
    if timeout is None:
        _issue(work.wait)
        return
    try:
        work.wait(timeout)
    except RuntimeError as error:
        # A timeout shorter than the group's leaves the links open, so the links do not show that a rank failed.
        raise lost_peers(dist.get_rank()) from error


def full_tensor(tensor: Any) -> Tensor:
    """Return the whole of a DTensor. Collective."""
    full: Tensor = _issue(tensor.full_tensor)  # collective
    return full
