"""Check that replicas hold the same bits.

    check(engine.state_dict(), world, step)          # raises DifferenceError: rank 2, model/blocks.0.weight

Ranks with the same part of a tensor compare its fingerprint (xxh3 over its bytes, so order matters): all ranks for
replicated tensors, even a single buffer next to sharded parameters; the copies of a shard under hybrid sharding, and
those in the replicas of tensor parallelism. Tensors on only one rank are not read.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from lockstep.checkpoint.layout import boxes_of, replicas_of
from lockstep.checkpoint.read import AVERAGE
from lockstep.checkpoint.write import bytes_of
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.wrappers import UNFROZEN
from lockstep.errors import DifferenceError
from lockstep.tensors import as_bytes, local_of

__all__ = [
    "REPLACED",
    "Digests",
    "Replicas",
    "check",
    "fingerprints",
    "leaves",
    "of_batch",
    "of_digests",
]


# --- digests

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The golden ratio's 64 bits as an int64: multiples of it spread over all words.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# Words per chunk: their indices take 128 MiB.
_CHUNK = 1 << 24
# Replaces each NaN, whose sign and payload are unspecified.
_NAN = 3.25e-4
# Bytes. CPU kernels of small products choose their order of summation by the alignment.
_ALIGNED = 64


def word_sum(local: Tensor) -> Tensor:
    """Sum each word times an odd number that depends on its index, modulo 2**64.

    It works in chunks, so that it needs no more memory than two int64 vectors of a chunk.

    Returns:
        0-dim int64.
    """
    size = local.itemsize // 2 if local.is_complex() else local.itemsize
    words = as_bytes(local).view(_WORDS[size])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        weights = torch.arange(start, start + chunk.numel(), device=words.device, dtype=torch.int64)
        total += weights.mul_(_ODD).bitwise_or_(1).mul_(chunk).sum()
    return total


class Digests:
    """Digests of tensors by name.

    All NaN are equal, and a sparse tensor equals its dense form.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str | Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest the tensor's current value."""
        plain = _to_dense(tensor)
        on_host = plain.device.type == "cpu"
        self._digests[name] = xxhash.xxh3_64_hexdigest(bytes_of(plain)) if on_host else word_sum(plain)

    def read(self) -> dict[str, str]:
        """Return name -> 16 hexadecimal digits, in the order of `add`."""
        waiting = []
        for digest in self._digests.values():
            if isinstance(digest, Tensor):
                waiting.append(digest)
        # Waits for the device, once for all tensors.
        numbers = iter(torch.stack(waiting).tolist() if waiting else ())
        digests = {}
        for name, digest in self._digests.items():
            digests[name] = digest if isinstance(digest, str) else f"{next(numbers) & ((1 << 64) - 1):016x}"
        return digests


def of_digests(digests: dict[str, str]) -> str:
    """Combine digests to one that does not depend on their order."""
    return xxhash.xxh3_64_hexdigest(repr(sorted(digests.items())).encode())


def of_batch(data: Any) -> str:
    """Digest a nested batch in host memory.

    It covers tensors, numbers, strings, and the alignment of the tensors' memory.
    """
    total = xxhash.xxh3_64()
    for path, leaf in leaves(data):
        total.update(path.encode())
        if isinstance(leaf, Tensor):
            is_dense = leaf.layout is torch.strided and not leaf.is_nested
            memory = (leaf.shape, leaf.stride(), leaf.data_ptr() % _ALIGNED) if is_dense else leaf.layout
            total.update(repr((leaf.dtype, memory)).encode())
        total.update(bytes_of(leaf) if isinstance(leaf, Tensor) else leaf)
    return total.hexdigest()


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Tensor | bytes]]:
    """Yield (path, tensor or bytes) of every leaf of a nested batch."""
    if isinstance(data, Tensor):
        yield path, data
    elif isinstance(data, np.ndarray):
        yield path, repr((data.dtype, data.shape)).encode() + (b"" if data.dtype.hasobject else data.tobytes())
    elif isinstance(data, dict) or hasattr(data, "items"):
        for key, value in data.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(data, list | tuple):
        yield from _sequence_leaves(data, path)
    elif isinstance(data, str | int | float | bool | bytes | None):
        yield path, repr(data).encode()
    elif hasattr(data, "__dict__"):
        yield from leaves(vars(data), path)


def _sequence_leaves(values: Iterable[Any], path: str) -> Iterator[tuple[str, Tensor | bytes]]:
    for index, value in enumerate(values):
        yield from leaves(value, f"{path}[{index}]")


def _to_dense(tensor: Tensor) -> Tensor:
    """Convert to a dense real tensor with the same bits, except for NaN."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if not plain.is_floating_point():
        return plain
    return plain.nan_to_num(nan=_NAN, posinf=torch.inf, neginf=-torch.inf)


def fingerprints(state: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return name -> [this rank's part, its fingerprint].

    From a device one number per tensor is copied to the host.
    """
    table: dict[str, list[Any]] = {}
    waiting: list[tuple[str, Tensor]] = []
    for name, tensor in sorted(state.items()):
        boxes = boxes_of(tensor)
        if not boxes or tensor.is_meta:
            continue
        local = local_of(tensor)
        part: list[int] = []
        for box in boxes:
            part += (*box.offsets, *box.shape)
        table[name] = [part, ""]
        if local.device.type == "cpu":
            table[name][1] = _hash_of(local)
        else:
            waiting.append((name, word_sum(local)))
    if waiting:
        # Waits for the device, once, in `tolist`.
        for (name, _), value in zip(waiting, torch.stack([sums for _, sums in waiting]).tolist(), strict=True):
            table[name][1] = f"{value & ((1 << 64) - 1):016x}"
    return table


def _hash_of(local: Tensor) -> str:
    """Hash a host tensor's bytes in row-major order."""
    # A subclass of Tensor may have no memory of its own.
    is_plain = type(local) in (Tensor, nn.Parameter) and local.is_contiguous()
    if not is_plain or not local.nbytes or local.is_quantized or local.is_conj() or local.is_neg():
        return xxhash.xxh3_64_hexdigest(bytes_of(local))
    # Hash the memory in place, which `local` keeps alive: a view by torch and numpy would take ten times as long as a
    # small hash.
    return xxhash.xxh3_64_hexdigest((ctypes.c_char * local.nbytes).from_address(local.data_ptr()))


# --- replicas

# Prefix of the totals of copies that updates have replaced, in a state to be compared.
REPLACED = "replaced/"


def check(state: dict[str, Tensor], world: World, step: int, kinds: Callable[[], Mapping[str, str]] = dict) -> None:
    """Compare the replicas' states after `step` steps. Collective.

    One exchange of a digest for each set of ranks that hold the same parts; if digests differ, one of the fingerprints.
    In `World.together` the next gather carries the digests.

    Args:
        kinds: returns descriptions of tensors that change other than by updates, by name.

    Raises:
        DifferenceError: on every rank, naming the tensor that explains the difference, or the first that differs, and
            the odd rank if most ranks agree.
    """
    if world.size > 1:
        replicas = Replicas(state, world)
        # All ranks: a digest per set of ranks. The next gather carries it if several checks run together.
        world.defer(replicas.digests, lambda ranks: replicas.compare(ranks, step, kinds))  # collective


class Replicas:
    """This rank's part of a comparison of the replicas' states.

    Attributes:
        digests: [ranks' digest, their number, digest of the tensors] of each set of ranks that hold the same parts.
    """

    def __init__(self, state: dict[str, Tensor], world: World) -> None:
        cache: dict[Any, _Holders] = {}
        self._world = world
        self._holders = {name: _holders_of(tensor, world, cache) for name, tensor in state.items()}
        self._own = fingerprints({name: part for name, part in state.items() if self._holders[name].size > 1})
        digests: dict[_Holders, Any] = {}
        # In order of names, which is the same on every rank.
        for name, value in self._own.items():
            digests.setdefault(self._holders[name], xxhash.xxh3_64()).update(repr((name, value)).encode())
        self.digests = [[*group, digest.hexdigest()] for group, digest in digests.items()]

    def compare(self, ranks: list[list[list[Any]]], step: int, kinds: Callable[[], Mapping[str, str]] = dict) -> None:
        """Compare all ranks' `digests`. Collective if they differ.

        Raises:
            DifferenceError: as `check`.
        """
        if odd := _differing(ranks):
            details = {}
            for name, value in self._own.items():
                if self._holders[name].key in odd:
                    details[name] = value
            # All ranks, only before an error: which tensors differ on which ranks?
            raise DifferenceError(_describe(self._world.gather(details), step, kinds()))  # collective


class _Holders(NamedTuple):
    """The ranks with the same shard of a tensor.

    A digest of their numbers, and how many they are.

    The digest is as short for a thousand ranks as for two: what is exchanged grows with the ranks, not their square.
    """

    key: str
    size: int


def _holders_of(tensor: Tensor, world: World, cache: dict[Any, _Holders]) -> _Holders:
    """Return the ranks with the same shard of a tensor.

    None of them if this rank has no shard.

    Args:
        cache: cache, by mesh and placement.
    """
    mesh: Any = getattr(tensor, "device_mesh", None)
    placements: Any = tuple(getattr(tensor, "placements", ()))
    if (mesh, placements) not in cache:
        # Other stages of a pipeline hold other tensors.
        ranks = list(world.stage_ranks)
        if mesh is not None:
            at = mesh.get_coordinate()
            ranks = [] if at is None else _copies(replicas_of(mesh, world), placements, at)
        cache[mesh, placements] = _Holders(xxhash.xxh3_64_hexdigest(repr(ranks).encode()), len(ranks))
    return cache[mesh, placements]


def _copies(ranks: Tensor, placements: Any, at: list[int]) -> list[int]:
    """Return the ranks that differ from `at` only in replicated dimensions, in every replica of the mesh."""
    same: list[Any] = [slice(None)]
    for placement, i in zip(placements, at, strict=True):
        same.append(slice(None) if type(placement).__name__ == "Replicate" else i)
    return sorted(ranks[tuple(same)].reshape(-1).tolist())


def _differing(gathered: list[list[list[Any]]]) -> set[str]:
    """Return the keys of the sets of ranks whose digests differ.

    A set also differs if one of its ranks has sent no digest.

    Args:
        gathered: by rank, [key, size, digest] of each set that it belongs to.
    """
    values: dict[str, set[str]] = {}
    missing: dict[str, int] = {}
    for digests_of_rank in gathered:
        for key, size, digest in digests_of_rank:
            values.setdefault(key, set()).add(digest)
            missing[key] = missing.get(key, size) - 1
    keys = set()
    for key, digests in values.items():
        if len(digests) > 1 or missing[key]:
            keys.add(key)
    return keys


def _describe(ranks: list[dict[str, list[Any]]], step: int, kinds: Mapping[str, str]) -> str:
    names = list(dict.fromkeys(name for tensors_of_rank in ranks for name in tensors_of_rank))
    odd = [(name, values) for name in names if (values := _differing_ranks(ranks, name))]
    if odd:
        name, cause = _cause([name for name, _ in odd], kinds)
        more = f" (and {len(odd) - 1} more tensors)" if len(odd) > 1 else ""
        ranks_text = _describe_odd_ranks(dict(odd)[name])
        return f"after step {step} {ranks_text} in {_tensor_label(name, kinds)}{more}; {cause}"
    few = "in number"
    for candidate in names:
        if len({repr(tensors_of_rank.get(candidate, [""])[0]) for tensors_of_rank in ranks}) > 1:
            few = candidate
            break
    return f"after step {step} the replicas have different tensors, beginning with {few}; start all ranks alike"


_MEMORY_ADVICE = "resume from a checkpoint, and test the memory"
_WRITTEN_ADVICE = (
    "the ranks wrote different values: write the same value on every rank in the loop's body, or write it in the "
    "forward from the first step on, which copies rank 0's"
)
_UNFROZEN_ADVICE = "resume from a checkpoint, and unfreeze or freeze on every rank after the same step"


def _cause(odd: list[str], kinds: Mapping[str, str]) -> tuple[str, str]:
    """Return the tensor that explains the difference, and the way out.

    Tensors that updates do not write come first.
    """
    overwritten = [n for n in odd if n in kinds and not n.startswith("model/")] or [n for n in odd if _is_own(n)]
    overwritten = overwritten or [n for n in odd if n in kinds and UNFROZEN not in kinds[n]]
    if overwritten:
        return overwritten[0], _WRITTEN_ADVICE
    weights = []
    for name in odd:
        if name.startswith("model/"):
            weights.append(name)
    if weights and all(name in kinds for name in weights):
        return weights[0], _UNFROZEN_ADVICE
    return odd[0], _MEMORY_ADVICE


def _is_own(name: str) -> bool:
    return name.startswith(("task/", "kept."))


def _tensor_label(name: str, kinds: Mapping[str, str]) -> str:
    if name in kinds:
        return kinds[name]
    if name.startswith("optimizer/"):
        parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
        return f"the optimizer state {key} of {parameter}"
    if name.startswith(AVERAGE):
        return f"the average of {name.removeprefix(AVERAGE)}"
    if name.startswith(REPLACED):
        return f"{name.removeprefix(REPLACED)} before an update, which replaced it"
    if _is_own(name):
        return f"{name}, which `loss` or the loop's body writes"
    return name


def _differing_ranks(ranks: list[dict[str, list[Any]]], name: str) -> dict[int, str]:
    """Return rank -> fingerprint of a tensor part with different bits, or {}."""
    by_part: dict[str, dict[int, str]] = {}
    for rank, tensors_of_rank in enumerate(ranks):
        if name in tensors_of_rank:
            by_part.setdefault(repr(tensors_of_rank[name][0]), {})[rank] = tensors_of_rank[name][1]
    for values in by_part.values():
        if len(set(values.values())) > 1:
            return values
    return {}


def _describe_odd_ranks(values: dict[int, str]) -> str:
    """Describe the ranks outside the majority, or both of two."""
    digests = list(values.values())
    common = max(set(digests), key=digests.count)
    if 2 * digests.count(common) > len(digests):
        odd = ", ".join(rank_label(rank) for rank, value in values.items() if value != common)
        return f"{odd} differs from the other ranks"
    ranks = sorted(values)
    return f"{rank_label(ranks[0])} and {rank_label(ranks[-1])} differ (no majority)"
