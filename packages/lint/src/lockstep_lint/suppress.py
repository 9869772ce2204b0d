"""`# noqa: LS004` for a line, `# lockstep: noqa` for a file; those that silence nothing are reported."""

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.source import Source
from lockstep_lint.finding import Confidence, Finding, Severity

__all__ = ["UNUSED", "Silencer"]

# The code under which a comment that silences nothing is reported.
UNUSED = "LS900"
CODES = r"(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)"
LINE = re.compile(rf"#\s*noqa(?::\s*{CODES})?", re.IGNORECASE)
OURS = re.compile(r"noqa[^\n]*\bLS[0-9]", re.IGNORECASE)
FILE = re.compile(rf"#\s*lockstep:\s*noqa(?::\s*{CODES})?", re.IGNORECASE)


@dataclass(frozen=True)
class _Comment:
    """A comment that silences: its place, and the LS codes that it names (none: all)."""

    line: int
    column: int
    codes: frozenset[str]
    blanket: bool


class Silencer:
    """The silencing comments of one file."""

    def __init__(self, source: Source, codes: frozenset[str]) -> None:
        self.source = source
        self.codes = codes
        self.whole: list[_Comment] = []
        self.lines: dict[int, _Comment] = {}

    def read(self, found: bool) -> None:
        """Reads the file's comments, if one can matter: it names a rule of ours, or there is something to silence."""
        text = self.source.text
        if "noqa" in text.lower() and (found or OURS.search(text)):
            for line, column, comment in comments(self.source):
                self.add(line, column, comment)

    def add(self, line: int, column: int, text: str) -> None:
        match = FILE.search(text)
        whole = match is not None
        match = match or LINE.search(text)
        if match is None:
            return
        named = frozenset(re.findall(r"[A-Z]+[0-9]+", (match["codes"] or "").upper()))
        ours = frozenset(code for code in named if code.startswith("LS"))
        if named and not ours:
            return  # another tool's comment
        comment = _Comment(line, column + match.start(), ours, not named)
        if whole:
            self.whole.append(comment)
        else:
            self.lines[line] = comment

    def filter(self, findings: list[Finding]) -> Iterator[Finding]:
        """The findings that stay, and one for every silencer of ours that had nothing to silence."""
        self.read(bool(findings))
        used: set[tuple[_Comment, str]] = set()
        for finding in findings:
            silent = [c for c in self.covering(finding) if c.blanket or finding.rule in c.codes]
            used.update((comment, finding.rule) for comment in silent)
            if not silent:
                yield finding
        for comment in (*self.whole, *self.lines.values()):
            idle = sorted(code for code in comment.codes & self.codes if (comment, code) not in used)
            if idle:
                yield self.unused(comment, idle)

    def covering(self, finding: Finding) -> Iterator[_Comment]:
        yield from self.whole
        for line in range(finding.line, min(max(finding.end, finding.line), finding.line + 50) + 1):
            if line in self.lines:
                yield self.lines[line]

    def unused(self, comment: _Comment, codes: list[str]) -> Finding:
        message = f"this comment silences {', '.join(codes)}, which found nothing here: remove it"
        place = (self.source.path, comment.line, comment.column + 1)
        return Finding(*place, UNUSED, Severity.INFO, Confidence.HIGH, message, "remove the comment")


def comments(source: Source) -> Iterator[tuple[int, int, str]]:
    """The comments of a file, with their line and column."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.start[1], token.string
    except (tokenize.TokenError, SyntaxError):  # the parser is more lenient than the tokenizer in rare files
        return
