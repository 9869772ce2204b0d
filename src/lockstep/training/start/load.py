"""Load the state of a run, by its kind: a resume, --init-from, weights of another library, a rank that joins.

check_init_from(built)              # before anything is written
load_state(built)                   # the checkpoint to resume from, or the weights of --init-from
broadcast_state(state, sources, world)          # from the ranks of a run in progress
load_broadcast(built, state, done)
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint.check import read_contents
from lockstep.checkpoint.foreign import fill, is_foreign, match_names, open_foreign
from lockstep.checkpoint.format import read_manifest
from lockstep.checkpoint.read import check_fits, evaluated_of, list_names
from lockstep.config.fields import is_url
from lockstep.config.schema import Config
from lockstep.distributed import collectives
from lockstep.distributed.agreement import LONG, on_all_ranks
from lockstep.distributed.world import World
from lockstep.engines.ema import without_average
from lockstep.engines.registry import load_weights
from lockstep.errors import CheckpointError, ConfigError
from lockstep.tensors import as_bytes, from_bytes, local_of
from lockstep.training.start.init_drop import InitDrop, init_drop
from lockstep.training.start.weights import find_weights
from lockstep.training.state.finite import record_bad_at_start
from lockstep.training.state.parts import RunParts, notify
from lockstep.training.state.trained_set import restore_trained_set

__all__ = [
    "broadcast_state",
    "check_init_from",
    "load_broadcast",
    "load_state",
]

_LOG = logging.getLogger("lockstep")

_GROUP = "model/"


def load_state(built: RunParts) -> None:
    """Load the checkpoint to resume from, or the weights of --init-from. Collective.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    if built.setup.source:
        _load_resumed(built, built.setup.source)  # collective
    elif built.config.init_from:
        _load_init_from(built)  # collective
    restore_trained_set(built.model, built.state)
    built.restore_groups()
    record_bad_at_start(built)  # collective in a new run


# --- a resume


def _load_resumed(built: RunParts, source: Path) -> None:
    """Load the checkpoint that the run resumes from. Collective."""
    state = built.tensors()
    # --resume-anyway has added the average, which starts at the weights.
    if not built.state.plan.get("optim.ema"):
        state = without_average(state)
    checkpoint.load(source, state, built.world, verified=True, leave=built.is_elsewhere)  # collective
    built.load_state_dict(state)
    _LOG.info("resumed from %s, step %d of %d", source, built.start, built.run_plan.step_plan.steps)


# --- --init-from: a run of lockstep, or weights of another library


def check_init_from(built: RunParts) -> None:
    """Check the weights of --init-from before anything is written. Collective.

    Raises:
        ConfigError: there is no such file or folder, or --init-drop matches nothing.
        CheckpointError: the weights cannot be read, or do not fit.
    """
    name = built.config.init_from
    world = built.world
    if built.setup.source:
        return
    is_given = is_url(name) or Path(name).expanduser().exists()
    # Some ranks may not see the file, so all of them decide together.
    if any(world.gather(on_all_ranks(world, lambda: _check_foreign(built, is_given)))):
        return
    built.init_source = source, _ = find_weights(built.config, world, notify(world))  # collective
    on_all_ranks(world, lambda: _check_run(built, source), signs=LONG)  # collective


def _load_init_from(built: RunParts) -> None:
    """Load the weights of --init-from into a new run. Collective."""
    drop = init_drop(built.config, built.task, built.pipeline)
    # A path that one rank sees decides for all, as in the check.
    is_other = any(built.world.gather(_foreign_path(built.config) is not None))
    source = None if is_other else built.init_source or find_weights(built.config, built.world, _LOG.warning)
    state = built.engine.state_dict()  # collective under zero
    left = _describe_left(drop, state)
    if source is None:
        origin = _fill_from_library(built, state, drop)  # collective
        is_filled = True
    else:
        origin = str(source[0])
        is_filled = _fill_from_run(built, source, state, drop)  # collective
    if is_filled:
        load_weights(built.engine, without_average(state))
    _LOG.info("a new run with the weights of %s%s", origin, left)


def _check_run(built: RunParts, source: Path) -> None:
    """Check that a checkpoint of lockstep fits the model.

    Raises:
        CheckpointError: names the tensors that do not, and the way out.
    """
    drop = init_drop(built.config, built.task, built.pipeline)
    state = built.engine.state_dict()
    contents = read_contents(source, read_manifest(source))
    stored = [name.removeprefix(_GROUP) for name in contents if name.startswith(_GROUP)]
    drop.check(_model_tensors(state), stored)
    wanted = _tensors_to_load(built, source, state, drop)
    check_fits(f"--init-from {built.config.init_from}", wanted, contents, partial(_is_left, drop))


def _fill_from_run(built: RunParts, source: tuple[Path, bool], state: Mapping[str, Tensor], drop: InitDrop) -> bool:
    """Fill the state with the weights of a checkpoint of lockstep. Collective.

    Args:
        source: the checkpoint, and whether it was verified.

    Returns:
        Whether there was anything to fill.
    """
    path, verified = source
    weights = on_all_ranks(built.world, lambda: _tensors_to_load(built, path, state, drop))  # collective
    if weights:
        checkpoint.load(path, weights, built.world, verified=verified, leave=partial(_is_left, drop))  # collective
        _load_evaluated(built.world, path, weights)
    return bool(weights)


def _tensors_to_load(built: RunParts, source: Path, state: Mapping[str, Tensor], drop: InitDrop) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of lockstep fills.

    {} for the base of adapters, which is loaded already.

    Raises:
        CheckpointError: it has only adapters, and the run has none.
    """
    has_adapters = checkpoint.read_run_state(source).lora is not None
    if has_adapters and not built.setup.base_names:
        raise CheckpointError(
            f"--init-from {built.config.init_from} has only adapters: give --lora.rank too, or the folder that "
            "`lockstep export --format hf --merge` makes of them"
        )
    if built.setup.base_names and not has_adapters:
        return {}
    names = []
    for name in state:
        if name.startswith(_GROUP) and name not in built.setup.base_names:
            names.append(name)
    return {name: state[name] for name in names if not drop.matches(name.removeprefix(_GROUP))}


def _load_evaluated(world: World, source: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill the weights with an optimizer's weights for evaluation. Collective."""
    replaced = on_all_ranks(world, lambda: evaluated_of(read_contents(source, read_manifest(source))))
    tensors = {stored: weights[name] for name, stored in replaced.items() if name in weights}
    if tensors:
        wanted = frozenset(tensors)
        checkpoint.load(source, tensors, world, verified=True, leave=lambda name: name not in wanted)  # collective


def _foreign_path(config: Config) -> Path | None:
    """Return the path of --init-from if another library wrote it."""
    path = Path(config.init_from).expanduser()
    if not is_url(config.init_from) and is_foreign(path):
        return path
    return None


def _check_foreign(built: RunParts, is_given: bool) -> bool:
    """Check weights of another library, and return whether they are such."""
    if not is_given:
        raise ConfigError(
            f"--init-from {built.config.init_from} does not exist; give a run's folder, a checkpoint, or a file of "
            "weights"
        )
    path = _foreign_path(built.config)
    if path is None:
        return False
    drop = init_drop(built.config, built.task, built.pipeline)
    model = _model_tensors(built.engine.state_dict())
    with open_foreign(path) as source:
        match = match_names(source, model, _ties_of(built.model), drop.matches)
        drop.check(model, [name.removeprefix(match.prefix) for name in source.tensors])
    return True


def _fill_from_library(built: RunParts, state: Mapping[str, Tensor], drop: InitDrop) -> str:
    """Fill the state with weights that another library saved, each rank its part. Collective.

    Returns:
        The file, its kind and how its names matched.
    """
    path = Path(built.config.init_from).expanduser()
    model = _model_tensors(state)

    def fill_model() -> str:
        with open_foreign(path) as source:
            match = match_names(source, model, _ties_of(built.model), drop.matches)
            fill(source, match, model)
            return f"{source.kind}: {match}"

    return f"{path}, {on_all_ranks(built.world, fill_model, signs=LONG)}"  # collective


def _ties_of(model: nn.Module) -> dict[str, str]:
    """Return the second names of the model's tied tensors, each with the first."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first_names: dict[int, str] = {}
    names = {name: first_names.setdefault(id(tensor), name) for name, tensor in named}
    return {name: original for name, original in names.items() if name != original}


def _is_left(drop: InitDrop, name: str) -> bool:
    return drop.matches(name.removeprefix(_GROUP))


def _model_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_GROUP): tensor for name, tensor in state.items() if name.startswith(_GROUP)}


def _describe_left(drop: InitDrop, state: Mapping[str, Tensor]) -> str:
    """Describe the tensors that keep their initial values; "" for none."""
    names = [name for name in _model_tensors(state) if drop.matches(name)]
    if names:
        return f"; {drop.origin} leaves {len(names)} tensors as initialised: {list_names(names)}"
    return ""


# --- a rank that joins, and ranks that continue together

# Bytes of one broadcast.
_BUCKET_BYTES = 64 << 20


def broadcast_state(state: dict[str, Tensor], sources: list[int], world: World) -> dict[str, Tensor]:
    """Broadcast each part of the state from one rank, into existing tensors. Collective.

    Tensors are sent as bytes, many in a bucket: most are small, each broadcast has a latency, and gloo does not support
    every dtype. Of distributed tensors this rank's part is sent.

    Args:
        sources: the rank of each part; rank r has part r % len(sources).
    """
    size = len(sources)
    source = sources[world.rank % size]
    # The ranks with the same part of the state form a group. Collective.
    if size > 1:
        group = world.new_group([*range(world.rank % size, world.size, size)])
    else:
        group = None
    # The dtype is sent without its prefix "torch.".
    local_layout = [[name, list(local_of(tensor).shape), str(tensor.dtype)[6:]] for name, tensor in state.items()]
    # From the source's layout a rank knows which tensors to receive.
    layout = world.gather(local_layout if world.rank in sources else None)[source]
    received = dict[str, Tensor]()
    bucket = list[Tensor]()
    nbytes = 0
    for name, shape, dtype in layout:
        received[name] = state[name] if name in state else torch.empty(shape, dtype=getattr(torch, dtype))
        tensor = local_of(received[name])
        if bucket and nbytes + tensor.nbytes > _BUCKET_BYTES:
            _broadcast(bucket, source, world, group)
            bucket = []
            nbytes = 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        _broadcast(bucket, source, world, group)
    return received


@torch.no_grad()
def _broadcast(tensors: list[Tensor], source: int, world: World, group: dist.ProcessGroup | None) -> None:
    """Broadcast the tensors of rank `source` in its group. Collective."""
    if world.rank == source:
        flat = torch.cat([as_bytes(tensor) for tensor in tensors])
    else:
        flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    # All ranks with this part of the state take part.
    collectives.broadcast(flat, src=source, group=group)
    if world.rank != source:
        parts = flat.split_with_sizes([tensor.nbytes for tensor in tensors])
        for tensor, piece in zip(tensors, parts, strict=True):
            tensor.copy_(from_bytes(piece, tensor.dtype, tensor.shape))


def load_broadcast(built: RunParts, state: dict[str, Tensor], done: int) -> None:
    """Load the state of ranks that have trained `done` steps, as `broadcast_state` returned it. Collective."""
    # Most tensors have their values already.
    built.load_state_dict(state)
    restore_trained_set(built.model, built.state)
    optimizer = built.groups.optimizer
    if done == 0 and optimizer is not None:
        # Before step 1 these are only buffers to load into. The first step makes the states.
        optimizer.state.clear()
    built.restore_groups()
