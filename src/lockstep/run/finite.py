"""Which of a run's tensors must stay finite, and which are not.

    note_first(built)                       # once the run's tensors are loaded
    saver.write(..., exempt=exempt_names(built.state, tensors))
    found = not_finite_now(built)           # {"model/0.weight": [1]}: on rank 1
    found = bad_parameters(built)        # the same, of parameters alone

A tensor that held NaN or an infinity when the run began (a mask of -inf, a minimum that begins with inf) may hold them
for ever, and so may what `run.keep` keeps. Everything else that a checkpoint has must be finite: parameters, buffers,
optimizer states, averages, the task's own tensors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lockstep.checkpoint.layout import block_of
from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World
from lockstep.run.build import Built
from lockstep.tensors import local_of, not_finite

__all__ = ["bad_parameters", "exempt_names", "not_finite_now", "note_first", "where_not_finite"]

_KEY = "not_finite_at_start"


def note_first(built: Built) -> None:
    """Note in the run's state which tensors are not finite when it begins, or was first resumed. Collective then."""
    if _KEY not in built.state:
        model = {f"model/{name}": each for name, each in built.model.state_dict().items() if isinstance(each, Tensor)}
        built.state[_KEY] = sorted(_gather(model | built.own, built.world))  # collective


def exempt_names(state: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Of these names those of tensors that need not be finite."""
    return {*state.get(_KEY, ())} | {name for name in names if name.startswith("kept.")}


def not_finite_now(built: Built) -> dict[str, list[int]]:
    """Find the tensors that are not finite and should be: name -> the ranks that hold such a part. Collective."""
    return _look(built, built.tensors())  # collective


def bad_parameters(built: Built) -> dict[str, list[int]]:
    """Find the parameters that are not finite: only an update, or the caller, writes them. Collective."""
    return _look(built, {f"model/{name}": each for name, each in built.model.named_parameters()})  # collective


def _look(built: Built, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    exempt = exempt_names(built.state, tensors)
    return _gather({name: each for name, each in tensors.items() if name not in exempt}, built.world)  # collective


def where_not_finite(found: Mapping[str, list[int]], world: World) -> str:
    """Say on which ranks the first of these tensors is not finite; "" where it is all of them."""
    ranks = next(iter(found.values()))
    return "" if len(ranks) == world.size else f" on {', '.join(map(rank_label, ranks))}"


def _gather(tensors: Mapping[str, Tensor], world: World) -> dict[str, list[int]]:
    local = {name: local_of(each) for name, each in tensors.items() if not each.is_meta and block_of(each) is not None}
    found: dict[str, list[int]] = {}
    for rank, names in enumerate(world.gather(not_finite(local))):  # collective
        for name in names:
            found.setdefault(name, []).append(rank)
    return dict(sorted(found.items()))
