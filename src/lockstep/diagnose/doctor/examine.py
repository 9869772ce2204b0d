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
from lockstep.diagnose.doctor.finding import FAIL, OK, WARN, Check, CheckContext, CheckResult, Finding, ok, warn
from lockstep.diagnose.doctor.group import Met, meet, surplus
from lockstep.diagnose.doctor.machine import within
from lockstep.errors import LockstepError
from lockstep.training.guards import ranges

__all__ = [
    "CHECKS",
    "DoctorReport",
    "Line",
    "examine",
]


_PROMPT = 8.0  # seconds for instant checks: a machine may be busy
_LAUNCHER = Check("variables", variables.launcher, _PROMPT)

_LINK = "look at the network between the nodes: interfaces, firewall, `ip -s link`"
_FORM = "a rank that hangs says where in its own line; else the network: see the lines tcp and names above"

CHECKS = (
    Check("settings", variables.settings, _PROMPT),
    Check(
        "names", network.names, 6.0, network.judge_names, stuck="the name server does not answer: see /etc/resolv.conf"
    ),
    Check("versions", differences.versions, 8.0, differences.judge_versions),
    Check("same settings", differences.same_settings, _PROMPT, differences.judge_settings),
    Check("loaders", task.loaders, 20.0, stuck="the module's own code: what it does when it is made"),
    Check("cores", machine.cores, _PROMPT),
    Check("memory", machine.memory, _PROMPT),
    Check("shared memory", machine.shared_memory, _PROMPT),
    Check("open files", machine.open_files, _PROMPT),
    Check("disk", disk.disk, 8.0, stuck=disk.STUCK),
    Check("locks", disk.locks, 4.0, stuck="the lock server does not answer (NFS: lockd); give another --save-dir"),
    Check("folder's clock", disk.clock, 4.0, stuck=disk.STUCK),
    Check("shared folder", disk.shared_folder, 6.0, disk.judge_shared_folder, stuck=disk.STUCK),
    Check("GPUs", gpus.gpus, 10.0, gpus.judge_gpus, stuck="the driver hangs: dmesg, and restart the node"),
    Check("tcp", network.between, 12.0, network.judge_between, stuck=_LINK),
    Check("group", group.group, 16.0, together=True, stuck=_FORM),
    Check("sum", group.sums, 10.0, group.judge_sums, together=True, stuck=_LINK),
    Check("transport", group.transport, _PROMPT, group.judge_transport),
    Check("bandwidth", group.bandwidth, 15.0, group.judge_bandwidth, together=True, stuck=_LINK),
    Check("speed", speed.speed, 25.0, speed.judge_speed),
    Check("task", task.task, 40.0, task.judge_task, together=True, stuck="the task's own code, or a rank that failed"),
)

_LIMIT = 58.0  # seconds in all
_ANSWER = 3.0  # seconds that the others have to report, once their time is over
_END = 3.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the report.

    Attributes:
        ranks: those that reported it; [] if it concerns the whole run.
        where: the same in words, "" for all.
    """

    check: str
    level: str
    text: str
    mend: str
    ranks: list[int]
    where: str

    def __str__(self) -> str:
        said = f"{self.where}: {self.text}" if self.where else self.text
        return f"{self.level:<4}  {self.check:<14}  {said}" + (f"; {self.mend}" if self.mend else "")


@dataclass
class DoctorReport:
    """The report of all checks.

    Attributes:
        lines: one for each finding, in order.
        ranks: a row for each rank that answered: rank, host, device, name, memory in bytes, versions.
        seconds: duration.
        alone: this rank did not meet the others, and reports for itself.
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


def _examine(  # noqa: C901
    place: CheckContext, report: DoctorReport, say: Callable[[Line], None], checks: Sequence[Check], deadline: float
) -> None:
    def tell(lines: list[Line]) -> None:
        report.lines += lines
        if place.rank == 0 or report.alone:
            for line in lines:
                say(line)

    launched, _ = within(_LAUNCHER, place, _LAUNCHER.seconds)
    met, report.hung = _meeting(place)
    report.alone = place.alone = met.board is None
    place.board = met.board or Board(None, place.rank, 1)
    tell(_lines(_gathered(_LAUNCHER, launched, place, report.alone, deadline), place, report.alone))
    tell([_line(finding) for finding in met.findings])
    for check in checks:
        left = deadline - time.monotonic()
        if left < 1.0:
            tell([_line(warn(check.name, "left out: the time is over", "see what took so long above"))])
            continue
        if check.together and (report.alone or not _all_here(check, place)):
            if place.rank == 0:
                why = "since not all ranks are there" if place.board.missing or report.alone else "see above"
                tell([_line(ok(check.name, f"left out, {why}"))])
            continue
        found, hung = within(check, place, min(check.seconds, left))
        report.hung |= hung
        until = min(deadline, time.monotonic() + check.seconds) + _ANSWER
        every = _gathered(check, found, place, report.alone, until, hung=hung)
        if check.together and any(_broke(check, each) for each in every):
            place.broken = True
        lines = _lines(every, place, report.alone)
        if check.judge is not None and (place.rank == 0 or report.alone):
            facts = [each["facts"] if each else None for each in every]
            if report.alone:
                facts = [facts[0] if rank == place.rank else None for rank in range(place.size)]
            lines += [_line(finding) for finding in check.judge(facts, place)]
            if check.name == "versions":
                report.ranks = _rows(facts)
        tell(_settled(lines))
    if place.rank == 0 and not report.alone:  # surplus ranks may arrive at any time
        tell([_line(finding) for finding in surplus(place.board, place)])
    _part(place, report.alone)


def _meeting(place: CheckContext) -> tuple[Met, bool]:
    """Meet the other ranks within a time limit, as in a check."""
    box: list[Met] = []

    def run(place: CheckContext) -> CheckResult:
        box.append(meet(place))
        return box[0].found

    stuck = "check MASTER_ADDR and MASTER_PORT, and the network to it"
    found, hung = within(Check("meeting", run, stuck=stuck), place, place.patience + 5.0)
    return (box[0] if box and not hung else Met(None, found.findings)), hung


def _broke(check: Check, each: dict[str, Any] | None) -> bool:
    """Whether a rank's groups are unreliable after a check that uses them."""
    failed = each is not None and any(level == FAIL for _, level, _, _ in each["findings"])
    return each is None or each["hung"] or (check.name == "group" and failed)


def _gathered(
    check: Check, found: CheckResult, place: CheckContext, alone: bool, until: float, *, hung: bool = False
) -> list[dict[str, Any] | None]:
    """Gather each rank's result; None for one that sends nothing. A rank that is alone has only its own."""
    own = {
        "findings": [[one.check, one.level, one.text, one.mend] for one in found.findings],
        "facts": found.facts,
        "hung": hung,
    }
    if alone or place.board is None:
        return [own]
    before = set(place.board.missing)
    every = place.board.gather(f"found/{check.name}", own, max(_ANSWER, until - time.monotonic()))
    lost = sorted(place.board.missing - before)
    if lost and place.rank == 0:
        text = f"{', '.join(place.who(rank) for rank in lost)} said nothing"
        mend = "see its own output: it ended, or stands still"
        own["findings"].append([check.name, FAIL, text, mend])
    return every


def _all_here(check: Check, place: CheckContext) -> bool:
    """Rank 0's decision, the same everywhere, whether ranks may wait for each other."""
    board = place.board
    assert board is not None
    if place.size == 1:
        return True
    key = f"together/{check.name}"
    if place.rank == 0:
        board.put(key, not board.missing and not place.broken)
    return bool(board.of(key, 0, check.seconds + 2 * _ANSWER))


def _lines(every: list[dict[str, Any] | None], place: CheckContext, alone: bool) -> list[Line]:
    """Make one line of equal findings of several ranks."""
    held: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, each in enumerate(every):
        for one in each["findings"] if each else ():
            held.setdefault(tuple(one), []).append(place.rank if alone else rank)
    lines = []
    for (check, level, text, mend), who in held.items():
        whole = len(who) == place.size or (level == OK and who[0] == 0)
        hosts = sorted({place.hosts[rank] for rank in who if rank < len(place.hosts)} or {place.host})
        where = f"rank{'s' * (len(who) > 1)} {ranges(who)} on {', '.join(hosts)}"
        if place.lost and level != OK:
            where = f"process {os.getpid()} on {place.host}"
        elif place.size == 1 or level == OK or text.startswith(f"rank {who[0]}") or "rank " in text.partition(":")[0]:
            where = ""
        elif whole:
            where = "all ranks"
        lines.append(Line(check, level, text, mend, who, where))
    return lines


def _line(finding: Finding) -> Line:
    return Line(finding.check, finding.level, finding.text, finding.mend, [], "")


def _settled(lines: list[Line]) -> list[Line]:
    """Drop OK lines of a check with problems, and keep one OK line otherwise."""
    spoken = {line.check for line in lines if line.level in (WARN, FAIL)}
    seen: set[str] = set()
    kept = []
    for line in lines:
        if line.level == OK:
            if line.check in spoken or line.check in seen:
                continue
            seen.add(line.check)
        kept.append(line)
    return kept


def _rows(facts: list[Any]) -> list[dict[str, Any]]:
    return [{"rank": rank, **each} for rank, each in enumerate(facts) if each]


def _part(place: CheckContext, alone: bool) -> None:
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
    own = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}
    before = {name: os.environ.get(name) for name in (*own, "NCCL_DEBUG_FILE")}
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        os.environ |= {**own, "NCCL_DEBUG_FILE": str(Path(folder) / "nccl.%h.%p")}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
