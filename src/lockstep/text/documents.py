"""A split of a prepared corpus whose documents stay apart: a sample each, or several in a window, none seeing another.

    samples = Packed(folder / "train.bin", vocab_size, seq_len=1024)
    samples[0]["positions"]                 # int64 [seq_len]: 0 1 2 ... 0 1 2 ..., from 0 in each document

Beside NAME.bin and NAME.labels lie NAME.starts, where each document begins (and the last one ends), and for windows
NAME.order, the documents in the order of the windows, and NAME.packs, how many of them stand before each window.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.text.corpus import IGNORED, LABELS, mapped
from lockstep.text.tokenize import token_type

__all__ = ["Packed", "Padded", "packed"]

_OFFSET = np.dtype("<i8")


class _Documents:
    """The documents of one split, each of 2 to seq_len + 1 tokens."""

    draws_random = False  # a sample needs no seed
    items_per_sample = None  # labelled tokens differ by sample

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        self.path, self.vocab_size, self.seq_len, self.masked = path, vocab_size, seq_len, masked
        self._tokens: NDArray[Any] = mapped(path, token_type(vocab_size))
        self._labels = mapped(path.with_suffix(LABELS), np.dtype("u1")) if masked else None
        self._starts = mapped(path.with_suffix(".starts"), _OFFSET)

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The samples of a batch, in order."""
        return [self[index] for index in indices]

    def _document(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels of a document, each one shorter than it."""
        begin, end = self._starts[number], self._starts[number + 1]
        tokens = self._tokens[begin:end].astype(np.int64)
        labels = tokens[1:]
        if self._labels is not None:
            labels = np.where(self._labels[begin + 1 : end] == 0, IGNORED, labels)
        return tokens[:-1], labels


@final
class Padded(_Documents):
    """Each document is a sample: {"input_ids": int64 [n], "labels": int64 [n]}, n from 1 to seq_len."""

    def __reduce__(self) -> tuple[type["Padded"], tuple[Path, int, int, bool]]:
        return Padded, (self.path, self.vocab_size, self.seq_len, self.masked)

    def __len__(self) -> int:
        return max(0, len(self._starts) - 1)

    def longest(self, samples: Sequence[int]) -> int:
        """Tokens of the longest of these samples."""
        return max(int(self._starts[sample + 1] - self._starts[sample]) - 1 for sample in samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, labels = self._document(index)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(np.array(labels))}


@final
class Packed(_Documents):
    """Windows of seq_len tokens, filled with whole documents.

    A sample has "input_ids", "labels", "positions" and "documents", each int64 [seq_len]. Positions begin at 0 in each
    document; `documents` numbers them from 0 within the window. What is left of a window is a document of its own
    without labels.
    """

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        super().__init__(path, vocab_size, seq_len, masked)
        self._order = mapped(path.with_suffix(".order"), _OFFSET)
        self._packs = mapped(path.with_suffix(".packs"), _OFFSET)

    def __reduce__(self) -> tuple[type["Packed"], tuple[Path, int, int, bool]]:
        return Packed, (self.path, self.vocab_size, self.seq_len, self.masked)

    def __len__(self) -> int:
        return max(0, len(self._packs) - 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = {name: np.zeros(self.seq_len, np.int64) for name in ("input_ids", "labels", "positions", "documents")}
        sample["labels"][:] = IGNORED
        place = 0
        held = self._order[self._packs[index] : self._packs[index + 1]]
        for number, document in enumerate(held):
            inputs, labels = self._document(int(document))
            span = slice(place, place + len(inputs))
            sample["input_ids"][span], sample["labels"][span] = inputs, labels
            sample["positions"][span], sample["documents"][span] = np.arange(len(inputs)), number
            place += len(inputs)
        sample["positions"][place:], sample["documents"][place:] = np.arange(self.seq_len - place), len(held)
        return {name: torch.from_numpy(values) for name, values in sample.items()}


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The documents of these lengths, at most `room` each, in windows of `room`: best fit, the longest first.

    Each document goes where it leaves the least over; equal ones in their own order. Johnson, "Near-optimal bin packing
    algorithms" (1973): at most 11/9 of the fewest windows, and a few.
    """
    windows: list[list[int]] = []
    left: dict[int, list[int]] = {}  # what is left -> the windows that have so much left
    known: list[int] = []  # its keys, in order
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[document]
        at = bisect_left(known, length)
        if at == len(known):
            window, over = len(windows), room - length
            windows.append([])
        else:
            over = known[at] - length
            window = left[known[at]].pop()
            if not left[known[at]]:
                del left[known.pop(at)]
        windows[window].append(document)
        if over:
            if over not in left:
                insort(known, over)
            left.setdefault(over, []).append(window)
    return windows
