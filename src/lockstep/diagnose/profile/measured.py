"""The ranks' parts as one run's, over a long time: what a change is reckoned from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lockstep.diagnose.profile.parts import PARTS, Parted, saves_of_evaluations
from lockstep.diagnose.profile.reading import NONE, length

__all__ = ["WORTH", "ProfileSummary", "Remedy", "empty"]

_EVENT = 3e-3  # milliseconds: no event costs more
_WAITS = ("data", "host", "records", "evaluation", "checkpoint")  # bottlenecks in which the thread may wait
WORTH = 1.1  # times as fast: what gains less is not proposed


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change.

    Attributes:
        bottleneck: what it removes.
        what: a flag, or a change in words.
        after: milliseconds that a step would take, for as many samples as now.
        why: a clause for the sentence.
        last: it makes another training of it, so that it is proposed only where nothing else gains much.
    """

    bottleneck: str
    what: str
    after: float
    why: str
    last: bool = False


@dataclass(slots=True)
class ProfileSummary:
    """The ranks' parts, and what follows of them. Milliseconds a step.

    Attributes:
        parts: of the mean rank.
        steady: of it, as over a long run: evaluations, saves and records as often as the run makes them; without what
            tracing itself takes, where that was measured.
        step: what a step takes over a long run.
        tracing: what tracing itself takes of a step.
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
        self.tracing = self._untraced()
        marks = self.ranks[0].trace.marks
        saves, best = marks.get("save", NONE), saves_of_evaluations(self.ranks[0].trace)
        of_best = self.steady["checkpoint"] * length(best) / max(length(saves), 1e-9)
        self.steady["evaluation"] += of_best  # without the evaluation they would not have been
        self.steady["checkpoint"] -= of_best
        for name, count, freq in (
            ("evaluation", len(marks.get("evaluate", NONE)), "eval_freq"),
            ("checkpoint", len(saves) - len(best), "ckpt_freq"),
            ("record", len(marks.get("record", NONE)), "log_freq"),
        ):
            every = int(self.option(freq) or 0)
            self.steady[name] *= self.ranks[0].trace.steps / count / every if count and every else 0.0
        self.step = sum(spent for name, spent in self.steady.items() if name != "hidden_communication")

    def _untraced(self) -> float:
        """Takes away what each event of the trace took to be written; how much it was in a step's parts.

        By how much longer an evaluation took for it is not known: there an event takes what one takes by itself.
        """
        gone, least = 0.0, float(self.about.get("event_us", 0.0)) / 1e3
        for rank in self.ranks:
            each = self.event / rank.trace.steps / len(self.ranks)
            events, frames = rank.trace.events, rank.trace.frames
            passes = events.get("forward", 0) + events.get("backward", 0)
            for name, count in (
                ("compute", passes - frames),
                ("host", frames),
                ("update", events.get("update", 0)),
                ("evaluation", events.get("evaluate", 0)),
            ):
                of_one = each if name != "evaluation" else least / rank.trace.steps / len(self.ranks)
                less = min(self.steady[name], count * of_one)
                self.steady[name] -= less
                gone += less * (name != "evaluation")
        return gone

    @property
    def event(self) -> float:
        """Milliseconds that an event of the trace took to be written, of the mean rank.

        By how much longer the thread computed for a step than before the trace, where that is known: what is written
        also drives other things out of the caches. What it waited for meanwhile, another rank or a core, is not in it.
        """
        least, found = float(self.about.get("event_us", 0.0)) / 1e3, []
        for rank in self.ranks:
            longer = rank.trace.about.get("tracing_ms")
            count = sum(rank.trace.events.get(part, 0) for part in ("forward", "backward", "update")) / rank.trace.steps
            known = longer is not None and count
            found.append(min(max(float(longer or 0.0) / count, least), _EVENT) if known else least)
        return fmean(found)

    def warmed(self, remedy: Remedy) -> float:
        """`after` of a remedy; without what caches that are cold after a wait cost, where it takes waits away."""
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
        """A number of the process's own use of the system, a step, of the mean rank."""
        return fmean(float(rank.trace.about.get("usage", {}).get(name, 0.0)) for rank in self.ranks)

    @property
    def on_cpu(self) -> bool:
        return self.ranks[0].trace.on_cpu

    @property
    def cores(self) -> int:
        """Of a rank: what the processes of its host leave it."""
        return max(1, int(self.about.get("cores", 1)) // max(1, int(self.about.get("local_ranks", 1))))

    @property
    def exchanging(self) -> float:
        """The share of the exchanges, from 0 to 1, in which a core is busy with them: gloo copies and adds there."""
        whole = self.steady["exposed_communication"] + self.steady["hidden_communication"]
        if not self.on_cpu or whole <= 0.0:
            return 0.0
        computing = (int(self.about.get("threads", 1)) - 1) * self.steady["compute"]
        return min(1.0, max(0.0, self.usage("others") - computing) / whole)

    @property
    def busy(self) -> float:
        """What a step on a CPU takes at least, whatever lies beside what: its work over all cores of the host."""
        if not self.on_cpu:
            return 0.0
        own = fmean(sum(map(float, rank.trace.about.get("cpu", {}).values())) for rank in self.ranks)
        whole = int(self.about.get("local_ranks", 1)) * (own - self.tracing + self.usage("others"))
        return max(0.0, whole / max(1, int(self.about.get("cores", 1))))

    def without(self, **gone: float) -> float:
        """A step's time without so many milliseconds."""
        return max(self.step - sum(gone.values()), 1e-6)


def empty(run: ProfileSummary) -> float:
    """The share of the positions that hold nothing, over all ranks."""
    said = [rank.trace.about.get("padding") or {} for rank in run.ranks]
    whole = sum(int(each.get("positions", 0)) for each in said)
    return sum(int(each.get("empty", 0)) for each in said) / whole if whole else 0.0
