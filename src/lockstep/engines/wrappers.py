"""Wrap an engine: rebuild it when the trained parameters change, add hooks, or copy weights.

    made = Remade(model, world, make, optimizer, changes)   # make: (make optimizer, wrapper, names) -> Engine
    model.body.requires_grad_(True)                         # between two steps, on every rank
    with made.accumulate(last=True): ...                    # the step that follows trains the body too

An engine's groups, reducer, averages and shards are fixed when it is built. So each step of `Remade` first compares
what requires a gradient, and what the optimizer holds, with the time of the build. Optimizer states stay with their
parameters: the state of a frozen one is kept until it is unfrozen. A new parameter starts without a state, its average
at its current values. `Copied` and `Hooked` wrap an engine for `--weight-copies step` and a task's hooks.
"""

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.read import AVERAGE
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import Engine, Evaluate, MakeOptimizer, StepResult
from lockstep.engines.ddp import listed
from lockstep.errors import ConfigError, LockstepError, PeerError
from lockstep.hooks import Hooks
from lockstep.run_state import TrainedSet
from lockstep.transforms.weight_copies import WeightCopies

__all__ = [
    "UNFROZEN",
    "Changes",
    "Copied",
    "Hooked",
    "Make",
    "MakeAgain",
    "Remade",
    "set_trained",
]


@final
class Copied:
    """An engine with whole parameters whose forwards use low-precision copies of the weights."""

    def __init__(self, engine: Engine, copies: WeightCopies) -> None:
        self.model: nn.Module = engine.model
        self._engine, self._copies = engine, copies
        self._begun = False  # the current step has had a backward

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._micro_batch(last, counts)

    @contextmanager
    def _micro_batch(self, last: bool, counts: bool) -> Iterator[None]:
        if not self._begun or self._copies.moved():
            self._copies.write()
        with self._engine.accumulate(last, counts), self._copies.used():
            yield

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if name := self._copies.moved():
            raise ConfigError(
                f"--weight-copies step does not go with a forward that writes {name}: it has multiplied by what was "
                "there before; leave it out"
            )
        self._begun = True
        self._engine.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._begun = False
        self._copies.hand_over()
        return self._engine.step(factor, limit, momentum, evaluate)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """Rehearse with the weights themselves, since the copies only make it faster."""
        self._engine.rehearse(loss)

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._engine.load_state_dict(state)


@final
class Hooked:
    """An engine that calls a task's hooks after its backwards and updates."""

    def __init__(self, engine: Engine, hooks: Hooks) -> None:
        self.model: nn.Module = engine.model
        self._engine, self._hooks = engine, hooks

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._engine.accumulate(last, counts)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._engine.backward(loss, weight)
        self._hooks.after_backward()

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        result = self._engine.step(factor, limit, momentum, evaluate)
        self._hooks.after_update()
        return result

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self._engine.rehearse(loss)

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._engine.load_state_dict(state)


UNFROZEN = "trained since step"
MakeAgain = Callable[[nn.Module, Optimizer], Optimizer]  # (model as the engine holds it, the former one) -> optimizer
_FLAG = attrgetter("requires_grad")


class Make(Protocol):
    """Builds an engine around the same model."""

    def __call__(self, optimizer: MakeOptimizer, wrapper: nn.Module | None, rested: Collection[str], /) -> Engine:
        """Build the engine.

        Args:
            optimizer: builds the optimizer from the model as the engine holds it.
            wrapper: the former engine's wrapper of the model, to be reused; None: there was none.
            rested: parameters that were trained earlier and have averages.
        """


class Changes(NamedTuple):
    """A run's settings for changes to its trained parameters.

    Attributes:
        again: builds the optimizer for the changed set; None: the function that built the first one, if needed.
        fixed: name -> why this parameter must stay frozen, with the way out.
        known: the set from a checkpoint; None: what requires gradients now.
        done: number of steps taken before.
        changed: called with the new set after a change.
    """

    again: MakeAgain | None = None
    fixed: Mapping[str, str] = {}
    known: TrainedSet | None = None
    done: int = 0
    changed: Callable[[TrainedSet], None] = lambda trained: None


def set_trained(model: nn.Module, names: Collection[str]) -> None:
    """Make exactly the parameters of these names require gradients."""
    for name, parameter in model.named_parameters():
        wanted = name in names
        if parameter.requires_grad is not wanted:
            parameter.requires_grad_(wanted)


@final
class Remade:
    """An engine that is rebuilt around its model when the trained parameters change.

    Args:
        model: the plain module.
        make: see `Make`.
        optimizer: builds it from the model as the engine holds it.
        changes: see `Changes`.
        given: `optimizer` returns one fixed object, and cannot build another.
        refused: why the engine cannot be rebuilt, with the way out; "": it can.
        follows: the engine reads the optimizers' groups in each step, and need not be rebuilt.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        make: Make,
        optimizer: MakeOptimizer,
        changes: Changes,
        *,
        given: bool = False,
        refused: str = "",
        follows: bool = False,
    ) -> None:
        self._plain, self._world, self._make, self._changes = model, world, make, changes
        self._given, self._refused, self._follows = given, refused, follows
        self._make_optimizer, self._steps, known = optimizer, changes.done, changes.known
        self._optimizer: Optimizer
        self._within = self._begun = False
        self._since = dict(known.since) if known else {}
        self._is_known = known is not None
        self._made = dict.fromkeys(known.made if known else ())  # trained when the engine was built, or earlier
        self.engine: Engine = make(self._noted(optimizer), None, [*self._made])
        self.model: nn.Module = self.engine.model
        self._note()

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        if not self._within:
            self._begin()
        return self.engine.accumulate(last, counts)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self.engine.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._within = self._begun = True  # a pass that the optimizer repeats does not begin a step
        self._steps += 1
        try:
            return self.engine.step(factor, limit, momentum, evaluate)
        finally:
            self._within = False

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self.engine.rehearse(loss)

    def state_dict(self) -> dict[str, Tensor]:
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._begun = True
        self.engine.load_state_dict(state)

    def trained(self) -> TrainedSet | None:
        """Return the current set; None if it never changed."""
        now = self._names_now()
        if not self._is_known and now == self._trained and [*self._made] == now:
            return None
        return TrainedSet([*self._made], now, {name: step for name, step in self._since.items() if name in now})

    @property
    def since(self) -> dict[str, int]:
        """Name -> the first step that trained it, for parameters unfrozen during the run."""
        return dict(self._since)

    def leave_step(self) -> None:
        """Leave a step unfinished."""
        self._within = False

    # --- detect a change

    def _begin(self) -> None:
        self._within = True
        if self._flags() != self._seen or self._held() != self._groups:
            self._change()

    def _flags(self) -> list[bool]:
        return [*map(_FLAG, self._parameters)]

    def _held(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in self._optimizer.param_groups]

    def _names_now(self) -> list[str]:
        return [name for name, flag in zip(self._names, self._flags(), strict=True) if flag]

    def _note(self) -> None:
        """Record what the engine was built with."""
        named = dict(self._plain.named_parameters())
        self._names, self._parameters = [*named], [*named.values()]
        self._seen, self._groups = self._flags(), self._held()
        self._trained = self._names_now()
        self._made |= dict.fromkeys(self._trained)

    def _noted(self, make: MakeOptimizer) -> MakeOptimizer:
        def noted(held: nn.Module) -> Optimizer:
            self._optimizer = make(held)
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            return self._optimizer

        return noted

    def _change(self) -> None:
        now, before = self._names_now(), set(self._trained)
        fresh = [name for name in now if name not in before]
        changes = [f"unfroze {listed(fresh)}"] if fresh else []
        if gone := [name for name in self._trained if name not in set(now)]:
            changes.append(f"froze {listed(gone)}")
        if not changes:
            changes = ["changed the optimizer's groups"]
        what = " and ".join(changes)
        self._agree(what, now)
        if self._refused:
            raise LockstepError(f"after step {self._steps} the run {what}: {self._refused}")
        if fixed := next((name for name in fresh if name in self._changes.fixed), ""):
            raise LockstepError(f"after step {self._steps} the run unfroze {fixed}: {self._changes.fixed[fixed]}")
        self._since |= dict.fromkeys(fresh, self._steps + 1)
        self._is_known = True
        if self._follows:
            self._note()
        else:
            self._remake(fresh)
        self._changes.changed(TrainedSet([*self._made], now, dict(self._since)))

    def _agree(self, what: str, now: list[str]) -> None:
        """Raise LockstepError, naming parameters, unless all ranks changed alike. Collective."""
        if self._world.size == 1:
            return
        mine = {"remade": what, "trained": now, "groups": [len(group) for group in self._held()]}
        try:
            # A rank without a change is elsewhere. Wait half of the timeout, so that this error comes before theirs.
            arrived = dist.barrier(group=self._world.control, async_op=True)  # collective
            arrived.wait(timedelta(seconds=self._world.timeout / 2))
            every = self._world.gather(mine)  # collective
        except (PeerError, RuntimeError) as error:
            raise LockstepError(
                f"{rank_label(self._world.rank)}: after step {self._steps} this rank {what}, and not all ranks did so: "
                "change what is trained on every rank, after the same step"
            ) from error
        odd = next((rank for rank, each in enumerate(every) if each != every[0]), None)
        if odd is not None:
            told = [each["remade"] if isinstance(each, dict) else "did not" for each in (every[0], every[odd])]
            raise LockstepError(
                f"after step {self._steps} rank 0 {told[0]} and rank {odd} {told[1]}: change what is trained on every "
                "rank alike"
            )

    # --- rebuild the engine

    def _remake(self, fresh: list[str]) -> None:
        """Rebuild the engine for the current parameters, with the former engine's states. Collective."""
        state, wrapper, before = self.engine.state_dict() if self._begun else {}, self.model, self._optimizer
        names: dict[int, str] = dict(zip(map(id, self._parameters), self._names, strict=True))
        present = [group["lr"] for group in before.param_groups]
        for group, rate in zip(before.param_groups, self._rates, strict=False):  # later groups keep theirs
            group["lr"] = rate
        chosen = self._chosen(before, fresh)
        others = _other_kinds(before, chosen)
        lost = {names[key] for key in others if key in names}
        if not self._begun:
            before.state.clear()  # created to be loaded into: the first step creates its own
        elif chosen is not before:
            chosen.state.update({p: values for p, values in before.state.items() if id(p) not in others})
        del self.engine
        gc.collect()  # hooks make cycles of an engine and its parameters; DDP's reducer must be gone before the next
        self.engine = self._make(self._noted(lambda held: chosen), wrapper, [*self._made])
        self.model = self.engine.model
        if chosen is before:
            for group, rate in zip(before.param_groups, present, strict=True):
                group["lr"] = rate  # the user's scheduler continues from it
        self._note()
        if self._begun:
            self._carry(state, lost)

    def _chosen(self, before: Optimizer, fresh: list[str]) -> Optimizer:
        """Return the optimizer for the changed set. Raises LockstepError if none has it."""
        owned = _owned(before)
        trained = dict(zip(self._names, self._parameters, strict=True))
        left = [name for name in fresh if id(trained[name]) not in owned]
        chosen = before
        if self._changes.again is not None:
            chosen = self._changes.again(self._plain, before)
        elif left and not self._given and not hasattr(before.step, "_wrapped_by_lr_sched"):
            chosen = self._make_optimizer(self._plain)
        owned = _owned(chosen)
        if left := [name for name in fresh if id(trained[name]) not in owned]:
            raise LockstepError(
                f"after step {self._steps} the run unfroze {listed(left)}, which the optimizer has in no group: add "
                "one with add_param_group in the same place, or have the function that makes the optimizer take all "
                "that requires gradients"
            )
        return chosen

    def _carry(self, state: dict[str, Tensor], lost: set[str]) -> None:
        """Load the former engine's state into the new one. Collective."""
        kept = {n: t for n, t in state.items() if not (n.startswith("optimizer/") and _parameter_of(n) in lost)}
        own = self.engine.state_dict()  # collective
        kept |= {name: tensor for name, tensor in own.items() if name.startswith(AVERAGE) and name not in kept}
        self.engine.load_state_dict(kept)  # collective


def _parameter_of(name: str) -> str:
    return name.partition("/")[2].rpartition("/")[0]


def _owned(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Map the ids of the optimizer's parameters to their groups."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def _other_kinds(before: Optimizer, after: Optimizer) -> set[int]:
    """Return ids of parameters whose update rule changed (Muon, AdamW): their states do not fit."""
    old = _owned(before)
    return {key for key, group in _owned(after).items() if key in old and old[key].get("muon") != group.get("muon")}
