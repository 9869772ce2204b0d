"""Whether the ranks together read the samples of a step, and what is wrong where they do not."""

from collections import Counter

from lockstep.trace.coverage import every
from lockstep.trace.judge_normalisation import same_effect
from lockstep.trace.pairing import Side
from lockstep.trace.samples_used import Sample, Use, counted, readers, trained
from lockstep.trace.step import FIRST, SECOND, Step
from lockstep.trace.verdict import Finding

__all__ = ["data_difference"]

_SHOWN = 6


def data_difference(step: Step) -> Finding | None:
    """The first difference of the samples of a step, over all ranks."""
    one, two = trained(_uses(step.pair.one, step.at[0]), _uses(step.pair.two, step.at[1]))
    mine, theirs = counted(one), counted(two)
    if mine == theirs or not mine or not theirs or counted(readers(one)) == counted(readers(two)):
        return None
    for name, samples in ((SECOND, two), (FIRST, one)):
        parts = [Counter(sample.content for sample in each) for each in samples.values() if each]
        if len(parts) > 1 and every(part == parts[0] for part in parts):
            return step.finding(
                "data", "overlapping", f"in {name} all ranks hold {_listed(samples[min(samples)])}", "samples", 1
            )
    count, expected = sum(theirs.values()), sum(mine.values())
    if max(count, expected) >= 1.5 * min(count, expected):
        cause = "batch-size" if count > expected else "batch-share"
        return step.finding("data", cause, f"{count} samples instead of {expected}", "samples")
    indices = [Counter(s.index for each in side.values() for s in each) for side in (one, two)]
    if indices[0] == indices[1] and -1 not in indices[0]:
        if same_effect(step):  # padded otherwise, or with what the loss does not see
            return None
        wrong = next(iter((theirs - mine).keys()))
        rank, sample = next((rank, s) for rank, each in two.items() for s in each if s.content == wrong)
        return step.finding("data", "other-contents", f"{sample.name} has other contents", "samples", rank)
    return (
        _repeated(step, one, two) or _overlap(step, one, two) or _elsewhere(step, one, two) or _ordered(step, one, two)
    )


def _uses(side: Side, at: int) -> dict[int, Use]:
    spot = side.spots[at]
    return dict(side.used(spot).at(spot.at, 0))


def _repeated(step: Step, one: dict[int, list[Sample]], two: dict[int, list[Sample]]) -> Finding | None:
    """A later epoch that has an earlier one's order."""
    for side, at, samples in ((step.pair.two, step.at[1], two), (step.pair.one, step.at[0], one)):
        epoch = max((sample.epoch for each in samples.values() for sample in each), default=-1)
        if epoch < 1:
            continue
        for before in range(at - 1, -1, -1):
            found, _ = trained(_uses(side, before), {})
            earlier = max((sample.epoch for each in found.values() for sample in each), default=-1)
            if earlier < epoch and counted(found) == counted(samples):
                text = f"epoch {epoch + 1} reads what epoch {earlier + 1} read in step {before}"
                return step.finding("data", "set-epoch", text, "samples")
    return None


def _elsewhere(step: Step, one: dict[int, list[Sample]], two: dict[int, list[Sample]]) -> Finding | None:
    """Samples that the first run has in other steps: a resume that begins too late or too early, a lost sample."""
    mine, theirs = counted(one), counted(two)
    new, lost = theirs - mine, mine - theirs
    names = {s.content: s.name for side in (one, two) for each in side.values() for s in each}
    resumed = step.pair.shift or step.one.begins or step.two.begins
    text = (
        f"{_named(lost, names)} missing, {_named(new, names)} in {'its' if sum(lost.values()) == 1 else 'their'} place"
    )
    epochs = [max((s.epoch for each in side.values() for s in each), default=0) for side in (one, two)]
    for away in (1, -1, 2, -2, *(-each for each in range(3, step.at[0] + 1)), *range(3, 50)):
        at = step.at[0] + away
        if not 0 <= at < len(step.pair.one.spots):
            continue
        found, _ = trained(_uses(step.pair.one, at), {})
        there = counted(found)
        whole = there == theirs
        part = abs(away) == 1 and sum(lost.values()) < sum(mine.values()) and not new - there
        if (whole and (resumed or abs(away) <= 2)) or (part and resumed):
            text = f"it reads what the first run reads in step {at}" if whole else text
            if away > 0:
                return step.finding("data", "late-resume" if resumed else "lost-samples", text, "samples")
            return step.finding("data", "early-resume" if resumed else "repeated-samples", text, "samples")
    if (
        sum(lost.values()) < sum(mine.values())
        and epochs[0] == epochs[1]
        and sum(new.values()) * 2 <= sum(mine.values())
    ):
        repeated = [content for content in new if theirs[content] > 1 or content in _before(step)]
        cause = "repeated-samples" if repeated or not lost else "lost-samples"
        return step.finding("data", cause, text, "samples", _rank(two, new))
    return None


def _before(step: Step) -> set[int]:
    """What the second run read in the steps before."""
    found: set[int] = set()
    for at in range(max(0, step.at[1] - 200), step.at[1]):
        samples, _ = trained(_uses(step.pair.two, at), {})
        found |= set(counted(samples))
    return found


def _epochs(step: Step, one: dict[int, list[Sample]], two: dict[int, list[Sample]]) -> list[dict[int, Counter[int]]]:
    """Of both runs: rank -> the samples of this step's epoch, as far as both recorded it."""
    found: list[dict[int, Counter[int]]] = []
    for side, place, first in ((step.pair.one, 0, one), (step.pair.two, 1, two)):
        epoch = next((s.epoch for each in first.values() for s in each), -1)
        ranks: dict[int, Counter[int]] = {}
        for pair in step.pair.steps:
            samples, _ = trained(_uses(side, pair[place]), {})
            for rank, each in samples.items():
                ranks.setdefault(rank, Counter()).update(s.content for s in each if s.epoch == epoch)
        found.append(ranks)
    return found


def _overlap(step: Step, one: dict[int, list[Sample]], two: dict[int, list[Sample]]) -> Finding | None:
    """Ranks whose parts of the epoch overlap by more than what fills up a last batch."""
    mine, theirs = _epochs(step, one, two)
    if len(theirs) < 2 or step.two.begins:
        return None
    total = sum(theirs.values(), Counter())
    several = [content for content in total if sum(content in part for part in theirs.values()) > 1]
    expected = sum(mine.values(), Counter())
    if len(several) > max(2, len(total) // 10) and max(expected.values(), default=1) == 1:
        text = f"in {SECOND} {len(several)} of {len(total)} samples of the epoch come on more than one rank"
        return step.finding("data", "other-shuffle", text, "samples")
    return None


def _ordered(step: Step, one: dict[int, list[Sample]], two: dict[int, list[Sample]]) -> Finding:
    """The same samples in another order, or other samples."""
    mine, theirs = (sum(ranks.values(), Counter()) for ranks in _epochs(step, one, two))
    common = sum((mine & theirs).values())
    if 2 * common >= min(sum(mine.values()), sum(theirs.values())):
        text = f"the epoch has the same samples ({common} in what was recorded of it), but not in the same steps"
        return step.finding("data", "other-order", text, "samples")
    return step.finding("data", "other-samples", f"{_listed(two[min(two)])} on rank {min(two)}", "samples")


def _rank(samples: dict[int, list[Sample]], new: Counter[int]) -> int:
    return next((rank for rank, each in samples.items() if any(s.content in new for s in each)), -1)


def _named(contents: Counter[int], names: dict[int, str]) -> str:
    shown = [names.get(content, "a sample") for content in contents]
    if not shown:
        return "none"
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _listed(samples: list[Sample]) -> str:
    return _named(Counter(dict.fromkeys((s.content for s in samples), 1)), {s.content: s.name for s in samples})
