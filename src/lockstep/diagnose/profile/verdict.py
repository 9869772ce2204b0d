"""Judge the traces of all ranks: the bottleneck, and the one change that gains most.

verdict = judge(read_all(folder))
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
from lockstep.diagnose.profile.parts import split_times
from lockstep.diagnose.profile.reading import HEADING, Operation, ProfileTrace, top
from lockstep.diagnose.profile.within import within
from lockstep.files import write_whole
from lockstep.records import VERDICT_FILE

__all__ = [
    "ProfileVerdict",
    "judge",
]


# Acceptable share of a step for evaluations, saves or records.
_RARE = 0.01
# MB of DDP's own buckets.
_BUCKET = 25.0
# Buckets to aim for if the gradients are small.
_BUCKETS = 8
# Share of the last backward: before its first gradients nothing can be exchanged.
_OVERLAPS = 0.8
# Micro-batches in place of one, for less frequent exchanges.
_OFTEN = 4


def _remedies(run: ProfileSummary) -> Iterator[Remedy]:
    """Yield every change that applies, in no order."""
    for rule in (_data, _imbalance, _communication, _frequency):
        yield from rule(run)
    yield from within(run)


def _data(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose more loader processes: a rank then waits only for loading beyond its own work."""
    slow = max(run.ranks, key=lambda rank: rank.parts["data"])
    waiting_ms = slow.parts["data"]
    if waiting_ms <= 0.0:
        return
    workers_now = int(run.option("data.workers") or 0)
    cores = run.cores
    remainder = max(slow.own - run.tracing - waiting_ms, 1e-3)
    # The loading time of one process. With loaders, each loads during a whole step.
    loading = waiting_ms if not workers_now else (remainder + waiting_ms) * workers_now
    workers = min(max(workers_now + 1, math.ceil(loading / remainder) + 1), 64)
    if not workers_now:
        share = float(slow.trace.about.get("cpu", {}).get("data", waiting_ms)) / waiting_ms
    else:
        share = 1.0
    # The share of loading that takes a core; the rest waits for a disk.
    computing = min(1.0, max(0.0, share))
    if computing > 0.5:
        workers = max(workers_now + 1, min(workers, cores))
    work_of_ranks = []
    for rank in run.ranks:
        rank_work = max(rank.own - run.tracing - rank.parts["data"], 0.0)
        if not workers_now:
            loading_time = rank.parts["data"]
        else:
            loading_time = (rank_work + rank.parts["data"]) * workers_now
        # A loader process hands over each micro-batch, which takes time on both sides.
        if not workers_now:
            rank_work += float(rank.trace.about.get("handed_ms", 0.0)) * int(rank.trace.about.get("slots", 1))
        # The work on all cores.
        busy = (rank_work + loading_time * computing) / max(1, cores)
        work_of_ranks.append(max(rank_work, loading_time / workers, busy if not workers_now else 0.0))
    after = max(work_of_ranks) + _overhead(run)
    where = "" if _similar(run, "data") else f" on rank {slow.trace.rank}"
    if workers_now:
        how = f"{workers_now} loader processes do not keep up"
    else:
        how = "samples are loaded between the steps"
    yield Remedy(
        "data",
        f"--data.workers {workers}",
        after,
        f"{how}{where}: {waiting_ms:.1f} ms of each step are spent waiting for data",
    )


def _imbalance(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose shares by speed if one rank is slower; by length if ranks take turns."""
    if len(run.ranks) < 2 or run.steady["imbalance"] <= 0.0:
        return
    # The rest of the wait is for ranks that had no core, or is chance.
    wait = min(run.steady["imbalance"], _lead(run))
    work_of_ranks = [rank.own - run.tracing for rank in run.ranks]
    slow = max(range(len(work_of_ranks)), key=work_of_ranks.__getitem__)
    mean = fmean(work for index, work in enumerate(work_of_ranks) if index != slow)
    if work_of_ranks[slow] > 1.05 * mean:
        # The rest of the wait is for ranks that are late in turns.
        wait -= work_of_ranks[slow] - fmean(work_of_ranks)
        yield from _slow_rank(run, work_of_ranks, slow, mean)
    if wait <= 0.0:
        return
    after = run.without(imbalance=wait)
    why = f"a different rank is late in each step, by {wait:.1f} ms on average: samples differ in length"
    if run.about.get("shares"):
        yield Remedy("imbalance", "--shares auto, with the task's `work` as the cost of a sample", after, why)
    else:
        yield Remedy("imbalance", "samples of similar length in a micro-batch", after, why)


def _lead(run: ProfileSummary) -> float:
    """Return the mean lead of a step's slowest rank over the mean, in milliseconds.

    It is that of the ranks' own work.
    """
    steps = zip(*(rank.alone for rank in run.ranks), strict=False)
    return fmean(max(work) - fmean(work) for work in steps)


def _slow_rank(run: ProfileSummary, own: list[float], slow: int, mean: float) -> Iterator[Remedy]:
    """Propose fewer micro-batches for the rank at `slow`.

    Args:
        own: milliseconds of each rank's own work in a step.
        mean: the mean of the other ranks.
    """
    data = [rank.parts["data"] for rank in run.ranks]
    if data[slow] - min(data) > 0.5 * (own[slow] - mean):
        # The rank is late because of its data alone: see _data.
        return
    exchange = _overhead(run)
    fixed = run.steady["update"]
    count = int(run.about.get("micro_batches", len(own)))
    slots = [int(rank.trace.about.get("slots", 1)) for rank in run.ranks]
    micro_batch_times = []
    for work, slots_of_rank in zip(own, slots, strict=True):
        micro_batch_times.append((work - fixed) / max(1, slots_of_rank))
    after = _best_cut(micro_batch_times, count) + fixed + exchange
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
    """Return the shortest time of the slowest rank over all cuts of `count` micro-batches.

    Each rank gets one or more; `each` is a micro-batch's time on each rank.
    """
    counts = [1] * len(each)
    # Give each further micro-batch to the rank that then ends first.
    for _ in range(count - len(each)):
        rank_index = min(range(len(each)), key=lambda rank: (counts[rank] + 1) * each[rank])
        counts[rank_index] += 1
    return max(slots * time for slots, time in zip(counts, each, strict=True))


def _communication(run: ProfileSummary) -> Iterator[Remedy]:
    """Propose overlap, half the bytes, or fewer exchanges."""
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
        # A single bucket is full only when the backward has ended. Of n buckets, all but the last are full within it.
        if megabytes > 2 * _BUCKET:
            size = _BUCKET
        else:
            size = max(0.1, round(megabytes / _BUCKETS, 1))
        buckets = max(1.0, megabytes / size)
        tail = fmean(rank.backward for rank in run.ranks) / slots * _OVERLAPS
        savings = min(exposed * (1.0 - 1.0 / buckets), tail) * (1.0 - _without_core(run))
        why = f"the gradients are exchanged in one bucket after the backward: {parts}"
        after = max(run.without(savings=savings), min(run.busy, run.step))
        yield Remedy("communication", f"--engine.bucket-cap-mb {size:g}", after, why)
    narrow = "compression" in has and not run.option("exact")
    if narrow and str(run.option("engine_options.compression") or "none") == "none":
        why = f"{parts}; compression halves the bytes"
        # Half the bytes are copied in half the time. But a core that adds them adds bf16 more slowly than float32.
        after = run.without(savings=exposed / 2.0 * (1.0 - run.exchanging))
        yield Remedy("communication", "--engine.compression bf16", after, why)
    size = int(run.option("batch_size") or 0)
    seldom = 1.0 - 1.0 / _OFTEN
    savings = (exposed + run.steady["update"]) * seldom
    change = f"--batch-size {size * _OFTEN} with the same --micro-batch-size: {_OFTEN} times the work per exchange"
    why = f"{parts}; this changes the training: tune --lr again"
    tail = exposed < run.without(savings=exposed + run.steady["imbalance"])
    # Count the exchange's own share only, without that of the update.
    if run.step > WORTH * run.without(savings=exposed * seldom):
        yield Remedy("communication", change, run.without(savings=savings), why, tail)


def _without_core(run: ProfileSummary) -> float:
    """Return the share of an exchange that has no free core during a backward.

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
    """Propose less frequent evaluations, saves or records."""
    for name, freq, label in (
        ("evaluation", "eval_freq", "an evaluation"),
        ("checkpoint", "ckpt_freq", "a checkpoint"),
        ("record", "log_freq", "a record"),
    ):
        cost = run.steady[name]
        every = int(run.option(freq) or 0)
        if cost <= 0.0 or not every:
            continue
        remainder = run.without(savings=cost)
        interval = _round(max(every + 1, every * cost / (_RARE * remainder)))
        after = remainder + cost * every / interval
        waits = name == "checkpoint" and run.option("checkpoint.mode") == "sync"
        if waits:
            hint = ", or --checkpoint.mode async, which writes in the background"
        else:
            hint = ""
        flag = "--" + freq.replace("_", "-")
        why = f"{label} every {every} steps takes {cost * every:.1f} ms each time, {cost / run.step:.0%} of the time"
        yield Remedy("records" if name == "record" else name, f"{flag} {interval}{hint}", after, why)


def _overhead(run: ProfileSummary) -> float:
    """Return a step's time beyond the slowest rank's own: exchange and variation."""
    return max(0.0, run.step + run.tracing - max(rank.own for rank in run.ranks))


def _similar(run: ProfileSummary, part: str) -> bool:
    times = [rank.parts[part] for rank in run.ranks]
    return max(times) < 1.5 * max(fmean(times), 1e-9)


def _round(number: float) -> int:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(number, 1.0)))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= number - 1e-9))


_COMPUTE = "compute"
# Compute to exchange: the rule of thumb for training on several devices.
_RULE = 10.0
# Share of a step: from there on, by the same rule, the exchange holds the training back.
_HIGH_EXCHANGE = 0.3
# Share of the time in operations: with less, the machine is shared.
_OWN_CORE = 0.8
# Slowdown by tracing that is worth a note.
_SLOWED = 1.1
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
        for name, milliseconds in sorted(self.parts.items(), key=lambda pair: -pair[1]):
            share = milliseconds / max(self.step_ms, 1e-9)
            if share >= 0.001:
                if name == "hidden_communication":
                    inside = "  (within computing)"
                else:
                    inside = ""
                lines.append(f"  {_LABELS[name]:<38} {milliseconds:>9.2f} ms {share:>5.0%}{inside}")
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
            "parts": {name: round(milliseconds, 4) for name, milliseconds in self.parts.items()},
            "padding": round(self.padding, 4),
            "bottleneck": self.bottleneck,
            "sentence": self.sentence,
            "next": {"what": self.what, "gain": round(self.gain, 3)},
            "notes": self.notes,
            "operations": [entry.as_json() for entry in self.operations],
            "ranks": [{name: round(milliseconds, 4) for name, milliseconds in entry.items()} for entry in self.by_rank],
        }

    def write(self, folder: Path) -> None:
        """Write verdict.json into `folder`.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(folder / VERDICT_FILE, (json.dumps(self.as_json(), indent=1) + "\n").encode())


def judge(traces: Sequence[ProfileTrace]) -> ProfileVerdict:
    """Judge the traces of all ranks, in the order of the ranks."""
    ranks = split_times(traces)
    run = ProfileSummary(ranks)
    step = sum(rank.step for rank in ranks) / len(ranks)
    every = [replace(remedy, after=run.estimate_warm(remedy)) for remedy in _remedies(run)]
    # Remedies that change the training come last, and so do those that gain too little.
    best = min(every, key=lambda remedy: (remedy.last or run.step < WORTH * remedy.after, remedy.after), default=None)
    gain = run.step / best.after if best else 1.0
    if best is None or gain < WORTH:
        best = Remedy(_COMPUTE, _faster(run), run.step, "")
        gain = 1.0
    if run.about.get("script"):
        best = replace(best, what=in_torch_words(best.what), why=in_torch_words(best.why))
    first_step, last_step = traces[0].about["steps"]
    return ProfileVerdict(
        (int(first_step), int(last_step)),
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
    """Return a way to make the computing itself faster."""
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
    """Return explanations of the numbers."""
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
