"""Define a rule: its check, its level, and the page that explains it."""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Change, Confidence, Edit, Severity

__all__ = ["TRAINERS", "Found", "Page", "Rule", "at", "edit"]

# Packages whose trainer runs the loop: what it does itself is no mistake of the script.
TRAINERS = frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"})

PAGES = Path(__file__).parents[1] / "pages"


@dataclass(frozen=True)
class Found:
    """A place where a check found its mistake; `severity` replaces the rule's."""

    node: ast.AST
    message: str
    severity: Severity | None = None
    edit: Edit | None = None
    proposal: tuple[Change, ...] = ()


Check = Callable[[View], Iterator[Found]]


@dataclass(frozen=True)
class Page:
    """The Markdown page of a rule, `pages/LS0NN.md`, and its parts."""

    text: str

    @property
    def name(self) -> str:
        """The rule's name, from the title."""
        return self.text.splitlines()[0].partition(" ")[2].partition(" ")[2]

    @property
    def what(self) -> str:
        """What the rule finds, in one sentence."""
        return self.text.split("\n\n")[1]

    @property
    def why(self) -> str:
        """What the mistake costs."""
        return self.section("Why")

    @property
    def remedy(self) -> str:
        """The usual correction, without its full stop."""
        return self.section("Fix").partition("\n\n")[0].removesuffix(".")

    @property
    def examples(self) -> list[str]:
        """The two scripts of the page: one with the mistake, one without."""
        return re.findall(r"```python\n(.*?)\n```", self.text, re.DOTALL)

    def section(self, title: str) -> str:
        """Return the text below a heading."""
        return self.text.partition(f"\n## {title}\n\n")[2].partition("\n\n## ")[0].strip()


@dataclass(frozen=True)
class Rule:
    """A mistake and its check.

    Args:
        code: LS and three digits.
        severity: the level of its findings, where a finding has none of its own.
        confidence: how sure a finding is.
        check: yields the findings in one file.
        fix: "safe" for what `--fix` corrects, "unsafe" for what needs a look, "none" without a usual correction.
        moot: the frameworks that do the thing for the user, in whose programs the rule is silent.
        placed: whether a finding depends on which ranks reach a line, or on what ran before it. It is an error only
            where a program's entry reaches the line, else a hint.
    """

    code: str
    severity: Severity
    confidence: Confidence
    check: Check
    fix: str = "none"
    moot: frozenset[str] = frozenset()
    placed: bool = False

    @functools.cached_property
    def page(self) -> Page:
        """The page that explains the rule."""
        return Page((PAGES / f"{self.code}.md").read_text(encoding="utf-8"))


def at(
    site: Site,
    message: str,
    *,
    severity: Severity | None = None,
    edit: Edit | None = None,
    proposal: tuple[Change, ...] = (),
) -> Found:
    """Return a finding at a call."""
    return Found(site.call, message, severity, edit, proposal)


def edit(kind: str, node: ast.expr, name: str, value: str = "", needs: tuple[int, int] = (0, 0)) -> Edit:
    """Return a change of one expression, for `--fix`."""
    span = (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)
    return Edit(kind, span, name, value, needs)
