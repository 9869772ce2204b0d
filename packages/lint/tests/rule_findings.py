"""The findings of one rule in a script, for the tests to compare."""

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

__all__ = ["count", "count_in", "found", "lines", "severities"]


def lines(text, code):
    """Return the lines of a rule's findings."""
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


def count(text, code):
    """Count a rule's findings."""
    return len(lines(text, code))


def found(text, code):
    """Check whether a rule finds anything."""
    return bool(lines(text, code))


def severities(text, code):
    """Return the severities of a rule's findings."""
    return [finding.severity for finding in check_text(text, configure({}, code, ""))]


def count_in(folder, code, **files):
    """Count a rule's findings in run.py, one of some files of a folder."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return len(check_paths([str(folder / "run.py")], configure({}, code, "")))
