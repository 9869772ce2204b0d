"""`python -m lockstep_lint.docs [FOLDER]`: writes one page a rule, from the rules themselves."""

import sys
from pathlib import Path

from lockstep_lint.finding import Severity
from lockstep_lint.rules import RULES
from lockstep_lint.rules.base import Rule

__all__ = ["main", "page", "pages"]

FIXES = {
    "safe": "`--fix` makes the correction; it cannot change what a run computes.",
    "unsafe": "There is a usual correction, which needs a look: it changes what the run does.",
    "none": "No single correction is right everywhere.",
}


ASKED = {
    Severity.ERROR: "",
    Severity.HINT: " (with `--hints`)",
    Severity.OPINION: " (with `--select` of the rule, or ALL)",
}


def page(rule: Rule) -> str:
    """The Markdown page of a rule."""
    parts = [
        f"# {rule.code} {rule.name}",
        f"{rule.what}",
        f"**Severity** {rule.severity.value}{ASKED[rule.severity]}, **confidence** {rule.confidence.value}.",
        f"## Why\n\n{rule.why}",
        *([f"## Where it is told\n\n{rule.note}"] if rule.note else []),
        f"## Found\n\n```python\n{rule.bad.strip()}\n```",
        f"## Right\n\n```python\n{rule.good.strip()}\n```",
        f"## Fix\n\n{rule.remedy}. {FIXES[rule.fix]}" if rule.remedy else f"## Fix\n\n{FIXES[rule.fix]}",
    ]
    if rule.moot:
        parts.append(f"Silent in programs of {', '.join(sorted(rule.moot))}, which take care of it.")
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The list of all rules."""
    lines = ["# The rules of `lockstep lint`", "", "| rule | finds | severity | confidence | fix |"]
    lines.append("|---|---|---|---|---|")
    for code, rule in RULES.items():
        cells = (f"[{code}]({code}.md)", rule.name, rule.severity.value, rule.confidence.value, rule.fix)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Every generated page, by file name."""
    return {"README.md": index(), **{f"{code}.md": page(rule) for code, rule in RULES.items()}}


def main(argv: list[str]) -> None:
    """Writes the pages into the folder (default: packages/lint/docs/rules)."""
    folder = Path(argv[0]) if argv else Path(__file__).parents[2] / "docs" / "rules"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
