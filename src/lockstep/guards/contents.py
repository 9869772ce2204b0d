"""Digest samples, so that ranks and resumes can compare a few of them.

    found = Contents({"training set": dataset}, seed=0)[KEY][0]     # on each rank, in a loader process or not
    check_contents(world, found, accept)                            # DifferenceError: the sample and the ranks
    first_difference(stored, found)                                 # label of the first sample that changed

A digest has two parts: a hash of exact values (shapes, integers, strings), and weighted sums of inexact ones (floats,
the bytes of a picture). Two kinds of processor may round the latter differently, so the sums may differ in the fifth
place.
"""

import dataclasses
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Final, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from lockstep.data.loader import Key, seed_everything
from lockstep.distributed.world import World
from lockstep.errors import DifferenceError, LockstepError
from lockstep.guards.samples import RetryingDataset
from lockstep.seeds import derive
from lockstep.tensors import host_bytes
from lockstep.trace.record.sums import mix

__all__ = [
    "KEY",
    "Contents",
    "alike",
    "check_contents",
    "digest",
    "first_difference",
]

# One key stands for all samples.
KEY: Final = Key(step=0, micro=0, weight=1.0, epochs=[], samples=[])
# Positions of the samples in their set, as a share of it; the most telling ones come first.
_PLACES = (0.0, 0.5, 1.0, 0.25, 0.75)
# Seconds after the first sample in which further ones are read.
_ENOUGH = 1.0
# Levels of nested containers.
_DEEP = 12
# Elements; of a longer tensor evenly spaced ones are digested.
_LONGEST = 1 << 22
# Tolerance, relative to a tensor's norm: processors round floats differently.
_ROUNDING = 1e-4
_FAILED = "cannot be loaded"
# Most tensors of a sample that have sums.
_MOST_SUMS = 256

# [hash, [norm, weighted sum, norm, weighted sum, ...], types not compared], as JSON.
Digest = list[Any]


@final
class Contents:
    """Datasets whose only item is the digests of a few samples of each.

    These are the first and the last sample, and three between them.

    Args:
        sets: name for messages -> the dataset, as it is loaded.
        seed: the run's; a sample is seeded as in the first epoch of training.
    """

    def __init__(self, sets: Mapping[str, RetryingDataset], seed: int) -> None:
        self._sets = sets
        self._seed = seed

    def __getitem__(self, key: Key) -> tuple[dict[str, Digest | None], float]:
        """Return ({sample's label: its digest}, 0); a digest is None if two readings differ."""
        digests: dict[str, Digest | None] = {}
        ends = math.inf
        for share_of_set in _PLACES:
            for name, dataset in self._sets.items():
                index = int(share_of_set * (len(dataset) - 1))
                label = f"sample {index} of the {name}"
                if label in digests or time.monotonic() > ends:
                    continue
                first_reading = self._read(dataset, index)
                second_reading = self._read(dataset, index)
                digests[label] = first_reading if alike(first_reading, second_reading) else None
                # The time starts after the first sample, whose loading may have opened files.
                ends = min(ends, time.monotonic() + _ENOUGH)
        return digests, 0

    def _read(self, dataset: RetryingDataset, index: int) -> Digest:
        """Digest a sample, or the error of loading it."""
        try:
            if not dataset.draws_random:
                return digest(dataset[index])
            return digest(dataset.load_seeded(index, self._reseed))
        except LockstepError as error:
            return [f"{_FAILED}: {type(error.__cause__ or error).__name__}", [], []]

    def _reseed(self, index: int) -> None:
        seed_everything(derive(self._seed, "sample", 0, index))


def check_contents(
    world: World, digests: Mapping[str, Digest | None], accept: Callable[[Mapping[str, Digest | None]], list[str]]
) -> list[str]:
    """Compare the ranks' digests. Collective.

    Args:
        accept: gets rank 0's digests, once all ranks agree; raises LockstepError, or returns more lines.

    Returns:
        A line for each thing that could not be compared; in `World.together` complete after the next gather.

    Raises:
        DifferenceError: on every rank, naming the sample and the ranks that differ from rank 0.
    """
    lines = list[str]()
    # All ranks, before step 1; the next gather carries the digests.
    world.defer(
        [socket.gethostname(), digests], lambda ranks: lines.extend(_compare(ranks) + accept(ranks[0][1]))
    )  # collective
    return lines


def first_difference(before: Mapping[str, Digest | None], now: Mapping[str, Digest | None]) -> str:
    """Return the label of the first sample that has changed; "" if there is none.

    Samples that only one of the mappings has, and those that cannot be loaded, are not compared.
    """
    both = [label for label in now if label in before]
    readable = []
    for label in both:
        if not any(map(_has_failed, (before[label], now[label]))):
            readable.append(label)
    for label in readable:
        if not alike(before[label], now[label]):
            return label
    return ""


def _has_failed(found: Digest | None) -> bool:
    return found is not None and _FAILED in found[0]


def _compare(ranks: list[Any]) -> list[str]:
    host, first = ranks[0]
    for label, reference in first.items():
        odd = []
        for rank, (_, each) in enumerate(ranks):
            if not alike(reference, each.get(label)):
                odd.append(rank)
        if odd:
            hosts = ", ".join(sorted({ranks[rank][0] for rank in odd})[:4])
            numbers = ", ".join(map(str, odd[:8])) + (", ..." if len(odd) > 8 else "")
            errors = []
            for each in (reference, ranks[odd[0]][1][label]):
                if _has_failed(each):
                    errors.append(each[0])
            raise DifferenceError(
                f"before step 1: rank{'s' * (len(odd) > 1)} {numbers} on {hosts} {'have' if len(odd) > 1 else 'has'} "
                f"another {label} than rank 0 on {host}{' (on one it ' + errors[0] + ')' if errors else ''}; give "
                "every node the same files, and every rank the whole dataset, which lockstep splits"
            )
    unsteady = {label for _, each in ranks for label, digest in each.items() if digest is None}
    kinds = set()
    for each in first.values():
        if each:
            kinds.update(each[2])
    notes = []
    for label in sorted(unsteady):
        notes.append(f"{label}: two readings differ, so ranks and resumes are not compared")
    for kind in sorted(kinds):
        notes.append(f"samples contain {kind}, which is not compared")
    return notes


def alike(first: Digest | None, second: Digest | None) -> bool:
    """Whether two digests are equal up to rounding, or one is missing."""
    if first is None or second is None:
        return True
    if first[0] != second[0] or len(first[1]) != len(second[1]):
        return False
    norms = zip(first[1][::2], second[1][::2], strict=True)
    sums = zip(first[1][1::2], second[1][1::2], strict=True)
    return all(max(abs(a - b), abs(c - d)) <= _ROUNDING * max(a, b) for (a, b), (c, d) in zip(norms, sums, strict=True))


def digest(sample: Any) -> Digest:
    """Digest a sample: tensors, arrays, numbers, strings and pictures, however nested."""
    reader = _ContentReader()
    reader.add(sample)
    return [reader.hash.hexdigest(), reader.sums, sorted(reader.left_out)]


class _ContentReader:
    """Visitor that digests a sample."""

    def __init__(self) -> None:
        self.hash = xxhash.xxh3_64()
        self.sums: list[float] = []
        self.left_out: set[str] = set()

    def add(self, value: Any, depth: int = 0) -> None:
        """Digest `value`; a type that cannot be digested is recorded."""
        type_name = f"{type(value).__module__}.{type(value).__qualname__}"
        try:
            supported = depth <= _DEEP and self._add_known(value, depth)
        except Exception:
            # A method of the value itself has failed.
            supported = False
        if not supported:
            self.left_out.add(type_name)
            self._mark(type_name)

    def _mark(self, *parts: object) -> None:
        self.hash.update(repr(parts).encode())

    # C901: one branch for each supported type.
    def _add_known(self, value: Any, depth: int) -> bool:  # noqa: C901
        if isinstance(value, Tensor):
            return self._add_tensor(value)
        if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
            return self._add_array(np.asarray(value), depth)
        if isinstance(value, float):
            return self._add_floats("float", torch.tensor([value], dtype=torch.float64))
        # Nodes may have the same files in different folders, so only a path's last part counts.
        if isinstance(value, str | PurePath):
            self._mark("text", os.path.basename(value) if os.path.isabs(value) else str(value))
        elif isinstance(value, bytes | bytearray):
            self._mark("bytes", len(value))
            self.hash.update(value)
        elif value is None or isinstance(value, bool | int | complex):
            self._mark(type(value).__name__, value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                self._mark("key", key)
                self.add(value[key], depth + 1)
        elif isinstance(value, list | tuple):
            self._add_sequence(value, depth)
        elif isinstance(value, set | frozenset):
            self._mark("set", sorted(map(repr, value)))
        elif dataclasses.is_dataclass(value):
            self._add_sequence([getattr(value, each.name) for each in dataclasses.fields(value)], depth)
        elif type(value).__module__.startswith("PIL."):
            self._mark(value.mode, value.size)
            return self._add_floats("picture", torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8))
        else:
            return False
        return True

    def _add_sequence(self, values: Any, depth: int) -> None:
        types = {type(each) for each in values}
        self._mark("items", len(values))
        if len(values) > 1 and types == {float}:
            self._add_floats("floats", torch.tensor(values, dtype=torch.float64))
        elif types <= {int, bool}:
            self._mark(*values)
        else:
            for each in values:
                self.add(each, depth + 1)

    def _add_array(self, array: "np.ndarray[Any, Any]", depth: int) -> bool:
        if array.dtype.hasobject:
            self._mark(array.shape)
            self._add_sequence(array.reshape(-1).tolist(), depth)
            return True
        array = np.ascontiguousarray(array)
        name = f"{array.dtype.str}{array.shape}"
        if array.dtype.kind in "fc" or array.dtype == np.uint8:
            components = [array.real, array.imag] if array.dtype.kind == "c" else [array]
            return all(self._add_floats(name, torch.tensor(component.astype(np.float64))) for component in components)
        self._mark(name)
        self.hash.update(array.tobytes())
        return True

    def _add_tensor(self, tensor: Tensor) -> bool:
        plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
        if not plain or tensor.is_meta or hasattr(tensor, "placements"):
            return False
        # Samples are in host memory, so this waits for no device in practice.
        host = tensor.detach().cpu()
        name = f"{host.dtype}{tuple(host.shape)}"
        if host.is_complex():
            host = torch.view_as_real(host.resolve_conj())
        if host.is_floating_point() or host.dtype == torch.uint8:
            return self._add_floats(name, host)
        self._mark(name)
        self.hash.update(host_bytes(host))
        return True

    def _add_floats(self, name: str, values: Tensor) -> bool:
        """Add numbers that another machine may round differently."""
        flat = values.reshape(-1)
        flat = flat[:: max(1, math.ceil(flat.numel() / _LONGEST))].to(torch.float64)
        strange = ~flat.isfinite()
        self._mark(name, int(strange.sum()))
        if strange.any():
            self.hash.update(strange.numpy().tobytes())
            flat = torch.where(strange, 0.0, flat)
        weights = mix(torch.arange(1, flat.numel() + 1)).to(torch.float64) / 2**63
        norm = float(flat.square().sum().sqrt())
        if len(self.sums) >= 2 * _MOST_SUMS or not math.isfinite(norm):
            self.hash.update(flat.numpy().tobytes())
        else:
            self.sums += [norm, float(flat @ weights)]
        return True
