"""`lockstep lint [PATH ...]`: check files. Exit 0 without errors, 1 with some, 2 for bad input."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from lockstep_lint.analysis.imports import SKIPPED
from lockstep_lint.analysis.source import read
from lockstep_lint.config import Config, ConfigProblem, configure, find_table
from lockstep_lint.finding import Finding
from lockstep_lint.fixes import FixProblem, diff, fix_files
from lockstep_lint.output import FORMATS, render, summary
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_paths, in_order

__all__ = ["command", "find_files"]


def find_files(paths: list[str]) -> list[str]:
    """Return the Python files and notebooks at and under `paths`, sorted, each once. Raises FileNotFoundError."""
    found: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            found.update(dict.fromkeys(_under(path)))
        elif os.path.exists(path):
            found[path] = None
        else:
            raise FileNotFoundError(path)
    return sorted(found)


def _under(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        for name in names:
            if name.endswith((".py", ".ipynb")) and not name.startswith("."):
                yield str(Path(parent) / name)


# A correction may show the next one on its line; a bound for corrections that would show each other for ever.
MAX_ROUNDS = 20


def command(argv: list[str], prog: str = "lockstep lint") -> int:
    """Run the linter with the arguments `argv`, and return its exit code.

    Args:
        argv: the arguments after the command's name.
        prog: the name that the command was called by, for usage and messages.
    """
    try:
        args = parser(prog).parse_args(argv)
    except SystemExit as end:  # argparse has printed its line, or the help
        return 2 if end.code else 0
    try:
        return explain(args.explain, prog) if args.explain else check(args, prog)
    except FileNotFoundError as error:
        return refuse(prog, f"there is no file or folder '{error.args[0]}': name one that exists")
    except (ConfigProblem, FixProblem) as problem:
        return refuse(prog, str(problem))


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag on one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser(prog: str = "lockstep lint") -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = _Parser(prog=prog, description="Finds mistakes in PyTorch training scripts.")
    flags.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="files and folders (default: here)")
    flags.add_argument("--hints", action="store_true", help="report what only costs time or memory too; exits 0 for it")
    flags.add_argument("--select", metavar="CODES", help="the rules to run, such as LS004,LS018, or ALL")
    flags.add_argument("--ignore", metavar="CODES", help="rules to leave out")
    flags.add_argument("--format", choices=FORMATS, default="text", help="how to print findings (default: text)")
    flags.add_argument("--sarif-file", metavar="FILE", help="write the findings to FILE as SARIF too")
    flags.add_argument("--fix", action="store_true", help="make the corrections that are safe")
    flags.add_argument("--unsafe-fixes", action="store_true", help="print the next corrections as a diff to read")
    flags.add_argument("--explain", metavar="CODE", help="print what a rule finds, why it matters and what to write")
    return flags


def check(args: argparse.Namespace, prog: str) -> int:
    """Check the paths and print the findings."""
    paths = find_files(args.paths)
    if not paths:
        places = ", ".join(f"'{path}'" for path in args.paths)
        print(f"{prog}: warning: no Python file or notebook under {places}", file=sys.stderr)
        if args.format == "text":
            return 0
    groups = settings(args, paths)
    findings, hints = check_all(groups), any(config.hints or config.named for config, _ in groups)
    if args.fix:
        findings = fix(findings, groups)
    if args.sarif_file:
        write_sarif(args.sarif_file, findings, prog)
    if args.unsafe_fixes:
        proposed = diff(findings)
        print(proposed, end="")
        print(summary(findings, hints), file=sys.stderr)
        if findings and not proposed:
            print("nothing to propose: no finding has a correction that can be written here", file=sys.stderr)
        return 1 if fail(findings, groups) else 0
    lines = sources(findings) if args.format in ("text", "sarif") else {}
    print(render(findings, args.format, lines, prog, hints=hints))
    return 1 if fail(findings, groups) else 0


def fail(findings: list[Finding], groups: list[tuple[Config, list[str]]]) -> bool:
    """Check whether some finding makes the command exit with 1, under its file's configuration."""
    configs = {path: config for config, paths in groups for path in paths}
    return any(configs[finding.path].fails(finding) for finding in findings)


def write_sarif(path: str, findings: list[Finding], prog: str) -> None:
    """Write the findings to a file as SARIF. Raises ConfigProblem where it cannot be written."""
    try:
        Path(path).write_text(render(findings, "sarif", sources(findings), prog) + "\n", encoding="utf-8")
    except OSError as error:
        message = f"--sarif-file: cannot write '{path}' ({error.strerror}): name a file in a folder that exists"
        raise ConfigProblem(message) from None


def fix(findings: list[Finding], groups: list[tuple[Config, list[str]]]) -> list[Finding]:
    """Apply the safe corrections until none is left. Returns the remaining findings."""
    total, assumed = 0, (0, 0)
    for _ in range(MAX_ROUNDS):
        changed, needed = fix_files(findings)
        total, assumed = total + changed, max(assumed, needed)
        if not changed:
            break
        findings = check_all(groups)
    if total:
        print(f"fixed {total} place{'s' * (total > 1)}", file=sys.stderr)
    elif findings:
        print(describe_unfixed(findings), file=sys.stderr)
    if assumed > (0, 0):
        version = ".".join(map(str, assumed))
        print(f"no file of the project pins torch: assumed {version} or newer", file=sys.stderr)
    return findings


def describe_unfixed(findings: list[Finding]) -> str:
    """Tell that nothing was corrected, and whether --unsafe-fixes has corrections to read."""
    found = f"fixed nothing: {len(findings)} finding{'s' * (len(findings) > 1)}, none that --fix can correct"
    return f"{found}; --unsafe-fixes prints corrections to read first" if diff(findings) else found


def check_all(groups: list[tuple[Config, list[str]]]) -> list[Finding]:
    """Return the findings in all files, each under the configuration that holds for it."""
    return in_order(finding for config, paths in groups for finding in check_paths(paths, config))


def settings(args: argparse.Namespace, paths: list[str]) -> list[tuple[Config, list[str]]]:
    """Group the files by their project's configuration, with the flags applied."""
    homes: dict[str, list[str]] = {}
    for path in paths:
        homes.setdefault(os.path.dirname(os.path.abspath(path)), []).append(path)
    groups: dict[str, tuple[Config, list[str]]] = {}
    for folder, files in (homes or {os.getcwd(): []}).items():
        table, root = find_table(Path(folder))
        if root not in groups:
            groups[root] = configure(table, args.select, args.ignore, root, hints=args.hints), []
        groups[root][1].extend(files)
    return list(groups.values())


def sources(findings: list[Finding]) -> dict[str, list[str]]:
    """Return the lines of the files, or of the notebooks' cells, that have findings."""
    lines: dict[str, list[str]] = {}
    for path in {finding.path for finding in findings}:
        if path.endswith(".ipynb"):
            source = read(path)
            starts = [cell.start for cell in source.cells] + [len(source.lines) + 1]
            for cell, end in zip(source.cells, starts[1:], strict=True):
                lines[f"{path}:cell {cell.number}"] = source.lines[cell.start - 1 : end - 1]
            continue
        try:
            lines[path] = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines[path] = []
    return lines


def explain(code: str, prog: str) -> int:
    """Print a rule's page."""
    rule = RULES.get(code.upper())
    if rule is None:
        return refuse(prog, f"--explain: there is no rule '{code}': use a code from {min(RULES)} to {max(RULES)}")
    print(rule.page.text.rstrip())
    return 0


def refuse(prog: str, message: str) -> int:
    """Print in one line why nothing was checked, and return the exit code."""
    print(f"{prog}: error: {message}", file=sys.stderr)
    return 2
