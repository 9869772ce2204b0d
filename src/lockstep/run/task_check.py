"""The user's task, tried once before the first step: a mistake in it is one line then, and not a lost run later.

    check_task(engine.model, model, task, batches, evaluation, world)   # each method, on one micro-batch of each rank

Nothing is left behind: no gradient, no buffer, no tensor of the task's `state_dict()`, no state of a generator. Refused
is what cannot be right whatever the task is; what only looks odd (a loss that is not finite yet, one that depends on
the whole batch as a contrastive one does, a collation that draws or that fails for half of the samples) is passed over.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.batches import Batches, MicroBatch
from lockstep.data.fetch import blamed
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import at_rest
from lockstep.engines.shared.buffers import as_before
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.loop import described, scalar, seeder
from lockstep.run.placement import explained
from lockstep.run.stateful_metrics import check_mergeable, is_metric, taken
from lockstep.task import Task, averages, has_own, looks_at_whole_step
from lockstep.transforms.eager import eager

__all__ = ["as_it_was", "check_task"]

_PAIR = "`metrics` must return a dict of name -> (sum, count), both numbers"
_BOTH = "`evaluate` must return (loss, metrics), the loss as `loss` has it and a dict of name -> (sum, count)"


@dataclass(frozen=True, slots=True)
class _Trial:
    """What the check computes on: a micro-batch, its two halves, and one of each evaluation set, where there are such.

    Attributes:
        samples: in each half.
        drew: the collation drew random numbers, so that halves hold other labels than the whole.
    """

    whole: MicroBatch
    halves: tuple[MicroBatch, ...]
    samples: tuple[int, ...]
    drew: bool
    evaluation: dict[str, MicroBatch]


def check_task(
    model: nn.Module,
    plain: nn.Module,
    task: Task,
    training: Batches,
    evaluation: Mapping[str, Batches],
    world: World,
    *,
    refuse_nan: bool = True,
) -> list[str] | None:
    """Runs `loss`, `count` and `metrics` (or `evaluate`) once, on every rank alike. Collective.

    Args:
        model: what an engine holds; its forward may have collectives.
        plain: what the engine was made from, whose layers have the names that the user knows.
        refuse_nan: a loss that is not finite of a batch that holds NaN is an error; else the guards see to it.

    Returns:
        The names of the evaluation's metrics, as its record has them; None where nothing is evaluated.

    Raises:
        DataError, ConfigError: a method fails, or returns what it must not; a loss that is no sum though it says so, or
            no mean; a `count` that does not add up, or finds nothing anywhere; a BatchNorm that gets one value a
            channel. The same on every rank, or a PeerError that names the first.
    """
    trial = on_all_ranks(world, lambda: _loaded(training, evaluation, halved=task.divisible))
    both = all(world.gather(bool(trial.halves)))  # collective: as many forwards on every rank
    norms = _norms(plain, world)  # before eval mode
    with as_it_was(model, task, world.device), torch.no_grad(), eager():
        reseed = seeder(0, "check", world.device)
        losses = on_all_ranks(world, lambda: _losses(model, task, trial, both, reseed, norms))
        on_all_ranks(world, lambda: _check_inputs(trial, losses) if refuse_nan else None)
        on_all_ranks(world, lambda: _check_sums(task, trial, losses))
        return on_all_ranks(world, lambda: _check_metrics(model, task, trial, reseed))


def _loaded(training: Batches, evaluation: Mapping[str, Batches], *, halved: bool) -> _Trial:
    ((whole, drew),) = training.parts(0, [(0, None)])
    if not whole.items and whole.weight:
        training.with_items(0)
    samples = len(training.samples(0, whole.index))
    half = samples // 2
    halves: tuple[MicroBatch, ...] = ()
    if half and halved:
        with contextlib.suppress(DataError):  # a collation may need what half of the samples do not have
            halves = tuple(part for part, _ in training.parts(0, [(0, half), (half, None)]))
    seen = {name: batches.parts(0, [(0, None)])[0][0] for name, batches in evaluation.items()}
    return _Trial(whole, halves, (half, samples - half), drew, seen)


def _losses(
    model: nn.Module,
    task: Task,
    trial: _Trial,
    both: bool,
    reseed: Callable[[int, int], None],
    norms: list[tuple[str, nn.Module]],
) -> list[float]:
    """The losses of the micro-batch and, where every rank can, of its halves."""
    found = []
    for batch in (trial.whole, *(trial.halves if both else ())):
        reseed(0, 0)
        with _watched(norms if batch is trial.whole else [], trial):  # halves are never trained on
            loss = _called("loss", lambda data: task.loss(model, data), batch.data, model, task)
        found.append(float(scalar(loss)))  # waits for the device
    return found


def _norms(model: nn.Module, world: World) -> list[tuple[str, nn.Module]]:
    """The BatchNorm layers that will normalise by what one forward on one rank gives them, with their names."""
    return [
        (name or type(layer).__name__, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.training
        and not (isinstance(layer, nn.SyncBatchNorm) and world.size > 1)
    ]


@contextlib.contextmanager
def _watched(norms: list[tuple[str, nn.Module]], trial: _Trial) -> Iterator[None]:
    """Within it a layer of `norms` that gets one value a channel raises ConfigError: in eval mode torch takes that."""
    samples = sum(trial.samples)

    def look(name: str, given: Tensor | None = None) -> None:
        if given is not None and given.ndim > 1 and given.numel() == given.shape[1]:
            raise ConfigError(
                f"BatchNorm ({name}) gets one value a channel from a forward of {samples} sample{'s' * (samples > 1)}, "
                "and cannot normalise by one: give a larger --micro-batch-size (16 or more train better), with a "
                "--batch-size that is a multiple of it, or use another norm, such as GroupNorm or LayerNorm"
            )

    hooks = [layer.register_forward_pre_hook(lambda _, inputs, name=name: look(name, *inputs)) for name, layer in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_inputs(trial: _Trial, losses: list[float]) -> None:
    """Refuses NaN in what was loaded, where the loss is not finite either: alone it may stand for what is missing."""
    if math.isfinite(losses[0]):
        return
    for name, values in _floats(trial.whole.held, ""):
        found = int(values.isnan().sum())
        if found:
            raise DataError(
                f"the first micro-batch has NaN in {name or 'its tensor'} ({found} of {values.numel()} values), and "
                f"its loss is {losses[0]}: mend the data, or --guards.nonfinite skip leaves such steps out"
            )


def _floats(batch: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The float tensors of a batch in host memory, each with its name within it: `batch['x']`, `batch[0]`."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point():
            yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _floats(value, f"{name or 'batch'}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for place, value in enumerate(batch):
            yield from _floats(value, f"{name or 'batch'}[{place}]")


def _check_sums(task: Task, trial: _Trial, losses: list[float]) -> None:
    """The count of the micro-batch, and whether loss and count of its halves add up."""
    if has_own(task, "count"):
        found = _called("count", task.count, trial.whole.held)
        if not _is_whole(found):
            told = repr(found) if isinstance(found, int | float) else described(found)
            raise ConfigError(f"the task's `count` returned {told}: it must return a whole number of items, 0 or more")
    if len(losses) < 3 or looks_at_whole_step(task):
        return
    whole, *halves = losses
    scale = max(abs(half) for half in halves)
    if not all(map(math.isfinite, losses)):
        return
    off = abs(whole - sum(halves))
    mean, items = averages(task), [half.items for half in trial.halves]
    told = f"{sum(trial.samples)} samples give {whole:.4g}, and their two halves {halves[0]:.4g} and {halves[1]:.4g}"
    if scale and not mean and off > 0.25 * scale and _is_mean(whole, halves, (items, trial.samples), scale):
        raise ConfigError(
            f"the task's `loss` looks like a mean: {told}; return the sum over the items that `count` counts, or give "
            "the task reduction = 'mean'"
        )
    if scale and mean and off < 0.02 * scale and not _is_mean(whole, halves, (items, trial.samples), 10 * scale):
        raise ConfigError(
            f"the task says reduction = 'mean', but its `loss` looks like a sum: {told}; return the mean over the "
            "items that `count` counts, or leave reduction out"
        )
    if (
        not math.isclose(trial.whole.items, sum(items), rel_tol=1e-5)
        and not trial.drew
        and (mean or off <= 0.01 * scale)
    ):
        raise ConfigError(
            f"the task's `count` finds {trial.whole.items} items in a micro-batch and {items[0]} and {items[1]} in its "
            "two halves: it must count what the loss sums over (labels, not padding)"
        )


def _is_mean(whole: float, halves: list[float], weights: tuple[Any, ...], scale: float) -> bool:
    """Whether the whole lies where one of the weighted means of its halves does."""
    means = [sum(w * h for w, h in zip(each, halves, strict=True)) / sum(each) for each in weights if sum(each)]
    return any(abs(whole - mean) < 0.02 * scale for mean in means)


def _check_metrics(model: nn.Module, task: Task, trial: _Trial, reseed: Callable[[int, int], None]) -> list[str] | None:
    """What the evaluation will call, on what it will call it with. The metrics' names."""
    if not trial.evaluation:
        return None
    found = {name: _metrics_of(model, task, batch, reseed) for name, batch in trial.evaluation.items()}
    if list(found) == [""]:
        return found[""]
    return [f"{name}/{key}" for name, keys in found.items() for key in ("loss", "items", *keys)]


def _metrics_of(model: nn.Module, task: Task, batch: MicroBatch, reseed: Callable[[int, int], None]) -> list[str]:
    reseed(0, 0)
    method = "evaluate" if has_own(task, "evaluate") else "metrics"
    result: Any = _called(method, lambda data: getattr(task, method)(model, data), batch.data, model, task)
    if method == "evaluate":
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ConfigError(f"the task's {_BOTH}; it returned {described(result)}")
        scalar(result[0])
        result = result[1]
    told = _BOTH if method == "evaluate" else _PAIR
    if not isinstance(result, dict):
        raise ConfigError(f"the task's {told}; it returned {described(result)}")
    names = list[str]()
    for name, pair in result.items():
        if not isinstance(name, str) or name in ("loss", "items"):
            raise ConfigError(
                f"the task's {told}; one is named {name!r}, and 'loss' and 'items' are the evaluation's own"
            )
        if is_metric(pair):
            names += check_mergeable(name, pair, taken(pair))
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_number, pair)):
            kind = f"({', '.join(map(described, pair))})" if isinstance(pair, tuple | list) else described(pair)
            raise ConfigError(f"the task's {told}; '{name}' is {kind}")
        names.append(name)
    return names


def _called(
    method: str, call: Callable[[Any], Any], data: Any, model: nn.Module | None = None, task: Task | None = None
) -> Any:
    try:
        return call(data)
    except (LockstepError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = blamed(method, error, "the first micro-batch, before step 1")
        told = explained(error, model, task, data) if model is not None and task is not None else ""
        raise (DataError(f"{problem}; {told}") if told else problem) from error


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float | np.number)


def _is_whole(value: Any) -> bool:
    if not _is_number(value):
        return False
    return 0 <= float(value) < math.inf  # a sum of weights too


@contextlib.contextmanager
def as_it_was(model: nn.Module, task: Task, device: torch.device, *, training: bool = False) -> Iterator[None]:
    """In eval mode, or as it is for `training`; afterwards modes, buffers, the task's tensors and the generators are
    what they were."""
    modes = [(module, module.training) for module in model.modules()]
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    if not training:
        model.eval()
    try:
        with as_before(model, task.state_dict):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        at_rest(model)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if drawn is not None:
            torch.cuda.set_rng_state(drawn, device)
