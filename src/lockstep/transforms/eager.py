"""What a compiler leaves alone: what is computed once, or in shapes of its own.

with eager():
    model(batch)            # by torch's plain kernels, compiled or not
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["eager"]


@contextmanager
def eager() -> Iterator[None]:
    """Within it nothing is compiled, and no compiled code runs. Where torch's compiler is not even loaded, none can.

    A torch without `set_stance` compiles as ever.
    """
    stance: Any = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:
        yield
        return
    with stance("force_eager"):
        yield
