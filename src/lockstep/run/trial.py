"""What the checks before step 1 compute with: a few samples, whole and in halves, in eval mode and float32.

    trial = Trial(engine, model, task, world, config, say)
    with trial.running():
        for found in measures(trial, probe, batches, clean):    # of all ranks; collective
            ...

A probe computes a list of numbers from a batch. A `Measure` has those of some samples and of their two halves: whether
a loss is a sum or a mean, and whether a metric adds up, shows there.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.config.config import Config
from lockstep.data.batches import Batches, MicroBatch
from lockstep.data.fetch import blamed, generators_kept
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import Engine, at_rest
from lockstep.engines.make import undo_step
from lockstep.engines.shared.oom import is_out_of_memory
from lockstep.errors import DataError, LockstepError
from lockstep.loop import seeder
from lockstep.run.placement import explained
from lockstep.task import Task
from lockstep.transforms.eager import eager
from lockstep.transforms.precision import AUTOCAST, without_autocast

__all__ = ["LEAST", "Cut", "Measure", "Probe", "Trial", "as_it_was", "call", "measures"]

LEAST = 4  # samples: a half has two, so that a mean of them is no sum
_ROUNDS, _DRAWN_ROUNDS = 4, 16  # places in the data that are tried, where the first does not show it; of what is drawn
_ALIKE = 1e-5  # what two runs in different seeds may differ by that draw nothing

Probe = Callable[[MicroBatch], list[float]]


@dataclass(frozen=True, slots=True)
class Cut:
    """Some samples of this rank, and their two halves.

    Attributes:
        samples: in each half.
        drew: the collation drew random numbers, so that the halves hold other labels than the whole.
    """

    whole: MicroBatch
    halves: tuple[MicroBatch, MicroBatch]
    samples: tuple[int, int]
    drew: bool


class Measure(NamedTuple):
    """A probe's numbers of one rank's samples and of their halves.

    Attributes:
        items: of the whole and of each half; `samples`: of each half.
        again: of the whole in another seed; () where that was not needed.
    """

    whole: list[float]
    first: list[float]
    second: list[float]
    items: list[float]
    samples: list[int]
    drew: bool
    again: list[float]

    def noise(self, place: int) -> float:
        """What number `place` changes by from seed to seed; 0 where nothing was drawn."""
        if not self.again:
            return 0.0
        off = abs(self.again[place] - self.whole[place])
        return off if off > _ALIKE * self.scale(place) or not math.isfinite(off) else 0.0

    def is_random(self, place: int) -> bool:
        """Whether number `place` depends on random numbers."""
        return self.drew or self.noise(place) != 0.0

    def three(self, place: int) -> tuple[float, float, float]:
        """Number `place` of the whole and of both halves."""
        return self.whole[place], self.first[place], self.second[place]

    def scale(self, place: int) -> float:
        """The largest of the three."""
        return max(map(abs, self.three(place)))

    def mean(self, place: int, weights: list[float] | list[int]) -> float:
        """The halves' mean by these weights; NaN where they are 0."""
        first, second = weights[-2:]
        total = first + second
        return (first * self.first[place] + second * self.second[place]) / total if total else math.nan


@final
class Trial:
    """A task, the engine that will train it, and how its methods are tried.

    Args:
        plain: what the engine was made from, whose layers have the names that the user knows.
        say: takes a line for the user, on every rank.
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
        self.modes = {module: module.training for module in engine.model.modules()}  # as the training has them
        self._reseed = seeder(0, "check", world.device)
        narrow = any(p.is_floating_point() and p.itemsize < 4 for p in engine.model.parameters())
        self.is_rough = narrow or config.engine_options.param_dtype not in ("same", "float32")
        # An own step takes its gradients itself; the first graph of a static one must be the step's.
        self._has_graph = task.own_steps is None and not config.engine_options.static_graph

    @property
    def model(self) -> nn.Module:
        """What an engine holds; its forward may have collectives."""
        return self.engine.model

    @property
    def limit(self) -> float:
        """What two numbers may differ by that should be one."""
        return 0.05 if self.is_rough else 0.01

    @property
    def doubt(self) -> float:
        """What they may differ by without a word."""
        return self.limit if self.is_rough else 0.001

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Surround whatever is tried: nothing is left behind."""
        stack = contextlib.ExitStack()
        stack.enter_context(as_it_was(self.model, self.task, self.world.device))
        stack.enter_context(eager())
        return stack

    def first(self, batches: Batches) -> MicroBatch:
        """Load this rank's first micro-batch."""
        return batches.parts(0, [(0, batches.own_samples(0))])[0][0]

    @contextlib.contextmanager
    def with_graph(self) -> Iterator[None]:
        """Surround a forward as step 1 has it, of which no backward follows."""
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
        """Seed what a loss may draw from."""
        self._reseed(number, 0)

    def cut(self, batches: Batches, place: int) -> Cut | None:
        """Load at least four samples, and their halves; None where a rank cannot. Collective.

        Args:
            place: how many such cuts come before it.
        """

        def load() -> Cut | None:
            count = min(max(LEAST, batches.own_samples(0)), batches.size)
            half, start = count // 2, place * count
            if not half:
                return None
            cuts = [(start, start + count), (start, start + half), (start + half, start + count)]
            with contextlib.suppress(Exception):  # a collation may need what these samples do not have
                (whole, drew), (first, _), (second, _) = batches.parts(0, cuts)
                return Cut(whole, (first, second), (half, count - half), drew)
            return None

        found = on_all_ranks(self.world, load)  # collective
        return found if all(self.world.gather(found is not None)) else None  # collective

    def attempt(self, action: Callable[[], list[Any]]) -> tuple[list[Any], bool] | None:
        """What `action` returns, and whether it needs a graph; None where it fails on a rank. Collective.

        It runs in the parameters' dtype, unless the model relies on autocast.
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


def measures(
    trial: Trial, probe: Probe, batches: Batches, clean: Callable[[Measure], bool]
) -> Iterator[tuple[list[Measure], bool]]:
    """Measure at one place in the data after the other, until the caller has seen enough. Collective.

    Args:
        clean: whether a measure is as it should be; else the whole is loaded and computed again, in another seed.

    Yields:
        The measures of all ranks and places so far, alike on every rank; and whether the probe needs a graph.
    """
    found, needs_graph = list[Measure](), False
    for place in range(_DRAWN_ROUNDS):
        if place == _ROUNDS and not any(each.is_random(0) for each in found):
            break
        cut = trial.cut(batches, place)  # collective
        if cut is None:
            break

        def tried(batch: MicroBatch, seed: int = 0) -> list[float]:
            with as_it_was(trial.model, trial.task, trial.world.device):  # the task's own tensors have their say
                trial.seed(seed)
                return probe(batch)

        parts = (cut.whole, *cut.halves)
        numbers = trial.attempt(lambda parts=parts: [tried(batch) for batch in parts])  # type: ignore[misc]
        if numbers is None:
            break
        values, needs_graph = numbers
        items = [float(batch.items) for batch in parts]
        mine = Measure(values[0], values[1], values[2], items, list(cut.samples), cut.drew, [])
        every = [Measure(*each) for each in trial.world.gather(mine)]  # collective
        if not all(map(clean, every)):
            other = trial.cut(batches, place) or cut  # collective; a dataset may draw too
            again = trial.attempt(lambda other=other: [tried(other.whole, 1)])  # type: ignore[misc]
            if again is None:
                break
            held = [[part.held for part in (each.whole, *each.halves)] for each in (cut, other)]
            drew = cut.drew or not _is_same(*held)
            mine = mine._replace(again=again[0][0], drew=drew)
            every = [Measure(*each) for each in trial.world.gather(mine)]  # collective
        found += every
        yield found, needs_graph
    if not found:
        yield found, needs_graph


def _is_same(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return all(a.equal(b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


def call(
    method: str, action: Callable[[Any], Any], data: Any, model: nn.Module | None = None, task: Task | None = None
) -> Any:
    """Call a method of the task. Raises DataError, in one line, for what goes wrong in it."""
    try:
        return action(data)
    except LockstepError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # whoever called says what holds the memory
            raise
        problem = blamed(method, error, "the first micro-batch, before step 1")
        told = explained(error, model, task, data) if model is not None and task is not None else ""
        raise (DataError(f"{problem}; {told}") if told else problem) from error


@contextlib.contextmanager
def as_it_was(model: nn.Module, task: Task, device: torch.device, *, training: bool = False) -> Iterator[None]:
    """In eval mode, or as it is for `training`; afterwards modes, buffers, the task's tensors and the generators are
    what they were."""
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
            for module, buffers in owned:  # a forward may put another tensor in the place of a buffer
                module._buffers.update(buffers)
            for tensor, before in held:
                if tensor.shape != before.shape:
                    tensor.resize_(before.shape)
                tensor.copy_(before)
        if drawn is not None:
            torch.cuda.set_rng_state(drawn, device)
