"""Move tensors between shards of their rows and the ranks that own them whole.

owners = assign_owners([matrix.numel() for matrix in matrices], ranks)
wholes = gather_rows(shards, shapes, owners, group)     # those that this rank owns
shards = scatter_rows(wholes, shapes, owners, shards[0], group)
"""

import heapq
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed import collectives

__all__ = [
    "assign_owners",
    "gather_rows",
    "scatter_rows",
]


Shapes = Sequence[Sequence[int]]


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign each cost to a rank, largest first, each to the least loaded. Deterministic."""
    # The least loaded rank comes first; of equal ones the lowest.
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda k: -costs[k]):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return owners


def gather_rows(
    parts: Sequence[Tensor], shapes: Shapes, owners: Sequence[int], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Gather the full tensors that this rank owns, in new memory. One all-to-all.

    Args:
        parts: this rank's rows of every tensor, of one dtype and device.
        shapes: of the full tensors.
        owners: each tensor's owner, a rank within `group`.
        group: the ranks that share the rows; None: all.
    """
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    flat = []
    lengths = []
    for indices_of_owner in order:
        flat += [parts[k].reshape(-1) for k in indices_of_owner]
        lengths.append(sum(parts[k].numel() for k in indices_of_owner))
    sends = torch.cat(flat)
    indices = order[rank]
    sizes = []
    for peer in range(ranks):
        sizes.append([_element_count(shapes[k], peer, ranks) for k in indices])
    # Each rank sends every owner its rows of the owner's tensors. All ranks of the group take part.
    totals = [sum(lengths_of_peer) for lengths_of_peer in sizes]
    received = sends.new_empty(sum(totals))
    collectives.all_to_all_single(received, sends, totals, lengths, group=group)  # collective
    chunks = received.split_with_sizes(totals)
    by_rank = []
    for chunk, lengths_of_peer in zip(chunks, sizes, strict=True):
        by_rank.append(chunk.split_with_sizes(lengths_of_peer))
    rows = []
    for k, index in enumerate(indices):
        rows.append(torch.cat([pieces[k] for pieces in by_rank]).view(*shapes[index]))
    return rows


def scatter_rows(
    tensors: Sequence[Tensor],
    shapes: Shapes,
    owners: Sequence[int],
    like: Tensor,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Scatter the owners' full tensors; return this rank's rows of every tensor. One all-to-all.

    Args:
        tensors: the full ones that this rank owns, in order, of the dtype and device of `like`.
        shapes, owners, group: as for `gather_rows`.
        like: a tensor of the dtype and device, for a rank that owns none.
    """
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    sizes = []
    for peer in range(ranks):
        sizes.append([_element_count(shapes[k], peer, ranks) for k in order[rank]])
    flat = []
    for k, tensor in enumerate(tensors):
        flat.append(tensor.reshape(-1).split_with_sizes([lengths_of_rank[k] for lengths_of_rank in sizes]))
    if flat:
        ordered = []
        for peer in range(ranks):
            ordered += [pieces[peer] for pieces in flat]
        sends = torch.cat(ordered)
    else:
        sends = like.new_empty(0)
    counts = []
    for indices_of_owner in order:
        counts.append([_element_count(shapes[k], rank, ranks) for k in indices_of_owner])
    # Each owner sends every rank its rows of the owner's tensors. All ranks of the group take part.
    totals = [sum(lengths_of_rank) for lengths_of_rank in counts]
    received = like.new_empty(sum(totals))
    collectives.all_to_all_single(
        received, sends, totals, [sum(lengths_of_rank) for lengths_of_rank in sizes], group=group
    )  # collective
    by_index: dict[int, Tensor] = {}
    for indices_of_owner, chunk, lengths_of_rank in zip(order, received.split_with_sizes(totals), counts, strict=True):
        by_index |= zip(indices_of_owner, chunk.split_with_sizes(lengths_of_rank), strict=True)
    rows = []
    for k, shape in enumerate(shapes):
        rows.append(by_index[k].view(_rows(shape, rank, ranks), *shape[1:]))
    return rows


def _by_owner(owners: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of the tensors that each rank owns."""
    indices: list[list[int]] = [[] for _ in range(ranks)]
    for k, owner in enumerate(owners):
        indices[owner].append(k)
    return indices


def _rows(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Return the number of a tensor's rows on `rank`, as torch.chunk cuts."""
    # torch.chunk gives each rank the rounded-up number of rows until none are left.
    longest = -(-shape[0] // ranks)
    return max(0, min(longest, shape[0] - rank * longest))


def _element_count(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Return the number of a tensor's elements on `rank`."""
    return _rows(shape, rank, ranks) * torch.Size(shape[1:]).numel()
