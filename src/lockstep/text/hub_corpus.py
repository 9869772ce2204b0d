"""Any documents, by any tokenizer, as files of tokens that are memory-mapped.

    corpus = prepare(name, rows.digest, rows.documents, tokenizer, packing, cache=cache, say=print)
    corpus.train[0]["input_ids"]            # int64 [seq_len]

Four packings. "stream": a separator after each document, windows that overlap by one token, each predicting seq_len.
"blocks": every 1000 examples are joined with nothing between them and cut into blocks of seq_len, the rest of each
thousand left out; a block predicts its own seq_len - 1 following tokens. That is what run_clm_no_trainer.py of the
package `transformers` does in its `group_texts`, with the batch size that `datasets.map` has by default.
"padded": each document is a sample. "documents": windows filled with whole documents that do not see one another.

The samples of a split are one indexed set that every rank opens whole. No rank owns a part of it, so there are no parts
that could differ in length.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import xxhash

from lockstep.errors import DataError
from lockstep.text.corpus import IGNORED, Blocks, Windows
from lockstep.text.documents import Packed, Padded
from lockstep.text.examples import Example, Tokenizer
from lockstep.text.hub import Documents, Part
from lockstep.text.hub_cache import prepared
from lockstep.text.tokenize import SETTINGS, ByteBPE
from lockstep.text.written import Packing, begin_of, write_split

__all__ = ["Samples", "TokenCorpus", "Trained", "prepare"]

_FORMAT = 3  # of the folder; another number is another key
_KINDS: dict[str, Any] = {"stream": Windows, "blocks": Blocks, "padded": Padded, "documents": Packed}

_OPENING, _LONGEST = 8, 256  # tokens of a text, and the most of a prompt, that a sample of text begins with

Samples = Windows | Blocks | Padded | Packed
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """A tokenizer that is yet to be trained, on the training split: `--tokenizer train:VOCAB`."""

    vocab_size: int


@final
class TokenCorpus:
    """A prepared corpus.

    Attributes:
        train, evaluation: the samples of each split.
        vocab_size: tokens that may occur.
        separator: the token that ends a document; -1 where the tokenizer has none.
        fingerprint: hex; what the corpus was made from.
        chat: its documents are conversations, by the tokenizer's template.
        begin: what a document begins with.
        folder: where its files are.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], tokenizer: Tokenizer | None, packing: Packing) -> None:
        self.folder, self._known = folder, tokenizer
        self.fingerprint: str = facts["fingerprint"]
        self.vocab_size: int = facts["vocab_size"]
        self.separator: int = facts["separator"]
        self.chat: bool = facts["chat"]
        self.begin: list[int] = facts["begin"]
        self.train: Samples
        self.evaluation: Samples
        self.train, self.evaluation = (
            _KINDS[packing.kind](folder / f"{name}.bin", self.vocab_size, packing.seq_len, facts["masked"])
            for name in ("train", "evaluation")
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What made its tokens. One that was trained here is read when it is asked for: training needs tokens alone."""
        return self._known or ByteBPE.load(self.folder / "tokenizer.json")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without a separator."""
        return self.tokenizer.encode_all([text])[0]

    def begun(self, prompt: str) -> list[int]:
        """The tokens with which a document begins that begins with `prompt`; in a conversation a user says it."""
        if self.chat:
            found: list[int] = getattr(self.tokenizer, "chat_prompt")(prompt)  # noqa: B009  only such a one made it
            return found
        return [*self.begin, *self.encode(prompt)]

    def opening(self) -> list[int]:
        """The tokens with which the evaluation's first sample begins: its prompt, of a plain text eight tokens."""
        sample = self.evaluation[0]
        inputs, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        given = next((place for place, label in enumerate(labels) if label != IGNORED), 0) + 1
        begun = isinstance(self.evaluation, Windows)  # its first window has no separator before it
        return [*self.begin * begun, *inputs[: given if 1 < given <= _LONGEST else _OPENING]]

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
    for note in facts["notes"]:
        say(f"--dataset-name {name}: {note}")
    corpus = TokenCorpus(folder, facts, None if isinstance(tokenizer, Trained) else tokenizer, packing)
    for part, samples in (("train", corpus.train), ("evaluation", corpus.evaluation)):
        _check_split(name, part, len(samples), facts, packing)
    return corpus


def _check_split(name: str, part: str, samples: int, facts: dict[str, Any], packing: Packing) -> None:
    found = f"--dataset-name {name}: its {part} split has"
    if not facts["labels"][part] and facts["tokens"][part]:
        raise DataError(
            f"{found} nothing to learn: no completion, and no turn of an assistant, lies within --seq-len "
            f"{packing.seq_len}; give a larger one, other rows, or --data.labels all"
        )
    if not samples:
        least = {"stream": "window of --seq-len {} + 1", "blocks": "block of --seq-len {}"}
        kind = least.get(packing.kind, "document").format(packing.seq_len)
        raise DataError(
            f"{found} {facts['tokens'][part]} tokens, fewer than one {kind}; give more text, a smaller --seq-len or a "
            "larger --data.evaluation"
        )


def _key(digest: str, tokenizer: Tokenizer | Trained, packing: Packing) -> str:
    trained = isinstance(tokenizer, Trained)
    how = {**SETTINGS, "vocab_size": tokenizer.vocab_size} if trained else getattr(tokenizer, "fingerprint", "")
    length = 0 if packing.kind == "stream" else packing.seq_len  # windows of any length share one file
    made = [_FORMAT, digest, how, packing.kind, length, packing.fraction, packing.labels]
    return xxhash.xxh3_128_hexdigest(json.dumps(made, sort_keys=True).encode())


def _write(
    found: Documents, tokenizer: Tokenizer | Trained, packing: Packing, folder: Path, say: Say
) -> dict[str, Any]:
    if packing.labels == "completion" and not found.prompts:
        raise DataError(
            "--data.labels completion: the data does not say which part of a row is the answer; give rows with the "
            "columns prompt and completion, instruction and output, or messages, or leave it out"
        )
    if isinstance(tokenizer, Trained):
        say(f"learning a vocabulary of {tokenizer.vocab_size} tokens")
        trained = ByteBPE.train((example.text for example, _ in found.train.read()), tokenizer.vocab_size)
        trained.save(folder / "tokenizer.json")
        tokenizer = trained
    masked = found.prompts and packing.answers
    first = next((example for example, _ in found.train.read()), Example(""))
    facts: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "masked": masked,
        "chat": bool(first.messages),
        "begin": begin_of(tokenizer, packing),
        "tokens": {},
        "labels": {},
        "notes": [],
    }
    for name, part in (("train", found.train), ("evaluation", found.evaluation)):
        report, path = _progress(name, part, say), folder / f"{name}.bin"
        written = write_split(tokenizer, part, packing, path, masked=masked, prompts=found.prompts, progress=report)
        facts["tokens"][name], facts["labels"][name] = written.tokens, written.labels
        facts["notes"] += written.notes
    return facts


def _progress(name: str, part: Part, say: Say) -> Callable[[Sequence[Example]], None]:
    """Says each quarter of the split."""
    done, told = 0, 0

    def report(examples: Sequence[Example]) -> None:
        nonlocal done, told
        done += sum(map(part.weigh, examples))
        reached = min(100, 100 * done // max(1, part.size))
        if reached >= told + 25:
            told = reached
            say(f"tokenizing the {name} split: {reached}%")

    return report
