"""Detect whether a task's loss is a sum or a mean over its items.

    check_loss(trial, training, samples)    # sets task.reduction if it is "auto"; refuses a loss that is neither
    classify(measurements, index, limit)    # {"sum": 0.0002}: the kinds that number `index` fits, with their errors

The loss of a few samples is compared with the losses of their halves: sum and mean differ by a factor, so four samples
are enough. A loss that draws random numbers is classified by that factor alone. If a step has one micro-batch, the
answer does not matter.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config.schema import Config
from lockstep.data.batches import Batches, MicroBatch
from lockstep.data.loader import blamed, generators_kept
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import Engine, at_rest
from lockstep.engines.memory import is_out_of_memory
from lockstep.engines.registry import undo_step
from lockstep.errors import ConfigError, DataError, LockstepError, SampleError
from lockstep.loop import seeder
from lockstep.passes import split_loss
from lockstep.task import Task, has_mean_loss, has_own, needs_graph, set_detected
from lockstep.training.defaults import explain_device_error
from lockstep.transforms.precision import AUTOCAST, eager, without_autocast

__all__ = [
    "MIN_PLACES",
    "HalvedSamples",
    "Measurement",
    "Trial",
    "call_method",
    "check_loss",
    "classify",
    "cut_places",
    "describe_measurement",
    "load_first",
    "load_places",
    "loss_value",
    "measure",
    "preserve_state",
    "suggest_fixes",
    "try_loss",
]


# --- measurements

_MIN_SAMPLES = 4  # two in each half, so that sum and mean differ
_ROUNDS, _RANDOM_ROUNDS = 4, 16  # most places in the data to try; the same for random losses
_SEED_TOLERANCE = 1e-5  # relative difference between two seeds up to which a loss is not random

Probe = Callable[[MicroBatch], list[float]]


@dataclass(frozen=True, slots=True)
class HalvedSamples:
    """Some samples of this rank, and their two halves.

    Attributes:
        samples: number in each half.
        is_random: the collation draws random numbers, so the halves may have other labels than the whole.
    """

    whole: MicroBatch
    halves: tuple[MicroBatch, MicroBatch]
    samples: tuple[int, int]
    is_random: bool


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
        return change if change > _SEED_TOLERANCE * self.scale(index) or not math.isfinite(change) else 0.0

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
        first, second = weights[-2:]
        total = first + second
        return (first * self.first[index] + second * self.second[index]) / total if total else math.nan


@final
class Trial:
    """A task and its engine, to try the task's methods without side effects.

    Args:
        plain: the model before the engine wraps it, with the user's layer names.
        say: called with a line for the user, on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        plain: nn.Module,
        task: Task,
        world: World,
        config: Config,
        say: Callable[[str], None],
    ) -> None:
        self.engine, self.plain, self.task, self.world = engine, plain, task, world
        self.config, self.say = config, say
        self.training_modes = {module: module.training for module in engine.model.modules()}
        self._reseed = seeder(0, "check", world.device)
        narrow = any(p.is_floating_point() and p.itemsize < 4 for p in engine.model.parameters())
        self.is_low_precision = narrow or config.engine_options.param_dtype not in ("same", "float32")
        # Manual optimization computes gradients by itself; a static graph must be recorded in a real step.
        self._has_graph = task.own_steps is None and not config.engine_options.static_graph

    @property
    def model(self) -> nn.Module:
        """The engine's model; its forward may have collectives."""
        return self.engine.model

    @property
    def limit(self) -> float:
        """Relative difference up to which two numbers count as equal."""
        return 0.05 if self.is_low_precision else 0.01

    @property
    def warning_limit(self) -> float:
        """Relative difference up to which there is no warning."""
        return self.limit if self.is_low_precision else 0.001

    def sandbox(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that runs eagerly, and undoes side effects at its end."""
        stack = contextlib.ExitStack()
        stack.enter_context(preserve_state(self.model, self.task, self.world.device))
        stack.enter_context(eager())
        return stack

    @contextlib.contextmanager
    def with_graph(self) -> Iterator[None]:
        """Return a context for a forward as in step 1, without a backward."""
        if not self._has_graph:
            with torch.no_grad():
                yield
            return
        try:
            with torch.enable_grad(), self.engine.accumulate(False, False):
                yield
        finally:
            undo_step(self.engine)
            at_rest(self.model)

    def seed(self, number: int = 0) -> None:
        """Seed the random numbers of a loss; another `number` is another seed."""
        self._reseed(number, 0)

    def load_halves(self, batches: Batches, place: int) -> HalvedSamples | None:
        """Load at least four samples and their halves; None if a rank cannot. Collective.

        Args:
            place: place in the data: 0, 1, ...
        """
        samples = on_all_ranks(self.world, lambda: load_halves(batches, place))  # collective
        return samples if all(self.world.gather(samples is not None)) else None  # collective

    def attempt(self, action: Callable[[], list[Any]]) -> tuple[list[list[Any]], bool] | None:
        """Run `action` on every rank; None if it fails on one. Collective.

        It runs in the parameters' dtype, unless the model relies on autocast.

        Args:
            action: returns a JSON value.

        Returns:
            The results by rank, and whether it needs a graph.
        """
        for narrow in (False, True) if self.config.precision in AUTOCAST else (False,):
            for gradients in (False, True):
                result = None
                dtypes = contextlib.nullcontext() if narrow else without_autocast()
                with contextlib.suppress(Exception), torch.set_grad_enabled(gradients), dtypes:
                    result = action()
                results: list[Any] = self.world.gather(result)  # collective
                if all(each is not None for each in results):
                    self.is_low_precision = self.is_low_precision or narrow
                    return results, gradients
        return None


def load_first(batches: Batches) -> MicroBatch:
    """Load this rank's first micro-batch."""
    return batches.parts(0, [(0, batches.own_samples(0))])[0][0]


def load_halves(batches: Batches, place: int) -> HalvedSamples | None:
    """Load at least four samples of this rank and their halves; None if that is impossible.

    Args:
        place: place in the data: 0, 1, ...

    Raises:
        SampleError: a sample cannot be loaded.
    """
    count = min(max(_MIN_SAMPLES, batches.own_samples(0)), batches.size)
    half, start = count // 2, place * count
    if not half:
        return None
    spans = [(start, start + count), (start, start + half), (start + half, start + count)]
    try:
        (batch, is_random), (first, _), (second, _) = batches.parts(0, spans)
    except SampleError:
        raise
    except Exception:  # the collation may refuse so few samples
        return None
    return HalvedSamples(batch, (first, second), (half, count - half), is_random)


def load_places(batches: Batches, count: int) -> list[HalvedSamples]:
    """Load the halved samples of the first places.

    Args:
        count: number of places.

    Raises:
        SampleError: a sample cannot be loaded.
    """
    places = list[HalvedSamples]()
    with generators_kept():
        while len(places) < count and (samples := load_halves(batches, len(places))):
            places.append(samples)
    return places


def cut_places(places: list[HalvedSamples], world: World) -> None:
    """Cut the list to as many places as all ranks have; in `World.together` after the next gather. Collective."""

    def shorten(counts: list[int]) -> None:
        del places[min(counts) :]

    world.defer(len(places), shorten)  # collective


def measure(
    trial: Trial, probe: Probe, batches: Batches, places: list[HalvedSamples], is_clean: Callable[[Measurement], bool]
) -> Iterator[tuple[list[Measurement], bool]]:
    """Measure at one place in the data after another, until the caller stops. Collective.

    Args:
        places: the samples of the first places, which are measured together.
        is_clean: whether a measurement needs no other seed. If it does, the whole is loaded and computed again.

    Yields:
        The measurements of all ranks and places so far, the same on every rank; and whether the probe needs a graph.
    """

    def compute(batch: MicroBatch, seed: int = 0) -> list[float]:
        with preserve_state(trial.model, trial.task, trial.world.device):  # the task's own tensors are restored too
            trial.seed(seed)
            return probe(batch)

    def compute_all(places: list[HalvedSamples]) -> list[Measurement]:
        return [_measurement(samples, compute) for samples in places]

    ahead = trial.attempt(lambda: compute_all(places)) if len(places) > 1 else None  # collective
    measurements, needs_graph = list[Measurement](), False
    for place in range(_RANDOM_ROUNDS):
        if place == _ROUNDS and not any(each.is_random(0) for each in measurements):
            break
        samples = places[place] if place < len(places) else trial.load_halves(batches, place)  # collective
        if samples is None:
            break
        if ahead and place < len(places):
            rows, needs_graph = [own[place] for own in ahead[0]], ahead[1]
        else:
            result = trial.attempt(lambda samples=samples: compute_all([samples]))  # type: ignore[misc]  # collective
            if result is None:
                break
            rows, needs_graph = [own[0] for own in result[0]], result[1]
        gathered = [Measurement(*row) for row in rows]
        if not all(map(is_clean, gathered)):
            second = trial.load_halves(batches, place) or samples  # collective; a dataset may be random too
            tensors = [[part.held for part in (each.whole, *each.halves)] for each in (samples, second)]
            random_batch = samples.is_random or not _have_same_tensors(*tensors)
            again = trial.attempt(lambda second=second, drew=random_batch: [compute(second.whole, 1), drew])  # type: ignore[misc]
            if again is None:
                break
            gathered = [
                each._replace(reseeded=reseeded, random_batch=random_batch)
                for each, (reseeded, random_batch) in zip(gathered, again[0], strict=True)
            ]
        measurements += gathered
        yield measurements, needs_graph
    if not measurements:
        yield measurements, needs_graph


def _measurement(samples: HalvedSamples, compute: Callable[[MicroBatch], list[float]]) -> Measurement:
    parts = (samples.whole, *samples.halves)
    whole, first, second = map(compute, parts)
    items = [float(batch.items) for batch in parts]
    return Measurement(whole, first, second, items, list(samples.samples), samples.is_random, [])


def _have_same_tensors(first: Any, second: Any) -> bool:
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
    return all(a.equal(b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


def call_method(
    method: str, action: Callable[[Any], Any], data: Any, model: nn.Module | None = None, task: Task | None = None
) -> Any:
    """Call a method of the task, and turn its errors into a one-line DataError.

    LockstepErrors and out-of-memory errors pass unchanged.
    """
    try:
        return action(data)
    except LockstepError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # the caller reports what holds the memory
            raise
        problem = blamed(method, error, "the first micro-batch, before step 1")
        reason = explain_device_error(error, model, task, data) if model is not None and task is not None else ""
        raise (DataError(f"{problem}; {reason}") if reason else problem) from error


@contextlib.contextmanager
def preserve_state(model: nn.Module, task: Task, device: torch.device, *, training: bool = False) -> Iterator[None]:
    """Restore modes, buffers, the task's tensors and the generators at the end.

    Args:
        training: leave the modes as they are; False: run in eval mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers_of = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    own: Iterable[Tensor] = task.state_dict().values()
    values = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *own) if not tensor.is_meta]
    cuda_generator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    if not training:
        model.eval()
    try:
        with generators_kept():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        at_rest(model)
        with torch.no_grad():
            for module, buffers in buffers_of:  # a forward may replace a buffer by another tensor
                module._buffers.update(buffers)
            for tensor, before in values:
                if tensor.shape != before.shape:
                    tensor.resize_(before.shape)
                tensor.copy_(before)
        if cuda_generator is not None:
            torch.cuda.set_rng_state(cuda_generator, device)


# --- sum or mean

_ROUNDING = 1e-5  # relative error that rounding may cause
_MIN_VOTES = 8  # runs of a random loss
MIN_PLACES = 3  # places in the data
_SAMPLES = "samples"  # a mean over samples, while `count` counts other items


def try_loss(trial: Trial, batch: MicroBatch) -> tuple[float, list[str]]:
    """Compute the loss of a batch as step 1 does.

    Returns:
        The loss, and the names of the numbers that the task returns with it.

    Raises:
        ConfigError: the loss is no number with a graph; or it has a collective, under `--exact` or `verify`.
        DataError: `loss` fails.
    """
    task, model = trial.task, trial.model
    must_agree = (trial.config.exact or task.is_compared) and trial.world.size > 1
    if must_agree and not task.gathers and task.own_steps is None:
        with preserve_state(model, task, trial.world.device, training=True):  # it may gather in training mode only
            for module in model.modules():
                module.training = trial.training_modes.get(module, module.training)
            trial.seed()
            with trial.with_graph(), _refuse_collectives(trial):
                call_method("loss", lambda data: task.loss(model, data), batch.data, model, task)
    trial.seed()
    with trial.with_graph():
        loss = call_method("loss", lambda data: task.loss(model, data), batch.data, model, task)
        number, numbers = split_loss(loss)
        return float(number.detach()), list(numbers)  # waits for the device


def loss_value(value: Any) -> float:
    """Return a loss as a float, without the numbers that come with it."""
    with torch.no_grad():
        return float(split_loss(value)[0].detach())  # waits for the device


def check_loss(trial: Trial, training: Batches, samples: list[HalvedSamples]) -> None:
    """Detect the reduction of the task's loss, or check the declared one. Collective.

    Args:
        samples: of the first places, as `load_places` returns them.

    Raises:
        ConfigError: the loss is neither a sum nor a mean, or not as declared, or cannot be classified; or a `count`
            does not add up.
    """
    task, measurements, places = trial.task, list[Measurement](), 0
    if task.reduction == "micro-batch":
        if not task.framework:  # otherwise the line about the step reports it
            trial.say(
                "reduction = 'micro-batch': the loss is computed for each micro-batch of "
                f"{training.step_plan.micro_size} alone, and averaged by items; it is not checked, and another "
                "--micro-batch-size is another training"
            )
        return
    if task.divisible:
        probe = _probe(trial)
        for measurements, needs_graph in measure(trial, probe, training, samples, lambda m: _is_clean(trial, m)):
            if needs_graph:
                set_detected(task, "", gradients=True)
            places += 1  # more than one, since a forward may branch on the batch's contents
            if places < MIN_PLACES:
                continue
            kinds = classify(measurements, 0, trial.limit)
            if _is_decided(kinds) and min(kinds.values(), default=1.0) < _ROUNDING:
                break
    is_whole = training.step_plan.micro_batches == 1 and trial.config.on_oom == "stop"
    kinds, evidence = classify(measurements, 0, trial.limit), describe_measurement(measurements, 0)
    if task.reduction == "auto":
        is_finite = all(math.isfinite(value) for each in measurements for value in each.values(0))
        if kinds is None and not is_finite and not is_whole:
            raise ConfigError(
                f"the task's `loss` is not finite on the first samples, before step 1: {evidence}; correct the loss, "
                "or these samples"
            )
        _set_reduction(trial, kinds, evidence, is_whole, alone=training.size == 1 and not has_own(task, "count"))
    else:
        _check_declaration(task, kinds, evidence, is_whole)
    if not is_whole and task.reduction in (kinds or {}):
        _check_count(measurements)
        _warn_if_off(trial, (kinds or {})[task.reduction], evidence)


def classify(measurements: list[Measurement], index: int, limit: float) -> dict[str, float] | None:
    """Return the kinds of reduction that number `index` fits, with their largest relative errors.

    Args:
        limit: largest accepted relative error.

    Returns:
        Some of "sum", "mean" (over items) and "samples" (a mean over samples), or none of them; None if no measurement
        can decide.
    """
    if any(each.is_random(index) for each in measurements):
        return _classify_random(measurements, index)
    errors = [kinds for each in measurements if (kinds := _relative_errors(each, index)) is not None]
    if not errors:
        return None
    worst = {kind: max(each[kind] for each in errors) for kind in errors[0]}
    if worst[_SAMPLES] < _ROUNDING < worst["mean"]:  # similar items make the two means close; only one is exact
        worst["mean"] = math.inf
    return {kind: value for kind, value in worst.items() if value <= limit}


def _classify_random(measurements: list[Measurement], index: int) -> dict[str, float] | None:
    """Classify a random number by the factor between a sum and a mean alone."""
    usable = [each for each in measurements if _relative_errors(each, index) is not None]
    value = sum((each.whole[index] + (each.reseeded or each.whole)[index]) / 2 for each in usable)
    total = sum(each.first[index] + each.second[index] for each in usable)
    mean = sum(each.mean(index, each.samples) for each in usable)
    gap, noise = abs(total - mean), math.hypot(*(each.noise(index) for each in usable))
    if noise > gap / 2:
        return _classify_by_majority(usable, index)
    if abs(value - total) < gap / 4:
        return {"sum": 0.0}
    return {"mean": 0.0, _SAMPLES: 0.0} if abs(value - mean) < gap / 4 else None


def _classify_by_majority(measurements: list[Measurement], index: int) -> dict[str, float] | None:
    """Classify a random number by majority, since a few large values would dominate a mean."""
    votes = list[str]()
    for each in measurements:
        total, mean = each.first[index] + each.second[index], each.mean(index, each.samples)
        for value in (each.whole[index], (each.reseeded or each.whole)[index]):
            position = (value - mean) / (total - mean) if total != mean else math.nan  # 1: as a sum; 0: as a mean
            votes.append("sum" if position > 0.4 else _SAMPLES if position > -0.6 else "")
    winner = max(set(votes), key=votes.count, default="")
    if not winner or len(votes) < _MIN_VOTES or votes.count(winner) < 0.75 * len(votes):
        return None
    return {"sum": 0.0} if winner == "sum" else {"mean": 0.0, _SAMPLES: 0.0}


def describe_measurement(measurements: list[Measurement], index: int) -> str:
    """Describe for a message the first measurement that decides number `index`."""
    usable = (each for each in measurements if _relative_errors(each, index) is not None)
    each = next(usable, None) or next(iter(measurements), None)
    if each is None:
        return "the first samples cannot be halved"
    whole, first, second = each.values(index)
    return f"{sum(each.samples)} samples give {whole:.4g}, and their two halves {first:.4g} and {second:.4g}"


def suggest_fixes(problem: str) -> str:
    """Append the fixes for a number that depends on a step's division."""
    return (
        f"{problem}: give the task a `count` under which it is a mean (labelled tokens, weights), write a loss over "
        "all samples as `outputs` and `step_loss`, and one over the weights alone as `penalty`; or set "
        "micro_batch_size = batch_size, or reduction = 'micro-batch'"
    )


def _relative_errors(each: Measurement, index: int) -> dict[str, float] | None:
    """Return the relative error for each kind; None for numbers without information."""
    value, first, second = each.values(index)
    scale = each.scale(index)
    if not scale or not all(map(math.isfinite, each.values(index))):
        return None
    kinds = {"sum": first + second, "mean": each.mean(index, each.items), _SAMPLES: each.mean(index, each.samples)}
    return {kind: abs(value - other) / scale if math.isfinite(other) else math.inf for kind, other in kinds.items()}


def _is_decided(kinds: dict[str, float] | None) -> TypeGuard[dict[str, float]]:
    return kinds is not None and not {"sum", "mean"} <= kinds.keys() and not {"sum", _SAMPLES} <= kinds.keys()


def _is_clean(trial: Trial, each: Measurement) -> bool:
    errors = _relative_errors(each, 0)
    return errors is None or min(errors["sum"], errors["mean"]) <= trial.warning_limit


def _probe(trial: Trial) -> Callable[[MicroBatch], list[float]]:
    return lambda batch: [loss_value(trial.task.loss(trial.model, batch.data))]


def _set_reduction(trial: Trial, kinds: dict[str, float] | None, evidence: str, is_whole: bool, alone: bool) -> None:
    """Set the reduction of a task that does not declare one.

    Args:
        evidence: the description of a measurement, for messages.
        is_whole: a step has one micro-batch.
        alone: the micro-batches have one sample.
    """
    task = trial.task
    if kinds is not None and "mean" in kinds and "sum" not in kinds:
        reduction, words = "mean", "a mean over its items"
    elif kinds is not None and "sum" in kinds and "mean" not in kinds:
        reduction, words = "sum", "a sum over its items"
    elif is_whole:
        reduction, words = "micro-batch", "used as it is, since a step has one micro-batch"
    elif alone:
        reduction, words = "sum", "that of one sample"
    elif kinds is None or "sum" in kinds:
        raise ConfigError(
            f"the trial cannot tell whether the task's `loss` is a sum or a mean over its items: {evidence}; declare "
            "reduction = 'sum' or 'mean'"
        )
    else:
        raise _neither_error(kinds, evidence)
    set_detected(task, reduction, needs_graph(task))
    trial.say(f"the loss is {words} (found in the trial; `reduction` of the task declares it)")


def _check_declaration(task: Task, kinds: dict[str, float] | None, evidence: str, is_whole: bool) -> None:
    """Raise ConfigError if the loss is not what the task declares."""
    if kinds is None or task.reduction in kinds:
        return
    if task.reduction == "sum" and kinds:
        raise ConfigError(
            f"the task's `loss` looks like a mean: {evidence}; return the sum over the items that `count` counts, or "
            "set reduction = 'mean' in the task, or leave it out"
        )
    if "sum" in kinds:
        raise ConfigError(
            f"the task has reduction = 'mean', but its `loss` looks like a sum: {evidence}; return the mean over the "
            "items that `count` counts, or leave reduction out"
        )
    if not is_whole:
        raise _neither_error(kinds, evidence)


def _neither_error(kinds: dict[str, float], evidence: str) -> ConfigError:
    if _SAMPLES in kinds:
        return ConfigError(
            f"the task's `loss` is a mean over its samples, and `count` counts other items: {evidence}; leave `count` "
            "out, or return the mean, or the sum, over the items that it counts"
        )
    return ConfigError(suggest_fixes(f"the task's `loss` is neither a sum nor a mean over its items: {evidence}"))


def _check_count(measurements: list[Measurement]) -> None:
    for each in measurements:
        total, first, second = each.items
        if not each.random_batch and abs(total - first - second) > 1e-5 * abs(total):
            raise ConfigError(
                f"the task's `count` finds {total:g} items in {sum(each.samples)} samples and {first:g} and {second:g} "
                "in their two halves: it must count what the loss sums over (labels, not padding)"
            )


def _warn_if_off(trial: Trial, error: float, evidence: str) -> None:
    if error > trial.warning_limit:
        trial.say(
            f"warning: the loss differs from the {trial.task.reduction} of its parts by {error:.1%} ({evidence}), like "
            "a router's balance loss, or class weights without their `count`: it is computed for each micro-batch "
            f"alone, and {'averaged' if has_mean_loss(trial.task) else 'added up'}"
        )


# --- collectives in a loss


class _CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of collectives that are issued outside the model's modules."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.depth = list[str](), 0

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

    hooks = [module.register_forward_pre_hook(enter, prepend=True) for module in model.modules()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in model.modules()]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    if mode.names:
        start = "--exact does not go with" if trial.config.exact else "another number of ranks is another training with"
        raise ConfigError(
            f"{start} a collective inside the task's `loss` ({mode.names[0]}), whose result depends on the ranks: "
            "write `outputs` and `step_loss`, which get all samples of a step"
        )
