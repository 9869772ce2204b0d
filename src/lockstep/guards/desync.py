"""Do replicas still hold the same bits?

    check(engine.state_dict(), world, step)          # raises DifferenceError: rank 2, model/blocks.0.weight

A fingerprint of every tensor (xxh3 over its bytes, so that order counts) is compared between the ranks that hold the
same part of it: all ranks for what is replicated, be it one buffer beside sharded parameters; the copies of a shard
under hybrid sharding. What one rank alone holds is not read.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from lockstep.checkpoint.layout import block_of
from lockstep.checkpoint.read import AVERAGE
from lockstep.checkpoint.write import bytes_of
from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World
from lockstep.engines.shared.remade import UNFROZEN
from lockstep.errors import DifferenceError
from lockstep.guards.digests import word_sum
from lockstep.tensors import local_of

__all__ = ["check", "fingerprints"]


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
            waiting.append((name, word_sum(local)))
    if waiting:
        for (name, _), value in zip(waiting, torch.stack([sums for _, sums in waiting]).tolist(), strict=True):
            found[name][1] = f"{value & ((1 << 64) - 1):016x}"  # waits for the device, once, in tolist
    return found


def check(state: dict[str, Tensor], world: World, step: int, kinds: Callable[[], Mapping[str, str]] = dict) -> None:
    """Compares the replicas' states after `step` steps. Every rank calls it. Collective: one exchange of a digest for
    each set of ranks that hold the same parts, and one of the fingerprints where digests differ.

    Args:
        kinds: gives what is known of tensors that change besides by updates: name -> in words.

    Raises:
        DifferenceError: on every rank, naming the tensor that explains the difference, else the first that differs, and
            the rank where most ranks agree.
    """
    if world.size == 1:
        return
    known: dict[Any, list[int]] = {}
    holders = {name: _holders(tensor, world, known) for name, tensor in state.items()}
    mine = fingerprints({name: tensor for name, tensor in state.items() if len(holders[name]) > 1})
    digests: dict[str, Any] = {}
    for name, value in mine.items():  # in the order of names, on every rank
        digests.setdefault(_key(holders[name]), xxhash.xxh3_64()).update(repr((name, value)).encode())
    gathered = world.gather({ranks: digest.hexdigest() for ranks, digest in digests.items()})  # collective
    found = {ranks: [gathered[int(rank)].get(ranks) for rank in ranks.split()] for each in gathered for ranks in each}
    odd = {ranks for ranks, values in found.items() if len(set(values)) > 1}
    if odd:
        shown = {name: value for name, value in mine.items() if _key(holders[name]) in odd}
        raise DifferenceError(_described(world.gather(shown), step, kinds()))  # collective


def _holders(tensor: Tensor, world: World, known: dict[Any, list[int]]) -> list[int]:
    """The ranks that hold the same part of a tensor as this rank; [] where it holds none.

    Args:
        known: what was found before, by mesh and placement.
    """
    mesh: Any = getattr(tensor, "device_mesh", None)
    placements: Any = tuple(getattr(tensor, "placements", ()))
    if (mesh, placements) not in known:
        ranks = list(range(world.size))
        if mesh is not None:
            at = mesh.get_coordinate()
            ranks = [] if at is None else _copies(mesh.mesh, placements, at)
        known[mesh, placements] = ranks
    return known[mesh, placements]


def _copies(ranks: Tensor, placements: Any, at: list[int]) -> list[int]:
    """Of a mesh's ranks those that differ from the one at `at` in replicated dimensions alone."""
    same = [slice(None) if type(kind).__name__ == "Replicate" else i for kind, i in zip(placements, at, strict=True)]
    return sorted(ranks[tuple(same)].reshape(-1).tolist())


def _key(ranks: list[int]) -> str:
    return " ".join(map(str, ranks))


def _described(ranks: list[dict[str, list[Any]]], step: int, kinds: Mapping[str, str]) -> str:
    names = list(dict.fromkeys(name for each in ranks for name in each))
    odd = [(name, values) for name in names if (values := _differing(ranks, name))]
    if odd:
        name, cause = _cause([name for name, _ in odd], kinds)
        more = f" (and {len(odd) - 1} more tensors)" if len(odd) > 1 else ""
        return f"after step {step} {_odd(dict(odd)[name])} in {_shown(name, kinds)}{more}; {cause}"
    few = next((name for name in names if len({repr(each.get(name, [""])[0]) for each in ranks}) > 1), "in number")
    return f"after step {step} the replicas differ in which tensors they hold, beginning with {few}; start all alike"


_MEMORY = "go back to a checkpoint, and check memory"
_WRITTEN = (
    "each rank wrote its own: write the same on every rank in the loop's body, or in the forward from the first step "
    "on, which makes it rank 0's"
)
_UNFROZEN = "go back to a checkpoint, and change what is trained on every rank, after the same step"


def _cause(odd: list[str], kinds: Mapping[str, str]) -> tuple[str, str]:
    """The tensor that explains why these differ, and the way out: what updates do not write comes first."""
    written = [n for n in odd if n in kinds and not n.startswith("model/")] or [n for n in odd if _is_own(n)]
    written = written or [n for n in odd if n in kinds and UNFROZEN not in kinds[n]]
    if written:
        return written[0], _WRITTEN
    weights = [name for name in odd if name.startswith("model/")]
    if weights and all(name in kinds for name in weights):
        return weights[0], _UNFROZEN
    return odd[0], _MEMORY


def _is_own(name: str) -> bool:
    return name.startswith(("task/", "kept."))


def _shown(name: str, kinds: Mapping[str, str]) -> str:
    if name in kinds:
        return kinds[name]
    if name.startswith("optimizer/"):
        parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
        return f"the optimizer state {key} of {parameter}"
    if name.startswith(AVERAGE):
        return f"the average of {name.removeprefix(AVERAGE)}"
    return f"{name}, which `loss` or the loop's body writes" if _is_own(name) else name


def _differing(ranks: list[dict[str, list[Any]]], name: str) -> dict[int, str]:
    """rank -> fingerprint, of the ranks that hold the same part of a tensor with different bits; {} for none such."""
    by_part: dict[str, dict[int, str]] = {}
    for rank, each in enumerate(ranks):
        if name in each:
            by_part.setdefault(repr(each[name][0]), {})[rank] = each[name][1]
    return next((values for values in by_part.values() if len(set(values.values())) > 1), {})


def _odd(values: dict[int, str]) -> str:
    """Who differs: those outside the majority, or both of two, of whom nobody can tell which is right."""
    kept = list(values.values())
    common = max(set(kept), key=kept.count)
    if 2 * kept.count(common) > len(kept):
        odd = ", ".join(rank_label(rank) for rank, value in values.items() if value != common)
        return f"{odd} differs from the other ranks"
    ranks = sorted(values)
    return f"{rank_label(ranks[0])} and {rank_label(ranks[-1])} differ (no majority says which is right)"
