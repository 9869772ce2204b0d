"""Show by gradients whether a loss is a sum or a mean over its items.

    verdict = weigh(trial, places)       # "mean", "sum", "neither", "not finite" or "unknown". Collective

A place is some samples and their two halves. If the loss is a sum, its gradient is the sum of the halves' gradients; if
it is a mean, their mean weighted by items. Values would prove less: with zero weights in the last layer every sample
has the same loss, and a large constant hides any difference.

- The weights are moved a little first, and put back bit for bit: gradients at zero or symmetric weights are special.
- At all places but the first all weights are four times as large: a mean over hard samples alone is a mean over all of
  them before anything is learned.
- The modules are in training mode, except BatchNorm, whose statistics are a matter of --batchnorm.
- A half gets the random numbers that its samples had in the whole (see `lockstep.training.trial.draws`).
- Only sketches of gradients are compared, so memory is that of one micro-batch.

Where it works:

| engine | how |
|---|---|
| single, data-parallel, ddp, zero, fsdp --exact on one process | each rank alone, on the plain module |
| fsdp | all ranks together: gradients are sums over the ranks |
| fsdp --exact, deepspeed, --engine.static-graph, own optimizer steps | not: declare `reduction` |

Autocast is off where the loss can be computed without it. Compiled code runs eagerly, quantised and frozen weights stay
where they are.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Generator, Tensor
from torch.utils import _pytree as pytree

from lockstep.counts import first_length
from lockstep.data.batches import MicroBatch
from lockstep.data.loader import blame
from lockstep.distributed import collectives
from lockstep.distributed.membership import translate_errors
from lockstep.engines.registry import backward_apart, engine_class, name_of, undo_step
from lockstep.errors import ConfigError, LockstepError, PeerError, error_line
from lockstep.passes import split_loss
from lockstep.task import Task
from lockstep.tensors import is_dtensor, local_of
from lockstep.training.trial.draws import CONTIGUOUS, DrawBook, Layout, RowDraws
from lockstep.training.trial.isolation import (
    GeneratorWatch,
    exact_arithmetic,
    foreign_gradients,
    host_states,
    own_gradients,
    training_modes,
)
from lockstep.training.trial.trial import Trial
from lockstep.training.trial.weight_moves import LAST_BIT, move_weights, stretch_weights
from lockstep.transforms.precision import AUTOCAST, eager, without_autocast

__all__ = [
    "HalvedSamples",
    "Verdict",
    "cut_rows",
    "halve",
    "have_same_tensors",
    "sketch",
    "weigh",
]

# Kinds of loss. The last one, a mean over samples, only serves a message.
SUM = "sum"
MEAN = "mean"
SAMPLES = "samples"
_KINDS = (SUM, MEAN, SAMPLES)


@dataclass(frozen=True, slots=True)
class HalvedSamples:
    """Some samples of this rank, and their two halves.

    Attributes:
        samples: number in each half.
        is_random: the collation draws random numbers, so the halves may have other labels than the whole.
        reload: loads the whole again; None: not possible.
        problem: why these samples can show nothing; "": they can.
    """

    whole: MicroBatch
    halves: tuple[MicroBatch, MicroBatch]
    samples: tuple[int, int]
    is_random: bool = False
    reload: Callable[[], MicroBatch] | None = None
    problem: str = ""


class Verdict(NamedTuple):
    """What the gradients show of a loss, the same on all ranks.

    Attributes:
        kind: "mean" or "sum": shown at every place that decides; "neither"; "not finite": at each place that was
            tried; "unknown".
        evidence: the numbers behind it, or why it is unknown.
        by_samples: it is "neither" because it is a mean over samples, while `count` counts other items.
        failed: number of findings, over all ranks and places, that ended in an error.
    """

    kind: str
    evidence: str
    by_samples: bool = False
    failed: int = 0


class PlaceFinding(NamedTuple):
    """What one place shows. JSON values, to be gathered.

    Attributes:
        kinds: the kinds that fit.
        problem: why it decides nothing; "": it decides.
        errors: relative error of each kind.
        samples: number in the whole.
        has_views, has_lengths: see `DrawBook`.
        is_finite: the loss of the whole is.
        failed: the comparison raised an error.
    """

    kinds: list[str]
    problem: str
    errors: list[float]
    samples: int
    has_views: bool
    has_lengths: bool
    is_finite: bool = True
    failed: bool = False

    @property
    def is_against(self) -> bool:
        """Whether the loss is neither a sum nor a mean over its items."""
        return not self.problem and SUM not in self.kinds and MEAN not in self.kinds


# --- weigh


def weigh(trial: Trial, places: Sequence[HalvedSamples], seed: int = 0) -> Verdict:
    """Compare the gradient of some samples with those of their halves. Collective.

    Leaves no trace: weights, gradients, buffers, modes and generators are as before.

    Args:
        trial: with the task and its engine.
        places: of this rank; as many on every rank.
        seed: of the random numbers and of the moves of the weights.

    Raises:
        ConfigError: the loss writes a parameter of the model, which cannot be undone without copies.
    """
    if refusal := _undecidable(trial):
        return Verdict("unknown", refusal)
    if not places:
        return Verdict("unknown", "the first samples cannot be halved")
    # torch's private counts of writes show a parameter that the loss has overwritten.
    versions = {name: p._version for name, p in trial.plain.named_parameters()}
    try:
        with _Weighing(trial, seed).prepare() as weighing:
            columns = weighing.judge(places, seed, [bool(number) for number in range(len(places))])  # collective
            undecided = weighing.find_unsteady(places, seed, columns)  # collective where a place is against
            if undecided:
                again = weighing.judge([places[number] for number in undecided], seed + len(places))  # collective
                for number, column in zip(undecided, again, strict=True):
                    columns[number] = column
        _check_unwritten(trial, versions)
        return _conclude([*chain(*columns)])
    except LockstepError:
        raise
    except Exception as error:
        # The parameters cannot be moved or read, on every rank alike.
        _check_unwritten(trial, versions)
        return Verdict("unknown", error_line(error))


def _check_unwritten(trial: Trial, versions: Mapping[str, int]) -> None:
    """Raise ConfigError for a parameter that a forward or the loss has overwritten.

    Args:
        versions: by the parameters' names, torch's counts of writes before the proof.
    """
    # Gathering sharded parameters writes them too.
    if trial.is_sharded:
        return
    written = []
    for name, p in trial.plain.named_parameters():
        if p._version != versions.get(name):
            written.append(name)
    if written:
        raise ConfigError(
            f"the model's forward or the task's `loss` writes {written[0]}, a parameter, which no check of a step in "
            "several micro-batches can undo: write it in the hook `after_update` or in the loop, or train on one "
            "device without --micro-batch-size"
        )


def _undecidable(trial: Trial) -> str:
    """Return why a run cannot be weighed, only declare its reduction; "": it can."""
    if trial.task.own_steps is not None:
        return "the task steps its optimizers itself"
    if not trial.task.divisible:
        return "its loss cannot be computed for a part of a micro-batch before the run"
    if trial.config.engine_options.static_graph:
        return "--engine.static-graph records the first backward"
    name = name_of(trial.config.engine, trial.world)
    return engine_class(name).explain_no_backward(exact=trial.config.exact and trial.world.size > 1)


def _conclude(found: list[PlaceFinding]) -> Verdict:
    decided = []
    for finding in found:
        if not finding.problem:
            decided.append(finding)
    failed = sum(finding.failed for finding in found)
    if not decided:
        first_finding = found[0]
        problem = first_finding.problem
        for finding in found:
            if not finding.is_finite:
                problem = finding.problem
                break
        is_finite = all(finding.is_finite for finding in found)
        return Verdict("unknown" if is_finite else "not finite", problem, failed=failed)
    kinds = []
    for reduction in _KINDS:
        if all(reduction in finding.kinds for finding in decided):
            kinds.append(reduction)
    if SUM in kinds or MEAN in kinds:
        return Verdict(SUM if SUM in kinds else MEAN, _describe(decided[0]), failed=failed)
    against = decided[-1]
    for finding in decided:
        if finding.is_against:
            against = finding
            break
    return Verdict("neither", _describe(against), by_samples=SAMPLES in kinds, failed=failed)


def _describe(finding: PlaceFinding) -> str:
    by_sum, by_mean, _ = finding.errors
    return (
        f"the gradient of {finding.samples} samples differs from the sum of their two halves' by {_percent(by_sum)}, "
        f"and from their mean by {_percent(by_mean)}"
    )


def _percent(error: float) -> str:
    if error < 10:
        return f"{100 * error:.3g}%"
    return "more than all of it"


class _PlaceFacts(NamedTuple):
    """The facts of a place that the ranks with added gradients share.

    On a rank whose gradients are not added they are its own.

    Attributes:
        has_problem: a rank's samples can show nothing.
        same_items, same_samples: the halves have the same shares on all of them.
    """

    has_problem: bool
    same_items: bool
    same_samples: bool


class _Pass(NamedTuple):
    """The gradient of one call of the loss.

    Attributes:
        sketches: of all trained parameters, one after the other: float64, in host memory.
        is_finite: the loss is.
        uncut: operations whose random numbers could not be cut.
        states: of numpy's and Python's default generators afterwards.
    """

    sketches: Tensor
    is_finite: bool
    uncut: list[str]
    states: bytes


@final
class _Weighing:
    """One run of the proof. Modes, weights and gradients are changed within `prepare`.

    Attributes:
        is_sharded: gradients are sums over the ranks, which run together.
        narrow: losses are computed under the run's autocast.
    """

    def __init__(self, trial: Trial, seed: int) -> None:
        self.trial = trial
        self._seed = seed
        self.is_sharded = trial.world.part("pp").size > 1 or any(map(is_dtensor, trial.model.parameters()))
        self._model = trial.model if self.is_sharded else trial.plain
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        lengths = [_sketch_length(local_of(p)) for p in self._parameters]
        self._owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        stages = trial.world.part("pp")
        # Parameters of each stage of a pipeline: together they are the model's.
        self._counts = stages.gather(len(lengths))  # collective
        self._first_own = sum(self._counts[: stages.rank])
        self.narrow = False
        self._backward: Callable[[Tensor, float], None]

    @contextmanager
    def prepare(self) -> Iterator["_Weighing"]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(eager())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(training_modes(self.trial.model, self.trial.training_modes))
            stack.enter_context(exact_arithmetic(self._model))
            stack.enter_context(own_gradients(self._parameters))
            if self.is_sharded:
                # A changed set of trained parameters must rebuild the engine before its backward is taken, and before
                # the weights move, at which its averages of the new ones begin.
                self.trial.engine.accumulate(True, False)
                undo_step(self.trial.engine)
            stack.enter_context(move_weights([local_of(p) for p in self._parameters], self._seed))
            self._backward = stack.enter_context(backward_apart(self.trial.engine))
            yield self

    def judge(
        self, places: Sequence[HalvedSamples], seed: int, stretches: Sequence[bool] = ()
    ) -> list[list[PlaceFinding]]:
        """Weigh places; return for each the findings of all ranks. Collective.

        Args:
            stretches: whether the weights of a place are larger; (): none are.
        """
        stretches = stretches or [False] * len(places)
        judgements, rows = self._first(places, seed, stretches)  # collective
        if (
            not self.narrow
            and self.trial.config.precision in AUTOCAST
            and any(finding.failed for finding in chain(*rows))
        ):
            # The loss may rely on autocast.
            self.narrow = True
            judgements, rows = self._first(places, seed, stretches)  # collective
        for action in (_Judgement.in_other_layouts, _Judgement.with_rows, _Judgement.explain):
            columns = []
            for index in range(len(judgements)):
                columns.append([row[index] for row in rows])
            if not any(finding.is_against for finding in chain(*columns)):
                break
            for judgement, column, stretch in zip(judgements, columns, stretches, strict=True):
                if any(finding.is_against for finding in column):
                    with self._scale(stretch):
                        action(judgement, column)  # collective
            rows = self._gather(judgements)  # collective
        columns = []
        for index in range(len(judgements)):
            columns.append([row[index] for row in rows])
        # With sharded parameters no rank can judge alone: a problem of one counts for all.
        if self.is_sharded:
            columns = [[next((finding for finding in column if finding.problem), column[0])] for column in columns]
        return columns

    def find_unsteady(self, places: Sequence[HalvedSamples], seed: int, columns: list[list[PlaceFinding]]) -> list[int]:
        """Return the places that larger weights decide nothing at. Collective where one is against.

        Such weights may overflow, or amplify rounding without bound.

        Args:
            columns: the findings of all ranks at each place.
        """
        against = []
        for n, column in enumerate(columns):
            if n and any(finding.is_against for finding in column):
                against.append(n)
        unsteady = set[int]()
        if against and not any(finding.is_against for finding in columns[0]):
            judgements = self._judgements(places, seed)  # collective
            with self._scale(True):
                unsteady_here = [number for number in against if judgements[number].is_unsteady()]  # collective
            unsteady = set()
            # Collective. A place is unsteady if it is so on one rank.
            for rank in self.trial.world.gather(unsteady_here):
                unsteady.update(rank)
        problems = set()
        for n, column in enumerate(columns):
            if n and any(finding.problem for finding in column):
                problems.add(n)
        return sorted(unsteady | problems)

    def _scale(self, stretch: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context with the weights of a place."""
        if stretch:
            return stretch_weights([local_of(p) for p in self._parameters])
        return contextlib.nullcontext()

    def _judgements(self, places: Sequence[HalvedSamples], seed: int) -> list["_Judgement"]:
        """Make a judgement of each place. Collective with sharded parameters."""
        facts = self._compare(places)  # collective
        judgements = []
        for number, place in enumerate(places):
            judgements.append(_Judgement(self, place, seed + number, facts[number]))
        return judgements

    def _first(
        self, places: Sequence[HalvedSamples], seed: int, stretches: Sequence[bool]
    ) -> tuple[list["_Judgement"], list[list[PlaceFinding]]]:
        """Compare each place once. Returns this rank's judgements, and every rank's findings. Collective."""
        judgements = self._judgements(places, seed)  # collective
        for judgement, stretch in zip(judgements, stretches, strict=True):
            with self._scale(stretch):
                judgement.first()
        return judgements, self._gather(judgements)  # collective

    def _compare(self, places: Sequence[HalvedSamples]) -> list["_PlaceFacts"]:
        """Compare the ranks' places, where their gradients are added. Collective with sharded parameters."""
        shares = [[*chain(*_shares_of(place))] for place in places]
        rows = []
        for place, row in zip(places, shares, strict=True):
            rows.append([bool(place.problem), *row, *(-x for x in row)])
        most = torch.tensor(rows, dtype=torch.float64)
        if self.is_sharded and self.trial.world.size > 1:
            # The maximum over the ranks of x and of -x gives the largest and the smallest x.
            collectives.all_reduce(most, op=dist.ReduceOp.MAX, group=self.trial.world.control)
        # The ranks agree where the largest is the smallest.
        same = (most[:, 1:5] == -most[:, 5:]).tolist()
        facts = []
        for problem, row in zip(most[:, 0], same, strict=True):
            facts.append(_PlaceFacts(bool(problem), all(row[:2]), all(row[2:])))
        return facts

    def _gather(self, judgements: list["_Judgement"]) -> list[list[PlaceFinding]]:
        """Return the findings of each rank's places. Collective."""
        findings = [[*judgement.finding] for judgement in judgements]
        # Every rank draws the conclusion from the findings of all.
        findings_by_rank = []
        for rank in self.trial.world.gather(findings):
            findings_by_rank.append([PlaceFinding(*values) for values in rank])
        return findings_by_rank

    def differentiate(
        self, batch: MicroBatch, draws: RowDraws, seed: int, weight: float = 1.0, watch: "GeneratorWatch | None" = None
    ) -> _Pass:
        """Compute the gradient of a batch's loss, and drop it again. Collective with sharded parameters."""
        trial = self.trial
        task = self.trial.task
        dtypes = contextlib.nullcontext() if self.narrow else without_autocast()
        if self.is_sharded:
            forward = trial.engine.accumulate(True, False)
        else:
            forward = contextlib.nullcontext()
        try:
            with trial.preserve(), dtypes:
                trial.seed(seed)
                with watch or contextlib.nullcontext(), forward, draws:
                    loss, _ = split_loss(task.loss(self._model, batch.data))
                    with foreign_gradients(loss, self._parameters):
                        self._backward(loss, weight)
                states = host_states()
            sketches = [sketch(p.grad, local_of(p)) for p in self._parameters]
            # Waits for the device, once for each gradient of the proof.
            vector = torch.cat([values.to("cpu", torch.float64) for values in sketches])
            return _Pass(vector, math.isfinite(float(loss.detach())), draws.uncut, states)
        finally:
            for parameter in self._parameters:
                parameter.grad = None
            if self.is_sharded:
                undo_step(trial.engine)

    def relative_errors(self, whole: Tensor, halves: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
        """Return the largest relative error of each kind. Collective with sharded parameters.

        Args:
            whole, halves: sketches of their gradients.
            expected: the whole's sketches, as each kind expects them.

        Returns:
            An error for each of `expected`; [] if all gradients are zero.
        """
        rows = [whole, *halves, *(whole - other for other in expected)]
        squares = torch.zeros(len(rows), sum(self._counts), dtype=torch.float64)
        for row, values in zip(squares, rows, strict=True):
            row.index_add_(0, self._first_own + self._owners, values.square())
        if self.is_sharded and self.trial.world.size > 1:
            # Each rank has the squares of its shards; the norms need those of all ranks.
            collectives.all_reduce(squares, group=self.trial.world.control)
        # The last column is the norm over all tensors.
        norms = torch.cat([squares, squares.sum(1, keepdim=True)], 1).sqrt()
        scale = torch.maximum(norms[0], _CANCELLED * (norms[1] + norms[2]))
        if not scale[-1]:
            return []
        floor = _NARROW_FLOOR if self._is_low_precision else _FLOOR
        errors = norms[3:] / torch.maximum(scale, floor * scale[-1])
        return [float(error) for error in errors.nan_to_num(math.inf, math.inf).amax(1)]

    @property
    def tolerance(self) -> float:
        """The largest relative error of a kind that fits."""
        if self._is_low_precision:
            return _NARROW_TOLERANCE
        return _TOLERANCE

    @property
    def _is_low_precision(self) -> bool:
        return self.narrow or self.trial.is_low_precision


@final
class _Judgement:
    """The comparison at one place, on this rank. Its methods run on every rank."""

    def __init__(self, weighing: _Weighing, place: HalvedSamples, seed: int, facts: _PlaceFacts) -> None:
        self._weighing = weighing
        self._place = place
        self._seed = seed
        self._facts = facts
        self._book = DrawBook()
        self._whole: _Pass | None = None
        self.finding = self._leave_undecided("it was not tried")

    def first(self) -> None:
        """Compare the whole with its halves."""
        if self._facts.has_problem:
            self.finding = self._leave_undecided(self._place.problem or "another rank cannot tell")
            return

        def compare() -> PlaceFinding:
            self._whole = self._differentiate(self._place.whole, None)
            return self._compare(CONTIGUOUS)

        self.finding = self._try(compare)

    def in_other_layouts(self, found: list[PlaceFinding]) -> None:
        """Compare with other rows of the random numbers.

        These may belong to the samples in another way.
        """
        has_views = any(finding.has_views for finding in found)
        has_lengths = any(finding.has_lengths for finding in found)
        layouts = []
        for a in (False, has_views):
            for b in (False, has_lengths):
                layouts.append(Layout(a, b))
        for layout in dict.fromkeys(layouts):
            if layout != CONTIGUOUS:
                self._try_again(layout)

    def with_rows(self, found: list[PlaceFinding]) -> None:
        """Compare with rows of the whole, if each load gives other samples. Collective.

        Halves that are loaded by themselves would have other samples.
        """
        is_random = False
        if self.finding.is_against and self._place.reload:
            is_random = not have_same_tensors(self._place.whole.held, self._place.reload().held)
        # All ranks compare again if one must, because the comparison is collective.
        if not any(self._weighing.trial.world.gather(is_random)):
            return
        if is_random:
            halves = cut_rows(self._place.whole, self._place.samples, self._weighing.trial.task)
            if halves is None:
                self.finding = self._leave_undecided("the samples are random, and their batch cannot be cut by rows")
            else:
                self._place = replace(self._place, halves=halves)
        self._try_again(CONTIGUOUS)

    def is_unsteady(self) -> bool:
        """Whether rounding changes the gradient of the whole. Collective with sharded parameters."""
        weighing = self._weighing
        weights = [local_of(p) for p in weighing._parameters]
        changes = [math.inf]

        def compare() -> PlaceFinding:
            before = self._differentiate(self._place.whole, None)
            with move_weights(weights, self._seed, first_bit=LAST_BIT):
                after = self._differentiate(self._place.whole, None)
            arguments = before.sketches, [before.sketches] * 2, [after.sketches]
            changes[:] = weighing.relative_errors(*arguments)  # collective with sharded parameters
            return self.finding

        self._try(compare)
        return bool(changes) and not changes[0] <= _STEADY

    def explain(self, found: list[PlaceFinding]) -> None:
        """Compute the whole again, to see whether its loss draws numbers that nothing can cut."""
        watch = GeneratorWatch(self._weighing.trial.task, self._weighing.trial.world.device)
        watched = self._try(lambda: self._watch(watch))
        if self.finding.is_against and watch.moved:
            self.finding = watched

    def _watch(self, watch: "GeneratorWatch") -> PlaceFinding:
        self._differentiate(self._place.whole, None, watch=watch)
        if watch.moved:
            return self._leave_undecided(f"its loss draws from {watch.moved[0]}")
        return self.finding

    def _try_again(self, layout: Layout) -> None:
        finding = self._try(lambda: self._compare(layout))
        if self.finding.is_against and not (finding.is_against or finding.failed):
            self.finding = finding

    def _try(self, action: Callable[[], PlaceFinding]) -> PlaceFinding:
        """Run a comparison, whose failure does not end the run.

        The loss may need more samples, or more memory.

        Collective with sharded parameters.

        Raises:
            DataError: it failed on this rank alone, while the others wait for it in a forward or backward.
        """
        trial = self._weighing.trial
        problem: Exception | None = None
        try:
            with translate_errors():
                finding = action()
        except PeerError:
            raise
        except Exception as error:
            problem = error
            if isinstance(error, torch.OutOfMemoryError):
                trial.memory_error = error
            finding = self._leave_undecided(error_line(error))._replace(failed=True)
        if self._weighing.is_sharded:
            try:
                # Collective: the other ranks may wait in a forward.
                collectives.barrier(group=trial.world.control)
            except PeerError:
                if problem is None:
                    raise
                raise blame("loss", problem, "a trial before step 1") from problem
        return finding

    def _leave_undecided(self, problem: str) -> PlaceFinding:
        return PlaceFinding([], problem, [math.inf] * len(_KINDS), sum(self._place.samples), *self._layouts)

    @property
    def _layouts(self) -> tuple[bool, bool]:
        return self._book.has_views, self._book.has_lengths

    def _differentiate(
        self, batch: MicroBatch, part: int | None, layout: Layout = CONTIGUOUS, weight: float = 1.0, watch: Any = None
    ) -> _Pass:
        """Compute the gradient of the whole (`part` None) or of a half."""
        first_count, second_count = self._place.samples
        if part is None:
            draws = RowDraws(self._book, first_count + second_count)
        else:
            draws = RowDraws(
                self._book, first_count + second_count, first_count * part, self._place.samples[part], layout
            )
        try:
            return self._weighing.differentiate(batch, draws, self._seed, weight, watch)
        finally:
            self._book.restore()

    def _compare(self, layout: Layout) -> PlaceFinding:
        """Compare the whole's gradient with those of its halves. Collective with sharded parameters."""
        place = self._place
        whole = self._whole
        weighing = self._weighing
        assert whole is not None
        items = [float(half.items) for half in place.halves]
        ones = self._halves(layout, [1.0, 1.0])
        expected = [ones[0].sketches + ones[1].sketches]
        is_same = self._facts.same_items, self._facts.same_samples
        for weights, same in zip(_shares_of(place), is_same, strict=True):
            parts = ones
            if not same:
                # The ranks add their gradients, so each weighs its halves before the sum.
                parts = self._halves(layout, weights)
                weights = [1.0, 1.0]
            expected.append(weights[0] * parts[0].sketches + weights[1] * parts[1].sketches)
        halves = [gradient.sketches for gradient in ones]
        errors = weighing.relative_errors(whole.sketches, halves, expected)  # collective
        return self._read(whole, ones, items, errors)

    def _halves(self, layout: Layout, weights: Sequence[float]) -> list[_Pass]:
        """Compute the gradients of both halves, each times its weight.

        A loss 0 / 0 of a half without items counts as 0.
        """
        passes = []
        for index, half in enumerate(self._place.halves):
            batch = half
            weight = weights[index]
            # Without items its loss may be 0 / 0, which would reach the gradient of every rank.
            if self._weighing.is_sharded and not half.items:
                batch = self._place.halves[1 - index]
                weight = 0.0
            gradient = self._differentiate(batch, index, layout, weight)
            if not half.items and not gradient.is_finite:
                gradient = gradient._replace(sketches=torch.zeros_like(gradient.sketches), is_finite=True)
            passes.append(gradient)
        return passes

    def _read(self, whole: _Pass, halves: list[_Pass], items: list[float], errors: list[float]) -> PlaceFinding:
        """Draw the conclusion from a comparison."""
        if not whole.is_finite and not sum(items):
            return self._leave_undecided("the samples have no items")
        if not whole.is_finite:
            return self._leave_undecided("its loss is not finite")._replace(is_finite=False)
        if not whole.sketches.isfinite().all():
            return self._leave_undecided("its gradient is not finite")
        if not errors:
            return self._leave_undecided("its gradient is zero")
        if not all(half.is_finite and half.sketches.isfinite().all() for half in halves):
            errors = [math.inf] * len(errors)
        kinds = []
        for reduction, error in zip(_KINDS, errors, strict=True):
            if error <= self._weighing.tolerance:
                kinds.append(reduction)
        finding = PlaceFinding(kinds, "", errors, sum(self._place.samples), *self._layouts)
        uncut = next((name for half in halves for name in half.uncut), "")
        # A permutation of two samples may fit by chance, so such draws prove nothing.
        if uncut:
            return self._leave_undecided(f"the random numbers of torch's {uncut.strip('_')} cannot be cut by samples")
        # A loss that draws for each sample leaves other generator states after a half.
        if any(half.states != whole.states for half in halves):
            return self._leave_undecided("its loss draws numbers for its samples from numpy's or Python's generator")
        if SUM in kinds and len(kinds) > 1:
            return self._leave_undecided("one half adds nothing")
        return finding


def _shares_of(place: HalvedSamples) -> tuple[list[float], list[float]]:
    """Return each half's share of the items and of the samples; 0 without any."""
    items = [float(half.items) for half in place.halves]
    total = sum(items)
    samples = sum(place.samples)
    return [value / total if total else 0.0 for value in items], [value / (samples or 1) for value in place.samples]


# --- halves of a collated batch


def cut_rows(batch: MicroBatch, samples: tuple[int, int], task: Task) -> tuple[MicroBatch, MicroBatch] | None:
    """Cut a collated batch in two by rows; None if a tensor lacks such rows.

    Args:
        samples: number in each half.
    """
    first_count, second_count = samples
    parts = []
    try:
        for start, count in ((0, first_count), (first_count, second_count)):
            held = _rows(batch.held, first_count + second_count, start, count)
            parts.append(MicroBatch(held, batch.index, task.count(held), 1.0, batch.move))
    except (_NotRows, LockstepError):
        return None
    return parts[0], parts[1]


def halve(batch: MicroBatch, task: Task) -> HalvedSamples:
    """Return a collated batch as a place to weigh, with its halves by rows."""
    samples = first_length(batch.held) or 0
    sizes = samples // 2, samples - samples // 2
    halves = cut_rows(batch, sizes, task) if sizes[0] else None
    problem = "" if halves else "the micro-batch cannot be cut by rows"
    return HalvedSamples(batch, halves or (batch, batch), sizes, problem=problem)


class _NotRows(Exception):
    """A value without rows for the samples."""


def _rows(value: Any, samples: int, start: int, count: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        if not value.ndim or len(value) % samples:
            raise _NotRows
        each = len(value) // samples
        return value[start * each : (start + count) * each]
    if isinstance(value, Mapping):
        rows = {key: _rows(each, samples, start, count) for key, each in value.items()}
        if type(value) is dict:
            return rows
        copied: Any = copy.copy(value)
        copied.update(rows)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rows(each, samples, start, count) for each in value))
    if isinstance(value, list | tuple) and any(isinstance(each, Tensor | np.ndarray) for each in value):
        return type(value)(_rows(each, samples, start, count) for each in value)
    if isinstance(value, list | tuple) and len(value) == samples:
        return value[start : start + count]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return dataclasses.replace(value, **{k: _rows(getattr(value, k), samples, start, count) for k in names})
    raise _NotRows


def have_same_tensors(first: Any, second: Any) -> bool:
    """Whether two batches of one form hold equal tensors."""
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
    return all(a.equal(b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


# --- sketches

# A prime, so that the rows of a sketch do not line up with those of a matrix.
_WIDTH = 4093
# Numbers that are converted at a time.
_CHUNK = 2**22


def sketch(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """Return at most 4093 numbers, linear in a gradient, with about its norm.

    Small gradients are returned whole. Longer ones are rows of 4093 numbers, which are added with seeded signs.

    Args:
        gradient: of any dtype; None: zero.
        parameter: this rank's part of the parameter.
    """
    length = _sketch_length(parameter)
    if gradient is None:
        return torch.zeros(length, dtype=torch.float64)
    values = local_of(gradient)
    values = values.to_dense() if values.is_sparse else values
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    dtype = torch.promote_types(values.dtype, torch.float32)
    if len(values) <= _WIDTH:
        return values.to(dtype)
    rows = len(values) // _WIDTH
    signs = torch.randint(2, (rows,), generator=Generator().manual_seed(rows)).mul_(2).sub_(1)
    signs = signs.to(values.device, dtype)
    result = torch.zeros(_WIDTH, dtype=dtype, device=values.device)
    rest = values[rows * _WIDTH :]
    result[: len(rest)] += rest
    body = values[: rows * _WIDTH].view(rows, _WIDTH)
    step = max(1, _CHUNK // _WIDTH)
    for start in range(0, rows, step):
        result += signs[start : start + step] @ body[start : start + step].to(dtype)
    return result


def _sketch_length(parameter: Tensor) -> int:
    return min(parameter.numel() * (1 + parameter.is_complex()), _WIDTH)


# Largest relative change of a gradient when the weights move by about a rounding error.
_STEADY = 1e-2
# Largest relative errors at which a kind fits: in float32, and in half precision.
_TOLERANCE = 1e-3
_NARROW_TOLERANCE = 0.05
# A tensor's error is relative to at least this fraction of the whole gradient.
_FLOOR = 1e-2
_NARROW_FLOOR = 0.1
# And to this fraction of the halves', whose rounding errors stay where they cancel.
_CANCELLED = 1e-2
