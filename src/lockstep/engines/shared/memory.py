"""How many bytes a rank holds of a model, its gradients and its optimizer's states: counted, whatever the engine.

held = footprint(engine)        collective under zero and deepspeed
line = described(name, world.gather(held))
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.engines.base import Engine
from lockstep.tensors import local_of
from lockstep.transforms.weight_copies import copies_of
from lockstep.units import bytes_text

__all__ = ["Footprint", "add_counter", "count_bytes", "described", "footprint"]


class Footprint(NamedTuple):
    """Bytes on this rank, wherever they lie; what is gathered for a moment is not counted.

    Attributes:
        parameters: with buffers, and copies of weights where there are any.
        gradients: those that are there, else those that a backward leaves after its exchange.
        states: of the optimizer, and the average of the weights where there is one.
    """

    parameters: int
    gradients: int
    states: int


_COUNTERS = "lockstep_bytes"  # attribute of an engine's `model`


def add_counter(model: nn.Module, counter: Callable[[], Footprint]) -> None:
    """Have `footprint` ask this, where a state_dict is not shared out over the ranks as it is held.

    Args:
        model: that of the engine.
        counter: counts a part of what the rank holds; together they count all of it.
    """
    setattr(model, _COUNTERS, [*getattr(model, _COUNTERS, ()), counter])


def footprint(engine: Engine) -> Footprint:
    """Count what this rank holds now. Collective, best after the first step."""
    counters = getattr(engine.model, _COUNTERS, ())
    if counters:
        return Footprint(*map(sum, zip(*(counter() for counter in counters), strict=True)))
    state = engine.state_dict()
    parameters = [p for p in engine.model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters if p.grad is not None]
    copies = copies_of(engine.model)
    weights = [tensor for name, tensor in state.items() if name.startswith("model/")]
    return Footprint(
        count_bytes([*weights, *(copies.tensors if copies else ())]),
        count_bytes(gradients or parameters),
        count_bytes(tensor for name, tensor in state.items() if name.startswith(("optimizer/", "average/"))),
    )


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the tensors' parts on this rank, each piece of memory once."""
    found: dict[tuple[Any, ...], int] = {}
    for tensor in tensors:
        local = local_of(tensor)
        found[local.data_ptr(), local.device, local.shape] = local.nbytes
    return sum(found.values())


def described(name: str, ranks: list[Any]) -> str:
    """One line on the footprints of all ranks, which may have come through JSON."""
    words = ("parameters", "gradients", "optimizer states")
    parts = []
    for word, sizes in zip(words, zip(*ranks, strict=True), strict=True):
        low, high = min(sizes), max(sizes)
        parts.append(f"{word} {bytes_text(high) if low == high else f'{bytes_text(low)} to {bytes_text(high)}'}")
    return f"--engine {name} holds per rank: {', '.join(parts)}"
