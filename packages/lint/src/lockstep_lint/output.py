"""Print findings as text, JSON, SARIF 2.1.0 or annotations for GitHub."""

import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from lockstep_lint.finding import Finding, Severity
from lockstep_lint.rules import RULES

__all__ = ["FORMATS", "render", "summary"]


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.HINT: "warning", Severity.OPINION: "note"}
# What is reported beside the rules' findings.
OTHERS = {"LS000": "a file that was not checked", "LS900": "a comment that silences nothing"}


def log(findings: list[Finding], lines: dict[str, list[str]]) -> dict[str, object]:
    """Return the SARIF log of one run: the rules with findings, and each finding."""
    prints = fingerprints(findings, lines)
    codes = sorted({finding.rule for finding in findings})
    driver = {"name": "lockstep lint", "version": _version(), "rules": [_rule(code) for code in codes]}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "results": [
                    {**_result(finding, codes.index(finding.rule)), "partialFingerprints": {FINGERPRINT: made}}
                    for finding, made in zip(findings, prints, strict=True)
                ],
            }
        ],
    }


# What GitHub knows a finding again by, after lines have moved.
FINGERPRINT = "primaryLocationLineHash"


def fingerprints(findings: list[Finding], lines: dict[str, list[str]]) -> list[str]:
    """Return a name for each finding that survives a move of its line."""
    seen: Counter[str] = Counter()
    made: list[str] = []
    for finding in findings:
        file = lines.get(finding.where, [])
        text = "".join(file[finding.line - 1].split()) if 0 < finding.line <= len(file) else ""
        digest = hashlib.sha256("\0".join((finding.rule, _uri(finding.path), text)).encode()).hexdigest()[:16]
        seen[digest] += 1
        made.append(f"{digest}:{seen[digest]}")
    return made


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # SARIF alone needs it; it takes 40 ms

    try:
        return version("lockstep-lint")
    except PackageNotFoundError:  # run from a checkout
        return "0"


def _rule(code: str) -> dict[str, object]:
    rule = RULES.get(code)
    if rule is None:
        return {"id": code, "shortDescription": {"text": OTHERS.get(code, code)}}
    return {
        "id": code,
        "name": rule.page.name,
        "shortDescription": {"text": rule.page.what},
        "fullDescription": {"text": rule.page.why},
        "help": {"text": rule.page.remedy, "markdown": rule.page.text},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
        "properties": {"precision": rule.confidence.value},
    }


def _result(finding: Finding, index: int) -> dict[str, object]:
    text = f"cell {finding.cell}, line {finding.line}: {finding.message}" if finding.cell else finding.message
    region = {"startLine": 1} if finding.cell else _region(finding)
    place = {"artifactLocation": {"uri": _uri(finding.path)}, "region": region}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }


def _region(finding: Finding) -> dict[str, int]:
    """Return the lines and columns of a finding, with its end if known."""
    region = {"startLine": finding.line, "startColumn": finding.column}
    return region | ({"endLine": finding.end, "endColumn": finding.end_column} if finding.end_column else {})


def _uri(path: str) -> str:
    """Return a path as a URI, relative to the current folder if below it."""
    relative = os.path.relpath(path)
    return Path(path).resolve().as_uri() if relative.startswith("..") else quote(Path(relative).as_posix())


def text(findings: list[Finding], lines: dict[str, list[str]], prog: str, hints: bool) -> str:
    """Return each finding with its source line, the gravest first, and a summary."""
    parts = []
    for finding in fold_hints(findings):
        place = f"{finding.where}:{finding.line}:{finding.column}"
        parts.append(
            f"{place}: {finding.rule} {finding.severity.value}: {finding.message}"
            + _excerpt(finding, lines.get(finding.where, []))
        )
    parts.append(summary(findings, hints))
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


GRAVEST = list(Severity)


def fold_hints(findings: list[Finding]) -> list[Finding]:
    """Select the findings to print: all errors, and one hint per file and rule, counted."""
    others = Counter(map(habit, findings))
    told: set[tuple[object, ...]] = set()
    chosen: list[Finding] = []
    for finding in findings:
        key = habit(finding)
        more = others[key] - 1
        if key not in told and more > 0:
            places = f"{more} more place{'s' * (more > 1)} in this file"
            chosen.append(replace(finding, message=f"{finding.message} (and {places})"))
        elif key not in told:
            chosen.append(finding)
        told.add(key)
    return sorted(chosen, key=lambda finding: GRAVEST.index(finding.severity))


def habit(finding: Finding) -> tuple[object, ...]:
    """Return the key by which findings fold: an error's place, a hint's file and rule."""
    if finding.severity is Severity.ERROR:
        return finding.place
    return finding.path, finding.rule, finding.severity


def summary(findings: list[Finding], hints: bool = True) -> str:
    """Count the findings by rule; without `hints` only errors were looked for."""
    if not findings:
        return "no findings" if hints else "no errors; --hints looks for what costs time or memory too"
    counts = Counter(finding.rule for finding in findings)
    rules = ", ".join(f"{code} {count}" for code, count in sorted(counts.items()))
    files = len({finding.path for finding in findings})
    return f"{len(findings)} finding{'s' * (len(findings) > 1)} in {files} file{'s' * (files > 1)}: {rules}"


def github(findings: list[Finding]) -> str:
    """Format findings as GitHub workflow commands, one annotation each."""
    levels = {Severity.ERROR: "error", Severity.HINT: "warning", Severity.OPINION: "notice"}
    lines = []
    for f in fold_hints(findings):
        spot = "" if f.cell else f",line={f.line},col={f.column}"  # GitHub counts the lines of the notebook's file
        text = f"cell {f.cell}, line {f.line}: {f.message}" if f.cell else f.message
        lines.append(f"::{levels[f.severity]} file={_escape(f.path, True)}{spot},title={f.rule}::{_escape(text)}")
    return "\n".join(lines)


def _escape(value: str, in_property: bool = False) -> str:
    value = value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return value.replace(":", "%3A").replace(",", "%2C") if in_property else value


def records(findings: list[Finding]) -> str:
    """Format the findings as `json.dumps` with an indent of 2, through its fast encoder."""
    encode = json.JSONEncoder(separators=(",\n    ", ": ")).encode  # a new line within a text is escaped
    found = [encode(finding.as_dict())[1:-1] for finding in findings]
    return "[\n" + ",\n".join(f"  {{\n    {each}\n  }}" for each in found) + "\n]" if found else "[]"


FORMATS = ("text", "json", "github", "sarif")


def render(
    findings: list[Finding], form: str, lines: dict[str, list[str]], prog: str = "lockstep lint", *, hints: bool = True
) -> str:
    """Format the findings as one of FORMATS.

    Args:
        lines: the lines of each file that has findings.
        prog: the command that explains a rule.
        hints: hints were looked for too.
    """
    if form == "json":
        return records(findings)
    if form == "sarif":
        return json.dumps(log(findings, lines), indent=2)
    return github(findings) if form == "github" else text(findings, lines, prog, hints)
