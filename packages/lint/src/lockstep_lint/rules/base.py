"""Define a rule: its check, explanation and examples."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Change, Confidence, Edit, Severity

__all__ = ["Found", "Rule", "at", "edit"]


@dataclass(frozen=True)
class Found:
    """A place where a check found its pitfall; `severity` is its own where it is not the rule's."""

    node: ast.AST
    message: str
    severity: Severity | None = None
    edit: Edit | None = None
    proposal: tuple[Change, ...] = ()


Check = Callable[[View], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """One pitfall: how to find it, why it costs, what it looks like and what to write instead.

    `bad` and `good` are whole scripts, shown on the rule's page; tests/fixtures has more. `moot` names the packages
    that do the thing for the user. `fix` says how safe a correction is: "safe" is what `--fix` does, "unsafe" needs a
    look, "none" has no single right answer. `note` says where it is told, and what near it does not count.
    """

    code: str
    name: str
    what: str
    why: str
    bad: str
    good: str
    severity: Severity
    confidence: Confidence
    check: Check
    fix: str = "none"
    remedy: str = ""
    moot: frozenset[str] = frozenset()
    note: str = ""


def at(
    site: Site,
    message: str,
    *,
    severity: Severity | None = None,
    edit: Edit | None = None,
    proposal: tuple[Change, ...] = (),
) -> Found:
    """A finding at a call."""
    return Found(site.call, message, severity, edit, proposal)


def edit(kind: str, node: ast.expr, name: str, value: str = "", needs: tuple[int, int] = (0, 0)) -> Edit:
    """A change of one expression, for `--fix`."""
    span = (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)
    return Edit(kind, span, name, value, needs)
