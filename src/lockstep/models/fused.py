"""Compute the summed loss in chunks, and the fused linear layers of --fused-kernels.

    attention.inputs = QkvLinear.of(attention.inputs)     # [..., width] -> queries, keys, values, each [..., width]
    block.expand = GeluLinear.of(block.expand, epilogue=True)           # gelu(x @ weight.T + bias)

`summed_loss` makes the logits of a chunk of tokens at a time. The backward of the fused layers passes over its
gradients once. The bytes that a backward moves, in units of one tensor of [tokens, width], as torch.compile 2.11
writes the plain code:

    q, k, v, plain      stack 3 + 3, to inputs 3 + 1, to weights 3 + 1, sum for the bias 3           = 17
    this file           stack and sums in one pass 3 + 3, to inputs 3 + 1, to weights 3 + 1           = 14
    without a stack     to inputs 3 + 2 read, 3 written (addmm twice), to weights 3 + 3, sums 3       = 17
    three layers        as without a stack, and the forward reads its input three times               = 19
    GELU, plain         da 4, h 4, dh 4 written, to inputs 4 + 1, to weights 4 + 1, sum 4             = 22
    this file           the sum comes with the pass that writes dh                                    = 18

Attention's kernels return three gradients in separate memory, so some pass must join them: a product over 3 x width
reads them stacked once, three products read and write their accumulator. With `epilogue` the forward's product writes
h and gelu(h), which saves reading h again: 4 of 21.

The operators are plain ATen on a CPU, and Triton on a CUDA device. None chooses a kernel by speed and none adds by
atomics, so the bits depend on shapes alone.
"""

import importlib
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

from lockstep.transforms.weight_copies import operands_of

__all__ = [
    "IGNORED",
    "Ending",
    "GeluLinear",
    "QkvLinear",
    "chunk_of",
    "gelu_gradient",
    "linear_gelu",
    "summed_cross_entropy",
    "summed_loss",
]


# Label of a token that is not predicted; the default of F.cross_entropy.
IGNORED = -100

# (model, output of its blocks or its head, labels int64 [batch, time], chunk) -> the loss, summed
Ending = Callable[[Any, Tensor, Tensor, int], Tensor]

# Bytes of a micro-batch's float32 logits; larger ones are computed in chunks.
_LARGE = 512 << 20
# Bytes of the float32 logits of a chunk, at most.
_CHUNK = 128 << 20


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy in nats, summed over the labels that are not -100.

    The result is a scalar in float32, or float64 for such logits.

    Args:
        logits: [..., vocab].
        labels: int64 [...].
    """
    logits = logits.flatten(0, -2)
    if logits.dtype is not torch.float64:
        # A sum over a large vocabulary is too coarse in half precision.
        logits = logits.float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def summed_loss(head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Return `summed_cross_entropy(head(hidden), labels)`, for `chunk` tokens at a time; 0: all.

    The losses are added in the order of the chunks, so the bits depend only on `chunk`.

    Args:
        head: hidden states -> logits; it may use any parameters of the running model.
        hidden: [batch, time, width].
        labels: int64 [batch, time].
    """

    if not chunk:
        return summed_cross_entropy(head(hidden), labels)

    def part(rows: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(head(rows), targets)

    # Checkpointing frees a chunk's logits after its forward, and computes them again in the backward.
    parts = zip(torch.split(hidden.flatten(0, 1), chunk), torch.split(labels.flatten(), chunk), strict=True)
    losses = []
    for operands in parts:
        losses.append(checkpoint(part, *operands, use_reentrant=False, preserve_rng_state=False))
    total: Tensor = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def chunk_of(setting: int, tokens: int, vocab_size: int) -> int:
    """Return the chunk for a micro-batch of `tokens` tokens; 0: all at once.

    Args:
        setting: a number of tokens, 0 for none, -1 to choose by size: if float32 logits would take more than 512 MiB,
            the power of two whose logits take up to 128 MiB.
    """
    if setting >= 0:
        return setting
    if 4 * tokens * vocab_size <= _LARGE:
        return 0
    # 4 bytes a logit, and at least 16 tokens.
    return 1 << max(_CHUNK // (4 * vocab_size), 16).bit_length() - 1


_HALF = (torch.bfloat16, torch.float16)


def _kernels() -> Any:
    """Import the Triton kernels; Triton comes only with torch's CUDA builds."""
    return importlib.import_module("lockstep.models.fused_triton")


def _sums(gradient: Tensor) -> Tensor:
    if gradient.dtype is torch.float64:
        wide = torch.float64
    else:
        wide = torch.float32
    return gradient.sum(0, dtype=wide)


@torch.library.custom_op("lockstep::stacked_gradient", mutates_args=())
def stacked_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Join three gradients column by column, and sum each column.

    Args:
        query: [tokens, width], as are `key` and `value`.

    Returns:
        [tokens, 3 * width], and its column sums, [3 * width] in float32, or in float64 for such gradients.
    """
    stacked = torch.cat((query, key, value), dim=1)
    return stacked, _sums(stacked)


@torch.library.custom_op("lockstep::gelu_gradient", mutates_args=())
def gelu_gradient(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply a gradient by the derivative of GELU (tanh) at `hidden`, and sum each column.

    Args:
        gradient: [tokens, width], of gelu(hidden).
        hidden: [tokens, width].

    Returns:
        [tokens, width], and its column sums, [width] in float32, or in float64 for such gradients.
    """
    product = torch.ops.aten.gelu_backward(gradient, hidden, approximate="tanh").contiguous()
    return product, _sums(product)


@torch.library.custom_op("lockstep::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute h = x @ weight.T + bias and its GELU (tanh).

    Both are [tokens, outputs].

    Args:
        x: [tokens, inputs].
        weight: [outputs, inputs].
        bias: [outputs].
    """
    hidden = F.linear(x, weight, bias)
    return hidden, F.gelu(hidden, approximate="tanh")


@stacked_gradient.register_kernel("cuda")
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    stacked, sums = _kernels().stacked_gradient(query, key, value)
    return stacked, sums


@gelu_gradient.register_kernel("cuda")
def _(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    product, sums = _kernels().gelu_gradient(gradient, hidden)
    return product, sums


@linear_gelu.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype in _HALF:
        hidden, activated = _kernels().linear_gelu(x, weight, bias)
    else:
        # cuBLAS has better products in float32 and float64.
        hidden = F.linear(x, weight, bias)
        activated = F.gelu(hidden, approximate="tanh")
    return hidden, activated


# torch.compile needs the shapes and dtypes of the results without running the operators.
@stacked_gradient.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = query.shape
    return query.new_empty(rows, 3 * width), _empty_sums(query, 3 * width)


@gelu_gradient.register_fake
def _(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), _empty_sums(hidden, hidden.shape[1])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


def _empty_sums(like: Tensor, width: int) -> Tensor:
    return like.new_empty(width, dtype=torch.float64 if like.dtype is torch.float64 else torch.float32)


# FlopCounterMode cannot look into a custom operator. A multiply-add counts as 2.
@register_flop_formula(torch.ops.lockstep.linear_gelu)
def _linear_gelu_flops(x: Any, weight: Any, bias: Any, *, out_shape: Any = None, **_: Any) -> int:
    return int(2 * x[0] * x[1] * weight[0])


class _Qkv(torch.autograd.Function):
    """One product for queries, keys and values, which are views of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: with activation checkpointing the read computes the forward again.
        x, weight = ctx.saved_tensors
        parts = (grad.reshape(-1, grad.shape[-1]) for grad in (query, key, value))
        gradient, sums = torch.ops.lockstep.stacked_gradient(*parts)
        return _linear_backward(ctx, x, weight, gradient, sums)


class _Gelu(torch.autograd.Function):
    """gelu(x @ weight.T + bias); the backward keeps the input of the GELU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epilogue: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if epilogue:
            hidden, activated = torch.ops.lockstep.linear_gelu(rows, weight, bias)
        else:
            hidden = F.linear(rows, weight, bias)
            activated = F.gelu(hidden, approximate="tanh")
        ctx.save_for_backward(x, weight, hidden)
        output: Tensor = activated.view(*x.shape[:-1], -1)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, hidden = ctx.saved_tensors
        product, sums = torch.ops.lockstep.gelu_gradient(gradient.reshape(hidden.shape), hidden)
        return (*_linear_backward(ctx, x, weight, product, sums), None)


def _linear_backward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, sums: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a linear layer's input, weight and bias.

    Args:
        gradient: of its output, [tokens, outputs].
        sums: its column sums, [outputs].
    """
    to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
    return (
        (gradient @ weight).view(x.shape) if to_x else None,
        gradient.t() @ x.reshape(-1, x.shape[-1]) if to_weight else None,
        sums.to(gradient.dtype) if to_bias else None,
    )


class _Replacement(nn.Linear):
    """A linear layer that takes over the parameters of another."""

    # The forward asks `transforms.weight_copies` for copies of the weights in its dtype.
    takes_copies = True

    @classmethod
    def of(cls, linear: nn.Linear, **settings: Any) -> Self:
        """Build the layer around the parameters of `linear`, which must have a bias.

        `settings` become attributes.
        """
        # On the meta device the layer draws no initial weights.
        layer = cls(linear.in_features, linear.out_features, device="meta")
        layer.weight = linear.weight
        layer.bias = linear.bias
        vars(layer).update(settings)
        return layer.train(linear.training)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input and the parameters in one dtype, as autocast does for torch's products."""
        operands = (x, *operands_of(self, x))
        device_type = x.device.type
        if not torch.is_autocast_enabled(device_type) or x.dtype is torch.float64:
            return operands
        dtype = torch.get_autocast_dtype(device_type)
        return operands[0].to(dtype), operands[1].to(dtype), operands[2].to(dtype)


class QkvLinear(_Replacement):
    """Linear layer to queries, keys and values: [..., width] to three of [..., width].

    The three are views of one product.
    """

    # nn.Linear returns one tensor.
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        # torch does not annotate Function.apply.
        output: tuple[Tensor, Tensor, Tensor] = _Qkv.apply(*self._operands(x))  # type: ignore[no-untyped-call]
        return output


class GeluLinear(_Replacement):
    """Linear layer followed by GELU (tanh): [..., inputs] to [..., outputs].

    Attributes:
        epilogue: the kernel of the product computes the GELU too.
    """

    epilogue: bool

    def forward(self, x: Tensor) -> Tensor:
        # torch does not annotate Function.apply.
        output: Tensor = _Gelu.apply(*self._operands(x), self.epilogue)  # type: ignore[no-untyped-call]
        return output
