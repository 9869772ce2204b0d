"""The page about the run, at its end: on rank 0, and never a reason for a run to fail. What is said in its place.

write_report(session, built, left)          # once the sinks and the timeline are closed
"""

import logging

from lockstep.report.page import write
from lockstep.run.best import shown
from lockstep.run.build import Built
from lockstep.run.session import Session

__all__ = ["nothing_left", "write_report"]

_LOG = logging.getLogger("lockstep")


def write_report(session: Session, built: Built, left: BaseException | None) -> None:
    """Writes report.html into the run's folder where the run has ended: finished, stopped, or failed on the way
    in a world of one.

    What was interrupted or preempted goes on, and has no time; where one of several ranks has failed the launcher ends
    the others, and starts again.

    Args:
        left: what ended it, if it was not its own end.
    """
    ended = session.status in ("finished", "stopped") and (left is None or isinstance(left, GeneratorExit))
    failed = isinstance(left, Exception) and built.world.size == 1 and session.global_step > 0
    if not (built.world.is_main and built.config.report and (ended or failed)):
        return
    try:
        write([built.folder.path], built.folder.path / "report.html")
    except Exception as error:
        _LOG.warning("report.html was not written: %s: %s", type(error).__name__, str(error).split("\n", 1)[0])


def nothing_left(built: Built) -> str:
    """Describe a run that is started again and has nothing left to do."""
    path, whole = built.folder.path, built.run_plan.step_plan.steps
    if built.start < built.last:
        return (
            f"{path} stopped early at step {built.start} of {whole}: the best was {shown(built.state)}; a larger "
            "--patience goes on"
        )
    if built.start < whole:
        return (
            f"{path} is at step {built.start} of {whole}, and --stop-at {built.last} ends it there; raise it to go on"
        )
    return (
        f"{path} is finished after {whole} steps; to train on: --extend-to with more steps, or another "
        f"--experiment-name with --init-from {path}"
    )
