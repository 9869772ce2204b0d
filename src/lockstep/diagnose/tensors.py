"""One kind of tensor of one step (weights, gradients, ...) on one rank, held against the reference's.

Tensors are read from the disk and compared one at a time, each rank its own part, so that nothing is gathered.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.layout import Block, block_of, local_of
from lockstep.diagnose.shelf import Stored, digest

__all__ = ["Limit", "compare", "cut", "is_whole", "square"]

PIECE = 2**18  # elements that are converted to float64 at a time

# Of a tensor's part: the largest 2-norm of its error, or a function of a piece's place to the largest error of elements
Limit = float | Callable[[slice], Tensor]
Allowed = Callable[[str, Tensor, Block], Limit]


def compare(tensors: Iterable[tuple[str, Tensor]], wanted: Stored, allowed: Allowed) -> dict[str, Any]:
    """How this rank's parts differ from the reference's, as plain values for `found`.

    Args:
        tensors: by name, in the model's order; DTensors where sharded.
        wanted: the reference's, of the same kind and step.
        allowed: (name, reference's part, block) -> the largest error, see Limit; below 0: no bit may differ.

    Returns:
        "digests": of the tensors that this rank holds whole.
        "first": the first tensor that is not as wanted: its name, the largest difference, where, both values.
        "largest": [relative difference, name]: of the tensor's largest error to its largest element.
        "equal": whether all bits are.
        "sums": squares of what this rank has, of what it has whole, of the reference's part, and their product.
        "parts": by name, squares of what this rank has and of the reference's part, and their product.
        "missing": names on one side only.
    """
    found: dict[str, Any] = {"digests": {}, "first": None, "largest": [0.0, ""], "equal": True, "missing": []}
    found["parts"] = {}
    sums, seen = [0.0, 0.0, 0.0, 0.0], set()
    for name, tensor in tensors:
        seen.add(name)
        if name not in wanted.names:
            found["missing"].append(name)
            continue
        block = block_of(tensor)
        if block is None or not tensor.numel():
            continue
        mine = local_of(tensor).cpu()  # waits for the device
        if is_whole(tensor):
            found["digests"][name] = digest(mine)
        whole = wanted[name]
        if tensor.shape != whole.shape or tensor.dtype != whole.dtype:
            found["first"] = found["first"] or _unlike(name, tensor, whole)
            found["equal"] = False
            continue
        theirs = cut(whole, block)
        found["parts"][name] = _tally(sums, mine, theirs, is_whole(tensor))
        _difference(found, name, mine, theirs, block, allowed)
    found["missing"] += [name for name in wanted.names if name not in seen]
    return {**found, "sums": sums}


def is_whole(tensor: Tensor) -> bool:
    """Whether this is a plain tensor, which every rank holds whole."""
    return not hasattr(tensor, "placements")


def cut(whole: Tensor, block: Block) -> Tensor:
    """The part of a whole tensor that a block says; a view."""
    for dimension, (start, length) in enumerate(zip(block.offsets, block.shape, strict=True)):
        whole = whole.narrow(dimension, start, length)
    return whole


def _unlike(name: str, mine: Tensor, theirs: Tensor) -> dict[str, Any]:
    kinds = [f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in (mine, theirs)]
    return {"name": name, "values": kinds, "at": [], "difference": math.inf, "allowed": 0.0}


def _tally(sums: list[float], mine: Tensor, theirs: Tensor, whole: bool) -> list[float]:
    own, wanted, product = 0.0, 0.0, 0.0
    if mine.is_floating_point():
        for _, a, b in _pieces(mine, theirs):
            own, wanted, product = own + float(a @ a), wanted + float(b @ b), product + float(a @ b)
        for index, number in enumerate((own, own * whole, wanted, product)):
            sums[index] += number
    return [own, wanted, product]


def _difference(found: dict[str, Any], name: str, mine: Tensor, theirs: Tensor, block: Block, allowed: Allowed) -> None:
    if digest(mine) == digest(theirs):
        return
    found["equal"] = False
    limit = allowed(name, theirs, block)
    worst, size, error, allowance = (-1.0, 0), 0.0, 0.0, 0.0
    for place, a, b in _pieces(mine, theirs):
        apart = (a - b).abs()
        if not apart.isfinite().all():  # inf - inf, or a nan that has other bits: what is not finite differs
            apart = torch.where(apart.isfinite(), apart, math.inf)
        at = int(apart.argmax())
        worst = max(worst, (float(apart[at]), -(place.start + at)))
        size = max(size, float(b.abs().max()))
        error += float(apart @ apart)
        if not isinstance(limit, float):
            most = limit(place)
            allowance += float(most @ most)
    relative = worst[0] / size if size else math.inf
    if relative > found["largest"][0]:
        found["largest"] = [relative, name]
    allowance = limit if isinstance(limit, float) else math.sqrt(allowance)
    if found["first"] is None and not math.sqrt(error) <= allowance:
        flat = -worst[1]
        values = [float(mine.reshape(-1)[flat]), float(theirs.reshape(-1)[flat])]
        where = {"at": _place(flat, block), "difference": math.sqrt(error), "allowed": allowance}
        found["first"] = {"name": name, "values": values, **where}


def _pieces(mine: Tensor, theirs: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(place, piece of the one, piece of the other) in float64: at no time does a whole tensor lie in memory so."""
    one, other = mine.reshape(-1), theirs.reshape(-1)
    for start in range(0, one.numel(), PIECE):
        place = slice(start, start + PIECE)
        yield place, one[place].double(), other[place].double()


def _place(flat: int, block: Block) -> list[int]:
    """The index in the whole tensor of an element of a block."""
    place: list[int] = []
    for start, length in zip(reversed(block.offsets), reversed(block.shape), strict=True):
        flat, within = divmod(flat, max(length, 1))
        place.insert(0, start + within)
    return place


def square(tensor: Tensor) -> float:
    """The sum of the squares of all elements, in float64."""
    return math.fsum(float(a @ a) for _, a, _ in _pieces(tensor.detach(), tensor.detach()))
