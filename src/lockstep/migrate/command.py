"""Print the result of `lockstep lint --migrate FILE ...`.

It shows each file's kind, its rows, and their counts.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.migrate import lightning, objects, plain, trainer
from lockstep.migrate.parsing import WORK, MigrateProblem, Source, TooIntricate, place, read
from lockstep.migrate.plain import ACTIONS, REFUSED, Row, Script

__all__ = ["migrate", "rows_of"]

_OWN_LOOP = "its loop stays, with the parts of docs/own-loop.md; or write a lockstep.Task: docs/coming-from.md"
# Kind -> its rows of a script, and where to read on. The first that fits wins, except for modules of Lightning
# and loops around a Fabric, which may occur together.
KINDS: dict[str, tuple[Callable[[Script], Iterator[Row]], str]] = {
    "a Hugging Face Trainer": (trainer.rows, "one line of it becomes two: docs/hf-trainer.md"),
    "a Lightning module": (lightning.rows, "the module stays as it is: docs/lightning.md"),
    "an Accelerate loop": (lambda script: objects.rows(script, objects.ACCELERATE), _OWN_LOOP),
    "a Fabric loop": (lambda script: objects.rows(script, objects.FABRIC), _OWN_LOOP),
    "a plain DDP loop": (lambda script: plain.rows(script) if plain.is_distributed(script) else iter(()), _OWN_LOOP),
    "a plain loop": (plain.rows, _OWN_LOOP),
}


def migrate(paths: list[str], form: str) -> int:
    """Print what becomes of each file, and return the exit code.

    It is 1 if something is refused, else 0.

    Raises:
        MigrateProblem: a path that is no file, a file that does not parse, or one without any training.
        FileNotFoundError: the path does not exist.
    """
    found = [(path, *_told(path)) for path in paths]
    if form == "json":
        print(
            json.dumps([_data(path, kind, row, source) for path, source, kind, rows in found for row in rows], indent=2)
        )
    else:
        print("\n\n".join(_text(path, source, kind, rows) for path, source, kind, rows in found))
    return int(any(row.action == REFUSED for _, _, _, rows in found for row in rows))


def _told(path: str) -> tuple[Source, str, list[Row]]:
    if not Path(path).exists():
        raise FileNotFoundError(path)
    if Path(path).is_dir():
        raise MigrateProblem(f"--migrate {path} is a folder: name the script that trains")
    source = read(path)
    if source.problem is not None:
        raise MigrateProblem(f"--migrate {path}:{source.problem.line}: {source.problem.message}")
    kind, rows = rows_of(source)
    if not kind:
        raise MigrateProblem(
            f"--migrate {path}: nothing trains in it (no Trainer, LightningModule, Accelerator, Fabric or backward()): "
            "name the file that does"
        )
    return source, kind, rows


def rows_of(source: Source) -> tuple[str, list[Row]]:
    """Return the kind of a parsed script ("" for none) and its rows, by line.

    Raises:
        MigrateProblem: it is too large or nested to be analysed.
    """
    WORK.start()
    try:
        script = Script(source)
        for kind, (rows, _) in KINDS.items():
            found = sorted(dict.fromkeys(rows(script)), key=lambda row: (row.line, ACTIONS.index(row.action)))
            if found:
                return kind, found
    except (TooIntricate, RecursionError):
        raise MigrateProblem(f"--migrate {source.path}: is too large or nested to be followed: split it") from None
    return "", []


def _text(path: str, source: Source, kind: str, rows: list[Row]) -> str:
    lines = [f"{path}: {kind}: {KINDS[kind][1]}", ""]
    for row in rows:
        lines += [f"{_where(path, source, row)}: {row.there}", f"    {row.action:<8} {row.here}"]
    counts = Counter(row.action for row in rows)
    told = ", ".join(f"{counts[action]} {text}" for action, text in ACTIONS_TOLD.items() if counts[action])
    return "\n".join([*lines, "", f"{path}: {told}. Nothing was written."])


ACTIONS_TOLD = dict(zip(ACTIONS, ("become others", "go", "stay", "refused"), strict=True))


def _where(path: str, source: Source, row: Row) -> str:
    cell, line = place(source.cells, row.line) if source.cells else (0, row.line)
    return f"{path}:cell {cell}:{line}" if cell else f"{path}:{line}"


def _data(path: str, kind: str, row: Row, source: Source) -> dict[str, object]:
    cell, line = place(source.cells, row.line) if source.cells else (0, row.line)
    found: dict[str, object] = {"path": path, "kind": kind, "line": line}
    found |= {"action": row.action, "there": row.there, "here": row.here}
    return found | ({"cell": cell} if cell else {})
