"""What any documents become in each packing: every token that is learned is predicted once, from the one before it."""

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.tasks.language_model import LanguageModel
from lockstep.text.corpus import IGNORED, TokenBlocks, Windows
from lockstep.text.documents import Example, Packed, PaddedDocuments
from lockstep.text.token_store import Packing, write_split

SEPARATOR = 1


class Letters:
    """A token a character; before a text of its own, in blocks, what many put there by themselves."""

    vocab_size, separator = 3000, SEPARATOR

    def encode_all(self, texts, special=False):
        return [[SEPARATOR] * special + [ord(letter) for letter in text] for text in texts]


# (length, characters of the prompt) of each document
DOCUMENTS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=12)


def made(shapes):
    """Examples in which no character comes twice."""
    letters = itertools.count(2)
    return [Example("".join(chr(next(letters)) for _ in range(length)), min(given, length)) for length, given in shapes]


def check_work(samples):
    """What sharing out a step goes by: the tokens of a batch with its padding, known without loading it."""
    works = [LanguageModel.work(None, samples, [place]) for place in range(len(samples))]
    lengths = [len(samples[place]["input_ids"]) for place in range(len(samples))]
    assert works == (lengths if isinstance(samples, PaddedDocuments) else [None] * len(lengths))
    if isinstance(samples, PaddedDocuments) and lengths:
        assert LanguageModel.work(None, samples, range(len(lengths))) == len(lengths) * max(lengths)


def split(kind, examples, seq_len, masked, reader):
    """The split's samples, read from files as a run's are, and what was said of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        part = SimpleNamespace(read=lambda: iter([(example, True) for example in examples]))
        packing = Packing(kind, seq_len, 0.1)
        written = write_split(
            Letters(), part, packing, path, masked=masked, prompts=False, progress=lambda examples: None
        )
        samples = reader(path, Letters.vocab_size, seq_len, masked)
        check_work(samples)
        return [samples[index] for index in range(len(samples))], written


def steps_of(example, masked):
    """(token, the next one, whether that is learned) through a document that stands apart."""
    tokens = [SEPARATOR, *map(ord, example.text), SEPARATOR]
    learned = [False, *(not masked or place >= example.given for place in range(len(example.text))), True]
    return list(zip(tokens, tokens[1:], learned[1:], strict=False))


def predicted(samples):
    return [
        (int(token), int(label))
        for sample in samples
        for token, label in zip(sample["input_ids"], sample["labels"], strict=True)
        if label != IGNORED
    ]


@given(DOCUMENTS, st.integers(2, 20), st.booleans())
@settings(max_examples=40, deadline=None)
def test_documents_apart_lose_no_label_and_see_no_other_document(shapes, seq_len, masked):
    examples = made(shapes)
    wanted = [(a, b) for example in examples for a, b, learned in steps_of(example, masked) if learned]
    padded, written = split("padded", examples, seq_len, masked, PaddedDocuments)
    assert predicted(padded) == wanted  # once each, and in order
    assert written.labels == len(wanted)
    assert all(1 <= len(sample["input_ids"]) <= seq_len for sample in padded)
    windows, _ = split("documents", examples, seq_len, masked, Packed)
    assert sorted(predicted(windows)) == sorted(wanted)
    follows = {(a, b) for example in examples for a, b, _ in steps_of(example, masked)}
    for sample in windows:
        assert {len(values) for values in sample.values()} == {seq_len}
        for number in range(int(sample["documents"].max()) + 1):
            of = sample["documents"] == number
            tokens, labels = sample["input_ids"][of].tolist(), sample["labels"][of].tolist()
            assert sample["positions"][of].tolist() == list(range(len(tokens)))
            if any(tokens):  # else it is what was left of the window
                assert set(itertools.pairwise(tokens)) <= follows
                assert all(label in (IGNORED, token) for label, token in zip(labels, tokens[1:], strict=False))
            else:
                assert set(labels) <= {IGNORED}


@given(DOCUMENTS, st.integers(2, 20), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_stream_and_blocks_have_every_token_once_and_in_order(shapes, seq_len, masked):
    examples = made(shapes)
    for kind, reader in (("stream", Windows), ("blocks", TokenBlocks)):
        end = [SEPARATOR] if kind == "stream" else []
        front = [SEPARATOR] * (kind == "blocks")
        joined = [token for example in examples for token in (*front, *map(ord, example.text), *end)]
        learned = [
            mark
            for example in examples
            for mark in (
                *(not masked or not example.given for _ in front),
                *(not masked or place >= example.given for place in range(len(example.text))),
                *map(bool, end),
            )
        ]
        samples, _ = split(kind, examples, seq_len, masked, reader)
        count = max(0, len(joined) - 1) // seq_len if kind == "stream" else len(joined) // seq_len
        assert len(samples) == count
        inputs = torch.cat([sample["input_ids"] for sample in samples]).tolist() if samples else []
        assert inputs == joined[: count * seq_len]
        for number, sample in enumerate(samples):
            for place, label in enumerate(sample["labels"].tolist()):
                after = number * seq_len + place + 1
                within = kind == "stream" or place + 1 < seq_len
                assert label == (joined[after] if within and learned[after] else IGNORED)
