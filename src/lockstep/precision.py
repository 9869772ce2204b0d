"""The switches of the process that change results: set once, before the model is made.

pin(exact=True, matmul="highest", device=world.device)
"""

import os

import torch

__all__ = ["pin"]


def pin(*, exact: bool, matmul: str, device: torch.device) -> None:
    """Sets the precision of float32 matrix products and, for `exact`, whatever else moves bits.

    Exact means: one thread on a CPU (sums are split by the number of threads), deterministic kernels, a fixed cuBLAS
    workspace, no choice of convolution by speed.
    """
    torch.set_float32_matmul_precision(matmul)
    if not exact:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if device.type == "cpu":
        torch.set_num_threads(1)
