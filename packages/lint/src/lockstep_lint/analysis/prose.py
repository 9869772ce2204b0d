"""A file's text without what people wrote for people: a word in a comment or a docstring is no code."""

import ast
import re
from collections.abc import Iterable

__all__ = ["bare", "blanked", "uncommented"]

# A string or a comment, whichever begins first: so that a "#" in a string is no comment.
TOKENS = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL
)


def uncommented(text: str) -> str:
    """The text without its comments; its lines stay where they are."""
    if "#" not in text:
        return text
    return TOKENS.sub(lambda match: "" if match[0][0] == "#" else match[0], text)


def bare(text: str) -> str:
    """The text with comments taken out and strings emptied; their line ends stay."""
    return TOKENS.sub(lambda match: "\n" * match[0].count("\n") if match[0][0] == "#" else _empty(match[0]), text)


def _empty(string: str) -> str:
    quote = string[:3] if string[:3] in ('"""', "'''") else string[0]
    return quote + "\n" * string.count("\n") * (len(quote) == 3) + quote


def blanked(text: str, statements: Iterable[ast.stmt]) -> str:
    """The text with the statements' lines emptied, where nothing else stands on them."""
    lines = text.split("\n")
    for stmt in statements:
        if not lines[stmt.lineno - 1][: stmt.col_offset].strip():
            for line in range(stmt.lineno - 1, min(stmt.end_lineno or stmt.lineno, len(lines))):
                lines[line] = ""
    return "\n".join(lines)
