"""Tensors whose rows are split over the ranks as FSDP2 splits them: each brought whole to one rank, and given back.

owners = shared_out([whole.numel() for whole in shapes], ranks)
mine = gather_rows(parts, shapes, owners, group)            # this rank's own tensors, whole, in order
parts = scatter_rows(mine, shapes, owners, group)           # this rank's rows of each
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_rows", "scatter_rows", "shared_out"]

Shapes = Sequence[Sequence[int]]


def shared_out(costs: Sequence[float], ranks: int) -> list[int]:
    """For each cost a rank: the largest first, each to the rank that has least. The same wherever it is asked."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def gather_rows(
    parts: Sequence[Tensor], shapes: Shapes, owners: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The tensors that this rank owns, whole, each in memory of its own. One all-to-all.

    Args:
        parts: this rank's rows of every tensor, of one dtype and device.
        shapes: of the whole tensors.
        owners: for each a rank within `group`.
        group: of the ranks that share the rows; None: all.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    sent = torch.cat([parts[k].reshape(-1) for own in order for k in own])
    lengths = [sum(parts[k].numel() for k in own) for own in order]
    mine = order[rank]
    sizes = [[_held(shapes[k], other, ranks) for k in mine] for other in range(ranks)]
    totals = [sum(each) for each in sizes]
    received = sent.new_empty(sum(totals))
    dist.all_to_all_single(received, sent, totals, lengths, group=group)  # collective
    chunks = received.split_with_sizes(totals)
    by_rank = [chunk.split_with_sizes(each) for chunk, each in zip(chunks, sizes, strict=True)]
    return [torch.cat([pieces[k] for pieces in by_rank]).view(*shapes[index]) for k, index in enumerate(mine)]


def scatter_rows(
    wholes: Sequence[Tensor],
    shapes: Shapes,
    owners: Sequence[int],
    like: Tensor,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """This rank's rows of every tensor, from the owners' whole ones. One all-to-all.

    Args:
        wholes: those that this rank owns, in order, of the dtype and device of `like`.
        shapes, owners, group: as for `gather_rows`.
        like: gives dtype and device, also where this rank owns none.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    sizes = [[_held(shapes[k], other, ranks) for k in order[rank]] for other in range(ranks)]
    flat = [whole.reshape(-1).split_with_sizes([each[k] for each in sizes]) for k, whole in enumerate(wholes)]
    sent = torch.cat([pieces[other] for other in range(ranks) for pieces in flat]) if flat else like.new_empty(0)
    held = [[_held(shapes[k], rank, ranks) for k in own] for own in order]
    totals = [sum(each) for each in held]
    received = like.new_empty(sum(totals))
    dist.all_to_all_single(received, sent, totals, [sum(each) for each in sizes], group=group)  # collective
    found: dict[int, Tensor] = {}
    for own, chunk, each in zip(order, received.split_with_sizes(totals), held, strict=True):
        found |= zip(own, chunk.split_with_sizes(each), strict=True)
    return [found[k].view(_rows(shape, rank, ranks), *shape[1:]) for k, shape in enumerate(shapes)]


def _by_owner(owners: Sequence[int], ranks: int) -> list[list[int]]:
    return [[k for k, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def _rows(shape: Sequence[int], rank: int, ranks: int) -> int:
    """How many rows of a tensor lie on `rank`: as torch.chunk cuts, ceil(n / ranks) each."""
    each = -(-shape[0] // ranks)
    return max(0, min(each, shape[0] - rank * each))


def _held(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Elements of a tensor that lie on `rank`."""
    return _rows(shape, rank, ranks) * torch.Size(shape[1:]).numel()
