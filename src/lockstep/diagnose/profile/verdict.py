"""Judge the traces of all ranks: the bottleneck, and the one change that gains most.

verdict = judged(read_all(folder))
print(verdict)                        # a table of the parts, and the sentence
verdict.write(folder)                 # verdict.json, which `report` and `scale` read
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.diagnose.profile.measured import WORTH, ProfileSummary, Remedy, empty, in_torch_words
from lockstep.diagnose.profile.parts import parted
from lockstep.diagnose.profile.reading import HEADING, Operation, ProfileTrace, top
from lockstep.diagnose.profile.within import within
from lockstep.files import write_whole

__all__ = [
    "FILE",
    "ProfileVerdict",
    "judged",
]


_RARE = 0.01  # acceptable share of a step for evaluations, saves or records
_BUCKET = 25.0  # MB: DDP's own
_BUCKETS = 8  # wanted, where the gradients are small
_OVERLAPS = 0.8  # share of the last backward: before its first gradients nothing can be exchanged
_OFTEN = 4  # micro-batches in place of one, for less frequent exchanges


def _remedies(run: ProfileSummary) -> Iterator[Remedy]:
    """Yield every change that applies, in no order."""
    for rule in (_data, _imbalance, _communication, _frequency):
        yield from rule(run)
    yield from within(run)


def _data(run: ProfileSummary) -> Iterator[Remedy]:
    """More loader processes: a rank then waits only for loading beyond its own work."""
    slow = max(run.ranks, key=lambda rank: rank.parts["data"])
    spent = slow.parts["data"]
    if spent <= 0.0:
        return
    now = int(run.option("data.workers") or 0)
    cores = run.cores
    remainder = max(slow.own - run.tracing - spent, 1e-3)
    # Of one process: with loaders, the whole step is loading
    loading = spent if not now else (remainder + spent) * now
    workers = min(max(now + 1, math.ceil(loading / remainder) + 1), 64)
    if not now:
        share = float(slow.trace.about.get("cpu", {}).get("data", spent)) / spent
    else:
        share = 1.0
    # The part of loading that takes a core; the rest waits for a disk
    computing = min(1.0, max(0.0, share))
    if computing > 0.5:
        workers = max(now + 1, min(workers, cores))
    own = []
    for rank in run.ranks:
        each = max(rank.own - run.tracing - rank.parts["data"], 0.0)
        if not now:
            loading_time = rank.parts["data"]
        else:
            loading_time = (each + rank.parts["data"]) * now
        # A loader process hands over each micro-batch, which takes both of them
        if not now:
            each += float(rank.trace.about.get("handed_ms", 0.0)) * int(rank.trace.about.get("slots", 1))
        # Work of all cores
        busy = (each + loading_time * computing) / max(1, cores)
        own.append(max(each, loading_time / workers, busy if not now else 0.0))
    after = max(own) + _overhead(run)
    place = "" if _similar(run, "data") else f" on rank {slow.trace.rank}"
    if now:
        how = f"{now} loader processes do not keep up"
    else:
        how = "samples are loaded between the steps"
    yield Remedy(
        "data",
        f"--data.workers {workers}",
        after,
        f"{how}{place}: {spent:.1f} ms of each step are spent waiting for data",
    )


def _imbalance(run: ProfileSummary) -> Iterator[Remedy]:
    """Shares by speed if one rank is slower; by length if ranks take turns."""
    if len(run.ranks) < 2 or run.steady["imbalance"] <= 0.0:
        return
    # The rest is for ranks that had no core, or by chance
    wait = min(run.steady["imbalance"], _lead(run))
    own = [rank.own - run.tracing for rank in run.ranks]
    slow = max(range(len(own)), key=own.__getitem__)
    mean = fmean(each for place, each in enumerate(own) if place != slow)
    if own[slow] > 1.05 * mean:
        # The rest is of ranks that are late in turns
        wait -= own[slow] - fmean(own)
        yield from _slow_rank(run, own, slow, mean)
    if wait <= 0.0:
        return
    after = run.without(imbalance=wait)
    why = f"a different rank is late in each step, by {wait:.1f} ms on average: samples differ in length"
    if run.about.get("shares"):
        yield Remedy("imbalance", "--shares auto, with the task's `work` as the cost of a sample", after, why)
    else:
        yield Remedy("imbalance", "samples of similar length in a micro-batch", after, why)


def _lead(run: ProfileSummary) -> float:
    """The mean lead of a step's slowest rank over the mean, in milliseconds.

    It is that of the ranks' own work.
    """
    steps = zip(*(rank.alone for rank in run.ranks), strict=False)
    return fmean(max(each) - fmean(each) for each in steps)


def _slow_rank(run: ProfileSummary, own: list[float], slow: int, mean: float) -> Iterator[Remedy]:
    """Fewer micro-batches for the rank at `slow`.

    Args:
        own: milliseconds of each rank's own work in a step.
        mean: the mean of the other ranks.
    """
    data = [rank.parts["data"] for rank in run.ranks]
    if data[slow] - min(data) > 0.5 * (own[slow] - mean):
        return  # it is late because of its data alone: see _data
    exchange = _overhead(run)
    fixed = run.steady["update"]
    count = int(run.about.get("micro_batches", len(own)))
    slots = [int(rank.trace.about.get("slots", 1)) for rank in run.ranks]
    each = [(spent - fixed) / max(1, have) for spent, have in zip(own, slots, strict=True)]
    after = _best_cut(each, count) + fixed + exchange
    late = own[slow] / mean - 1.0
    rank = run.ranks[slow].trace
    host = rank.about.get("host", "its host")
    why = f"rank {rank.rank} on {host} is {late:.0%} slower, and the others wait for it"
    if run.about.get("shares") and after < 0.97 * run.step:
        yield Remedy("imbalance", "--shares auto", after, why)
    else:
        change = f"look at rank {rank.rank}: its device, host and data"
        yield Remedy("imbalance", change, mean + exchange, why)


def _best_cut(each: list[float], count: int) -> float:
    """The shortest time of the slowest rank over all divisions of `count` micro-batches.

    Each rank gets one or more; `each` is a micro-batch's time on each rank.
    """
    counts = [1] * len(each)
    for _ in range(count - len(each)):
        place = min(range(len(each)), key=lambda rank: (counts[rank] + 1) * each[rank])
        counts[place] += 1
    return max(have * spent for have, spent in zip(counts, each, strict=True))


def _communication(run: ProfileSummary) -> Iterator[Remedy]:
    """Overlap, half the bytes, or fewer exchanges."""
    exposed = run.steady["exposed_communication"]
    hidden = run.steady["hidden_communication"]
    if exposed <= 0.0:
        return
    parts = f"{exposed:.1f} ms of exchange a step are not hidden, {hidden:.1f} ms are"
    has = run.about.get("engine_options", ())
    megabytes = float(run.about.get("gradient_bytes", 0)) / 1e6
    cap = float(run.option("engine_options.bucket_cap_mb") or _BUCKET)
    slots = max(1, int(run.about.get("slots", 1)))
    if "bucket_cap_mb" in has and hidden < 0.25 * (hidden + exposed) and megabytes > 0 and cap >= megabytes:
        # A single bucket is full only when the backward has ended; of n, all but the last are full within it.
        if megabytes > 2 * _BUCKET:
            size = _BUCKET
        else:
            size = max(0.1, round(megabytes / _BUCKETS, 1))
        buckets = max(1.0, megabytes / size)
        last = fmean(rank.backward for rank in run.ranks) / slots * _OVERLAPS
        savings = min(exposed * (1.0 - 1.0 / buckets), last) * (1.0 - _without_core(run))
        why = f"the gradients are exchanged in one bucket after the backward: {parts}"
        after = max(run.without(savings=savings), min(run.busy, run.step))
        yield Remedy("communication", f"--engine.bucket-cap-mb {size:g}", after, why)
    narrow = "compression" in has and not run.option("exact")
    if narrow and str(run.option("engine_options.compression") or "none") == "none":
        why = f"{parts}; compression halves the bytes"
        # Half the bytes are copied in half the time, but a core that adds them adds bf16 more slowly than float32.
        after = run.without(savings=exposed / 2.0 * (1.0 - run.exchanging))
        yield Remedy("communication", "--engine.compression bf16", after, why)
    size = int(run.option("batch_size") or 0)
    seldom = 1.0 - 1.0 / _OFTEN
    savings = (exposed + run.steady["update"]) * seldom
    change = f"--batch-size {size * _OFTEN} with the same --micro-batch-size: {_OFTEN} times the work per exchange"
    why = f"{parts}; this changes the training: tune --lr again"
    last = exposed < run.without(
        savings=exposed + run.steady["imbalance"]
    )  # half the bytes of a longer one are not enough
    # The exchange's own share, without that of the update
    if run.step > WORTH * run.without(savings=exposed * seldom):
        yield Remedy("communication", change, run.without(savings=savings), why, last)


def _without_core(run: ProfileSummary) -> float:
    """The share of an exchange that has no free core during a backward.

    The threads of the exchange and the computing ones alternate then. Between hosts only a part of it keeps a core
    busy. Within one nothing travels: it is copied from core to core.
    """
    threads, ranks = (int(run.about.get(name, 1)) for name in ("threads", "local_ranks"))
    free = max(0, int(run.about.get("cores", 1)) - threads * ranks)
    if run.on_cpu and ranks == len(run.ranks):
        required = 1.0
    else:
        required = run.exchanging
    return max(0.0, required - free / max(1, ranks))


def _frequency(run: ProfileSummary) -> Iterator[Remedy]:
    """Less frequent evaluations, saves or records."""
    for name, freq, label in (
        ("evaluation", "eval_freq", "an evaluation"),
        ("checkpoint", "ckpt_freq", "a checkpoint"),
        ("record", "log_freq", "a record"),
    ):
        spent = run.steady[name]
        every = int(run.option(freq) or 0)
        if spent <= 0.0 or not every:
            continue
        remainder = run.without(savings=spent)
        interval = _round(max(every + 1, every * spent / (_RARE * remainder)))
        after = remainder + spent * every / interval
        waits = name == "checkpoint" and run.option("checkpoint.mode") == "sync"
        if waits:
            hint = ", or --checkpoint.mode async, which writes in the background"
        else:
            hint = ""
        flag = "--" + freq.replace("_", "-")
        why = f"{label} every {every} steps takes {spent * every:.1f} ms each time, {spent / run.step:.0%} of the time"
        yield Remedy("records" if name == "record" else name, f"{flag} {interval}{hint}", after, why)


def _overhead(run: ProfileSummary) -> float:
    """A step's time beyond the slowest rank's own: exchange, and variation of steps."""
    return max(0.0, run.step + run.tracing - max(rank.own for rank in run.ranks))


def _similar(run: ProfileSummary, part: str) -> bool:
    spent = [rank.parts[part] for rank in run.ranks]
    return max(spent) < 1.5 * max(fmean(spent), 1e-9)


def _round(number: float) -> int:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(number, 1.0)))
    return int(next(each * power for each in (1, 2, 5, 10) if each * power >= number - 1e-9))


_COMPUTE = "compute"
FILE = "verdict.json"
_RULE = 10.0  # compute to exchange: the rule of thumb for training on several devices
_HIGH_EXCHANGE = 0.3  # of a step: from there on, by the same rule, the exchange holds the training back
_OWN_CORE = 0.8  # of the time in operations: with less, the machine is shared
_SLOWED = 1.1  # by tracing: worth a word
_LABELS = {
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
class ProfileVerdict:
    """The verdict over the traces.

    Attributes:
        steps: first and last, as in metrics.jsonl.
        step_ms: milliseconds of a traced step, of the mean rank.
        parts: milliseconds a step, of the mean rank; all but hidden_communication sum to `step_ms`.
        padding: share of positions without anything to learn.
        bottleneck: the part to change first; "compute" if nothing would gain much.
        sentence: the verdict in words.
        what, gain: the next step, and the expected speed-up.
        notes: explanations.
        by_rank: the parts of each rank.
        operations: those with the largest times.
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
        """Format the tables and the sentence."""
        lines = [f"steps {self.steps[0]} to {self.steps[1]} on {self.world_size} rank{'s' * (self.world_size > 1)}:"]
        lines[0] += f" {self.step_ms:.4g} ms a step"
        for name, spent in sorted(self.parts.items(), key=lambda pair: -pair[1]):
            share = spent / max(self.step_ms, 1e-9)
            if share >= 0.001:
                if name == "hidden_communication":
                    inside = "  (within computing)"
                else:
                    inside = ""
                lines.append(f"  {_LABELS[name]:<38} {spent:>9.2f} ms {share:>5.0%}{inside}")
        if self.padding:
            lines.append(f"  {'positions that hold nothing':<38} {'':>12} {self.padding:>5.0%}")
        if self.operations:
            operations = [HEADING, *map(str, self.operations)]
        else:
            operations = []
        return "\n".join([*lines, *operations, *self.notes, self.sentence])

    def as_json(self) -> dict[str, Any]:
        """Return the content of verdict.json."""
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
        """Write verdict.json into `folder`.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(folder / FILE, (json.dumps(self.as_json(), indent=1) + "\n").encode())


def judged(traces: Sequence[ProfileTrace]) -> ProfileVerdict:
    """Judge the traces of all ranks, in the order of the ranks."""
    ranks = parted(traces)
    run = ProfileSummary(ranks)
    step = sum(rank.step for rank in ranks) / len(ranks)
    every = [replace(remedy, after=run.warmed(remedy)) for remedy in _remedies(run)]
    best = min(every, key=lambda remedy: (remedy.last or run.step < WORTH * remedy.after, remedy.after), default=None)
    gain = run.step / best.after if best else 1.0
    if best is None or gain < WORTH:
        best = Remedy(_COMPUTE, _faster(run), run.step, "")
        gain = 1.0
    if run.about.get("script"):
        best = replace(best, what=in_torch_words(best.what), why=in_torch_words(best.why))
    first, last = traces[0].about["steps"]
    return ProfileVerdict(
        (int(first), int(last)),
        len(ranks),
        step,
        run.parts,
        empty(run),
        best.bottleneck,
        _sentence(run, best, gain),
        best.what,
        gain,
        _notes(run),
        [{"step": rank.step, **rank.parts} for rank in ranks],
        top([trace.operations for trace in traces], traces[0].steps, step),
    )


def _faster(run: ProfileSummary) -> str:
    """A way to make the computing itself faster."""
    if not run.on_cpu and not run.option("compile"):
        return "--compile"
    if not run.on_cpu and run.option("precision") == "float32":
        return "--precision bf16"
    return "more or faster devices: `lockstep scale` shows what more of them gain"


def _sentence(run: ProfileSummary, remedy: Remedy, gain: float) -> str:
    if remedy.bottleneck == _COMPUTE:
        share = run.steady["compute"] / max(run.step, 1e-9)
        return (
            f"Computing takes {share:.0%} of a step, and no single change would gain 10 %. Faster still: {remedy.what}"
        )
    times = f"{gain:.2f}" if gain < 10 else f"{gain:.0f}"
    return f"The bottleneck is {remedy.bottleneck}: {remedy.why}. Next: {remedy.what}: about {times} times as fast"


def _notes(run: ProfileSummary) -> list[str]:
    """Explanations of the numbers."""
    notes = []
    exposed = run.steady["exposed_communication"]
    hidden = run.steady["hidden_communication"]
    if len(run.ranks) > 1 and exposed + hidden > 0.0:
        ratio = run.steady["compute"] / (exposed + hidden)
        if ratio >= _RULE:
            short = ""
        else:
            short = "; below 10:1 an exchange can be hidden only where it overlaps the backward"
        notes.append(f"computing to exchange is {ratio:.1f}:1{short}")
        if exposed > _HIGH_EXCHANGE * run.step:
            notes.append(
                f"the exposed exchange is {exposed / run.step:.0%} of a step; above 30 % more ranks hardly "
                "help: first give a larger batch per rank, fewer bytes, or a faster link"
            )
    cpu_time = sum(float(run.about.get("cpu", {}).get(name, 0.0)) for name in ("forward", "backward"))
    compute = run.ranks[0].parts["compute"]
    if run.on_cpu and 0.0 < cpu_time < _OWN_CORE * compute:
        notes.append(
            f"rank 0 had a core for {cpu_time / compute:.0%} of its computing time: other processes use the cores, and "
            "all times here are longer"
        )
    plain = run.about.get("untraced_ms")
    if plain and run.step > _SLOWED * float(plain):
        notes.append(
            f"tracing itself makes steps longer: {float(plain):.3g} ms before it, {run.step:.3g} ms with it; small "
            "operations look larger than they are"
        )
    return notes + list(run.about.get("unseen", ()))
