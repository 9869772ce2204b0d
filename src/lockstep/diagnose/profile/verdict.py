"""The verdict over the traces of all ranks: the bottleneck, and the one change that gains most.

verdict = judged(read_all(folder))
print(verdict)                          # a table of the parts, and the sentence
verdict.write(folder)                   # verdict.json, which `report` and `scale` read
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.diagnose.profile.measured import WORTH, Measured, Remedy, empty
from lockstep.diagnose.profile.operations import HEADING, Operation, top
from lockstep.diagnose.profile.parts import parted
from lockstep.diagnose.profile.reading import Trace
from lockstep.diagnose.profile.remedies import remedies
from lockstep.files import write_whole

__all__ = ["COMPUTE", "FILE", "Verdict", "judged"]

COMPUTE = "compute"
FILE = "verdict.json"
_RULE = 10.0  # compute to exchange: the rule of thumb for training on several devices
_MUCH = 0.3  # of a step: from there on, by the same rule, the exchange holds the training back
_OWN_CORE = 0.8  # of the time in operations: with less, the machine is shared
_SLOWED = 1.1  # by tracing: worth a word
_WORDS = {
    "compute": "computing",
    "hidden_communication": "exchange behind it",
    "exposed_communication": "exchange, waited for",
    "data": "waiting for data",
    "host": "the host (Python, launches, records)",
    "update": "the optimizer's update",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "imbalance": "waiting for slower ranks",
    "queued": "waiting for a core",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the traces say.

    Attributes:
        steps: first and last, as in metrics.jsonl.
        step_ms: milliseconds of a traced step, of the mean rank.
        parts: milliseconds a step, of the mean rank; all but hidden_communication sum to `step_ms`.
        padding: share of the positions that hold nothing to learn from.
        bottleneck: what to change first; "compute" where nothing would gain much.
        sentence: the verdict in words.
        what, gain: the next step, and how many times as fast the training should then be.
        notes: what explains it.
        by_rank: the parts of each rank.
        operations: those that take most of a step, by time.
    """

    steps: tuple[int, int]
    world_size: int
    step_ms: float
    parts: dict[str, float]
    padding: float
    bottleneck: str
    sentence: str
    what: str
    gain: float
    notes: list[str] = field(default_factory=list)
    by_rank: list[dict[str, float]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def __str__(self) -> str:
        """The tables and the sentence."""
        lines = [f"steps {self.steps[0]} to {self.steps[1]} on {self.world_size} rank{'s' * (self.world_size > 1)}:"]
        lines[0] += f" {self.step_ms:.4g} ms a step"
        for name, spent in sorted(self.parts.items(), key=lambda pair: -pair[1]):
            share = spent / max(self.step_ms, 1e-9)
            if share >= 0.001:
                inside = "  (within computing)" if name == "hidden_communication" else ""
                lines.append(f"  {_WORDS[name]:<38} {spent:>9.2f} ms {share:>5.0%}{inside}")
        if self.padding:
            lines.append(f"  {'positions that hold nothing':<38} {'':>12} {self.padding:>5.0%}")
        operations = [HEADING, *map(str, self.operations)] if self.operations else []
        return "\n".join([*lines, *operations, *self.notes, self.sentence])

    def as_json(self) -> dict[str, Any]:
        """What verdict.json holds."""
        return {
            "steps": list(self.steps),
            "world_size": self.world_size,
            "step_ms": round(self.step_ms, 4),
            "parts": {name: round(spent, 4) for name, spent in self.parts.items()},
            "padding": round(self.padding, 4),
            "bottleneck": self.bottleneck,
            "sentence": self.sentence,
            "next": {"what": self.what, "gain": round(self.gain, 3)},
            "notes": self.notes,
            "operations": [each.as_json() for each in self.operations],
            "ranks": [{name: round(spent, 4) for name, spent in each.items()} for each in self.by_rank],
        }

    def write(self, folder: Path) -> None:
        """Writes verdict.json into `folder`. Raises OSError where that is not possible."""
        write_whole(folder / FILE, (json.dumps(self.as_json(), indent=1) + "\n").encode())


def judged(traces: Sequence[Trace]) -> Verdict:
    """The verdict over the traces of all ranks, in the order of the ranks."""
    ranks = parted(traces)
    run = Measured(ranks)
    step = sum(rank.step for rank in ranks) / len(ranks)
    every = [replace(remedy, after=run.warmed(remedy)) for remedy in remedies(run)]
    found = min(every, key=lambda remedy: (remedy.last or run.step < WORTH * remedy.after, remedy.after), default=None)
    gain = run.step / found.after if found else 1.0
    if found is None or gain < WORTH:
        found, gain = Remedy(COMPUTE, _faster(run), run.step, ""), 1.0
    first, last = traces[0].about["steps"]
    return Verdict(
        (int(first), int(last)),
        len(ranks),
        step,
        run.parts,
        empty(run),
        found.bottleneck,
        _sentence(run, found, gain),
        found.what,
        gain,
        _notes(run),
        [{"step": rank.step, **rank.parts} for rank in ranks],
        top([trace.operations for trace in traces], traces[0].steps, step),
    )


def _faster(run: Measured) -> str:
    """What makes the computing itself faster."""
    if not run.on_cpu and not run.option("compile"):
        return "--compile"
    if not run.on_cpu and run.option("precision") == "float32":
        return "--precision bf16"
    return "more or faster devices: `lockstep scale` says what more of them bring"


def _sentence(run: Measured, found: Remedy, gain: float) -> str:
    if found.bottleneck == COMPUTE:
        share = run.steady["compute"] / max(run.step, 1e-9)
        return (
            f"Computing takes {share:.0%} of a step, and no single change would gain 10 %. Faster still: {found.what}"
        )
    times = f"{gain:.2f}" if gain < 10 else f"{gain:.0f}"
    return f"The bottleneck is {found.bottleneck}: {found.why}. Next: {found.what}: about {times} times as fast"


def _notes(run: Measured) -> list[str]:
    """What explains the numbers."""
    found = []
    exposed, hidden = run.steady["exposed_communication"], run.steady["hidden_communication"]
    if len(run.ranks) > 1 and exposed + hidden > 0.0:
        ratio = run.steady["compute"] / (exposed + hidden)
        short = "" if ratio >= _RULE else "; below 10:1 an exchange can be hidden only where it overlaps the backward"
        found.append(f"computing to exchange is {ratio:.1f}:1{short}")
        if exposed > _MUCH * run.step:
            found.append(
                f"the exchange that is waited for is {exposed / run.step:.0%} of a step; above 30 % more ranks hardly "
                "help: a larger batch a rank, fewer bytes, or a faster link come first"
            )
    had = sum(float(run.about.get("cpu", {}).get(name, 0.0)) for name in ("forward", "backward"))
    compute = run.ranks[0].parts["compute"]
    if run.on_cpu and 0.0 < had < _OWN_CORE * compute:
        found.append(
            f"while rank 0 computed it had a core for {had / compute:.0%} of the time: other processes take them, and "
            "all times here are longer for it"
        )
    plain = run.about.get("untraced_ms")
    if plain and run.step > _SLOWED * float(plain):
        found.append(
            f"tracing itself makes steps longer: {float(plain):.3g} ms before it, {run.step:.3g} ms with it; small "
            "operations look larger than they are"
        )
    return found
