"""Find a run's tensors that are not finite.

record_bad_at_start(built)          # when a new run starts
find_bad_tensors(built)             # name -> ranks; later checks do not blame a step for those at the start
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from lockstep.checkpoint.layout import boxes_of
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.run_state import RunState
from lockstep.tensors import local_of, not_finite
from lockstep.training.state.parts import RunParts

__all__ = [
    "describe_ranks",
    "exempt_names",
    "find_bad_parameters",
    "find_bad_tensors",
    "record_bad_at_start",
]


def record_bad_at_start(built: RunParts) -> None:
    """Record which tensors are not finite when a new run starts. Collective then."""
    if built.state.not_finite_at_start is None:
        model = {}
        for name, tensor in built.model.state_dict().items():
            if isinstance(tensor, Tensor):
                model[f"model/{name}"] = tensor
        built.state.not_finite_at_start = sorted(_gather_bad(model | built.own_tensors, built.world))  # collective


def exempt_names(state: RunState, names: Iterable[str]) -> set[str]:
    """Return which of these names belong to tensors that need not be finite."""
    return {*(state.not_finite_at_start or ())} | {name for name in names if name.startswith("kept.")}


def find_bad_tensors(built: RunParts) -> dict[str, list[int]]:
    """Find tensors that should be finite and are not. Collective.

    Returns:
        name -> the ranks whose part is not finite.
    """
    return _find_bad(built.tensors(), built.state, built.world)  # collective


def find_bad_parameters(built: RunParts) -> dict[str, list[int]]:
    """Find parameters that should be finite and are not. Collective.

    Returns:
        name -> the ranks whose part is not finite.
    """
    parameters = {f"model/{name}": p for name, p in built.model.named_parameters()}
    return _find_bad(parameters, built.state, built.world)  # collective


def _find_bad(tensors: Mapping[str, Tensor], state: RunState, world: World) -> dict[str, list[int]]:
    exempt = exempt_names(state, tensors)
    return _gather_bad({name: tensor for name, tensor in tensors.items() if name not in exempt}, world)  # collective


def describe_ranks(bad: Mapping[str, list[int]], world: World) -> str:
    """Format the first tensor's ranks: ` on rank 1, rank 3`; "" for all."""
    ranks = next(iter(bad.values()))
    if len(ranks) == world.size:
        return ""
    return f" on {', '.join(map(rank_label, ranks))}"


def _gather_bad(tensors: Mapping[str, Tensor], world: World) -> dict[str, list[int]]:
    local = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta and boxes_of(tensor):
            local[name] = local_of(tensor)
    bad: dict[str, list[int]] = {}
    # A rank sees its own shards only, and every rank needs the list of all.
    for rank, names in enumerate(world.gather(not_finite(local))):
        for name in names:
            bad.setdefault(name, []).append(rank)
    return dict(sorted(bad.items()))
