"""Check an error by its class and by the flags, fields, files and values that it names, never by its sentence.

with refuses(ConfigError, "--max-steps", 8):
    Config(max_steps=-8)

assert names(line, "rank 1", "step 3")
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["names", "refuses"]


@contextmanager
def refuses(kind: type[BaseException], *named: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Require an error of `kind` whose text names each of `named`.

    Args:
        kind: class of the error.
        named: flags, fields, files and values, each found as a whole word.
    """
    with pytest.raises(kind) as caught:
        yield caught
    names(str(caught.value), *named)


def names(text: str, *named: object) -> bool:
    """Require that `text` names each of `named` as a whole word; return True."""
    for each in named:
        assert re.search(rf"(?<!\w){re.escape(str(each))}(?!\w)", text), f"{each!r} is not named in: {text}"
    return True
