"""How a dtype lies in a safetensors file.

stored_as("bfloat16", (7, 5))       ("BF16", (7, 5))
stored_as("complex128", (7, 5))     ("F64", (7, 5, 2)): the format has no code for it; pairs of its parts
"""

import torch

__all__ = ["CODES", "PAIRS", "dtype_name", "is_known", "itemsize", "stored_as"]

# torch dtype name -> the code of the safetensors format
CODES = {
    "complex64": "C64",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

# torch dtype name -> that of its real and imaginary part, which stand beside each other in a last dimension of 2
PAIRS = {"complex128": "float64"}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without its package: "float32"."""
    return str(dtype).removeprefix("torch.")


def is_known(dtype: str) -> bool:
    """Whether a checkpoint can keep tensors of the dtype of this name."""
    return dtype in CODES or dtype in PAIRS


def itemsize(dtype: str) -> int:
    """Bytes of one element of the dtype of this name."""
    size: int = getattr(torch, dtype).itemsize
    return size


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The code and the shape that a tensor of the dtype of this name has in a safetensors file."""
    if dtype in PAIRS:
        return CODES[PAIRS[dtype]], (*shape, 2)
    return CODES[dtype], shape
