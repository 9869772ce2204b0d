"""Decide how the losses of a step's micro-batches are put together.

    check_loss(trial, training, samples)    # sets task.reduction if it is "auto"; refuses a loss that is neither
    classify(measurements, index, limit)    # {"sum": 0.0002}: the kinds that number `index` fits, with their errors

Where a step is cut, its loss must be a sum or a mean over items: `training/trial/evidence.py` shows it by gradients.
`classify` compares the numbers of an evaluation, which has no gradients.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

# Private: torch has no public name for dispatch modes.
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config.schema import Config
from lockstep.data.batches import Batches, MicroBatch
from lockstep.data.loader import blame, generators_kept
from lockstep.data.stream_batches import StreamBatches
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.membership import translate_errors
from lockstep.distributed.world import World
from lockstep.engines.fsdp.forwards import same_units
from lockstep.engines.memory import is_out_of_memory
from lockstep.errors import ConfigError, DataError, LockstepError, SampleError
from lockstep.passes import split_loss
from lockstep.task import Task, has_step_loss, needs_graph, set_detected, user_task
from lockstep.tensors import local_of
from lockstep.training.trial.evidence import (
    HalvedSamples,
    Verdict,
    cut_rows,
    have_same_tensors,
    weigh,
)
from lockstep.training.trial.isolation import training_modes
from lockstep.training.trial.misplaced import explain_device_error
from lockstep.training.trial.trial import Trial
from lockstep.training.trial.trial_state import (
    describe_marks,
    differing_marks,
    marks_of,
    preserve_state,
    refusal_of_marks,
    unsaved_marks,
)
from lockstep.training.trial.weight_moves import move_weights

__all__ = [
    "PLACES",
    "HalvedSamples",
    "Measurement",
    "call_method",
    "check_loss",
    "check_marks",
    "classify",
    "cut_places",
    "describe_measurement",
    "is_cut",
    "load_first",
    "load_places",
    "load_places_together",
    "loss_value",
    "measure",
    "suggest_fixes",
    "try_loss",
]

# Places in the data.
PLACES = 3
# Two in each half, so that sum and mean differ.
_MIN_SAMPLES = 4
# Samples of the places after the first.
_PLACE_SAMPLES = 8

# --- measurements

# Most places in the data to try.
_ROUNDS = 4
# Relative difference between two seeds up to which a number is not random.
_SEED_TOLERANCE = 1e-5

Probe = Callable[[MicroBatch], list[float]]


class Measurement(NamedTuple):
    """A probe's numbers for one rank's samples and their halves.

    Attributes:
        items: of the whole and of each half.
        samples: of each half.
        random_batch: the collation draws random numbers.
        reseeded: the whole's numbers with another seed; [] if not needed.
    """

    whole: list[float]
    first: list[float]
    second: list[float]
    items: list[float]
    samples: list[int]
    random_batch: bool
    reseeded: list[float]

    def noise(self, index: int) -> float:
        """Return how much number `index` changes with the seed; 0 if it is not random."""
        if not self.reseeded:
            return 0.0
        change = abs(self.reseeded[index] - self.whole[index])
        if change > _SEED_TOLERANCE * self.scale(index) or not math.isfinite(change):
            return change
        return 0.0

    def is_random(self, index: int) -> bool:
        """Whether number `index` depends on random numbers."""
        return self.random_batch or self.noise(index) != 0.0

    def values(self, index: int) -> tuple[float, float, float]:
        """Return number `index` of the whole and of both halves."""
        return self.whole[index], self.first[index], self.second[index]

    def scale(self, index: int) -> float:
        """Return the largest magnitude of `values`."""
        return max(map(abs, self.values(index)))

    def mean(self, index: int, weights: list[float] | list[int]) -> float:
        """Return the weighted mean of the halves; NaN if the weights are 0."""
        first_weight, second_weight = weights[-2:]
        total = first_weight + second_weight
        if total:
            return (first_weight * self.first[index] + second_weight * self.second[index]) / total
        return math.nan


def load_first(batches: Batches) -> MicroBatch:
    """Load this rank's first micro-batch."""
    # The steps before it were cut differently.
    step = batches.step_plan.origin.step
    return batches.parts(step, [(0, batches.own_samples(step))])[0][0]


def load_halves(batches: Batches, place: int, *, whole: bool = False, task: Task | None = None) -> HalvedSamples | None:
    """Load some samples of this rank and their halves; None if that is impossible.

    Args:
        place: place in the data: 0 has this rank's first micro-batch, or four samples if it has fewer; 1 and 2 have at
            most eight samples after a third and two thirds of an epoch, or of a stream those that follow.
        whole: all places are as large as the first.
        task: of the batches; a collation that draws random numbers is cut by rows. None: leave it.

    Raises:
        SampleError: a sample cannot be loaded.
    """
    # The steps before it were cut differently.
    step = batches.step_plan.origin.step
    size = min(max(_MIN_SAMPLES, batches.own_samples(step)), batches.size)
    count = size if whole or not place else min(_PLACE_SAMPLES, size)
    if isinstance(batches, StreamBatches):
        stride = size
    else:
        # Spread the places over the data.
        stride = max(size, batches.size // PLACES)
    half = count // 2
    start = place * stride
    if not half:
        return None
    spans = [(start, start + count), (start, start + half), (start + half, start + count)]
    try:
        (batch, is_random), (first_half, _), (second_half, _) = batches.parts(step, spans)
    except SampleError:
        raise
    except Exception:
        # The collation may refuse so few samples.
        return None
    samples = (half, count - half)
    halves = (first_half, second_half)
    problem = ""
    if is_random and task is not None:
        cut = cut_rows(batch, samples, task)
        halves = cut or halves
        if cut:
            problem = ""
        else:
            problem = "`collate` draws random numbers, and its batch has no rows"
    # A second load shows whether the samples are random.
    reload = lambda: batches.parts(step, spans[:1])[0][0]  # noqa: E731
    return HalvedSamples(batch, halves, samples, is_random, reload, problem)


def _load_halves_together(batches: Batches, place: int, world: World) -> HalvedSamples | None:
    """Load samples and their halves as `load_halves`; None if a rank cannot. Collective."""
    samples = on_all_ranks(world, lambda: load_halves(batches, place))  # collective
    # If one rank cannot load them, no rank uses them.
    if all(world.gather(samples is not None)):
        return samples
    return None


def load_places(batches: Batches, count: int, task: Task | None = None) -> list[HalvedSamples]:
    """Load the halved samples of the first places.

    Args:
        count: number of places.
        task: as in `load_halves`.

    Raises:
        SampleError: a sample cannot be loaded.
    """
    places = list[HalvedSamples]()
    with generators_kept():
        while len(places) < count and (samples := load_halves(batches, len(places), task=task)):
            places.append(samples)
    return places


def load_places_together(batches: Batches, task: Task, world: World) -> list[HalvedSamples]:
    """Load as many places as all ranks have. Collective."""
    places = on_all_ranks(world, lambda: load_places(batches, PLACES, task))  # collective
    cut_places(places, world)  # collective
    return places


def cut_places(places: list[HalvedSamples], world: World) -> None:
    """Shorten the list to the places that all ranks have. Collective.

    In `World.together` the list is shortened by the next gather.
    """

    def shorten(counts: list[int]) -> None:
        del places[min(counts) :]

    # All ranks must weigh the same number of places.
    world.defer(len(places), shorten)


def measure(
    trial: Trial, probe: Probe, batches: Batches, places: list[HalvedSamples], is_clean: Callable[[Measurement], bool]
) -> Iterator[tuple[list[Measurement], bool]]:
    """Measure at one place in the data after another, until the caller stops. Collective.

    Args:
        places: the samples of the first places.
        is_clean: whether a measurement needs no other seed. If it does, the whole is loaded and computed again.

    Yields:
        The measurements of all ranks and places so far, the same on every rank; and whether the probe needs a graph.
    """

    def compute(batch: MicroBatch, seed: int = 0) -> list[float]:
        # The task's own tensors are restored too.
        with preserve_state(trial.model, trial.task, trial.world.device):
            trial.seed(seed)
            return probe(batch)

    measurements = list[Measurement]()
    needs_graph = False
    for place in range(_ROUNDS):
        samples = (
            places[place] if place < len(places) else _load_halves_together(batches, place, trial.world)
        )  # collective
        if samples is None:
            break
        # The default argument binds this round's samples; mypy cannot infer its type.
        # Collective.
        result = trial.attempt(lambda samples=samples: [*_measurement(samples, compute)])  # type: ignore[misc]
        if result is None:
            break
        rows, needs_graph = result
        gathered = [Measurement(*row) for row in rows]
        if not all(map(is_clean, gathered)):
            # Collective. The dataset may draw random numbers too.
            second = _load_halves_together(batches, place, trial.world) or samples
            tensors = []
            for item in (samples, second):
                tensors.append([piece.held for piece in (item.whole, *item.halves)])
            random_batch = samples.is_random or not have_same_tensors(*tensors)
            # The default arguments bind this round's values, as above.
            again = trial.attempt(lambda second=second, drew=random_batch: [compute(second.whole, 1), drew])  # type: ignore[misc]
            if again is None:
                break
            gathered = [
                item._replace(reseeded=reseeded, random_batch=random_batch)
                for item, (reseeded, random_batch) in zip(gathered, again[0], strict=True)
            ]
        measurements += gathered
        yield measurements, needs_graph
    if not measurements:
        yield measurements, needs_graph


def _measurement(samples: HalvedSamples, compute: Callable[[MicroBatch], list[float]]) -> Measurement:
    parts = (samples.whole, *samples.halves)
    whole, first_half, second_half = map(compute, parts)
    items = [float(batch.items) for batch in parts]
    return Measurement(whole, first_half, second_half, items, list(samples.samples), samples.is_random, [])


def call_method(
    method: str, action: Callable[[Any], Any], data: Any, model: nn.Module | None = None, task: Task | None = None
) -> Any:
    """Call a method of the task, and turn its errors into a one-line DataError.

    LockstepErrors and out-of-memory errors pass unchanged.
    """
    try:
        with translate_errors():
            return action(data)
    except LockstepError:
        raise
    except Exception as error:
        # The caller reports what holds the memory.
        if is_out_of_memory(error):
            raise
        problem = blame(method, error, "the first micro-batch, before step 1")
        if model is not None and task is not None:
            reason = explain_device_error(error, model, task, data)
        else:
            reason = ""
        raise (DataError(f"{problem}; {reason}") if reason else problem) from error


# --- sum or mean

# Relative error that rounding may cause.
_ROUNDING = 1e-5
# A mean over samples, while `count` counts other items.
_SAMPLES = "samples"


def try_loss(trial: Trial, batch: MicroBatch) -> tuple[float, list[str]]:
    """Compute the loss of a batch as step 1 does.

    Returns:
        The loss, and the names of the numbers that the task returns with it.

    Raises:
        ConfigError: the loss is no number with a graph; or it has a collective, under `--exact` or `verify`.
        DataError: `loss` fails.
    """
    task = trial.task
    model = trial.model
    # With --exact, or a training that is compared between world sizes, the loss must not depend on the ranks.
    must_agree = (trial.config.exact or task.is_compared) and trial.world.size > 1
    if must_agree and not task.gathers and task.own_steps is None:
        # The loss may gather in training mode only.
        with preserve_state(model, task, trial.world.device, training=True):
            for module in model.modules():
                module.training = trial.training_modes.get(module, module.training)
            trial.seed()
            with trial.with_graph(), _refuse_collectives(trial):
                call_method("loss", lambda data: task.loss(model, data), batch.data, model, task)
    trial.seed()
    with trial.with_graph(), same_units(model, trial.world):  # collective under fsdp
        loss = call_method("loss", lambda data: task.loss(model, data), batch.data, model, task)
        number, numbers = split_loss(loss)
        # Waits for the device, once before step 1.
        return float(number.detach()), list(numbers)


def loss_value(value: Any) -> float:
    """Return a loss as a float, without the numbers that come with it."""
    with torch.no_grad():
        # Waits for the device.
        return float(split_loss(value)[0].detach())


def is_cut(config: Config, training: Batches) -> bool:
    """Whether a step has several micro-batches, or may have in this run."""
    return training.step_plan.micro_batches > 1 or config.on_oom == "smaller"


def check_loss(trial: Trial, training: Batches, samples: list[HalvedSamples], recorded: str = "") -> None:
    """Decide the reduction of the task's loss, or check the declared or recorded one. Collective.

    Only where a step is cut; else the loss is used as it is.

    Args:
        samples: of the first places, as `load_places` returns them.
        recorded: the reduction with which a resumed run has trained so far; "": a new run.

    Raises:
        ConfigError: the loss is neither a sum nor a mean, or not as declared or recorded, or that is unknown; or a
            `count` does not add up.
    """
    task = trial.task
    if not is_cut(trial.config, training):
        if task.reduction == "auto":
            set_detected(task, "whole", needs_graph(task))
        return
    if task.reduction == "micro-batch":
        # For a framework's task the line about the step reports it.
        if not task.framework:
            trial.say(
                "reduction = 'micro-batch': the loss is computed for each micro-batch of "
                f"{training.step_plan.micro_size} alone, and averaged by items; it is not checked, and another "
                "--micro-batch-size is another training"
            )
        return
    samples = samples or load_places_together(training, task, trial.world)  # collective
    is_known = task.reduction in _NAMES or recorded in _NAMES
    # Each rank can check a known reduction alone, which saves an exchange.
    subject = trial.alone() if is_known and not trial.is_sharded else trial
    verdict = weigh(subject, samples)  # collective
    # The loss may need more samples than the smaller places have.
    if verdict.kind in _REDUCTIONS and verdict.failed:
        more = on_all_ranks(subject.world, lambda: _load_larger(training, task))  # collective
        cut_places(more, subject.world)  # collective
        second = weigh(subject, more, seed=1) if more else verdict  # collective
        verdict = verdict if second.kind == "unknown" else second

    def conclude() -> None:
        # The place may be larger than a micro-batch, which may still fit.
        if verdict.kind == "unknown" and not is_known and training.step_plan.micro_size >= _MIN_SAMPLES:
            subject.raise_memory_error()
        if is_known:
            _check_known(trial, verdict, recorded)
        else:
            _set_reduction(trial, verdict, recorded)
        _check_count(samples)

    on_all_ranks(trial.world, conclude)  # collective


def check_marks(trial: Trial, training: Batches, batch: MicroBatch) -> list[str]:
    """Report what a loss leaves behind, and refuse what depends on ranks. Collective.

    Buffers are never refused here: those of rank 0 hold on all ranks, and --exact looks at them in the first steps.

    Args:
        batch: this rank's first micro-batch.

    Returns:
        The names of what no checkpoint has. [] for tasks of lockstep's own and of other libraries.

    Raises:
        ConfigError: under --exact, or on several ranks where it differs between them.
    """
    task = trial.task
    world = trial.world
    depends_on_cut = is_cut(trial.config, training) and task.reduction != "micro-batch" and not has_step_loss(task)
    is_users = not task.framework and not type(user_task(task)).__module__.startswith("lockstep.")
    if task.own_steps is not None or not (depends_on_cut or is_users):
        return []
    sharded = trial.is_sharded
    model = trial.model if sharded else trial.plain
    parameters = []
    for p in model.parameters():
        if p.requires_grad:
            parameters.append(local_of(p))

    def call() -> None:
        trial.seed()
        with trial.with_graph() if sharded else torch.enable_grad():
            task.loss(model, batch.data)

    marks = dict[str, str]()
    unsaved = list[str]()
    # If the loss fails in its real call too, that call reports it.
    with trial.preserve(), training_modes(trial.model, trial.training_modes), contextlib.suppress(Exception):
        marks = marks_of(model, task, call, lambda: move_weights(parameters, 0))
        unsaved = unsaved_marks(marks, trial.plain, task) if is_users else []
    if not depends_on_cut:
        return unsaved
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}
    outside_buffers = {}
    for name, digest in marks.items():
        if name not in buffers:
            outside_buffers[name] = digest
    slots = max(training.sharing.at(training.step_plan.origin.step).slots)

    def conclude(ranks: list[Any]) -> None:
        marks_by_rank, outside_by_rank = zip(*ranks, strict=True)
        names = set(chain.from_iterable(marks_by_rank))
        owned = set(chain.from_iterable(outside_by_rank))
        differing = differing_marks(outside_by_rank)
        if owned and trial.config.exact:
            raise refusal_of_marks(owned, exact=True)
        if differing:
            raise refusal_of_marks(differing, exact=False)
        if names:
            trial.say(describe_marks(names, slots, world.size))

    # Collective, with the next gather: what the loss leaves behind must agree between the ranks.
    world.defer([sorted(marks), outside_buffers], conclude)
    return unsaved


def _load_larger(training: Batches, task: Task) -> list[HalvedSamples]:
    """Load places after the first that are as large as it."""
    with generators_kept():
        loaded = []
        for index in range(1, PLACES):
            loaded.append(load_halves(training, index, whole=True, task=task))
    return [halved for halved in loaded if halved is not None]


# What the gradients show -> the reduction of an undeclared loss.
_REDUCTIONS = {"mean": "mean", "sum": "total"}
_NAMES = {"mean": "a mean", "sum": "a sum", "total": "a sum"}


def _set_reduction(trial: Trial, verdict: Verdict, recorded: str) -> None:
    """Set the reduction of an undeclared loss. Raises ConfigError unless it is shown."""
    task = trial.task
    if recorded == "whole" and verdict.kind not in _REDUCTIONS:
        raise ConfigError(
            "the run so far computed each step in one forward, so its loss was never proved, and now a step is cut: "
            f"the task's `loss` is {verdict.kind} ({verdict.evidence}); resume on one rank, or start a new run with "
            "`outputs` and `step_loss`"
        )
    _check_usable(verdict)
    if verdict.kind == "not finite":
        raise ConfigError(
            f"the task's `loss` is not finite on the first samples, before step 1 ({verdict.evidence}): correct the "
            "loss, or these samples"
        )
    if verdict.kind == "unknown":
        raise ConfigError(
            f"the trial cannot tell whether the task's `loss` is a sum or a mean over its items ({verdict.evidence}), "
            "and a step has several micro-batches: declare reduction = 'sum' or 'mean' in the task"
        )
    set_detected(task, _REDUCTIONS[verdict.kind], needs_graph(task))
    trial.say(f"the loss is {_NAMES[verdict.kind]} over its items, as its gradients show in the trial")


def _check_known(trial: Trial, verdict: Verdict, recorded: str) -> None:
    """Raise ConfigError if the loss differs from the declared or the recorded one."""
    task = trial.task
    _check_usable(verdict)
    if recorded in _NAMES and task.reduction not in _NAMES:
        set_detected(task, recorded, needs_graph(task))
    # Unknown, or not finite yet: the guards handle that.
    if verdict.kind not in _NAMES:
        return
    shown = _NAMES[verdict.kind]
    if _NAMES.get(recorded, shown) != shown:
        raise ConfigError(
            f"the run has trained with {_NAMES[recorded]} over items so far, and the task's `loss` is {shown} now: "
            f"{verdict.evidence}; return {_NAMES[recorded]} again, or start a new run"
        )
    declared = _NAMES[task.reduction]
    if declared != shown:
        if verdict.kind == "sum":
            way = "leave reduction out"
        else:
            way = "set reduction = 'mean', or leave it out"
        raise ConfigError(
            f"the task has reduction = '{task.reduction}', but its `loss` is {shown}: {verdict.evidence}; return "
            f"{declared} over the items that `count` counts, or {way}"
        )


def _check_usable(verdict: Verdict) -> None:
    """Raise ConfigError for a loss that is neither a sum nor a mean."""
    if verdict.by_samples:
        raise ConfigError(
            "the task's `loss` is a mean over its samples, and `count` counts other items: "
            f"{verdict.evidence}; leave `count` out, or return the mean, or the sum, over the items that it counts"
        )
    if verdict.kind == "neither":
        raise ConfigError(
            suggest_fixes(f"the task's `loss` is neither a sum nor a mean over its items: {verdict.evidence}")
        )


def _check_count(samples: list[HalvedSamples]) -> None:
    for halved in samples:
        total = halved.whole.items
        one, other = (half.items for half in halved.halves)
        if not halved.is_random and abs(total - one - other) > 1e-5 * abs(total):
            raise ConfigError(
                f"the task's `count` finds {total:g} items in {sum(halved.samples)} samples and {one:g} and {other:g} "
                "in their two halves: it must count what the loss sums over (labels, not padding)"
            )


def suggest_fixes(problem: str) -> str:
    """Append the fixes for a number that depends on a step's division."""
    return (
        f"{problem}: give the task a `count` under which it is a mean (labelled tokens, weights), write a loss over "
        "all samples as `outputs` and `step_loss`, and one over the weights alone as `penalty`; or train on one device "
        "without --micro-batch-size, or set reduction = 'micro-batch'"
    )


# --- numbers of an evaluation


def classify(measurements: list[Measurement], index: int, limit: float) -> dict[str, float] | None:
    """Return the kinds of reduction that number `index` fits, with their largest relative errors.

    Args:
        limit: largest accepted relative error.

    Returns:
        Some of "sum", "mean" (over items) and "samples" (a mean over samples), or none of them; None if no measurement
        can decide, or the number is random.
    """
    if any(measurement.is_random(index) for measurement in measurements):
        return None
    errors = []
    for measurement in measurements:
        if (kinds := _relative_errors(measurement, index)) is not None:
            errors.append(kinds)
    if not errors:
        return None
    worst = {}
    for name in errors[0]:
        worst[name] = max(measurement[name] for measurement in errors)
    # Similar numbers of items make the two means close, but only one is exact.
    if worst[_SAMPLES] < _ROUNDING < worst["mean"]:
        worst["mean"] = math.inf
    small = {}
    for name, value in worst.items():
        if value <= limit:
            small[name] = value
    return small


def describe_measurement(measurements: list[Measurement], index: int) -> str:
    """Describe for a message the first measurement that decides number `index`."""
    usable = (measurement for measurement in measurements if _relative_errors(measurement, index) is not None)
    measurement = next(usable, None) or next(iter(measurements), None)
    if measurement is None:
        return "the first samples cannot be halved"
    whole, one, other = measurement.values(index)
    return f"{sum(measurement.samples)} samples give {whole:.4g}, and their two halves {one:.4g} and {other:.4g}"


def _relative_errors(each: Measurement, index: int) -> dict[str, float] | None:
    """Return the relative error for each kind; None for numbers without information."""
    value, first_half, second_half = each.values(index)
    scale = each.scale(index)
    if not scale or not all(map(math.isfinite, each.values(index))):
        return None
    kinds = {
        "sum": first_half + second_half,
        "mean": each.mean(index, each.items),
        _SAMPLES: each.mean(index, each.samples),
    }
    errors = {}
    for name, other in kinds.items():
        errors[name] = abs(value - other) / scale if math.isfinite(other) else math.inf
    return errors


# --- collectives in a loss


# The base class has no annotations.
class _CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of collectives that are issued outside the model's modules."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        # Its constructor has none either.
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.depth and getattr(func, "namespace", "").lstrip("_").startswith("c10d"):
            self.names.append(func.__name__.partition(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


@contextmanager
def _refuse_collectives(trial: Trial) -> Iterator[None]:
    """Raise ConfigError at the end if a collective was issued outside the model's forward."""
    model = trial.model
    mode = _CollectiveRecorder()

    def enter(*_: Any) -> None:
        mode.depth += 1

    def leave(*_: Any) -> None:
        mode.depth -= 1

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, prepend=True))
    for module in model.modules():
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    if mode.names:
        if trial.config.exact:
            start = "--exact does not go with"
        else:
            start = "another number of ranks is another training with"
        raise ConfigError(
            f"{start} a collective inside the task's `loss` ({mode.names[0]}), whose result depends on the ranks: "
            "write `outputs` and `step_loss`, which get all samples of a step"
        )
