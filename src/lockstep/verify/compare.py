"""Find the first difference between a combination and the reference, stage by stage.

difference = first_difference(Traces(reference, ranks, tolerance, clip=1.0))         None: there is none

Within a step the stages are compared in causal order: each computes from the ones before it. The first that differs is
therefore the cause, and not a consequence.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.config.parallel_options import Parallel
from lockstep.verify.request import Difference, TrainingSpec, format_numbers
from lockstep.verify.tolerance import EXACT, Scales, Tolerance, unit_roundoff

__all__ = ["Traces", "against_one_replica", "first_difference", "join_replicas", "traces_of"]

# Relative change of an evaluation's loss by other kernels, in float32.
_ROUNDING = 1e-5
# Sine of the largest angle between gradients that differ only in length.
_PARALLEL = 1e-3
# Share by which a length may miss the clipped norm.
_LENGTH = 1e-3
# Share by which quotients of the same integers may differ, in float64.
_WHOLE = 1e-12
# Share of the whole norm below which a difference may come from undoing the clipping.
_UNDONE = 1e-6
# Roundings of the norm and the factor, which have the gradients' dtype.
_ROUNDINGS = 4.0


@dataclass(frozen=True)
class Traces:
    """The traces to compare.

    Attributes:
        reference: the single process's trace.
        ranks: the traces of a combination.
        tolerance: the allowed differences.
        clip: largest norm of a gradient; 0: not clipped.
        drift: additional tolerance of an evaluation (see Tolerance.drift).
    """

    reference: dict[str, Any]
    ranks: list[dict[str, Any]]
    tolerance: Tolerance
    clip: float = 0.0
    drift: float = 0.0

    def records(self, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (rank, record of the step)."""
        for trace in self.ranks:
            yield trace["rank"], trace["steps"][step]

    @property
    def is_divided(self) -> bool:
        """Whether several ranks hold one model."""
        return any(trace.get("coordinate", 0) for trace in self.ranks)

    def slots(self, step: int) -> dict[int, dict[str, Any]]:
        """Return the reference's micro-batches of a step that count, by number."""
        by_micro = {}
        for slot in self.reference["steps"][step]["slots"]:
            if slot["weight"]:
                by_micro[slot["micro"]] = slot
        return by_micro

    def pairs(self, step: int) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield (rank, its micro-batch, the reference's) for all that count."""
        expected = self.slots(step)
        for rank, record in self.records(step):
            for slot in record["slots"]:
                if slot["weight"]:
                    yield rank, slot, expected[slot["micro"]]


def traces_of(spec: TrainingSpec, reference: dict[str, Any], ranks: list[dict[str, Any]]) -> Traces:
    """Collect the traces of a finished run for `first_difference`."""
    last_step = len(reference["steps"]) - 1
    config = spec.request.config
    ranks = join_replicas(ranks, spec.combination.parallel)
    drift = spec.tolerance.drift(last_step, Scales.of(reference["steps"], config)[last_step])
    return Traces(reference, ranks, spec.tolerance, config.optim.clip, drift)


def join_replicas(ranks: list[dict[str, Any]], parallel: Parallel) -> list[dict[str, Any]]:
    """Return the traces as those of ranks with whole losses, and with the names that their replica has."""
    return _join_stages(_add_losses(ranks, parallel), parallel)


def _rows(ranks: list[dict[str, Any]], degree: int, distance: int) -> list[list[dict[str, Any]]]:
    """Return for each rank the traces of those that differ from it in one dimension of the mesh, in order.

    Args:
        ranks: traces in the order of the ranks.
        degree: size of the dimension.
        distance: between neighbours in it; the ranks of a replica are (pipeline, context, tensor).
    """
    rows = []
    for rank in range(len(ranks)):
        first = rank - rank // distance % degree * distance
        rows.append(ranks[first : first + degree * distance : distance])
    return rows


def _join_stages(ranks: list[dict[str, Any]], parallel: Parallel) -> list[dict[str, Any]]:
    """Return the traces with the losses of the last stage, and without the names that another stage has."""
    if parallel.pipeline == 1:
        return ranks
    joined = copy.deepcopy(ranks)
    rows = _rows(ranks, parallel.pipeline, parallel.tensor * parallel.context)
    for trace, replica in zip(joined, rows, strict=True):
        for at, step in enumerate(trace["steps"]):
            last = replica[-1]["steps"][at]
            step["loss_dtype"] = last["loss_dtype"]
            for slot, slot_of_last in zip(step["slots"], last["slots"], strict=True):
                # An earlier stage has no loss, and the generators are where it has ended.
                for key in ("loss", "scaled", "drawn"):
                    slot[key] = slot_of_last[key]
            for kind in _TENSOR_KINDS:
                _drop_names_of_others(step, [peer["steps"][at] for peer in replica], kind)
    return joined


def _drop_names_of_others(step: dict[str, Any], replica: list[dict[str, Any]], kind: str) -> None:
    """Leave out of a stage's missing names those that another stage has."""
    if kind not in step:
        return
    held: set[str] = set()
    for record in replica:
        # What a rank has whole, and what it has parts of.
        held.update(record.get(kind, {}).get("digests", {}), record.get(kind, {}).get("parts", {}))
    step[kind]["missing"] = [name for name in step[kind]["missing"] if name not in held]


def _add_losses(ranks: list[dict[str, Any]], parallel: Parallel) -> list[dict[str, Any]]:
    """Return the traces with the losses of whole sequences, of which each context rank has a part."""
    if parallel.context == 1:
        return ranks
    added = copy.deepcopy(ranks)
    rows = _rows(ranks, parallel.context, parallel.tensor)
    for trace, peers in zip(added, rows, strict=True):
        for at, step in enumerate(trace["steps"]):
            for number, slot in enumerate(step["slots"]):
                for key in ("loss", "scaled"):
                    parts = [peer["steps"][at]["slots"][number][key] for peer in peers]
                    if slot[key] is not None:
                        slot[key] = math.fsum(parts)
    return added


def first_difference(traces: Traces) -> Difference | None:
    """Return the first difference in the order of `_COMPARED`; None if all steps agree."""
    for step in range(len(traces.reference["steps"])):
        for check in _COMPARED:
            difference = next(check(traces, step), None)
            if difference:
                return difference
    return next(_evaluation(traces), None)


# Tensors that a trace compares after a step.
_TENSOR_KINDS = ("initial", "gradient", "weights", "buffers", "optimizer")


def _find_changed(traces: Traces, step: int) -> Iterator[Difference]:
    """Yield state that changed between two steps on the same rank. No tolerance applies."""
    for rank, record in traces.records(step):
        if record["changed"]:
            state_type, name = record["changed"][0]
            stage = {"optimizer": "optimizer state"}.get(state_type, state_type)
            if step in traces.ranks[0]["resumed"]:
                cause = " by the resume"
            else:
                cause = " outside the optimizer's update"
            ranks = []
            for peer, step_record in traces.records(step):
                if [state_type, name] in step_record["changed"]:
                    ranks.append(peer)
            count = len({tuple(entry) for entry in record["changed"]})
            more = f" ({count} tensors)" if count > 1 else ""
            text = f"its bits changed after step {step} ended{cause}{more}"
            yield Difference(step, stage, name, rank, text, ranks)


def _data(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.slots(step)
    # All ranks of a replica compute its micro-batches, so one rank of each replica counts, by coordinate.
    computed: dict[int, list[int]] = {trace.get("coordinate", 0): [] for trace in traces.ranks}
    coordinates = {trace["rank"]: trace.get("coordinate", 0) for trace in traces.ranks}
    for rank, record in traces.records(step):
        for slot in record["slots"]:
            if not slot["weight"]:
                continue
            computed[coordinates[rank]].append(slot["micro"])
            reference = expected.get(slot["micro"])
            if reference is None or reference["data"] != slot["data"]:
                yield Difference(step, "data", _leaf(slot, reference), rank, _locate(traces, slot["data"]))
    for coordinate, numbers in computed.items():
        if sorted(numbers) != sorted(expected):
            text = f"the ranks compute micro-batches {format_numbers(numbers)} instead of {format_numbers(expected)}"
            yield Difference(step, "data", "micro-batches", coordinate, text)


def _leaf(slot: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """Name the micro-batch, and the first tensor of the batch that differs."""
    expected = reference["data"] if reference else {}
    keys = []
    for key in {**slot["data"], **expected}:
        if slot["data"].get(key) != expected.get(key):
            keys.append(key)
    return f"micro-batch {slot['micro']}, batch{keys[0] if keys else ''}"


def _locate(traces: Traces, content: dict[str, str]) -> str:
    """Describe where the reference has these samples: a wrong order, or wrong samples."""
    for record in traces.reference["steps"]:
        for slot in record["slots"]:
            if slot["data"] == content:
                return f"the reference has these samples in step {record['step'] + 1}, micro-batch {slot['micro']}"
    return "the reference has this micro-batch in no step: the samples or their collation differ"


def _randomness(traces: Traces, step: int) -> Iterator[Difference]:
    for key, when in (("seeded", "before the forward"), ("drawn", "after the forward")):
        for rank, slot, reference in traces.pairs(step):
            if slot[key] != reference[key]:
                text = f"the states of the random generators differ {when}"
                yield Difference(step, "randomness", f"micro-batch {slot['micro']}", rank, text)


def _forward(traces: Traces, step: int) -> Iterator[Difference]:
    for rank, slot, reference in traces.pairs(step):
        actual = slot["loss"]
        expected = reference["loss"]
        if not traces.tolerance.close(step, actual, expected):
            text = f"the loss is {actual!r} instead of {expected!r}"
            where = _first_output(traces, step, rank, slot["micro"]) or "loss"
            yield Difference(step, "forward", f"micro-batch {slot['micro']}, {where}", rank, text)


def _first_output(traces: Traces, step: int, rank: int, micro: int) -> str:
    """Name the first module of a divided model with another output than in the single process; "" if unknown."""
    expected = traces.reference["steps"][step].get("outputs", {})
    for peer, record in traces.records(step):
        outputs = record.get("outputs", {})
        # They are recorded in a rank's first micro-batch.
        if peer != rank or not outputs or micro != record["slots"][0]["micro"]:
            continue
        for call, (shape, norm, along) in outputs.items():
            other = expected.get(call)
            # Columns of an output have another shape.
            if other is None or other[0] != shape:
                continue
            limit = traces.tolerance.bound(step) * max(norm, other[1])
            if not (abs(norm - other[1]) <= limit and abs(along - other[2]) <= limit):
                return f"output of {call}"
    return ""


def _normalisation(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.reference["steps"][step]["items"]
    for rank, record in traces.records(step):
        if record["items"] != expected:
            text = f"the loss is divided by {record['items']} items instead of {expected}"
            yield Difference(step, "normalisation", "items", rank, text)
    for rank, slot, reference in traces.pairs(step):
        if slot["items"] != reference["items"]:
            text = f"{slot['items']} items instead of {reference['items']}"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, items", rank, text)
        # The share is a quotient of integers, so it is equal in any dtype.
        actual = slot.get("share")
        expected_share = reference.get("share")
        if (
            actual is not None
            and expected_share is not None
            and not math.isclose(actual, expected_share, rel_tol=_WHOLE)
        ):
            times = actual / expected_share if expected_share else math.inf
            text = f"an item has {times:.6g} times the weight of one of the step's {expected} items"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, loss / items", rank, text)
        if not traces.tolerance.close(step, slot["scaled"], reference["scaled"]):
            if reference["scaled"]:
                share = slot["scaled"] / reference["scaled"]
            else:
                share = math.inf
            text = f"backward gets {share:.6g} times the loss divided by the step's {expected} items"
            yield Difference(step, "normalisation", f"micro-batch {slot['micro']}, loss / items", rank, text)
    for rank, record in traces.records(step):
        for slot in record["slots"]:
            if not slot["weight"] and slot["scaled"]:
                yield Difference(step, "normalisation", f"empty slot {slot['micro']}", rank, "its weight is not 0")


def _rates(traces: Traces, step: int) -> Iterator[Difference]:
    """Yield different learning rates under the same factor, then different updates."""
    expected = traces.reference["steps"][step]
    same = True
    for rank, record in traces.records(step):
        if record["factor"] != expected["factor"]:
            same = False
        elif record["updates"] != expected["updates"]:
            text = f"{record['updates']} updates instead of {expected['updates']}"
            yield Difference(step, "optimizer", "update", rank, text)
        elif record["rates"] != expected["rates"] and not _regrouped(traces, record["rates"], expected["rates"]):
            text = f"the learning rates are {record['rates']} instead of {expected['rates']} at one schedule factor"
            yield Difference(step, "optimizer", "learning rate", rank, text)
    # An update at another rate cannot show that the optimizer is wrong: the schedule is compared next.
    if same:
        yield from _tensors(traces, step, "weights", "optimizer")


def _regrouped(traces: Traces, rates: list[float], expected: list[float]) -> bool:
    """Whether a divided model has the expected rates in more groups: torch updates cut and whole tensors apart."""
    return traces.is_divided and set(rates) == set(expected)


def _schedule(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.reference["steps"][step]["factor"]
    for rank, record in traces.records(step):
        if record["factor"] != expected:
            text = f"the learning rate is multiplied by {record['factor']!r} instead of {expected!r}"
            yield Difference(step, "schedule", "factor", rank, text)


def against_one_replica(one: list[dict[str, Any]], ranks: list[dict[str, Any]], clip: float) -> Difference | None:
    """Find the first bit in which replicas of a divided model differ from a run with one replica.

    Args:
        one: the traces of that run's ranks, in the order of their coordinates.
        ranks: the traces of the replicas.
        clip: as in Traces.
    """
    compared = []
    results = [_compare_step(one, ranks, at) for at in range(len(one[0]["steps"]))]
    for trace in ranks:
        steps = []
        for record, result in zip(trace["steps"], results, strict=True):
            own = {kind: {**found, "digests": record[kind]["digests"]} for kind, found in result.items()}
            steps.append(record | own)
        compared.append({**trace, "steps": steps})
    return first_difference(Traces(one[0], compared, EXACT, clip))


def _compare_step(one: list[dict[str, Any]], ranks: list[dict[str, Any]], at: int) -> dict[str, dict[str, Any]]:
    """Compare the bits of all tensors after a step, as totals over the parts: the ranks may have other ones."""
    results = {}
    for kind in _TENSOR_KINDS:
        if kind in one[0]["steps"][at]:
            own = _add_parts(trace["steps"][at][kind]["sums"] for trace in ranks)
            wanted = _add_parts(trace["steps"][at][kind]["sums"] for trace in one)
            results[kind] = _compare_totals(own, wanted)
    return results


def _add_parts(ranks: Iterable[dict[str, dict[str, int]]]) -> dict[str, str]:
    """Return a digest of each whole tensor from those of the ranks' parts."""
    parts: dict[str, dict[str, set[int]]] = {}
    for sums in ranks:
        for name, found in sums.items():
            for box, digest in found.items():
                parts.setdefault(name, {}).setdefault(box, set()).add(digest)
    totals = {}
    for name, boxes in parts.items():
        if any(len(digests) > 1 for digests in boxes.values()):
            totals[name] = "copies that differ"
        else:
            totals[name] = f"the digest {sum(map(sum, boxes.values())) % 2**64:016x}"
    return totals


def _compare_totals(own: dict[str, str], wanted: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {"first": None, "equal": own == wanted, "parts": {}}
    result["missing"] = sorted(own.keys() ^ wanted.keys())
    for name, total in own.items():
        if wanted.get(name, total) != total:
            values = [total, wanted[name]]
            result["first"] = {"name": name, "values": values, "at": [], "difference": math.inf, "allowed": 0.0}
            break
    return result


def _evaluation(traces: Traces) -> Iterator[Difference]:
    expected = traces.reference.get("evaluation")
    results = []
    for trace in traces.ranks:
        if "evaluation" in trace:
            results.append((trace["rank"], trace["evaluation"]))
    if expected is None:
        return
    for name in ("items", "loss", *expected["metrics"]):
        reference = _number(expected, name)
        wrong = [(rank, _number(result, name)) for rank, result in results]
        wrong = [(rank, actual) for rank, actual in wrong if not _agrees(traces, name, actual, reference)]
        if wrong:
            rank, actual = wrong[0]
            text = f"{actual!r} instead of {reference!r}"
            # The items agree, or this loop would have ended. A lost sample moves the loss by more than rounding.
            rounded = name == "loss" and all(math.isclose(actual, reference, rel_tol=_ROUNDING) for _, actual in wrong)
            stage = "evaluation kernels" if rounded else "evaluation"
            yield Difference(expected["step"], stage, name, rank, text, [rank for rank, _ in wrong])


def _agrees(traces: Traces, name: str, actual: float, expected: float) -> bool:
    drift = 0.0 if name == "items" else traces.drift * (1.0 + abs(expected))
    return (
        traces.tolerance.close(traces.reference["evaluation"]["step"], actual, expected)
        or abs(actual - expected) <= drift
    )


def _number(evaluation: dict[str, Any], name: str) -> float:
    return float(evaluation[name] if name in ("items", "loss") else evaluation["metrics"].get(name, math.nan))


# The records have the clipped gradients that the optimizer receives, and the norm that the engine reports. Wrong
# gradients have another direction. If only the length is wrong, it is either not the reported norm after clipping, so
# the clipping is wrong; or it is, so the norm, and with it the sum, is wrong.


def _reduction(traces: Traces, step: int) -> Iterator[Difference]:
    """Yield gradient differences that clipping does not explain."""
    if not _badly_clipped(traces, step):
        yield from _find_unclipped(traces, step)
        yield from _gradients(traces, step, "reduction")
        yield from _norms(traces, step)


def _clipping(traces: Traces, step: int) -> Iterator[Difference]:
    """Yield gradients whose length is not the one that clipping by their norm gives."""
    bad = _badly_clipped(traces, step)
    if bad:
        rank, norm, length, expected = bad
        if traces.clip:
            effect = f"clipping to {traces.clip:g} leaves {expected:.6g}"
        else:
            effect = "it is not clipped"
        text = f"the norm is {norm:.6g}, so {effect}, but the length is {length:.6g}"
        yield Difference(step, "clipping", "all gradients", rank, text)
        yield from _gradients(traces, step, "clipping")


def _gradients(traces: Traces, step: int, stage: str) -> Iterator[Difference]:
    yield from _tensors(traces, step, "gradient", stage)


def _find_unclipped(traces: Traces, step: int) -> Iterator[Difference]:
    """Yield the first tensor that still differs with the clipping undone on both sides.

    One wrong gradient changes the norm, and with it the clipping of all the others.
    """
    norm = traces.reference["steps"][step]["norm"]
    for rank, record in traces.records(step):
        gradient = record.get("gradient")
        if not gradient or not gradient["first"] or not traces.clip or not math.isfinite(norm * record["norm"]):
            continue
        by = _clip_factor(traces, record["norm"]) / _clip_factor(traces, norm)
        whole = math.fsum(expected for _, expected, _ in gradient["parts"].values())
        least = (_UNDONE + traces.tolerance.relative(step)) * math.sqrt(whole)
        for name, (square, expected, product) in gradient["parts"].items():
            # The squared distance of the two gradients with the clipping undone, from the three sums.
            error = math.sqrt(max(0.0, square / by**2 - 2.0 * product / by + expected))
            if error > least:
                if name != gradient["first"]["name"]:
                    share = error / math.sqrt(expected) if expected else math.inf
                    text = (
                        f"before clipping it is off by {share:.2g} of its norm; tensors before it differ only in length"
                    )
                    yield Difference(step, "reduction", name, rank, text)
                break


def _clip_factor(traces: Traces, norm: float) -> float:
    """Return the factor by which clipping multiplies gradients of this norm."""
    # The same formula as torch.nn.utils.clip_grad_norm_.
    return min(1.0, traces.clip / (norm + 1e-6))


def _norms(traces: Traces, step: int) -> Iterator[Difference]:
    expected = traces.reference["steps"][step]["norm"]
    for rank, record in traces.records(step):
        if not traces.tolerance.close(step, record["norm"], expected, traces.tolerance.relative(step)):
            text = f"the gradient's norm is {record['norm']!r} instead of {expected!r}"
            yield Difference(step, "reduction", "norm", rank, text)


def _badly_clipped(traces: Traces, step: int) -> tuple[int, float, float, float] | None:
    """Return (rank, reported norm, actual length, expected length) of the first rank with wrong clipping."""
    for rank, record in traces.records(step):
        if "gradient" not in record:
            continue
        actual, expected, product = _lengths(traces, step, record["gradient"])
        norm = record["norm"]
        clipped = norm * _clip_factor(traces, norm) if traces.clip else norm
        if not (actual and expected and math.isfinite(actual * expected * clipped)):
            continue
        # From the angle between the gradients. It is 0 if they differ only in length.
        sine = math.sqrt(max(0.0, 1.0 - (product / (actual * expected)) ** 2))
        missed = _LENGTH + _ROUNDINGS * unit_roundoff(record["gradient_dtype"])
        if sine < _PARALLEL and abs(actual - clipped) > missed * clipped:
            return rank, norm, actual, clipped
    return None


def _lengths(traces: Traces, step: int, own: dict[str, Any]) -> tuple[float, float, float]:
    """Return the norms of a rank's and the reference's gradient, and their product.

    The shards that this rank lacks are other ranks'; several ranks may hold the same one, which counts once.
    """
    shards: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for gradient in (own, *(record["gradient"] for _, record in traces.records(step) if "gradient" in record)):
        for name, sums in gradient["parts"].items():
            shards.setdefault((name, tuple(gradient.get("offsets", {}).get(name, ()))), sums)
    # Ranks with the same shard of a tensor are replicas, so it counts once.
    square, expected, product = ([sums[column] for sums in shards.values()] for column in range(3))
    return math.sqrt(math.fsum(square)), math.sqrt(math.fsum(expected)), math.fsum(product)


def _tensors(traces: Traces, step: int, kind: str, stage: str) -> Iterator[Difference]:
    """Yield tensors of a kind that differ from the reference's or between replicas."""
    records = []
    for rank, record in traces.records(step):
        if kind in record:
            records.append((rank, record[kind]))
    for rank, comparison in records:
        if comparison["missing"]:
            text = "only one of the two runs has this tensor"
            yield Difference(step, stage, comparison["missing"][0], rank, text)
        if comparison["first"]:
            ranks = [peer for peer, their in records if their["first"]]
            yield Difference(step, stage, comparison["first"]["name"], rank, _describe(comparison["first"]), ranks)
    # Of each tensor the first rank that has it, and its bits.
    known: dict[str, tuple[int, str]] = {}
    for rank, comparison in records:
        for name, bits in comparison["digests"].items():
            holder, expected = known.setdefault(name, (rank, bits))
            if expected != bits:
                text = f"its bits differ from the replica on rank {holder}"
                yield Difference(step, stage, name, rank, text)
                break


def _describe(first: dict[str, Any]) -> str:
    """Describe the largest difference in a tensor."""
    actual, expected = first["values"]
    if isinstance(actual, str):
        return f"it is {actual} instead of {expected}"
    if first["at"]:
        index_text = f"[{', '.join(str(index) for index in first['at'])}]"
    else:
        index_text = ""
    if first["allowed"] <= 0:
        limit = "no difference"
    else:
        limit = f"{first['allowed']:.2g}"
    off = f"off by {first['difference']:.2g} where {limit} is allowed"
    return f"{index_text} is {actual!r} instead of {expected!r}; {off}".strip()


Check = Callable[[Traces, int], Iterator[Difference]]

_COMPARED: tuple[Check, ...] = (
    partial(_tensors, kind="initial", stage="initial weights"),
    _find_changed,
    _data,
    _randomness,
    _forward,
    _normalisation,
    partial(_tensors, kind="buffers", stage="buffers"),
    _reduction,
    _clipping,
    _rates,
    _schedule,
    partial(_tensors, kind="optimizer", stage="optimizer state"),
)
