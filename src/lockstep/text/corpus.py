"""Train a byte-level BPE tokenizer, and read a corpus's tokens as windows or blocks.

The tokens are in NAME.bin, memory-mapped. If only some are to be learned, NAME.labels has a byte for each token, 1 for
those.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "IGNORED",
    "LABELS",
    "SETTINGS",
    "ByteBPE",
    "TokenBlocks",
    "Windows",
    "map_numbers",
    "token_type",
]


# In the key of a prepared corpus: all that affects the tokens of a text.
SETTINGS = {"kind": "byte-level bpe", "pattern": "gpt2", "min_frequency": "2"}

# Every byte, and the separator.
_MIN_VOCABULARY = 257


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned little-endian type for tokens below `vocab_size`: uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@final
class ByteBPE:
    """A trained byte-level BPE tokenizer.

    Attributes:
        vocab_size: counts the separator.
        separator: the last token.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self.separator = tokenizer.get_vocab_size()
        self.vocab_size = self.separator + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "ByteBPE":
        """Learn at most `vocab_size` tokens, separator included; a short text may yield fewer.

        Raises:
            ConfigError: `vocab_size` is below 257.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab_size < _MIN_VOCABULARY:
            raise ConfigError(
                f"vocab_size {vocab_size} is too small; a byte-level tokenizer needs {_MIN_VOCABULARY} or more"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=int(SETTINGS["min_frequency"]),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> "ByteBPE":
        """Load a tokenizer that `save` wrote."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write the tokenizer as a JSON file."""
        self._tokenizer.save(str(path))

    @property
    def fingerprint(self) -> str:
        """Hex; equal for tokenizers that give the same tokens."""
        return hashlib.sha256(str(self._tokenizer.to_str()).encode()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text).ids)

    def encode_all(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Return the tokens of each text, using all cores.

        `special` has no effect: this tokenizer adds no special tokens.
        """
        return [list(encoded.ids) for encoded in self._tokenizer.encode_batch_fast(texts)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the tokens.

        Separators have none; an incomplete character becomes U+FFFD.
        """
        return str(self._tokenizer.decode([int(token) for token in tokens if token < self.separator]))


# The label of a token that is not predicted: torch's default `ignore_index`.
IGNORED = -100
LABELS = ".labels"


class _TokenRows:
    """Rows of `width` tokens at a stride of `seq_len`, without a rest."""

    # A sample needs no seed.
    draws_random = False

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool, *, width: int) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.masked = masked
        self._tokens: NDArray[Any] = map_numbers(path, token_type(vocab_size))
        self._labels = map_numbers(path.with_suffix(LABELS), np.dtype("u1")) if masked else None
        self._row = np.arange(width)
        self._count = max(0, len(self._tokens) - width + seq_len) // seq_len

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return len(self._tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.full(self._count, self.seq_len)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """Return the samples of a batch in order, from a single copy.

        A DataLoader calls it once a batch.
        """
        rows, labels = self._read(indices)
        pairs = zip(*self._shift(rows, labels), strict=True)
        return [{"input_ids": inputs, "labels": labels} for inputs, labels in pairs]

    def _read(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return the rows, int64 [samples, width], and their labels, with -100 where not learned."""
        samples = np.asarray(indices, dtype=np.int64)
        if len(samples) and not (samples.min() >= 0 and samples.max() < self._count):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {self._count}")
        places = samples[:, None] * self.seq_len + self._row
        rows = torch.from_numpy(self._tokens[places].astype(np.int64))
        if self._labels is None:
            return rows, rows
        return rows, rows.masked_fill(torch.from_numpy(self._labels[places] == 0), IGNORED)

    def _shift(self, rows: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        raise NotImplementedError


@final
class Windows(_TokenRows):
    """A split as windows of seq_len + 1 tokens, at a stride of seq_len.

    A rest at the end is left out. A sample is {"input_ids": int64 [seq_len], "labels": int64 [seq_len]}: the window
    without its last token, and without its first. It pickles as its path, so a spawned worker maps the file itself.

    Args:
        masked: some tokens are not learned; their label is -100.
    """

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        super().__init__(path, vocab_size, seq_len, masked, width=seq_len + 1)

    def __reduce__(self) -> tuple[type["Windows"], tuple[Path, int, int, bool]]:
        return Windows, (self.path, self.vocab_size, self.seq_len, self.masked)

    @property
    def items_per_sample(self) -> int | None:
        """Labelled tokens of every sample; None if samples differ."""
        if self.masked:
            return None
        return self.seq_len

    def _shift(self, rows: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return rows[:, :-1].unbind(), labels[:, 1:].unbind()


@final
class TokenBlocks(_TokenRows):
    """A split as consecutive blocks of seq_len tokens.

    A sample is {"input_ids": int64 [seq_len], "labels": int64 [seq_len]}; a label is the next token of the block, and
    the last one is -100: its next token is in another block. It pickles as its path.

    Args:
        masked: some tokens are not learned; their label is -100.
    """

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        super().__init__(path, vocab_size, seq_len, masked, width=seq_len)

    def __reduce__(self) -> tuple[type["TokenBlocks"], tuple[Path, int, int, bool]]:
        return TokenBlocks, (self.path, self.vocab_size, self.seq_len, self.masked)

    @property
    def items_per_sample(self) -> int | None:
        """Labelled tokens of every sample; None if samples differ."""
        if self.masked:
            return None
        return self.seq_len - 1

    def _shift(self, rows: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return rows.unbind(), torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).unbind()


def map_numbers(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    """Memory-map the numbers in a file."""
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.empty(0, dtype=kind)
    # Slices of a plain array are cheaper than those of a memmap.
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))
