"""Read a corpus whose documents stay separate, one a sample or packed in windows.

    samples = Packed(folder / "train.bin", vocab_size, seq_len=1024)
    samples[0]["positions"]                 # int64 [seq_len]: 0 1 2 ... 0 1 2 ..., from 0 in each document

No document attends to another. The files next to NAME.bin and NAME.labels: NAME.starts, the start of each document (and
the end of the last); for windows NAME.order, the documents in the order of the windows, and NAME.packs, the number of
documents before each window.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import DataError
from lockstep.text.corpus import IGNORED, LABELS, map_numbers, token_type

__all__ = [
    "Example",
    "Packed",
    "PaddedDocuments",
    "Tokenizer",
    "alike",
    "pack",
    "tokens_of",
]


class Tokenizer(Protocol):
    """A tokenizer of texts: `models.hf.HubTokenizer`, or a trained `ByteBPE`."""

    vocab_size: int
    separator: int

    def encode_all(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Return the tokens of each text; `special` adds the tokenizer's own special tokens."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the tokens."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of data.

    Attributes:
        text: its text; "" for a conversation, which the tokenizer's template renders.
        given: number of leading characters that are the prompt.
        messages: the turns of a conversation, each with "role" and "content".
        row: its number in the dataset, from 0; -1 for a file.
        tools: that the assistant of a conversation may call, for the template.
    """

    text: str
    given: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    row: int = -1
    tools: tuple[Mapping[str, Any], ...] = ()


def tokens_of(
    tokenizer: Tokenizer, examples: Sequence[Example], special: bool = False, masked: bool = True
) -> list[tuple[list[int], list[bool]]]:
    """Return (tokens, whether each is learned) of each example.

    A prompt and its completion are tokenized as one text, as without labels; the completion starts at the first token
    that differs from the prompt's own tokens.

    Args:
        special: add the tokenizer's own special tokens; a conversation's template includes them anyway.
        masked: learn only completions and the assistant's turns; else everything.

    Raises:
        DataError: a conversation without a template, or with turns that cannot be separated.
    """
    texts = [e.text for e in examples if not e.messages]
    plain = iter(tokenizer.encode_all(texts, special) if texts else [])
    prefixes = []
    for e in examples:
        if e.given and masked:
            prefixes.append(e.text[: e.given])
    prompts = iter(tokenizer.encode_all(prefixes, special) if prefixes else [])
    results = []
    for example in examples:
        if example.messages:
            encode = getattr(tokenizer, "encode_chat", None)
            if encode is None:
                raise DataError(
                    "--dataset-name has conversations (messages), but a tokenizer trained here has no chat template; "
                    "set --tokenizer to a chat model's, use rows with the columns prompt and completion, or set "
                    "--data.text-column to a column with the rendered text"
                )
            given = {"tools": example.tools} if example.tools else {}
            results.append(encode(example.messages, example.row, masked, **given))
            continue
        tokens = next(plain)
        start = alike(tokens, next(prompts)) if example.given and masked else 0
        results.append((tokens, [False] * start + [True] * (len(tokens) - start)))
    return results


def alike(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the leading tokens that are equal in both."""
    short = min(len(left), len(right))
    for index in range(short):
        if left[index] != right[index]:
            return index
    return short


_OFFSET = np.dtype("<i8")


class _TokenDocuments:
    """The documents of a split, each of 2 to seq_len + 1 tokens."""

    # A sample needs no seed.
    draws_random = False
    # Labelled tokens differ by sample.
    items_per_sample = None

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.masked = masked
        self._tokens: NDArray[Any] = map_numbers(path, token_type(vocab_size))
        self._labels = map_numbers(path.with_suffix(LABELS), np.dtype("u1")) if masked else None
        self._starts = map_numbers(path.with_suffix(".starts"), _OFFSET)

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the samples of a batch, in order."""
        return [self[index] for index in indices]

    def _document(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels of a document, each a token shorter than it."""
        begin = self._starts[number]
        end = self._starts[number + 1]
        tokens = self._tokens[begin:end].astype(np.int64)
        labels = tokens[1:]
        if self._labels is not None:
            labels = np.where(self._labels[begin + 1 : end] == 0, IGNORED, labels)
        return tokens[:-1], labels


@final
class PaddedDocuments(_TokenDocuments):
    """A split with a sample for each document.

    A sample is {"input_ids": int64 [n], "labels": int64 [n]}, n from 1 to seq_len; the task pads it.
    """

    # Samples differ in length.
    padded = True

    def __reduce__(self) -> tuple[type["PaddedDocuments"], tuple[Path, int, int, bool]]:
        return PaddedDocuments, (self.path, self.vocab_size, self.seq_len, self.masked)

    def __len__(self) -> int:
        return max(0, len(self._starts) - 1)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self._starts) - 1

    def longest(self, samples: Sequence[int]) -> int:
        """Return the tokens of the longest of these samples."""
        return max(int(self._starts[sample + 1] - self._starts[sample]) - 1 for sample in samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, labels = self._document(index)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(np.array(labels))}


@final
class Packed(_TokenDocuments):
    """A split as windows of seq_len tokens, filled with whole documents.

    A sample has "input_ids", "labels", "positions" and "documents", each int64 [seq_len]. Positions begin at 0 in each
    document; `documents` numbers them from 0 within the window. The rest of a window is a document of its own without
    labels.
    """

    def __init__(self, path: Path, vocab_size: int, seq_len: int, masked: bool = False) -> None:
        super().__init__(path, vocab_size, seq_len, masked)
        self._order = map_numbers(path.with_suffix(".order"), _OFFSET)
        self._packs = map_numbers(path.with_suffix(".packs"), _OFFSET)

    def __reduce__(self) -> tuple[type["Packed"], tuple[Path, int, int, bool]]:
        return Packed, (self.path, self.vocab_size, self.seq_len, self.masked)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.full(len(self), self.seq_len)

    def __len__(self) -> int:
        return max(0, len(self._packs) - 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = {}
        for name in ("input_ids", "labels", "positions", "documents"):
            sample[name] = np.zeros(self.seq_len, np.int64)
        sample["labels"][:] = IGNORED
        position = 0
        members = self._order[self._packs[index] : self._packs[index + 1]]
        for number, document in enumerate(members):
            inputs, labels = self._document(int(document))
            span = slice(position, position + len(inputs))
            sample["input_ids"][span] = inputs
            sample["labels"][span] = labels
            sample["positions"][span] = np.arange(len(inputs))
            sample["documents"][span] = number
            position += len(inputs)
        sample["positions"][position:] = np.arange(self.seq_len - position)
        sample["documents"][position:] = len(members)
        return {name: torch.from_numpy(values) for name, values in sample.items()}


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack documents of these lengths into windows of `room` tokens: best fit decreasing.

    Each length is at most `room`. Each document goes where it leaves the least space; equal ones keep their order.
    Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest windows, plus a few.
    """
    windows: list[list[int]] = []
    # Space left -> the windows with that much space.
    open_windows: dict[int, list[int]] = {}
    # The keys of `open_windows`, in order.
    spaces: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[document]
        # The window with the least space that is enough.
        at = bisect_left(spaces, length)
        if at == len(spaces):
            window = len(windows)
            space = room - length
            windows.append([])
        else:
            space = spaces[at] - length
            window = open_windows[spaces[at]].pop()
            if not open_windows[spaces[at]]:
                del open_windows[spaces.pop(at)]
        windows[window].append(document)
        if space:
            if space not in open_windows:
                insort(spaces, space)
            open_windows.setdefault(space, []).append(window)
    return windows
