"""How much of a step both runs have, and what is missing for a proof."""

import math
from collections import Counter
from typing import Any

from lockstep.trace.coverage import every, matched
from lockstep.trace.pairing import Pair, Side, Spot
from lockstep.trace.reading import Whole
from lockstep.trace.samples_used import counted, readers, trained
from lockstep.trace.step import Step, finite
from lockstep.trace.verdict import Verdict

__all__ = ["count_data", "count_numbers", "losses_of", "norm_of", "uncovered", "unended"]


def count_data(step: Step, compared: Counter[str]) -> None:
    """Add the samples of a step that both runs read."""
    one, two = trained(*(side.used(spot).at(spot.at, 0) for side, spot in _sides(step)))
    compared["samples"] += (counted(readers(one)) & counted(readers(two))).total()


def count_numbers(step: Step, compared: Counter[str]) -> None:
    """Add the tensors and losses of a step that were held against each other."""
    for kind, name in (("grad", "gradients"), ("weights", "weights"), ("buffers", "buffers"), ("state", "states")):
        compared[name] += len(_both(step.one.tensors(kind), step.two.tensors(kind), masks=kind == "buffers"))
    weights = _both(step.one.tensors("weights"), step.two.tensors("weights"))
    compared["updates"] += len(matched(weights, _both(step.one.before(), step.two.before())).both)
    norms = [norm_of(spot) for _, spot in _sides(step) if spot.hidden]
    compared["gradient norms"] += bool(norms) and None not in norms and every(math.isfinite(norm) for norm in norms)
    one, two = (losses_of(spot) for _, spot in _sides(step))
    if one and two:
        mine, theirs = (sum(map(math.fsum, side)) / len(side) for side in (one, two))
        if abs(mine - theirs) <= max(1e-5, step.limit) * max(abs(mine), abs(theirs)) or mine == theirs:
            compared["losses"] += min(sum(map(len, one)), sum(map(len, two)))


def unended(pair: Pair) -> list[str]:
    """List the runs that are not there to their end, or not on all ranks."""
    sides = (pair.one, pair.two)
    found = [f"{side.name} {side.stop} after step {len(side.spots) - 1}" for side in sides if side.stop]
    for side in sides:
        part = side.spots[0].part
        if len(part.ranks) < part.world:
            text = f"of {part.world} ranks of {side.name} {len(part.ranks)} are recorded"
            found.append(f"{text}: of several nodes copy the files rank*.jsonl of all into one folder")
    return found


def uncovered(pair: Pair, verdict: Verdict) -> list[str]:
    """List what a proof would need of the steps that were compared and did not find."""
    if not verdict.judged:
        return ["they have no step in common"]
    if verdict.unproven:
        return []
    sides = (pair.one, pair.two)
    kinds = [("weights",), ("updates",), ("gradients", "gradient norms")]
    found = [f"no {kind[0]} were compared" for kind in kinds if not any(verdict.compared[each] for each in kind)]
    checks = [("losses", _has_losses), ("samples", _has_samples)]
    checks += [("states", _has_state)] * (not any(side.spots[0].hidden for side in sides))
    for name, has in checks:
        one, two = (any(has(side, place[number]) for place in pair.steps) for number, side in enumerate(sides))
        if one != two:
            found.append(f"{name} are in {verdict.two if two else verdict.one} alone")
    return found


def _both(one: dict[str, Whole], two: dict[str, Whole], *, masks: bool = False) -> list[str]:
    """Return the names in both whose values are finite; `masks`: or infinite for good."""
    pairs = ((name, one[name], two[name]) for name in matched(one, two).both)
    return [
        name
        for name, mine, theirs in pairs
        if (finite(mine) and finite(theirs)) or (masks and mine.digest == theirs.digest and math.isinf(mine.square))
    ]


def _sides(step: Step) -> tuple[tuple[Side, Spot], tuple[Side, Spot]]:
    return (step.pair.one, step.one), (step.pair.two, step.two)


def norm_of(spot: Spot) -> Any:
    """Return the norm that a step's first rank reports; None where it reports none."""
    return next(iter(spot.part.records(spot.at).values())).get("norm")


def losses_of(spot: Spot) -> list[list[float]]:
    """Return the losses of each rank, where all have them."""
    records = spot.part.records(spot.at).values()
    found = [[entry["v"][0] for entry in record["loss"] if entry["v"]] for record in records]
    return found if [] not in found else []


def _has_losses(side: Side, at: int) -> bool:
    spot = side.spots[at]
    return any(record["loss"] for record in spot.part.records(spot.at).values())


def _has_samples(side: Side, at: int) -> bool:
    spot = side.spots[at]
    return any(use.inputs or use.samples for use in side.used(spot).at(spot.at, 0).values())


def _has_state(side: Side, at: int) -> bool:
    return bool(side.spots[at].tensors("state"))
