"""What the frameworks do that torch's own hooks do not show."""

import functools
from types import ModuleType
from typing import Any

from lockstep.trace.hooks import present

__all__ = ["accelerate", "deepspeed"]


def accelerate(module: ModuleType) -> None:
    """Accelerate drops what filled up the last batch when it gathers for metrics."""
    kind: Any = module.Accelerator
    gather = kind.gather_for_metrics

    @functools.wraps(gather)
    def noted(*args: Any, **kwargs: Any) -> Any:
        present().passes.event("gather_for_metrics")
        return gather(*args, **kwargs)

    kind.gather_for_metrics = noted


def deepspeed(module: ModuleType) -> None:
    """DeepSpeed's engine updates by optimizers of its own: its step is the update, and the model has the weights."""
    kind: Any = module.DeepSpeedEngine
    step = kind.step

    @functools.wraps(step)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        updates = present().updates
        if not self.is_gradient_accumulation_boundary():
            return step(self, *args, **kwargs)
        updates.before_engine(self)
        updates.in_engine = True
        try:
            return step(self, *args, **kwargs)
        finally:
            updates.in_engine = False
            updates.after_engine(self)

    kind.step = noted
