"""Findings as text for a person, JSON or SARIF for a program, or annotations for GitHub."""

import json
from collections import Counter

from lockstep.lint.finding import Finding, Severity
from lockstep.lint.rules import RULES
from lockstep.lint.sarif import log

__all__ = ["FORMATS", "github", "render", "summary", "text"]


def text(findings: list[Finding], lines: dict[str, list[str]]) -> str:
    """Each finding on a line, with the source line under it, and a summary."""
    parts = []
    for finding in findings:
        place = f"{finding.where}:{finding.line}:{finding.column}"
        parts.append(
            f"{place}: {finding.rule} {finding.severity.value}: {finding.message}"
            + _excerpt(finding, lines.get(finding.where, []))
        )
    parts.append(summary(findings))
    known = [finding.rule for finding in findings if finding.rule in RULES]
    if known:
        parts.append(f"why, and what to write instead: lockstep lint --explain {known[0]}, docs/lint/{known[0]}.md")
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
        spot = "" if f.cell else f",line={f.line},col={f.column}"  # GitHub counts the lines of the notebook's file
        text = f"cell {f.cell}, line {f.line}: {f.message}" if f.cell else f.message
        lines.append(f"::{levels[f.severity]} file={_escape(f.path, True)}{spot},title={f.rule}::{_escape(text)}")
    return "\n".join(lines)


def _escape(value: str, in_property: bool = False) -> str:
    value = value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return value.replace(":", "%3A").replace(",", "%2C") if in_property else value


FORMATS = ("text", "json", "github", "sarif")


def render(findings: list[Finding], form: str, lines: dict[str, list[str]]) -> str:
    """The findings in one of FORMATS."""
    if form == "json":
        return json.dumps([finding.as_dict() for finding in findings], indent=2)
    if form == "sarif":
        return json.dumps(log(findings), indent=2)
    return github(findings) if form == "github" else text(findings, lines)
