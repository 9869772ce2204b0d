"""Cases of tests/pitfalls: small edits of complete scripts, with the expected findings.

`NAME.py.txt` is a script without a mistake, and `NAME.diff` has its cases. A case begins with `== what it is`; a line
`!! reason` says that the linter does not tell it yet. Then come edits: lines that stay begin with a space, lines that
go with `-`, new ones with `+`; `@@` parts two edits, and `@@ FILE.py` adds a file. A line that ends in
`# <- LS002 LS007` must have these findings, `# <- error` one that is an error, of whatever rule, and `# <- any` one of
whatever rule. No other line may have any. A case without such a mark is right as it is, and must be silent.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["SCRIPTS", "Case", "cases", "script"]

FOLDER = Path(__file__).parent / "pitfalls"
SCRIPTS = sorted(path.name.removesuffix(".py.txt") for path in FOLDER.glob("*.py.txt"))
MARK = re.compile(r"\s*# <- (?P<codes>[\w ]+)$")


@dataclass
class Case:
    """One pitfall planted in a script, or one more way to write the script rightly."""

    base: str
    name: str
    missed: str = ""
    edits: list[list[str]] = field(default_factory=list)
    added: dict[str, list[str]] = field(default_factory=dict)

    def write(self, folder: Path) -> set[tuple[str, int, str]]:
        """Write the files of the case. Returns (file, line, code) of each expected finding."""
        lines = script(self.base).splitlines()
        for edit in self.edits:
            lines = edited(lines, edit)
        files = {f"{self.base}.py": lines, **{name: [line[1:] for line in new] for name, new in self.added.items()}}
        wanted: set[tuple[str, int, str]] = set()
        for name, content in files.items():
            for number, line in enumerate(content, 1):
                mark = MARK.search(line)
                wanted.update((name, number, code) for code in (mark["codes"].split() if mark else ()))
            (folder / name).write_text("\n".join(MARK.sub("", line) for line in content) + "\n", encoding="utf-8")
        return wanted


def script(base: str) -> str:
    """Return the text of a script without a mistake."""
    return (FOLDER / f"{base}.py.txt").read_text(encoding="utf-8")


def edited(lines: list[str], edit: list[str]) -> list[str]:
    """Apply an edit, whose old lines must occur in one place."""
    old = [MARK.sub("", line[1:]) for line in edit if line[0] != "+"]
    new = [line[1:] for line in edit if line[0] != "-"]
    bare = [MARK.sub("", line) for line in lines]
    places = [at for at in range(len(lines) - len(old) + 1) if bare[at : at + len(old)] == old]
    if len(places) != 1:
        raise ValueError(f"{len(places)} places have these lines: {old}")
    return lines[: places[0]] + new + lines[places[0] + len(old) :]


def cases(base: str) -> Iterator[Case]:
    """Return the cases of a script, in the order of its file."""
    case: Case | None = None
    edit: list[str] = []
    for line in (FOLDER / f"{base}.diff").read_text(encoding="utf-8").splitlines():
        sign, rest = line[:2], line[2:].strip()
        if sign == "==":
            if case is not None:
                yield case
            edit = []
            case = Case(base, rest, edits=[edit])
        elif case is None or not line:
            continue  # what the file says of itself
        elif sign == "!!":
            case.missed = rest
        elif sign == "@@" and rest:
            edit = case.added.setdefault(rest, [])
        elif sign == "@@":
            edit = []
            case.edits.append(edit)
        elif line[0] in " +-":
            edit.append(line)
        else:
            raise ValueError(f"{base}.diff: neither an edit nor a note: {line}")
    if case is not None:
        yield case
