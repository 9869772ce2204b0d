"""A prepared corpus as samples: windows of tokens read from memory-mapped files. `text.prepare` makes and opens one."""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.tokenize import ByteBPE, token_type

__all__ = ["Corpus", "Windows"]


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


@final
class Corpus:
    """A prepared corpus.

    Attributes:
        train, evaluation: the samples of each split.
        vocab_size: tokens that may occur, the separator among them.
        separator: the token that ends every document.
        fingerprint: hex; what the corpus was made from, the same on every machine for the same text and settings.
        folder: where its files are.
    """

    def __init__(self, folder: Path, seq_len: int) -> None:
        facts = json.loads((folder / "corpus.json").read_bytes())
        self.folder = folder
        self.fingerprint: str = facts["fingerprint"]
        self.vocab_size: int = facts["vocab_size"]
        self.separator: int = facts["separator"]
        self.train, self.evaluation = (
            Windows(folder / f"{name}.bin", self.vocab_size, seq_len) for name in ("train", "evaluation")
        )

    @cached_property
    def _tokenizer(self) -> ByteBPE:
        return ByteBPE.load(self.folder / "tokenizer.json")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without a separator. The first call loads the tokenizer."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, separators left out. The first call loads the tokenizer."""
        return self._tokenizer.decode(tokens)


def _mapped(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))  # slices of a plain array are cheaper
