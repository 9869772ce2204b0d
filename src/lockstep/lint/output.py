"""Findings as text for a person, JSON for a program, or annotations for GitHub."""

import json
from collections import Counter

from lockstep.lint.finding import Finding, Severity

__all__ = ["FORMATS", "github", "render", "summary", "text"]


def text(findings: list[Finding], lines: dict[str, list[str]]) -> str:
    """Each finding on a line, with the source line under it, and a summary."""
    parts = []
    for finding in findings:
        place = f"{finding.path}:{finding.line}:{finding.column}"
        parts.append(
            f"{place}: {finding.rule} {finding.severity.value}: {finding.message}"
            + _excerpt(finding, lines.get(finding.path, []))
        )
    parts.append(summary(findings))
    return "\n".join(parts)


def _excerpt(finding: Finding, lines: list[str]) -> str:
    source = lines[finding.line - 1].rstrip() if 0 < finding.line <= len(lines) else ""
    if not source.strip():
        return ""
    shown = source.expandtabs(4)[:160]
    indent = len(source[: finding.column - 1].expandtabs(4))
    return f"\n    | {shown}\n    | {' ' * min(indent, 160)}^"


def summary(findings: list[Finding]) -> str:
    """How many findings there are, by rule."""
    if not findings:
        return "no findings"
    counts = Counter(finding.rule for finding in findings)
    rules = ", ".join(f"{code} {count}" for code, count in sorted(counts.items()))
    files = len({finding.path for finding in findings})
    return f"{len(findings)} finding{'s' * (len(findings) > 1)} in {files} file{'s' * (files > 1)}: {rules}"


def github(findings: list[Finding]) -> str:
    """GitHub's workflow commands: one annotation a finding."""
    levels = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
    lines = []
    for f in findings:
        place = f"file={_escape(f.path, True)},line={f.line},col={f.column},title={f.rule}"
        lines.append(f"::{levels[f.severity]} {place}::{_escape(f.message)}")
    return "\n".join(lines)


def _escape(value: str, in_property: bool = False) -> str:
    value = value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return value.replace(":", "%3A").replace(",", "%2C") if in_property else value


FORMATS = ("text", "json", "github")


def render(findings: list[Finding], form: str, lines: dict[str, list[str]]) -> str:
    """The findings in one of FORMATS."""
    if form == "json":
        return json.dumps([finding.as_dict() for finding in findings], indent=2)
    return github(findings) if form == "github" else text(findings, lines)
