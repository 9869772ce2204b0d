"""Tokenize documents into memory-mapped files of tokens, in one of four packings.

    corpus = prepare(name, rows.digest, rows.documents, tokenizer, packing, cache=cache, say=print)
    corpus.train[0]["input_ids"]            # int64 [seq_len]

"stream": a separator after each document, and windows that overlap by one token, each predicting seq_len tokens.
"blocks": every 1000 examples are concatenated without a separator and cut into blocks of seq_len tokens; the rest of
each thousand is left out, and a block predicts its own seq_len - 1 next tokens. `group_texts` of
run_clm_no_trainer.py in `transformers` does the same, with the default batch size of `datasets.map`.
"padded": each document is a sample. "documents": windows filled with whole documents that do not attend to one another.
The samples of a split are one indexed set that every rank opens whole. No rank owns a part of it, so parts cannot
differ in length.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import DataError
from lockstep.text.cache import fill_once
from lockstep.text.corpus import IGNORED, LABELS, SETTINGS, ByteBPE, TokenBlocks, Windows, token_type
from lockstep.text.documents import Example, Packed, PaddedDocuments, Tokenizer, pack, tokens_of
from lockstep.text.hub import Documents, HubSplit

__all__ = [
    "Packing",
    "Samples",
    "TokenCorpus",
    "TokenFiles",
    "TokenizerToTrain",
    "begin_corpus",
    "check_split",
    "prepare",
    "write_split",
]


# Examples that are tokenized together, and in "blocks" concatenated.
_GROUP = 1000
# Maximum characters of such a group: tokens in Python lists are large. Blocks do not cross a group's end.
_MAX_CHARACTERS = 1 << 22
_MAX_CHARACTERS_BLOCKS = 1 << 25

Progress = Callable[[Sequence[Example]], None]


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become samples.

    Attributes:
        kind: "stream", "blocks", "padded" or "documents".
        seq_len: tokens of a sample; in "padded" the maximum.
        fraction: share of the rows for the evaluation, if the data has no evaluation split.
        labels: the learned tokens: "all", "completion", or "auto".
    """

    kind: str
    seq_len: int
    fraction: float
    labels: str = "auto"

    @property
    def answers(self) -> bool:
        """Whether only completions are learned, if rows have them."""
        return self.labels == "completion" or (self.labels == "auto" and self.kind != "blocks")

    @property
    def apart(self) -> bool:
        """Whether documents stay separate."""
        return self.kind in ("padded", "documents")


@dataclass(slots=True)
class Written:
    """Counts of a written split.

    Attributes:
        documents: that were read; for separate documents without skipped ones.
        tokens: before any rest was left out.
        labels: tokens that are learned.
        truncated: examples cut to `Packing.seq_len`.
        skipped: examples, or pieces of them, without a label.
        first_skipped: row of the first of these; -1: none, or unknown.
    """

    documents: int = 0
    tokens: int = 0
    labels: int = 0
    truncated: int = 0
    skipped: int = 0
    first_skipped: int = -1

    def notes(self, split: str, seq_len: int) -> list[str]:
        """Return remarks about what is not learned in the split of this name."""
        notes = []
        if self.truncated:
            plural = "s" * (self.truncated > 1)
            notes.append(f"{self.truncated} example{plural} of the {split} split truncated to --seq-len {seq_len}")
        if self.skipped:
            if self.first_skipped >= 0:
                first_row = f" (first: row {self.first_skipped})"
            else:
                first_row = ""
            notes.append(
                f"{self.skipped} example{'s' * (self.skipped > 1)} of the {split} split{first_row} skipped: no label "
                f"within --seq-len {seq_len}; raise it to keep more of each"
            )
        return notes


def write_split(
    tokenizer: Tokenizer,
    part: HubSplit,
    packing: Packing,
    path: Path,
    *,
    masked: bool,
    prompts: bool,
    progress: Progress,
) -> Written:
    """Write the split's tokens to `path`, and next to it the files of its reader.

    Args:
        masked: learn only completions and the assistant's turns.
        prompts: a row is one example, truncated if it is too long, and not split into pieces.
        progress: gets the examples of each finished group.

    Raises:
        DataError: see `tokens_of`.
    """
    counts = Written()
    if packing.apart:
        _write_documents(tokenizer, part, packing, path, counts, (masked, prompts), progress)
    else:
        _write_stream(tokenizer, part, packing, path, counts, masked, progress)
    return counts


def _write_stream(
    tokenizer: Tokenizer,
    part: HubSplit,
    packing: Packing,
    path: Path,
    counts: Written,
    masked: bool,
    progress: Progress,
) -> None:
    blocks = packing.kind == "blocks"
    dtype = token_type(tokenizer.vocab_size)
    with path.open("wb") as file, path.with_suffix(LABELS).open("wb") as marks:
        for group in _groups(part.read(), _MAX_CHARACTERS_BLOCKS if blocks else _MAX_CHARACTERS):
            examples = [example for example, _ in group]
            stream: list[int] = []
            marked: list[bool] = []
            for (tokens, labelled), (example, is_last) in zip(
                tokens_of(tokenizer, examples, blocks, masked), group, strict=True
            ):
                stream += tokens
                marked += labelled if masked else ()
                counts.documents += is_last
                if is_last and not blocks and not example.messages and tokenizer.separator >= 0:
                    stream.append(tokenizer.separator)
                    marked += [True] * masked
            counts.tokens += len(stream)
            counts.labels += sum(marked) if masked else len(stream)
            if blocks:
                # Blocks leave out the rest of a group that fills no block.
                length = len(stream) // packing.seq_len * packing.seq_len
            else:
                length = len(stream)
            file.write(np.fromiter(stream, dtype, length).tobytes())
            marks.write(bytes(marked[:length]))
            progress(examples)
    if not masked:
        path.with_suffix(LABELS).unlink()


def _write_documents(
    tokenizer: Tokenizer,
    part: HubSplit,
    packing: Packing,
    path: Path,
    counts: Written,
    flags: tuple[bool, bool],
    progress: Progress,
) -> None:
    masked, prompts = flags
    room = packing.seq_len + 1
    dtype = token_type(tokenizer.vocab_size)
    # Where each document begins, in tokens; one more entry for the end.
    starts = [0]
    with path.open("wb") as file, path.with_suffix(LABELS).open("wb") as marks:
        for tokens, labelled, row in _documents(tokenizer, part, packing, masked, progress):
            counts.tokens += len(tokens)
            counts.truncated += prompts and len(tokens) > room
            # A prompt is truncated to one sample; a text gives as many as it fills.
            begins = [0] if prompts else range(0, max(len(tokens) - 1, 1), packing.seq_len)
            for begin in begins:
                piece = tokens[begin : begin + room]
                learned = labelled[begin : begin + room]
                if not any(learned[1:]):
                    counts.first_skipped = counts.first_skipped if counts.skipped else row
                    counts.skipped += 1
                    continue
                counts.labels += sum(learned[1:])
                file.write(np.array(piece, dtype=dtype).tobytes())
                if masked:
                    marks.write(np.array(learned, dtype="u1").tobytes())
                starts.append(starts[-1] + len(piece))
                counts.documents += not begin
    if not masked:
        path.with_suffix(LABELS).unlink()
    _numbers(path.with_suffix(".starts"), starts)
    # Windows of whole documents, found once, so that any process can read any window.
    if packing.kind == "documents":
        windows = pack((np.diff(starts) - 1).tolist(), packing.seq_len)
        _numbers(path.with_suffix(".order"), [document for window in windows for document in window])
        _numbers(path.with_suffix(".packs"), np.cumsum([0, *map(len, windows)]).tolist())


def _begin_of(tokenizer: Tokenizer, packing: Packing) -> list[int]:
    """The tokens that begin a text.

    For separate documents they are the tokenizer's own first special token, else the separator; in a stream the
    separator; in blocks none.
    """
    end = [tokenizer.separator] if tokenizer.separator >= 0 else []
    if packing.apart:
        return tokenizer.encode_all([""], True)[0][:1] or end
    if packing.kind == "stream":
        return end
    return []


def _documents(
    tokenizer: Tokenizer, part: HubSplit, packing: Packing, masked: bool, progress: Progress
) -> Iterator[tuple[list[int], list[bool], int]]:
    """Yield (tokens, whether each is learned, row) of each document.

    The tokens that begin and end one are included.

    A conversation has those of its template.
    """
    end = [tokenizer.separator] if tokenizer.separator >= 0 else []
    begin = _begin_of(tokenizer, packing)
    tokens: list[int] = []
    labelled: list[bool] = []
    for group in _groups(part.read(), _MAX_CHARACTERS):
        examples = [example for example, _ in group]
        for (more, marks), (example, is_last) in zip(tokens_of(tokenizer, examples, False, masked), group, strict=True):
            tokens += more
            labelled += marks
            if not is_last:
                continue
            if example.messages:
                yield tokens, labelled, example.row
            else:
                yield [*begin, *tokens, *end], [*[False] * len(begin), *labelled, *[True] * len(end)], example.row
            tokens = []
            labelled = []
        progress(examples)


def _groups(examples: Iterator[tuple[Example, bool]], limit: int) -> Iterator[list[tuple[Example, bool]]]:
    group: list[tuple[Example, bool]] = []
    characters = 0
    for example in examples:
        group.append(example)
        characters += len(example[0].text)
        if len(group) == _GROUP or characters > limit:
            yield group
            group = []
            characters = 0
    if group:
        yield group


def _numbers(path: Path, values: Sequence[Any]) -> None:
    path.write_bytes(np.array(values, dtype="<i8").tobytes())


# Version of the folder's format. Another number is another key.
_FORMAT = 5
_KINDS: dict[str, Any] = {"stream": Windows, "blocks": TokenBlocks, "padded": PaddedDocuments, "documents": Packed}

# Tokens of plain text that begin a sample of text, and the most tokens of a prompt.
_OPENING = 8
_LONGEST = 256

TokenSamples = Windows | TokenBlocks | PaddedDocuments | Packed


@final
class TokenFiles:
    """The samples of a split in several files, one after the other.

    Args:
        parts: the samples of each file, of one kind.

    Attributes:
        shard_sizes: samples of each file.
        padded: samples differ in length.
    """

    # A sample needs no seed.
    draws_random = False

    def __init__(self, parts: Sequence[TokenSamples]) -> None:
        self._parts = list(parts)
        self.shard_sizes = [len(shard) for shard in parts]
        self.padded = isinstance(self._parts[0], PaddedDocuments)
        self._ends = np.cumsum(self.shard_sizes)
        self.seq_len = parts[0].seq_len
        self.items_per_sample = parts[0].items_per_sample

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return sum(shard.tokens for shard in self._parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the samples of a batch, in order."""
        samples: list[dict[str, Tensor]] = [{}] * len(indices)
        for shard, places, rows in self._by_part(indices):
            for position, sample in zip(places, shard.__getitems__(rows), strict=True):
                samples[position] = sample
        return samples

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.concatenate([shard.lengths for shard in self._parts])

    def longest(self, samples: Sequence[int]) -> int:
        """Return the tokens of the longest of these samples; only for padded documents."""
        return max(
            shard.longest(rows) for shard, _, rows in self._by_part(samples) if isinstance(shard, PaddedDocuments)
        )

    def _by_part(self, indices: Sequence[int]) -> Iterator[tuple[TokenSamples, list[int], list[int]]]:
        """Yield (file, places in `indices`, indices within the file) of each file."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        numbers = np.searchsorted(self._ends, wanted, side="right")
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            start = int(self._ends[number]) - self.shard_sizes[number]
            yield self._parts[number], places.tolist(), (wanted[places] - start).tolist()


Samples = TokenSamples | TokenFiles
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TokenizerToTrain:
    """A tokenizer to train on the training split: `--tokenizer train:VOCAB`."""

    vocab_size: int


@final
class TokenCorpus:
    """A prepared corpus.

    Attributes:
        train, evaluation: the samples of each split.
        vocab_size: tokens that may occur.
        separator: the token that ends a document; -1 if the tokenizer has none.
        fingerprint: hex; of everything that the corpus was made from.
        chat: its documents are conversations, by the tokenizer's template.
        prompts: its rows mark the answer, as conversations do.
        learned: (documents, tokens, tokens that are learned) of the training split.
        packing: `Packing.kind`.
        begin: the tokens that begin a document.
        folder: of its files.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], tokenizer: Tokenizer | None, packing: Packing) -> None:
        self.folder = folder
        self._known = tokenizer
        self.fingerprint: str = facts["fingerprint"]
        self.vocab_size: int = facts["vocab_size"]
        self.separator: int = facts["separator"]
        self.chat: bool = facts["chat"]
        self.prompts: bool = facts["prompts"]
        self.learned = tuple(facts[name]["train"] for name in ("documents", "tokens", "labels"))
        self.begin: list[int] = facts["begin"]
        self.packing = packing.kind
        shards: dict[str, list[str]] = facts.get("shards", {})
        self.train, self.evaluation = (
            self._samples(shards.get(name), name, packing, facts["masked"]) for name in ("train", "evaluation")
        )

    def _samples(self, shards: list[str] | None, name: str, packing: Packing, masked: bool) -> Samples:
        """Open a split: its shards, or its only file."""
        parts: list[TokenSamples] = []
        for shard in shards or [name]:
            parts.append(_KINDS[packing.kind](self.folder / f"{shard}.bin", self.vocab_size, packing.seq_len, masked))
        if shards is None:
            return parts[0]
        return TokenFiles(parts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer.

        A tokenizer that was trained here is loaded on first use, because training does not need it.
        """
        return self._known or ByteBPE.load(self.folder / "tokenizer.json")

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end a text: the separator, and those that end an assistant's turn."""
        tokens = {self.separator} - {-1}
        # Only a hub tokenizer makes conversations, and the protocol lacks its methods.
        return sorted(tokens | set(getattr(self.tokenizer, "chat_ends")() if self.chat else ()))  # noqa: B009

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a separator."""
        return self.tokenizer.encode_all([text])[0]

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a document's beginning `prompt`; in a conversation, the user's message."""
        if self.chat:
            # As in `ends`: only a hub tokenizer gets here.
            tokens: list[int] = getattr(self.tokenizer, "chat_prompt")(prompt)  # noqa: B009
            return tokens
        return [*self.begin, *self.encode(prompt)]

    def opening(self) -> list[int]:
        """Return the evaluation's first tokens: its prompt, or eight tokens of plain text."""
        sample = self.evaluation[0]
        inputs = sample["input_ids"].tolist()
        labels = sample["labels"].tolist()
        length = next((index for index, label in enumerate(labels) if label != IGNORED), 0) + 1
        # A split's first window has no separator before it.
        separated = self.packing == "stream"
        return [*self.begin * separated, *inputs[: length if 1 < length <= _LONGEST else _OPENING]]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(tokens)


def prepare(
    name: str,
    digest: str,
    documents: Callable[[float, Path], Documents],
    tokenizer: Tokenizer | TokenizerToTrain,
    packing: Packing,
    *,
    cache: Path,
    say: Say,
    prompt_packing: Packing | None = None,
) -> TokenCorpus:
    """Open the corpus, writing its tokens first if needed. Safe in several processes.

    Args:
        name: the value of --dataset-name.
        digest: of the documents' content.
        documents: opens them: (share for the evaluation, folder for temporary files) -> both splits.
        tokenizer: a tokenizer, or the size of one to train on the training split.
        cache: folder of prepared corpora.
        say: gets a line about the work in progress, if it takes time.
        prompt_packing: in place of `packing`, if the rows mark the answer.

    Raises:
        DataError: no such documents, or a split shorter than one sample.
        ConfigError: a cache that cannot be written.
    """
    key = _key(digest, tokenizer, packing, prompt_packing)
    folder = cache / f"tokens-{key}"

    def write(temporary: Path) -> dict[str, Any]:
        with TemporaryDirectory(dir=temporary, prefix="rows-") as scratch:
            say(f"preparing {name}")
            splits = documents(packing.fraction, Path(scratch))
            if splits.note:
                say(splits.note)
            split_packing = prompt_packing if splits.prompts and prompt_packing else packing
            facts = _write(splits, tokenizer, split_packing, temporary, say)
            splits.check()
        return {"fingerprint": key, "name": name, **facts}

    facts = fill_once(folder, write, say=say, label=name)
    for note in facts["notes"]:
        say(f"--dataset-name {name}: {note}")
    if facts["prompts"] and prompt_packing:
        packing = prompt_packing
    corpus = TokenCorpus(folder, facts, None if isinstance(tokenizer, TokenizerToTrain) else tokenizer, packing)
    for split, samples in (("train", corpus.train), ("evaluation", corpus.evaluation)):
        check_split(name, split, len(samples), facts, packing)
    return corpus


def check_split(name: str, part: str, samples: int, facts: dict[str, Any], packing: Packing) -> None:
    """Raise DataError if a split has no sample, or no label.

    Args:
        name: the value of --dataset-name.
        part: "train" or "evaluation".
        samples: of the split.
        facts: of the corpus, with its tokens and labels.
    """
    subject = f"--dataset-name {name}: its {part} split has"
    if not facts["labels"][part] and facts["tokens"][part]:
        raise DataError(
            f"{subject} no labels: no completion and no assistant turn within --seq-len {packing.seq_len}; raise it, "
            "or set --data.labels all"
        )
    if not samples:
        least = {"stream": "window of --seq-len {} + 1", "blocks": "block of --seq-len {}"}
        unit = least.get(packing.kind, "document").format(packing.seq_len)
        raise DataError(
            f"{subject} {facts['tokens'][part]} tokens, fewer than one {unit}; add text, lower --seq-len or raise "
            "--data.evaluation"
        )


def _key(digest: str, tokenizer: Tokenizer | TokenizerToTrain, packing: Packing, prompt_packing: Packing | None) -> str:
    trained = isinstance(tokenizer, TokenizerToTrain)
    tokenizer_id = (
        {**SETTINGS, "vocab_size": tokenizer.vocab_size} if trained else getattr(tokenizer, "fingerprint", "")
    )
    # Windows of any length share one file.
    length = 0 if packing.kind == "stream" else packing.seq_len
    parts = [_FORMAT, digest, tokenizer_id, packing.kind, length, packing.fraction, packing.labels]
    parts += [prompt_packing.kind, prompt_packing.seq_len] if prompt_packing else []
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _write(
    documents: Documents, tokenizer: Tokenizer | TokenizerToTrain, packing: Packing, folder: Path, say: Say
) -> dict[str, Any]:
    tokenizer, facts = begin_corpus([documents.train], documents.prompts, tokenizer, packing, folder, say)
    for name, split in (("train", documents.train), ("evaluation", documents.evaluation)):
        report = _progress(name, split, say)
        path = folder / f"{name}.bin"
        flags = {"masked": facts["masked"], "prompts": documents.prompts}
        written = write_split(tokenizer, split, packing, path, **flags, progress=report)
        for count in ("documents", "tokens", "labels"):
            facts[count][name] = getattr(written, count)
        facts["notes"] += written.notes(name, packing.seq_len)
    return facts


def begin_corpus(
    train: Sequence[HubSplit],
    prompts: bool,
    tokenizer: Tokenizer | TokenizerToTrain,
    packing: Packing,
    folder: Path,
    say: Say,
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train the tokenizer if needed; return it with the facts of an empty corpus.

    Args:
        train: the documents of the training split, in parts.
        prompts: the rows mark the answer.
        folder: gets tokenizer.json.

    Raises:
        DataError: `packing` wants answers, and the rows do not mark them.
    """
    if packing.labels == "completion" and not prompts:
        raise DataError(
            "--data.labels completion: the rows do not mark the answer; use rows with the columns prompt and "
            "completion, instruction and output, or messages, or drop the flag"
        )
    if isinstance(tokenizer, TokenizerToTrain):
        say(f"learning a vocabulary of {tokenizer.vocab_size} tokens")
        texts = (example.text for split in train for example, _ in split.read())
        trained = ByteBPE.train(texts, tokenizer.vocab_size)
        trained.save(folder / "tokenizer.json")
        tokenizer = trained
    first_example = next((example for split in train for example, _ in split.read()), Example(""))
    begin = islice(train[0].read(), _GROUP) if first_example.messages else ()
    with_tools = None
    for example, _ in begin:
        if example.tools:
            with_tools = example
            break
    notes = []
    if with_tools and not _renders_tools(tokenizer, with_tools):
        notes.append("the column tools is ignored: the tokenizer's chat template does not use it")
    return tokenizer, {
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "masked": prompts and packing.answers,
        "chat": bool(first_example.messages),
        "prompts": prompts,
        "begin": _begin_of(tokenizer, packing),
        "documents": {},
        "tokens": {},
        "labels": {},
        "notes": notes,
    }


def _renders_tools(tokenizer: Tokenizer, example: Example) -> bool:
    """Whether the tokenizer's template gives the tools to the assistant."""
    return tokens_of(tokenizer, [example]) != tokens_of(tokenizer, [replace(example, tools=())])


def _progress(name: str, part: HubSplit, say: Say) -> Callable[[Sequence[Example]], None]:
    """Report each quarter of the split."""
    weight = 0
    percent = 0

    def report(examples: Sequence[Example]) -> None:
        nonlocal weight, percent
        weight += sum(map(part.weigh, examples))
        reached = min(100, 100 * weight // max(1, part.size))
        if reached >= percent + 25:
            percent = reached
            say(f"tokenizing the {name} split: {reached}%")

    return report
