"""Triton kernels of `models.fused`: a product with bias and GELU, gradients with column sums.

    hidden, activated = linear_gelu(x, weight, bias)            # bfloat16 or float16; sums in float32
    gradient, sums = gelu_gradient(gradient, hidden)
    gradient, sums = stacked_gradient(query, key, value)

Imported only for CUDA tensors: it needs the package triton.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "CONFIGS",
    "gelu_gradient",
    "linear_gelu",
    "stacked_gradient",
]


class Tile(NamedTuple):
    """Tile of a product: rows, columns and depth; warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# The first fits the shared memory of sm90 (144 KiB), the last that of every device from sm80 on (96 KiB).
CONFIGS = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3))
# Blocks of rows that share their columns' weights in the L2 cache.
_GROUP = 8
# Rows and columns of a tile in a pass over a gradient, and the rows that one program sums.
_ROWS, _COLUMNS, _CHUNK = 32, 128, 256


# Triton compiles the functions below from their source, and takes no type annotations.
@triton.jit
def _gelu(x):  # type: ignore[no-untyped-def]
    # 0.5 * (1 + tanh(u)) is sigmoid(2 * u). 1.595... is 2 * sqrt(2 / pi).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gelu_derivative(x):  # type: ignore[no-untyped-def]
    # 0.134145 is 3 * 0.044715, from the derivative of the cubic term.
    share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit  # type: ignore[untyped-decorator]
def _linear_gelu(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    hidden,
    activated,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
):
    # Programs in groups of GROUP row blocks by all column blocks: those that run together share operands in L2.
    program = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(outputs, BLOCK_COLUMNS)
    group = program // (GROUP * column_blocks)
    height = min(row_blocks - group * GROUP, GROUP)
    within = program % (GROUP * column_blocks)
    row = (group * GROUP + within % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (within // height) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    depth = tl.arange(0, BLOCK_DEPTH)
    # Rows and columns past the end wrap around; the mask below keeps their results from being stored.
    from_x = x + (row % rows).to(tl.int64)[:, None] * x_stride + depth[None, :]
    from_weight = weight + (column % outputs).to(tl.int64)[None, :] * weight_stride + depth[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for step in range(tl.cdiv(inputs, BLOCK_DEPTH)):
        if EVEN_DEPTH:
            x_tile = tl.load(from_x)
            weight_tile = tl.load(from_weight)
        else:
            inside = depth < inputs - step * BLOCK_DEPTH
            x_tile = tl.load(from_x, mask=inside[None, :], other=0.0)
            weight_tile = tl.load(from_weight, mask=inside[:, None], other=0.0)
        total = tl.dot(x_tile, weight_tile, total)
        from_x += BLOCK_DEPTH
        from_weight += BLOCK_DEPTH
    total += tl.load(bias + column % outputs).to(tl.float32)[None, :]
    offset = row.to(tl.int64)[:, None] * outputs + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < outputs)
    rounded = total.to(hidden.dtype.element_ty)
    tl.store(hidden + offset, rounded, mask=inside)
    # GELU of the rounded value, at which the backward takes the derivative.
    tl.store(activated + offset, _gelu(rounded.to(tl.float32)).to(activated.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_gradient(  # type: ignore[no-untyped-def]
    gradient,
    hidden,
    product,
    sums,
    rows,
    width,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=WIDE)
    for begin in range(0, CHUNK, ROWS):
        row = (tl.program_id(1) * CHUNK + begin + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        offset = row[:, None] * width + column[None, :]
        factor = tl.load(gradient + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(WIDE)
        derivative = _gelu_derivative(tl.load(hidden + offset, mask=inside, other=0.0).to(WIDE))
        rounded = (factor * derivative).to(product.dtype.element_ty)
        tl.store(product + offset, rounded, mask=inside)
        total += tl.sum(rounded.to(WIDE), axis=0)
    # Partial sums instead of atomics: the caller adds them in a fixed order.
    tl.store(sums + tl.program_id(1) * width + column, total, mask=column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _stacked_gradient(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    stacked,
    sums,
    rows,
    width,
    query_stride,
    key_stride,
    value_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    source_index = tl.program_id(2)
    source = query
    stride = query_stride
    if source_index == 1:
        source = key
        stride = key_stride
    if source_index == 2:
        source = value
        stride = value_stride
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=WIDE)
    for begin in range(0, CHUNK, ROWS):
        row = (tl.program_id(1) * CHUNK + begin + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        block = tl.load(source + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        tl.store(stacked + row[:, None] * (3 * width) + source_index * width + column[None, :], block, mask=inside)
        total += tl.sum(block.to(WIDE), axis=0)
    tl.store(sums + (tl.program_id(1) * 3 + source_index) * width + column, total, mask=column < width)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, blocks: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Compute h = x @ weight.T + bias and gelu(h), both [tokens, outputs].

    See `models.fused.linear_gelu`.

    Args:
        blocks: the tile; None: chosen by the device's capability, so that a device's bits stay the same.
    """
    x, weight, bias = _rows_apart(x), _rows_apart(weight), bias.contiguous()
    (rows, inputs), outputs = x.shape, weight.shape[0]
    hidden, activated = (x.new_empty(rows, outputs) for _ in range(2))
    if not rows:
        return hidden, activated
    if blocks is None:
        blocks = CONFIGS[0] if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9 else CONFIGS[-1]
    grid = (triton.cdiv(rows, blocks.rows) * triton.cdiv(outputs, blocks.columns),)
    with _device(x):
        _linear_gelu[grid](
            *(x, weight, bias, hidden, activated, rows, outputs, inputs, x.stride(0), weight.stride(0)),
            BLOCK_ROWS=blocks.rows,
            BLOCK_COLUMNS=blocks.columns,
            BLOCK_DEPTH=blocks.depth,
            GROUP=_GROUP,
            EVEN_DEPTH=inputs % blocks.depth == 0,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return hidden, activated


def gelu_gradient(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply by GELU's derivative and sum the columns; see `models.fused.gelu_gradient`."""
    gradient, hidden = _rows_apart(gradient), hidden.contiguous()
    rows, width = hidden.shape
    product, chunks = torch.empty_like(hidden), triton.cdiv(rows, _CHUNK)
    sums = hidden.new_empty(chunks, width, dtype=_wide(hidden))
    if rows:
        with _device(hidden):
            _gelu_gradient[triton.cdiv(width, _COLUMNS), chunks](
                *(gradient, hidden, product, sums, rows, width, gradient.stride(0)), **_pass(hidden)
            )
    return product, sums.sum(0)


def stacked_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Join three gradients and sum the columns; see `models.fused.stacked_gradient`."""
    query, key, value = _rows_apart(query), _rows_apart(key), _rows_apart(value)
    rows, width = query.shape
    chunks = triton.cdiv(rows, _CHUNK)
    stacked, sums = query.new_empty(rows, 3 * width), query.new_empty(chunks, 3 * width, dtype=_wide(query))
    if rows:
        strides = (query.stride(0), key.stride(0), value.stride(0))
        with _device(query):
            _stacked_gradient[triton.cdiv(width, _COLUMNS), chunks, 3](
                *(query, key, value, stacked, sums, rows, width, *strides), **_pass(query)
            )
    return stacked, sums.sum(0)


def _pass(like: Tensor) -> dict[str, Any]:
    wide = tl.float64 if like.dtype is torch.float64 else tl.float32
    return {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "CHUNK": _CHUNK, "WIDE": wide}


def _wide(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype is torch.float64 else torch.float32


def _rows_apart(tensor: Tensor) -> Tensor:
    """Return the matrix with contiguous elements in each row; rows may be strided."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _device(tensor: Tensor) -> Any:
    """Make the tensor's device current, on which Triton launches."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
