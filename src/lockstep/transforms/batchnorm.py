"""BatchNorm layers that record their statistics instead of updating the running ones.

    model = recording(model, say)       the same modules, names, parameters and buffers
    model = synchronised(model, ...)    SyncBatchNorm in their place

`lockstep.engines.buffers` gathers the records once a step and updates the running statistics. Normalisation uses each
micro-batch's own statistics, so it does not depend on the world size in the first place.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError

__all__ = ["Recording", "recorders", "recording", "synchronised"]


class Recording(_BatchNorm):
    """Common part of the three kinds. Before `bind`, and in evaluation, it is torch's own layer.

    Attributes:
        runs: training forwards since it was last zeroed; 0-dim, int64, None before `bind`.
        mean, var: what these forwards add to running statistics of zeros: by the layer's momentum, or as a sum without
            one.
        share: the momentum.
    """

    runs: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None
    share: float | None = None

    def bind(self) -> tuple[Tensor, Tensor, Tensor]:
        """Create and return the records: `mean` and `var` [channels], and `runs`, all zeros."""
        assert self.running_mean is not None
        assert self.running_var is not None
        self.mean, self.var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        self.runs = torch.zeros((), dtype=torch.int64, device=self.mean.device)
        self.share = self.momentum
        return self.mean, self.var, self.runs

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.mean is None or self.var is None or self.runs is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        self.runs.add_(1)  # a tensor: a compiled forward is recompiled for each value of a Python number
        if self.share is not None and not torch.compiler.is_compiling():
            # The graph stores but never reads them: as `data`, later writes raise no error there.
            mean, var = self.mean.data, self.var.data
            return F.batch_norm(input, mean, var, self.weight, self.bias, True, self.share, self.eps)
        # A recomputed compiled graph must not keep tensors that a second run writes, not even for their shape.
        mean, var = (input.new_zeros(self.num_features, dtype=self.mean.dtype) for _ in range(2))
        share = 1.0 if self.share is None else self.share  # with 1 the kernel stores the batch's own statistics
        output = F.batch_norm(input, mean, var, self.weight, self.bias, True, share, self.eps)
        for statistic, added in ((self.mean, mean), (self.var, var)):
            statistic.copy_(statistic + added if self.share is None else statistic * (1.0 - share) + added)
        return output


class _Recording1d(Recording, nn.BatchNorm1d):
    pass


class _Recording2d(Recording, nn.BatchNorm2d):
    pass


class _Recording3d(Recording, nn.BatchNorm3d):
    pass


_KINDS: dict[type, type] = {nn.BatchNorm1d: _Recording1d, nn.BatchNorm2d: _Recording2d, nn.BatchNorm3d: _Recording3d}


def recording(model: nn.Module, say: Callable[[str], None]) -> nn.Module:
    """Turn the model's BatchNorm layers with running statistics into recording ones, in place.

    A layer of a derived class has its own forward and is left unchanged; `say` gets a line.
    """
    skipped = []
    for name, module in model.named_modules():
        if type(module) in _KINDS and module.track_running_stats:
            module.__class__ = _KINDS[type(module)]
        elif _is_other(module):
            skipped.append(f"{name} ({type(module).__name__})")
    if skipped:
        say(
            f"--batchnorm replay skips {len(skipped)} layers of other classes, the first is {skipped[0]}: their "
            "running statistics cover only each rank's own micro-batches"
        )
    return model


def _is_other(module: nn.Module) -> bool:
    kinds = (Recording, nn.SyncBatchNorm, *_KINDS)
    return isinstance(module, _BatchNorm) and type(module) not in kinds and not isinstance(module, Recording)


def recorders(model: nn.Module) -> list[Recording]:
    """Return the model's recording layers, in order."""
    return [module for module in model.modules() if isinstance(module, Recording)]


def synchronised(model: nn.Module, device: torch.device, say: Callable[[str], None]) -> nn.Module:
    """Convert to SyncBatchNorm layers, which normalise over all ranks' current micro-batches.

    Raises:
        ConfigError: `device` is a CPU, for which torch has no such kernel.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    if device.type == "cpu":
        raise ConfigError(
            "--batchnorm sync needs a GPU: torch's SyncBatchNorm has no CPU kernel; use --batchnorm replay"
        )
    say(
        "--batchnorm sync: statistics cover the micro-batches that all ranks compute at the same time, so results "
        "depend on the world size; use it, at two collectives a layer, only for micro-batches of fewer than about 16 "
        "samples (Wu & He, arXiv 1803.08494)"
    )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted
