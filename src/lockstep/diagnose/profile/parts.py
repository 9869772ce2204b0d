"""Split each rank's traced time into disjoint parts that sum to the whole.

ranks = split_times(traces)
ranks[3].parts["exposed_communication"]         # milliseconds a step

On a CPU the training's thread counts: outside lockstep's own parts it computes, waits for an exchange, or is in
Python. On a CUDA device the device counts: if it is idle, it waits for whatever the host does meanwhile. An exchange
begins when the last rank has reached it; a rank's earlier wait is imbalance, not communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.diagnose.profile.reading import NONE, ProfileTrace, Spans, common, length, minus, union

__all__ = ["PARTS", "Parted", "saves_of_evaluations", "split_times"]

PARTS = (
    *("compute", "hidden_communication", "exposed_communication", "data", "host"),
    *("update", "checkpoint", "evaluation", "imbalance", "queued"),
)
# Microseconds between the end of a wait and its effect.
_NEAR = 50.0
# Microseconds by which the ends of one exchange may differ between ranks.
_PAIRED = 2e5


@dataclass(frozen=True, slots=True)
class Parted:
    """A rank's time by part, in milliseconds a step.

    Attributes:
        step: the whole: the sum of the parts but `hidden_communication`.
        parts: by the names of PARTS.
        own: its own work: the whole without exchanges and waiting for other ranks.
        forward, backward: of `compute`, on a CPU.
        record, waits, allocates, passes: of `host`: writing records, time after waits of the host for the device,
            asking the driver for memory, and within forwards and backwards.
        calling: of `passes`: from one operation to the next, if it follows at once; on a CPU.
        again: of `compute` and `passes`: forwards that backwards recompute.
        framing: of `again`: Python around them; on a CPU.
        alone: its own work in each step, without waits for a core.
    """

    trace: ProfileTrace
    step: float
    parts: dict[str, float]
    forward: float = 0.0
    backward: float = 0.0
    record: float = 0.0
    waits: float = 0.0
    allocates: float = 0.0
    passes: float = 0.0
    calling: float = 0.0
    again: float = 0.0
    framing: float = 0.0
    alone: tuple[float, ...] = ()

    @property
    def own(self) -> float:
        return self.step - self.parts["exposed_communication"] - self.parts["imbalance"]


def split_times(traces: Sequence[ProfileTrace]) -> list[Parted]:
    """Split each rank's time, in the order of the traces."""
    waiting = _waiting(traces)
    return [
        _without_queue(_of_cpu(trace, late)) if trace.on_cpu else _of_device(trace, late)
        for trace, late in zip(traces, waiting, strict=True)
    ]


def saves_of_evaluations(trace: ProfileTrace) -> Spans:
    """Return the saves of a best evaluation, in steps without a due save."""
    saves, evaluations, steps = (trace.marks.get(name, NONE) for name in ("save", "evaluate", "step"))
    every = int(trace.about.get("options", {}).get("ckpt_freq") or 0)
    evaluated = {_step_at(steps, begin): begin for begin, _ in evaluations}
    places = [_step_at(steps, begin) for begin, _ in saves]
    first_step = int(trace.about["steps"][0])
    due = []
    for step_index in places:
        due.append(bool(every) and (first_step + step_index) % every == 0)
    after = []
    for step_index, (begin, _) in zip(places, saves, strict=True):
        after.append(evaluated.get(step_index, np.inf) < begin)
    # A save after an evaluation in a step without a due save is of the best evaluation.
    chosen: Spans = saves[[it and not was for it, was in zip(after, due, strict=True)]] if len(saves) else NONE
    return chosen


def _step_at(steps: Spans, at: float) -> int:
    """Return the index of the last step that has begun."""
    return int(np.searchsorted(steps[:, 0], at, side="right")) - 1


def _of_cpu(trace: ProfileTrace, late: Spans) -> Parted:
    window = union([trace.window])
    mark = {name: common(spans, window) for name, spans in trace.marks.items()}
    evaluation = mark.get("evaluate", NONE)
    checkpoint = minus(mark.get("save", NONE), evaluation)
    record = minus(mark.get("record", NONE), union(evaluation, checkpoint))
    # Each part takes its time out of the rest, so that the parts are disjoint.
    remainder = minus(window, union(evaluation, checkpoint, record))
    data = common(union(mark.get("data", NONE), mark.get("load", NONE)), remainder)
    remainder = minus(remainder, data)
    busy = common(trace.works[""], remainder)
    exchanges = common(_all(trace), remainder)
    exposed = minus(exchanges, busy)
    imbalance = common(exposed, late)
    update = minus(common(mark.get("update", NONE), remainder), exposed)
    compute = minus(busy, update)
    host = minus(remainder, union(exposed, update, compute))
    passes = {name: mark.get(name, NONE) for name in ("forward", "backward")}
    between = common(host, union(*passes.values()))
    per_step = _per_step(trace)
    return Parted(
        trace,
        per_step(window),
        {
            "compute": per_step(compute),
            "hidden_communication": per_step(common(exchanges, busy)),
            "exposed_communication": per_step(minus(exposed, imbalance)),
            "data": per_step(data),
            "host": per_step(host) + per_step(record),
            "update": per_step(update),
            "checkpoint": per_step(checkpoint),
            "evaluation": per_step(evaluation),
            "imbalance": per_step(imbalance),
            "queued": 0.0,
        },
        forward=per_step(common(compute, passes["forward"])),
        backward=per_step(common(compute, passes["backward"])),
        record=per_step(record),
        passes=per_step(between),
        calling=per_step(common(between, trace.following)),
        again=per_step(common(trace.again, union(compute, between))),
        framing=per_step(common(trace.again, between)),
        alone=_alone(trace, exposed),
    )


def _without_queue(rank: Parted) -> Parted:
    """Move the time in which the thread had no core to its own part.

    The time is known for each of lockstep's parts of a step, but not its position within. A thread that loses its core
    does so for longer than an operation's call takes, and while it sleeps it wants none.
    """
    about = rank.trace.about
    parts = dict(rank.parts)
    queued = {}
    for name, milliseconds in about.get("queued", {}).items():
        queued[name] = float(milliseconds)
    cpu = about.get("cpu", {})
    cpu_time = float(cpu.get("forward", 0.0)) + float(cpu.get("backward", 0.0))
    queue_time = float(queued.get("forward", 0.0)) + float(queued.get("backward", 0.0))
    computing = rank.forward + rank.backward
    between = rank.passes - rank.calling
    if cpu_time:
        sleep = min(max(computing + rank.passes - cpu_time - queue_time, 0.0), between)
    else:
        sleep = 0.0
    demand = computing + between - sleep
    remaining = 1.0 - min(queue_time, demand) / max(demand, 1e-9)
    outside = max(float(about.get("usage", {}).get("queued", 0.0)) - sum(queued.values()), 0.0)
    own_host = parts["host"] - rank.passes - rank.record
    # The time outside a step's parts, such as evaluations.
    other = own_host + rank.record + parts["evaluation"] + parts["checkpoint"]
    lost_share = min(outside / max(other, 1e-9), 1.0)
    cost = {
        "compute": computing * (1.0 - remaining),
        "host": (between - sleep) * (1.0 - remaining) + (own_host + rank.record) * lost_share,
        "evaluation": parts["evaluation"] * lost_share,
        "checkpoint": parts["checkpoint"] * lost_share,
        "data": min(queued.get("data", 0.0), parts["data"]),
        "update": min(queued.get("update", 0.0), parts["update"]),
    }
    for name, milliseconds in cost.items():
        parts[name] = max(0.0, parts[name] - milliseconds)
        parts["queued"] += rank.parts[name] - parts[name]
    return replace(
        rank,
        parts=parts,
        forward=rank.forward * remaining,
        backward=rank.backward * remaining,
        record=rank.record * (1.0 - lost_share),
        passes=sleep + (between - sleep) * remaining + rank.calling,
        again=rank.again * remaining,
        framing=rank.framing * remaining,
    )


def _of_device(trace: ProfileTrace, late: Spans) -> Parted:
    window = union([trace.window])
    mark = {name: common(spans, window) for name, spans in trace.marks.items()}
    work = {name: common(spans, window) for name, spans in trace.works.items()}
    # Kernels of these phases are no part of the model's computing.
    phases = [work.get(name, NONE) for name in ("update", "evaluate", "save")]
    compute = union(*(spans for name, spans in work.items() if name not in ("update", "evaluate", "save")))
    update, evaluation_work, checkpoint_work = _in_turn(compute, *phases)
    busy = union(compute, *phases)
    exchanges = common(_all(trace), window)
    exposed = minus(exchanges, busy)
    imbalance = common(exposed, late)
    copies = minus(common(trace.copies, window), union(busy, exchanges))
    # Time in which the device does nothing. The parts below divide it by what the host does meanwhile.
    idle = minus(window, union(busy, exchanges, copies))
    places = (mark.get("evaluate", NONE), mark.get("save", NONE), mark.get("record", NONE))
    loading = union(mark.get("data", NONE), mark.get("load", NONE))
    evaluation, checkpoint, record, data = (
        common(idle, spans_of_mark) for spans_of_mark in _in_turn(NONE, *places, loading)
    )
    remainder = minus(idle, union(evaluation, checkpoint, record, data))
    if len(trace.waits):
        reach = trace.waits + np.array([-_NEAR, _NEAR])
    else:
        reach = NONE
    after = _beginning_in(remainder, union(reach))
    between = common(remainder, union(mark.get("forward", NONE), mark.get("backward", NONE)))
    per_step = _per_step(trace)
    return Parted(
        trace,
        per_step(window),
        {
            "compute": per_step(compute),
            "hidden_communication": per_step(common(exchanges, busy)),
            "exposed_communication": per_step(minus(exposed, imbalance)),
            "data": per_step(data) + per_step(copies),
            "host": per_step(remainder) + per_step(record),
            "update": per_step(update),
            "checkpoint": per_step(checkpoint_work) + per_step(checkpoint),
            "evaluation": per_step(evaluation_work) + per_step(evaluation),
            "imbalance": per_step(imbalance),
            "queued": 0.0,
        },
        forward=per_step(work.get("forward", NONE)),
        backward=per_step(work.get("backward", NONE)),
        record=per_step(record),
        waits=per_step(after),
        allocates=per_step(common(remainder, trace.allocates)),
        passes=per_step(between),
        again=per_step(common(trace.again, window)),
        alone=_alone(trace, exposed),
    )


def _alone(trace: ProfileTrace, exposed: Spans) -> tuple[float, ...]:
    """Return the milliseconds of each step without exposed exchanges and waits for a core."""
    steps = trace.marks["step"]
    queued = trace.about.get("queued_by_step") or [0.0] * len(steps)
    step_times = []
    for begin, end in steps:
        step_times.append(end - begin - length(common(exposed, union([(begin, end)]))))
    return tuple(duration / 1e3 - float(wait) for duration, wait in zip(step_times, queued, strict=False))


def _per_step(trace: ProfileTrace) -> Callable[[Spans], float]:
    """Return a function of spans -> milliseconds a step."""
    return lambda spans: length(spans) / trace.steps / 1e3


def _in_turn(earlier: Spans, *groups: Spans) -> list[Spans]:
    """Return each of the given spans without `earlier` and those before it."""
    results = []
    for spans in groups:
        results.append(minus(spans, earlier))
        earlier = union(earlier, spans)
    return results


def _beginning_in(gaps: Spans, places: Spans) -> Spans:
    """Return the gaps that begin within one of the places."""
    edges = places.reshape(-1)
    matches: Spans = gaps[np.searchsorted(edges, gaps[:, 0], side="right") % 2 == 1]
    return matches


def _all(trace: ProfileTrace) -> Spans:
    return union([(begin, end) for _, begin, end in trace.exchanges])


def _waiting(traces: Sequence[ProfileTrace]) -> list[Spans]:
    """Return for each rank the times at an exchange that another rank had not reached.

    Exchanges of two ranks are matched by their ends, which no rank reaches long before another.
    """
    clocks = _clocks(traces)
    exchanges_of_ranks = []
    for trace, clock in zip(traces, clocks, strict=True):
        exchanges_of_ranks.append(_kinds(trace, clock))
    waits = []
    for rank, clock in enumerate(clocks):
        late = []
        for collective, exchanges_here in exchanges_of_ranks[rank].items():
            begins = [exchanges_here[:, 0]]
            for peer, exchanges in enumerate(exchanges_of_ranks):
                if peer != rank and collective in exchanges:
                    begins.append(_peer_begins(exchanges_here, exchanges[collective]))
            late.append(
                np.stack([exchanges_here[:, 0], np.minimum(np.max(begins, axis=0), exchanges_here[:, 1])], axis=1)
                + clock
            )
        waits.append(union(*late))
    return waits


def _peer_begins(own: Spans, peer: Spans) -> NDArray[np.float64]:
    """Return when another rank reached each exchange; -inf if it has no match."""
    order = np.argsort(peer[:, 1])
    ends = peer[order, 1]
    # The peer's nearest end is the one before or after this rank's.
    after = np.clip(np.searchsorted(ends, own[:, 1]), 1, max(1, len(ends) - 1))
    near = np.where(
        np.abs(ends[after - 1] - own[:, 1]) <= np.abs(ends[np.minimum(after, len(ends) - 1)] - own[:, 1]),
        after - 1,
        np.minimum(after, len(ends) - 1),
    )
    begins: NDArray[np.float64] = peer[order[near], 0]
    fits = (np.abs(ends[near] - own[:, 1]) < _PAIRED) & (begins < own[:, 1])
    begins[~fits] = -np.inf
    return begins


def _kinds(trace: ProfileTrace, clock: float) -> dict[str, Spans]:
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for collective, begin, end in trace.exchanges:
        by_kind.setdefault(collective, []).append((begin - clock, end - clock))
    arrays = {}
    for collective, spans in by_kind.items():
        arrays[collective] = np.array(spans, dtype=np.float64)
    return arrays


def _clocks(traces: Sequence[ProfileTrace]) -> list[float]:
    """Return for each rank the lead of its host's clock over the first rank's.

    All ranks leave the last exchange of a step at once.
    """
    ends = [_ends(trace) for trace in traces]
    reference = ends[0]
    host = traces[0].about.get("host")
    return [
        float(np.median(ends_of_rank - reference))
        if len(ends_of_rank) == len(reference) and trace.about.get("host") != host
        else 0.0
        for ends_of_rank, trace in zip(ends, traces, strict=True)
    ]


def _ends(trace: ProfileTrace) -> NDArray[np.float64]:
    """Return the end of each step's last exchange, or of the step itself."""
    ends = np.array([end for _, _, end in trace.exchanges])
    return np.array(
        [max(ends[(ends > begin) & (ends <= end)], default=end) for begin, end in trace.marks["step"]],
        dtype=np.float64,
    )
