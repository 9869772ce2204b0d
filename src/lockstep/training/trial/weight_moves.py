"""Move a model's weights for a trial, and restore them bit for bit without copies.

with move_weights(weights, seed):              # a little: zero heads and symmetric starts are no special case
    with stretch_weights(weights):            # by four: hinges and thresholds already drop samples
        ...
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

__all__ = ["LAST_BIT", "move_weights", "stretch_weights"]

_MANTISSAS = {
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}
# Standard deviation of the moves of zeros. Others move by up to 2^-6 of each weight.
_MOVE = 1e-2
# The first bit of a mantissa that moves weighs 2^-7.
_FIRST_BIT = 7
# The same for moves as small as rounding errors.
LAST_BIT = 20
# A power of two, so that the weights come back bit for bit.
_STRETCH = 4.0
# A prime, so that the pattern meets the rows of a matrix at different places.
_PATTERN = 65521


@contextmanager
def stretch_weights(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Multiply weights by four, and restore them bit for bit.

    A tensor that would overflow is left out.
    """
    # Waits for the device, once for each tensor.
    large = []
    for tensor in _weights_of(tensors):
        tensor = tensor.data
        if bool(tensor.abs().amax() < torch.finfo(tensor.dtype).max / _STRETCH):
            large.append(tensor)
    try:
        # Exact, because the factor is a power of two.
        for weight in large:
            weight.mul_(_STRETCH)
        yield
    finally:
        for weight in large:
            weight.mul_(1 / _STRETCH)


@contextmanager
def move_weights(tensors: Sequence[Tensor], seed: int, first_bit: int = 0) -> Iterator[None]:
    """Move weights a little, and put them back bit for bit, without copies.

    Low bits of the mantissas are flipped by a seeded pattern, and flipped back. A tensor of zeros gets normal numbers,
    and is zeroed at the end. Tensors of other dtypes stay.

    Args:
        first_bit: the first bit of a mantissa that moves; 0: the seventh.
    """
    first_bit = first_bit or _FIRST_BIT
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for number, weight in enumerate(_weights_of(tensors)):
            # Moves must not count as writes, because torch's graphs and copies of weights check for those.
            data: Tensor = weight.data
            # Waits for the device, once for each tensor.
            if bool(data.any()):
                _flip(data, seed + number, first_bit)
                stack.callback(_flip, data, seed + number, first_bit)
            else:
                # Waits for the device. Zeros with a negative sign must get it back.
                signs = data.clone() if bool(data.signbit().any()) else None
                stack.callback(_restore_zeros, data, signs)
                generator = Generator().manual_seed(seed + number)
                pattern = torch.randn(min(data.numel(), _PATTERN), generator=generator).mul_(_MOVE).to(data)
                for tile, values in _tiles(data, pattern):
                    tile.copy_(values)
        with torch.enable_grad():
            yield


def _weights_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return detached views of the tensors that can move: real, of a known dtype, not empty."""
    weights = []
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.dtype in _MANTISSAS and real.numel():
            weights.append(real.detach())
    return weights


def _flip(data: Tensor, seed: int, first_bit: int) -> None:
    """Flip seeded low bits of the mantissas; a second call flips them back."""
    integer, size = _MANTISSAS[data.dtype]
    generator = Generator().manual_seed(seed)
    highest = 1 << max(size - first_bit + 1, 1)
    pattern = torch.randint(highest, (min(data.numel(), _PATTERN),), generator=generator, dtype=integer)
    for tile, values in _tiles(data.view(integer), pattern.to(data.device)):
        tile.bitwise_xor_(values)


def _restore_zeros(data: Tensor, before: Tensor | None) -> None:
    if before is None:
        data.zero_()
    else:
        data.copy_(before)


def _tiles(data: Tensor, pattern: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of a tensor with their values of a repeated pattern."""
    if not data.is_contiguous():
        repeats = -(-data.numel() // len(pattern))
        yield data, pattern.repeat(repeats)[: data.numel()].view(data.shape)
        return
    flat = data.view(-1)
    whole = len(flat) // len(pattern) * len(pattern)
    yield flat[:whole].view(-1, len(pattern)), pattern
    yield flat[whole:], pattern[: len(flat) - whole]
