"""DDP communication hooks that exchange gradients in half precision and hand it on in their own.

ddp.register_comm_hook(torch.bfloat16, averaged)

torch's own bf16 hook refuses every backend but NCCL; this one works with any backend that can add the dtype.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HALVES", "averaged"]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def averaged(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The bucket's mean over the ranks, exchanged in `dtype`: divided before, so that the sum has a gradient's size."""
    buffer: Tensor = bucket.buffer()
    whole = torch.view_as_real(buffer) if buffer.is_complex() else buffer  # a cast would drop the imaginary parts
    work: Any = dist.all_reduce((whole / dist.get_world_size()).to(dtype), async_op=True)  # collective

    def widened(future: "torch.futures.Future[Any]") -> Tensor:
        whole.copy_(future.value()[0])
        return buffer

    future: torch.futures.Future[Tensor] = work.get_future().then(widened)
    return future
