"""Summarise the ranks' parts as those of a long run, the basis of remedies."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lockstep.diagnose.profile.parts import PARTS, Parted, saves_of_evaluations
from lockstep.diagnose.profile.reading import NONE, length

__all__ = ["WORTH", "ProfileSummary", "Remedy", "empty", "in_torch_words"]

# Milliseconds. No event costs more.
_EVENT = 3e-3
# Bottlenecks that are waits of the thread.
_WAITS = ("data", "host", "records", "evaluation", "checkpoint")
# Speed-up below which a change is not proposed.
WORTH = 1.1


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to propose.

    Attributes:
        bottleneck: the one that it removes.
        what: a flag, or the change in words.
        after: milliseconds that a step would take, for as many samples as now.
        why: a clause for the sentence.
        last: it changes the training itself, so it is proposed only if nothing else gains much.
    """

    bottleneck: str
    what: str
    after: float
    why: str
    last: bool = False


@dataclass(slots=True)
class ProfileSummary:
    """The ranks' parts and derived numbers, in milliseconds a step.

    Attributes:
        parts: of the mean rank.
        steady: the same over a long run: evaluations, saves and records as often as the run makes them; without the
            cost of tracing, if it was measured.
        step: of a long run.
        tracing: cost of tracing.
    """

    ranks: Sequence[Parted]
    parts: dict[str, float] = field(init=False)
    steady: dict[str, float] = field(init=False)
    step: float = field(init=False)
    tracing: float = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {name: fmean(rank.parts[name] for rank in self.ranks) for name in PARTS}
        record = fmean(rank.record for rank in self.ranks)
        self.steady = self.parts | {"record": record, "host": self.parts["host"] - record}
        self.tracing = self._subtract_tracing()
        marks = self.ranks[0].trace.marks
        saves = marks.get("save", NONE)
        best = saves_of_evaluations(self.ranks[0].trace)
        of_best = self.steady["checkpoint"] * length(best) / max(length(saves), 1e-9)
        # These saves would not exist without the evaluation, so they count with it.
        self.steady["evaluation"] += of_best
        self.steady["checkpoint"] -= of_best
        for name, count, freq in (
            ("evaluation", len(marks.get("evaluate", NONE)), "eval_freq"),
            ("checkpoint", len(saves) - len(best), "ckpt_freq"),
            ("record", len(marks.get("record", NONE)), "log_freq"),
        ):
            every = int(self.option(freq) or 0)
            # The traced steps may have more or fewer of them than a long run: scale to the run's frequency.
            self.steady[name] *= self.ranks[0].trace.steps / count / every if count and every else 0.0
        self.step = sum(milliseconds for name, milliseconds in self.steady.items() if name != "hidden_communication")

    def _subtract_tracing(self) -> float:
        """Subtract the trace's cost of each event, and return the total of a step's parts.

        The slowdown of an evaluation is unknown: an event there counts with its isolated cost.
        """
        cost = 0.0
        least = float(self.about.get("event_us", 0.0)) / 1e3
        for rank in self.ranks:
            event_ms = self.event / rank.trace.steps / len(self.ranks)
            events = rank.trace.events
            frames = rank.trace.frames
            passes = events.get("forward", 0) + events.get("backward", 0)
            for name, count in (
                ("compute", passes - frames),
                ("host", frames),
                ("update", events.get("update", 0)),
                ("evaluation", events.get("evaluate", 0)),
            ):
                if name != "evaluation":
                    of_one = event_ms
                else:
                    of_one = least / rank.trace.steps / len(self.ranks)
                deducted = min(self.steady[name], count * of_one)
                self.steady[name] -= deducted
                cost += deducted * (name != "evaluation")
        return cost

    @property
    def event(self) -> float:
        """Milliseconds to write an event of the trace, of the mean rank.

        It is the thread's extra computing time a step compared with before the trace, if known: writing also evicts
        caches. Its waits meanwhile, for another rank or a core, do not count.
        """
        least = float(self.about.get("event_us", 0.0)) / 1e3
        costs = []
        for rank in self.ranks:
            longer = rank.trace.about.get("tracing_ms")
            count = (
                sum(rank.trace.events.get(phase, 0) for phase in ("forward", "backward", "update")) / rank.trace.steps
            )
            has_time = longer is not None and count
            costs.append(min(max(float(longer or 0.0) / count, least), _EVENT) if has_time else least)
        return fmean(costs)

    def estimate_warm(self, remedy: Remedy) -> float:
        """Return `after` of a remedy, without the cost of cold caches if it removes waits."""
        idle = fmean(float(rank.trace.about.get("idle_ms", 0.0)) for rank in self.ranks)
        if remedy.bottleneck not in _WAITS or idle <= 0.0:
            return remedy.after
        cold = fmean(float(rank.trace.about.get("cold_ms", 0.0)) for rank in self.ranks)
        return max(remedy.after - cold * min(1.0, (self.step - remedy.after) / idle), remedy.after / 3.0)

    @property
    def about(self) -> dict[str, Any]:
        return self.ranks[0].trace.about

    def option(self, name: str) -> Any:
        return self.about.get("options", {}).get(name)

    def usage(self, name: str) -> float:
        """Return a system usage counter of the process, a step, of the mean rank."""
        return fmean(float(rank.trace.about.get("usage", {}).get(name, 0.0)) for rank in self.ranks)

    @property
    def on_cpu(self) -> bool:
        return self.ranks[0].trace.on_cpu

    @property
    def cores(self) -> int:
        """Cores of a rank: its share of the host's."""
        return max(1, int(self.about.get("cores", 1)) // max(1, int(self.about.get("local_ranks", 1))))

    @property
    def exchanging(self) -> float:
        """Share of the exchanges, from 0 to 1, that keep a core busy.

        gloo copies and adds on it.
        """
        total = self.steady["exposed_communication"] + self.steady["hidden_communication"]
        if not self.on_cpu or total <= 0.0:
            return 0.0
        computing = (int(self.about.get("threads", 1)) - 1) * self.steady["compute"]
        return min(1.0, max(0.0, self.usage("others") - computing) / total)

    @property
    def busy(self) -> float:
        """Lower bound of a CPU's step: its work over all cores of the host."""
        if not self.on_cpu:
            return 0.0
        rank_ms = fmean(sum(map(float, rank.trace.about.get("cpu", {}).values())) for rank in self.ranks)
        total = int(self.about.get("local_ranks", 1)) * (rank_ms - self.tracing + self.usage("others"))
        return max(0.0, total / max(1, int(self.about.get("cores", 1))))

    def without(self, **savings: float) -> float:
        """Return a step's time minus so many milliseconds."""
        return max(self.step - sum(savings.values()), 1e-6)


_TORCH_WORDS = (
    (r"--data\.workers (\d+)", r"DataLoader(num_workers=\1)"),
    (r"set --data\.workers to (\d+) or more", r"DataLoader(num_workers=\1) or more"),
    (r"--compile(?: --compile-scope whole)?", "torch.compile(model)"),
    (r"--compile-scope whole", "torch.compile of the whole model"),
    (r"--precision bf16", "torch.autocast with torch.bfloat16"),
    (r"--engine\.bucket-cap-mb ([\d.]+)", r"DistributedDataParallel(bucket_cap_mb=\1)"),
    (r"--batch-size \d+ with the same --micro-batch-size: (\d+)", r"accumulate gradients under no_sync(): \1"),
    (r"raise --batch-size with the same micro-batches to exchange", "accumulate gradients under no_sync() to exchange"),
    (r"tune --lr again", "tune the learning rate again"),
    (r"a smaller --micro-batch-size", "a smaller batch"),
    (r"--(?:eval)-freq (\d+)", r"an evaluation every \1 steps"),
    (r"--(?:ckpt)-freq (\d+)", r"a checkpoint every \1 steps"),
    (r", or --checkpoint\.mode async(?:, which writes in the background)?", ""),
    (r", or set --checkpoint\.mode async", ""),
    (r"raise --ckpt-freq", "save less often"),
    (r"raise --eval-freq to evaluate", "evaluate"),
    (r"the optimizer that the task makes", "the optimizer"),
    (r": `lockstep scale` shows what more of them gain", ""),
)


def in_torch_words(text: str) -> str:
    """Replace lockstep's flags in advice by what a script does in their place."""
    for pattern, words in _TORCH_WORDS:
        text = re.sub(pattern, words, text)
    return text


def empty(run: ProfileSummary) -> float:
    """Return the share of padding positions, over all ranks."""
    counts = [rank.trace.about.get("padding") or {} for rank in run.ranks]
    total = sum(int(count.get("positions", 0)) for count in counts)
    if total:
        return sum(int(count.get("empty", 0)) for count in counts) / total
    return 0.0
