"""Run a job's processes with torchrun's elastic agent, and report the first failure.

    succeeded, stop_signal, code = run(Job(...))

Adds to torch's agent: the rank that failed first, no restart that cannot help, replacement of lost processes, a token
for each round of the launchers, and a meeting point that listens on one address. In addition to torch's public classes
it uses the process handles inside LocalElasticAgent and their creation, its set of processes to wait for, its counter
of restarts left, and its rendezvous; all have the same names since torch 2.11.
"""

import contextlib
import ctypes
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

# Only this private module types the stores; the names are the same since torch 2.11.
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)

from lockstep.distributed.cpus import bind
from lockstep.distributed.descriptors import descriptors_of, ensure_descriptors
from lockstep.distributed.failures import ProcessFailure, first_failure
from lockstep.distributed.launcher import LAUNCHER_VARIABLE, ROUND_VARIABLE
from lockstep.distributed.membership import STOP_SIGNALS, heeds_hangup, leave_terminal
from lockstep.distributed.progress import (
    FOLDER_VARIABLE,
    MEMBER_VARIABLE,
    RankProgress,
    ended_while_running,
    rank_label,
    read_end,
)
from lockstep.errors import LockstepError, StorageError
from lockstep.launch.job import Job, count_oom_kills
from lockstep.launch.losses import AGAIN, REPEATED
from lockstep.launch.nodes import Decisions, Seat, open_decisions
from lockstep.launch.rendezvous import local_address, open_rendezvous
from lockstep.launch.stderr import RankStderr
from lockstep.launch.workers import Preloaded, life_pipe, private_folder
from lockstep.timeline import ENDED_VARIABLE

__all__ = [
    "run",
]


# A number of linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36


class Child(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


@contextmanager
def adopt_orphans() -> Iterator[bool]:
    """Make this process adopt orphans in place of init.

    Yields:
        Whether the system does so.
    """
    # If SIGCHLD is ignored, the system drops the exit codes of all children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopted = sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield adopted
    finally:
        if adopted:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reap_orphans(children: Iterable[Child]) -> None:
    """Reap orphans that have ended, such as the loader processes of a killed rank.

    Args:
        children: processes whose exit codes are still needed; their own `poll` reaps them.
    """
    # A Popen reaps its own process. Reaping it here would lose the exit code that its owner still needs.
    waiting = {}
    for child in children:
        if child.returncode is None:
            waiting[child.pid] = child
    while (pid := _next_ended()) is not None:
        if pid not in waiting:
            os.waitpid(pid, os.WNOHANG)
        elif waiting.pop(pid).poll() is None:
            # Another thread is reaping this process: its exit code belongs there.
            return


def _next_ended() -> int | None:
    try:
        # WNOWAIT shows which child has ended, and leaves it to be reaped.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # There are no children.
        return None
    if ended:
        return ended.si_pid
    return None


# Seconds for the others to report their progress, once one has failed.
_GRACE = 2.0
# The same, if one was killed. No other failure causes that, so it was the first.
_KILLED = 0.3
# Seconds to notify the other nodes that this one leaves.
_LEAVE = 0.5
# Seconds between two looks at the processes.
_POLL = 0.05
# Seconds after a signal until a process that is in no run, or is stopped, is killed; the same as torchrun's.
_STOP_SECONDS = 30.0
# Keys in the round's store: its token, and the number of nodes that have ended.
_ROUND = "lockstep/round"
_ENDED = "lockstep/ended"
# Seconds for the other nodes' ranks to end too; their launchers may be gone.
_EXIT_BARRIER = 10.0
# Seconds before the process to fork from is loaded; a short run needs no replacement.
_PRELOAD_DELAY = 5.0


def run(job: Job) -> tuple[bool, signal.Signals | None, int]:
    """Run the job to its end.

    Returns:
        (whether all processes succeeded; the signal that requested the end, or None; the exit code of a run that saved
        before its end, else 0).

    Raises:
        LockstepError: the job failed; the line names the rank that failed first. Its exit code is that rank's.
    """
    ranks = job.processes * job.nodes[1]
    ensure_descriptors(descriptors_of(ranks, hosts_store=job.is_host), f"the launcher of {ranks} ranks")
    # torch's log would repeat what the launcher's last line reports.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The variables are for the processes. This process, which may run more jobs, gets its own back at the end.
    before = dict(os.environ)
    for name, value in job.environment.items():
        os.environ.setdefault(name, value)
    folder = private_folder()
    os.environ[FOLDER_VARIABLE] = str(folder / "places")
    (folder / "places").mkdir()
    os.environ[LAUNCHER_VARIABLE] = str(life_pipe(folder))
    agent = None
    try:
        with adopt_orphans() as adopted:
            agent = _Agent(job, folder, adopted)
            result = agent.run()
        code = read_end(folder / "places") or agent.code
    except SignalException as error:
        signal_error = LockstepError(f"ended by {signal.Signals(error.sigval).name}, and the processes with it")
        signal_error.exit_code = 128 + error.sigval
        raise signal_error from error
    except RendezvousStateError as error:
        raise LockstepError(
            f"{job.endpoint} has a state that no launcher of this run signed: another run, or somebody else, "
            "uses this address; give all launchers the same --rdzv-secret-file, and this run a --rdzv-id of its own"
        ) from error
    except (RendezvousError, DistError) as error:
        raise LockstepError(
            f"the nodes did not meet at {job.endpoint} ({type(error).__name__}); check --nnodes, the address, and that "
            "every node's launcher runs"
        ) from error
    finally:
        if agent:
            agent.end()
        shutil.rmtree(folder, ignore_errors=True)
        # A later run in this process would take the launcher's variables for its own, and its launcher for dead.
        os.environ.clear()
        os.environ.update(before)
    # A failure after a stop signal counts only if a process reported its cause.
    if result.is_failed() and (agent.stop_signal is None or agent.has_cause):
        raise agent.error()
    # The ranks of a script end by KeyboardInterrupt after they have saved: the code shows that they did.
    has_saved = agent.stop_signal is not None and code != 0
    return has_saved or not result.is_failed(), agent.stop_signal, code


class _Agent(LocalElasticAgent):
    """Starts, watches and restarts the processes.

    Attributes:
        stop_signal: the signal that requested the end; None: none.
    """

    # When the signal came, on the monotonic clock.
    _stopped_at: float | None = None
    # The exit code of a rank that would fail again, whichever failed first.
    _final_code = 0
    # Whether the rank that prints the progress is on this node.
    _prints = False

    def __init__(self, job: Job, folder: Path, adopts: bool) -> None:
        self._stderr = RankStderr(str(folder), job.stderr)
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.processes,
            entrypoint=sys.executable,
            args=tuple(job.command),
            rdzv_handler=open_rendezvous(job, self._print),
            max_restarts=job.restarts,
            monitor_interval=_POLL,
            local_addr=local_address(job),
        )
        super().__init__(spec, self._stderr, start_method="spawn")
        self._folder = Path(os.environ[FOLDER_VARIABLE])
        self._job = job
        self.stop_signal: signal.Signals | None = None
        self._hangup = self._forward if heeds_hangup() else signal.SIG_IGN
        self._failure: ProcessFailure | None = None
        # Failures that led to restarts: a repeated one is not restarted.
        self._restart_failures: list[ProcessFailure] = []
        self._oom_kills = count_oom_kills()
        self._oom_check_time = time.monotonic()
        # Why a loss ended the other processes too.
        self._end_reason = ""
        # Names of the processes, by local rank.
        self._names: dict[int, str] = {}
        # The same, on a node that has rejoined the run.
        self._given_names: list[str] = []
        # Local ranks of processes that the run continues without.
        self._spared: set[int] = set()
        # Why this launcher killed a process, by its name.
        self._killed: dict[str, str] = {}
        # Failures of processes, by name.
        self._failed: dict[str, ProcessFailure] = {}
        self._decisions = open_decisions(job, self._describe, self._folder, self._print)
        self._membership: Decisions | None = None
        self._preloaded: Preloaded | None = None
        self._can_fork = adopts and Preloaded.can_fork(job.command)
        self._started = time.monotonic()

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        # torch calls this with the environment that each process will have, so this is the place to change it.
        for local, name in enumerate(self._given_names):
            envs[local][MEMBER_VARIABLE] = name
        super()._setup_local_watchdog(envs)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other launchers, and agree on this round's token.

        A count of restarts would not identify the round: each launcher counts its own.
        """

        if self._decisions:
            seat = self._decisions.rejoin(self._job.processes)
        else:
            seat = None
        self._given_names = seat.names if seat else []
        if seat:
            self._take_seat(worker_group, seat)
            return
        try:
            super()._rendezvous(worker_group)
        except RendezvousClosedError:
            self._end_reason = "the launcher of another node has ended the run"
            raise self.error() from None
        except RendezvousConnectionError:
            if self._failure is None:
                raise
            self._end_reason = "the launcher of node 0, where all meet, is gone"
            error = self.error()
            # Node 0's launcher may be back after a new start, so ask the scheduler for one.
            error.exit_code = StorageError.exit_code
            raise error from None
        store: Any = worker_group.store
        if worker_group.group_rank == 0:
            store.set(_ROUND, self._job.run_secret.sign("round", secrets.token_hex(8)).decode())
        os.environ[ROUND_VARIABLE] = self._job.run_secret.read("round", store.get(_ROUND))

    def _take_seat(self, worker_group: WorkerGroup, seat: Seat) -> None:
        """Take this node's place in a run that continued without it."""
        slots = [int(name.partition(".")[0]) for name in seat.names]
        worker_group.workers = [
            Worker(local, global_rank=slot, role_rank=slot, world_size=seat.world, role_world_size=seat.world)
            for local, slot in enumerate(slots)
        ]
        # torch types as None what it sets later.
        group: Any = worker_group
        group.group_rank = seat.node
        group.group_world_size = seat.nodes
        group.store = HashStore()
        host, _, port = self._job.endpoint.rpartition(":")
        # The processes read the launcher's own meeting point; torch still copies these into their environment.
        group.master_addr = host
        group.master_port = int(port)
        os.environ[ROUND_VARIABLE] = seat.token

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for progress_file in self._folder.iterdir():
            # These are the files of processes before a restart.
            progress_file.unlink(missing_ok=True)
        self._oom_kills = count_oom_kills()
        self._end_reason = ""
        self._killed = {}
        self._spared = set()
        self._failed = {}
        self._started = time.monotonic()
        self._names = {worker.local_rank: str(worker.global_rank) for worker in worker_group.workers}
        # On a node that has rejoined, the processes have the names that the run gave them.
        self._names.update(enumerate(self._given_names))
        if self._decisions:
            token = os.environ[ROUND_VARIABLE]
            names = list(self._names.values())
            if self._decisions.begin(token, names, worker_group):
                self._membership = self._decisions
            else:
                self._membership = None
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for local, pid in pids.items():
            self._bind(local, pid)
        os.environ.pop(ENDED_VARIABLE, None)
        # Replace torch's handlers, which would end the processes before they save.
        for number in STOP_SIGNALS:
            signal.signal(number, self._hangup if number == signal.SIGHUP else self._forward)
        return pids

    def _bind(self, local: int, pid: int) -> None:
        """Pin a process to its share of the node's cores, before it starts threads."""
        if self._job.shares:
            bind(pid, self._job.shares[local])

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """Return an event that nobody reads.

        torch's own asks the name server for this host's name each time.
        """
        return Event(state, source)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # Where a node joins or leaves, no process has failed here, so the time of the end is this one.
        os.environ.setdefault(ENDED_VARIABLE, str(time.time()))
        super()._stop_workers(worker_group)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Forward a signal: processes save and end; a second Ctrl-C kills. No restart follows."""
        self._remaining_restarts = 0
        # The terminal is gone: a write to it would raise.
        if number == signal.SIGHUP:
            leave_terminal()
        if self._membership:
            self._spare([local for local, name in self._names.items() if self._membership.rank_of(name) is None])
            # The other nodes' launchers pass the signal on. Theirs have no terminal, so SIGHUP travels as SIGTERM.
            if number == signal.SIGHUP:
                self._membership.stop_signal = signal.SIGTERM
            else:
                self._membership.stop_signal = number
        is_repeat = self.stop_signal == number == signal.SIGINT
        self.stop_signal = signal.Signals(number)
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        # Each process has its own session, so a Ctrl-C in the terminal does not reach it directly too.
        to_send = signal.SIGKILL if is_repeat else self.stop_signal
        for process in self._processes().values():
            if process.poll() is None:
                process.send_signal(to_send)

    def _processes(self) -> dict[int, "subprocess.Popen[bytes]"]:
        # torch keeps the handles of the processes in `subprocess_handlers`, the same since torch 2.11.
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        running = {}
        for rank, handler in handlers.items():
            if rank not in self._spared:
                running[rank] = handler.proc
        return running

    def _reap(self) -> None:
        children = []
        for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
            children.append(handler.proc)
        if self._preloaded:
            children.append(self._preloaded.process)
        reap_orphans(children)
        # The preloaded process ends with an error only if it was killed or could not load the modules.
        if self._can_fork and self._preloaded and self._preloaded.process.poll():
            self._can_fork = False
            self._print("the process kept ready for replacements is gone; a lost rank's replacement starts more slowly")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._reap()
        self._stderr.show()
        self._kill_unresponsive()
        # Count the kernel's kills only while nothing has failed, so that a kill shows as an increase.
        failed = any(process.poll() for process in self._processes().values())
        if not failed and time.monotonic() - self._oom_check_time > 2.0:
            self._oom_kills = count_oom_kills()
            self._oom_check_time = time.monotonic()
        if self._membership and self._continue_without(self._membership, worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        processes = self._processes()
        has_loss = any(self._has_failed(local, process.poll()) for local, process in processes.items())
        # A failure on another node ends this one's processes too.
        has_loss = has_loss or bool(self._end_reason)
        if has_loss:
            self._explain(processes, worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        # A process has ended since the poll above.
        if result.is_failed() and not has_loss:
            self._explain(processes, worker_group)
        # A process that ended with code 0 in mid-run is a success to torch, and a failure here.
        if has_loss and not result.is_failed():
            return RunResult(state=WorkerState.FAILED)
        return result

    def _kill_unresponsive(self) -> None:
        """Kill processes that ignore a signal, or that are stopped and so cannot see it.

        Another one in a run saves first, and its watchdog ends it if it hangs.
        """
        if self.stop_signal is None or self._stopped_at is None:
            return
        if time.monotonic() - self._stopped_at < _STOP_SECONDS:
            return
        for local, process in self._processes().items():
            # The others save first, or their watchdog ends them.
            if process.poll() is not None or self._names[local] in self._killed:
                continue
            slot = self._names[local].partition(".")[0]
            if _is_stopped(process.pid):
                why = "it is stopped, as by SIGSTOP"
            elif RankProgress.read(self._folder / slot) is None:
                why = "it is in no run of lockstep"
            else:
                continue
            text = f"had not ended {_STOP_SECONDS:g} s after {self.stop_signal.name}, and was killed: {why}"
            self._print(f"{rank_label(int(slot), int(slot), self._host)} {text}")
            self._killed[self._names[local]] = f"it {text}; the same command resumes from the newest checkpoint"
            process.kill()

    def _has_failed(self, local: int, code: int | None) -> bool:
        """Whether a process ended with an error, or with code 0 in mid-run."""
        slot = self._names[local].partition(".")[0]
        return code is not None and (code != 0 or ended_while_running(self._folder, slot))

    def _continue_without(self, membership: Decisions, group: WorkerGroup) -> bool:
        """Handle processes that ended; return whether the others continue.

        If so, torch's own watch is skipped, because it would end all processes after a single failure.
        """
        if self._can_fork and self._preloaded is None and time.monotonic() - self._started > _PRELOAD_DELAY:
            self._preloaded = Preloaded()
        # Poll once: all decisions below must see the same processes as ended.
        codes = {local: process.poll() for local, process in self._processes().items()}
        living = {self._names[local] for local, code in codes.items() if code is None}
        lost_ranks = {local for local, code in codes.items() if self._has_failed(local, code)}
        names = {self._names[local]: local for local in lost_ranks}
        for name, local in names.items():
            if name not in self._failed:
                self._failed[name] = self._read_failure(local, codes[local] or 0, time.time(), group)
        self._end_reason = membership.update(living, {name: self._failed[name] for name in names})
        # The signal was sent to another node's launcher.
        if membership.stop_signal and self.stop_signal is None:
            self._forward(membership.stop_signal, None)
        self._report_printer(membership)
        places = {name: local for local, name in self._names.items()}
        # The members have ended, so a new process comes too late to join.
        if membership.is_over:
            self._spare([local for name, local in places.items() if membership.rank_of(name) is None])
        if membership.is_over or self._end_reason:
            return False
        for name in membership.silent:
            self._processes()[places[name]].kill()
            self._killed[name] = "it sent no heartbeat while the others waited for it, and was killed"
        # A refused process reports why it may not join, and ends by itself.
        self._spare([places[name] for name in membership.refused], kill=False)
        for name in membership.replace:
            # After a stop signal no replacement is started.
            if self.stop_signal is None:
                self._replace(places[name], group)
            else:
                self._spare([places[name]])
        membership.silent = []
        membership.refused = []
        membership.replace = []
        return True

    def _report_printer(self, membership: Decisions) -> None:
        """Report once that another node's screen shows the progress from now on."""
        prints = bool(membership.members) and membership.members[0] in self._names.values()
        if self._prints and not prints and not membership.is_over:
            where = f"on the screen of {membership.printer}, and in metrics.jsonl of the run's folder"
            self._print(f"the run continues without this node's rank 0: its progress is {where}")
        self._prints = prints

    def _spare(self, locals_: list[int], *, kill: bool = True) -> None:
        """Continue without these processes: their end is not a failure."""
        context: Any = self._pcontext
        for local in locals_:
            if kill:
                # Do not wait for its end: this may run in a signal handler.
                context.subprocess_handlers[local].proc.kill()
            # torch's watch waits for the ranks in this private set; without the rank it takes no notice of its end.
            context._running_local_ranks.discard(local)
            self._spared.add(local)

    def _replace(self, local: int, group: WorkerGroup) -> None:
        """Start a process in place of one that ended; it joins the others when ready."""
        context: Any = self._pcontext
        slot, _, times = self._names[local].partition(".")
        self._names[local] = name = f"{slot}.{int(times or 0) + 1}"
        # The note of its predecessor has been read, and must not count for the new process.
        with contextlib.suppress(OSError):
            Path(context.error_files[local]).unlink(missing_ok=True)
        (self._folder / slot).unlink(missing_ok=True)
        ended_while_running(self._folder, slot, forget=True)
        context.subprocess_handlers[local] = _Handler(
            self._preloaded,
            entrypoint=context.entrypoint,
            args=context.args[local],
            env=context.envs[local] | {MEMBER_VARIABLE: name},
            stdout=context.stdouts[local],
            stderr=self._stderr.open(slot),
            local_rank_id=local,
            numa_options=None,
        )
        pid = context.subprocess_handlers[local].proc.pid
        self._bind(local, pid)
        # torch's watch compares it with the process's id.
        group.workers[local].id = pid
        if self._membership:
            self._membership.add_new(name)

    def _print(self, line: str) -> None:
        self._stderr.show()
        # A closed terminal must not end the run.
        with contextlib.suppress(OSError):
            print(f"lockstep: {line}", file=sys.stderr, flush=True)

    def _await_ends(self, processes: dict[int, "subprocess.Popen[bytes]"]) -> dict[int, tuple[int, float]]:
        """Give the other processes time to end.

        Returns:
            The exit code of each failed process, and when it was seen, by local rank.
        """
        ends: dict[int, tuple[int, float]] = {}
        began = time.monotonic()
        while True:
            for local, process in processes.items():
                if self._has_failed(local, code := process.poll()):
                    ends.setdefault(local, (code or 0, time.time()))
            running = []
            for process in processes.values():
                if process.poll() is None:
                    running.append(process)
            killed = any(process.poll() == -signal.SIGKILL for process in processes.values())
            # A stopped process does not end by itself, so do not wait for it.
            if all(_is_stopped(process.pid) for process in running):
                return ends
            if time.monotonic() - began > (_KILLED if killed else _GRACE):
                return ends
            time.sleep(0.01)

    def _explain(self, processes: dict[int, "subprocess.Popen[bytes]"], group: WorkerGroup) -> None:
        """Find the first failure, and announce a restart."""
        ends = self._await_ends(processes)
        if ends:
            silent = [local for local, process in processes.items() if process.poll() is None]
        else:
            silent = []
        # A stopped process takes no other signal.
        for local in silent:
            processes[local].kill()
            processes[local].wait()
        failures = [self._read_failure(local, code, when, group) for local, (code, when) in ends.items()]
        elsewhere = self._membership.fatal if self._membership else None
        self._failure = first_failure([*failures, elsewhere] if elsewhere else failures)
        whens = [when for _, when in ends.values()] or [self._failure.when]
        # For the timeline of the run, which counts the time until the next start as lost.
        os.environ[ENDED_VARIABLE] = str(min(whens))
        # Without node 0's launcher nothing can be restarted.
        if self._membership and self._membership.is_orphaned:
            self._remaining_restarts = 0
        # All ranks raised the same error, so naming one of them would mislead.
        if len(failures) > 1 and len({failure.message for failure in failures}) == 1 and self._failure.message:
            self._failure = dataclasses.replace(self._failure, shared=True)
        # Before the steps no rank watches the others, so the silent ones are named here.
        if silent and self._failure.names_nobody:
            self._failure = dataclasses.replace(self._failure, message=self._describe_silent(silent, group))
        self._final_code = max(failure.code if failure.is_final else 0 for failure in (self._failure, *failures))
        if self._final_code:
            self._remaining_restarts = 0
        if self._end_reason == AGAIN and self.stop_signal is None and not self._failure.is_error:
            # torch's agent subtracts this restart again: a loss does not count towards --max-restarts.
            self._remaining_restarts += 1
            self._print(self._summary())
            return
        # The same line failed in the same step: another restart would not help.
        if self._remaining_restarts and any(self._failure.repeats(earlier) for earlier in self._restart_failures):
            self._remaining_restarts = 0
            self._end_reason = f"{REPEATED}, so it is not restarted once more"
        self._restart_failures.append(self._failure)
        if self._remaining_restarts and self.stop_signal is None:
            number = self._job.restarts - self._remaining_restarts + 1
            self._print(f"{self._summary()}; restart {number} of {self._job.restarts}")

    def _describe_silent(self, silent: list[int], group: WorkerGroup) -> str:
        """Describe the ranks that did not arrive before the first step.

        No rank watches the others there: the silent ones are those that did not notice the others' end.
        """
        ranks = [self._rank_of(local, group) for local in silent]
        text = " and ".join(
            f"{rank_label(rank, slot, self._host)} did not arrive: it was in "
            f"{RankProgress.read(self._folder / str(slot)) or 'its start, before step 1'}"
            for rank, slot in ranks
        )
        return f"{text}; after --timeout seconds the others gave up; raise --timeout where it is only slow"

    @property
    def _host(self) -> str:
        """This node's name, for messages of a run on several nodes; "" on one."""
        if self._job.nodes[1] > 1:
            return socket.gethostname()
        return ""

    def _rank_of(self, local: int, group: WorkerGroup) -> tuple[int, int]:
        """Return a process's rank now and at the start."""
        slot = int(group.workers[local].global_rank)
        if self._membership:
            current = self._membership.rank_of(self._names[local])
        else:
            current = None
        return slot if current is None else current, slot

    @property
    def code(self) -> int:
        """The exit code of a run that saved before its end elsewhere, or 0."""
        if self._membership:
            return self._membership.code
        return 0

    @property
    def has_cause(self) -> bool:
        """Whether a process reported a cause, other than the loss of the others."""
        return bool(self._failure and self._failure.message and not self._failure.follows)

    def _read_failure(self, local: int, code: int, when: float, group: WorkerGroup) -> ProcessFailure:
        rank, slot = self._rank_of(local, group)
        assert self._pcontext is not None
        note = Path(self._pcontext.error_files[local])
        progress = RankProgress.read(self._folder / str(slot))
        run_code = read_end(self._folder)
        failure = ProcessFailure.read(rank, code, note, progress, when, run_code=run_code)
        failure = dataclasses.replace(failure, at_start=slot, host=self._host)
        # The process could not write a note about its own kill.
        why = self._killed.get(self._names.get(local, ""))
        if why:
            return dataclasses.replace(failure, message=why)
        return failure

    def _summary(self) -> str:
        if self._failure is None:
            return "the processes failed on another node; see its launcher's last line"
        if self._end_reason not in ("", "-"):
            more = f"; {self._end_reason}"
        else:
            more = ""
        # The first of several losses is usually the cause of the later ones.
        causes = self._membership.causes if self._membership and more else []
        if len(causes) > 1:
            more += f"; the first of {len(causes)} losses: {causes[0]}"
        return self._describe(self._failure) + more

    def _describe(self, failure: ProcessFailure) -> str:
        if failure.code == -signal.SIGKILL and not failure.message:
            # The kernel's count has risen since the last poll, so the kill was for lack of memory.
            if count_oom_kills() > self._oom_kills:
                return f"{failure}: out of memory, by the kernel's count; lower --micro-batch-size, or take more memory"
            return f"{failure}: something outside the run killed it; the kernel reports no lack of memory (no OOM kill)"
        if -failure.code in STOP_SIGNALS and not failure.message:
            return f"{failure}: somebody or something ended it before its steps began, so there was nothing to save"
        if failure.code < 0 and not failure.message:
            return f"{failure}: it crashed; its stack is above, if it could still write one"
        return str(failure)

    def error(self) -> LockstepError:
        """Return the error for the last line on the user's screen."""
        failure = self._failure
        if self.has_cause:
            advice = ""
        else:
            advice = "; the same command resumes from the newest checkpoint, if there is one"
        error = LockstepError(self._summary() + advice)
        error.follows = failure is None or failure.follows
        # The process was ended before the steps began, so nothing was saved: keep the signal's code.
        if failure and -failure.code in STOP_SIGNALS and not failure.message:
            error.exit_code = 128 - failure.code
        elif failure:
            error.exit_code = self._final_code or failure.exit_code
        return error

    def _exit_barrier(self) -> None:
        """Wait a little for other nodes' ranks to end too; their launchers may be gone."""
        # Node 0's launcher has waited for all nodes already.
        if self._membership:
            return
        store: Any = self._store
        until = time.monotonic() + _EXIT_BARRIER
        # Node 0's launcher has left, and the store with it.
        with contextlib.suppress(RuntimeError):
            ended = store.add(_ENDED, 1)
            while ended < (self._worker_group.group_world_size or 1) and time.monotonic() < until:
                time.sleep(_POLL)
                ended = store.add(_ENDED, 0)

    def end(self) -> None:
        """End all processes and notify other nodes."""
        self._shutdown(signal.SIGKILL)
        self._stderr.close()
        if self._decisions:
            self._decisions.close()
        leaving = threading.Thread(target=self._worker_group.spec.rdzv_handler.shutdown, daemon=True)
        # Over a broken link the call would take long, so wait for it in a thread.
        leaving.start()
        leaving.join(_LEAVE)
        if self._preloaded:
            self._preloaded.end()


class _Handler(SubprocessHandler):
    """A worker that is forked from the preloaded process if possible, else started."""

    def __init__(self, preloaded: Preloaded | None, **options: Any) -> None:
        self._preloaded = preloaded
        super().__init__(**options)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        stderr = self._stderr.name if self._stderr else ""
        if self._preloaded:
            forked = self._preloaded.start(args[1:], env, stderr)
        else:
            forked = None
        return forked or super()._popen(args, env)


def _is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process; a traced one does not count.

    A stopped process does not end by itself.
    """
    # The state follows the command's name, which is in brackets and may contain blanks.
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
