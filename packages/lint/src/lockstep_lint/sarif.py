"""Findings as SARIF 2.1.0, the form that code scanning services read (OASIS, 2020)."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import quote

from lockstep_lint.docs import page
from lockstep_lint.finding import Finding, Severity
from lockstep_lint.rules import RULES

__all__ = ["log"]

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
# What is reported beside the rules' findings.
OTHERS = {"LS000": "a file that was not checked", "LS900": "a comment that silences nothing"}


def log(findings: list[Finding]) -> dict[str, object]:
    """The SARIF log of one run: the rules that found something, and each finding with its place."""
    codes = sorted({finding.rule for finding in findings})
    driver = {"name": "lockstep lint", "version": _version(), "rules": [_rule(code) for code in codes]}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "results": [_result(finding, codes.index(finding.rule)) for finding in findings],
            }
        ],
    }


def _version() -> str:
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
        "name": rule.name,
        "shortDescription": {"text": rule.what},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.remedy, "markdown": page(rule)},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
        "properties": {"precision": rule.confidence.value},
    }


def _result(finding: Finding, index: int) -> dict[str, object]:
    text = f"cell {finding.cell}, line {finding.line}: {finding.message}" if finding.cell else finding.message
    region = {"startLine": 1} if finding.cell else {"startLine": finding.line, "startColumn": finding.column}
    place = {"artifactLocation": {"uri": _uri(finding.path)}, "region": region}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }


def _uri(path: str) -> str:
    """A path as a URI: relative to the present folder where it is below it, as services match it to a checkout."""
    relative = os.path.relpath(path)
    return Path(path).resolve().as_uri() if relative.startswith("..") else quote(Path(relative).as_posix())
