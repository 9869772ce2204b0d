"""States to save: the same values on every rank, whatever the world; sharded like FSDP where asked."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def full():
    """Plain tensors: ties, odd sizes, scalars, strides, an empty one, every dtype."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(7, 5, generator=generator)
    tensors = {
        "model/head.weight": rows,
        "model/embed.weight": rows,
        "model/blocks.0.weight": torch.randn(13, 4, 3, generator=generator),
        "model/blocks.0.bias": torch.randn(3, generator=generator),
        "model/turned": torch.randn(6, 9, generator=generator).t(),
        "model/empty": torch.zeros(0, 4, dtype=torch.float64),
        "model/rotary": torch.randn(7, 3, dtype=torch.complex64, generator=generator),
        "model/fourier": torch.randn(9, 4, dtype=torch.complex128, generator=generator).conj().t(),
        "optimizer/blocks.0.weight/step": torch.tensor(17.0),
        "optimizer/blocks.0.weight/exp_avg": torch.randn(13, 4, 3, generator=generator),
    }
    for dtype in DTYPES:
        # complex numbers are drawn as such: an imaginary part of 0 would hide that it is lost
        values = torch.randn(5, 2, dtype=dtype if dtype.is_complex else None, generator=generator) * 3
        tensors[f"extra/{dtype}"] = values.to(dtype)
        tensors[f"extra/{dtype}/scalar"] = values[0, 0].to(dtype)
    return tensors


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def sharded(tensors, world, how):
    """The same state in DTensors: "rows" of one mesh, a "hybrid" 2-D mesh, "columns", or "plain"."""
    if how == "plain":
        return tensors
    two = how == "hybrid" and world.size % 2 == 0
    mesh = init_device_mesh("cpu", (2, world.size // 2) if two else (world.size,))
    made: dict[int, DTensor] = {}
    for tensor in tensors.values():
        if tensor.dim() and id(tensor) not in made:
            last = tensor.dim() - 1 if how == "columns" else 0
            place = [Replicate(), Shard(0)] if two else [Shard(last)]
            made[id(tensor)] = distribute_tensor(tensor, mesh, place, src_data_rank=None)  # no exchange
    return {name: made.get(id(tensor), tensor) for name, tensor in tensors.items()}


def gathered(tensors):
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}


def differing(found, wanted):
    """Names whose bits differ."""
    return [
        name
        for name in wanted
        if found[name].dtype != wanted[name].dtype or not torch.equal(found[name].cpu(), wanted[name])
    ]
