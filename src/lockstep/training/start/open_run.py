"""Lock the run's folder, write metadata, open the sinks, and log the lines at the start.

lock_folder(built)                  # on rank 0
sinks = open_sinks(built)           # on rank 0; cleans the folder and writes metadata
"""

import logging
import os
from typing import Any

from lockstep import checkpoint
from lockstep.config import cli
from lockstep.errors import ConfigError
from lockstep.files import clean, retry_io, storage_error
from lockstep.logging import Sinks
from lockstep.logging.console import Console
from lockstep.logging.jsonl import JsonLines, read
from lockstep.logging.trackers import mask_values, remote_sinks
from lockstep.run_state import LauncherState, RunState
from lockstep.task import has_own
from lockstep.training.start import resume
from lockstep.training.start.consistency import log_ranks
from lockstep.training.start.defaults import (
    describe_data,
    describe_loss,
    describe_optimizer,
    describe_run,
    plan_warnings,
)
from lockstep.training.state import run_dir
from lockstep.training.state.parts import RunParts
from lockstep.training.state.selection import abbreviate_best

__all__ = [
    "announce",
    "count_restarts",
    "lock_folder",
    "open_sinks",
]

_LOG = logging.getLogger("lockstep")


def lock_folder(built: RunParts) -> None:
    """Lock the run's folder if it is writable. On each folder's first rank.

    Raises:
        ConfigError: as `RunFolder.claim` and `check_writable`.
    """
    if built.world.leads_folder:
        parameters = []
        for name, p in built.model.named_parameters():
            if f"model/{name}" not in built.setup.base_names:
                parameters.append(p)
        size = sum(p.numel() * p.element_size() for p in parameters)
        saves = built.config.checkpoint.mode != "none"
        # Parameters, AdamW's two moments, and maybe the average.
        built.setup.folder.check_writable(saves * (3 + bool(built.config.optim.ema)) * size)
        built.setup.folder.claim()
        # On rank 0 `open_sinks` cleans the folder.
        if not built.world.is_main:
            checkpoint.clean(built.setup.folder.path)


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
            f"--save-dir: {error.filename or built.setup.folder.path}: {error.strerror or error}"
        ) from error


def _make_sinks(built: RunParts) -> Sinks:
    config = built.config
    folder = built.setup.folder
    checkpoint.clean(folder.path)
    for path in (folder.path, folder.checkpoints):
        clean(path)
    folder.remove_end()
    run_id = built.state.run_id or ""
    folder.write_id(run_id)
    folder.write("config.toml", cli.to_toml(config, own_task=built.setup.own_task))
    run_dir.write_description(folder.environment, run_dir.describe_process() | {"sources": dict(built.task.sources)})
    evaluated = not built.state.evaluation_due
    metrics = retry_io(lambda: JsonLines(folder.metrics, built.start, evaluated=evaluated))
    earlier = retry_io(lambda: read(folder.metrics)) if built.start else []
    remote = remote_sinks(config, folder.path, built.start, run_id, evaluated=evaluated)
    planned = built.run_plan.step_plan.steps
    console = Console(built.last_step, built.start, built.task.item_name, earlier, planned=planned)
    sinks = Sinks([metrics, console, *remote])
    sinks.start(_run_metadata(built))
    sinks.best(abbreviate_best(built.state.selection.best))
    return sinks


def _run_metadata(built: RunParts) -> dict[str, Any]:
    """Return the run's configuration for the sinks, without secrets."""
    config = built.config
    samples = built.run_plan.samples
    return mask_values(
        {
            "experiment": config.experiment_name,
            "args": built.arguments,
            "training_data_size": built.run_plan.dataset_samples,
            "num_batches": -(-samples // config.batch_size),
            "world_size": built.world.size,
            "sources": dict(built.task.sources),
        }
    )


def announce(built: RunParts) -> None:
    """Log each rank's device, the run in one line, the optimizer and warnings."""
    if built.world.is_main:
        log_ranks(built.setup.places)
    if line := describe_data(built.run_plan, built.task.data_facts):
        _LOG.info(line)
    has_optimizer = has_own(built.task, "optimizer")
    _LOG.info(describe_run(built.run_plan, built.world.size, own_optimizer=has_optimizer))
    if line := describe_loss(built.run_plan, built.task):
        _LOG.info(line)
    for line in built.batches.describe():
        _LOG.info(line)
    if not has_optimizer:
        _LOG.info(describe_optimizer(built.run_plan), extra={"only_file": True})
    if built.config.checkpoint.mode == "none" and built.world.is_main:
        _LOG.warning("--checkpoint.mode none: no checkpoint is written, so these steps cannot be resumed or loaded")
    if built.setup.remote:
        if built.world.leads:
            nodes = f"; each of {len(set(built.world.leads))} nodes has its own"
        else:
            nodes = ""
        _LOG.info("the run's folder is %s, its store %s%s", built.setup.folder.path, built.setup.remote.url, nodes)
    factor_now = built.lr_factor(built.start)
    if factor_now is not None and (
        line := resume.describe_extension(built.state, built.run_plan.step_plan.steps, built.lr * factor_now)
    ):
        _LOG.info(line)
    run = built.run_plan, built.model, built.task.data_facts, built.world.size
    for line in plan_warnings(*run) if built.world.is_main else ():
        _LOG.warning(line)
