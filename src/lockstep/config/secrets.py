"""Mask secrets and escape control characters in text.

    logger.info(mask("cloning https://me:hunter2@host/x"))    # cloning https://***@host/x

`mask` applies to all text that is printed, logged or stored in a run's folder; numbers stay. It prefers to hide too
much: an unquoted value after `--token` or `API_KEY=` is hidden up to the next blank.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from urllib.parse import quote

__all__ = ["environment_snapshot", "is_secret_name", "mask", "mask_args", "printable"]

MASK = "***"

# Shorter values are words such as "true" or "local"; hiding them everywhere would ruin every line.
_MIN_LENGTH = 8

_SECRET_VARIABLE = re.compile(
    r"KEY(?!BOARD|MAP)|SECRET|PASSW|PASSPHRASE|PASSCODE|(?<![A-Z])PASS(?![A-Z])|_PWD|CREDENTIAL|COOKIE"
    r"|AUTH(?!ORS?(?:_|$))"
    r"|(?<!MAX_)(?<!NUM_)(?<!PER_)(?<!PAD_)(?<!EOS_)(?<!BOS_)(?<!UNK_)TOKEN(?!IZ)",
    re.IGNORECASE,
)

# In text the word must end a name: `vocab_tokens=4096` and `tokens/s: 12` are not secrets.
_NAME = (
    r"[\w.-]*(?:api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|auth[_-]?key|account[_-]?key|_key(?:[_-]?id)?"
    r"|(?<!pad[_-])(?<!eos[_-])(?<!bos[_-])(?<!unk[_-])token|secret|password|passwd|passphrase|_pwd|credentials?"
    r"|authorization|signature|cookie)(?:[_-]?(?:\d+|value))?"
)
_NAME_WORDS = "key token secret password passwd passphrase _pwd credential authorization signature cookie"
_QUOTED = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
# So that masking twice changes nothing.
_MASKED = r"\*{3}(?=[,}\])]*(?:\s|$))"
_VALUE = rf"(?P<secret>{_QUOTED}|{_MASKED}|(?:(?:bearer|basic|token|digest)\s+)?\S+)"

# The group `secret` is hidden. Each pattern is searched in the original text, so that no mask can break another.
# Every match has one of the words before its pattern. Most lines have none of them, and a search for words takes a
# twentieth of the time.
_PATTERNS = tuple(
    (tuple(words.split()), re.compile(pattern, re.IGNORECASE | re.DOTALL))
    for words, pattern in (
        ("://", r"://(?P<secret>[^\s/?#:@]*:[^\s\"'<>]*|[^\s/?#]+)@"),
        (
            "key= token= secret= password= passwd= pwd= auth= sig= signature= credential= code=",
            r"[?&;](?:[\w.-]*(?:key|token|secret|password|passwd|pwd|auth|sig|signature|credential|code))="
            r"(?P<secret>[^&#\s\"'<>]+)",
        ),
        (_NAME_WORDS, rf"(?<![?&;\w.-]){_NAME}[\"']?\s*[=:]\s*{_VALUE}"),
        (
            f"{_NAME_WORDS} auth pass pwd",
            rf"(?<![\w-])--?(?:{_NAME}|key|auth|pass|pwd)(?:\s*=\s*|[\"']?,?\s+){_VALUE}",
        ),
        ("bearer", r"\bbearer\s+(?P<secret>[^\s\"']+)"),
        (
            "key token secret password login credential",
            r"(?:key|token|secret|password|login|credentials?)\b\W{0,5}(?:(?:is|was|for|of)\W+)?"
            r"(?P<secret>[0-9a-f]{20,})",
        ),
        (
            "hf_ gh github_pat_ glpat- sk- npm_ pypi- akia asia xox aiza eyj",
            r"(?<![a-z0-9])(?P<secret>hf_[a-z0-9]{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
            r"|npm_\w{30,}|pypi-[\w-]{30,}|A[KS]IA[0-9A-Z]{12,}|xox[a-z]-[\w-]{8,}|AIza[\w-]{30,}"
            r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)",
        ),
        ("-----begin", r"(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|$))"),
    )
)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable or flag of this name probably holds a secret (WANDB_API_KEY, --hub-token, DB_PASSWORD)."""
    return _SECRET_VARIABLE.search(re.sub(r"[.-]", "_", name)) is not None


def mask(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Replace every secret in the text by `***`.

    Secrets are: user and password in a URL, secret parameters of a URL, values of names and flags that sound secret,
    `Bearer` values, well-known forms of tokens, private keys, and the values, of at least 8 characters, of environment
    variables whose names sound secret.

    Args:
        text: any text.
        environ: the environment variables; None: of this process, now or as in `environment_snapshot`.
    """
    if environ is None:
        environ = _snapshot.get() or os.environ
    spans = sorted([*_environment_values(text, environ), *_pattern_matches(text)])
    pieces = []
    position = 0
    for start, end in spans:
        if start >= position:
            pieces += [text[position:start], MASK]
        # Overlapping secrets get one mask.
        position = max(position, end)
    return "".join(pieces) + text[position:]


_snapshot: ContextVar[Mapping[str, str] | None] = ContextVar("snapshot", default=None)


@contextlib.contextmanager
def environment_snapshot() -> Iterator[None]:
    """Let each `mask` in the block use the environment of its start.

    Reading the environment takes most of the time of a `mask`, and a report has hundreds.
    """
    token = _snapshot.set(dict(os.environ))
    try:
        yield
    finally:
        _snapshot.reset(token)


def mask_args(argv: Iterable[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Mask the arguments of a command; one after a flag that sounds secret (`--hub-token`) entirely."""
    result = []
    hide = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = is_secret_name(name) and re.fullmatch(r"[\w.-]+", name) is not None
        if hide and not argument.startswith("--"):
            result.append(MASK)
        elif secret and equals:
            result.append(f"{name}={MASK}")
        else:
            result.append(mask(argument, environ))
        hide = secret and not equals and argument.startswith("-")
    return result


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters, direction overrides and lone surrogates (`\x1b`, `\u202e`).

    Text from outside could otherwise move the cursor, recolour the terminal or forge a line of the log.

    Args:
        text: any text.
        keep: characters to leave, such as a newline.
    """
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _escape(character: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    code = ord(character)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def _environment_values(text: str, environ: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    if len(text) < _MIN_LENGTH:
        return
    # Names first, because reading all values takes longer than everything else here.
    for name in filter(is_secret_name, environ):
        value = environ.get(name, "")
        if len(value) >= _MIN_LENGTH:
            # Also as quoted in a URL and as printed in a list.
            for form in {value, quote(value, safe="", errors="replace"), repr(value)[1:-1]}:
                start = text.find(form)
                while start >= 0:
                    yield start, start + len(form)
                    start = text.find(form, start + len(form))


def _pattern_matches(text: str) -> Iterator[tuple[int, int]]:
    # Some letters outside ASCII match k, s and i if case is ignored.
    folded = text.lower() if text.isascii() else ""
    for words, pattern in _PATTERNS:
        if not folded or any(map(folded.__contains__, words)):
            for match in pattern.finditer(text):
                yield match.span("secret")
