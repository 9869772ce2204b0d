"""What a run trains, where that changes on the way: unfrozen and frozen parameters, groups that were added.

    begin_as_made(model, state)         # before an engine is made: what the checkpoint's tensors fit
    train_now(model, state)             # once they are loaded: what is trained now
    note(engine, state)                 # before the state is kept

`state["trained"]` goes with every checkpoint from the first change on, see `TrainedSet`. The checkpoint of a step is
older than the body of the loop after that step, which may change the set: `checkpoints/trained.json` has what these
bodies changed, by step.
"""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.make import trained_set
from lockstep.engines.shared.remade import TrainedSet, set_trained
from lockstep.engines.shared.unused import listed
from lockstep.errors import ResumeError
from lockstep.run.folder import RunFolder

__all__ = ["begin_as_made", "check_held", "known_set", "note", "note_body", "overlay", "train_now", "trained_digest"]

_KEY = "trained"


def known_set(state: Mapping[str, Any]) -> TrainedSet | None:
    """The set of a run's state; None where it never changed."""
    found = state.get(_KEY)
    return TrainedSet(found["made"], found["now"], found["since"]) if found else None


def trained_digest(state: Mapping[str, Any]) -> int:
    """Return a number that tells one trained set from another; 0 where the run's never changed."""
    found = state.get(_KEY)
    return zlib.crc32("\n".join(sorted(found["now"])).encode()) if found else 0


def note(engine: Engine, state: dict[str, Any]) -> None:
    """Puts what is trained now into the state, where it ever changed."""
    found = trained_set(engine)
    if found is not None:
        state[_KEY] = found._asdict()


def begin_as_made(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Has the model train what the checkpoint's engine was made for.

    Returns:
        The names of what it would not train by itself.
    """
    known = known_set(state)
    if known is None:
        return []
    first = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    set_trained(model, {*known.made})
    return [name for name in known.made if name not in first]


def check_held(model: nn.Module, optimizer: Optimizer | None, names: Collection[str]) -> None:
    """Raises ResumeError where the optimizer has not all of these parameters, which were unfrozen on the way."""
    held = {id(p) for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]}
    named = dict(model.named_parameters())
    left = [name for name in names if name in named and id(named[name]) not in held]
    if left:
        raise ResumeError(
            f"the run unfroze {listed(left)} on the way, and the task's `optimizer` has these in no group: let it take "
            "whatever requires gradients"
        )


def train_now(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Has the model train what the run trained when its state was kept."""
    known = known_set(state)
    if known is not None:
        set_trained(model, {*known.now})


def note_body(engine: Engine, state: dict[str, Any], folder: RunFolder, done: int, world: World) -> None:
    """Notes what the body of the loop changed after the checkpoint of `done` steps was begun."""
    found = trained_set(engine)
    if found is None or found._asdict() == state.get(_KEY):
        return
    state[_KEY] = found._asdict()
    if world.is_main:
        folder.write_trained({**folder.read_trained(), str(done): state[_KEY]})


def overlay(folder: RunFolder, state: dict[str, Any], world: World) -> None:
    """Puts what the body after the checkpoint's step changed into the checkpoint's state. Collective."""
    found = world.gather(folder.read_trained() if world.is_main else {})[0]  # collective
    changed = found.get(str(state.get("global_step", 0)))
    if changed:
        state[_KEY] = changed
