"""Check files: parse them together, run the rules on each, and apply `# noqa`."""

import ast
import contextlib
import gc
import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from lockstep_lint.analysis.budget import WORK, TooIntricate
from lockstep_lint.analysis.imports import Graph, Importers, draw
from lockstep_lint.analysis.index import Module
from lockstep_lint.analysis.project import Project, unit_test
from lockstep_lint.analysis.source import Problem, Source, parse, place, read
from lockstep_lint.analysis.view import Analysis, View
from lockstep_lint.config import Config
from lockstep_lint.events.entry import is_reached
from lockstep_lint.finding import Confidence, Finding, Severity
from lockstep_lint.rules import MERGED, RULES
from lockstep_lint.rules.base import Found, Rule

__all__ = ["check_paths", "check_text", "in_order"]


# The code under which a comment that silences nothing is reported.
UNUSED = "LS900"
CODES = r"(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)"
LINE = re.compile(rf"#\s*noqa(?::\s*{CODES})?", re.IGNORECASE)
OURS = re.compile(r"noqa[^\n]*\bLS[0-9]", re.IGNORECASE)
FILE = re.compile(rf"#\s*lockstep:\s*noqa(?::\s*{CODES})?", re.IGNORECASE)


@dataclass(frozen=True)
class _Comment:
    """A comment that silences: its place, and the LS codes that it names (none: all)."""

    line: int
    column: int
    codes: frozenset[str]
    blanket: bool


class Silencer:
    """The silencing comments of one file."""

    def __init__(self, source: Source, codes: frozenset[str]) -> None:
        self.source = source
        self.codes = codes
        self.whole: list[_Comment] = []
        self.lines: dict[int, _Comment] = {}

    def read(self, found: bool) -> None:
        """Read the file's comments, if a rule of ours or a finding makes them matter."""
        text = self.source.text
        if "noqa" in text.lower() and (found or OURS.search(text)):
            for line, column, comment in comments(self.source):
                self.add(line, column, comment)

    def add(self, line: int, column: int, text: str) -> None:
        match = FILE.search(text)
        whole = match is not None
        match = match or LINE.search(text)
        if match is None:
            return
        named = frozenset(re.findall(r"[A-Z]+[0-9]+", (match["codes"] or "").upper()))
        ours = frozenset(MERGED.get(code, code) for code in named if code.startswith("LS"))
        if named and not ours:
            return  # another tool's comment
        comment = _Comment(line, column + match.start(), ours, not named)
        if whole:
            self.whole.append(comment)
        else:
            self.lines[line] = comment

    def filter(self, findings: list[Finding]) -> Iterator[Finding]:
        """Yield the remaining findings, and one for each of our comments that silenced nothing."""
        self.read(bool(findings))
        used: set[tuple[_Comment, str]] = set()
        for finding in findings:
            silent = [c for c in self.covering(finding) if c.blanket or finding.rule in c.codes]
            used.update((comment, finding.rule) for comment in silent)
            if not silent:
                yield finding
        for comment in (*self.whole, *self.lines.values()):
            idle = sorted(code for code in comment.codes & self.codes if (comment, code) not in used)
            if idle:
                yield self.unused(comment, idle)

    def covering(self, finding: Finding) -> Iterator[_Comment]:
        yield from self.whole
        for line in range(finding.line, min(max(finding.end, finding.line), finding.line + 50) + 1):
            if line in self.lines:
                yield self.lines[line]

    def unused(self, comment: _Comment, codes: list[str]) -> Finding:
        message = f"this comment silences {', '.join(codes)}, which found nothing here: remove it"
        place = (self.source.path, comment.line, comment.column + 1)
        return Finding(*place, UNUSED, Severity.HINT, Confidence.HIGH, message, "remove the comment")


def comments(source: Source) -> Iterator[tuple[int, int, str]]:
    """Yield the comments of a file, with their line and column."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.start[1], token.string
    except (tokenize.TokenError, SyntaxError):  # the parser is more lenient than the tokenizer in rare files
        return


# The code under which a file that could not be checked is reported.
PROBLEM = "LS000"
LEVELS = tuple(Severity)  # gravest first
# Files are checked in parts of this many, each one process's work: it bounds the memory. Files that import each other
# are in one part where they fit; the project's other files are read as they are needed, so that a file's findings
# depend neither on the part nor on what else is checked.
PART = 100


def check_paths(paths: list[str], config: Config) -> list[Finding]:
    """Return the findings in the files, in order. Several processes share a long list."""
    graph = draw(paths)
    parts = divide(graph.together(sorted(paths)), PART)
    workers = min(os.cpu_count() or 1, 8, len(parts))
    if workers < 2:
        return in_order(finding for part in parts for finding in _check_part(part, config, graph))
    with ProcessPoolExecutor(workers, initializer=_share, initargs=(graph.projects, graph.added)) as pool:
        return in_order(finding for part in pool.map(_check_shared, parts, [config] * len(parts)) for finding in part)


def divide(groups: list[list[str]], size: int) -> list[list[str]]:
    """Pack groups into batches of at most `size`. Only a larger group is cut."""
    parts: list[list[str]] = []
    for group in groups:
        for start in range(0, len(group), size):
            piece = group[start : start + size]
            if parts and len(parts[-1]) + len(piece) <= size:
                parts[-1] += piece
            else:
                parts.append(piece)
    return parts


_SHARED: dict[str, Graph] = {}


def _share(projects: dict[str, Importers], added: dict[str, tuple[str, ...]]) -> None:
    """Give a worker process what the graph knows once, not with every part."""
    _SHARED["graph"] = Graph(projects, added)


def _check_shared(paths: list[str], config: Config) -> list[Finding]:
    return _check_part(paths, config, _SHARED["graph"])


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings by path, line, column and rule."""
    return sorted(findings, key=lambda finding: finding.place)


def _check_part(paths: list[str], config: Config, graph: Graph) -> list[Finding]:
    if len(paths) < PART // 4:
        return check_sources([read(path) for path in paths], config, graph)
    with pause_collection():
        return check_sources([read(path) for path in paths], config, graph)


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Disable the garbage collector. Walking a million live nodes would double the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def check_text(text: str, config: Config | None = None, path: str = "example.py") -> list[Finding]:
    """Return the findings in a piece of text, as if it were a file."""
    return in_order(check_sources([parse(path, text)], config or Config()))


def check_sources(sources: Iterable[Source], config: Config, graph: Graph | None = None) -> list[Finding]:
    """Return the findings in parsed files; the graph knows which other files import them."""
    sources = list(sources)
    project = Project(sources, graph)
    try:
        return _check(sources, project, config)
    finally:
        project.close()


def _check(sources: list[Source], project: Project, config: Config) -> list[Finding]:
    analysis = Analysis(project)
    modules = {module.path: module for module in project.checked}
    findings: list[Finding] = []
    for source in sources:
        if source.problem is not None:
            findings.append(_problem(source))
            continue
        findings.extend(_locate(_problem(replace(source, problem=problem)), source) for problem in source.broken)
        found: list[Finding] = []
        module = modules.get(source.path)
        if module is not None and module.whole:
            found = list(_check_module(module, analysis, config))
        kept = Silencer(source, config.codes_for(source.path)).filter(found)
        findings.extend(_locate(finding, source) for finding in kept if config.reports(finding))
    return findings


def _locate(finding: Finding, source: Source) -> Finding:
    """Return a notebook's finding with its cell, and the lines in that cell."""
    if not source.cells:
        return finding
    cell, line = place(source.cells, finding.line)
    end = finding.end - finding.line + line if finding.end else 0
    return replace(finding, cell=cell, line=line, end=end, edit=None, proposal=())


def _check_module(module: Module, analysis: Analysis, config: Config) -> Iterator[Finding]:
    codes = config.codes_for(module.path)
    WORK.start()
    try:
        view = analysis.view(module)
        for rule in RULES.values():
            if rule.code in codes and not analysis.is_moot(module, rule.moot):
                yield from _run(rule, view)
    except (TooIntricate, RecursionError):
        problem = Problem(1, "is too large or nested for all rules: split it")
        yield _problem(Source(module.path, problem=problem))


def _run(rule: Rule, view: View) -> Iterator[Finding]:
    """Yield a rule's findings, of each line the gravest."""
    gravest: dict[int, Finding] = {}
    for found in rule.check(view):
        finding = _finding(rule, found, view.module)
        unsure = unit_test(view.module) or (rule.placed and not is_reached(view, found.node))
        if finding.severity is Severity.ERROR and unsure:
            finding = replace(finding, severity=Severity.HINT)
        other = gravest.get(finding.line)
        if other is None or LEVELS.index(finding.severity) < LEVELS.index(other.severity):
            gravest[finding.line] = finding
    yield from gravest.values()


def _finding(rule: Rule, found: Found, module: Module) -> Finding:
    line, column = getattr(found.node, "lineno", 1), _column(module, found.node, "")
    end = getattr(found.node, "end_lineno", line) or line
    remedy = rule.page.remedy
    return Finding(
        module.path,
        line,
        column,
        rule.code,
        found.severity or rule.severity,
        rule.confidence,
        found.message,
        remedy,
        found.edit,
        end,
        found.proposal,
        end_column=_column(module, found.node, "end_"),
    )


def _column(module: Module, node: ast.AST, which: str) -> int:
    """Return the column of a node's begin or end in characters; `ast` counts bytes."""
    line, offset = getattr(node, f"{which}lineno", None) or 1, getattr(node, f"{which}col_offset", None) or 0
    text = module.source.lines[line - 1] if line <= len(module.source.lines) else ""
    return len(text.encode()[:offset].decode(errors="replace")) + 1


def _problem(source: Source) -> Finding:
    assert source.problem is not None
    problem = source.problem
    return Finding(
        source.path, problem.line, 1, PROBLEM, Severity.ERROR, Confidence.HIGH, f"not checked: {problem.message}"
    )
