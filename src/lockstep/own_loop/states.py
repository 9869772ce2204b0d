"""Checkpoints of a loop of one's own: whatever has a `state_dict`, written whole or not at all, read by any world size.

save_state("out", world, 500, engine=engine, scheduler=scheduler, loader=loader)
done = load_state("out", world, engine=engine, scheduler=scheduler, loader=loader)      # 500, or 0 in an empty folder
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lockstep import checkpoint
from lockstep.checkpoint.check import contents
from lockstep.checkpoint.format import read_manifest
from lockstep.checkpoint.on_all_ranks import on_all_ranks
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, UsageError, said

__all__ = ["Stateful", "load_state", "save_state"]

_ENGINE = "engine"  # its names stay plain, as in a run's checkpoints: model/..., optimizer/...
_LOG = logging.getLogger("lockstep")


class Stateful(Protocol):
    """An engine, a loader, a scheduler, a module, a metric."""

    def state_dict(self) -> dict[str, Any]:
        """What is kept: tensors, numbers, strings, and lists and dicts of these."""

    def load_state_dict(self, state: Any) -> Any:
        """Takes it over."""


def save_state(folder: str | Path, world: World, step: int, /, *, keep: int = 2, **what: Stateful) -> Path:
    """Writes a checkpoint of everything that is named into `folder`/checkpoints. Collective.

    It is written under another name and renamed when all of it is on the disk, so a kill leaves the one before.

    Args:
        folder: on a file system that all ranks share.
        step: how many steps are done.
        keep: how many of the newest checkpoints stay.
        what: by a name of your own; `engine` is the one whose tensors keep their plain names, as `lockstep checkpoint`
            and `lockstep export` know them. All but engines must be the same on every rank.

    Raises:
        UsageError: a state that is not made of tensors, numbers, strings, lists and dicts.
        CheckpointError: the file system refused; or a state of the optimizer, or a parameter that has one, is not
            finite: `load_state` passes over such a checkpoint. On every rank; the older ones are as they were.
    """
    if step < 0 or keep < 1:
        raise UsageError(f"lockstep.save_state: step ({step}) must be at least 0 and keep ({keep}) at least 1")
    tensors, plain = dict[str, Tensor](), dict[str, Any]()
    for name, each in what.items():
        state = each.state_dict()
        if name == _ENGINE:
            tensors |= state
        else:
            plain[name] = _plain(state, f"{name}/", tensors)
    path = checkpoint.save(
        Path(folder),
        step,
        tensors,
        {"global_step": step, "own_loop": plain},
        world,
        engine="own loop",
        exempt=tensors.keys() - _updated(tensors),
    )  # collective
    if world.is_main:
        checkpoint.retain(Path(folder), last=keep, best=None, every=0)
    return path


def load_state(folder: str | Path, world: World, /, **what: Stateful) -> int:
    """Loads the newest whole checkpoint into everything that is named. Collective.

    Returns:
        how many steps were done; 0 where there is no checkpoint, and then nothing was changed.

    Raises:
        CheckpointError: none is whole, or the newest is of other things than these.
    """
    found = checkpoint.find_resume(Path(folder), world, lambda line: _LOG.warning(said(line)))  # collective
    if found is None:
        return 0
    path, state = found
    plain = state.get("own_loop")
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} is of a run of lockstep.train; give another folder")
    here, there = {*what} - {_ENGINE}, {*plain}
    if here != there:
        theirs, ours = ", ".join(sorted(there)) or "nothing", ", ".join(sorted(here)) or "nothing"
        raise CheckpointError(f"{path} holds {theirs} besides an engine, not {ours}; name the same things")
    tensors = on_all_ranks(world, lambda: _empty(path, tuple(f"{name}/" for name in plain)))  # collective
    engine = what[_ENGINE].state_dict() if _ENGINE in what else {}
    checkpoint.load(path, engine | tensors, world, verified=True)  # collective
    if _ENGINE in what:
        what[_ENGINE].load_state_dict(engine)
    for name, kept in plain.items():
        what[name].load_state_dict(_whole(kept, tensors))
        _set_rates(what[name])
    return int(state["global_step"])


def _updated(names: Iterable[str]) -> set[str]:
    """Of an engine's tensors the optimizer's states and the parameters that have one."""
    states = {name for name in names if name.startswith("optimizer/")}
    return states | {f"model/{name.removeprefix('optimizer/').rpartition('/')[0]}" for name in states}


def _set_rates(each: Stateful) -> None:
    """A scheduler's rates lie in the optimizer, which an engine's state does not have; most go on from them."""
    if isinstance(each, LRScheduler):
        for group, rate in zip(each.optimizer.param_groups, each.get_last_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _empty(path: Path, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """Tensors as the checkpoint has them under these names, to be filled."""
    stored = contents(path, read_manifest(path))
    return {
        name: torch.empty(each.shape, dtype=getattr(torch, each.dtype))
        for name, each in stored.items()
        if name.startswith(prefixes)
    }


def _plain(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, its tensors put into `tensors` under names that begin with `where`."""
    if isinstance(value, Tensor):
        tensors[where.rstrip("/")] = value
        return {"tensor": where.rstrip("/")}
    if isinstance(value, dict):
        return {"dict": [[_plain(k, where, {}), _plain(v, f"{where}{k}/", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_plain(each, f"{where}{index}/", tensors) for index, each in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"lockstep.save_state: {where.rstrip('/')} is a {type(value).__name__}, which cannot be kept without pickles; "
        "leave it out of that state_dict()"
    )


def _whole(kept: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(kept, dict):
        return kept
    ((kind, held),) = kept.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "float":
        return float(held)
    if kind == "dict":
        return {_whole(key, tensors): _whole(value, tensors) for key, value in held}
    found = [_whole(each, tensors) for each in held]
    return tuple(found) if kind == "tuple" else found
