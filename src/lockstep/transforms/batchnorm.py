"""BatchNorm layers that record their statistics instead of folding them into the running ones.

    model = recording(model, say)       the same modules, names, parameters and buffers
    model = synchronised(model, ...)    SyncBatchNorm in their place

`lockstep.engines.shared.batchnorm` gathers what was recorded once a step and updates the running statistics. Those that
normalise a micro-batch are that micro-batch's own, so they do not depend on the world size to begin with.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError

__all__ = ["Recording", "recorders", "recording", "synchronised"]


class Recording(_BatchNorm):
    """What the three kinds share. Until `bind` was called, and in evaluation, it is torch's own layer.

    Attributes:
        runs: training forwards since this was last set to 0; 0-dim, int64, None before `bind`.
        mean, var: what they have added to running statistics of zeros: by the layer's momentum, or, where it has none,
            as a sum.
        share: the momentum.
    """

    runs: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None
    share: float | None = None

    def bind(self) -> tuple[Tensor, Tensor, Tensor]:
        """`mean` and `var`, vectors [channels], and `runs`: zeros that each training forward adds to."""
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
        self.runs.add_(1)  # a tensor: for each value of a number a compiled forward would be compiled anew
        if self.share is not None and not torch.compiler.is_compiling():
            # A graph keeps them and does not read them: as `data`, so that what is written later is no error there.
            mean, var = self.mean.data, self.var.data
            return F.batch_norm(input, mean, var, self.weight, self.bias, True, self.share, self.eps)
        # A compiled graph that is computed again must not keep what a second run writes, not even for its shape.
        mean, var = (input.new_zeros(self.num_features, dtype=self.mean.dtype) for _ in range(2))
        share = 1.0 if self.share is None else self.share  # with 1 the kernel leaves the batch's own statistics
        found = F.batch_norm(input, mean, var, self.weight, self.bias, True, share, self.eps)
        for held, added in ((self.mean, mean), (self.var, var)):
            held.copy_(held + added if self.share is None else held * (1.0 - share) + added)
        return found


class _Recording1d(Recording, nn.BatchNorm1d):
    pass


class _Recording2d(Recording, nn.BatchNorm2d):
    pass


class _Recording3d(Recording, nn.BatchNorm3d):
    pass


_KINDS: dict[type, type] = {nn.BatchNorm1d: _Recording1d, nn.BatchNorm2d: _Recording2d, nn.BatchNorm3d: _Recording3d}


def recording(model: nn.Module, say: Callable[[str], None]) -> nn.Module:
    """The model, its BatchNorm layers with running statistics changed in place into ones that record.

    A layer of a class derived from BatchNorm has a forward of its own and stays as it is: `say` gets a line.
    """
    left = []
    for name, module in model.named_modules():
        if type(module) in _KINDS and module.track_running_stats:
            module.__class__ = _KINDS[type(module)]
        elif _is_other(module):
            left.append(f"{name} ({type(module).__name__})")
    if left:
        say(
            f"--batchnorm replay leaves {len(left)} layers of other classes as they are, beginning with {left[0]}: "
            "their running statistics are those of each rank's own micro-batches"
        )
    return model


def _is_other(module: nn.Module) -> bool:
    known = (Recording, nn.SyncBatchNorm, *_KINDS)
    return isinstance(module, _BatchNorm) and type(module) not in known and not isinstance(module, Recording)


def recorders(model: nn.Module) -> list[Recording]:
    """The layers of a model that record, in the model's order."""
    return [module for module in model.modules() if isinstance(module, Recording)]


def synchronised(model: nn.Module, device: torch.device, say: Callable[[str], None]) -> nn.Module:
    """The model with SyncBatchNorm layers, which normalise by the statistics of all ranks' present micro-batches.

    Raises:
        ConfigError: `device` is a CPU, for which torch has no such kernel.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    if device.type == "cpu":
        raise ConfigError(
            "--batchnorm sync needs a GPU: torch's SyncBatchNorm has no CPU kernel; use --batchnorm replay, which "
            "needs no exchange within the forward"
        )
    say(
        "--batchnorm sync: statistics are taken over the micro-batches that all ranks compute at one time, so the "
        "training changes with the world size; it is worth that, and two exchanges a layer, where a micro-batch has "
        "fewer than about 16 samples (Wu & He, arXiv 1803.08494)"
    )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted
