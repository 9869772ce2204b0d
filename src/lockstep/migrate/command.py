"""Print the result of `lockstep lint --migrate FILE ...`.

The output has each file's kind, its rows, and their counts.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.migrate import lightning, objects, plain, trainer
from lockstep.migrate.parsing import WORK, MigrateProblem, Source, TooIntricate, place, read
from lockstep.migrate.plain import ACTIONS, REFUSED, MigrationRow, ParsedScript

__all__ = ["migrate", "rows_of"]

_OWN_LOOP_GUIDE = "keep the loop and use the parts in docs/own-loop.md, or write a lockstep.Task: docs/coming-from.md"
# Kind -> (rows of a script, what to read next). The first kind with rows wins; the order matters, since a script may
# have both a LightningModule and a Fabric loop.
KINDS: dict[str, tuple[Callable[[ParsedScript], Iterator[MigrationRow]], str]] = {
    "a Hugging Face Trainer": (trainer.rows, "one line becomes two: docs/hf-trainer.md"),
    "a Lightning module": (lightning.rows, "keep the module unchanged: docs/lightning.md"),
    "an Accelerate loop": (lambda script: objects.rows(script, objects.ACCELERATE), _OWN_LOOP_GUIDE),
    "a Fabric loop": (lambda script: objects.rows(script, objects.FABRIC), _OWN_LOOP_GUIDE),
    "a plain DDP loop": (
        lambda script: plain.rows(script) if plain.is_distributed(script) else iter(()),
        _OWN_LOOP_GUIDE,
    ),
    "a plain loop": (plain.rows, _OWN_LOOP_GUIDE),
}


def migrate(paths: list[str], form: str) -> int:
    """Print the migration rows of each file, and return the exit code.

    Args:
        paths: scripts or notebooks.
        form: "text" or "json".

    Returns:
        1 if anything is refused, otherwise 0.

    Raises:
        MigrateProblem: the path is a folder, the file does not parse, or it trains nothing.
        FileNotFoundError: the path does not exist.
    """
    analyses = [(path, *_analyse(path)) for path in paths]
    if form == "json":
        print(
            json.dumps(
                [_json_entry(path, kind, row, source) for path, source, kind, rows in analyses for row in rows],
                indent=2,
            )
        )
    else:
        print("\n\n".join(_format_text(path, source, kind, rows) for path, source, kind, rows in analyses))
    return int(any(row.action == REFUSED for _, _, _, rows in analyses for row in rows))


def _analyse(path: str) -> tuple[Source, str, list[MigrationRow]]:
    if not Path(path).exists():
        raise FileNotFoundError(path)
    if Path(path).is_dir():
        raise MigrateProblem(f"--migrate {path} is a folder: give the training script")
    source = read(path)
    if source.problem is not None:
        raise MigrateProblem(f"--migrate {path}:{source.problem.line}: {source.problem.message}")
    kind, rows = rows_of(source)
    if not kind:
        raise MigrateProblem(
            f"--migrate {path}: no training found (no Trainer, LightningModule, Accelerator, Fabric or backward()): "
            "give the file that trains"
        )
    return source, kind, rows


def rows_of(source: Source) -> tuple[str, list[MigrationRow]]:
    """Return the kind of a parsed script ("" if it trains nothing) and its rows, sorted by line.

    Raises:
        MigrateProblem: the script is too large or too deeply nested to analyse.
    """
    WORK.start()
    try:
        script = ParsedScript(source)
        for kind, (rows, _) in KINDS.items():
            ordered = sorted(dict.fromkeys(rows(script)), key=lambda row: (row.line, ACTIONS.index(row.action)))
            if ordered:
                return kind, ordered
    except (TooIntricate, RecursionError):
        raise MigrateProblem(f"--migrate {source.path}: too large or too deeply nested to analyse: split it") from None
    return "", []


def _format_text(path: str, source: Source, kind: str, rows: list[MigrationRow]) -> str:
    lines = [f"{path}: {kind}: {KINDS[kind][1]}", ""]
    for row in rows:
        lines += [f"{_location(path, source, row)}: {row.code}", f"    {row.action:<8} {row.advice}"]
    counts = Counter(row.action for row in rows)
    totals = ", ".join(f"{counts[action]} {text}" for action, text in _ACTION_LABELS.items() if counts[action])
    return "\n".join([*lines, "", f"{path}: {totals}. Nothing was written."])


_ACTION_LABELS = dict(zip(ACTIONS, ("to replace", "to remove", "unchanged", "refused"), strict=True))


def _location(path: str, source: Source, row: MigrationRow) -> str:
    cell, line = place(source.cells, row.line) if source.cells else (0, row.line)
    return f"{path}:cell {cell}:{line}" if cell else f"{path}:{line}"


def _json_entry(path: str, kind: str, row: MigrationRow, source: Source) -> dict[str, object]:
    cell, line = place(source.cells, row.line) if source.cells else (0, row.line)
    entry: dict[str, object] = {"path": path, "kind": kind, "line": line}
    entry |= {"action": row.action, "there": row.code, "here": row.advice}
    return entry | ({"cell": cell} if cell else {})
