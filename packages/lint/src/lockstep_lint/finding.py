"""Define a finding, what the linter reports for one place in a file."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Change", "Confidence", "Edit", "Finding", "Severity"]


class Severity(StrEnum):
    """The three levels of findings, gravest first.

    An error makes training wrong, hangs it, ends it or loses files. A hint costs time, memory or clarity. An opinion is
    a matter of taste.
    """

    ERROR = "error"
    HINT = "hint"
    OPINION = "opinion"


class Confidence(StrEnum):
    """Confidence in a finding, given the code that is visible."""

    HIGH = "high"
    MEDIUM = "medium"


@dataclass(frozen=True)
class Edit:
    """A change of one expression that cannot alter what a run computes, for `--fix`.

    `span` is its place: first line and column, last line and column (columns in UTF-8 bytes, as `ast` counts them).
    `kind` says what to do: "keyword" adds `name=value` to the call, "method" appends `.name()`, "callee" replaces what
    is called by `name` and puts `value` before its arguments. `needs` is the first torch that has what it writes.
    """

    kind: str
    span: tuple[int, int, int, int]
    name: str
    value: str = ""
    needs: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Change:
    """Lines that replace others, for `--unsafe-fixes`: a proposal that changes what the script does.

    `start` is the first line that goes (from 1), `count` how many go; with 0 the new ones come before `start`.
    """

    start: int
    count: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One place where a rule found its pitfall. In a notebook, lines count within the cell.

    Columns count characters from 1; `end` is the last line of the place, `end_column` the first column after it.
    """

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    confidence: Confidence
    message: str
    fix: str | None = None
    edit: Edit | None = None
    end: int = 0
    proposal: tuple[Change, ...] = ()
    cell: int = 0
    end_column: int = 0

    @property
    def place(self) -> tuple[str, int, int, int, str]:
        """Sort key."""
        return self.path, self.cell, self.line, self.column, self.rule

    @property
    def where(self) -> str:
        """The file, and in a notebook the cell (counted from 1, text cells too)."""
        return f"{self.path}:cell {self.cell}" if self.cell else self.path

    def as_dict(self) -> dict[str, object]:
        """Return the finding as `--format json` prints it."""
        data: dict[str, object] = {key: getattr(self, key) for key in ("path", "line", "column", "rule")}
        data |= {"severity": self.severity.value, "confidence": self.confidence.value}
        data |= {"message": self.message, "fix": self.fix}
        return data | ({"cell": self.cell} if self.cell else {})
