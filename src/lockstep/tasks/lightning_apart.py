"""A step that speaks to other ranks itself is refused where it is tried, since what it computes would depend on them.

    with apart("training_step"): ...            # ConfigError where a module calls a collective within it

What torch's own modules exchange (fsdp, SyncBatchNorm) is the engine's.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from lockstep.errors import ConfigError

__all__ = ["apart"]

_INSIDE = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", __name__)
_FOR_STEPS = "torch.distributed.nn."  # collectives with gradients, for whoever computes with them
_OWN = ("torch.", "lockstep.")


@contextlib.contextmanager
def apart(step: str) -> Iterator[None]:
    """Within it a collective that is called from elsewhere than torch and lockstep raises ConfigError."""
    if not dist.is_initialized():
        yield
        return
    inside: Any = c10d
    plain = inside._rank_not_in_group  # which every collective asks first, however it was imported

    def asked(*given: Any) -> Any:
        called, caller = _called()
        speaks = caller.startswith(_FOR_STEPS) or not caller.startswith(_OWN)
        if speaks and not called.startswith("get_"):  # a rank and the like may be asked for
            raise ConfigError(
                f"from_lightning: {step} calls torch.distributed.{called}, and what it computes then depends on the "
                "number of ranks: compute within the micro-batch, log a sum, or write the loss over all samples of a "
                "step as `outputs` and `step_loss` of a lockstep.Task"
            )
        return plain(*given)

    inside._rank_not_in_group = asked
    try:
        yield
    finally:
        inside._rank_not_in_group = plain


def _called() -> tuple[str, str]:
    """The collective that is called, and the module that calls it."""
    frame, name = sys._getframe(2), ""
    while frame.f_back is not None and frame.f_globals.get("__name__", "") in _INSIDE:
        name = frame.f_code.co_name if frame.f_globals["__name__"] == _INSIDE[0] else name
        frame = frame.f_back
    return name, str(frame.f_globals.get("__name__", ""))
