"""Run the checks in order on every rank, and combine the results on rank 0.

report = examine(place, say=print)          # rank 0 prints each line as it comes
report.failed                               # the names of the failed checks
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.diagnose.doctor import differences, gpus, group, machine, network, task
from lockstep.diagnose.doctor import differences as variables
from lockstep.diagnose.doctor import machine as disk
from lockstep.diagnose.doctor import network as speed
from lockstep.diagnose.doctor.board import Board
from lockstep.diagnose.doctor.finding import FAIL, OK, SKIP, WARN, Check, CheckContext, CheckResult, Finding, skip
from lockstep.diagnose.doctor.group import Met, meet, surplus
from lockstep.diagnose.doctor.machine import within
from lockstep.errors import LockstepError
from lockstep.training.step.guards import format_ranges

__all__ = [
    "DoctorReport",
    "Line",
    "examine",
]


# Seconds for instant checks: a machine may be busy.
_INSTANT = 8.0
_LAUNCHER = Check("variables", variables.launcher, _INSTANT)

_NETWORK_REMEDY = "look at the network between the nodes: interfaces, firewall, `ip -s link`"
_GROUP_REMEDY = "see the line of the rank that hangs; otherwise check the network (lines tcp and names above)"

CHECKS = (
    Check("Slurm", variables.slurm, _INSTANT),
    Check("settings", variables.settings, _INSTANT),
    Check(
        "names", network.names, 6.0, network.judge_names, stuck="the name server does not answer: see /etc/resolv.conf"
    ),
    Check("versions", differences.versions, 8.0, differences.judge_versions),
    Check("same settings", differences.same_settings, _INSTANT, differences.judge_settings),
    Check("loaders", task.loaders, 20.0, stuck="check the constructor of the LightningModule"),
    Check("cores", machine.cores, _INSTANT),
    Check("memory", machine.memory, _INSTANT),
    Check("shared memory", machine.shared_memory, _INSTANT),
    Check("open files", machine.open_files, _INSTANT),
    Check("disk", disk.disk, 8.0, stuck=disk.STUCK),
    Check("locks", disk.locks, 4.0, stuck="the lock server does not answer (NFS: lockd); give another --save-dir"),
    Check("folder's clock", disk.clock, 4.0, stuck=disk.STUCK),
    Check("shared folder", disk.shared_folder, 6.0, disk.judge_shared_folder, stuck=disk.STUCK),
    Check("GPUs", gpus.gpus, 10.0, gpus.judge_gpus, stuck="the driver hangs: check dmesg, and restart the node"),
    Check("tcp", network.between, 12.0, network.judge_between, stuck=_NETWORK_REMEDY),
    Check("group", group.group, 16.0, together=True, stuck=_GROUP_REMEDY),
    Check("sum", group.sums, 10.0, group.judge_sums, together=True, stuck=_NETWORK_REMEDY),
    Check("transport", group.transport, _INSTANT, group.judge_transport),
    Check("bandwidth", group.bandwidth, 15.0, group.judge_bandwidth, together=True, stuck=_NETWORK_REMEDY),
    Check("speed", speed.speed, 25.0, speed.judge_speed),
    Check(
        "task",
        task.task,
        40.0,
        task.judge_task,
        together=True,
        stuck="check the task's own code and failed ranks",
    ),
)

# Seconds in all.
_LIMIT = 58.0
# Seconds for the other ranks' results after the time limit.
_REPLY = 3.0
# Seconds for the other ranks to finish.
_END = 3.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the report.

    Attributes:
        ranks: those that reported it; [] if it concerns the whole run.
        where: the ranks in words; "" for all.
    """

    check: str
    level: str
    text: str
    mend: str
    ranks: list[int]
    where: str

    def __str__(self) -> str:
        body = f"{self.where}: {self.text}" if self.where else self.text
        return f"{self.level:<4}  {self.check:<14}  {body}" + (f"; {self.mend}" if self.mend else "")


@dataclass
class DoctorReport:
    """The report of all checks.

    Attributes:
        lines: one for each finding, in order.
        ranks: a row for each rank that answered: rank, host, device, name, memory in bytes, versions.
        seconds: duration.
        alone: this rank could not connect to the others, and reports for itself.
        hung: a check's thread is still running.
    """

    lines: list[Line] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    alone: bool = False
    hung: bool = False

    @property
    def failed(self) -> list[str]:
        """The names of the failed checks."""
        return list(dict.fromkeys(line.check for line in self.lines if line.level == FAIL))


def examine(place: CheckContext, say: Callable[[Line], None], checks: Sequence[Check] = CHECKS) -> DoctorReport:
    """Run every check within its time limit, and all of them within a minute.

    Args:
        place: the context of this rank.
        say: receives each line: on rank 0, or on a rank that is alone.
    """
    began = time.monotonic()
    report = DoctorReport()
    with _nccl_log(place):
        try:
            _examine(place, report, say, checks, began + _LIMIT)
        finally:
            for close in place.closing:
                with contextlib.suppress(OSError):
                    close()
    report.seconds = time.monotonic() - began
    return report


# The loop over the checks, whose order and skipping belong in one place.
def _examine(  # noqa: C901
    place: CheckContext, report: DoctorReport, say: Callable[[Line], None], checks: Sequence[Check], deadline: float
) -> None:
    def emit(lines: list[Line]) -> None:
        report.lines += lines
        if place.rank == 0 or report.alone:
            for line in lines:
                say(line)

    launcher_result, _ = within(_LAUNCHER, place, _LAUNCHER.seconds)
    meeting, report.hung = _meet(place)
    report.alone = place.alone = meeting.board is None
    place.board = meeting.board or Board(None, place.rank, 1)
    emit(_lines(_gather(_LAUNCHER, launcher_result, place, report.alone, deadline), place, report.alone))
    emit([_line(finding) for finding in meeting.findings])
    for check in checks:
        remaining = deadline - time.monotonic()
        if remaining < 1.0:
            emit([_line(skip(check.name, "out of time: see above which check took so long"))])
            continue
        # Rank 0 decides whether ranks may wait for each other, so that none waits alone.
        if check.together and (report.alone or not _all_here(check, place)):
            if place.rank == 0:
                if place.board.missing or report.alone:
                    why = "not all ranks are connected"
                else:
                    why = "a check above failed"
                emit([_line(skip(check.name, why))])
            continue
        result, hung = within(check, place, min(check.seconds, remaining))
        report.hung |= hung
        until = min(deadline, time.monotonic() + check.seconds) + _REPLY
        results = _gather(check, result, place, report.alone, until, hung=hung)
        if check.together and any(_groups_unusable(check, result_of_rank) for result_of_rank in results):
            place.broken = True
        lines = _lines(results, place, report.alone)
        if check.judge is not None and (place.rank == 0 or report.alone):
            facts = []
            for result_of_rank in results:
                if result_of_rank:
                    facts.append(result_of_rank["facts"])
                else:
                    facts.append(None)
            if report.alone:
                facts = [facts[0] if rank == place.rank else None for rank in range(place.size)]
            for finding in check.judge(facts, place):
                lines.append(_line(finding))
            if check.name == "versions":
                report.ranks = _rows(facts)
        emit(_drop_ok_lines(lines))
    # Surplus ranks may arrive at any time, so look for them last.
    if place.rank == 0 and not report.alone:
        emit([_line(finding) for finding in surplus(place.board, place)])
    _leave(place, report.alone)


def _meet(place: CheckContext) -> tuple[Met, bool]:
    """Meet the other ranks within a time limit, as in a check."""
    box: list[Met] = []

    def run(place: CheckContext) -> CheckResult:
        box.append(meet(place))
        return box[0].found

    stuck = "check MASTER_ADDR and MASTER_PORT, and the network to it"
    result, hung = within(Check("meeting", run, stuck=stuck), place, place.patience + 5.0)
    return (box[0] if box and not hung else Met(None, result.findings)), hung


def _groups_unusable(check: Check, each: dict[str, Any] | None) -> bool:
    """Whether a rank's groups are unreliable after a check that uses them."""
    failed = each is not None and any(level == FAIL for _, level, _, _ in each["findings"])
    return each is None or each["hung"] or (check.name == "group" and failed)


def _gather(
    check: Check, result: CheckResult, place: CheckContext, alone: bool, until: float, *, hung: bool = False
) -> list[dict[str, Any] | None]:
    """Gather each rank's result; None for one that sends nothing.

    A rank that is alone has only its own.
    """
    entry = {
        "findings": [[finding.check, finding.level, finding.text, finding.mend] for finding in result.findings],
        "facts": result.facts,
        "hung": hung,
    }
    if alone or place.board is None:
        return [entry]
    before = set(place.board.missing)
    results = place.board.gather(f"found/{check.name}", entry, max(_REPLY, until - time.monotonic()))
    missing = sorted(place.board.missing - before)
    if missing and place.rank == 0:
        text = f"no result from {', '.join(place.who(rank) for rank in missing)}"
        mend = "see the output of that rank: it exited, or hangs"
        entry["findings"].append([check.name, FAIL, text, mend])
    return results


def _all_here(check: Check, place: CheckContext) -> bool:
    """Return rank 0's decision whether ranks may wait for each other."""
    board = place.board
    assert board is not None
    if place.size == 1:
        return True
    key = f"together/{check.name}"
    if place.rank == 0:
        board.put(key, not board.missing and not place.broken)
    return bool(board.of(key, 0, check.seconds + 2 * _REPLY))


def _lines(results: list[dict[str, Any] | None], place: CheckContext, alone: bool) -> list[Line]:
    """Make one line of equal findings of several ranks."""
    ranks_by_finding: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, result in enumerate(results):
        for finding in result["findings"] if result else ():
            ranks_by_finding.setdefault(tuple(finding), []).append(place.rank if alone else rank)
    lines = []
    for (check, level, text, mend), ranks in ranks_by_finding.items():
        everywhere = len(ranks) == place.size or (level in (OK, SKIP) and ranks[0] == 0)
        hosts = sorted({place.hosts[rank] for rank in ranks if rank < len(place.hosts)} or {place.host})
        prefix = f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)} on {', '.join(hosts)}"
        if place.lost and level not in (OK, SKIP):
            prefix = f"process {os.getpid()} on {place.host}"
        elif (
            place.size == 1
            or level in (OK, SKIP)
            or text.startswith(f"rank {ranks[0]}")
            or "rank " in text.partition(":")[0]
        ):
            prefix = ""
        elif everywhere:
            prefix = "all ranks"
        lines.append(Line(check, level, text, mend, ranks, prefix))
    return lines


def _line(finding: Finding) -> Line:
    return Line(finding.check, finding.level, finding.text, finding.mend, [], "")


def _drop_ok_lines(lines: list[Line]) -> list[Line]:
    """Drop OK and SKIP lines of a check with problems, and keep one otherwise."""
    problems = set()
    for line in lines:
        if line.level in (WARN, FAIL):
            problems.add(line.check)
    checks: set[str] = set()
    remaining = []
    for line in lines:
        if line.level in (OK, SKIP):
            if line.check in problems or line.check in checks:
                continue
            checks.add(line.check)
        remaining.append(line)
    return remaining


def _rows(facts: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for rank, fact in enumerate(facts):
        if fact:
            rows.append({"rank": rank, **fact})
    return rows


def _leave(place: CheckContext, alone: bool) -> None:
    """Keep rank 0's store open until the others have finished."""
    board = place.board
    if alone or board is None or place.size == 1:
        return
    with contextlib.suppress(RuntimeError, LockstepError):
        if place.world is not None and not place.given and not place.broken:
            place.world.leave(_END)
        board.gather("done", True, _END)


@contextlib.contextmanager
def _nccl_log(place: CheckContext) -> Iterator[None]:
    """Context manager in which NCCL logs into a temporary file, unless the user set one."""
    if not place.devices or place.size == 1 or place.environ.get("NCCL_DEBUG_FILE") or place.environ is not os.environ:
        yield
        return
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}
    before = {name: os.environ.get(name) for name in (*variables, "NCCL_DEBUG_FILE")}
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        os.environ |= {**variables, "NCCL_DEBUG_FILE": str(Path(folder) / "nccl.%h.%p")}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
