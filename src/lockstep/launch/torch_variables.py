"""Variables that torch reads once: when it is loaded, when CUDA begins, at the first product of matrices.

    os.environ.update(allocator_variables(os.environ))      # before torch is loaded
    variables = torch_variables(processes=8, environ=os.environ)

A variable that is set already stays as it is.
"""

import sys
from collections.abc import Mapping

from lockstep.distributed.cores import compile_threads

__all__ = ["allocator_variables", "torch_variables"]

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # CUDA's allocator reads these first


def allocator_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Let CUDA's allocator grow its segments, so that varying shapes leave no gaps too small to be used.

    Returns:
        {} where the user has configured it, under any of its names, and on a system where torch would warn.
    """
    if sys.platform != "linux" or any(name in environ for name in (_ALLOCATOR, *_OLD_NAMES)):
        return {}
    return {_ALLOCATOR: "expandable_segments:True"}


def torch_variables(processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Choose what each of a node's ranks is started with.

    Args:
        processes: on this node.
        environ: the launcher's.
    """
    return {
        **allocator_variables(environ),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what exact sums need, and cuBLAS asks only once in a process
        "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads(processes)),  # else each rank starts one a core
    }
