"""The micro-batches of a loop of one's own, in the order and with the random numbers of `lockstep.train`.

for step in lockstep.loader(data, world, batch_size=64, micro_batch_size=16):
    for batch in step:                          # those of this rank
        ...                                     # batch.data, batch.weight, batch.last
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, final

from lockstep.data.batches import Batches, Loading, MicroBatch, StepPlan
from lockstep.data.fetch import check_dataset
from lockstep.data.order import Sequential
from lockstep.data.sampler import order_from
from lockstep.distributed.step_exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.loop import seeder
from lockstep.task import Task, items_of_a_sample

__all__ = ["Loader", "LoaderBatch", "LoaderStep", "loader"]


def loader(
    dataset: Any,
    world: World,
    *,
    batch_size: int,
    micro_batch_size: int,
    epochs: int = 1,
    steps: int = 0,
    shuffle: bool = True,
    order: Any = None,
    seed: int = 0,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    count: Callable[[Any], Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    workers: int = 0,
) -> "Loader":
    """The steps of a training, or of an evaluation, each with this rank's micro-batches.

    What a micro-batch holds, and the random numbers that loading, collation and forward draw, depend on (seed, step,
    micro-batch) alone, as in `lockstep.train`: not on the world size, nor on where a run was resumed.

    Args:
        dataset: has `len(dataset)` and `dataset[i]`; the same on every rank.
        world: see `World.join`.
        batch_size: samples in a step, over all ranks.
        micro_batch_size: samples in one forward.
        epochs: how often each sample comes; counted in samples, so that a step may lie across two.
        steps: in place of `epochs`, the number of steps; all are full.
        shuffle: another permutation in each epoch; False: the order of the dataset.
        order: in place of a shuffle: a torch Sampler, whose length is that of an epoch, or an object with
            `at(start, stop)`, as a task's `order` returns it.
        drop_last: leaves out a last step that would be short.
        collate: a list of samples -> a batch in host memory; None: torch's `default_collate`.
        count: a batch in host memory -> its items, what the loss is a mean or a sum over: labelled tokens, or the sum
            of their weights; a finite number, 0 or more. None: its samples.
        reduction: what the loss is of a micro-batch's items. Their "mean" is weighed by their number, so that each
            item of a step counts alike however they are spread over micro-batches and ranks.
        workers: loader processes.

    Raises:
        ConfigError: a size that is not positive, a step that is not a whole number of micro-batches, or one of fewer
            than there are ranks.
        DataError: the dataset cannot be indexed, or is empty, or `order` fails or leads out of it.
    """
    for name, value in {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "epochs": epochs}.items():
        if value < 1:
            raise ConfigError(f"lockstep.loader: {name} is {value}: give at least 1")
    if steps < 0 or workers < 0:
        raise ConfigError(f"lockstep.loader: steps ({steps}) and workers ({workers}) cannot be negative")
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"lockstep.loader: reduction is '{reduction}': give 'mean' or 'sum'")
    if batch_size % micro_batch_size:
        raise ConfigError(
            f"lockstep.loader: batch_size {batch_size} is no multiple of micro_batch_size {micro_batch_size}"
        )
    check_dataset(dataset, "train")
    stream = Sequential(len(dataset)) if order is None and not shuffle else order_from(order, len(dataset), seed)
    total = steps * batch_size or epochs * stream.size
    if drop_last:
        total -= total % batch_size
    plan = StepPlan(batch_size, micro_batch_size, total)
    if plan.micro_batches < world.size:
        raise ConfigError(
            f"lockstep.loader: a step of {batch_size} is {plan.micro_batches} micro-batches of {micro_batch_size}, "
            f"fewer than the {world.size} ranks: a smaller micro_batch_size gives each one"
        )
    task = _Samples(collate, count, reduction)
    batches = Batches(task, dataset, stream, plan, world, seed=seed, loading=Loading(workers))
    return Loader(batches, task, world, seed, stream.size)


@dataclass(frozen=True, slots=True)
class LoaderBatch:
    """One forward's worth of samples.

    Attributes:
        data: what `collate` returned, on the device.
        weight: what `engine.backward(loss, weight)` takes: the micro-batch's share of the step's loss, which is the
            mean over all items of the step. 0 for an empty slot, of a short last step or of ranks that do not divide a
            step's micro-batches: it repeats another one, only so that collectives line up.
        items: in it; 0 in an empty slot.
        last: whether it is this rank's last of the step, as `engine.accumulate(last)` takes it.
    """

    data: Any
    weight: float
    items: float
    last: bool


@dataclass(frozen=True, slots=True)
class LoaderStep:
    """A step: an iterator over this rank's micro-batches, which seeds torch's generators before each.

    Attributes:
        number: from 0.
        items: over all ranks.
        world: the ranks.
        counted: for each of this rank's micro-batches, whether it is none of an empty slot.
        micro_batches: M, over all ranks.
        micro: this rank's micro-batches; `seed(number, index)` seeds torch's generators for one of them.
    """

    number: int
    items: float
    world: World
    counted: tuple[bool, ...]
    micro_batches: int
    micro: list[MicroBatch]
    seed: Callable[[int, int], None]
    _mean: bool

    def __len__(self) -> int:
        return len(self.micro)

    def __iter__(self) -> Iterator[LoaderBatch]:
        for batch in self.micro:
            share = (batch.items if self._mean else batch.weight) / (self.items or 1)
            last, items = batch is self.micro[-1], batch.items if batch.weight else 0
            data = batch.data
            self.seed(self.number, batch.index)
            yield LoaderBatch(data, share if batch.weight else 0.0, items, last)


@final
class Loader:
    """The steps from the present one on. An iteration goes on where the one before it ended, up to the last step.

    Attributes:
        micro_batches: M, in every step over all ranks: what `lockstep.engine(..., exact_micro_batches=M)` takes.
        steps: in all.
    """

    def __init__(self, batches: Batches, task: "_Samples", world: World, seed: int, samples: int) -> None:
        self._batches, self._world, self._seed = batches, world, seeder(seed, "micro", world.device)
        self._each, self._mean, self._done = items_of_a_sample(task), task.reduction == "mean", 0
        plan = batches.step_plan
        self.micro_batches, self.steps = plan.micro_batches, plan.steps
        self._plan = {
            "batch_size": plan.size,
            "micro_batch_size": plan.micro_size,
            "samples": samples,
            "seed": seed,
        }

    def __len__(self) -> int:
        """Steps that are still to come."""
        return self.steps - self._done

    def __iter__(self) -> Iterator[LoaderStep]:
        """Collective: every rank takes the same steps. One small exchange a step or less often tells the items."""
        plan, found = self._batches.step_plan, self._batches.from_step(self._done)
        each = self._each
        constant = (lambda step: each * plan.samples(step)) if each else None
        exchange = StepExchange(self._world, found.items, constant, plan.steps)  # collective
        with closing(exchange), closing(found):
            for number, micro in found:
                items = exchange.global_items(number)
                self._done = number + 1
                counted = tuple(bool(batch.weight) for batch in micro)
                yield LoaderStep(number, items, self._world, counted, self.micro_batches, micro, self._seed, self._mean)
                exchange.send(number)
                exchange.receive()

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: after the step whose body runs."""
        return {"done": self._done, **self._plan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Raises ConfigError where the data, the sizes or the seed were others."""
        differing = [f"{name} ({state.get(name)} before, {now} now)" for name, now in self._plan.items()]
        differing = [
            line for line, name in zip(differing, self._plan, strict=True) if state.get(name) != self._plan[name]
        ]
        if differing:
            raise ConfigError(
                f"lockstep.loader: another {', '.join(differing)}: samples would repeat; make it as before"
            )
        self._done = min(int(state["done"]), self.steps)


class _Samples(Task):
    """What loading asks of a task."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Any] | None,
        count: Callable[[Any], Any] | None,
        reduction: Literal["mean", "sum"],
    ) -> None:
        self.reduction = reduction
        if collate:
            self.collate = collate  # type: ignore[method-assign, assignment]
        if count:
            self.count = count  # type: ignore[method-assign, assignment]

    def model(self) -> NoReturn:
        raise NotImplementedError

    def dataset(self, split: str) -> NoReturn:
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> NoReturn:
        raise NotImplementedError
