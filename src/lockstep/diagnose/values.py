"""What a comparison works on, and what it finds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.diagnose.tolerance import Allowance

__all__ = ["Difference", "Traces", "listed", "of_tensors"]


@dataclass(frozen=True)
class Difference:
    """Where a combination first differs from the reference.

    Attributes:
        step: 0-based.
        stage: the cause, one of lockstep.diagnose.stages.
        where: the tensor, or the micro-batch.
        rank: the first rank that differs; `ranks`: all of them, where known.
        text: what was found there.
    """

    step: int
    stage: str
    where: str
    rank: int
    text: str
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Traces:
    """What is compared.

    Attributes:
        reference: the single process's trace; ranks: the traces of a combination.
        allowance: what may differ.
        clip: largest norm of a gradient; 0: not clipped.
        drift: how far an evaluation may be off besides (see Allowance.drift).
    """

    reference: dict[str, Any]
    ranks: list[dict[str, Any]]
    allowance: Allowance
    clip: float = 0.0
    drift: float = 0.0

    def records(self, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(rank, record of the step)."""
        for trace in self.ranks:
            yield trace["rank"], trace["steps"][step]

    def slots(self, step: int) -> dict[int, dict[str, Any]]:
        """The reference's micro-batches of a step, by number."""
        return {slot["micro"]: slot for slot in self.reference["steps"][step]["slots"] if slot["weight"]}

    def pairs(self, step: int) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """(rank, its micro-batch, the reference's) for all that count."""
        wanted = self.slots(step)
        for rank, record in self.records(step):
            for slot in record["slots"]:
                if slot["weight"]:
                    yield rank, slot, wanted[slot["micro"]]


def of_tensors(traces: Traces, step: int, kind: str, stage: str) -> Iterator[Difference]:
    """Tensors of a kind that differ from the reference's, then those that ranks should hold alike and do not."""
    found = [(rank, record[kind]) for rank, record in traces.records(step) if kind in record]
    for rank, part in found:
        if part["missing"]:
            text = "it is on one side only"
            yield Difference(step, stage, part["missing"][0], rank, text)
        if part["first"]:
            ranks = [other for other, their in found if their["first"]]
            yield Difference(step, stage, part["first"]["name"], rank, described(part["first"]), ranks)
    for rank, part in found[1:]:
        first = found[0][1]["digests"]
        names = [name for name, bits in part["digests"].items() if first.get(name, bits) != bits]
        if names:
            text = f"its bits are not those of rank {found[0][0]}, which should hold the same"
            yield Difference(step, stage, names[0], rank, text)


def described(first: dict[str, Any]) -> str:
    """The largest difference in a tensor, in words."""
    mine, wanted = first["values"]
    if isinstance(mine, str):
        return f"it is {mine} instead of {wanted}"
    place = f"[{', '.join(str(index) for index in first['at'])}]" if first["at"] else ""
    limit = "no difference" if first["allowed"] <= 0 else f"{first['allowed']:.2g}"
    return (
        f"{place} is {mine!r} instead of {wanted!r}; off by {first['difference']:.2g} where {limit} is allowed".strip()
    )


def listed(numbers: Iterable[int]) -> str:
    """`0, 1, 2`, shortened where long."""
    texts = [str(number) for number in sorted(numbers)]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], f"... ({len(texts)} of them)"])
