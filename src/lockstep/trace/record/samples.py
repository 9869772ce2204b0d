"""Digest batches sample by sample, and the model's outputs.

batch = Batch({"input_ids": ids, "labels": labels})     # batch.size, batch.leaves
digests = digest_batch(batch)                         # digests.samples int64 [size], digests.leaves, ...

A batch is split along the first dimension, of the size that most of its tensors share. Padding does not change a
digest: zeros and -100 add nothing, and with an `attention_mask` only unmasked elements count, by their position among
these. Positions after the last label that counts are ignored too, because padding before the shift leaves one more
input there than padding after it. So a sample has the same digest in a batch of eight and in one of four.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.tensors import as_bytes
from lockstep.trace.record.sums import mix

__all__ = [
    "Batch",
    "SampleDigests",
    "digest_batch",
    "lengths",
    "outcomes",
    "outputs",
    "trained_output",
]


# Words of a sample's tensor that count; of a longer one, evenly spaced words.
_MOST_WORDS = 16384
# Elements of a sample's output that count; of a longer one, evenly spaced elements.
_MOST_OUT = 4096
# Deepest nesting of a batch that is searched.
_MOST_DEPTH = 6
# Label that losses ignore.
_IGNORED = -100
_LISTS = (list, tuple)
_PLAIN = (str, int, float, bytes)


class Batch:
    """Batch, split into samples.

    Attributes:
        size: samples; 0 if it cannot be split.
        leaves: (path, value) of tensors and lists with a row or an item for each sample.
        others: values other than tensors, if there are no leaves.
        mask: index of the attention mask among the leaves; -1: none.
        names: paths of the integer tensors, and of the mask.
        width: the most elements along the second dimension, to which samples are padded; 0: there is none.
    """

    def __init__(self, data: Any) -> None:
        leaves = [(path, _tensor(value)) for path, value in _leaves(data)]
        sizes = Counter(size for _, value in leaves if (size := _length(value)) >= 0)
        self.size = sizes.most_common(1)[0][0] if sizes else 0
        self.leaves = [(path, value) for path, value in leaves if sizes and _length(value) == self.size]
        if self.leaves:
            self.others = []
        else:
            self.others = [value for _, value in leaves if not isinstance(value, Tensor)]
        tensors = []
        for index, (path, value) in enumerate(self.leaves):
            if isinstance(value, Tensor):
                tensors.append((index, path, value))
        masks = (index for index, path, value in tensors if path.endswith("attention_mask") and value.ndim == 2)
        self.mask = next(masks, -1)
        self.names = [path for index, path, value in tensors if _is_integer(value) or index == self.mask]
        self.width = max((value.shape[1] for _, _, value in tensors if value.ndim > 1), default=0)


@dataclass
class SampleDigests:
    """Digests of a batch, on its device, so nothing waits.

    Attributes:
        samples: int64 [size], or [1] of the whole batch if it cannot be split.
        leaves: int64 [tensors], the sum of each tensor's digests over the samples, over all positions.
        counts: int64 [integer tensors, 2]: elements that are not -100 (of a mask: not 0), and those after each sample's
            first.
    """

    samples: Tensor | None = None
    leaves: Tensor | None = None
    counts: Tensor | None = None


def _leaves(data: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the tensors, arrays, numbers and texts in a nested batch."""
    if isinstance(data, Tensor) or depth > _MOST_DEPTH:
        yield path, data
    elif isinstance(data, dict) or (hasattr(data, "items") and hasattr(data, "keys")):
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(data, _LISTS):
        if data and all(isinstance(value, _PLAIN) for value in data):
            yield path, list(data)
        else:
            for index, value in enumerate(data):
                yield from _leaves(value, f"{path}.{index}" if path else str(index), depth + 1)
    elif hasattr(data, "__dict__") and not callable(data):
        yield from _leaves(vars(data), path, depth + 1)
    else:
        yield path, data


def digest_batch(batch: Batch) -> SampleDigests:
    """Digest a batch sample by sample."""
    values = [value for _, value in batch.leaves]
    mask = values[batch.mask] if batch.mask >= 0 else None
    labeled = _labeled_positions(values)
    total: Tensor | None = None
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    for number, value in enumerate(values, 1):
        if isinstance(value, Tensor):
            rows = value.flatten(1) if value.ndim > 1 else value.unsqueeze(1)
            counted = None
            if _is_integer(value) or number - 1 == batch.mask:
                counted = rows != (0 if number - 1 == batch.mask else _IGNORED)
                columns = counted.sum(0)
                counts.append(torch.stack([columns.sum(), columns[1:].sum()]))
            words = _words(rows, counted)
            masked = mask is not None and value.shape == mask.shape and not value.is_floating_point()
            mask_of = mask if masked else None
            digests = _digest_words(words, mask_of, value.ndim > 2)
            sums.append(digests.sum())
            places = labeled.get(value.shape[1]) if _is_sequence(value) else None
            if places is not None:
                position_mask = places.to(words.device).repeat_interleave(words.shape[1] // places.shape[1], dim=1)
                digests = _digest_words(words * position_mask, mask_of, value.ndim > 2)
        else:
            digests = torch.tensor([_digest_value(item) for item in value], dtype=torch.int64)
        # An odd factor for each tensor, so that exchanging the contents of two is noticed.
        if total is None:
            total = digests * (2 * number + 1)
        else:
            total = total + digests.to(total.device) * (2 * number + 1)
    if total is None and batch.others:
        total = torch.tensor([_digest_value(value) for value in batch.others]).sum(0, keepdim=True)
    return SampleDigests(None if total is None else mix(total), _stack(sums), _stack(counts))


def _is_sequence(value: Tensor) -> bool:
    """Whether a tensor's second dimension may be positions in a sequence."""
    return value.ndim > 2 or (value.ndim == 2 and _is_integer(value))


def _labeled_positions(values: Sequence[Any]) -> dict[int, Tensor]:
    """Mask the positions up to the last label that counts.

    Returns:
        Sequence length -> mask, int32 [n, length]; empty without labels.
    """
    positions: dict[int, Tensor] = {}
    for value in values:
        if isinstance(value, Tensor) and value.ndim == 2 and _is_integer(value) and value.numel():
            counts = value != _IGNORED
            # Only in host memory: on a device the host would wait.
            if counts.device.type == "cpu" and bool(counts[:, -1].all()):
                continue
            places = counts.to(torch.int32).flip(1).cummax(1).values.flip(1)
            before = positions.get(value.shape[1])
            positions[value.shape[1]] = places if before is None else places * before
    return positions


def _stack(parts: list[Tensor]) -> Tensor | None:
    if parts:
        return torch.stack([tensor.to(parts[0].device) for tensor in parts])
    return None


def outputs(output: Any, size: int) -> list[Tensor]:
    """Return up to three output tensors with a row for each sample, [size, elements]."""
    values = []
    for _, value in _leaves(output):
        if isinstance(value, Tensor) and value.is_floating_point():
            values.append(value)
    return [
        value.flatten(1) if value.ndim > 1 else value.unsqueeze(1)
        for value in values
        if size and value.ndim and value.shape[0] == size and value.numel() and not value.is_meta
    ][:3]


def outcomes(rows: list[Tensor]) -> Tensor:
    """Sum each sample's outputs: signed sum and sum of squares. float64 [n, 2]

    Of long outputs, evenly spaced elements count.
    """
    parts = [
        (flat if flat.shape[1] <= _MOST_OUT else flat[:, :: -(-flat.shape[1] // _MOST_OUT)]).double() for flat in rows
    ]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return torch.stack([torch.mv(flat, _signs(flat.shape[1], flat.device)), flat.square().sum(1)], dim=1)


def trained_output(output: Any, size: int) -> Tensor | None:
    """Return the first output tensor with a gradient and a row for each sample."""
    for _, value in _leaves(output):
        if not isinstance(value, Tensor) or not value.requires_grad or hasattr(value, "placements"):
            continue
        if size and value.ndim and value.shape[0] == size and value.numel() and not value.is_meta:
            return value
    return None


def lengths(gradient: Tensor) -> Tensor:
    """Return the 2-norm of each sample's rows of a gradient. float64 [n]

    Zero padding does not change it.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=wide)
    return norms.double()


def _length(value: Any) -> int:
    """Count a tensor's rows or a list's items; -1 for anything else."""
    if isinstance(value, Tensor):
        if value.ndim and not value.is_meta:
            return int(value.shape[0])
        return -1
    if isinstance(value, list):
        return len(value)
    return -1


def _is_integer(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def _tensor(value: Any) -> Any:
    """Convert an array to a tensor that shares its memory; leave anything else unchanged."""
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        try:
            return torch.as_tensor(value)
        except TypeError:
            # An array of texts.
            return value.tobytes()
    # The local shard of a DTensor, whose class need not be imported.
    if isinstance(value, Tensor) and hasattr(value, "placements"):
        return value.to_local()  # type: ignore[attr-defined]
    return value


def _digest_words(words: Tensor, mask: Tensor | None, thinned: bool) -> Tensor:
    """Digest each sample's words: the unmasked ones, or evenly spaced ones if `thinned`. int64 [n]"""
    if mask is not None:
        unmasked = mask.to(words.device).long()
        positions = (unmasked.cumsum(1) - 1).clamp_(min=0)
        words = words * unmasked.to(torch.int32)
        # Each sample's elements have positions of their own among the unmasked ones.
        odd = _odd(words.shape[1], words.device)[:, positions].transpose(0, 1)
    else:
        if thinned:
            words = words[:, :: max(1, -(-words.shape[1] // _MOST_WORDS))]
        odd = _odd(words.shape[1], words.device)
    hashed = words.unsqueeze(1) * odd
    hashed = (hashed ^ (hashed >> 15)).sum(2, dtype=torch.int32)
    # The two 32-bit sums become one int64, the first of them its low half.
    return hashed.view(torch.int64).squeeze(1)


def _words(rows: Tensor, counted: Tensor | None) -> Tensor:
    """Convert elements to int32 words; those that are 0 or not `counted` become 0.

    Returns:
        int32 [n, words], of [n, elements].
    """
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
    if rows.is_floating_point():
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return as_bytes(rows).view(torch.int32).view(len(rows), rows.shape[1] * rows.itemsize // 4)
    if rows.dtype in (torch.uint8, torch.bool, torch.int8):
        return rows.to(torch.int32)
    if counted is None:
        integers = rows.to(torch.int64)
    else:
        integers = rows.to(torch.int64) * counted
    return (integers ^ (integers >> 32)).to(torch.int32)


def _odd(count: int, device: torch.device) -> Tensor:
    """Return two odd numbers for each position. int32 [2, count]"""
    odd = _odd_cache.get(device)
    if odd is None or odd.shape[1] < count:
        # At least 1024, so that the table rarely grows.
        numbers = mix(torch.arange(1, max(1024, count) + 1, device=device))
        odd = _odd_cache[device] = torch.stack([numbers | 1, (numbers >> 32) | 1]).to(torch.int32)
        _sign_cache[device] = 1.0 - (odd[0] >> 7 & 2).double()
    return odd[:, :count]


_odd_cache: dict[torch.device, Tensor] = {}
_sign_cache: dict[torch.device, Tensor] = {}


def _signs(count: int, device: torch.device) -> Tensor:
    """Return a sign for each position. float64 [count]"""
    _odd(count, device)
    return _sign_cache[device][:count]


def _digest_value(value: Any) -> int:
    """Digest a number or a text as int64."""
    raw = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)
