"""Plain text files as documents for any tokenizer. Needs no package beyond lockstep's own.

found = plain_rows("notes/")
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from lockstep.data.hub import Documents, Part, Rows
from lockstep.data.sources import Span, find, pieces, split

__all__ = ["plain_rows"]

_SPLIT_SEED = 0  # not the run's, so that runs with other seeds are evaluated on the same text


def plain_rows(name: str) -> Rows:
    """The text files that `name` stands for, see `lockstep.data.sources.find`, which raises DataError."""
    sources = find(name)
    digest = xxhash.xxh3_128_hexdigest(repr([(source.name, source.digest) for source in sources]).encode())

    def documents(fraction: float, scratch: Path) -> Documents:
        train, evaluation = split(sources, fraction, _SPLIT_SEED)
        return Documents(_part(train), _part(evaluation))

    return Rows(digest, "", documents)


def _part(spans: list[Span]) -> Part:
    read: Callable[[], Iterator[tuple[str, bool]]] = lambda: pieces(spans)  # noqa: E731 - an iterator for each call
    return Part(sum(span.stop - span.start for span in spans), read, len)
