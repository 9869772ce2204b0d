"""Lock the run's folder, write metadata, open the sinks, load the checkpoint.

    lock_folder(built)                  # on rank 0
    sinks = open_sinks(built)           # on rank 0; cleans the folder and writes metadata
    load_state(built)                   # the checkpoint to resume from, or the weights of --init-from

Tensors that are not finite when a run starts are recorded, so that later checks do not blame a step for them.
"""

import logging
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.files import await_all_ranks, await_results
from lockstep.checkpoint.layout import block_of
from lockstep.checkpoint.upload import Uploader
from lockstep.config import cli
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.ema import without_average
from lockstep.errors import ConfigError
from lockstep.files import clean, retry_io, storage_error
from lockstep.logging import Sinks
from lockstep.logging.console import Console
from lockstep.logging.jsonl import JsonLines, read
from lockstep.logging.trackers import masked, remote_sinks
from lockstep.run_state import LauncherState, RunState
from lockstep.tensors import local_of, not_finite
from lockstep.training import run_dir
from lockstep.training.init_weights import load_init_from
from lockstep.training.parts import RunParts, notify
from lockstep.training.run_dir import describe_owner, has_ended
from lockstep.training.selection import abbreviate_best
from lockstep.training.status import RunOutputs
from lockstep.training.trainable import restore_trained_set

__all__ = [
    "close_uploads",
    "count_restarts",
    "describe_ranks",
    "exempt_names",
    "find_bad_parameters",
    "find_bad_tensors",
    "load_state",
    "lock_folder",
    "open_sinks",
    "open_uploads",
    "settle_uploads",
    "upload_rest",
]


# --- tensors that are not finite


def _record_bad_at_start(built: RunParts) -> None:
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
    return _find_bad(built, built.tensors())  # collective


def find_bad_parameters(built: RunParts) -> dict[str, list[int]]:
    """Find parameters that should be finite and are not. Collective.

    Returns:
        name -> the ranks whose part is not finite.
    """
    return _find_bad(built, {f"model/{name}": p for name, p in built.model.named_parameters()})  # collective


def _find_bad(built: RunParts, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    exempt = exempt_names(built.state, tensors)
    return _gather_bad(
        {name: tensor for name, tensor in tensors.items() if name not in exempt}, built.world
    )  # collective


def describe_ranks(bad: Mapping[str, list[int]], world: World) -> str:
    """Format the first tensor's ranks: ` on rank 1, rank 3`; "" for all."""
    ranks = next(iter(bad.values()))
    if len(ranks) == world.size:
        return ""
    return f" on {', '.join(map(rank_label, ranks))}"


def _gather_bad(tensors: Mapping[str, Tensor], world: World) -> dict[str, list[int]]:
    local = {
        name: local_of(tensor)
        for name, tensor in tensors.items()
        if not tensor.is_meta and block_of(tensor) is not None
    }
    bad: dict[str, list[int]] = {}
    # A rank sees its own shards only, and every rank needs the list of all.
    for rank, names in enumerate(world.gather(not_finite(local))):
        for name in names:
            bad.setdefault(name, []).append(rank)
    return dict(sorted(bad.items()))


# --- folder, sinks, checkpoint

_LOG = logging.getLogger("lockstep")


def lock_folder(built: RunParts) -> None:
    """Lock the run's folder if it is writable. On each folder's first rank.

    Raises:
        ConfigError: as `RunFolder.claim` and `check_writable`.
    """
    if built.world.leads_folder:
        parameters = []
        for name, p in built.model.named_parameters():
            if f"model/{name}" not in built.base_names:
                parameters.append(p)
        size = sum(p.numel() * p.element_size() for p in parameters)
        saves = built.config.checkpoint.mode != "none"
        # Parameters, AdamW's two moments, and maybe the average.
        built.folder.check_writable(saves * (3 + bool(built.config.optim.ema)) * size)
        built.folder.claim()
        # On rank 0 `open_sinks` cleans the folder.
        if not built.world.is_main:
            checkpoint.clean(built.folder.path)


def open_uploads(outputs: RunOutputs, built: RunParts, *, force: bool = False) -> None:
    """Start uploading to the run's URL, if it has one. Collective.

    One thread uploads each local folder.

    Args:
        force: this process continues for the rank that uploaded.

    Raises:
        ConfigError: another run uploads there.
        StorageError: the store does not answer.
    """
    world = built.world
    remote = built.remote
    if remote is None:
        return
    if world.leads_folder and outputs.uploader is None:
        options = built.config.checkpoint
        # A folder shows no progress within a large file, so the wait has no limit.
        wait = math.inf if remote.is_folder else options.upload_wait
        outputs.uploader = Uploader(remote, built.folder.path, keep=options.keep, every=options.every, wait=wait)
    uploader = outputs.uploader

    def claim() -> str:
        if uploader is None or not world.is_main:
            return ""
        if force or not uploader.is_running:
            uploader.claim(describe_owner(), has_ended, notify(world), force=force)
        return uploader.token

    try:
        token = await_results(world, claim)[0]  # collective
    except BaseException:
        if uploader and not uploader.is_running:
            outputs.uploader = None
        raise
    if uploader:
        uploader.part = f"rank-{world.rank:05d}" if world.leads else ""
        if not world.is_main:
            uploader.follow(token)
        uploader.submit(built.state.selection.best.step if built.state.selection.best else None)


def upload_rest(outputs: RunOutputs, built: RunParts) -> None:
    """Upload what an earlier start of a run that is over could not. Collective."""
    open_uploads(outputs, built)
    if missing := settle_uploads(outputs.uploader, built):
        _LOG.warning("%s", missing)
    await_all_ranks(built.world, lambda: close_uploads(outputs, None))  # collective


def settle_uploads(uploader: Uploader | None, built: RunParts) -> str:
    """Wait for all uploads; return what is not uploaded, "" for nothing. Collective."""
    if not built.remote:
        return ""
    world = built.world
    settle = uploader.settle if uploader else str
    # Rank 0 goes first, to remove what is in the way of the others, and last, to complete their checkpoints.
    if world.leads:
        await_results(world, settle)  # collective
        await_results(world, lambda: "" if world.is_main else settle())  # collective
    missing: str = await_results(world, lambda: settle() if world.is_main else "")[0]  # collective
    return missing


def close_uploads(outputs: RunOutputs, error: BaseException | None) -> None:
    """Upload the last records, and release the run's URL.

    Args:
        error: the exception that ended the run; None: there was none.
    """
    uploader = outputs.uploader
    outputs.uploader = None
    if uploader:
        uploader.close(failed=error is not None and not isinstance(error, GeneratorExit))


def count_restarts(state: RunState) -> None:
    """Count the launcher's restarts after failures, over all starts, in `state.restarts`."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    earlier = state.job
    if job and earlier and earlier.id == job:
        before = earlier.restarts_before
    else:
        before = state.restarts or 0
    state.restarts = before + count
    state.job = LauncherState(job, before)


def open_sinks(built: RunParts) -> Sinks:
    """Clean the run's folder, write its metadata, and open the sinks. On rank 0.

    Raises:
        ConfigError: a file of the folder cannot be written or read.
        StorageError: the storage does not answer.
    """
    try:
        return _make_sinks(built)
    except OSError as error:
        raise storage_error(error) or ConfigError(
            f"--save-dir: {error.filename or built.folder.path}: {error.strerror or error}"
        ) from error


def _make_sinks(built: RunParts) -> Sinks:
    config = built.config
    folder = built.folder
    checkpoint.clean(folder.path)
    for path in (folder.path, folder.checkpoints):
        clean(path)
    folder.remove_end()
    run_id = built.state.run_id or ""
    folder.write_id(run_id)
    folder.write("config.toml", cli.to_toml(config, own_task=built.own_task))
    run_dir.write_description(folder.environment, run_dir.describe_process() | {"sources": dict(built.task.sources)})
    evaluated = not built.state.evaluation_due
    metrics = retry_io(lambda: JsonLines(folder.metrics, built.start, evaluated=evaluated))
    earlier = retry_io(lambda: read(folder.metrics)) if built.start else []
    remote = remote_sinks(config, folder.path, built.start, run_id, evaluated=evaluated)
    sinks = Sinks([metrics, Console(built.last_step, built.start, built.task.item_name, earlier), *remote])
    sinks.start(_run_metadata(built))
    sinks.best(abbreviate_best(built.state.selection.best))
    return sinks


def _run_metadata(built: RunParts) -> dict[str, Any]:
    """Return the run's configuration for the sinks, without secrets."""
    config = built.config
    samples = built.run_plan.samples
    return masked(
        {
            "experiment": config.experiment_name,
            "args": built.arguments,
            "training_data_size": built.run_plan.dataset_samples,
            "num_batches": -(-samples // config.batch_size),
            "world_size": built.world.size,
            "sources": dict(built.task.sources),
        }
    )


def load_state(built: RunParts) -> None:
    """Load the checkpoint to resume from, or the weights of --init-from. Collective.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    world = built.world
    if built.source:
        state = built.tensors()
        # --resume-anyway has added the average, which starts at the weights.
        if not built.state.plan.get("optim.ema"):
            state = without_average(state)
        checkpoint.load(built.source, state, world, verified=True)  # collective
        built.load_state_dict(state)
        _LOG.info("resumed from %s, step %d of %d", built.source, built.start, built.run_plan.step_plan.steps)
    elif built.config.init_from:
        load_init_from(built)  # collective
    restore_trained_set(built.model, built.state)
    built.restore_groups()
    _record_bad_at_start(built)  # collective in a new run
