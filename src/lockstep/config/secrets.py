"""What may leave this process as text: secrets masked, control characters made visible.

    logger.info(mask("cloning https://me:hunter2@host/x"))    # cloning https://***@host/x

`mask` stands before everything that is written for people or kept in a run's folder. It would rather hide too much than
too little: an unquoted value after `--token` or `API_KEY=` is hidden up to the next blank.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote

__all__ = ["is_secret_name", "mask", "mask_args", "printable"]

MASK = "***"

# Shorter values are words such as "true" or "local"; hiding them wherever they appear would ruin every line.
_SHORTEST = 8

_SECRET_VARIABLE = re.compile(
    r"KEY(?!BOARD|MAP)|SECRET|PASSW|PASSPHRASE|PASSCODE|(?<![A-Z])PASS(?![A-Z])|_PWD|CREDENTIAL|COOKIE"
    r"|AUTH(?!ORS?(?:_|$))"
    r"|(?<!MAX_)(?<!NUM_)(?<!PER_)(?<!PAD_)(?<!EOS_)(?<!BOS_)(?<!UNK_)TOKEN(?!IZ)",
    re.IGNORECASE,
)

# In running text the word stands at the end of a name: `vocab_tokens=4096` and `tokens/s: 12` are no secrets.
_NAME = (
    r"[\w.-]*(?:api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|auth[_-]?key|account[_-]?key|_key(?:[_-]?id)?"
    r"|(?<!pad[_-])(?<!eos[_-])(?<!bos[_-])(?<!unk[_-])token|secret|password|passwd|passphrase|_pwd|credentials?"
    r"|authorization|signature|cookie)(?:[_-]?(?:\d+|value))?"
)
_QUOTED = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
_HIDDEN = r"\*{3}(?=[,}\])]*(?:\s|$))"  # masking twice is the same as once
_VALUE = rf"(?P<secret>{_QUOTED}|{_HIDDEN}|(?:(?:bearer|basic|token|digest)\s+)?\S+)"

# The group `secret` is what is hidden. Each is searched in the original text, so that one mask cannot break another.
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"://(?P<secret>[^\s/?#:@]*:[^\s\"'<>]*|[^\s/?#]+)@",
        r"[?&;](?:[\w.-]*(?:key|token|secret|password|passwd|pwd|auth|sig|signature|credential|code))="
        r"(?P<secret>[^&#\s\"'<>]+)",
        rf"(?<![?&;\w.-]){_NAME}[\"']?\s*[=:]\s*{_VALUE}",
        rf"(?<![\w-])--?(?:{_NAME}|key|auth|pass|pwd)(?:\s*=\s*|[\"']?,?\s+){_VALUE}",
        r"\bbearer\s+(?P<secret>[^\s\"']+)",
        r"(?:key|token|secret|password|login|credentials?)\b\W{0,5}(?:(?:is|was|for|of)\W+)?(?P<secret>[0-9a-f]{20,})",
        r"(?<![a-z0-9])(?P<secret>hf_[a-z0-9]{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
        r"|npm_\w{30,}|pypi-[\w-]{30,}|A[KS]IA[0-9A-Z]{12,}|xox[a-z]-[\w-]{8,}|AIza[\w-]{30,}"
        r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)",
        r"(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|$))",
    )
)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable or flag of this name is taken to hold a secret (WANDB_API_KEY, --hub-token, DB_PASSWORD)."""
    return _SECRET_VARIABLE.search(re.sub(r"[.-]", "_", name)) is not None


def mask(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text with every secret in it replaced by `***`.

    Hidden are: user and password in a URL, secret parameters of a URL, values given to names and flags that sound
    secret, `Bearer` values, well-known token shapes, private keys, and, wherever they appear, values of at least 8
    characters of environment variables whose names sound secret.

    Args:
        environ: where those values are looked up; None means this process's environment, as it is now.
    """
    spans = sorted([*_known_values(text, os.environ if environ is None else environ), *_shapes(text)])
    pieces, done = [], 0
    for start, end in spans:
        if start >= done:
            pieces += [text[done:start], MASK]
        done = max(done, end)  # overlapping secrets become one mask
    return "".join(pieces) + text[done:]


def mask_args(argv: Iterable[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """A command line's arguments, each masked; the one after a flag that sounds secret (`--hub-token`) wholly."""
    masked, hide = [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = is_secret_name(name) and re.fullmatch(r"[\w.-]+", name) is not None
        if hide and not argument.startswith("--"):
            masked.append(MASK)
        elif secret and equals:
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask(argument, environ))
        hide = secret and not equals and argument.startswith("-")
    return masked


def printable(text: str, keep: str = "") -> str:
    r"""The text with control characters, direction overrides and lone surrogates written out (`\x1b`, `\u202e`).

    What comes from outside could otherwise move the cursor, recolour the terminal or forge a line of the log.

    Args:
        keep: characters that stay, such as a newline in text of several lines.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _written(found[0]), text)


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _written(character: str) -> str:
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    code = ord(character)
    return known or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def _known_values(text: str, environ: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    for name, value in environ.items():
        if len(value) >= _SHORTEST and is_secret_name(name):
            # Also as it looks inside a URL, or a list that was printed.
            for form in {value, quote(value, safe="", errors="replace"), repr(value)[1:-1]}:
                start = text.find(form)
                while start >= 0:
                    yield start, start + len(form)
                    start = text.find(form, start + len(form))


def _shapes(text: str) -> Iterator[tuple[int, int]]:
    for pattern in _PATTERNS:
        for found in pattern.finditer(text):
            yield found.span("secret")
