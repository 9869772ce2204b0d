"""What a comparison finds, and how it is said."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["STAGES", "Finding", "Verdict"]

# In the causal order in which a step is judged: whatever a stage computes from is compared before it.
STAGES = (
    *("initial weights", "weights", "parameters", "data", "randomness", "forward", "normalisation", "buffers"),
    *("gradient", "reduction", "clipping", "optimizer", "schedule", "optimizer state", "evaluation", "steps"),
)
_SHOWN = ("gradients", "gradient norms", "weights", "updates", "buffers", "losses", "samples")  # of what was compared


@dataclass(frozen=True)
class Finding:
    """Where two trainings part.

    Attributes:
        step: of the first trace, counted from 0; `other`: of the second.
        stage: one of STAGES.
        where: the tensor or what else was compared.
        rank: the rank that is wrong, -1 for all.
        cause: the key of causes.CAUSES.
        text: what was found, in numbers.
        way: the cause, and the way out in the framework that is used, in words.
    """

    step: int
    other: int
    stage: str
    where: str
    rank: int
    cause: str
    text: str
    way: str

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank >= 0 else ""
        where = f", {self.where}" if self.where else ""
        step = f"step {self.step}" if self.step == self.other else f"step {self.step} (in the second: {self.other})"
        return f"{step}{rank}, {self.stage}{where}: {self.text}\n  cause: {self.way}"


@dataclass
class Verdict:
    """The outcome.

    Attributes:
        bits: steps, from the first on, whose weights have the same bits in both.
        judged: steps that were compared.
        largest: the largest relative distance of the weights of a step that was judged.
        compared: how many of each kind both runs have and were held against each other, over all steps.
        hidden: share of a gradient below which a difference would not have shown: in the first step, and in any.
        unproven: why what follows cannot be compared: random numbers that differ by construction, rounding that grew.
        missing: what a proof would need and was not there: a run's end, its gradients, a step in common.
        not_finite: how many of each kind are not finite in both runs, which compares nothing.
        notes: what else the person should know.
    """

    one: str
    two: str
    finding: Finding | None = None
    bits: int = 0
    judged: int = 0
    largest: float = 0.0
    compared: Counter[str] = field(default_factory=Counter)
    hidden: tuple[float, float] = (0.0, 0.0)
    unproven: str = ""
    missing: list[str] = field(default_factory=list)
    not_finite: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether the two are proved to be the same training, as far as they were recorded."""
        return self.finding is None and not self.unproven and not self.missing

    @property
    def word(self) -> str:
        """SAME, DIFFERENT or NOT PROVED."""
        return "SAME" if self.same else "DIFFERENT" if self.finding else "NOT PROVED"

    def __str__(self) -> str:
        lines = []
        if self.finding:
            before = f"the {self.bits} steps before it have the same bits" if self.bits else ""
            if not before and self.finding.step and self.judged > 1:
                before = f"before it the weights differ by {self.largest:.1e} of themselves at most"
            lines.append(f"DIFFERENT from {self.finding}")
            lines += [f"  {reason}" for reason in [before, *self.missing] if reason]
        elif self.missing:
            bits = f", {self.bits} of them with the same bits" if self.bits else ""
            lines.append(f"NOT PROVED: no difference in {self.judged} steps{bits}, but {self.missing[0]}")
            lines += [f"  and {reason}" for reason in [*self.missing[1:], *filter(None, [self.unproven])]]
        elif self.unproven:
            lines.append(f"NO MISTAKE FOUND in {self.judged} steps, but not proved: {self.unproven}")
        elif self.bits == self.judged:
            lines.append(f"SAME: the weights of all {self.judged} steps have the same bits")
        else:
            lines.append(
                f"SAME within rounding: {self.judged} steps, the weights differ by {self.largest:.1e} of themselves "
                + "at most"
                + (f"; the same bits to step {self.bits - 1}" if self.bits else "")
            )
        counts = ", ".join(f"{self.compared[kind]} {kind}" for kind in _SHOWN if self.compared[kind])
        if not self.finding:
            lines.append(f"  compared: {counts or 'nothing'}")
        if self.same and self.bits < self.judged:
            lines.append(f"  {self._hidden}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    @property
    def _hidden(self) -> str:
        first, most = (f"{each:.2g}" if each < 1e-4 else f"{each:.2%}" for each in self.hidden)
        later = f" ({most} in later steps)" if most != first else ""
        below = f"an error in a tensor's gradient under {first} of the whole gradient's length{later}"
        return f"would not show: {below}; of a tensor whose gradient is shorter, any"

    def plain(self) -> dict[str, Any]:
        """For `--json`."""
        found = None if self.finding is None else vars(self.finding)
        return {
            "verdict": self.word,
            "same": self.same,
            "one": self.one,
            "two": self.two,
            "finding": found,
            "steps_with_the_same_bits": self.bits,
            "steps": self.judged,
            "largest_relative_difference": self.largest,
            "compared": dict(self.compared),
            "not_finite": self.not_finite,
            "hidden_below": self.hidden[1] if self.bits < self.judged else 0.0,
            "unproven": self.unproven,
            "missing": self.missing,
            "notes": self.notes,
        }
