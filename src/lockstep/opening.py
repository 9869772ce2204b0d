"""A run's folder and state at its begin: claimed, described, loaded.

claimed(parts)                      # rank 0 takes the folder
sinks = open_sinks(parts)           # rank 0: what stands in it, and where records go
load_state(parts)                   # the checkpoint to resume from, or the weights of --init-from
"""

import logging
import os
from pathlib import Path
from typing import Any

from lockstep import checkpoint, environment, options
from lockstep.errors import CheckpointError
from lockstep.parts import Parts
from lockstep.sinks import Sinks
from lockstep.sinks.console import Console
from lockstep.sinks.jsonl import JsonLines, read
from lockstep.sinks.remote import masked, remote_sinks
from lockstep.world import World, together

__all__ = ["claimed", "count_restarts", "load_state", "open_sinks"]

_LOG = logging.getLogger("lockstep")


def claimed(parts: Parts) -> None:
    """Rank 0 takes the folder's lock. Raises ConfigError as `RunFolder.claim` and `check_writable` do."""
    if parts.world.is_main:
        size = sum(p.numel() * p.element_size() for p in parts.model.parameters())
        parts.folder.check_writable(3 * size)  # the parameters and AdamW's two moments
        parts.folder.claim()


def count_restarts(state: dict[str, Any]) -> None:
    """`restarts` of the state: how often a launcher started this run again after a failure, in all its starts."""
    job, now = os.environ.get("TORCHELASTIC_RUN_ID", ""), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    known = state.get("job", {})
    before = known["restarts_before"] if job and known.get("id") == job else state.get("restarts", 0)
    state |= {"restarts": before + now, "job": {"id": job, "restarts_before": before}}


def open_sinks(parts: Parts) -> Sinks:
    """What stands in the folder besides checkpoints, and where records go. On rank 0."""
    config, folder = parts.config, parts.folder
    checkpoint.clean(folder.path)
    folder.forget_end()
    folder.write("config.toml", options.to_toml(config))
    environment.write(folder.environment, environment.describe() | {"sources": dict(parts.task.sources)})
    metrics = JsonLines(folder.metrics, parts.start, evaluated=not parts.state.get("evaluation_due"))
    earlier = read(folder.metrics) if parts.start else []
    remote = remote_sinks(config, folder.path, parts.start)
    sinks = Sinks([metrics, Console(parts.last, parts.start, parts.task.item_name, earlier), *remote])
    sinks.start(_described(parts))
    return sinks


def _described(parts: Parts) -> dict[str, Any]:
    """What a sink may keep of the run's configuration: no secret is in it."""
    config, samples = parts.config, parts.horizon.samples
    return masked(
        {
            "experiment": config.experiment_name,
            "args": options.flat(config),
            "training_data_size": samples,
            "num_batches": -(-samples // config.batch_size),
            "world_size": parts.world.size,
            "sources": dict(parts.task.sources),
        }
    )


def load_state(parts: Parts) -> None:
    """Loads the checkpoint to resume from, or the weights of --init-from. Collective.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    world = parts.world
    if parts.source:
        state = parts.tensors()
        checkpoint.load(parts.source, state, world, verified=True)  # collective
        parts.restore(state)
        _LOG.info("resumed from %s, step %d of %d", parts.source, parts.start, parts.horizon.cut.steps)
    elif parts.config.init_from:
        source, verified = _weights_in(Path(parts.config.init_from), world)
        state = parts.engine.state()
        weights = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
        checkpoint.load(source, weights, world, verified=verified)  # collective
        parts.engine.restore(state)
        _LOG.info("a new run with the weights of %s", source)


def _weights_in(path: Path, world: World) -> tuple[Path, bool]:
    """The checkpoint that --init-from names, and whether it was verified: itself, or the newest whole one of a run."""
    if any(world.gather(together(world, (path / "manifest.json").exists))):  # collective
        return path, False
    found = checkpoint.find_newest(path, world, _LOG.warning)  # collective
    if found is None:
        raise CheckpointError(f"--init-from {path}: no whole checkpoint there; give a run's folder or a checkpoint's")
    return found, True
