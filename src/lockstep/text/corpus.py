"""A split of a prepared corpus as samples: windows of tokens read from a memory-mapped file."""

from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.text.tokenize import token_type

__all__ = ["Windows"]


@final
class Windows:
    """The samples of one split: windows of seq_len + 1 tokens at a stride of seq_len; a rest at the end is left out.

    A sample is {"input_ids": int64 [seq_len], "labels": int64 [seq_len]}: the window without its last token and
    without its first. It pickles as its path, so a worker that is spawned maps the file itself.
    """

    draws_random = False  # a sample needs no seed

    def __init__(self, path: Path, vocab_size: int, seq_len: int) -> None:
        self.path, self.vocab_size, self.seq_len = path, vocab_size, seq_len
        self._tokens: NDArray[Any] = _mapped(path, token_type(vocab_size))
        self._window = np.arange(seq_len + 1)
        self._count = max(0, (len(self._tokens) - 1) // seq_len)

    def __reduce__(self) -> tuple[type["Windows"], tuple[Path, int, int]]:
        return Windows, (self.path, self.vocab_size, self.seq_len)

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
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self._count):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {self._count}")
        rows = torch.from_numpy(self._tokens[wanted[:, None] * self.seq_len + self._window].astype(np.int64))
        pairs = zip(rows[:, :-1].unbind(), rows[:, 1:].unbind(), strict=True)
        return [{"input_ids": inputs, "labels": labels} for inputs, labels in pairs]


def _mapped(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))  # slices of a plain array are cheaper
