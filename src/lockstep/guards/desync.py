"""Do replicas still hold the same bits?

    check(engine.state(), world, step)          # raises DifferenceError: rank 2, model/blocks.0.weight

A fingerprint of every tensor (xxh3 over its bytes, so that order counts) is compared between ranks that hold the same
part of the same tensors: all of them under ddp, the copies of a shard under hybrid sharding, none under full sharding.
"""

from typing import Any

import torch
import xxhash
from torch import Tensor

from lockstep.checkpoint.layout import block_of, local_of
from lockstep.checkpoint.write import bytes_of
from lockstep.errors import DifferenceError
from lockstep.world import World

__all__ = ["check", "fingerprints"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64


def fingerprints(state: dict[str, Tensor]) -> dict[str, list[Any]]:
    """name -> [the part that this rank holds, its fingerprint]. On a device one number a tensor crosses to the host."""
    found: dict[str, list[Any]] = {}
    waiting: list[tuple[str, Tensor]] = []
    for name, tensor in sorted(state.items()):
        block = block_of(tensor)
        if block is None or tensor.is_meta:
            continue
        local = local_of(tensor)
        found[name] = [[*block.offsets, *block.shape], ""]
        if local.device.type == "cpu":
            found[name][1] = xxhash.xxh3_64_hexdigest(bytes_of(local))
        else:
            waiting.append((name, _on_device(local)))
    if waiting:
        for (name, _), value in zip(waiting, torch.stack([sums for _, sums in waiting]).tolist(), strict=True):
            found[name][1] = f"{value & ((1 << 64) - 1):016x}"  # waits for the device, once, in tolist
    return found


def _on_device(local: Tensor) -> Tensor:
    """Sum of each word times an odd number that depends on its place, modulo 2**64. 0-dim int64."""
    flat = local.detach().contiguous().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
    places = torch.arange(words.numel(), device=words.device, dtype=torch.int64) * _ODD | 1
    return (words * places).sum()


def check(state: dict[str, Tensor], world: World, step: int) -> None:
    """Compares the replicas' states after `step` steps. Every rank calls it. Collective.

    Raises:
        DifferenceError: on every rank, naming the first tensor that differs, and the rank where most ranks agree.
    """
    if world.size == 1:
        return
    mine = fingerprints(state)
    parts = xxhash.xxh3_64_hexdigest(repr([(name, part) for name, (part, _) in mine.items()]).encode())
    whole = xxhash.xxh3_64_hexdigest(repr([value for _, value in mine.values()]).encode())
    gathered = world.gather([parts, whole])  # collective
    if len({part for part, _ in gathered}) == len({(part, value) for part, value in gathered}):
        return
    others = world.gather(mine)  # collective
    raise DifferenceError(_described(others, step))


def _described(ranks: list[dict[str, list[Any]]], step: int) -> str:
    for name in ranks[0] | {name: None for each in ranks for name in each}:
        by_part: dict[str, dict[int, str]] = {}
        for rank, each in enumerate(ranks):
            if name in each:
                by_part.setdefault(repr(each[name][0]), {})[rank] = each[name][1]
        for values in by_part.values():
            if len(set(values.values())) > 1:
                count = sum(_differs(other, name) for other in _names(ranks)) - 1
                more = f" (and {count} more tensors)" if count else ""
                return f"after step {step} {_odd(values)} in {name}{more}; go back to a checkpoint, and check memory"
    return f"after step {step} the replicas differ in which tensors they hold; start all ranks alike"


def _names(ranks: list[dict[str, list[Any]]]) -> list[list[str]]:
    """For each tensor that all ranks hold whole or in the same part: its fingerprints by rank."""
    shared = [name for name in ranks[0] if all(name in each and each[name][0] == ranks[0][name][0] for each in ranks)]
    return [[each[name][1] for each in ranks] for name in shared]


def _differs(values: list[str], _: str) -> bool:
    return len(set(values)) > 1


def _odd(values: dict[int, str]) -> str:
    """Who differs: those outside the majority, or both of two, of whom nobody can tell which is right."""
    kept = list(values.values())
    common = max(set(kept), key=kept.count)
    if 2 * kept.count(common) > len(kept):
        odd = ", ".join(str(rank) for rank, value in values.items() if value != common)
        return f"rank {odd} differs from the other ranks"
    ranks = sorted(values)
    return f"rank {ranks[0]} and rank {ranks[-1]} differ (no majority says which is right)"
