"""Parses Python: what this Python knows, the f-strings that only 3.12 knows, and the `async=` of those before 3.7.

tree = parsed(text)      # raises what compile() raises

Since 3.12 (PEP 701) an expression within an f-string may hold the quotes that the f-string has itself:
`f"{config["name"]}"`. Such inner strings are given the other quotes, by which nothing moves.

Until 3.7 made it a keyword, `async` was what torch called `non_blocking` (`x.cuda(async=True)`).
"""

import ast
import re
import sys
import warnings

__all__ = ["parsed"]

# A string's beginning, or a comment.
BEGINS = re.compile(r"#[^\n]*|(?<![\w\"'])([A-Za-z]{0,2})(\"\"\"|'''|\"|')")
OTHER = {'"': "'", "'": '"'}
MAX_DEPTH = 8
ASYNC = re.compile(r"(?<=[(,\s])async(?=\s*=[^=])")
# A name as long as `async`, so that nothing moves.
NO_KEYWORD = "asynq"


def parsed(text: str, flags: int = ast.PyCF_ONLY_AST) -> ast.Module:
    """The tree of a text, which SyntaxWarnings do not keep from parsing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about somebody's escape sequences
        try:
            return _tree(text, flags)
        except SyntaxError as error:
            if ASYNC.search(text):
                return renamed(_tree(ASYNC.sub(NO_KEYWORD, text), flags))
            if sys.version_info >= (3, 12) or "f-string" not in str(error.msg):
                raise
            older = requoted(text)
            if older == text:
                raise
            return _tree(older, flags)


def _tree(text: str, flags: int) -> ast.Module:
    tree: ast.Module = compile(text, "file", "exec", flags, dont_inherit=True)
    return tree


def renamed(tree: ast.Module) -> ast.Module:
    """The tree, with what was `async` as the argument that it is now."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == NO_KEYWORD:
            node.arg = "non_blocking"
    return tree


def requoted(text: str) -> str:
    """The text with other quotes for the strings within f-strings that have the f-string's own; as long as before."""
    chars = list(text)
    at = 0
    while (match := BEGINS.search(text, at)) is not None:
        at = match.end() if match[2] is None else after_string(text, match, chars, "", 0)
    return "".join(chars)


def after_string(text: str, begin: re.Match[str], chars: list[str], outer: str, depth: int) -> int:
    """Where a string ends that begins there; `outer`: the quotes of the f-strings around it."""
    quotes = begin[2]
    formatted = "f" in begin[1].lower() and depth < MAX_DEPTH
    at, first = begin.end(), begin.start(2)
    while at < len(text) and not text.startswith(quotes, at):
        if text[at] == "\\" or (formatted and text.startswith("{{", at)):
            at += 2
        elif formatted and text[at] == "{":
            at = after_field(text, at + 1, chars, outer + quotes[0], depth + 1)
        else:
            at += 1
    inside = text[first + len(quotes) : at]
    free = OTHER[quotes[0]]
    if quotes in outer and free not in outer and len(quotes) == 1 and free not in inside and "\\" not in inside:
        chars[first : first + 1] = chars[at : at + 1] = [free]
    return at + len(quotes)


def after_field(text: str, at: int, chars: list[str], outer: str, depth: int) -> int:
    """Where a replacement field ends whose expression begins there."""
    open_ = 1
    while at < len(text) and open_:
        begin = BEGINS.match(text, at) if text[at].isalpha() or text[at] in "\"'" else None
        if begin is not None and begin[2] is not None:
            at = after_string(text, begin, chars, outer, depth)
            continue
        open_ += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at
