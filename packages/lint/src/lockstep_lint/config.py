"""Select the rules of each file: defaults, `[tool.lockstep.lint]` of pyproject.toml, flags."""

import fnmatch
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from lockstep_lint.finding import Finding, Severity
from lockstep_lint.rules import MERGED, RULES

__all__ = ["Config", "ConfigProblem", "configure", "find_table"]

KEYS = ("select", "ignore", "hints", "per-file")


class ConfigProblem(Exception):
    """A setting that does not hold. The message is one line: what, where, and the way out."""


def default_codes(hints: bool = True) -> frozenset[str]:
    """Return the rules that run by default: those for errors, and with `hints` for hints."""
    off = {Severity.OPINION} if hints else {Severity.OPINION, Severity.HINT}
    return frozenset(code for code, rule in RULES.items() if rule.severity not in off)


@dataclass(frozen=True)
class Config:
    """The rules that run, and the levels of findings that are reported.

    Attributes:
        codes: the rules that run.
        named: the rules that were selected, whose findings of all levels are reported and count.
        hints: report hints.
        per_file: pairs of a pattern and the rules that are ignored in files that match it.
        root: the folder that patterns are relative to.
    """

    codes: frozenset[str] = field(default_factory=default_codes)
    named: frozenset[str] = frozenset()
    hints: bool = True
    per_file: tuple[tuple[str, frozenset[str]], ...] = ()
    root: str = ""

    def reports(self, finding: Finding) -> bool:
        """Check whether a finding's level is asked for."""
        wanted = finding.severity is Severity.ERROR or (self.hints and finding.severity is Severity.HINT)
        return wanted or finding.rule in self.named

    def fails(self, finding: Finding) -> bool:
        """Check whether a finding makes the command exit with 1. Errors and selected rules do."""
        return finding.severity is Severity.ERROR or finding.rule in self.named

    def codes_for(self, path: str) -> frozenset[str]:
        """Return the rules that run on one file."""
        if not self.per_file:
            return self.codes
        relative = os.path.relpath(path, self.root or ".").replace(os.sep, "/")
        ignored = (codes for pattern, codes in self.per_file if fnmatch.fnmatch(relative, pattern))
        return self.codes.difference(*ignored)


def configure(
    table: dict[str, object], select: str | None, ignore: str | None, root: str = "", *, hints: bool = False
) -> Config:
    """Combine the file's table with the flags. A flag replaces the file's setting."""
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise ConfigProblem(f"pyproject.toml: [tool.lockstep.lint] has no key '{unknown[0]}': use {', '.join(KEYS)}")
    chosen = _codes(select.split(","), "--select") if select is not None else None
    if chosen is None and "select" in table:
        chosen = _codes(_read_list(table["select"], "select"), "select")
    if ignore is not None:
        ignored = _codes(ignore.split(","), "--ignore")
    else:
        ignored = _codes(_read_list(table.get("ignore", []), "ignore"), "ignore")
    hints = hints or _read_switch(table.get("hints", False))
    codes = (default_codes(hints) if chosen is None else chosen) - ignored
    return Config(codes, codes & (chosen or frozenset()), hints, _per_file(table.get("per-file", {})), root)


def find_table(start: Path) -> tuple[dict[str, object], str]:
    """Return the `[tool.lockstep.lint]` table that holds for a folder, and the folder of its pyproject.toml.

    It is the nearest at or above `start`, up to the repository's root: a package of a repository that says nothing of
    lint takes the repository's.
    """
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        table = _read_table(path) if path.is_file() else None
        if table is not None:
            return table, str(folder)
        if (folder / ".git").exists():
            break
    return {}, ""


def _read_table(path: Path) -> dict[str, object] | None:
    try:
        data: object = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigProblem(f"{path}: is not valid TOML ({str(error).splitlines()[0]}): correct it") from None
    for key in ("tool", "lockstep", "lint"):
        data = data.get(key) if isinstance(data, dict) else None
    if data is None:
        return None
    if not isinstance(data, dict):
        raise ConfigProblem(f"{path}: tool.lockstep.lint must be a table")
    return data


def _read_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigProblem("pyproject.toml: [tool.lockstep.lint] hints must be true or false")


def _read_list(value: object, key: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ConfigProblem(f'pyproject.toml: [tool.lockstep.lint] {key} must be a list of rules, such as ["LS004"]')


def _codes(names: list[str], where: str) -> frozenset[str]:
    """Return the rules that a list names; ALL means every rule."""
    found: set[str] = set()
    for name in (name.strip().upper() for name in names):
        if name == "ALL":
            found.update(RULES)
        elif name in RULES:
            found.add(name)
        elif name in MERGED:
            found.add(MERGED[name])
        elif name:
            raise ConfigProblem(f"{where}: there is no rule '{name}': use ALL or codes from LS001 to {max(RULES)}")
    return frozenset(found)


def _per_file(value: object) -> tuple[tuple[str, frozenset[str]], ...]:
    if not isinstance(value, dict):
        raise ConfigProblem("pyproject.toml: [tool.lockstep.lint] per-file must be a table of pattern = [rules]")
    return tuple((pattern, _codes(_read_list(codes, "per-file"), "per-file")) for pattern, codes in value.items())
