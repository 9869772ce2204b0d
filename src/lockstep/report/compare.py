"""Several runs beside each other: what differs in their configuration, how far they are the same, which one is better.

compared = compare([a, b, c])           # each with the first
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lockstep.report.facts import Facts, number
from lockstep.report.paired import Paired, paired

__all__ = ["Compared", "Pair", "compare"]

# Where these are equal the runs draw the same samples in the same order, in the same batches.
_ORDER = ("seed", "batch_size", "samples", "dataset_samples", "data", "task")


@dataclass(slots=True)
class Pair:
    """A run beside the first: how far they are the same, and which is better, in sentences."""

    name: str
    same: list[str]
    test: str
    found: Paired | None


@dataclass(slots=True)
class Compared:
    """`settings`: those that differ, (name, the value in each run); `more`: how many are not shown."""

    settings: list[tuple[str, list[str]]] = field(default_factory=list)
    more: int = 0
    pairs: list[Pair] = field(default_factory=list)


def compare(runs: Sequence[Facts], most: int = 40) -> Compared:
    """Each run with the first, and up to `most` settings that differ. Of runs that were gathered with their digits."""
    names = list(dict.fromkeys(name for facts in runs for name in facts.config))
    rows = [(name, [facts.config.get(name, "-") for facts in runs]) for name in names]
    differing = [row for row in rows if len(set(row[1])) > 1 and row[0] not in ("experiment_name", "save_dir")]
    found = Compared(differing[:most], max(0, len(differing) - most))
    for other in runs[1:]:
        pair = Pair(other.name, [*_records_alike(runs[0], other), *_checkpoints_alike(runs[0], other)], "", None)
        pair.found, pair.test = _tested(runs[0], other)
        found.pairs.append(pair)
    return found


def _twins(a: "array[int]", b: "array[int]") -> Iterator[tuple[int, int]]:
    """The places of equal steps in both, which rise."""
    at = to = 0
    while at < len(a) and to < len(b):
        if a[at] == b[to]:
            yield at, to
            at, to = at + 1, to + 1
        elif a[at] < b[to]:
            at += 1
        else:
            to += 1


def _same(x: float, y: float) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))


def _records_alike(a: Facts, b: Facts) -> list[str]:
    """Up to which step losses and norms agree, digit by digit: records keep every digit."""
    mine, theirs = a.records, b.records
    equal, last, first = 0, 0, None
    for at, to in _twins(mine.steps, theirs.steps):
        if not (_same(mine.losses[at], theirs.losses[to]) and _same(mine.norms[at], theirs.norms[to])):
            first = mine.steps[at]
            break
        equal, last = equal + 1, mine.steps[at]
    if not equal and first is None:
        return ["No step has a record in both."]
    what = "mean loss and gradient norm, to the last digit"
    if first is None:
        return [f"The same in every record up to step {last:,} ({equal:,} records: {what})."]
    begin = f"The same in the records up to step {last:,} ({what})" if equal else "Different from the first record on"
    return [f"{begin}; the record of step {first:,} differs."]


def _checkpoints_alike(a: Facts, b: Facts) -> list[str]:
    """At which steps both have the parameters' fingerprint."""
    theirs = {each.step: each.fingerprint for each in b.checkpoints if each.fingerprint.startswith("sha256:")}
    both = sorted(
        (each.step, each.fingerprint == theirs[each.step])
        for each in a.checkpoints
        if each.step in theirs and each.fingerprint.startswith("sha256:")
    )
    if not both:
        return ["No step has a checkpoint with a fingerprint in both, so nothing is said of the parameters' bits."]
    alike = [step for step, same in both if same]
    other = [step for step, same in both if not same]
    said = []
    if alike:
        steps = ", ".join(f"{step:,}" for step in alike[-6:])
        said.append(f"The parameters are the same, bit for bit, in the checkpoints of steps {steps}.")
    if other:
        said.append(f"They differ in the checkpoint of step {other[0]:,}.")
    return said


def _tested(a: Facts, b: Facts) -> tuple[Paired | None, str]:
    """A paired test over the second half of the common records, where both saw the same samples in the same order."""
    apart = [name for name in _ORDER if _said(a, name) != _said(b, name)]
    if apart:
        return None, f"No paired test: they do not draw the same samples in the same order ({', '.join(apart)} differ)."
    if _said(a, "seed") is None:
        return None, "No paired test: a run does not say in which order it draws its samples."
    if a.config.get("log_freq") != b.config.get("log_freq"):
        return None, "No paired test: their records are of windows of different length (log_freq)."
    half = sum(1 for _ in _twins(a.records.steps, b.records.steps)) // 2
    first, differences = 0, array("d")
    for at, to in islice(_twins(a.records.steps, b.records.steps), half, None):
        first = first or a.records.steps[at]
        differences.append(b.records.losses[to] - a.records.losses[at])
    if differences and not any(differences):
        return None, "No paired test: the losses are equal."
    found = paired(differences)
    if found is None:
        return None, f"No paired test: {len(differences)} finite windows in the second half of the run are too few."
    low, high = number(found.low), number(found.high)
    if found.low <= 0 <= found.high:
        judged = "no difference that could not be chance"
    else:
        judged = f"its loss is {'higher' if found.mean > 0 else 'lower'} than that of {a.name}"
    p = f"p = {found.p:.2g}" if found.p >= 1e-12 else "p < 1e-12"
    return found, (
        f"Same samples in the same order from step {first:,} on: {judged}. Mean difference {number(found.mean)}, "
        f"95% interval {low} to {high}, {p} ({found.windows:,} windows in {found.blocks} blocks). It says whether "
        "these two runs differ, not whether other seeds would."
    )


def _said(facts: Facts, name: str) -> object:
    plan = facts.state.get("plan")
    return plan.get(name) if isinstance(plan, dict) else None
