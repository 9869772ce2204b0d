"""The examples of the rules: the one of the rule's page, and those of fixtures/CODE/{bad,good}.py."""

import re
from pathlib import Path

from lockstep_lint.rules import RULES

__all__ = ["all_examples", "examples"]

FIXTURES = Path(__file__).parent / "fixtures"
# Each example of a fixture file is a script of its own, below a line with its number.
HEAD = re.compile(r"^# ---- \d+$", re.MULTILINE)


def examples(code: str, kind: str) -> list[str]:
    """Return a rule's example scripts: with the mistake (`kind` "bad") or without ("good")."""
    file = FIXTURES / code / f"{kind}.py"
    more = HEAD.split(file.read_text(encoding="utf-8"))[1:] if file.exists() else []
    return [RULES[code].page.examples[kind == "good"] + "\n", *(f"\n{text.strip()}\n" for text in more)]


def all_examples(*kinds: str) -> list[str]:
    """Return the examples of all rules, of one kind or both."""
    return [text for code in RULES for kind in kinds for text in examples(code, kind)]
