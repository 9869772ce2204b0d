"""What a verification finds: the first difference with its cause, a row a combination, and the table to print."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lockstep.verify.request import Combination

__all__ = ["STAGES", "Difference", "Row", "Table", "listed"]

_SHARE = 1e-4  # from which on a share is said in per cent

# The stages of a step, in the order in which two runs are compared, and what a first difference there means. Whatever a
# stage computes from is compared before it, so the first that differs is the cause.
STAGES = {
    "determinism": "the same program computes something else when it runs again, so no engine is to blame",
    "initial weights": "the ranks do not begin with the same weights",
    "weights": "something other than the optimizer changed the weights between two updates",
    "data": "the ranks do not read the samples of this step in the run's order",
    "randomness": "random numbers do not depend on the step and the micro-batch alone",
    "forward": "with the same weights, data and generators the model computes another loss",
    "normalisation": "the loss is not divided by the items of the whole step",
    "buffers": "the model's buffers depend on which rank computed what",
    "reduction": "gradients are not the sum over all micro-batches of all ranks",
    "clipping": "the gradient is not clipped by the norm of the whole, unscaled gradient",
    "optimizer": "the same gradient leads to another update",
    "schedule": "the learning rate is not the one of this step",
    "evaluation": "the evaluation does not count every sample once",
    "evaluation kernels": "the evaluation has the same items, but its forward is computed by other kernels",
    "optimizer state": "the optimizer's state is not the one of this step",
}


@dataclass(frozen=True)
class Difference:
    """Where a combination first differs from the reference.

    Attributes:
        step: 0-based.
        stage: the cause, a key of STAGES.
        where: the tensor, or the micro-batch.
        rank: the first rank that differs, -1 where it is no rank's doing; `ranks`: all of them, where known.
        text: what was found there.
    """

    step: int
    stage: str
    where: str
    rank: int
    text: str
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        verdict: "equal" (all bits), "close" (within the tolerance), "different", "not proved", "failed" or
            "unavailable".
        largest: the largest relative difference of a weight after the last step, and in which tensor.
        hidden: share of a step's gradient below which a difference would not have shown.
        difference: the first difference, where the verdict is "different".
        reason: why it failed, cannot run or proves nothing.
    """

    combination: Combination
    verdict: str
    largest: tuple[float, str] = (0.0, "")
    difference: Difference | None = None
    reason: str = ""
    hidden: float = 0.0

    @property
    def ok(self) -> bool:
        return self.verdict in ("equal", "close")

    @property
    def text(self) -> str:
        """What the table says of it."""
        if self.verdict == "equal":
            return "bitwise equal"
        if self.verdict == "close":
            found = f"within rounding: {self.largest[0]:.1e} at most, in {self.largest[1]}"
            under = f"{self.hidden:.2g}" if self.hidden < _SHARE else f"{self.hidden:.2%}"
            return f"{found}; a difference under {under} of the whole gradient's length would not show"
        if self.difference:
            return _shown(self.difference, named=self.combination.world_size > 1)
        return f"{self.verdict}: {self.reason}"


@dataclass
class Table:
    """The outcome of `verify`; `print(table)` shows it, `table.ok` says whether everything agreed.

    Attributes:
        rows: one a combination.
        title: what was compared, and how exactly.
        notes: what applies to all rows: a task that is not deterministic, a planted fault.
        difference: between the single process and itself, or another machine's certificate.
        certificate: what a certificate holds; None where nothing was run.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    difference: Difference | None = None
    certificate: dict[str, Any] | None = None

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


def _shown(found: Difference, *, named: bool) -> str:
    """A difference in words; `named`: there is more than one rank to name."""
    others = [rank for rank in found.ranks if rank != found.rank]
    also = f" (and {listed(others)})" if others else ""
    rank = f"rank {found.rank}{also}, " if named and found.rank >= 0 else ""
    return (
        f"DIFFERENT from step {found.step} on, {rank}{found.where}: {found.text}. "
        f"Cause: {found.stage}: {STAGES[found.stage]}"
    )


def listed(numbers: Iterable[int]) -> str:
    """`0, 1, 2`, shortened where long."""
    texts = [str(number) for number in sorted(numbers)]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], f"... ({len(texts)} of them)"])
