"""A task that is not deterministic in one process: which operation first differs between two identical runs."""

import json
from pathlib import Path

from lockstep.diagnose.executor import Executor
from lockstep.diagnose.operations import Line, first_difference
from lockstep.diagnose.processes import RankFailed
from lockstep.diagnose.trial import Job
from lockstep.diagnose.values import Difference

__all__ = ["explained"]


def explained(found: Difference, job: Job, executor: Executor) -> str:
    """One line on a difference between two runs of the single process.

    Two more processes note every operation of the step in which the runs came apart. Where the data differ already, or
    the state after the resume, that is the answer.
    """
    head = f"the task is not deterministic in one process, so nothing else can be compared: step {found.step}"
    if found.stage in ("data", "optimizer state", "weights", "initial weights"):
        return f"{head}, {found.stage}, {found.where}: {found.text}"
    try:
        for name in ("one", "other"):
            executor.journal(job, found.step, name)
    except RankFailed as error:
        return f"{head}, {found.stage}, {found.where}; the operation could not be found: {error}"
    journals = [_read(job.folder / f"{name}.json") for name in ("one", "other")]
    difference = first_difference(*journals)
    if difference is None:
        return f"{head}, {found.stage}, {found.where}; two more runs agreed in all {len(journals[0])} operations of it"
    place, (module, operation, _), (_, other, _) = difference
    where = f"in {module}" if module else "in the loss or its gradient"
    if operation != other:
        return f"{head}: operation {place} is {operation} in one run and {other} in another, {where}"
    return f"{head}: the first operation that differs is {operation} (number {place} of the step), {where}"


def _read(path: Path) -> list[Line]:
    return [(module, operation, digests) for module, operation, digests in json.loads(path.read_text("utf-8"))]
