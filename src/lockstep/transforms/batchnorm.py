"""BatchNorm layers that record their statistics instead of updating the running ones.

    model = recording(model, say)       each forward normalises by its own samples
    model = synchronise(model, say)    the forwards that all ranks compute at the same time, by those of all

Modules, names, parameters and buffers stay the same. `lockstep.engines.buffers` updates the running statistics from the
records, once a step. `resolve_batchnorm` chooses between the two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config.schema import Config
from lockstep.distributed import collectives

__all__ = [
    "Recording",
    "Synchronised",
    "empty_slot",
    "normalised_alone",
    "recorders",
    "recording",
    "resolve_batchnorm",
    "synchronise",
]


class BatchNormChoice(NamedTuple):
    """How a run's BatchNorm layers work.

    Attributes:
        kind: a value of `--batchnorm` other than auto.
        reason: a line for the user, where auto could not choose sync on several ranks; "" otherwise.
    """

    kind: str
    reason: str = ""


def resolve_batchnorm(
    config: Config, world_size: int, has_batchnorm: bool = True, *, fixed_cut: bool = False
) -> BatchNormChoice:
    """Resolve `--batchnorm auto` by the cut of a step and the number of ranks.

    With one micro-batch for each rank, sync normalises by the samples of the whole step, as one device does. Otherwise
    each forward normalises by its own samples, on any number of ranks.

    Args:
        config: with the micro-batch size of this start.
        world_size: number of ranks.
        has_batchnorm: the model has such layers in training mode.
        fixed_cut: the user set the micro-batch size, so that each micro-batch has statistics of its own.
    """
    if config.batchnorm != "auto":
        return BatchNormChoice(config.batchnorm)
    if not has_batchnorm or fixed_cut:
        return BatchNormChoice("replay")
    if world_size == 1:
        plain = config.activation_checkpointing == "none" and not config.exact and not config.guards.audit
        return BatchNormChoice("local" if plain else "replay")
    obstacle = _obstacle(config, world_size)
    if not obstacle:
        return BatchNormChoice("sync")
    return BatchNormChoice(
        "replay",
        f"--batchnorm auto: each micro-batch is normalised by its own samples alone (replay), since {obstacle}",
    )


def _obstacle(config: Config, world_size: int) -> str:
    """Return why the ranks cannot normalise together; "" if they can."""
    if config.exact:
        return "--exact computes each micro-batch by itself"
    if config.guards.audit:
        return "--guards.audit repeats micro-batches on single ranks"
    if config.parallel.size > 1:
        return f"{config.parallel.flags} does not work with sync yet"
    if config.shares != "equal":
        return f"with --shares {config.shares} the ranks' numbers of forwards differ"
    if config.micro_batches > world_size:
        return f"a step has {config.micro_batches} micro-batches for {world_size} ranks"
    return ""


@dataclass
class _ForwardState:
    """The present forward of this process.

    Not a ContextVar: on a GPU the backward, and what it recomputes, runs in another thread.

    Attributes:
        counts: its samples count in the statistics; False in an empty slot.
        alone: it must not communicate.
    """

    counts: bool = True
    alone: bool = False


_FORWARD = _ForwardState()


@contextmanager
def empty_slot(is_empty: bool = True) -> Iterator[None]:
    """Let no sample of forwards in this context count in the statistics of all ranks."""
    before = _FORWARD.counts
    _FORWARD.counts = not is_empty
    try:
        yield
    finally:
        _FORWARD.counts = before


@contextmanager
def normalised_alone() -> Iterator[None]:
    """Normalise forwards in this context by this rank's samples, without collectives."""
    before = _FORWARD.alone
    _FORWARD.alone = True
    try:
        yield
    finally:
        _FORWARD.alone = before


class Recording(_BatchNorm):
    """Common part of the three layers.

    Before `bind`, and in evaluation, it is torch's own layer.

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
        self.mean = torch.zeros_like(self.running_mean)
        self.var = torch.zeros_like(self.running_var)
        self.runs = torch.zeros((), dtype=torch.int64, device=self.mean.device)
        self.share = self.momentum
        return self.mean, self.var, self.runs

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.mean is None or self.var is None or self.runs is None:
            return super().forward(input)
        # torch gives the method no types.
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        # A tensor counts the runs: for each value of a Python number a compiled forward would be compiled again.
        self.runs.add_(1)
        if self.share is not None and not torch.compiler.is_compiling():
            # The graph saves these tensors but never reads them. As `data`, later writes to them raise no error there.
            mean = self.mean.data
            var = self.var.data
            return F.batch_norm(input, mean, var, self.weight, self.bias, True, self.share, self.eps)
        # Fresh tensors: a recomputed compiled graph must not keep tensors that a second run writes, not even for their
        # shape.
        mean, var = (input.new_zeros(self.num_features, dtype=self.mean.dtype) for _ in range(2))
        # With a momentum of 1 the kernel stores the batch's own statistics.
        share = 1.0 if self.share is None else self.share
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


class Synchronised(Recording):
    """Common part of three kinds that normalise over the present forwards of all ranks.

    In evaluation, and on one rank, they are recording layers. What they record is the same on every rank.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or (_count_ranks() == 1 and not _FORWARD.alone):
            return super().forward(input)
        # torch gives the method no types.
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output: Tensor = self._normalise(input)
        return output

    # The compiler cannot trace the collectives of an autograd function, so it breaks the graph here. torch gives the
    # decorator no types.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _normalise(self, input: Tensor) -> Tensor:
        # torch gives `apply` no types.
        results: tuple[Tensor, ...] = _Normalise.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        output, mean, var, total = results
        if self.mean is not None and self.var is not None and self.runs is not None:
            with torch.no_grad():
                # The running variance is unbiased, as in torch's layer.
                self._record(mean, var * (total / (total - 1.0).clamp(min=1.0)), total > 0.0)
        return output

    def _record(self, mean: Tensor, var: Tensor, counts: Tensor) -> None:
        """Add a forward's statistics, unless it was an empty slot on every rank.

        Args:
            mean, var: over all ranks, `var` unbiased; [channels].
            counts: some rank had samples; [1], bool.
        """
        assert self.mean is not None
        assert self.var is not None
        assert self.runs is not None
        self.runs.add_(counts.reshape(()))
        for recorded, value in ((self.mean, mean), (self.var, var)):
            if self.share is None:
                added = recorded + value
            else:
                added = recorded * (1.0 - self.share) + self.share * value
            recorded.copy_(torch.where(counts, added, recorded))


class _Synchronised1d(Synchronised, nn.BatchNorm1d):
    pass


class _Synchronised2d(Synchronised, nn.BatchNorm2d):
    pass


class _Synchronised3d(Synchronised, nn.BatchNorm3d):
    pass


def _count_ranks() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum over all ranks, the same bits on each. Collective."""
    if _FORWARD.alone or _count_ranks() == 1:
        return values
    values = values.clone()
    # All ranks, once per layer and direction. Replicas of several ranks are refused.
    collectives.all_reduce(values, group=None)  # collective
    return values


class _RankSum(torch.autograd.Function):
    """The sum over all ranks, which is its own derivative.

    So any number of backwards may follow.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _sum_over_ranks(values)  # collective

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _sum_with_graph(gradients[0])  # collective


def _sum_with_graph(values: Tensor) -> Tensor:
    """Return the sum over all ranks, to be differentiated. Collective."""
    # All ranks. torch gives `apply` no types.
    total: Tensor = _RankSum.apply(values)  # type: ignore[no-untyped-call]  # collective
    return total


class _Normalise(torch.autograd.Function):
    """Normalise by the statistics of all ranks' samples: one collective forward, one backward.

    Inputs: input [samples, channels, ...], weight and bias [channels] or None, eps. Outputs: the normalised input; mean
    and biased variance [channels] and number of values [1], without gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, total = _statistics(input)
        wide = mean.dtype
        scale = _cast(weight, wide)
        shift = _cast(bias, wide)
        output = F.batch_norm(input, mean, var, scale, shift, False, 0.0, eps)
        ctx.save_for_backward(input, weight, bias, mean, var, total)
        ctx.eps = eps
        ctx.counts = _FORWARD.counts
        ctx.mark_non_differentiable(mean, var, total)
        return output, mean, var, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        input, weight, bias, mean, var, total = ctx.saved_tensors
        # The caller asks for a graph of the gradient (create_graph=True).
        if torch.is_grad_enabled():
            with_graph = _differentiable_gradients(ctx, gradients[0], input, weight, bias)  # collective
            return with_graph[0], with_graph[1], with_graph[2], None
        scale = _cast(weight, mean.dtype)
        # In evaluation mode the kernel treats mean and variance as constants. The gradient that flows through them is
        # added below.
        direct, by_scale, by_shift = torch.ops.aten.native_batch_norm_backward(
            gradients[0], input, scale, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            # All ranks, also those with an empty slot: the statistics depend on every rank's samples.
            sums = _sum_over_ranks(torch.cat([by_scale, by_shift]).to(mean.dtype))  # collective
        if ctx.needs_input_grad[0] and ctx.counts:
            of_scale, of_shift = (sums / total.clamp(min=1.0)).chunk(2)
            shape = _channel_shape(input)
            deviation = torch.rsqrt(var + ctx.eps)
            factor = deviation if scale is None else deviation * scale
            centred = (input - mean.view(shape)) * (of_scale * deviation).view(shape) + of_shift.view(shape)
            direct = (direct - centred * factor.view(shape)).to(input.dtype)
        return (
            direct if ctx.needs_input_grad[0] else None,
            by_scale.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            by_shift.to(bias.dtype) if ctx.needs_input_grad[2] else None,
            None,
        )


def _statistics(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance [channels], and number of values [1], over all ranks. Collective.

    Ranks exchange means and variances, not sums of squares, which cancel where the mean is large.
    """
    var, mean = torch.var_mean(_widen(input), _summed_dims(input), correction=0)
    count = mean.new_full((1,), input.numel() // input.shape[1] if _FORWARD.counts else 0)
    # A row per rank; an empty slot has a count of 0, and so no weight.
    local_row = torch.cat([mean, var, count])
    rows = [local_row]
    if not _FORWARD.alone and _count_ranks() > 1:
        rows = [torch.empty_like(local_row) for _ in range(_count_ranks())]
        # All ranks, once per layer.
        collectives.all_gather(rows, local_row, group=None)  # collective
    means, variances, counts = torch.stack(rows).split_with_sizes([len(mean), len(mean), 1], dim=1)
    total = counts.sum(0)
    # A slot that is empty on every rank needs finite numbers, but no meaning.
    weights = torch.where(total > 0.0, counts, 1.0)
    weights = weights / weights.sum(0)
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean) ** 2)).sum(0)
    return mean, var, total


def _differentiable_gradients(
    ctx: Any, gradient: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of input, weight and bias with their graph. Collective."""
    inputs = zip((input, weight, bias), ctx.needs_input_grad[:3], strict=True)
    tensors = []
    for tensor, needs in inputs:
        if needs:
            tensors.append(tensor)
        else:
            tensors.append(None)
    needed = []
    for tensor in tensors:
        if tensor is not None:
            needed.append(tensor)
    with torch.enable_grad(), empty_slot(not ctx.counts):
        output = _normalise_by_parts(input, weight, bias, ctx.eps)
        gradients = iter(torch.autograd.grad(output, needed, gradient, create_graph=True))
    present = []
    for tensor in tensors:
        present.append(None if tensor is None else next(gradients))
    return present


def _normalise_by_parts(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise as `_Normalise`, by operations that can be differentiated again. Collective."""
    dims = _summed_dims(input)
    shape = _channel_shape(input)
    wide = _widen(input)
    counted = 1.0 if _FORWARD.counts else 0.0
    count = wide.new_full((1,), counted * input.numel() / input.shape[1])
    # All ranks.
    sums = _sum_with_graph(torch.cat([wide.sum(dims) * counted, count]))  # collective
    total = sums[-1:].clamp(min=1.0)
    centred = wide - (sums[:-1] / total).view(shape)
    # All ranks, after the mean is known: squares of deviations do not cancel.
    var = _sum_with_graph((centred**2).sum(dims) * counted) / total  # collective
    output = centred * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        output = output * weight.to(wide.dtype).view(shape)
    if bias is not None:
        output = output + bias.to(wide.dtype).view(shape)
    return output.to(input.dtype)


def _widen(input: Tensor) -> Tensor:
    # Sums in half precision would lose most of their digits.
    if input.dtype.itemsize < 4:
        return input.float()
    return input


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.to(dtype)


def _summed_dims(input: Tensor) -> list[int]:
    return [dim for dim in range(input.ndim) if dim != 1]


def _channel_shape(input: Tensor) -> list[int]:
    return [1, -1, *[1] * (input.ndim - 2)]


_KINDS: dict[type, type] = {nn.BatchNorm1d: _Recording1d, nn.BatchNorm2d: _Recording2d, nn.BatchNorm3d: _Recording3d}
_SYNCHRONISED: dict[type, type] = {
    nn.BatchNorm1d: _Synchronised1d,
    nn.BatchNorm2d: _Synchronised2d,
    nn.BatchNorm3d: _Synchronised3d,
}


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
    known_types = (Recording, nn.SyncBatchNorm, *_KINDS)
    return isinstance(module, _BatchNorm) and type(module) not in known_types and not isinstance(module, Recording)


def recorders(model: nn.Module) -> list[Recording]:
    """Return the model's recording layers with running statistics, in order."""
    modules = []
    for module in model.modules():
        if isinstance(module, Recording) and module.running_mean is not None:
            modules.append(module)
    return modules


def synchronise(model: nn.Module, say: Callable[[str], None]) -> nn.Module:
    """Turn the model's BatchNorm layers into ones that normalise over all ranks, in place.

    A layer of a derived class has its own forward and is left unchanged; `say` gets a line.
    """
    skipped = []
    for name, module in model.named_modules():
        if type(module) in _SYNCHRONISED:
            module.__class__ = _SYNCHRONISED[type(module)]
        elif _is_other(module):
            skipped.append(f"{name} ({type(module).__name__})")
    if skipped:
        say(
            f"--batchnorm sync skips {len(skipped)} layers of other classes, the first is {skipped[0]}: they normalise "
            "by each rank's own micro-batches"
        )
    return model
