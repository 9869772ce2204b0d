"""Compare the inputs of a step: samples, random generators, and the sets of tensors.

`data_difference` compares the samples over all ranks, `random_difference` the generators around forwards. The
`*_sets` functions find parameters, gradients, buffers and optimizer states that one run lacks. An empty set, or one
that lacks an element of the other, is never the same. `kept_gradient` finds gradients that were not cleared.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from lockstep.trace.compare.causes import TraceFinding
from lockstep.trace.compare.judge_gradient import same_effect
from lockstep.trace.compare.pairing import (
    FIRST,
    SECOND,
    Matched,
    Spot,
    StepPair,
    TracedSample,
    TracePair,
    TraceSide,
    Use,
    count_contents,
    every,
    list_samples,
    match_names,
    readers,
)
from lockstep.trace.compare.reading import WholeTensor, words

__all__ = [
    "buffer_sets",
    "contents_difference",
    "data_difference",
    "gradient_sets",
    "kept_gradient",
    "parameter_sets",
    "random_difference",
    "state_sets",
    "unmatched_gradients",
]


# Samples that a message lists, at most.
_MOST_LISTED = 6


def data_difference(step: StepPair) -> TraceFinding | None:
    """Find the first difference in the samples of a step, over all ranks.

    As many samples with contents that no other step has may be the same samples, padded to another length: these are
    left to `contents_difference`.
    """
    short = _cut_short(step)
    if short is not None:
        return short
    first_reads, second_reads = _reads(step.pair, *step.at)
    first_counts = count_contents(first_reads)
    second_counts = count_contents(second_reads)
    if (
        first_counts == second_counts
        or not first_counts
        or not second_counts
        or count_contents(readers(first_reads)) == count_contents(readers(second_reads))
    ):
        return None
    for name, samples in ((SECOND, second_reads), (FIRST, first_reads)):
        parts = []
        for rank_samples in samples.values():
            if rank_samples:
                parts.append(Counter(sample.content for sample in rank_samples))
        if len(parts) > 1 and every(contents == parts[0] for contents in parts):
            return step.finding(
                "data", "overlapping", f"in {name} all ranks read {_list_contents(samples[min(samples)])}", "samples", 1
            )
    count = sum(second_counts.values())
    expected = sum(first_counts.values())
    # An uneven split or a lost sample changes the number by less.
    if max(count, expected) >= 1.5 * min(count, expected):
        cause = "batch-size" if count > expected else "batch-share"
        return step.finding("data", cause, f"{count} samples instead of {expected}", "samples")
    repeated = _repeated_epoch(step, first_reads, second_reads)
    if repeated is not None:
        return repeated
    if count == expected and not _are_elsewhere(step, (first_reads, second_reads)):
        # They are the same samples padded to another length, or samples with other contents.
        return None
    return (
        _overlap(step, first_reads, second_reads)
        or _samples_of_other_step(step, first_reads, second_reads)
        or _other_order(step, first_reads, second_reads)
    )


def _cut_short(step: StepPair) -> TraceFinding | None:
    """Report batches of one run that are loaded as a whole and computed in part.

    All others must be computed as a whole.
    """
    counts = [
        (name, rank, _count_computed(use, load), int(load["n"]))
        for name, side, at in ((SECOND, step.pair.two, step.at[1]), (FIRST, step.pair.one, step.at[0]))
        for rank, use in _uses(side, at).items()
        for load in use.loads
    ]
    short = [entry for entry in counts if entry[2] < entry[3]]
    if len({name for name, *_ in short}) != 1 or any(count > size for _, _, count, size in counts):
        return None
    name, rank, count, size = short[0]
    text = f"in {name} the forward has {count} of the {size} samples of its batch"
    return step.finding("data", "lost-samples", text, "samples", rank)


def _count_computed(use: Use, load: dict[str, Any]) -> int:
    """Count the samples of a batch that forwards compute."""
    pairs = zip(use.forwards, use.sources, strict=True)
    total = 0
    for forward, source in pairs:
        if source is load:
            total += int(forward["n"])
    return total


def contents_difference(step: StepPair) -> TraceFinding | None:
    """Report samples with other contents, which explain a gradient if nothing else does."""
    first_reads, second_reads = list_samples(_uses(step.pair.one, step.at[0]), _uses(step.pair.two, step.at[1]))
    first_counts = count_contents(first_reads)
    second_counts = count_contents(second_reads)
    if (
        first_counts == second_counts
        or count_contents(readers(first_reads)) == count_contents(readers(second_reads))
        or not second_counts - first_counts
    ):
        return None
    # Different padding, or samples that the loss ignores.
    if same_effect(step):
        return None
    wrong = next(iter((second_counts - first_counts).keys()))
    rank, sample = next(
        (rank, s) for rank, rank_samples in second_reads.items() for s in rank_samples if s.content == wrong
    )
    indices = []
    for side in (first_reads, second_reads):
        indices.append(Counter(s.index for rank_samples in side.values() for s in rank_samples))
    if indices[0] == indices[1] and -1 not in indices[0]:
        return step.finding("data", "other-contents", f"{sample.name} has different contents", "samples", rank)
    return step.finding("data", "other-samples", f"{_list_contents(second_reads[rank])} on rank {rank}", "samples")


def _reads(pair: TracePair, first_at: int, second_at: int) -> tuple[dict[int, list[TracedSample]], ...]:
    """Return the samples of a step by rank, for each run.

    They are known by their indices if these are the same in both runs.
    """
    reads = list_samples(_uses(pair.one, first_at), _uses(pair.two, second_at))
    return tuple(_by_index(side) if _is_indexed(pair) else side for side in reads)


def _reads_of(pair: TracePair, side: TraceSide, at: int) -> dict[int, list[TracedSample]]:
    """Return rank -> samples of a step of one run, as `_reads` does."""
    reads, _ = list_samples(_uses(side, at), {})
    if _is_indexed(pair):
        return _by_index(reads)
    return reads


def _by_index(reads: dict[int, list[TracedSample]]) -> dict[int, list[TracedSample]]:
    by_index = {}
    for rank, samples in reads.items():
        by_index[rank] = [TracedSample(s.index, s.index, s.epoch) for s in samples]
    return by_index


def _is_indexed(pair: TracePair) -> bool:
    """Whether equal indices are the same sample in both runs.

    They are if whatever has equal contents has equal indices.
    """
    if pair.indexed is None:
        pair.indexed = _have_equal_indices(pair)
    return pair.indexed


def _have_equal_indices(pair: TracePair) -> bool:
    sides: tuple[dict[int, set[int]], ...] = ({}, {})
    counts = Counter[int](), Counter[int]()
    for at in pair.steps:
        for reads, places, count in zip(list_samples(*_uses_at(pair, at)), sides, counts, strict=True):
            for sample in (entry for samples in reads.values() for entry in samples):
                places.setdefault(sample.content, set()).add(sample.index)
                count[sample.index] += 1
    common = sides[0].keys() & sides[1].keys()
    if any(-1 in count or not count for count in counts):
        return False
    if not common:
        return counts[0] == counts[1]
    return every(bool(sides[0][content] & sides[1][content]) for content in common)


def _uses_at(pair: TracePair, at: tuple[int, int]) -> tuple[dict[int, Use], dict[int, Use]]:
    return _uses(pair.one, at[0]), _uses(pair.two, at[1])


def _uses(side: TraceSide, at: int) -> dict[int, Use]:
    spot = side.spots[at]
    return dict(side.find_samples(spot).at(spot.at, 0))


def _repeated_epoch(
    step: StepPair, first: dict[int, list[TracedSample]], second: dict[int, list[TracedSample]]
) -> TraceFinding | None:
    """Report an epoch that repeats the order of an earlier one."""
    for side, at, samples in ((step.pair.two, step.at[1], second), (step.pair.one, step.at[0], first)):
        epoch = max((sample.epoch for rank_samples in samples.values() for sample in rank_samples), default=-1)
        if epoch < 1:
            continue
        for before in range(at - 1, -1, -1):
            earlier_samples = _reads_of(step.pair, side, before)
            earlier = max(
                (sample.epoch for rank_samples in earlier_samples.values() for sample in rank_samples), default=-1
            )
            if earlier < epoch and count_contents(earlier_samples) == count_contents(samples):
                text = f"epoch {epoch + 1} reads the samples that epoch {earlier + 1} read in step {before + 1}"
                return step.finding("data", "set-epoch", text, "samples")
    return None


def _samples_of_other_step(
    step: StepPair, first_reads: dict[int, list[TracedSample]], second_reads: dict[int, list[TracedSample]]
) -> TraceFinding | None:
    """Report samples that the first run reads in other steps.

    That is a resume that starts too late or too early, or a lost sample.
    """
    first_counts = count_contents(first_reads)
    second_counts = count_contents(second_reads)
    new = second_counts - first_counts
    missing = first_counts - second_counts
    names = {s.content: s.name for side in (first_reads, second_reads) for entry in side.values() for s in entry}
    resumed = step.pair.shift or step.one.begins or step.two.begins
    owner = "its" if sum(missing.values()) == 1 else "their"
    text = f"{_list_samples(missing, names)} missing, {_list_samples(new, names)} in {owner} place"
    epochs = []
    for side in (first_reads, second_reads):
        epochs.append(max((s.epoch for entry in side.values() for s in entry), default=0))
    # The nearest steps first; later ones only up to 50 steps ahead.
    for offset in (1, -1, 2, -2, *(-entry for entry in range(3, step.at[0] + 1)), *range(3, 50)):
        at = step.at[0] + offset
        if not 0 <= at < len(step.pair.one.spots):
            continue
        contents = count_contents(_reads_of(step.pair, step.pair.one, at))
        identical = contents == second_counts
        is_shifted = abs(offset) == 1 and sum(missing.values()) < sum(first_counts.values()) and not new - contents
        if (identical and (resumed or abs(offset) <= 2)) or (is_shifted and resumed):
            if identical:
                text = f"it reads the samples of the first run's step {at + 1}"
            if offset > 0:
                return step.finding("data", "late-resume" if resumed else "lost-samples", text, "samples")
            return step.finding("data", "early-resume" if resumed else "repeated-samples", text, "samples")
    if (
        sum(missing.values()) < sum(first_counts.values())
        and epochs[0] == epochs[1]
        and sum(new.values()) * 2 <= sum(first_counts.values())
    ):
        repeated = []
        for content in new:
            if second_counts[content] > 1 or content in _recent_samples(step):
                repeated.append(content)
        if repeated or not missing:
            cause = "repeated-samples"
        else:
            cause = "lost-samples"
        return step.finding("data", cause, text, "samples", _rank(second_reads, new))
    return None


def _recent_samples(step: StepPair) -> set[int]:
    """Return the samples that the second run read in its last 200 steps."""
    contents: set[int] = set()
    for at in range(max(0, step.at[1] - 200), step.at[1]):
        contents |= set(count_contents(_reads_of(step.pair, step.pair.two, at)))
    return contents


def _are_elsewhere(step: StepPair, reads: tuple[dict[int, list[TracedSample]], ...]) -> bool:
    """Whether most samples of only one run occur in other steps of the epoch.

    They may occur there in either run.

    Padded to other lengths, samples have contents that no other step has.
    """
    first_counts, second_counts = (count_contents(entry) for entry in reads)
    only = (first_counts - second_counts) + (second_counts - first_counts)
    elsewhere = 0
    for content, count in only.items():
        others = []
        for occurrences, entry, at in zip(_places(step.pair), reads, step.at, strict=True):
            others.append(occurrences.get(content, set()) - {(_epoch(entry), at)})
        epochs = []
        for places in others:
            epochs.append({epoch for epoch, _ in places})
        elsewhere += count * any(_epoch(entry) in side_epochs for entry, side_epochs in zip(reads, epochs, strict=True))
    return bool(elsewhere) and 2 * elsewhere >= only.total()


def _places(pair: TracePair) -> list[dict[int, set[tuple[int, int]]]]:
    """Return each run's contents -> (epoch, step) of every occurrence."""
    if not pair.places:
        for side in (pair.one, pair.two):
            places: dict[int, set[tuple[int, int]]] = {}
            for at in range(len(side.spots)):
                for sample in (entry for samples in _reads_of(pair, side, at).values() for entry in samples):
                    places.setdefault(sample.content, set()).add((sample.epoch, at))
            pair.places.append(places)
    return pair.places


def _epoch(reads: dict[int, list[TracedSample]]) -> int:
    """Return the last epoch of a step's samples; -1: unknown."""
    return max((sample.epoch for samples in reads.values() for sample in samples), default=-1)


def _epochs(
    step: StepPair, first_reads: dict[int, list[TracedSample]], second_reads: dict[int, list[TracedSample]]
) -> list[dict[int, Counter[int]]]:
    """Return rank -> samples of this step's epoch, for both runs, over the common steps."""
    sides: list[dict[int, Counter[int]]] = []
    for side, index, reads in ((step.pair.one, 0, first_reads), (step.pair.two, 1, second_reads)):
        epoch = next((s.epoch for rank_samples in reads.values() for s in rank_samples), -1)
        ranks: dict[int, Counter[int]] = {}
        for pair in step.pair.steps:
            for rank, rank_samples in _reads_of(step.pair, side, pair[index]).items():
                ranks.setdefault(rank, Counter()).update(s.content for s in rank_samples if s.epoch == epoch)
        sides.append(ranks)
    return sides


def _overlap(
    step: StepPair, first_reads: dict[int, list[TracedSample]], second_reads: dict[int, list[TracedSample]]
) -> TraceFinding | None:
    """Report ranks that share more samples of an epoch than padding explains."""
    first_ranks, second_ranks = _epochs(step, first_reads, second_reads)
    if len(second_ranks) < 2 or step.two.begins:
        return None
    total = sum(second_ranks.values(), Counter())
    several = []
    for content in total:
        if sum(content in counts for counts in second_ranks.values()) > 1:
            several.append(content)
    expected = sum(first_ranks.values(), Counter())
    if len(several) > max(2, len(total) // 10) and max(expected.values(), default=1) == 1:
        text = f"in {SECOND} {len(several)} of {len(total)} samples of the epoch are on more than one rank"
        return step.finding("data", "other-shuffle", text, "samples")
    return None


def _other_order(
    step: StepPair, first_reads: dict[int, list[TracedSample]], second_reads: dict[int, list[TracedSample]]
) -> TraceFinding:
    """Report the same samples in another order, or another number of samples."""
    counts = count_contents(first_reads), count_contents(second_reads)
    missing = counts[0] - counts[1]
    new = counts[1] - counts[0]
    if missing.total() == new.total():
        first_epoch, second_epoch = (
            sum(ranks.values(), Counter()) for ranks in _epochs(step, first_reads, second_reads)
        )
        common = (first_epoch & second_epoch).total()
        text = f"the epoch has the same samples ({common} in what was recorded of it), but not in the same steps"
        return step.finding("data", "other-order", text, "samples")
    if missing.total() > new.total():
        cause = "lost-samples"
    else:
        cause = "repeated-samples"
    text = f"{counts[1].total()} samples instead of {counts[0].total()}"
    return step.finding("data", cause, text, "samples", _shortest(second_reads))


def _shortest(reads: dict[int, list[TracedSample]]) -> int:
    """Return the rank with the fewest samples; -1 if all have as many."""
    counts = {rank: len(samples) for rank, samples in reads.items()}
    if len(set(counts.values())) > 1:
        return min(counts, key=lambda rank: counts[rank])
    return -1


def _rank(samples: dict[int, list[TracedSample]], new: Counter[int]) -> int:
    for rank, rank_samples in samples.items():
        if any(s.content in new for s in rank_samples):
            return rank
    return -1


def _list_samples(contents: Counter[int], names: dict[int, str]) -> str:
    listed = [names.get(content, "a sample") for content in contents]
    if not listed:
        return "none"
    if len(listed) > _MOST_LISTED:
        more = f" and {len(listed) - _MOST_LISTED} more"
    else:
        more = ""
    return ", ".join(listed[:_MOST_LISTED]) + more


def _list_contents(samples: list[TracedSample]) -> str:
    return _list_samples(Counter(dict.fromkeys((s.content for s in samples), 1)), {s.content: s.name for s in samples})


# Generators that every process has; others belong to the model.
_COMMON = ("torch", "cuda", "python", "numpy")
# Generators of numbers for a step, not of masks for samples.
_OF_HOST = ("python", "numpy")


class Forward(NamedTuple):
    """A training forward: its size, its samples, and digests of the generators around it.

    Attributes:
        size: samples, and elements of each one's output. Differently padded batches draw more or less.
    """

    size: tuple[int, int]
    samples: frozenset[int]
    before: dict[str, str]
    after: dict[str, str]

    def draws(self, key: str) -> bool:
        """Whether it draws from this generator."""
        return self.before.get(key) != self.after.get(key)


def random_difference(step: StepPair) -> tuple[str, TraceFinding | None]:
    """Compare the generators that the forwards draw from.

    Where a batch is split differently, masks cannot agree; other draws for other samples are right. Equal draws for
    other samples are a mistake.

    Returns:
        (why random numbers differ by construction or "", a mistake in them or None).
    """
    states = {name: _states(spot) for name, spot in step.sides()}
    every_forward = [each for ranks in states.values() for forwards in ranks.values() for each in forwards]
    keys = {key for each in every_forward for key in each.before if each.draws(key)}
    first_states = states[FIRST]
    second_states = states[SECOND]
    # Numbers of a step, such as which layers it leaves out, are the same in any split.
    keys = {key for key in keys if _list_draws(first_states, key) != _list_draws(second_states, key)}
    if not keys:
        return "", None
    for key in sorted(keys - set(_OF_HOST), key=lambda each: (each in _COMMON, each)):
        for name, spot in step.sides():
            wrong = _equal_draws(step, name, spot, key)
            if wrong is not None:
                return "", wrong
    key = min(keys, key=lambda each: (each in _COMMON, each))
    shapes = []
    for ranks in (first_states, second_states):
        shapes.append({rank: [forward.size for forward in each] for rank, each in ranks.items()})
    if shapes[0] == shapes[1]:
        for rank, forwards in second_states.items():
            if [each.before.get(key) for each in forwards] != [each.before.get(key) for each in first_states[rank]]:
                text = f"the state of the {key} generator differs before the forward, which draws from it"
                return "", step.finding("randomness", "random", text, key, rank)
        return "", None
    reason = (
        f"the forward of step {step.at[0] + 1} draws random numbers ({key} generator, as for dropout), which "
        "cannot agree if the batch is split differently; turn it off to prove the rest. Data, rates and "
        "evaluations were compared to the end"
    )
    return reason, None


def _states(spot: Spot) -> dict[int, list[Forward]]:
    """List each rank's training forwards of the model."""
    states = {}
    for rank, record in spot.part.records(spot.at).items():
        forwards = []
        for f in record["fwd"]:
            if f["train"] and not f["m"] and len(f.get("rng", ())) == 2:
                forwards.append(Forward((f["n"], f.get("w", 0)), frozenset(words(f.get("s"))), *f["rng"]))
        states[rank] = forwards
    return states


def _two_steps(spot: Spot) -> list[tuple[int, int, Forward]]:
    """List (step, rank, forward) of a step and of the one after it."""
    steps = []
    for at in (spot.at, spot.at + 1):
        if at < spot.part.count:
            steps.append(Spot(spot.part, at))
    return [(entry.at, rank, forward) for entry in steps for rank, ran in _states(entry).items() for forward in ran]


def _list_draws(ranks: dict[int, list[Forward]], key: str) -> set[tuple[str, str]]:
    """Return the generator's states before and after each forward."""
    return {
        (forward.before.get(key, ""), forward.after.get(key, "")) for forwards in ranks.values() for forward in forwards
    }


def _equal_draws(step: StepPair, name: str, spot: Spot, key: str) -> TraceFinding | None:
    """Report two forwards of other samples that draw the same numbers.

    They are on two ranks or in two steps.

    A generator that is seeded within the forward has equal states only after it; a second forward then ends with the
    state that it begins with, as if it drew nothing.
    """
    seen: dict[tuple[str, str], tuple[int, int, Forward]] = {}
    other_run = step.one if spot is step.two else step.two
    must_draw = every(forward.draws(key) for _, _, forward in _two_steps(other_run))
    must_draw &= any(forward.draws(key) for _, _, forward in _two_steps(spot))
    for at, rank, forward in _two_steps(spot):
        if not (forward.draws(key) or must_draw):
            continue
        for state in (("before", forward.before.get(key, "")), ("after", forward.after.get(key, ""))):
            earlier, other, twin = seen.setdefault(state, (at, rank, forward))
            if not forward.samples or not twin.samples or forward.samples & twin.samples:
                continue
            if other != rank:
                text = f"in {name} it draws the same numbers as rank {other}, for other samples"
                return step.finding("randomness", "equal-draws", text, f"{key} generator", rank)
            if earlier != at:
                when = f"in steps {earlier + 1} and {at + 1}"
            else:
                when = f"twice in step {at + 1}"
            text = f"in {name} rank {rank}'s forward draws the same numbers {when}, for other samples"
            return step.finding("randomness", "repeated-draws", text, f"{key} generator", rank)
    return None


# Share of a gradient that the sum of two others may leave unexplained.
_MOST_RESIDUAL = 1e-3
# Smallest share of a kept gradient that is reported.
_LEAST_SHARE = 0.05


def parameter_sets(step: StepPair) -> TraceFinding | None:
    """Compare the tensors of the two optimizers, and the parameters of the two models."""
    if not step.number and not step.pair.shift:
        models = match_names(_model(step.one), _model(step.two))
        for name, only in ((SECOND, models.first), (FIRST, models.second)):
            if only:
                return step.finding("initial weights", "other-model", f"{name} has no {_list_names(only)}", only[0])
    for section in ("weights", "begin"):
        first_tensors = step.one.tensors(section)
        second_tensors = step.two.tensors(section)
        if section == "begin" and not (first_tensors and second_tensors):
            # For large models it is recorded only now and then.
            continue
        finding = _unmatched_tensors(step, match_names(first_tensors, second_tensors))
        if finding is not None:
            return finding
    for name, spot, other in ((SECOND, step.two, step.one), (FIRST, step.one, step.two)):
        frozen = sorted((spot.part.names(spot.at, "frozen") - _trained_names(spot)) & _trained_names(other))
        if frozen:
            return step.finding("parameters", "frozen", f"{name} does not train {_list_names(frozen)}", frozen[0])
    return None


def _unmatched_tensors(step: StepPair, sets: Matched) -> TraceFinding | None:
    """Report tensors that only one optimizer has and trains."""
    sides = (
        (SECOND, step.two, step.one, sets.second, sets.first),
        (FIRST, step.one, step.two, sets.first, sets.second),
    )
    for name, spot, _, extra, lacks in sides:
        if extra and not set(extra) & set(_model(spot)):
            text = f"{name} updates {_list_names(extra)} instead of {_list_names(lacks or ['none'])}"
            return step.finding("parameters", "stale-optimizer", text, (lacks or extra)[0])
    for name, spot, other, _, lacks in sides:
        model = _model(spot)
        only = []
        for tensor in lacks:
            if tensor in _trained_names(other) or tensor not in model:
                only.append(tensor)
        if only:
            if set(only) <= spot.part.names(spot.at, "frozen"):
                cause = "frozen"
            else:
                cause = "outside-optimizer"
            cause = cause if set(only) <= set(model) else "other-model"
            return step.finding("parameters", cause, f"{name} does not update {_list_names(only)}", only[0])
    return None


def _trained_names(spot: Spot) -> set[str]:
    """Return the names of the tensors that the step trains."""
    if spot.hidden:
        return spot.tensors("weights").keys() - spot.part.names(spot.at, "frozen")
    return set(spot.tensors("grad"))


def _model(spot: Spot) -> list[str]:
    """List the model's parameters, without names that are positions in an optimizer's group."""
    names = []
    for name in spot.part.tensors(0, "initial"):
        if not _is_position(name):
            names.append(name)
    return names


def _is_position(name: str) -> bool:
    """Whether the name is a position in a group, of a tensor outside the model."""
    head, _, tail = name.partition(".")
    return head.startswith("group") and head[5:].isdigit() and tail.isdigit()


def unmatched_gradients(step: StepPair) -> list[str]:
    """List the gradients that only one run has and that are not all zero."""
    if step.one.hidden or step.two.hidden:
        return []
    first_gradients = step.one.tensors("grad")
    second_gradients = step.two.tensors("grad")
    sets = match_names(first_gradients, second_gradients)
    names = []
    for name in chain(sets.first, sets.second):
        if (first_gradients.get(name) or second_gradients[name]).square != 0:
            names.append(name)
    return names


def gradient_sets(step: StepPair) -> TraceFinding | None:
    """Compare the sets of tensors with a gradient."""
    only = unmatched_gradients(step)
    if not only:
        return None
    side = SECOND if only[0] in step.one.tensors("grad") else FIRST
    return step.finding("gradient", "no-gradient", f"{side} has no gradient of {_list_names(only)}", only[0])


def buffer_sets(step: StepPair) -> TraceFinding | None:
    """Compare the sets of the two models' buffers."""
    sets = match_names(step.one.tensors("buffers"), step.two.tensors("buffers"))
    for name, only in ((SECOND, sets.first), (FIRST, sets.second)):
        if only:
            return step.finding("buffers", "other-model", f"{name} has no {_list_names(only)}", only[0])
    return None


def state_sets(step: StepPair) -> TraceFinding | None:
    """Compare the two optimizers' states for tensors that both train."""
    first_states = step.one.tensors("state")
    second_states = step.two.tensors("state")
    trained = step.one.tensors("grad").keys() & step.two.tensors("grad").keys()
    sets = match_names(first_states, second_states)
    for name, only in ((SECOND, sets.first), (FIRST, sets.second)):
        lacking = []
        for key in only:
            if key.rpartition("/")[0] in trained:
                lacking.append(key)
        # For large models states are recorded only now and then.
        if lacking and first_states and second_states:
            return step.finding("optimizer state", "state", f"{name} has no {_list_names(lacking)}", lacking[0])
    return None


def kept_gradient(step: StepPair) -> TraceFinding | None:
    """Report a gradient that still contains the previous update's, which was not cleared.

    It is then a sum of this step's gradient and the same optimizer's last one, up to clipping.
    """
    for name, spot, other in ((SECOND, step.two, step.one), (FIRST, step.one, step.two)):
        grads = spot.tensors("grad")
        fresh = other.tensors("grad")
        previous = None
        for earlier in _previous_gradients(spot):
            if earlier.keys() == grads.keys():
                previous = earlier
                break
        if previous is None or not grads or not match_names(grads, fresh).whole:
            continue
        sum_, current, before = (
            [x for tensor in grads for x in side[tensor].sketch] for side in (grads, fresh, previous)
        )
        length = math.hypot(*sum_, *current, *before)
        if not math.isfinite(length):
            continue
        length = math.hypot(*sum_)
        # The plain sum, then a least-squares fit, since clipping scales both.
        for a, b in ((1.0, 1.0), _shares(sum_, current, before)):
            residual = math.dist(sum_, [a * x + b * y for x, y in zip(current, before, strict=True)])
            weight = b * math.hypot(*before) / length if length else 0.0
            if a > 0 and weight > _LEAST_SHARE and residual <= max(_MOST_RESIDUAL, step.limit) * length:
                text = f"in {name} {weight:.2g} of its length is the previous update's gradient"
                return step.finding("gradient", "kept-gradient", text, "all gradients")
    return None


def _previous_gradients(spot: Spot) -> Iterator[dict[str, WholeTensor]]:
    """Yield the gradients of the same optimizer's previous update, if there is one."""
    number = next(iter(spot.part.records(spot.at).values()))["opt"]
    for at in range(spot.at - 1, -1, -1):
        if next(iter(spot.part.records(at).values()))["opt"] == number:
            yield spot.part.tensors(at, "grad")
            return


def _shares(target: list[float], first: list[float], second: list[float]) -> tuple[float, float]:
    """Fit a vector by two others in least squares; (0, 0) if these are parallel."""
    a = _dot(first, first)
    b = _dot(first, second)
    c = _dot(second, second)
    determinant = a * c - b * b
    # The two are nearly parallel, so the fit would be arbitrary.
    if not determinant > 1e-6 * a * c:
        return 0.0, 0.0
    d = _dot(target, first)
    e = _dot(target, second)
    return (c * d - b * e) / determinant, (a * e - b * d) / determinant


def _dot(first: list[float], second: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(first, second, strict=True))


def _list_names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{len(names)} tensors, such as {names[0]}"
