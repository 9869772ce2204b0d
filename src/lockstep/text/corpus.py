"""A split of a prepared corpus as samples: windows or blocks of tokens, read from memory-mapped files.

Beside NAME.bin, the tokens, lies NAME.labels where only some of them are to be learned: a byte a token, 1 for those.
"""

from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.text.tokenize import token_type

__all__ = ["IGNORED", "LABELS", "Blocks", "Windows", "mapped"]

IGNORED = -100  # the label of a token that is not predicted
LABELS = ".labels"


class _Rows:
    """Rows of `width` tokens that begin `stride` tokens after one another; a rest at the end is left out."""

    draws_random = False  # a sample needs no seed

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool, *, width: int) -> None:
        self.path, self.vocab_size, self.seq_len, self.masked = path, vocab_size, seq_len, masked
        self._tokens: NDArray[Any] = mapped(path, token_type(vocab_size))
        self._labels = mapped(path.with_suffix(LABELS), np.dtype("u1")) if masked else None
        self._row = np.arange(width)
        self._count = max(0, len(self._tokens) - width + seq_len) // seq_len

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return len(self._tokens)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """The samples of a batch, in order; a DataLoader asks for them in this one call. One copy serves them all."""
        rows, labels = self._read(indices)
        pairs = zip(*self._shifted(rows, labels), strict=True)
        return [{"input_ids": inputs, "labels": labels} for inputs, labels in pairs]

    def _read(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """The rows, int64 [samples, width], and the same with -100 for tokens that are not to be learned."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self._count):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {self._count}")
        places = wanted[:, None] * self.seq_len + self._row
        rows = torch.from_numpy(self._tokens[places].astype(np.int64))
        if self._labels is None:
            return rows, rows
        return rows, rows.masked_fill(torch.from_numpy(self._labels[places] == 0), IGNORED)

    def _shifted(self, rows: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        raise NotImplementedError


@final
class Windows(_Rows):
    """The samples of one split: windows of seq_len + 1 tokens at a stride of seq_len; a rest at the end is left out.

    A sample is {"input_ids": int64 [seq_len], "labels": int64 [seq_len]}: the window without its last token and
    without its first. It pickles as its path, so a worker that is spawned maps the file itself.

    Args:
        masked: some tokens are not to be learned; their label is -100.
    """

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        super().__init__(path, vocab_size, seq_len, masked, width=seq_len + 1)

    def __reduce__(self) -> tuple[type["Windows"], tuple[Path, int, int, bool]]:
        return Windows, (self.path, self.vocab_size, self.seq_len, self.masked)

    @property
    def items_per_sample(self) -> int | None:
        """Labelled tokens of every sample; None where samples differ."""
        return None if self.masked else self.seq_len

    def _shifted(self, rows: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return rows[:, :-1].unbind(), labels[:, 1:].unbind()


@final
class Blocks(_Rows):
    """The samples of one split: blocks of seq_len tokens, one after the other.

    A sample is {"input_ids": int64 [seq_len], "labels": int64 [seq_len]}; a label is the next token of the block, and
    the last one is -100: what follows is in another block. It pickles as its path.

    Args:
        masked: some tokens are not to be learned; their label is -100.
    """

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        super().__init__(path, vocab_size, seq_len, masked, width=seq_len)

    def __reduce__(self) -> tuple[type["Blocks"], tuple[Path, int, int, bool]]:
        return Blocks, (self.path, self.vocab_size, self.seq_len, self.masked)

    @property
    def items_per_sample(self) -> int | None:
        """Labelled tokens of every sample; None where samples differ."""
        return None if self.masked else self.seq_len - 1

    def _shifted(self, rows: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return rows.unbind(), torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).unbind()


def mapped(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    """The numbers in a file, memory-mapped."""
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))  # slices of a plain array are cheaper
