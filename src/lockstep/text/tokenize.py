"""Byte-level byte-pair encoding, by the package `tokenizers`, which is imported in this file alone.

Sennrich, Haddow & Birch, "Neural Machine Translation of Rare Words with Subword Units" (ACL 2016), on bytes as in
GPT-2: any text can be encoded, and decoding gives it back. The separator between documents is a token that the
tokenizer does not know, so no text can contain it.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["SETTINGS", "ByteBPE", "token_type"]

# Part of the key of a prepared corpus: whatever changes the tokens of a text.
SETTINGS = {"kind": "byte-level bpe", "pattern": "gpt2", "min_frequency": "2"}

_SMALLEST = 257  # every byte, and the separator


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned little-endian type, uint16 or uint32, for tokens below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@final
class ByteBPE:
    """A trained tokenizer. `vocab_size` counts the separator, which is its last token."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        _hold_threads()
        self._tokenizer = tokenizer
        self.separator = tokenizer.get_vocab_size()
        self.vocab_size = self.separator + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "ByteBPE":
        """Learns at most `vocab_size` tokens, the separator among them; a short text may have fewer to learn.

        Raises:
            ConfigError: `vocab_size` is below 257.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab_size < _SMALLEST:
            raise ConfigError(f"vocab_size {vocab_size} is too small: a byte-level one needs {_SMALLEST} at least")
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
        """What `save` wrote."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Writes the tokenizer as one JSON file."""
        self._tokenizer.save(str(path))

    @property
    def fingerprint(self) -> str:
        """Hex; equal for tokenizers that give the same tokens."""
        return hashlib.sha256(str(self._tokenizer.to_str()).encode()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self._tokenizer.encode(text).ids)

    def encode_all(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """The tokens of each text, on all cores. `special` changes nothing: this tokenizer adds none by itself."""
        return [list(encoded.ids) for encoded in self._tokenizer.encode_batch_fast(texts)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens. Separators have none; an incomplete character is shown as U+FFFD."""
        return str(self._tokenizer.decode([int(token) for token in tokens if token < self.separator]))


def _hold_threads() -> None:
    # Unless this is set, the package prints a warning in every data worker that is forked after it has used threads.
    # Workers only read tokens, so threads are safe.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
