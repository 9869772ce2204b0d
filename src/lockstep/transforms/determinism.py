"""The switches of the process that change results: set once, before the model is made.

pin(exact=True, matmul="highest", device=world.device)
"""

import importlib
import os
import sys
from typing import Any

import torch

from lockstep.errors import ConfigError

__all__ = ["autotuned", "check_graphs", "check_precision", "pin", "pin_compiler"]

_AUTOTUNE = tuple(f"TORCHINDUCTOR_MAX_AUTOTUNE{which}" for which in ("", "_POINTWISE", "_GEMM"))
_SHAPES = 64  # of one compiled function


def pin(*, exact: bool, matmul: str, device: torch.device) -> None:
    """Sets the precision of float32 products, convolutions too, and, for `exact`, whatever else moves bits.

    Exact means: one thread on a CPU (sums are split by the number of threads), deterministic kernels, a fixed cuBLAS
    workspace, no choice of kernels by speed, and one way through an attention layer, with hooks on it or without.
    """
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"  # convolutions have a switch of their own, which is on
    if not exact:
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # the fastest convolution for each shape is searched for
        return
    # In evaluation a whole attention layer takes a kernel of its own, and one with hooks or split weights another.
    torch.backends.mha.set_fastpath_enabled(False)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
    torch.use_deterministic_algorithms(True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # which writes NaN into all that is allocated
    torch.backends.cudnn.benchmark = False
    # The compiler must not choose kernels by speed either: said to the one to come, and to the one that is loaded.
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    inductor: Any = sys.modules.get("torch._inductor.config")
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True
    if device.type == "cpu":
        torch.set_num_threads(1)


def pin_compiler() -> None:
    """A compiled model's kernels follow from a micro-batch's shapes alone, and not from which came before in a process.

    So there are no dynamic shapes, and no function falls back to eager for having seen too many: that is an error.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    config.automatic_dynamic_shapes = False
    config.optimize_ddp = False  # which cuts a graph where DDP has its buckets, and elsewhere not
    config.recompile_limit = max(config.recompile_limit, _SHAPES)
    config.fail_on_recompile_limit_hit = True


def autotuned() -> list[str]:
    """The variables that tell the compiler to choose kernels by speed, which differs from run to run."""
    return [name for name in _AUTOTUNE if os.environ.get(name) == "1"]


def check_graphs() -> None:
    """Raises ConfigError where the compiler was told to record CUDA graphs: these write each gradient into one place
    (pytorch#169545), so that accumulating micro-batches would add the last one alone, several times."""
    if os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        raise ConfigError(
            "--compile cannot hold with TORCHINDUCTOR_CUDAGRAPHS=1, which overwrites the gradients that a step "
            "accumulates; unset it"
        )


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
