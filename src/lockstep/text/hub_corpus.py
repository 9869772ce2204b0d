"""Any documents, by any tokenizer, as files of tokens that are memory-mapped.

    corpus = prepare(name, rows.digest, rows.documents, tokenizer, packing, cache=cache, say=print)
    corpus.train[0]["input_ids"]            # int64 [seq_len]

Two packings. "stream": a separator after each document, windows that overlap by one token, each predicting seq_len.
"blocks": every 1000 examples are joined with nothing between them and cut into blocks of seq_len, the rest of each
thousand left out; a block predicts its own seq_len - 1 following tokens. That is what run_clm_no_trainer.py of the
package `transformers` does in its `group_texts`, with the batch size that `datasets.map` has by default.

The samples of a split are one indexed set that every rank opens whole. No rank owns a part of it, so there are no parts
that could differ in length.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Protocol, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from lockstep.errors import DataError
from lockstep.text.corpus import Windows
from lockstep.text.hub import Documents, Part
from lockstep.text.hub_cache import prepared
from lockstep.text.tokenize import SETTINGS, ByteBPE, token_type

__all__ = ["Blocks", "Packing", "TokenCorpus", "Tokenizer", "Trained", "prepare"]

_FORMAT = 2  # of the folder; another number is another key
_GROUP = 1000  # examples that are tokenized, and in "blocks" cut, together
# Characters of such a group: tokens in Python lists are large. Blocks do not go over a group's end.
_MOST = {"stream": 1 << 22, "blocks": 1 << 25}
_IGNORED = -100

Say = Callable[[str], None]


class Tokenizer(Protocol):
    """What turns texts into tokens: `models.hf.HubTokenizer`, or a `ByteBPE` that was trained here."""

    vocab_size: int
    separator: int

    def encode_all(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """The tokens of each text; `special` adds what the tokenizer puts around a text by itself."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A tokenizer that is yet to be trained, on the training split: `--tokenizer train:VOCAB`."""

    vocab_size: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become samples.

    Attributes:
        kind: "stream" or "blocks".
        seq_len: tokens of a sample.
        fraction: share of the rows for the evaluation, where the data has no evaluation split of its own.
    """

    kind: str
    seq_len: int
    fraction: float


@final
class Blocks:
    """The samples of one split: blocks of seq_len tokens, one after the other.

    A sample is {"input_ids": int64 [seq_len], "labels": int64 [seq_len]}; a label is the next token of the block, and
    the last one is -100: what follows is in another block. It pickles as its path.
    """

    draws_random = False  # a sample needs no seed

    def __init__(self, path: Path, vocab_size: int, seq_len: int) -> None:
        self.path, self.vocab_size, self.seq_len = path, vocab_size, seq_len
        kind = token_type(vocab_size)
        rows = path.stat().st_size // (kind.itemsize * seq_len)
        self._rows = np.memmap(path, dtype=kind, mode="r", shape=(rows, seq_len)) if rows else None
        self._count = rows

    def __reduce__(self) -> tuple[type["Blocks"], tuple[Path, int, int]]:
        return Blocks, (self.path, self.vocab_size, self.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return self._count * self.seq_len

    @property
    def items_per_sample(self) -> int:
        """Labelled tokens of a sample."""
        return self.seq_len - 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The samples of a batch, in order."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self._count):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {self._count}")
        if self._rows is None:
            return []
        rows = torch.from_numpy(self._rows[wanted].astype(np.int64))
        labels = torch.nn.functional.pad(rows[:, 1:], (0, 1), value=_IGNORED)
        return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


@final
class TokenCorpus:
    """A prepared corpus.

    Attributes:
        train, evaluation: the samples of each split.
        vocab_size: tokens that may occur.
        separator: the token that ends a document; -1 where the tokenizer has none.
        fingerprint: hex; what the corpus was made from.
        folder: where its files are.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], tokenizer: Tokenizer | None, packing: Packing) -> None:
        self.folder, self._known = folder, tokenizer
        self.fingerprint: str = facts["fingerprint"]
        self.vocab_size: int = facts["vocab_size"]
        self.separator: int = facts["separator"]
        kind = Blocks if packing.kind == "blocks" else Windows
        self.train, self.evaluation = (
            kind(folder / f"{name}.bin", self.vocab_size, packing.seq_len) for name in ("train", "evaluation")
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What made its tokens. One that was trained here is read when it is asked for: training needs tokens alone."""
        return self._known or ByteBPE.load(self.folder / "tokenizer.json")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without a separator."""
        return self.tokenizer.encode_all([text])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens)


def prepare(
    name: str,
    digest: str,
    documents: Callable[[float, Path], Documents],
    tokenizer: Tokenizer | Trained,
    packing: Packing,
    *,
    cache: Path,
    say: Say,
) -> TokenCorpus:
    """Opens the corpus, writing its tokens first where that was not yet done. Any number of processes may call it.

    Args:
        name: what --dataset-name says.
        digest: of the documents' content.
        documents: opens them: (share for the evaluation, folder for temporary files) -> both splits.
        tokenizer: one that is there, or the size of one to train on the training split.
        cache: folder of prepared corpora.
        say: gets a line about what is being done, when it takes time.

    Raises:
        DataError: no documents as asked for, or a split shorter than one sample.
        ConfigError: a cache that cannot be written.
    """
    key = _key(digest, tokenizer, packing)
    folder = cache / f"tokens-{key}"

    def write(temporary: Path) -> dict[str, Any]:
        with TemporaryDirectory(dir=temporary, prefix="rows-") as scratch:
            say(f"preparing {name}")
            found = documents(packing.fraction, Path(scratch))
            if found.note:
                say(found.note)
            facts = _write(found, tokenizer, packing, temporary, say)
            found.check()
        return {"fingerprint": key, "name": name, **facts}

    facts = prepared(folder, write, say=say, what=name)
    corpus = TokenCorpus(folder, facts, None if isinstance(tokenizer, Trained) else tokenizer, packing)
    least = f"block of --seq-len {packing.seq_len}"
    if packing.kind == "stream":
        least = f"window of --seq-len {packing.seq_len} + 1"
    for part, samples in (("train", corpus.train), ("evaluation", corpus.evaluation)):
        if not len(samples):
            raise DataError(
                f"--dataset-name {name}: its {part} split has {facts['tokens'][part]} tokens, fewer than one "
                f"{least}; give more text, a smaller --seq-len or a larger --data.evaluation"
            )
    return corpus


def _key(digest: str, tokenizer: Tokenizer | Trained, packing: Packing) -> str:
    trained = isinstance(tokenizer, Trained)
    how = {**SETTINGS, "vocab_size": tokenizer.vocab_size} if trained else getattr(tokenizer, "fingerprint", "")
    length = packing.seq_len if packing.kind == "blocks" else 0  # windows of any length share one file
    made = [_FORMAT, digest, how, packing.kind, length, packing.fraction]
    return xxhash.xxh3_128_hexdigest(json.dumps(made, sort_keys=True).encode())


def _write(
    found: Documents, tokenizer: Tokenizer | Trained, packing: Packing, folder: Path, say: Say
) -> dict[str, Any]:
    if isinstance(tokenizer, Trained):
        say(f"learning a vocabulary of {tokenizer.vocab_size} tokens")
        trained = ByteBPE.train((text for text, _ in found.train.read()), tokenizer.vocab_size)
        trained.save(folder / "tokenizer.json")
        tokenizer = trained
    counts = {}
    for name, part in (("train", found.train), ("evaluation", found.evaluation)):
        with (folder / f"{name}.bin").open("wb") as file:
            counts[name] = _write_tokens(tokenizer, part, packing, file, _progress(name, part, say))
    return {"tokens": counts, "vocab_size": tokenizer.vocab_size, "separator": tokenizer.separator}


def _write_tokens(
    tokenizer: Tokenizer, part: Part, packing: Packing, file: BinaryIO, progress: Callable[[list[str]], None]
) -> int:
    """Writes the split's tokens and returns how many there were before any rest was left out."""
    kind, total = token_type(tokenizer.vocab_size), 0
    for group in _groups(part.read(), _MOST[packing.kind]):
        texts = [text for text, _ in group]
        joined: list[int] = []
        for tokens, (_, last) in zip(tokenizer.encode_all(texts, packing.kind == "blocks"), group, strict=True):
            joined += tokens
            if last and packing.kind == "stream" and tokenizer.separator >= 0:
                joined.append(tokenizer.separator)
        total += len(joined)
        kept = len(joined) // packing.seq_len * packing.seq_len if packing.kind == "blocks" else len(joined)
        file.write(np.array(joined[:kept], dtype=kind).tobytes())
        progress(texts)
    return total


def _groups(texts: Iterator[tuple[str, bool]], most: int) -> Iterator[list[tuple[str, bool]]]:
    group: list[tuple[str, bool]] = []
    held = 0
    for text in texts:
        group.append(text)
        held += len(text[0])
        if len(group) == _GROUP or held > most:
            yield group
            group, held = [], 0
    if group:
        yield group


def _progress(name: str, part: Part, say: Say) -> Callable[[list[str]], None]:
    """Says each quarter of the split."""
    done, told = 0, 0

    def report(texts: list[str]) -> None:
        nonlocal done, told
        done += sum(map(part.weigh, texts))
        reached = min(100, 100 * done // max(1, part.size))
        if reached >= told + 25:
            told = reached
            say(f"tokenizing the {name} split: {reached}%")

    return report
