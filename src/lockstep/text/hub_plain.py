"""Plain text files as documents for any tokenizer. Needs no package beyond lockstep's own.

rows = plain_rows("notes/")
"""

from collections.abc import Iterator
from pathlib import Path

import xxhash

from lockstep.errors import DataError
from lockstep.text.examples import Example
from lockstep.text.hub import Documents, Part, Rows
from lockstep.text.sources import Source, Span, find, pieces, split
from lockstep.units import bytes_text

__all__ = ["plain_rows"]

_SPLIT_SEED = 0  # not the run's, so that runs with other seeds are evaluated on the same text


def plain_rows(name: str) -> Rows:
    """The text files that `name` stands for, see `lockstep.text.sources.find`, which raises DataError."""
    sources = find(name)

    def documents(fraction: float, scratch: Path) -> Documents:
        train, evaluation = split(sources, fraction, _SPLIT_SEED)
        return Documents(_part(train), _part(evaluation), _note(sources), check)

    def check() -> None:
        if _digest(find(name)) != _digest(sources):
            raise DataError(f"--dataset-name {name}: its files changed while they were prepared; start again")

    return Rows(_digest(sources), "", documents)


def _digest(sources: list[Source]) -> str:
    return xxhash.xxh3_128_hexdigest(repr([(source.name, source.digest) for source in sources]).encode())


def _note(sources: list[Source]) -> str:
    unreadable = sum(not source.readable for source in sources)
    size = bytes_text(sum(source.size for source in sources))
    return f"{len(sources)} files ({size}), {unreadable} of them empty or not UTF-8 and left out"


def _part(spans: list[Span]) -> Part:
    def read() -> Iterator[tuple[Example, bool]]:
        return ((Example(text), last) for text, last in pieces(spans))

    return Part(sum(span.stop - span.start for span in spans), read, lambda example: len(example.text))
