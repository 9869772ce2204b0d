"""Apply safe fixes with libcst, and print the others as a diff."""

import difflib
import importlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from lockstep_lint.analysis.imports import oldest_torch
from lockstep_lint.analysis.source import parse_text
from lockstep_lint.finding import Change, Edit, Finding

__all__ = ["FixProblem", "apply_proposals", "diff", "fix_files", "fix_text"]


def diff(findings: list[Finding]) -> str:
    """Return all proposals as a unified diff, for `git apply` once it has been read."""
    parts: list[str] = []
    for path in sorted({finding.path for finding in findings if finding.proposal and finding.path.endswith(".py")}):
        try:
            before = Path(path).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        after = apply_proposals(before, [finding.proposal for finding in findings if finding.path == path])
        name = Path(path).as_posix()
        parts += difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def apply_proposals(text: str, proposals: list[tuple[Change, ...]]) -> str:
    """Apply the proposals that do not overlap and leave the text parsing."""
    lines = text.split("\n")
    taken: set[int] = set()
    chosen: list[Change] = []
    for proposal in proposals:
        places = {line for change in proposal for line in range(change.start, change.start + max(change.count, 1))}
        if proposal and not places & taken and _parses(apply_changes(lines, [*chosen, *proposal])):
            taken |= places
            chosen += proposal
    return "\n".join(apply_changes(lines, chosen))


def apply_changes(lines: list[str], changes: list[Change]) -> list[str]:
    """Return the lines with the changes made, the last first."""
    found = list(lines)
    for change in sorted(dict.fromkeys(changes), key=lambda change: -change.start):
        found[change.start - 1 : change.start - 1 + change.count] = change.lines
    return found


def _parses(lines: list[str]) -> bool:
    try:
        parse_text("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


class FixProblem(Exception):
    """Why nothing was corrected. The message is one line."""


def fix_files(findings: list[Finding]) -> tuple[int, tuple[int, int]]:
    """Correct the files that have findings with an edit that their project's torch has.

    Returns how many places were changed, and the newest torch that was taken for granted where no project pins one.
    """
    edits: dict[str, list[Edit]] = defaultdict(list)
    assumed = (0, 0)
    for finding in findings:
        if finding.edit is not None and finding.path.endswith(".py"):
            pin = oldest_torch(finding.path)
            if pin is None or pin >= finding.edit.needs:
                edits[finding.path].append(finding.edit)
                assumed = max(assumed, finding.edit.needs if pin is None else (0, 0))
    changed = 0
    for path, wanted in edits.items():
        try:
            before = Path(path).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # in another encoding: its findings stay for the user
        after, count = fix_text(before, wanted)
        if count:
            Path(path).write_bytes(after.encode("utf-8"))
            changed += count
    return changed, assumed if changed else (0, 0)


def fix_text(text: str, edits: list[Edit]) -> tuple[str, int]:
    """Return the text with the edits made, and how many could be."""
    cst, metadata = _library()
    try:
        wrapper = metadata.MetadataWrapper(cst.parse_module(text))
    except cst.ParserSyntaxError:  # newer syntax than libcst knows
        return text, 0
    positions = wrapper.resolve(metadata.PositionProvider)
    lines = text.split("\n")
    wanted = {_characters(edit, lines): edit for edit in edits}
    chosen: dict[Any, Edit] = {}
    for node, place in positions.items():
        edit = wanted.get((place.start.line, place.start.column, place.end.line, place.end.column))
        if edit is not None and _fits(cst, node, edit) and edit not in chosen.values():
            chosen[node] = edit
    done = wrapper.module.visit(_transformer(cst, chosen)).code if chosen else text
    return done, len(chosen)


def _library() -> tuple[Any, Any]:
    try:
        return importlib.import_module("libcst"), importlib.import_module("libcst.metadata")
    except ImportError:
        raise FixProblem("--fix needs the package libcst: pip install libcst") from None


def _fits(cst: Any, node: Any, edit: Edit) -> bool:
    """Check whether a node is the kind of expression that an edit is for."""
    if edit.kind == "method":
        return isinstance(node, cst.BaseExpression)
    return isinstance(node, cst.Call)


def _characters(edit: Edit, lines: list[str]) -> tuple[int, int, int, int]:
    """Return the edit's span with columns in characters, as libcst counts them."""
    line, column, end, last = edit.span
    return line, _count(lines, line, column), end, _count(lines, end, last)


def _count(lines: list[str], line: int, column: int) -> int:
    return len(lines[line - 1].encode()[:column].decode(errors="replace"))


def _transformer(cst: Any, plan: dict[Any, Edit]) -> Any:
    def change(node: Any, updated: Any) -> Any:
        edit = plan[node]
        if edit.kind == "method":
            return cst.Call(cst.Attribute(updated, cst.Name(edit.name)))
        if edit.kind == "keyword":
            bare = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            added = cst.Arg(cst.parse_expression(edit.value), cst.Name(edit.name), equal=bare)
            return updated.with_changes(args=[*updated.args, added])
        first = cst.Arg(cst.parse_expression(edit.value))
        return updated.with_changes(func=cst.parse_expression(edit.name), args=[first, *updated.args])

    class Transformer(cst.CSTTransformer):  # type: ignore[misc]
        """Applies the planned edits."""

        def on_leave(self, original: Any, updated: Any) -> Any:
            updated = super().on_leave(original, updated)
            return change(original, updated) if original in plan else updated

    return Transformer()
