"""The switches of the process that change results: set once, before the model is made.

pin(exact=True, matmul="highest", device=world.device)
"""

import os

import torch

from lockstep.errors import ConfigError

__all__ = ["check_precision", "pin"]


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


def check_precision(precision: str, device: torch.device) -> None:
    """Raises ConfigError where the device cannot multiply matrices in the precision's dtype: it is tried."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16}.get(precision)
    if dtype is None:
        return
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        torch.mm(ones, ones)
    except (RuntimeError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            f"--precision {precision}: {device} cannot do it ({line}); use --precision float32"
        ) from error
