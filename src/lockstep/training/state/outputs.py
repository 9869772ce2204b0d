"""Hold the sinks, the timeline and the uploader of a run, and upload its folder.

outputs = RunOutputs()
open_uploads(outputs, built)        # to the run's URL, if it has one
settle_uploads(outputs.uploader, built)
close_uploads(outputs, error)
"""

import logging
import math
from dataclasses import dataclass, field

from lockstep.checkpoint.upload import Uploader
from lockstep.distributed.agreement import LONG, gather_results, on_all_ranks
from lockstep.logging import Sinks
from lockstep.timeline import Timeline
from lockstep.training.state.parts import RunParts, notify
from lockstep.training.state.run_dir import describe_owner, has_ended

__all__ = [
    "RunOutputs",
    "close_uploads",
    "open_uploads",
    "settle_uploads",
    "upload_rest",
]

_LOG = logging.getLogger("lockstep")


@dataclass
class RunOutputs:
    """Outputs of a run: sinks, timeline and uploads.

    Attributes:
        sinks: of the metrics, on rank 0.
        timeline: records where the time goes.
        uploader: to the run's object store, on the first rank of each folder; it outlives a rollback.
    """

    sinks: Sinks = field(default_factory=lambda: Sinks([]))
    timeline: Timeline = field(default_factory=Timeline)
    uploader: Uploader | None = None


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
    remote = built.setup.remote
    if remote is None:
        return
    if world.leads_folder and outputs.uploader is None:
        options = built.config.checkpoint
        # A folder shows no progress within a large file, so the wait has no limit.
        wait = math.inf if remote.is_folder else options.upload_wait
        outputs.uploader = Uploader(remote, built.setup.folder.path, keep=options.keep, every=options.every, wait=wait)
    uploader = outputs.uploader

    def claim() -> str:
        if uploader is None or not world.is_main:
            return ""
        if force or not uploader.is_running:
            uploader.claim(describe_owner(), has_ended, notify(world), force=force)
        return uploader.token

    try:
        token = gather_results(world, claim, signs=LONG)[0]  # collective
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
    on_all_ranks(built.world, lambda: close_uploads(outputs, None), signs=LONG)  # collective


def settle_uploads(uploader: Uploader | None, built: RunParts) -> str:
    """Wait for all uploads; return what is not uploaded, "" for nothing. Collective."""
    if not built.setup.remote:
        return ""
    world = built.world
    settle = uploader.settle if uploader else str
    # Rank 0 goes first, to remove what is in the way of the others, and last, to complete their checkpoints.
    if world.leads:
        gather_results(world, settle, signs=LONG)  # collective
        gather_results(world, lambda: "" if world.is_main else settle(), signs=LONG)  # collective
    missing: str = gather_results(world, lambda: settle() if world.is_main else "", signs=LONG)[0]  # collective
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
