"""Findings as text for a person, JSON or SARIF for a program, or annotations for GitHub."""

import json
from collections import Counter
from dataclasses import replace

from lockstep_lint.finding import Finding, Severity
from lockstep_lint.rules import RULES
from lockstep_lint.sarif import log

__all__ = ["FORMATS", "github", "render", "summary", "text"]


def text(findings: list[Finding], lines: dict[str, list[str]], prog: str) -> str:
    """Each finding on a line, with the source line under it, and a summary."""
    parts = []
    for finding in folded(findings):
        place = f"{finding.where}:{finding.line}:{finding.column}"
        parts.append(
            f"{place}: {finding.rule} {finding.severity.value}: {finding.message}"
            + _excerpt(finding, lines.get(finding.where, []))
        )
    parts.append(summary(findings))
    known = [finding.rule for finding in findings if finding.rule in RULES]
    if known:
        parts.append(f"why, and what to write instead: {prog} --explain {known[0]}")
    return "\n".join(parts)


def _excerpt(finding: Finding, lines: list[str]) -> str:
    source = lines[finding.line - 1].rstrip() if 0 < finding.line <= len(lines) else ""
    if not source.strip():
        return ""
    shown = source.expandtabs(4)[:160]
    indent = len(source[: finding.column - 1].expandtabs(4))
    return f"\n    | {shown}\n    | {' ' * min(indent, 160)}^"


# Rules that find the same habit in many places of a file: a person needs to be told once.
FOLDED = ("LS028", "LS036")


def folded(findings: list[Finding]) -> list[Finding]:
    """The findings for a person: of a rule that repeats itself the first of each file, and how many more."""
    others = Counter((finding.path, finding.rule) for finding in findings if finding.rule in FOLDED)
    told = set()
    kept = []
    for finding in findings:
        key = (finding.path, finding.rule)
        more = others[key] - 1
        if key not in told and more > 0:
            places = f"{more} more place{'s' * (more > 1)} in this file"
            kept.append(replace(finding, message=f"{finding.message} (and {places})"))
        elif key not in told or finding.rule not in FOLDED:
            kept.append(finding)
        told.add(key)
    return kept


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
    for f in folded(findings):
        spot = "" if f.cell else f",line={f.line},col={f.column}"  # GitHub counts the lines of the notebook's file
        text = f"cell {f.cell}, line {f.line}: {f.message}" if f.cell else f.message
        lines.append(f"::{levels[f.severity]} file={_escape(f.path, True)}{spot},title={f.rule}::{_escape(text)}")
    return "\n".join(lines)


def _escape(value: str, in_property: bool = False) -> str:
    value = value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return value.replace(":", "%3A").replace(",", "%2C") if in_property else value


FORMATS = ("text", "json", "github", "sarif")


def render(findings: list[Finding], form: str, lines: dict[str, list[str]], prog: str = "lockstep lint") -> str:
    """Format the findings as one of FORMATS; `prog` is the command that explains a rule."""
    if form == "json":
        return json.dumps([finding.as_dict() for finding in findings], indent=2)
    if form == "sarif":
        return json.dumps(log(findings), indent=2)
    return github(findings) if form == "github" else text(findings, lines, prog)
