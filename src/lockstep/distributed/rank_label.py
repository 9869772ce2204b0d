"""How messages name a rank: by its number now, and by the launcher's where ranks were renumbered after a loss.

    rank_label(0)                           # "rank 0"
    renumber(["1", "0.1"])                  # the members that go on, by their new rank
    rank_label(0)                           # "rank 0 (rank 1 at the start)"

Logs, `nvidia-smi` and the launcher's earlier lines know a process by the number that it had at the start.
"""

from collections.abc import Iterable

__all__ = ["rank_label", "renumber"]

_AT_START: list[int] = []  # the launcher's number of each present rank; shorter: ranks keep theirs


def renumber(members: Iterable[str]) -> None:
    """Note which processes the present ranks are.

    Args:
        members: their names by rank, as in `members.Generation`; none: the launcher's numbers hold.
    """
    _AT_START[:] = [int(name.partition(".")[0]) for name in members]


def rank_label(rank: int, at_start: int | None = None) -> str:
    """Name a rank in a message.

    Args:
        rank: its number now.
        at_start: the launcher's number of it; None: the one that this process knows.
    """
    if at_start is None:
        at_start = _AT_START[rank] if rank < len(_AT_START) else rank
    return f"rank {rank}" if rank == at_start else f"rank {rank} (rank {at_start} at the start)"
