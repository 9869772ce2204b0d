"""A planted fault of the model: running statistics that stay on their rank."""

from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.diagnose.fault import Fault, Site
from lockstep.diagnose.tasks import Around
from lockstep.errors import ConfigError

__all__ = ["LocalBatchNorm"]


@final
class LocalBatchNorm(Fault):
    name, stage = "local-batchnorm", "buffers"
    text = "a running mean, as BatchNorm keeps it, takes in this rank's micro-batches alone"

    everywhere = True  # the single process has the layer too, and sees every micro-batch

    def check(self, config: Config, steps: int, resume: int) -> None:
        if config.exact:
            raise ConfigError(f"--plant {self.name}: --exact refuses a buffer that a forward writes; leave --exact out")

    def task(self, task: Any, site: Site) -> Any:
        return _Averaging(task)


class _Averaging(Around):
    def model(self) -> nn.Module:
        model: nn.Module = self.inner.model()
        weight = next(model.parameters())
        model.register_buffer("running_mean", torch.zeros((), dtype=weight.dtype))
        model.register_forward_hook(_average)
        return model


@torch.no_grad()
def _average(module: nn.Module, _: Any, output: Any) -> None:
    """A forward hook: momentum 0.1, as in torch.nn.BatchNorm1d."""
    while not isinstance(output, Tensor):  # the first tensor of a tuple, or of what a hub model returns
        output = next(iter(output.values() if hasattr(output, "values") else output))
    if module.training:
        mean = module.get_buffer("running_mean")
        mean.lerp_(output.detach().to(mean.dtype).mean(), 0.1)
