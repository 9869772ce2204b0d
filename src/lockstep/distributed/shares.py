"""Which micro-batches of a step each rank computes.

start, stop = run_of(8, world_size=3, rank=1)       # 3, 6
"""

__all__ = ["run_of"]


def run_of(micro_batches: int, world_size: int, rank: int) -> tuple[int, int]:
    """First and past-the-last micro-batch of the rank's run: ceil(M / world) in a row, as far as M goes."""
    each = -(-micro_batches // world_size)
    return min(rank * each, micro_batches), min((rank + 1) * each, micro_batches)
