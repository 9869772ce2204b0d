"""What a proof found, as a table to print and rows to read."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.diagnose.combination import Combination
from lockstep.diagnose.stages import explain
from lockstep.diagnose.values import Difference, listed

__all__ = ["Row", "Table"]


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        verdict: "equal" (all bits), "close" (within the tolerance), "different", "failed" or "unavailable".
        largest: the largest relative difference of a weight after the last step, and in which tensor.
        difference: the first difference, where the verdict is "different".
        reason: why it failed or cannot run.
    """

    combination: Combination
    verdict: str
    largest: tuple[float, str] = (0.0, "")
    difference: Difference | None = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in ("equal", "close")

    @property
    def text(self) -> str:
        """What the table says of it."""
        if self.verdict == "equal":
            return "bitwise equal"
        if self.verdict == "close":
            return f"within rounding: {self.largest[0]:.1e} at most, in {self.largest[1]}"
        if self.difference:
            return _shown(self.difference)
        return f"{self.verdict}: {self.reason}"


@dataclass
class Table:
    """The outcome of `verify`; `print(table)` shows it, `table.ok` says whether everything agreed.

    Attributes:
        rows: one a combination.
        title: what was compared, and how exactly.
        notes: what applies to all rows: a task that is not deterministic, a planted fault.
        difference: between the single process and itself, or another machine's certificate.
        certificate: what `certificate.json` holds; None where nothing was run.
        path: where it was written.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    difference: Difference | None = None
    certificate: dict[str, Any] | None = None
    path: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every combination that ran agrees."""
        ran = [row for row in self.rows if row.verdict != "unavailable"]
        return self.difference is None and bool(ran) and all(row.ok for row in ran)

    @property
    def unavailable(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "unavailable"]

    def __str__(self) -> str:
        width = max((len(str(row.combination)) for row in self.rows), default=0)
        lines = [f"  {'ok' if row.ok else '--':<3} {row.combination!s:<{width}}  {row.text}" for row in self.rows]
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([self.title, *lines, *notes])


def _shown(found: Difference) -> str:
    others = [rank for rank in found.ranks if rank != found.rank]
    also = f" (and {listed(others)})" if others else ""
    return (
        f"DIFFERENT from step {found.step} on, rank {found.rank}{also}, {found.where}: {found.text}. "
        f"Cause: {found.stage}: {explain(found.stage)}"
    )
