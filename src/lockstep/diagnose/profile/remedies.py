"""What could be changed, and how long a step would take then.

for remedy in remedies(Measured(parted(traces))): ...

Each remedy is arithmetic over the measured parts: what it takes away, and what stays. None is a threshold: which one is
proposed is decided by how much each gains.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lockstep.diagnose.profile.parts import PARTS, Parted

__all__ = ["Measured", "Remedy", "empty", "remedies"]

_RARE = 0.01  # of a step: what evaluations, saves or records may take
_MICRO = 8  # times as many samples in a forward as now, at most
_BUCKET = 25.0  # MB: DDP's own
_BUCKETS = 8  # wanted, where the gradients are small
_OVERLAPS = 0.8  # of the last backward: before its first gradients nothing can be exchanged
_SMALL = 25.0  # microseconds that an operation takes where its cost is that of calling it
_CALL = {True: 8.0, False: 4.0}  # microseconds of an operation that its size has no part in, at most; of a kernel
_COMPILED = 0.7  # of such cost and of Python that --compile takes away
_OFTEN = 4  # micro-batches in place of one, where the exchange is to come more seldom


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change.

    Attributes:
        bottleneck: what it removes.
        what: a flag, or a change in words.
        after: milliseconds that a step would take, for as many samples as now.
        why: a clause for the sentence.
    """

    bottleneck: str
    what: str
    after: float
    why: str


@dataclass(slots=True)
class Measured:
    """The ranks' parts, and what follows of them. Milliseconds a step.

    Attributes:
        parts: of the mean rank.
        steady: of it, as over a long run: evaluations, saves and records as often as the run makes them.
        step: what a step takes over a long run.
    """

    ranks: Sequence[Parted]
    parts: dict[str, float] = field(init=False)
    steady: dict[str, float] = field(init=False)
    step: float = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {name: fmean(rank.parts[name] for rank in self.ranks) for name in PARTS}
        record = fmean(rank.record for rank in self.ranks)
        self.steady = self.parts | {"record": record, "host": self.parts["host"] - record}
        for name, mark, freq in (
            ("evaluation", "evaluate", "eval_freq"),
            ("checkpoint", "save", "ckpt_freq"),
            ("record", "record", "log_freq"),
        ):
            trace = self.ranks[0].trace
            count, every = len(trace.marks.get(mark, ())), int(self.option(freq) or 0)
            self.steady[name] *= trace.steps / count / every if count and every else 0.0
        self.step = sum(spent for name, spent in self.steady.items() if name != "hidden_communication")

    @property
    def about(self) -> dict[str, Any]:
        return self.ranks[0].trace.about

    def option(self, name: str) -> Any:
        return self.about.get("options", {}).get(name)

    def usage(self, name: str) -> float:
        """A number of the process's own use of the system, a step, of the mean rank."""
        return fmean(float(rank.trace.about.get("usage", {}).get(name, 0.0)) for rank in self.ranks)

    def without(self, **gone: float) -> float:
        """A step's time without so many milliseconds."""
        return max(self.step - sum(gone.values()), 1e-6)


def remedies(run: Measured) -> Iterator[Remedy]:
    """Every change that applies, in no order."""
    for rule in (_data, _imbalance, _communication, _seldom, _host, _micro_batches, _update, _recomputation):
        yield from rule(run)
    for rule in (_padding, _waits, _memory, _threads):
        yield from rule(run)


def _data(run: Measured) -> Iterator[Remedy]:
    """More loader processes: a rank then waits for what its loaders take longer than its own work."""
    slow = max(run.ranks, key=lambda rank: rank.parts["data"])
    spent = slow.parts["data"]
    if spent <= 0.0:
        return
    now, cores = int(run.option("data.workers") or 0), _cores(run)
    rest = max(slow.own - spent, 1e-3)
    loading = spent if not now else (rest + spent) * now  # of one process: with loaders, the whole step is loading
    wanted = min(max(now + 1, math.ceil(loading / rest) + 1), 64)
    share = float(slow.trace.about.get("cpu", {}).get("data", spent)) / spent if not now else 1.0
    computing = min(1.0, max(0.0, share))  # the part of loading that takes a core; the rest waits for a disk
    if computing > 0.5:
        wanted = max(now + 1, min(wanted, cores))
    own = []
    for rank in run.ranks:
        each = rank.own - rank.parts["data"]
        whole = rank.parts["data"] if not now else (each + rank.parts["data"]) * now
        busy = (each + whole * computing) / max(1, cores)  # what all cores have to do
        own.append(max(each, whole / wanted, busy if not now else 0.0))
    after = max(own) + _beside(run)
    named = "" if _alike(run, "data") else f" on rank {slow.trace.rank}"
    how = f"{now} loader processes do not keep up" if now else "samples are loaded between the steps"
    yield Remedy(
        "data", f"--data.workers {wanted}", after, f"{how}{named}: {spent:.1f} ms a step are spent in waiting for data"
    )


def _imbalance(run: Measured) -> Iterator[Remedy]:
    """Shares by speed; or, where no rank is slower than another in the mean, by length."""
    if len(run.ranks) < 2 or run.steady["imbalance"] <= 0.0:
        return
    own = [rank.own for rank in run.ranks]
    slow = max(range(len(own)), key=own.__getitem__)
    others = fmean(each for place, each in enumerate(own) if place != slow)
    exchange, fixed = _beside(run), run.steady["update"]
    if own[slow] > 1.05 * others:
        data = [rank.parts["data"] for rank in run.ranks]
        if data[slow] - min(data) > 0.5 * (own[slow] - others):
            return  # it is late because of its data alone: see _data
        count = int(run.about.get("micro_batches", len(own)))
        slots = [int(rank.trace.about.get("slots", 1)) for rank in run.ranks]
        each = [(spent - fixed) / max(1, have) for spent, have in zip(own, slots, strict=True)]
        after = _best_cut(each, count) + fixed + exchange
        late = own[slow] / others - 1.0
        rank = run.ranks[slow].trace
        host = rank.about.get("host", "its host")
        why = f"rank {rank.rank} on {host} is slow by {late:.0%}, and the others wait for it"
        if run.about.get("shares") and after < 0.97 * run.step:
            yield Remedy("imbalance", "--shares auto", after, why)
        else:
            what = f"look at rank {rank.rank} itself: its device, its host, its data"
            yield Remedy("imbalance", what, others + exchange, why)
        return
    after = run.without(imbalance=run.steady["imbalance"])
    why = f"in each step another rank is late, {run.steady['imbalance']:.1f} ms in the mean: samples differ in length"
    if run.about.get("shares"):
        yield Remedy("imbalance", "--shares auto, with the task's `work` to say how long a sample takes", after, why)
    else:
        yield Remedy("imbalance", "samples of like length in a micro-batch", after, why)


def _best_cut(each: list[float], count: int) -> float:
    """The least time of the slowest rank where `count` micro-batches are shared out, one or more to each rank.

    `each`: what one takes a rank.
    """
    held = [1] * len(each)
    for _ in range(count - len(each)):
        place = min(range(len(each)), key=lambda rank: (held[rank] + 1) * each[rank])
        held[place] += 1
    return max(have * spent for have, spent in zip(held, each, strict=True))


def _communication(run: Measured) -> Iterator[Remedy]:
    """Overlap, half the bytes, or fewer exchanges."""
    exposed, hidden = run.steady["exposed_communication"], run.steady["hidden_communication"]
    if exposed <= 0.0:
        return
    parts = f"{exposed:.1f} ms of exchange a step are not hidden, {hidden:.1f} ms are"
    has, megabytes = run.about.get("engine_options", ()), float(run.about.get("gradient_bytes", 0)) / 1e6
    cap = float(run.option("engine_options.bucket_cap_mb") or _BUCKET)
    slots = max(1, int(run.about.get("slots", 1)))
    if "bucket_cap_mb" in has and hidden < 0.25 * (hidden + exposed) and megabytes > 0 and cap >= megabytes:
        # One bucket is full when the backward has ended; with n all but the last lie within it.
        size = _BUCKET if megabytes > 2 * _BUCKET else max(0.1, round(megabytes / _BUCKETS, 1))
        buckets = max(1.0, megabytes / size)
        last = fmean(rank.backward for rank in run.ranks) / slots * _OVERLAPS
        gone = min(exposed * (1.0 - 1.0 / buckets), last)
        why = f"the gradients travel in one bucket after the backward: {parts}"
        yield Remedy("communication", f"--engine.bucket-cap-mb {size:g}", run.without(gone=gone), why)
    narrow = "compression" in has and not run.option("exact")
    if narrow and str(run.option("engine_options.compression") or "none") == "none":
        why = f"{parts}; half the bytes would do"
        yield Remedy("communication", "--engine.compression bf16", run.without(gone=exposed / 2.0), why)
        if exposed < run.steady["compute"]:
            return  # what changes the training comes last
    size = int(run.option("batch_size") or 0)
    gone = (exposed + run.steady["update"]) * (1.0 - 1.0 / _OFTEN)
    what = f"--batch-size {size * _OFTEN} with the same --micro-batch-size: {_OFTEN} times as much work an exchange"
    why = f"{parts}; it is another training: choose --lr anew"
    if exposed > 2.0 * run.steady["update"]:
        yield Remedy("communication", what, run.without(gone=gone), why)


def _seldom(run: Measured) -> Iterator[Remedy]:
    """What comes every so many steps, more seldom."""
    for name, freq, what in (
        ("evaluation", "eval_freq", "an evaluation"),
        ("checkpoint", "ckpt_freq", "a checkpoint"),
        ("record", "log_freq", "a record"),
    ):
        spent, every = run.steady[name], int(run.option(freq) or 0)
        if spent <= 0.0 or not every:
            continue
        rest = run.without(gone=spent)
        wanted = _round(max(every + 1, every * spent / (_RARE * rest)))
        after = rest + spent * every / wanted
        waits = name == "checkpoint" and run.option("checkpoint.mode") == "sync"
        hint = ", or --checkpoint.mode async, which writes beside the steps" if waits else ""
        flag = "--" + freq.replace("_", "-")
        why = f"{what} every {every} steps takes {spent * every:.1f} ms each time, {spent / run.step:.0%} of all"
        yield Remedy("records" if name == "record" else name, f"{flag} {wanted}{hint}", after, why)


def _host(run: Measured) -> Iterator[Remedy]:
    """Python between the operations, and operations that take no longer than their call."""
    idle = run.steady["host"] - fmean(rank.waits + rank.allocates for rank in run.ranks)
    count = fmean(rank.trace.count / rank.trace.steps for rank in run.ranks)
    compute = run.steady["compute"]
    each = 1e3 * compute / count if count else math.inf
    calls = _calls(run)
    compiled = bool(run.option("compile"))
    what = "fewer and larger operations" if compiled else "--compile"
    if count and each < _SMALL:
        after = run.without(gone=_COMPILED * (idle + calls))
        why = f"{count:.0f} operations a step take {each:.0f} us each, most of it for calling them"
        if calls > 0.5 * idle or not run.ranks[0].trace.on_cpu:
            yield Remedy("operations" if run.ranks[0].trace.on_cpu else "host", what, after, why)
            return
    if idle > 0.0:
        where = "nothing is computed" if run.ranks[0].trace.on_cpu else "the device has nothing to do"
        why = f"for {idle:.1f} ms a step {where} while Python runs"
        what = f"{what}, or less Python in the model's forward and the loss"
        several = int(run.about.get("slots", 1)) > 1
        yield Remedy("host", what, run.without(gone=idle * (_COMPILED if several else 1.0)), why)


def _micro_batches(run: Measured) -> Iterator[Remedy]:
    """What each forward and backward costs whatever its size, saved where there are fewer of them."""
    slots, size = int(run.about.get("slots", 1)), int(run.about.get("micro_batch_size", 1))
    if slots < 2:
        return
    fixed = fmean(rank.passes for rank in run.ranks) + _calls(run)
    fewer = max(1, -(-slots // _MICRO))
    larger = size * (slots // fewer)
    why = f"{slots} forwards of {size} a step: {fixed:.1f} ms of them is what a forward costs whatever its size"
    after = run.without(gone=fixed * (1.0 - fewer / slots))
    yield Remedy("micro-batches", f"--micro-batch-size {larger}, if the memory allows it", after, why)


def _update(run: Measured) -> Iterator[Remedy]:
    """One fused kernel in place of an operation a tensor, or one for all."""
    names = {name.lower() for rank in run.ranks for name in rank.trace.names}
    fused, each = any("fused" in name for name in names), run.about.get("fused_ns")
    if fused or not each or run.option("exact"):
        return
    after = run.steady["update"] - float(each) * float(run.about.get("parameters", 0)) / 1e6
    if after > 0.0:
        why = f"the update takes {run.steady['update']:.1f} ms a step, tensor by tensor"
        yield Remedy("update", "fused=True in the optimizer that the task makes", run.without(gone=after), why)


def _recomputation(run: Measured) -> Iterator[Remedy]:
    """No forward twice, where there is memory enough for what it keeps."""
    said = str(run.option("activation_checkpointing") or "none")
    if said == "none":
        return
    forward = fmean(rank.forward for rank in run.ranks)
    share = {"full": 1.0, "selective": 0.3}.get(said, 1.0 / int(said.partition(":")[2] or 1))
    free, used = float(run.about.get("memory_free", 0)), float(run.about.get("memory_used", 1))
    room = f"{free / 1e9:.1f} GB are free beside {used / 1e9:.1f} in use"
    if free > used:
        why = f"each backward computes forwards again, about {forward * share:.1f} ms a step, and {room}"
        yield Remedy("recomputation", "--activation-checkpointing none", run.without(gone=forward * share), why)


def _padding(run: Measured) -> Iterator[Remedy]:
    share = empty(run)
    if share <= 0.0:
        return
    packs = run.option("data.packing") == "padded"
    what = "--data.packing documents" if packs else "samples of like length in a micro-batch, or several in one row"
    gone = share * run.steady["compute"]
    yield Remedy("padding", what, run.without(gone=gone), f"{share:.0%} of the positions hold nothing to learn from")


def _waits(run: Measured) -> Iterator[Remedy]:
    gone = fmean(rank.waits for rank in run.ranks)
    if gone > 0.0:
        why = f"the host waits for the device in the middle of a step, and then the device for the host: {gone:.1f} ms"
        what = "no .item(), .cpu() or print of a tensor in the loss and the model"
        yield Remedy("synchronisation", what, run.without(gone=gone), why)


def _memory(run: Measured) -> Iterator[Remedy]:
    """Memory that is asked for and given back in every step."""
    gone = fmean(rank.allocates for rank in run.ranks)
    if gone > 0.0:
        why = f"the driver is asked for memory in every step, {gone:.1f} ms"
        what = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and shapes that stay the same"
        yield Remedy("memory", what, run.without(gone=gone), why)
    system, minor, major = run.usage("system"), run.usage("minor"), run.usage("major")
    if major > 1.0:
        why = f"{major:.0f} pages a step are read back from the disk: the machine swaps"
        yield Remedy("memory", "a smaller --micro-batch-size, or fewer processes here", run.without(gone=system), why)
    elif minor > 100.0 and system > 0.0:
        gone = min(system, run.steady["compute"] + run.steady["data"] + run.steady["host"])
        why = f"{minor:.0f} new pages of memory a step take the system {system:.1f} ms: large tensors come and go"
        what = "MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 in the environment, which keeps it"
        yield Remedy("memory", what, run.without(gone=gone), why)


def _threads(run: Measured) -> Iterator[Remedy]:
    cores, ranks = int(run.about.get("cores", 1)), int(run.about.get("local_ranks", 1))
    threads = int(run.about.get("threads", 1))
    if run.ranks[0].trace.on_cpu and threads * ranks > cores and threads > 1:
        each = max(1, cores // ranks)
        gone = run.steady["compute"] * (1.0 - each / threads)
        why = f"{ranks} processes of {threads} threads share {cores} cores"
        yield Remedy("threads", f"OMP_NUM_THREADS={each}", run.without(gone=gone), why)


def _calls(run: Measured) -> float:
    """Milliseconds a step that operations take whatever their size."""
    trace = run.ranks[0].trace
    each = min(fmean(rank.trace.floor for rank in run.ranks), _CALL[trace.on_cpu])
    count = fmean(rank.trace.count / rank.trace.steps for rank in run.ranks)
    return min(each * count / 1e3, run.steady["compute"])


def empty(run: Measured) -> float:
    """The share of the positions that hold nothing, over all ranks."""
    said = [rank.trace.about.get("padding") or {} for rank in run.ranks]
    whole = sum(int(each.get("positions", 0)) for each in said)
    return sum(int(each.get("empty", 0)) for each in said) / whole if whole else 0.0


def _beside(run: Measured) -> float:
    """What a step has beside the slowest rank's own time: the exchange, and what steps differ in."""
    return max(0.0, run.step - max(rank.own for rank in run.ranks))


def _cores(run: Measured) -> int:
    """Of this rank: what the processes of its host leave it."""
    return max(1, int(run.about.get("cores", 1)) // max(1, int(run.about.get("local_ranks", 1))))


def _alike(run: Measured, part: str) -> bool:
    spent = [rank.parts[part] for rank in run.ranks]
    return max(spent) < 1.5 * max(fmean(spent), 1e-9)


def _round(number: float) -> int:
    """Up to 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(number, 1.0)))
    return int(next(each * power for each in (1, 2, 5, 10) if each * power >= number - 1e-9))
