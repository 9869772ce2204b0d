"""Find out whether a task's loss is a sum or a mean over its items.

    check_loss(trial, training)         # sets task.reduction where it is "auto"; refuses a loss that is neither
    fits(measures, place, limit)        # {"sum": 0.0002} of number `place`: what it is, and how far off

The loss of a few samples is compared with the losses of their halves: sum and mean differ by a factor, so four samples
are enough. A loss that draws random numbers is judged by that factor alone. If a step has one micro-batch, the answer
does not matter.
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
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.loop import seeder
from lockstep.passes import unpacked
from lockstep.task import Task, averages, has_own, set_found, takes_gradients
from lockstep.training.defaults import explained
from lockstep.transforms.precision import AUTOCAST, eager, without_autocast

__all__ = [
    "Measurement",
    "Trial",
    "call_method",
    "check_loss",
    "classify",
    "describe_measurement",
    "loss_value",
    "measure",
    "preserve_state",
    "suggest_fixes",
    "try_loss",
]


# --- measures

_MIN_SAMPLES = 4  # samples: two in each half, so that sum and mean differ
_ROUNDS, _RANDOM_ROUNDS = 4, 16  # places in the data to try, if the first is not enough; for random losses
_SEED_TOLERANCE = 1e-5  # relative difference between two seeds that still counts as no random numbers

Probe = Callable[[MicroBatch], list[float]]


@dataclass(frozen=True, slots=True)
class HalvedSamples:
    """Some samples of this rank, and their two halves.

    Attributes:
        samples: number in each half.
        drew: the collation drew random numbers, so the halves have other labels than the whole.
    """

    whole: MicroBatch
    halves: tuple[MicroBatch, MicroBatch]
    samples: tuple[int, int]
    drew: bool


class Measurement(NamedTuple):
    """A probe's numbers for one rank's samples and their halves.

    Attributes:
        items: of the whole and of each half.
        samples: of each half.
        drew: the collation drew random numbers.
        again: the whole's numbers in another seed; () if not needed.
    """

    whole: list[float]
    first: list[float]
    second: list[float]
    items: list[float]
    samples: list[int]
    drew: bool
    again: list[float]

    def noise(self, place: int) -> float:
        """Return how much number `place` changes from seed to seed; 0 if it draws nothing."""
        if not self.again:
            return 0.0
        off = abs(self.again[place] - self.whole[place])
        return off if off > _SEED_TOLERANCE * self.scale(place) or not math.isfinite(off) else 0.0

    def is_random(self, place: int) -> bool:
        """Whether number `place` depends on random numbers."""
        return self.drew or self.noise(place) != 0.0

    def three(self, place: int) -> tuple[float, float, float]:
        """Return number `place` of the whole and of both halves."""
        return self.whole[place], self.first[place], self.second[place]

    def scale(self, place: int) -> float:
        """Return the largest magnitude of the three."""
        return max(map(abs, self.three(place)))

    def mean(self, place: int, weights: list[float] | list[int]) -> float:
        """Return the halves' weighted mean; NaN if the weights are 0."""
        first, second = weights[-2:]
        total = first + second
        return (first * self.first[place] + second * self.second[place]) / total if total else math.nan


@final
class Trial:
    """A task and its engine, and how to try the task's methods without side effects.

    Args:
        plain: the model before the engine wrapped it, with the layer names that the user knows.
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
        self.modes = {module: module.training for module in engine.model.modules()}  # as in training
        self._reseed = seeder(0, "check", world.device)
        narrow = any(p.is_floating_point() and p.itemsize < 4 for p in engine.model.parameters())
        self.is_rough = narrow or config.engine_options.param_dtype not in ("same", "float32")
        # Manual optimization computes gradients itself; a static graph must be recorded in a real step.
        self._has_graph = task.own_steps is None and not config.engine_options.static_graph

    @property
    def model(self) -> nn.Module:
        """The engine's model; its forward may have collectives."""
        return self.engine.model

    @property
    def limit(self) -> float:
        """Relative difference up to which two numbers count as equal."""
        return 0.05 if self.is_rough else 0.01

    @property
    def doubt(self) -> float:
        """Relative difference up to which no warning is given."""
        return self.limit if self.is_rough else 0.001

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that runs a trial eagerly and undoes its side effects."""
        stack = contextlib.ExitStack()
        stack.enter_context(preserve_state(self.model, self.task, self.world.device))
        stack.enter_context(eager())
        return stack

    def first(self, batches: Batches) -> MicroBatch:
        """Load this rank's first micro-batch."""
        return batches.parts(0, [(0, batches.own_samples(0))])[0][0]

    @contextlib.contextmanager
    def with_graph(self) -> Iterator[None]:
        """Run a forward as in step 1, without a backward after it."""
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
        """Seed the random numbers of a loss."""
        self._reseed(number, 0)

    def cut(self, batches: Batches, place: int) -> HalvedSamples | None:
        """Load at least four samples and their halves; None if a rank cannot. Collective.

        Args:
            place: number of such cuts before it.
        """

        def load() -> HalvedSamples | None:
            count = min(max(_MIN_SAMPLES, batches.own_samples(0)), batches.size)
            half, start = count // 2, place * count
            if not half:
                return None
            cuts = [(start, start + count), (start, start + half), (start + half, start + count)]
            with contextlib.suppress(Exception):  # the collation may refuse so few samples
                (whole, drew), (first, _), (second, _) = batches.parts(0, cuts)
                return HalvedSamples(whole, (first, second), (half, count - half), drew)
            return None

        found = on_all_ranks(self.world, load)  # collective
        return found if all(self.world.gather(found is not None)) else None  # collective

    def attempt(self, action: Callable[[], list[Any]]) -> tuple[list[Any], bool] | None:
        """Run `action` on every rank; None if it fails on one. Collective.

        It runs in the parameters' dtype, unless the model relies on autocast.

        Returns:
            Its result, and whether it needs a graph.
        """
        for narrow in (False, True) if self.config.precision in AUTOCAST else (False,):
            for gradients in (False, True):
                found = None
                plainly = contextlib.nullcontext() if narrow else without_autocast(self.plain)
                with contextlib.suppress(Exception), torch.set_grad_enabled(gradients), plainly:
                    found = action()
                if all(self.world.gather(found is not None)):  # collective
                    assert found is not None
                    self.is_rough = self.is_rough or narrow
                    return found, gradients
        return None


def measure(
    trial: Trial, probe: Probe, batches: Batches, clean: Callable[[Measurement], bool]
) -> Iterator[tuple[list[Measurement], bool]]:
    """Measure at one place in the data after another, until the caller stops. Collective.

    Args:
        clean: whether a measure looks right; otherwise the whole is loaded and computed again in another seed.

    Yields:
        The measures of all ranks and places so far, the same on every rank; and whether the probe needs a graph.
    """
    found, needs_graph = list[Measurement](), False
    for place in range(_RANDOM_ROUNDS):
        if place == _ROUNDS and not any(each.is_random(0) for each in found):
            break
        cut = trial.cut(batches, place)  # collective
        if cut is None:
            break

        def tried(batch: MicroBatch, seed: int = 0) -> list[float]:
            with preserve_state(trial.model, trial.task, trial.world.device):  # the task's own tensors are restored too
                trial.seed(seed)
                return probe(batch)

        parts = (cut.whole, *cut.halves)
        numbers = trial.attempt(lambda parts=parts: [tried(batch) for batch in parts])  # type: ignore[misc]
        if numbers is None:
            break
        values, needs_graph = numbers
        items = [float(batch.items) for batch in parts]
        mine = Measurement(values[0], values[1], values[2], items, list(cut.samples), cut.drew, [])
        every = [Measurement(*each) for each in trial.world.gather(mine)]  # collective
        if not all(map(clean, every)):
            other = trial.cut(batches, place) or cut  # collective; a dataset may draw too
            again = trial.attempt(lambda other=other: [tried(other.whole, 1)])  # type: ignore[misc]
            if again is None:
                break
            held = [[part.held for part in (each.whole, *each.halves)] for each in (cut, other)]
            drew = cut.drew or not _have_same_tensors(*held)
            mine = mine._replace(again=again[0][0], drew=drew)
            every = [Measurement(*each) for each in trial.world.gather(mine)]  # collective
        found += every
        yield found, needs_graph
    if not found:
        yield found, needs_graph


def _have_same_tensors(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return all(a.equal(b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


def call_method(
    method: str, action: Callable[[Any], Any], data: Any, model: nn.Module | None = None, task: Task | None = None
) -> Any:
    """Call a method of the task, and turn its errors into a one-line DataError.

    LockstepError and out-of-memory errors pass unchanged.
    """
    try:
        return action(data)
    except LockstepError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # the caller reports what holds the memory
            raise
        problem = blamed(method, error, "the first micro-batch, before step 1")
        told = explained(error, model, task, data) if model is not None and task is not None else ""
        raise (DataError(f"{problem}; {told}") if told else problem) from error


@contextlib.contextmanager
def preserve_state(model: nn.Module, task: Task, device: torch.device, *, training: bool = False) -> Iterator[None]:
    """Restore modes, buffers, the task's tensors and the generators at the end.

    Args:
        training: leave the modes as they are; False: run in eval mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    owned = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    own: Iterable[Tensor] = task.state_dict().values()
    held = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *own) if not tensor.is_meta]
    drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
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
            for module, buffers in owned:  # a forward may replace a buffer by another tensor
                module._buffers.update(buffers)
            for tensor, before in held:
                if tensor.shape != before.shape:
                    tensor.resize_(before.shape)
                tensor.copy_(before)
        if drawn is not None:
            torch.cuda.set_rng_state(drawn, device)


# --- sum or mean

_ROUNDING = 1e-5  # relative error that rounding may cause
_MIN_VOTES = 8  # minimum number of runs of a random loss
_MIN_PLACES = 3  # places in the data
_SAMPLES = "samples"  # a mean over samples, where `count` counts other items


def try_loss(trial: Trial, batch: MicroBatch) -> tuple[float, list[str]]:
    """Compute the loss of a batch as step 1 does.

    Returns:
        The loss, and the names of the numbers that it returns with it.

    Raises:
        ConfigError: it is no number with a graph; or it has its own collective, under `--exact` or `verify`.
        DataError: `loss` fails.
    """
    task, model = trial.task, trial.model
    must_agree = (trial.config.exact or task.is_compared) and trial.world.size > 1
    if must_agree and not task.gathers and task.own_steps is None:
        with preserve_state(model, task, trial.world.device, training=True):  # it may gather in training mode only
            for module in model.modules():
                module.training = trial.modes.get(module, module.training)
            trial.seed()
            with trial.with_graph(), _refuse_collectives(trial):
                call_method("loss", lambda data: task.loss(model, data), batch.data, model, task)
    trial.seed()
    with trial.with_graph():
        loss = call_method("loss", lambda data: task.loss(model, data), batch.data, model, task)
        number, beside = unpacked(loss)
        return float(number.detach()), list(beside)  # waits for the device


def loss_value(value: Any) -> float:
    """Return a loss as a float, with or without a graph, without its other numbers."""
    with torch.no_grad():
        return float(unpacked(value)[0].detach())  # waits for the device


def check_loss(trial: Trial, training: Batches) -> None:
    """Find or check the reduction of the task's loss. Collective.

    A loss that is neither a sum nor a mean is refused.

    Raises:
        ConfigError: it is not what the task declares, or neither, or cannot be determined; or a `count` does not add
            up.
    """
    task, found, looked = trial.task, list[Measurement](), 0
    if task.reduction == "micro-batch":
        if not task.framework:  # otherwise the line about the step reports it
            trial.say(
                "reduction = 'micro-batch': the loss of each micro-batch of "
                f"{training.step_plan.micro_size} by itself, averaged by its items; it is not checked, and another "
                "--micro-batch-size is another training"
            )
        return
    if task.divisible:
        probe = _probe(trial)
        for found, needs_graph in measure(trial, probe, training, lambda m: _is_clean(trial, m)):
            if needs_graph:
                set_found(task, "", gradients=True)
            looked += 1  # more than one place, since a forward may branch on the batch's contents
            if looked < _MIN_PLACES:
                continue
            if _is_decided(kinds := classify(found, 0, trial.limit)) and min(kinds.values(), default=1.0) < _ROUNDING:
                break
    one = training.step_plan.micro_batches == 1
    kinds, what = classify(found, 0, trial.limit), describe_measurement(found, 0)
    if task.reduction == "auto":
        _set_reduction(trial, kinds, what, one, alone=training.size == 1 and not has_own(task, "count"))
    else:
        _check_declaration(task, kinds, what, one)
    if not one and task.reduction in (kinds or {}):
        _check_count(found)
        _warn_if_off(trial, (kinds or {})[task.reduction], what)


def classify(found: list[Measurement], place: int, limit: float) -> dict[str, float] | None:
    """Return what number `place` may be, each with its largest relative error.

    Args:
        limit: largest relative error that is accepted.

    Returns:
        A dict with "sum" and "mean" (over items), and "samples", a mean over samples; {} for none of these; None if no
        measure can decide.
    """
    if any(each.is_random(place) for each in found):
        return _classify_random(found, place)
    offs = [off for each in found if (off := _relative_errors(each, place)) is not None]
    if not offs:
        return None
    worst = {kind: max(off[kind] for off in offs) for kind in offs[0]}
    if worst[_SAMPLES] < _ROUNDING < worst["mean"]:  # similar items make the two means close; only one is exact
        worst["mean"] = math.inf
    return {kind: value for kind, value in worst.items() if value <= limit}


def _classify_random(found: list[Measurement], place: int) -> dict[str, float] | None:
    """Classify a random number by the factor between a sum and a mean alone."""
    told = [each for each in found if _relative_errors(each, place) is not None]
    whole = sum((each.whole[place] + (each.again or each.whole)[place]) / 2 for each in told)
    total = sum(each.first[place] + each.second[place] for each in told)
    mean = sum(each.mean(place, each.samples) for each in told)
    gap, noise = abs(total - mean), math.hypot(*(each.noise(place) for each in told))
    if noise > gap / 2:
        return _classify_by_majority(told, place)
    if abs(whole - total) < gap / 4:
        return {"sum": 0.0}
    return {"mean": 0.0, _SAMPLES: 0.0} if abs(whole - mean) < gap / 4 else None


def _classify_by_majority(found: list[Measurement], place: int) -> dict[str, float] | None:
    """Classify a random number by majority, if a few large values would drown the others."""
    votes = list[str]()
    for each in found:
        total, mean = each.first[place] + each.second[place], each.mean(place, each.samples)
        for whole in (each.whole[place], (each.again or each.whole)[place]):
            nearness = (whole - mean) / (total - mean) if total != mean else math.nan  # 1: as a sum; 0: as a mean
            votes.append("sum" if nearness > 0.4 else _SAMPLES if nearness > -0.6 else "")
    most = max(set(votes), key=votes.count, default="")
    if not most or len(votes) < _MIN_VOTES or votes.count(most) < 0.75 * len(votes):
        return None
    return {"sum": 0.0} if most == "sum" else {"mean": 0.0, _SAMPLES: 0.0}


def describe_measurement(found: list[Measurement], place: int) -> str:
    """Describe the first measure that decides something, for a message."""
    each = next((each for each in found if _relative_errors(each, place) is not None), None) or next(iter(found), None)
    if each is None:
        return "the first samples cannot be cut in halves"
    whole, first, second = each.three(place)
    return f"{sum(each.samples)} samples give {whole:.4g}, and their two halves {first:.4g} and {second:.4g}"


def suggest_fixes(what: str) -> str:
    """Return the message's advice for a number that depends on how a step is cut."""
    return (
        f"{what}: give the task a `count` under which it is a mean (labelled tokens, weights), write what looks at all "
        "samples as `outputs` and `step_loss`, and what looks at the weights alone as `penalty`; or set "
        "micro_batch_size = batch_size, or reduction = 'micro-batch'"
    )


def _relative_errors(each: Measurement, place: int) -> dict[str, float] | None:
    """Return the number's relative error as a sum and as both means.

    None if it decides nothing.
    """
    whole, first, second = each.three(place)
    scale = each.scale(place)
    if not scale or not all(map(math.isfinite, each.three(place))):
        return None
    wanted = {"sum": first + second, "mean": each.mean(place, each.items), _SAMPLES: each.mean(place, each.samples)}
    return {kind: abs(whole - value) / scale if math.isfinite(value) else math.inf for kind, value in wanted.items()}


def _is_decided(kinds: dict[str, float] | None) -> TypeGuard[dict[str, float]]:
    return kinds is not None and not {"sum", "mean"} <= kinds.keys() and not {"sum", _SAMPLES} <= kinds.keys()


def _is_clean(trial: Trial, each: Measurement) -> bool:
    off = _relative_errors(each, 0)
    return off is None or min(off["sum"], off["mean"]) <= trial.doubt


def _probe(trial: Trial) -> Callable[[MicroBatch], list[float]]:
    return lambda batch: [loss_value(trial.task.loss(trial.model, batch.data))]


def _set_reduction(trial: Trial, kinds: dict[str, float] | None, what: str, one: bool, alone: bool) -> None:
    """Set the reduction of a task that does not declare one."""
    task = trial.task
    if kinds is not None and "mean" in kinds and "sum" not in kinds:
        found, words = "mean", "a mean over its items"
    elif kinds is not None and "sum" in kinds and "mean" not in kinds:
        found, words = "sum", "a sum over its items"
    elif one:
        found, words = "micro-batch", "taken as it is, since a step has one micro-batch"
    elif alone:
        found, words = "sum", "that of one sample"
    elif kinds is None or "sum" in kinds:
        raise ConfigError(
            f"whether the task's `loss` is a sum or a mean over its items cannot be told: {what}; declare it: "
            "reduction = 'sum' or 'mean'"
        )
    else:
        raise _neither_error(kinds, what)
    set_found(task, found, takes_gradients(task))
    trial.say(f"the loss is {words} (found in the trial; `reduction` of the task declares it)")


def _check_declaration(task: Task, kinds: dict[str, float] | None, what: str, one: bool) -> None:
    """Raise ConfigError if the loss is not what the task declares."""
    if kinds is None or task.reduction in kinds:
        return
    if task.reduction == "sum" and kinds:
        raise ConfigError(
            f"the task's `loss` looks like a mean: {what}; return the sum over the items that `count` counts, or give "
            "the task reduction = 'mean', or none at all"
        )
    if "sum" in kinds:
        raise ConfigError(
            f"the task says reduction = 'mean', but its `loss` looks like a sum: {what}; return the mean over the "
            "items that `count` counts, or leave reduction out"
        )
    if not one:
        raise _neither_error(kinds, what)


def _neither_error(kinds: dict[str, float], what: str) -> ConfigError:
    if _SAMPLES in kinds:
        return ConfigError(
            f"the task's `loss` is a mean over its samples, and `count` counts other items: {what}; leave `count` out, "
            "or return the mean, or the sum, over what it counts"
        )
    return ConfigError(suggest_fixes(f"the task's `loss` is neither a sum nor a mean over its items: {what}"))


def _check_count(found: list[Measurement]) -> None:
    for each in found:
        whole, first, second = each.items
        if not each.drew and abs(whole - first - second) > 1e-5 * abs(whole):
            raise ConfigError(
                f"the task's `count` finds {whole:g} items in {sum(each.samples)} samples and {first:g} and {second:g} "
                "in their two halves: it must count what the loss sums over (labels, not padding)"
            )


def _warn_if_off(trial: Trial, off: float, what: str) -> None:
    if off > trial.doubt:
        trial.say(
            f"warning: the loss is off the {trial.task.reduction} of its parts by {off:.1%} ({what}), as that of a "
            "router's balance or of class weights without their `count` is: it is computed of each micro-batch by "
            f"itself, and {'averaged' if averages(trial.task) else 'added up'}"
        )


# --- collectives in a loss


class _CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record collectives that are issued while no module of the model runs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.depth = list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.depth and getattr(func, "namespace", "").lstrip("_").startswith("c10d"):
            self.seen.append(func.__name__.partition(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


@contextmanager
def _refuse_collectives(trial: Trial) -> Iterator[None]:
    """Raise ConfigError at its end if a collective was issued outside the model's forward."""
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
    if mode.seen:
        start = "--exact cannot hold with" if trial.config.exact else "another number of ranks is another training with"
        raise ConfigError(
            f"{start} a collective inside the task's `loss` ({mode.seen[0]}), which gathers what these ranks have: "
            "write `outputs` and `step_loss`, which get all samples of a step"
        )
