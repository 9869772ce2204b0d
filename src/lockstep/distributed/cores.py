"""Processor cores, and each rank's part of them.

threads = cores() // 8                      # of a node with 8 ranks
workers = compile_threads(8)                # that torch.compile may start in each
"""

import os

__all__ = ["OPENCV_THREADS", "compile_threads", "cores"]

OPENCV_THREADS = "OPENCV_FOR_THREADS_NUM"  # read when OpenCV is imported

_MOST = 32  # torch's own limit


def cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_threads(ranks: int) -> int:
    """Count the processes that may compile kernels for each of a node's ranks; torch starts as many as there are cores.

    Args:
        ranks: on this node.
    """
    return max(1, min(_MOST, cores() // ranks))
