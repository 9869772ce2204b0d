"""The documents of one split as files of tokens, one way for each `--data.packing`.

written = write_split(tokenizer, part, packing, folder / "train.bin", masked=False, prompts=False, progress=report)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.text.corpus import LABELS
from lockstep.text.documents import packed
from lockstep.text.examples import Example, Tokenizer, tokens_of
from lockstep.text.hub import Part
from lockstep.text.tokenize import token_type

__all__ = ["Packing", "Written", "begin_of", "write_split"]

_GROUP = 1000  # examples that are tokenized, and in "blocks" cut, together
# Characters of such a group: tokens in Python lists are large. Blocks do not go over a group's end.
_MOST, _MOST_BLOCKS = 1 << 22, 1 << 25

Progress = Callable[[Sequence[Example]], None]


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become samples.

    Attributes:
        kind: "stream", "blocks", "padded" or "documents".
        seq_len: tokens of a sample, in "padded" the most.
        fraction: share of the rows for the evaluation, where the data has no evaluation split of its own.
        labels: what is learned: "all", "completion", or "auto".
    """

    kind: str
    seq_len: int
    fraction: float
    labels: str = "auto"

    @property
    def answers(self) -> bool:
        """Whether completions alone are learned, of rows that have them."""
        return self.labels == "completion" or (self.labels == "auto" and self.kind != "blocks")

    @property
    def apart(self) -> bool:
        """Whether documents stay apart."""
        return self.kind in ("padded", "documents")


@dataclass(slots=True)
class Written:
    """What was written of a split.

    Attributes:
        tokens: before any rest was left out.
        labels: tokens that are to be learned.
        notes: what a person should know.
    """

    tokens: int = 0
    labels: int = 0
    notes: list[str] = field(default_factory=list)


def write_split(
    tokenizer: Tokenizer,
    part: Part,
    packing: Packing,
    path: Path,
    *,
    masked: bool,
    prompts: bool,
    progress: Progress,
) -> Written:
    """Writes the split's tokens into `path`, and beside it what `text.corpus` and `text.documents` read.

    Args:
        masked: only completions and the assistant's words are to be learned.
        prompts: a row is one example, which is cut off where it is too long, and not into pieces.
        progress: gets the examples of each group that was done.

    Raises:
        DataError: see `tokens_of`.
    """
    found = Written()
    if packing.apart:
        _write_documents(tokenizer, part, packing, path, found, (masked, prompts), progress)
    else:
        _write_joined(tokenizer, part, packing, path, found, masked, progress)
    return found


def _write_joined(
    tokenizer: Tokenizer, part: Part, packing: Packing, path: Path, found: Written, masked: bool, progress: Progress
) -> None:
    blocks, kind = packing.kind == "blocks", token_type(tokenizer.vocab_size)
    with path.open("wb") as file, path.with_suffix(LABELS).open("wb") as marks:
        for group in _groups(part.read(), _MOST_BLOCKS if blocks else _MOST):
            examples = [example for example, _ in group]
            joined: list[int] = []
            marked: list[bool] = []
            for (tokens, labelled), (example, last) in zip(
                tokens_of(tokenizer, examples, blocks, masked), group, strict=True
            ):
                joined += tokens
                marked += labelled
                if last and not blocks and not example.messages and tokenizer.separator >= 0:
                    joined.append(tokenizer.separator)
                    marked.append(True)
            found.tokens += len(joined)
            found.labels += sum(marked)
            kept = len(joined) // packing.seq_len * packing.seq_len if blocks else len(joined)
            file.write(np.array(joined[:kept], dtype=kind).tobytes())
            if masked:
                marks.write(np.array(marked[:kept], dtype="u1").tobytes())
            progress(examples)
    if not masked:
        path.with_suffix(LABELS).unlink()


def _write_documents(
    tokenizer: Tokenizer,
    part: Part,
    packing: Packing,
    path: Path,
    found: Written,
    how: tuple[bool, bool],
    progress: Progress,
) -> None:
    (masked, prompts), room = how, packing.seq_len + 1
    kind, starts = token_type(tokenizer.vocab_size), [0]
    lost: list[int] = []  # rows
    cut = 0
    with path.open("wb") as file, path.with_suffix(LABELS).open("wb") as marks:
        for tokens, labelled, row in _documents(tokenizer, part, packing, masked, progress):
            found.tokens += len(tokens)
            cut += prompts and len(tokens) > room
            begins = [0] if prompts else range(0, max(len(tokens) - 1, 1), packing.seq_len)
            for begin in begins:
                piece, learned = tokens[begin : begin + room], labelled[begin : begin + room]
                if not any(learned[1:]):
                    lost.append(row)
                    continue
                found.labels += sum(learned[1:])
                file.write(np.array(piece, dtype=kind).tobytes())
                if masked:
                    marks.write(np.array(learned, dtype="u1").tobytes())
                starts.append(starts[-1] + len(piece))
    if not masked:
        path.with_suffix(LABELS).unlink()
    _numbers(path.with_suffix(".starts"), starts)
    if packing.kind == "documents":
        windows = packed((np.diff(starts) - 1).tolist(), packing.seq_len)
        _numbers(path.with_suffix(".order"), [document for window in windows for document in window])
        _numbers(path.with_suffix(".packs"), np.cumsum([0, *map(len, windows)]).tolist())
    found.notes = _notes(path.stem, packing.seq_len, cut, lost)


def _notes(split: str, seq_len: int, cut: int, lost: list[int]) -> list[str]:
    notes = []
    if cut:
        notes.append(
            f"{cut} example{'s' * (cut > 1)} of the {split} split end at --seq-len {seq_len}, the rest cut off"
        )
    if lost:
        where = f" (the first: row {lost[0]})" if lost[0] >= 0 else ""
        notes.append(
            f"{len(lost)} example{'s' * (len(lost) > 1)} of the {split} split{where} have nothing to learn within "
            f"--seq-len {seq_len} and are left out; a larger one takes in more of each"
        )
    return notes


def begin_of(tokenizer: Tokenizer, packing: Packing) -> list[int]:
    """What a text begins with: of documents that stay apart what the tokenizer puts before one by itself, else the
    separator; in a stream the separator; in blocks nothing."""
    end = [tokenizer.separator] if tokenizer.separator >= 0 else []
    if packing.apart:
        return tokenizer.encode_all([""], True)[0][:1] or end
    return end if packing.kind == "stream" else []


def _documents(
    tokenizer: Tokenizer, part: Part, packing: Packing, masked: bool, progress: Progress
) -> Iterator[tuple[list[int], list[bool], int]]:
    """(tokens, whether each is to be learned, row) of each document, with what begins and ends one.

    A conversation has what its template says.
    """
    end = [tokenizer.separator] if tokenizer.separator >= 0 else []
    begin = begin_of(tokenizer, packing)
    tokens: list[int] = []
    labelled: list[bool] = []
    for group in _groups(part.read(), _MOST):
        examples = [example for example, _ in group]
        for (more, marks), (example, last) in zip(tokens_of(tokenizer, examples, False, masked), group, strict=True):
            tokens += more
            labelled += marks
            if not last:
                continue
            if example.messages:
                yield tokens, labelled, example.row
            else:
                yield [*begin, *tokens, *end], [*[False] * len(begin), *labelled, *[True] * len(end)], example.row
            tokens, labelled = [], []
        progress(examples)


def _groups(examples: Iterator[tuple[Example, bool]], most: int) -> Iterator[list[tuple[Example, bool]]]:
    group: list[tuple[Example, bool]] = []
    held = 0
    for example in examples:
        group.append(example)
        held += len(example[0].text)
        if len(group) == _GROUP or held > most:
            yield group
            group, held = [], 0
    if group:
        yield group


def _numbers(path: Path, values: Sequence[Any]) -> None:
    path.write_bytes(np.array(values, dtype="<i8").tobytes())
