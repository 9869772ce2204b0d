"""Issue collectives, and raise PeerError where one fails because another rank is lost.

    all_reduce(tensor, group=world.control)  # on the host; group=world.group: on the device
    wait(work)                              # of a collective with `async_op`
    exchange([(tensor, 1)], [(empty, 1)], timeout, group=world.group)   # with single ranks
    full_tensor(parameter)                  # of a DTensor

All collectives of lockstep go through here or through `World`, so that every caller sees the same error. Those that
torch issues by itself, in the hooks of DDP and FSDP, are translated where forward and backward are called:
`membership.translate_errors`.
"""

from collections.abc import Callable, Sequence
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
    "exchange",
    "full_tensor",
    "isend",
    "recv",
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


# Ranks of single messages are those in the group. Each wait has a timeout of its own: gloo's would be that with which
# the group was formed, which is short after the failure of a rank.


def isend(tensor: Tensor, rank: int, *, group: ProcessGroup | None) -> dist.Work:
    """Begin to send a tensor to one rank; keep it, and `wait` for the result with a timeout."""
    work: dist.Work = _issue(dist.isend, tensor, group=group, group_dst=rank)
    return work


def recv(tensor: Tensor, rank: int, timeout: timedelta, *, group: ProcessGroup | None) -> None:
    """Receive a tensor on the host from one rank, in place. Blocks until it is there."""
    wait(_issue(dist.irecv, tensor, group=group, group_src=rank), timeout)


def exchange(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    timeout: timedelta,
    *,
    group: ProcessGroup | None,
) -> None:
    """Send and receive tensors, each with its rank, all at once. Blocks until all are through.

    On NCCL, where this was not tried yet, one call fuses them: two ranks that each send before they receive would wait
    for each other there.
    """
    operations = []
    is_on_host = False
    for issue, messages in ((dist.isend, sends), (dist.irecv, receives)):
        for tensor, rank in messages:
            operations.append(dist.P2POp(issue, tensor, group=group, group_peer=rank))
            is_on_host = tensor.device.type == "cpu"
    if operations:
        for work in _issue(dist.batch_isend_irecv, operations):
            # NCCL has the group's timeout, and would block the host with another.
            wait(work, timeout if is_on_host else None)


def wait(work: dist.Work, timeout: timedelta | None = None) -> None:
    """Wait for a collective that was issued with `async_op`; `timeout` is in place of the group's."""
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
