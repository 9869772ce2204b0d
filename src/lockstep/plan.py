"""What a run is, apart from who computes it: the numbers that a resume must find unchanged, and where a step stands.

horizon = Horizon(samples=len(dataset), config=config)
horizon.steps, horizon.place(done)
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.config import Config
from lockstep.data.batches import Cut

__all__ = ["Horizon", "differences", "plan_of"]

# Options that change what is computed from which data; the rest may change between one start and the next.
_FIXED = (
    *("batch_size", "micro_batch_size", "seed", "seq_len", "lr"),
    *("precision", "batchnorm", "model_name", "dataset_name"),
)


@dataclass(frozen=True, slots=True)
class Horizon:
    """The steps of the plan, and the place of a step among the epochs.

    Attributes:
        samples: n, in the training set.
        config: how many epochs or steps, and how large a step is.
    """

    samples: int
    config: Config

    @property
    def cut(self) -> Cut:
        """The stream of positions as steps. With --max-steps each is full; else the last ends with the last epoch."""
        config = self.config
        total = config.max_steps * config.batch_size or config.num_epochs * self.samples
        return Cut(config.batch_size, config.micro_batch_size, total)

    def place(self, done: int) -> dict[str, Any]:
        """Where the run stands after `done` steps: epochs are counted in samples, so a step may lie across two."""
        size = self.config.batch_size
        position = min(done * size, self.cut.total)
        epoch, within = divmod(position, self.samples)
        if within == 0 and position == self.cut.total and epoch:  # the end of the last epoch, not the start of another
            epoch, within = epoch - 1, self.samples
        return {
            "global_step": done,
            "epoch": epoch,
            "epoch_step": -(-within // size),
            "epoch_progress": within / self.samples,
            "num_batches_remaining": -(-(self.samples - within) // size),
            "position": position,
        }


def plan_of(config: Config, horizon: Horizon, task: Any, model: nn.Module) -> dict[str, Any]:
    """What a resume must find unchanged: the model by its tensors' names and shapes, the data by its content."""
    shapes = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    data = getattr(getattr(task, "corpus", None), "fingerprint", None) or getattr(task, "fingerprint", "")
    optim = config.optim
    return {
        **{name: getattr(config, name) for name in _FIXED},
        "steps": horizon.cut.steps,
        "samples": horizon.samples,
        "data": data,
        "task": type(task).__qualname__,
        "model": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        **{f"optim.{name}": getattr(optim, name) for name in type(optim).__dataclass_fields__},
        "model.dropout": config.model.dropout,
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys that differ, each with both values: `seed (0 before, 1 now)`."""
    keys = [key for key in now if before.get(key) != now[key]]
    return [f"{key} ({before.get(key)} before, {now[key]} now)" for key in keys]
