"""The corrections that change what a script does, as a diff to read: nothing here writes a file."""

import difflib
from pathlib import Path

from lockstep_lint.analysis.syntax import parsed
from lockstep_lint.finding import Change, Finding

__all__ = ["diff", "proposed"]


def diff(findings: list[Finding]) -> str:
    """A unified diff of all that the findings propose, for `git apply` or `patch` once it has been read."""
    parts: list[str] = []
    for path in sorted({finding.path for finding in findings if finding.proposal and finding.path.endswith(".py")}):
        try:
            before = Path(path).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        after = proposed(before, [finding.proposal for finding in findings if finding.path == path])
        name = Path(path).as_posix()
        parts += difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def proposed(text: str, proposals: list[tuple[Change, ...]]) -> str:
    """The text with the proposals made that fit beside each other and leave it parsing."""
    lines = text.split("\n")
    taken: set[int] = set()
    chosen: list[Change] = []
    for proposal in proposals:
        places = {line for change in proposal for line in range(change.start, change.start + max(change.count, 1))}
        if proposal and not places & taken and _parses(made(lines, [*chosen, *proposal])):
            taken |= places
            chosen += proposal
    return "\n".join(made(lines, chosen))


def made(lines: list[str], changes: list[Change]) -> list[str]:
    """The lines with the changes made, the last first."""
    found = list(lines)
    for change in sorted(dict.fromkeys(changes), key=lambda change: -change.start):
        found[change.start - 1 : change.start - 1 + change.count] = change.lines
    return found


def _parses(lines: list[str]) -> bool:
    try:
        parsed("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True
