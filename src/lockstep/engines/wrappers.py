"""Wrap an engine: rebuild it when the trained parameters change, add hooks, or copy weights.

    engine = Remade(model, world, make, optimizer, changes)     # make: (make optimizer, wrapper, names) -> Engine
    model.body.requires_grad_(True)                             # between two steps, on every rank
    with engine.accumulate(last=True): ...                      # the step that follows trains the body too

An engine's groups, reducer, averages and shards are fixed when it is built. So each step of `Remade` first compares
what requires a gradient, and what the optimizer holds, with the time of the build. Optimizer states stay with their
parameters: the state of a frozen one is kept until it is unfrozen. A new parameter starts without a state, its average
at its current values. `Copied` and `Hooked` wrap an engine for `--weight-copies step` and a task's hooks.
"""

import gc
import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.read import AVERAGE
from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import Engine, Evaluate, ForwardingEngine, StepResult
from lockstep.engines.ddp import shorten
from lockstep.engines.group_settings import settings_of
from lockstep.engines.modes import switch
from lockstep.engines.request import Changes, MakeOptimizer
from lockstep.errors import ConfigError, LockstepError, PeerError
from lockstep.hooks import Hooks
from lockstep.run_state import TrainedSet
from lockstep.transforms.weight_copies import WeightCopies

__all__ = [
    "UNFROZEN",
    "Copied",
    "Hooked",
    "Remade",
    "set_trained",
]


@final
class Copied(ForwardingEngine):
    """An engine with whole parameters whose forwards use low-precision copies of the weights.

    A rehearsal uses the weights themselves, since the copies only make it faster.
    """

    def __init__(self, engine: Engine, copies: WeightCopies) -> None:
        super().__init__(engine)
        self._copies = copies
        self._is_active = False  # the current step has had a backward

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._micro_batch(last, counts)

    @contextmanager
    def _micro_batch(self, last: bool, counts: bool) -> Iterator[None]:
        # Written once a step, unless somebody else changed the weights since.
        if not self._is_active or self._copies.find_written():
            self._copies.write()
        with self.inner.accumulate(last, counts), self._copies.use():
            yield

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if name := self._copies.find_written():
            raise ConfigError(
                f"--weight-copies step does not work with a forward that writes {name}: the copies still have the old "
                "values; drop the flag"
            )
        self._is_active = True
        self.inner.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._is_active = False
        self._copies.hand_over()
        return self.inner.step(factor, limit, momentum, evaluate)


@final
class Hooked(ForwardingEngine):
    """An engine that calls a task's hooks after its backwards and updates."""

    def __init__(self, engine: Engine, hooks: Hooks) -> None:
        super().__init__(engine)
        self._hooks = hooks

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self.inner.backward(loss, weight)
        self._hooks.after_backward()

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        result = self.inner.step(factor, limit, momentum, evaluate)
        self._hooks.after_update()
        return result


UNFROZEN = "trained since step"
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


def set_trained(model: nn.Module, names: Collection[str]) -> None:
    """Make exactly the parameters of these names require gradients."""
    for name, parameter in model.named_parameters():
        flag = name in names
        if parameter.requires_grad is not flag:
            parameter.requires_grad_(flag)


@final
class Remade(ForwardingEngine):
    """An engine that is rebuilt around its model when the trained parameters change.

    Args:
        model: the plain module.
        make: see `Make`.
        optimizer: builds it from the model as the engine holds it.
        changes: see `Changes`.
        fixed_optimizer: `optimizer` returns one fixed object, and cannot build another.
        refusal: why the engine cannot be rebuilt, with the way out; "": it can.
        reads_groups: the engine reads the optimizers' groups in each step, and need not be rebuilt.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        make: Make,
        optimizer: MakeOptimizer,
        changes: Changes,
        *,
        fixed_optimizer: bool = False,
        refusal: str = "",
        reads_groups: bool = False,
    ) -> None:
        self._plain = model
        self._world = world
        self._make = make
        self._changes = changes
        self._fixed_optimizer = fixed_optimizer
        self._refusal = refusal
        self._reads_groups = reads_groups
        self._make_optimizer = optimizer
        self._steps = changes.done
        former = changes.known
        self._optimizer: Optimizer
        self._in_step = self._is_active = False
        self._since = dict(former.since) if former else {}
        self._has_set = former is not None
        # Names in the order of first training; averages of parameters that are frozen now are kept for them.
        self._ever_trained = dict.fromkeys(
            former.made if former else ()
        )  # trained when the engine was built, or earlier
        super().__init__(make(self._record_optimizer(optimizer), None, [*self._ever_trained]))
        self._record_build()

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        if not self._in_step:
            self._begin()
        return self.inner.accumulate(last, counts)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        # A pass that the optimizer repeats inside its step must not begin another one.
        self._in_step = self._is_active = True
        self._steps += 1
        try:
            return self.inner.step(factor, limit, momentum, evaluate)
        finally:
            self._in_step = False

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._is_active = True
        self.inner.load_state_dict(state)

    def find_trained_set(self) -> TrainedSet | None:
        """Return the current set; None if it never changed."""
        names = self._names_now()
        if not self._has_set and names == self._trained and [*self._ever_trained] == names:
            return None
        return TrainedSet(
            [*self._ever_trained], names, {name: step for name, step in self._since.items() if name in names}
        )

    def undo_step(self) -> None:
        self._in_step = False
        super().undo_step()

    def kinds(self) -> dict[str, str]:
        unfrozen = {}
        for name, step in self._since.items():
            unfrozen[f"model/{name}"] = f"{name}, {UNFROZEN} {step}"
        return unfrozen | super().kinds()

    # --- detect a change

    def _begin(self) -> None:
        self._in_step = True
        # Two list comparisons a step: cheap enough to notice every change without a hook.
        if self._flags() != self._built_flags or self._group_ids() != self._groups:
            self._handle_change()

    def _flags(self) -> list[bool]:
        return [*map(_FLAG, self._parameters)]

    def _group_ids(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in self._optimizer.param_groups]

    def _names_now(self) -> list[str]:
        names = []
        for name, flag in zip(self._names, self._flags(), strict=True):
            if flag:
                names.append(name)
        return names

    def _record_build(self) -> None:
        """Record what the engine was built with."""
        parameters = dict(self._plain.named_parameters())
        self._names = [*parameters]
        self._parameters = [*parameters.values()]
        self._built_flags = self._flags()
        self._groups = self._group_ids()
        self._trained = self._names_now()
        self._ever_trained |= dict.fromkeys(self._trained)

    def _record_optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        def build(model: nn.Module) -> Optimizer:
            self._optimizer = make(model)
            # Some optimizers with two sets of weights refuse a step before they are switched to training.
            switch(self._optimizer, training=True)
            return self._optimizer

        return build

    def _handle_change(self) -> None:
        names = self._names_now()
        before = set(self._trained)
        fresh = [name for name in names if name not in before]
        changes = [f"unfroze {shorten(fresh)}"] if fresh else []
        if removals := [name for name in self._trained if name not in set(names)]:
            changes.append(f"froze {shorten(removals)}")
        if not changes:
            changes = ["changed the optimizer's groups"]
        change = " and ".join(changes)
        # First, since the other stages of a pipeline do not have what changed.
        if self._refusal:
            raise LockstepError(f"after step {self._steps} the run {change}: {self._refusal}")
        self._check_agreement(change, names)
        if fixed := next((name for name in fresh if name in self._changes.fixed), ""):
            raise LockstepError(f"after step {self._steps} the run unfroze {fixed}: {self._changes.fixed[fixed]}")
        self._since |= dict.fromkeys(fresh, self._steps + 1)
        self._has_set = True
        if self._reads_groups:
            self._record_build()
        else:
            self._rebuild(fresh)
        self._changes.changed(TrainedSet([*self._ever_trained], names, dict(self._since)))

    def _check_agreement(self, change: str, now: list[str]) -> None:
        """Raise LockstepError, naming parameters, unless all ranks made the same change. Collective."""
        if self._world.size == 1:
            return
        report = {"remade": change, "trained": now, "groups": [len(group) for group in self._group_ids()]}
        try:
            # A rank without a change is elsewhere. Wait for half of the timeout, so that this error comes before
            # theirs.
            arrived = collectives.barrier(group=self._world.control, async_op=True)  # collective
            collectives.wait(arrived, timedelta(seconds=self._world.timeout / 2))
            # All ranks, only after a change.
            reports = self._world.gather(report)  # collective
        except PeerError as error:
            raise LockstepError(
                f"{self._world.label}: after step {self._steps} this rank {change}, but not every rank did: "
                "make the same change on every rank, after the same step"
            ) from error
        odd = None
        for rank, report_of_rank in enumerate(reports):
            if report_of_rank != reports[0]:
                odd = rank
                break
        if odd is not None:
            actions = []
            for report_of_rank in (reports[0], reports[odd]):
                if isinstance(report_of_rank, dict):
                    actions.append(report_of_rank["remade"])
                else:
                    actions.append("did not")
            raise LockstepError(
                f"after step {self._steps} rank 0 {actions[0]} and rank {odd} {actions[1]}: make the same change "
                "on every rank"
            )

    # --- rebuild the engine

    def _rebuild(self, fresh: list[str]) -> None:
        """Rebuild the engine for the current parameters, with the former engine's states. Collective."""
        state = self.inner.state_dict() if self._is_active else {}
        wrapper = self.model
        former = self._optimizer
        names: dict[int, str] = dict(zip(map(id, self._parameters), self._names, strict=True))
        optimizer = self._choose_optimizer(former, fresh)
        if optimizer is not former:
            _carry_settings(former, optimizer)
        rule_changes = _rule_changes(former, optimizer)
        drops = set()
        for key in rule_changes:
            if key in names:
                drops.add(names[key])
        if not self._is_active:
            # These states were created only to be loaded into; the first step creates its own.
            former.state.clear()
        elif optimizer is not former:
            for p, values in former.state.items():
                if id(p) not in rule_changes:
                    optimizer.state[p] = values
        # The wrapper and the optimizer are reused; the engine itself must be freed before the next is built.
        del self.inner
        # Hooks form cycles of an engine and its parameters. DDP's reducer must be gone before the next one is made.
        gc.collect()
        self.inner = self._make(self._record_optimizer(lambda model: optimizer), wrapper, [*self._ever_trained])
        self.model = self.inner.model
        self._record_build()
        if self._is_active:
            self._load_former_state(state, drops)

    def _choose_optimizer(self, former: Optimizer, fresh: list[str]) -> Optimizer:
        """Return the optimizer for the changed set. Raises LockstepError if none has it."""
        owned = _groups_by_parameter(former)
        trained = dict(zip(self._names, self._parameters, strict=True))
        missing = []
        for name in fresh:
            if id(trained[name]) not in owned:
                missing.append(name)
        optimizer = former
        if self._changes.again is not None:
            optimizer = self._changes.again(self._plain, former)
        # A scheduler of torch holds the former optimizer, whose step it has wrapped; then only its groups may grow.
        elif missing and not self._fixed_optimizer and not hasattr(former.step, "_wrapped_by_lr_sched"):
            optimizer = self._make_optimizer(self._plain)
        owned = _groups_by_parameter(optimizer)
        if missing := [name for name in fresh if id(trained[name]) not in owned]:
            raise LockstepError(
                f"after step {self._steps} the run unfroze {shorten(missing)}, in none of the optimizer's groups: call "
                "add_param_group in the same place, or let the function that builds the optimizer take every parameter "
                "that requires gradients"
            )
        return optimizer

    def _load_former_state(self, state: dict[str, Tensor], drops: set[str]) -> None:
        """Load the former engine's state into the new one. Collective."""
        entries = {}
        for n, t in state.items():
            if not (n.startswith("optimizer/") and _parameter_of(n) in drops):
                entries[n] = t
        # All ranks. New parameters start with the averages that the new engine gave them.
        present_state = self.inner.state_dict()  # collective
        entries |= {
            name: tensor for name, tensor in present_state.items() if name.startswith(AVERAGE) and name not in entries
        }
        self.inner.load_state_dict(entries)  # collective


def _parameter_of(name: str) -> str:
    return name.partition("/")[2].rpartition("/")[0]


def _groups_by_parameter(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Map the ids of the optimizer's parameters to their groups."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def _carry_settings(former: Optimizer, optimizer: Optimizer) -> None:
    """Give each group the changed settings of the former group that had its parameters."""
    changes: dict[int, dict[str, Any]] = {}
    for group, change in zip(former.param_groups, settings_of(former).changes(), strict=True):
        for parameter in group["params"]:
            changes[id(parameter)] = change
    # A group without former parameters changes nothing.
    rows = []
    for group in optimizer.param_groups:
        rows.append(next((changes[id(parameter)] for parameter in group["params"] if id(parameter) in changes), {}))
    settings_of(optimizer).load(rows)


def _rule_changes(before: Optimizer, after: Optimizer) -> set[int]:
    """Return ids of parameters whose update rule changed (Muon, AdamW): their states do not fit."""
    old = _groups_by_parameter(before)
    keys = set()
    for key, group in _groups_by_parameter(after).items():
        if key in old and old[key].get("muon") != group.get("muon"):
            keys.add(key)
    return keys
