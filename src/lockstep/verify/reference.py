"""Store the reference's tensors, and compare each rank's tensors of another run with them.

store = TensorStore(folder)
store.write("weights", step, named_tensors)
store.read("weights", step)["blocks.0.weight"]          # a CPU tensor, read from disk on access

Tensors are written, read and compared one at a time, and each rank compares its own part, so nothing is gathered.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.layout import TensorBox, parts_of
from lockstep.checkpoint.write import bytes_of
from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.trace.record.sums import mix
from lockstep.verify.operations import digest
from lockstep.verify.tolerance import EXACT, Scales, Tolerance

__all__ = [
    "Named",
    "ReferenceComparer",
    "ReferenceWriter",
    "TensorStore",
    "sums_of_parts",
]

Named = list[tuple[str, Tensor]]

# Elements that are converted to float64 at a time, to limit the memory.
PIECE_SIZE = 2**18

# Bytes of an element -> the integer of that size.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The largest 2-norm of the error of a tensor's block; or a function: slice -> the largest error of its elements.
Limit = float | Callable[[slice], Tensor]
LimitOf = Callable[[str, Tensor, TensorBox], Limit]


class StoredTensors:
    """The tensors of one `write`; each is read from disk on access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = path.with_suffix(".json")
        self._index: dict[str, Any] = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}

    @property
    def names(self) -> list[str]:
        """Names in the order of writing."""
        return list(self._index)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor to the CPU.

        Raises:
            KeyError: no tensor of this name was written.
        """
        offset, size, dtype, shape = self._index[name]
        with self._path.open("rb") as file:
            file.seek(offset)
            raw = bytearray(size)
            # One copy in memory instead of two.
            file.readinto(raw)
        wide = getattr(torch, dtype)
        return (torch.frombuffer(raw, dtype=wide) if size else torch.empty(0, dtype=wide)).reshape(shape)


class TensorStore:
    """A folder of `StoredTensors` by kind and step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, step: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole tensors of any device and dtype, one at a time through the host."""
        path = self._path(kind, step)
        index = {}
        offset = 0
        with path.open("wb") as file:
            for name, tensor in tensors:
                raw = bytes_of(tensor)
                file.write(raw)
                dtype = str(tensor.dtype).removeprefix("torch.")
                index[name] = [offset, len(raw), dtype, list(tensor.shape)]
                offset += len(raw)
        path.with_suffix(".json").write_text(json.dumps(index), encoding="utf-8")

    def read(self, kind: str, step: int) -> StoredTensors:
        """Open the tensors of a kind and step; empty if none were written."""
        return StoredTensors(self._path(kind, step))

    @property
    def free(self) -> int:
        """Free bytes on its disk."""
        return shutil.disk_usage(self._folder).free

    def _path(self, kind: str, step: int) -> Path:
        return self._folder / f"{step:08d}-{kind}.bin"


@final
class ReferenceWriter:
    """Writer for the reference: tensors go to the store, digests and norms into the record."""

    def __init__(self, store: TensorStore, steps: int) -> None:
        self._store = store
        self._steps = steps

    def record(self, kind: str, step: int, tensors: Named) -> dict[str, Any]:
        if kind == "initial":
            self._check_room(sum(tensor.nbytes for _, tensor in tensors))
        self._store.write(kind, step, tensors)
        # The host waits for the device here, once for each tensor and step.
        norms = {name: math.sqrt(square(t.cpu())) for name, t in tensors}
        digests = {name: digest(tensor) for name, tensor in tensors}
        return {"digests": digests, "norms": norms, "square": math.fsum(n * n for n in norms.values())}

    def _check_room(self, size: int) -> None:
        """Check that the gradients, weights and moments of all steps fit on the disk.

        Raises:
            ConfigError: they do not.
        """
        # Gradients, weights and two moments for each step, and the initial state with some room.
        required = size * (4 * self._steps + 4)
        free = self._store.free
        if free < required:
            raise ConfigError(
                f"--scratch: the verification needs {required / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; choose "
                "another folder, or lower --steps"
            )

    def fingerprint(self, model: dict[str, Tensor]) -> str:
        return checkpoint.fingerprint_of(model)


@final
class ReferenceComparer:
    """Comparer for all other runs: each rank compares its parts with the reference's.

    Args:
        store: the reference's.
        steps: the reference's records.
        tolerance: the allowed differences.
        config: of the run, for the optimizer's hyperparameters.
    """

    def __init__(self, store: TensorStore, steps: list[dict[str, Any]], tolerance: Tolerance, config: Config) -> None:
        self._store = store
        self._tolerance = tolerance
        self._scales = Scales.of(steps, config)
        # In exact mode the replicas of a divided model are compared with one, whose ranks may have other parts.
        self._adds_up = config.exact and config.parallel.size > 1

    def record(self, kind: str, step: int, tensors: Named) -> dict[str, Any]:
        if kind == "weights" and not self._tolerance.exact:
            second = self._store.read("optimizer", step)
        else:
            second = None
        result = compare(tensors, self._store.read(kind, step), partial(self._limit, kind, step, second))
        if self._adds_up:
            result["sums"] = sums_of_parts(tensors)
        return result

    def fingerprint(self, model: dict[str, Tensor]) -> str:
        # Every tensor is compared already, and a sharded model would have to be gathered for a fingerprint.
        return ""

    def _limit(
        self, kind: str, step: int, second: StoredTensors | None, name: str, expected: Tensor, block: TensorBox
    ) -> Limit:
        """Return the largest allowed error of a tensor's block; -1: no bit may differ."""
        tolerance = EXACT if kind == "initial" else self._tolerance
        if tolerance.exact or not expected.is_floating_point() or name.endswith("/step"):
            return -1.0
        scales = self._scales[step]
        if kind != "buffers":
            relative = tolerance.relative(step)
        else:
            relative = tolerance.bound(step)
        if kind == "weights":
            moment = f"optimizer/{name}/exp_avg_sq"
            if second is not None and moment in second.names:
                moments = cut(_real(second[moment]), block)
            else:
                moments = None
            return tolerance.weights(step, expected, moments, scales)
        if name.endswith("/exp_avg_sq"):
            # The moment is a mean of squares, in which a relative error of the gradient doubles.
            return 4.0 * relative * scales.norm**2
        if kind == "buffers":
            size = math.sqrt(square(expected))
            return relative * (size + 1.0) + tolerance.drift(step, scales) * math.sqrt(expected.numel())
        return relative * scales.norm


def compare(tensors: Iterable[tuple[str, Tensor]], expected: StoredTensors, limit_of: LimitOf) -> dict[str, Any]:
    """Compare this rank's parts with the reference's, and return the differences as plain values.

    Args:
        tensors: by name, in the model's order; DTensors if sharded.
        expected: the reference's, of the same kind and step.
        limit_of: (name, reference's part, block) -> the largest error, see Limit; below 0: no bit may differ.

    Returns:
        "digests": of the tensors that this rank has whole.
        "first": the first tensor beyond its limit: its name, the largest difference, where, both values.
        "largest": [relative difference, name]: of the tensor's largest error to its largest element.
        "equal": whether all bits are.
        "apart": the 2-norm of the difference of all that this rank has.
        "parts": by name, squares of this rank's elements and of the reference's part, and their product.
        "offsets": by name, where this rank's first part begins in a sharded tensor; ranks with equal offsets are
            replicas.
        "missing": names on one side only.
    """
    result: dict[str, Any] = {"digests": {}, "first": None, "largest": [0.0, ""], "equal": True, "missing": []}
    result["parts"] = {}
    result["offsets"] = {}
    result["apart"] = 0.0
    names = set()
    for name, tensor in tensors:
        names.add(name)
        if name not in expected.names:
            result["missing"].append(name)
            continue
        # A packed tensor has several parts on a rank.
        parts = parts_of(tensor, name)
        if not parts or not tensor.numel():
            continue
        # The host waits for the device here, once for each tensor and step.
        if _is_full(tensor):
            result["digests"][name] = digest(tensor)
        full = expected[name]
        if tensor.shape != full.shape or tensor.dtype != full.dtype:
            result["first"] = result["first"] or _shape_difference(name, tensor, full)
            result["equal"] = False
            continue
        if not _is_full(tensor):
            result["offsets"][name] = list(parts[0][0].offsets)
        result["parts"][name] = [0.0, 0.0, 0.0]
        for box, values in parts:
            _compare_part(result, name, box, values.cpu(), full, limit_of)
    result["apart"] = math.sqrt(result["apart"])
    for name in expected.names:
        if name not in names:
            result["missing"].append(name)
    return result


def _compare_part(
    result: dict[str, Any], name: str, block: TensorBox, local: Tensor, full: Tensor, limit_of: LimitOf
) -> None:
    """Add the comparison of one part of a tensor to the result."""
    # A complex tensor has one more dimension, with its real and its imaginary part.
    if full.is_complex():
        block = TensorBox((*block.offsets, 0), (*block.shape, 2))
    local = _real(local)
    expected_part = cut(_real(full), block)
    for column, total in enumerate(_tally(local, expected_part)):
        result["parts"][name][column] += total
    result["apart"] += _difference(result, name, local, expected_part, block, limit_of)


def sums_of_parts(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, int]]:
    """Digest this rank's parts so that the digests of a tensor's parts add up to one of the tensor, modulo 2**64.

    Returns:
        By name: offsets and shape of a part -> its digest.
    """
    sums: dict[str, dict[str, int]] = {}
    for name, tensor in tensors:
        sums[name] = {}
        for box, values in parts_of(tensor, name):
            # The host waits for the device here, once for each part and step.
            sums[name][f"{box.offsets} {box.shape}"] = _sum_of_bits(values.cpu(), box, tuple(tensor.shape))
    return sums


def _sum_of_bits(values: Tensor, box: TensorBox, shape: tuple[int, ...]) -> int:
    """Return the sum over a part's elements of a hash of position and bits, modulo 2**64."""
    if values.is_complex():
        values = torch.view_as_real(values)
        box = TensorBox((*box.offsets, 0), (*box.shape, 2))
        shape = (*shape, 2)
    places = torch.zeros((), dtype=torch.int64)
    stride = 1
    # Row-major positions in the full tensor, from the last dimension to the first.
    for dimension in reversed(range(len(shape))):
        steps = torch.arange(box.offsets[dimension], box.offsets[dimension] + box.shape[dimension]) * stride
        places = places + steps.view(-1, *[1] * (len(shape) - dimension - 1))
        stride = stride * shape[dimension]
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).to(torch.int64)
    # A position's hash first, or elements whose position and bits add up to the same number could be exchanged.
    return int(mix(mix(places) + bits).sum()) % 2**64


def _is_full(tensor: Tensor) -> bool:
    """Whether this is a plain tensor, which every rank has in full."""
    return not hasattr(tensor, "placements")


def cut(tensor: Tensor, block: TensorBox) -> Tensor:
    """Return a block of a full tensor, as a view."""
    for dimension, (start, length) in enumerate(zip(block.offsets, block.shape, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor


def _shape_difference(name: str, actual: Tensor, expected: Tensor) -> dict[str, Any]:
    kinds = []
    for tensor in (actual, expected):
        kinds.append(f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch."))
    return {"name": name, "values": kinds, "at": [], "difference": math.inf, "allowed": 0.0}


def _tally(part: Tensor, expected_part: Tensor) -> list[float]:
    """Sum the squares of a part, of the reference's, and their product; zeros for integers."""
    square = 0.0
    reference_square = 0.0
    product = 0.0
    if part.is_floating_point():
        for _, a, b in _pieces(part, expected_part):
            square = square + float(a @ a)
            reference_square = reference_square + float(b @ b)
            product = product + float(a @ b)
    return [square, reference_square, product]


def _difference(
    result: dict[str, Any], name: str, part: Tensor, expected_part: Tensor, block: TensorBox, limit_of: LimitOf
) -> float:
    """Record how a part of a tensor differs, and return the squared distance."""
    # Equal digests: the usual case, without a conversion to float64.
    if digest(part) == digest(expected_part):
        return 0.0
    result["equal"] = False
    limit = limit_of(name, expected_part, block)
    worst = (-1.0, 0)
    size = 0.0
    error = 0.0
    allowed_square = 0.0
    for span, a, b in _pieces(part, expected_part):
        errors = (a - b).abs()
        # The difference of two infinities, or a NaN with other bits: count it as different.
        if not errors.isfinite().all():
            errors = torch.where(errors.isfinite(), errors, math.inf)
        at = int(errors.argmax())
        worst = max(worst, (float(errors[at]), -(span.start + at)))
        size = max(size, float(b.abs().max()))
        error += float(errors @ errors)
        if not isinstance(limit, float):
            most = limit(span)
            allowed_square += float(most @ most)
    relative = worst[0] / size if size else math.inf
    if relative > result["largest"][0]:
        result["largest"] = [relative, name]
    if isinstance(limit, float):
        limit_norm = limit
    else:
        limit_norm = math.sqrt(allowed_square)
    if result["first"] is None and not math.sqrt(error) <= limit_norm:
        flat = -worst[1]
        values = [float(part.reshape(-1)[flat]), float(expected_part.reshape(-1)[flat])]
        position = {"at": _place(flat, block), "difference": math.sqrt(error), "allowed": limit_norm}
        result["first"] = {"name": name, "values": values, **position}
    return error


def _pieces(first: Tensor, second: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice, piece of the first, piece of the second) in float64.

    Converts one piece at a time, not the full tensor.
    """
    flat_first = first.reshape(-1)
    flat_second = second.reshape(-1)
    for start in range(0, flat_first.numel(), PIECE_SIZE):
        span = slice(start, start + PIECE_SIZE)
        yield span, flat_first[span].double(), flat_second[span].double()


def _place(flat: int, block: TensorBox) -> list[int]:
    """Return the index in the full tensor of an element of a block."""
    index: list[int] = []
    for start, length in zip(reversed(block.offsets), reversed(block.shape), strict=True):
        flat, within = divmod(flat, max(length, 1))
        index.insert(0, start + within)
    return index


def square(tensor: Tensor) -> float:
    """Sum the squares of all elements in float64."""
    plain = _real(tensor.detach())
    return math.fsum(float(a @ a) for _, a, _ in _pieces(plain, plain))


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real numbers; return others unchanged.

    The last dimension has the real and the imaginary part.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor
