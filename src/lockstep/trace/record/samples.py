"""Digest batches sample by sample, and the model's output for each.

batch = Batch({"input_ids": ids, "labels": labels})     # batch.size, the parts that are digested
digests = digested([batch])                             # digests.samples int64 [1, size], digests.leaves, ...

A batch is split along the first dimension that most of its tensors share. Padding does not change a digest: zeros
and -100 add nothing, and with an `attention_mask` only the unmasked elements count, by their position among these.
Positions after the last label that counts are ignored too, since a sequence that is padded and then shifted has one
more input there than one that is shifted and then padded. So a sample has the same digest in a batch of eight and in
one of four.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.trace.record.sums import mixed

__all__ = [
    "Batch",
    "SampleDigests",
    "digested",
    "lengths",
    "outcomes",
    "outputs",
    "trained_output",
]


_WORDS = 16384  # of a sample's tensor; of a longer one, evenly spread words count
_OUT = 4096  # elements of a sample's output that count
_DEEP = 6
_IGNORED = -100  # label that losses leave out
_SEQUENCES, _PLAIN = (list, tuple), (str, int, float, bytes)


class Batch:
    """A batch, split into samples.

    Attributes:
        size: samples; 0 if it cannot be split.
        leaves: (path, value) of tensors and lists with a row or an item for each sample.
        others: the values that are no tensors, if there are no leaves.
        mask: index of the attention mask among the leaves; -1: none.
        names: paths of the integer tensors.
    """

    def __init__(self, data: Any) -> None:
        found = [(path, _tensor(value)) for path, value in _leaves(data)]
        sizes = Counter(size for _, value in found if (size := _length(value)) >= 0)
        self.size = sizes.most_common(1)[0][0] if sizes else 0
        self.leaves = [(path, value) for path, value in found if sizes and _length(value) == self.size]
        self.others = [] if self.leaves else [value for _, value in found if not isinstance(value, Tensor)]
        tensors = [(place, path, value) for place, (path, value) in enumerate(self.leaves) if isinstance(value, Tensor)]
        self.names = [path for _, path, value in tensors if _is_whole(value)]
        masks = (place for place, path, value in tensors if path.endswith("attention_mask") and value.ndim == 2)
        self.mask = next(masks, -1)


@dataclass
class SampleDigests:
    """Digests of batches with the same leaves; tensors stay on their device, so nothing waits.

    Attributes:
        samples: int64 [batches, size], or [batches, 1] of the whole if they cannot be split.
        leaves: int64 [batches, tensors], the sum of each tensor's digests over the samples, with all positions.
        counts: int64 [batches, integer tensors, 2]: elements that are not -100, and those after each sample's first.
    """

    samples: Tensor | None = None
    leaves: Tensor | None = None
    counts: Tensor | None = None


def _leaves(data: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the tensors, arrays, numbers and texts in a nested batch."""
    if isinstance(data, Tensor) or depth > _DEEP:
        yield path, data
    elif isinstance(data, dict) or (hasattr(data, "items") and hasattr(data, "keys")):
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(data, _SEQUENCES):
        if data and all(isinstance(value, _PLAIN) for value in data):
            yield path, list(data)
        else:
            for index, value in enumerate(data):
                yield from _leaves(value, f"{path}.{index}" if path else str(index), depth + 1)
    elif hasattr(data, "__dict__") and not callable(data):
        yield from _leaves(vars(data), path, depth + 1)
    else:
        yield path, data


def digested(batches: Sequence[Batch]) -> SampleDigests:
    """Digest batches with leaves of equal shapes.

    With lists among the leaves, or without leaves, it must be a single batch.
    """
    first, times = batches[0], len(batches)
    merged = [
        first.leaves[place][1] if times == 1 else torch.cat([batch.leaves[place][1] for batch in batches])
        for place in range(len(first.leaves))
    ]
    mask = merged[first.mask] if first.mask >= 0 else None
    shown = _shown(merged)
    total: Tensor | None = None
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    for place, value in enumerate(merged, 1):
        if isinstance(value, Tensor):
            rows, kept = value.flatten(1) if value.ndim > 1 else value.unsqueeze(1), None
            if _is_whole(value):
                kept = rows != _IGNORED
                columns = kept.reshape(times, first.size, kept.shape[1]).sum(1)
                counts.append(torch.stack([columns.sum(1), columns[:, 1:].sum(1)], dim=1))
            words = _words(rows, kept)
            masked = mask is not None and value.shape == mask.shape and not value.is_floating_point()
            mask_of = mask if masked else None
            each = _of_words(words, mask_of, value.ndim > 2)
            sums.append(each.view(times, first.size).sum(1))
            places = shown.get(value.shape[1]) if _is_sequence(value) else None
            if places is not None:
                kept_places = places.to(words.device).repeat_interleave(words.shape[1] // places.shape[1], dim=1)
                each = _of_words(words * kept_places, mask_of, value.ndim > 2)
        else:
            each = torch.tensor([_of_text(item) for item in value], dtype=torch.int64)
        total = each * (2 * place + 1) if total is None else total + each.to(total.device) * (2 * place + 1)
    if total is None and first.others:
        total = torch.tensor([_of_text(value) for value in first.others]).sum(0, keepdim=True)
    return SampleDigests(
        None if total is None else mixed(total).view(times, first.size if merged else 1),
        _together(sums),
        _together(counts),
    )


def _is_sequence(value: Tensor) -> bool:
    """Whether its second dimension may be positions in a sequence: of numbers, or of vectors."""
    return value.ndim > 2 or (value.ndim == 2 and _is_whole(value))


def _shown(values: Sequence[Any]) -> dict[int, Tensor]:
    """Return sequence length -> positions up to the last label that counts, int32 [n, length].

    Without labels it is empty.
    """
    found: dict[int, Tensor] = {}
    for value in values:
        if isinstance(value, Tensor) and value.ndim == 2 and _is_whole(value) and value.numel():
            counts = value != _IGNORED
            if counts.device.type == "cpu" and bool(counts[:, -1].all()):
                continue
            places = counts.to(torch.int32).flip(1).cummax(1).values.flip(1)
            before = found.get(value.shape[1])
            found[value.shape[1]] = places if before is None else places * before
    return found


def _together(parts: list[Tensor]) -> Tensor | None:
    return torch.stack([part.to(parts[0].device) for part in parts], dim=1) if parts else None


def outputs(output: Any, size: int) -> list[Tensor]:
    """Return [size, elements] of an output's first tensors with a row for each sample."""
    values = [value for _, value in _leaves(output) if isinstance(value, Tensor) and value.is_floating_point()]
    return [
        value.flatten(1) if value.ndim > 1 else value.unsqueeze(1)
        for value in values
        if size and value.ndim and value.shape[0] == size and value.numel() and not value.is_meta
    ][:3]


def outcomes(rows: list[Tensor]) -> Tensor:
    """Sum the outputs of each sample: signed sum and sum of squares. float64 [n, 2]

    Of long outputs, evenly spread elements count.
    """
    parts = [(flat if flat.shape[1] <= _OUT else flat[:, :: -(-flat.shape[1] // _OUT)]).double() for flat in rows]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return torch.stack([torch.mv(flat, _signs(flat.shape[1], flat.device)), flat.square().sum(1)], dim=1)


def trained_output(output: Any, size: int) -> Tensor | None:
    """Return an output's first tensor with a row for each sample that requires a gradient."""
    for _, value in _leaves(output):
        if not isinstance(value, Tensor) or not value.requires_grad or hasattr(value, "placements"):
            continue
        if size and value.ndim and value.shape[0] == size and value.numel() and not value.is_meta:
            return value
    return None


def lengths(gradient: Tensor) -> Tensor:
    """Return the 2-norm of each sample's part of a gradient, float64 [n].

    Padding zeros do not change it.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=wide)
    return found.double()


def _length(value: Any) -> int:
    """Rows of a tensor, or items of a list; -1 for anything else."""
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.ndim and not value.is_meta else -1
    return len(value) if isinstance(value, list) else -1


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def _tensor(value: Any) -> Any:
    """Convert an array to a tensor that shares its memory; leave anything else unchanged."""
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        try:
            return torch.as_tensor(value)
        except TypeError:  # texts
            return value.tobytes()
    if isinstance(value, Tensor) and hasattr(value, "placements"):  # a DTensor
        return value.to_local()  # type: ignore[attr-defined]
    return value


def _of_words(words: Tensor, mask: Tensor | None, thinned: bool) -> Tensor:
    """The digest of each sample, int64 [n].

    It covers the unmasked words, or evenly spread ones if `thinned`.
    """
    if mask is not None:
        shown = mask.to(words.device).long()
        place = (shown.cumsum(1) - 1).clamp_(min=0)
        words = words * shown.to(torch.int32)
        odd = _odd(words.shape[1], words.device)[:, place].transpose(0, 1)  # each sample has its own
    else:
        if thinned:
            words = words[:, :: max(1, -(-words.shape[1] // _WORDS))]
        odd = _odd(words.shape[1], words.device)
    hashed = words.unsqueeze(1) * odd
    hashed = (hashed ^ (hashed >> 15)).sum(2, dtype=torch.int32)
    return hashed.view(torch.int64).squeeze(1)  # two sums, the low one first


def _words(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Convert [n, elements] to int32 [n, words]; zeros and elements not `kept` become 0."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
    if rows.is_floating_point():
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return rows.contiguous().view(torch.int32)
    if rows.dtype in (torch.uint8, torch.bool, torch.int8):
        return rows.to(torch.int32)
    whole = rows.to(torch.int64) if kept is None else rows.to(torch.int64) * kept
    return (whole ^ (whole >> 32)).to(torch.int32)


def _odd(count: int, device: torch.device) -> Tensor:
    """Two odd numbers for each position. int32 [2, count]"""
    held = _held.get(device)
    if held is None or held.shape[1] < count:
        numbers = mixed(torch.arange(1, max(1024, count) + 1, device=device))
        held = _held[device] = torch.stack([numbers | 1, (numbers >> 32) | 1]).to(torch.int32)
        _held_signs[device] = 1.0 - (held[0] >> 7 & 2).double()
    return held[:, :count]


_held: dict[torch.device, Tensor] = {}
_held_signs: dict[torch.device, Tensor] = {}


def _signs(count: int, device: torch.device) -> Tensor:
    """A sign for each position. float64 [count]"""
    _odd(count, device)
    return _held_signs[device][:count]


def _of_text(value: Any) -> int:
    """Digest a number or a text as int64."""
    raw = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)
