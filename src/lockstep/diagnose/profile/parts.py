"""Split each rank's traced time into disjoint parts that sum to the whole.

ranks = parted(traces)
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

__all__ = ["PARTS", "Parted", "parted", "saves_of_evaluations"]

PARTS = (
    *("compute", "hidden_communication", "exposed_communication", "data", "host"),
    *("update", "checkpoint", "evaluation", "imbalance", "queued"),
)
_NEAR = 50.0  # microseconds between the end of a wait and what follows from it
_PAIRED = 2e5  # microseconds by which the ends of one exchange may differ between ranks


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


def parted(traces: Sequence[ProfileTrace]) -> list[Parted]:
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
    first = int(trace.about["steps"][0])
    due = [bool(every) and (first + place) % every == 0 for place in places]
    after = [evaluated.get(place, np.inf) < begin for place, (begin, _) in zip(places, saves, strict=True)]
    chosen: Spans = saves[[it and not was for it, was in zip(after, due, strict=True)]] if len(saves) else NONE
    return chosen


def _step_at(steps: Spans, at: float) -> int:
    """The index of the last step that has begun."""
    return int(np.searchsorted(steps[:, 0], at, side="right")) - 1


def _of_cpu(trace: ProfileTrace, late: Spans) -> Parted:
    whole = union([trace.window])
    mark = {name: common(spans, whole) for name, spans in trace.marks.items()}
    evaluation = mark.get("evaluate", NONE)
    checkpoint = minus(mark.get("save", NONE), evaluation)
    record = minus(mark.get("record", NONE), union(evaluation, checkpoint))
    rest = minus(whole, union(evaluation, checkpoint, record))
    data = common(union(mark.get("data", NONE), mark.get("load", NONE)), rest)
    rest = minus(rest, data)
    busy, exchanges = common(trace.works[""], rest), common(_all(trace), rest)
    exposed = minus(exchanges, busy)
    imbalance = common(exposed, late)
    update = minus(common(mark.get("update", NONE), rest), exposed)
    compute = minus(busy, update)
    host = minus(rest, union(exposed, update, compute))
    passes = {name: mark.get(name, NONE) for name in ("forward", "backward")}
    between = common(host, union(*passes.values()))
    per_step = _per_step(trace)
    return Parted(
        trace,
        per_step(whole),
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


def _without_queue(found: Parted) -> Parted:
    """Move the time in which the thread had no core to its own part.

    The time is known for each of lockstep's parts of a step, but not its position within. A thread that loses its core
    does so for longer than an operation's call takes, and while it sleeps it wants none.
    """
    about, parts = found.trace.about, dict(found.parts)
    queued = {name: float(spent) for name, spent in about.get("queued", {}).items()}
    had, waited = (
        sum(float(each.get(name, 0.0)) for name in ("forward", "backward")) for each in (about.get("cpu", {}), queued)
    )
    computing, between = found.forward + found.backward, found.passes - found.calling
    slept = min(max(computing + found.passes - had - waited, 0.0), between) if had else 0.0
    wanting = computing + between - slept
    left = 1.0 - min(waited, wanting) / max(wanting, 1e-9)
    outside = max(float(about.get("usage", {}).get("queued", 0.0)) - sum(queued.values()), 0.0)
    apart = parts["host"] - found.passes - found.record
    beside = apart + found.record + parts["evaluation"] + parts["checkpoint"]  # outside a step's parts
    lost = min(outside / max(beside, 1e-9), 1.0)
    gone = {
        "compute": computing * (1.0 - left),
        "host": (between - slept) * (1.0 - left) + (apart + found.record) * lost,
        "evaluation": parts["evaluation"] * lost,
        "checkpoint": parts["checkpoint"] * lost,
        "data": min(queued.get("data", 0.0), parts["data"]),
        "update": min(queued.get("update", 0.0), parts["update"]),
    }
    for name, spent in gone.items():
        parts[name] = max(0.0, parts[name] - spent)
        parts["queued"] += found.parts[name] - parts[name]
    return replace(
        found,
        parts=parts,
        forward=found.forward * left,
        backward=found.backward * left,
        record=found.record * (1.0 - lost),
        passes=slept + (between - slept) * left + found.calling,
        again=found.again * left,
        framing=found.framing * left,
    )


def _of_device(trace: ProfileTrace, late: Spans) -> Parted:
    whole = union([trace.window])
    mark = {name: common(spans, whole) for name, spans in trace.marks.items()}
    work = {name: common(spans, whole) for name, spans in trace.works.items()}
    apart = [work.get(name, NONE) for name in ("update", "evaluate", "save")]
    compute = union(*(spans for name, spans in work.items() if name not in ("update", "evaluate", "save")))
    update, evaluated, saved = _in_turn(compute, *apart)
    busy, exchanges = union(compute, *apart), common(_all(trace), whole)
    exposed = minus(exchanges, busy)
    imbalance = common(exposed, late)
    copies = minus(common(trace.copies, whole), union(busy, exchanges))
    idle = minus(whole, union(busy, exchanges, copies))
    places = (mark.get("evaluate", NONE), mark.get("save", NONE), mark.get("record", NONE))
    loading = union(mark.get("data", NONE), mark.get("load", NONE))
    evaluation, checkpoint, record, data = (common(idle, each) for each in _in_turn(NONE, *places, loading))
    rest = minus(idle, union(evaluation, checkpoint, record, data))
    reach = trace.waits + np.array([-_NEAR, _NEAR]) if len(trace.waits) else NONE
    after = _beginning_in(rest, union(reach))
    between = common(rest, union(mark.get("forward", NONE), mark.get("backward", NONE)))
    per_step = _per_step(trace)
    return Parted(
        trace,
        per_step(whole),
        {
            "compute": per_step(compute),
            "hidden_communication": per_step(common(exchanges, busy)),
            "exposed_communication": per_step(minus(exposed, imbalance)),
            "data": per_step(data) + per_step(copies),
            "host": per_step(rest) + per_step(record),
            "update": per_step(update),
            "checkpoint": per_step(saved) + per_step(checkpoint),
            "evaluation": per_step(evaluated) + per_step(evaluation),
            "imbalance": per_step(imbalance),
            "queued": 0.0,
        },
        forward=per_step(work.get("forward", NONE)),
        backward=per_step(work.get("backward", NONE)),
        record=per_step(record),
        waits=per_step(after),
        allocates=per_step(common(rest, trace.allocates)),
        passes=per_step(between),
        again=per_step(common(trace.again, whole)),
        alone=_alone(trace, exposed),
    )


def _alone(trace: ProfileTrace, exposed: Spans) -> tuple[float, ...]:
    """Milliseconds of each step without exposed exchanges and waits for a core."""
    steps = trace.marks["step"]
    queued = trace.about.get("queued_by_step") or [0.0] * len(steps)
    each = [end - begin - length(common(exposed, union([(begin, end)]))) for begin, end in steps]
    return tuple(spent / 1e3 - float(lost) for spent, lost in zip(each, queued, strict=False))


def _per_step(trace: ProfileTrace) -> Callable[[Spans], float]:
    """Return a function of spans -> milliseconds a step."""
    return lambda spans: length(spans) / trace.steps / 1e3


def _in_turn(taken: Spans, *given: Spans) -> list[Spans]:
    """Each of the given spans without `taken` and those before it."""
    found = []
    for spans in given:
        found.append(minus(spans, taken))
        taken = union(taken, spans)
    return found


def _beginning_in(gaps: Spans, places: Spans) -> Spans:
    """The gaps that begin within one of the places."""
    edges = places.reshape(-1)
    found: Spans = gaps[np.searchsorted(edges, gaps[:, 0], side="right") % 2 == 1]
    return found


def _all(trace: ProfileTrace) -> Spans:
    return union([(begin, end) for _, begin, end in trace.exchanges])


def _waiting(traces: Sequence[ProfileTrace]) -> list[Spans]:
    """For each rank, the times at an exchange that another rank had not yet reached.

    Exchanges of two ranks are matched by their ends, which no rank reaches long before another.
    """
    clocks = _clocks(traces)
    kinds = [_kinds(trace, clock) for trace, clock in zip(traces, clocks, strict=True)]
    found = []
    for rank, clock in enumerate(clocks):
        late = []
        for kind, own in kinds[rank].items():
            begins = [own[:, 0]]
            for other, theirs in enumerate(kinds):
                if other != rank and kind in theirs:
                    begins.append(_begin_of_the_same(own, theirs[kind]))
            late.append(np.stack([own[:, 0], np.minimum(np.max(begins, axis=0), own[:, 1])], axis=1) + clock)
        found.append(union(*late))
    return found


def _begin_of_the_same(own: Spans, theirs: Spans) -> NDArray[np.float64]:
    """When another rank reached each exchange; -inf if it has no match."""
    order = np.argsort(theirs[:, 1])
    ends = theirs[order, 1]
    after = np.clip(np.searchsorted(ends, own[:, 1]), 1, max(1, len(ends) - 1))
    near = np.where(
        np.abs(ends[after - 1] - own[:, 1]) <= np.abs(ends[np.minimum(after, len(ends) - 1)] - own[:, 1]),
        after - 1,
        np.minimum(after, len(ends) - 1),
    )
    begins: NDArray[np.float64] = theirs[order[near], 0]
    fits = (np.abs(ends[near] - own[:, 1]) < _PAIRED) & (begins < own[:, 1])
    begins[~fits] = -np.inf
    return begins


def _kinds(trace: ProfileTrace, clock: float) -> dict[str, Spans]:
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, begin, end in trace.exchanges:
        found.setdefault(kind, []).append((begin - clock, end - clock))
    return {kind: np.array(spans, dtype=np.float64) for kind, spans in found.items()}


def _clocks(traces: Sequence[ProfileTrace]) -> list[float]:
    """For each rank, the lead of its host's clock over the first rank's.

    All ranks leave the last exchange of a step at once.
    """
    ends = [_ends(trace) for trace in traces]
    first, host = ends[0], traces[0].about.get("host")
    return [
        float(np.median(own - first)) if len(own) == len(first) and trace.about.get("host") != host else 0.0
        for own, trace in zip(ends, traces, strict=True)
    ]


def _ends(trace: ProfileTrace) -> NDArray[np.float64]:
    """The end of each step's last exchange, or of the step itself."""
    ends = np.array([end for _, _, end in trace.exchanges])
    return np.array(
        [max(ends[(ends > begin) & (ends <= end)], default=end) for begin, end in trace.marks["step"]],
        dtype=np.float64,
    )
