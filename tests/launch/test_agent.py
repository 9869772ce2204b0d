"""What the launcher makes of processes that ended or did not, of signals, of its meeting point, and of memory."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from refusals import names, refuses
from shell import free_port
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousError

from lockstep.distributed import failures
from lockstep.distributed.launcher import LAUNCHER_VARIABLE
from lockstep.distributed.progress import COMPUTING, FOLDER_VARIABLE, MEETING_VARIABLE, Progress, RankProgress
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.launch import agent, losses, nodes, rendezvous
from lockstep.launch import agent as orphans
from lockstep.launch import job as memory
from lockstep.launch.job import Job
from lockstep.timeline import ENDED_VARIABLE

GOOD, BAD, USAGE, KILLED, SLEEPS, STOPS = (
    "exit 0",
    "exit 1",
    "exit 2",
    "kill -9 $$",
    "exec sleep 60",
    "kill -STOP $$; exec sleep 60",
)


def job(**changes):
    given = {"command": [], "processes": 2, "nodes": (1, 1), "backend": "c10d", "endpoint": "127.0.0.1:0"}
    rest = {"options": {}, "run_id": "test", "is_host": True, "restarts": 3, "environment": {}}
    return Job(**{**given, **rest, **changes})


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """An agent over processes of these shell commands, local ranks 0, 1, ..., which are global ranks 4, 5, ..."""
    started = []
    monkeypatch.setattr(agent, "_GRACE", 0.05)
    monkeypatch.setattr(agent, "count_oom_kills", lambda: 7)
    monkeypatch.setenv(ENDED_VARIABLE, "")  # so that what the agent sets does not outlive the test

    def made(*commands, notes=(), ended=(), left=2):
        mine = object.__new__(agent._Agent)
        mine._folder, mine._job, mine.stop_signal, mine._failure = tmp_path, job(), None, None
        mine._remaining_restarts, mine._oom_kills = left, 7
        mine._membership, mine._end_reason, mine._restart_failures = None, "", []
        mine._names = {local: str(4 + local) for local in range(len(commands))}
        mine._killed, mine._spared, mine._preloaded, mine._failed = {}, set(), None, {}
        mine._decisions, mine._stderr = None, SimpleNamespace(show=lambda: None)
        processes = [subprocess.Popen(["sh", "-c", command], start_new_session=True) for command in commands]
        started.extend(processes)
        for local in ended:
            processes[local].wait()
        files = {local: str(tmp_path / f"note-{local}") for local in range(len(commands))}
        for local, text in dict(notes).items():
            told = {"line": text, "when": 1.0 + local, "follows": text.startswith("lost"), "code": 1}
            told["names_nobody"] = text.startswith("lost the other")
            (tmp_path / f"note-{local}").write_text(json.dumps({"lockstep": told}))
        handlers = {local: SimpleNamespace(proc=process) for local, process in enumerate(processes)}
        mine._pcontext = SimpleNamespace(error_files=files, subprocess_handlers=handlers)
        group = SimpleNamespace(workers=[SimpleNamespace(global_rank=4 + local) for local in range(len(commands))])
        return mine, mine._processes(), group

    yield made
    for process in started:
        process.kill()
        process.wait()


def test_first_failure_is_reported_and_unaware_ranks_are_ended(watched, capfd):
    mine, processes, group = watched(SLEEPS, BAD, ended=[1])
    mine._explain(processes, group)
    assert processes[0].returncode == -signal.SIGKILL
    assert (mine._failure.rank, mine._failure.code, mine.has_cause) == (5, 1, False)
    line = "rank 5 ended first, with code 1 and no message, before step 1"
    assert capfd.readouterr().err == f"lockstep: {line}; restart 2 of 3\n"
    assert str(mine.error()) == f"{line}; the same command resumes from the newest checkpoint, if there is one"
    assert mine.error().exit_code == 1
    mine.stop_signal = signal.SIGTERM
    mine._explain(processes, group)
    mine.stop_signal, mine._remaining_restarts = None, 0
    mine._explain(processes, group)
    assert capfd.readouterr().err == ""  # no restart follows


def test_process_ending_between_two_polls_has_its_cause_reported(watched, monkeypatch):
    """torch's watch may see an end that this one did not see a moment before."""
    mine, processes, group = watched(SLEEPS, SLEEPS, notes={1: "the cause"}, left=0)
    mine._oom_check_time, mine._can_fork = time.monotonic(), False

    def looks(self, group):
        processes[1].kill()
        processes[1].wait()
        return agent.RunResult(state=agent.WorkerState.FAILED)

    monkeypatch.setattr(agent.LocalElasticAgent, "_monitor_workers", looks)
    monkeypatch.setattr(agent, "reap_orphans", lambda children: None)
    assert mine._monitor_workers(group).is_failed()
    assert (mine._failure.rank, mine._failure.message) == (5, "the cause")


@pytest.mark.parametrize(
    ("commands", "grace", "killed"),
    [
        ((GOOD, BAD), 1e9, 0.0),  # all have ended
        ((STOPS, BAD), 1e9, 0.0),  # the other will not end by itself
        ((SLEEPS, KILLED, BAD), 1e9, 0.0),  # one was killed, and so was the first
    ],
)
def test_others_are_not_waited_for_in_vain(watched, monkeypatch, commands, grace, killed):
    monkeypatch.setattr(agent, "_GRACE", grace)
    monkeypatch.setattr(agent, "_KILLED", killed)
    mine, processes, group = watched(*commands, ended=[1])
    mine._explain(processes, group)
    assert mine._failure.rank == 5
    assert all(process.returncode is not None for process in processes.values())


@pytest.mark.parametrize(
    ("then", "code", "restarts"),
    [
        ({}, 1, False),
        ({"origin": "KeyError a.py:8"}, 1, True),
        ({"place": RankProgress(5, "saving", 1.0)}, 1, True),
        ({"follows": True}, 1, True),
        ({"origin": ""}, -9, True),
        ({"code": 75}, 75, True),
    ],
    ids=["the same", "line", "step", "lost a peer", "killed", "storage"],
)
def test_an_error_that_comes_back_is_not_restarted_again(watched, monkeypatch, capfd, then, code, restarts):
    error = failures.ProcessFailure(4, code, "no", origin="KeyError a.py:7", place=RankProgress(4, "saving", 1.0))
    mine, processes, group = watched(BAD, ended=[0])
    for found in (error, dataclasses.replace(error, rank=5, **then)):
        monkeypatch.setattr(mine, "_read_failure", lambda *_, found=found: found)
        mine._explain(processes, group)
    assert (mine._remaining_restarts, losses.REPEATED in str(mine.error())) == ((2, False) if restarts else (0, True))
    assert capfd.readouterr().err.count("restart 2 of 3") == 1 + restarts


@pytest.mark.parametrize("early", [True, False])
def test_process_exiting_with_0_is_lost_during_its_run(watched, tmp_path, early):
    if early:
        (tmp_path / "5.under-way").touch()
    mine, processes, group = watched(BAD, GOOD, notes={0: "lost rank 5"}, ended=[0, 1])
    assert mine._has_failed(1, 0) == early
    assert not mine._has_failed(1, None)
    mine._explain(processes, group)
    assert mine._failure.rank == (5 if early else 4)
    assert mine.error().exit_code == 1
    assert ("with code 0 before the run's end" in str(mine.error())) == early


def test_failure_of_all_ranks_is_told_from_that_of_one(watched):
    same = {0: "step 3: nan", 1: "step 3: nan"}
    for notes, line in (
        (same, "step 3: nan"),
        ({0: "step 3: nan", 1: "another"}, "rank 4 failed first before step 1: step 3: nan"),
        ({0: "lost rank 5", 1: "step 3: nan"}, "rank 5 failed first before step 1: step 3: nan"),
    ):
        mine, processes, group = watched(BAD, BAD, notes=notes, ended=[0, 1])
        mine._explain(processes, group)
        assert (str(mine.error()), mine.has_cause) == (line, True)
    mine, processes, group = watched(GOOD, BAD, notes=same, ended=[0, 1])
    mine._explain(processes, group)
    assert str(mine.error()) == "rank 5 failed first before step 1: step 3: nan"


def test_rank_unaware_of_an_end_before_step_1_is_missing(watched, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    lost = "lost the other ranks: timeout"
    said = "; after --timeout seconds the others gave up; raise --timeout where it is only slow"
    mine, processes, group = watched(STOPS, BAD, STOPS, notes={1: lost}, ended=[1])
    Progress.of(6).at(2, 2)
    mine._explain(processes, group)
    stood = "rank 4 did not arrive: it was in its start, before step 1 and "
    stood += "rank 6 did not arrive: it was in step 3 (loading or computing)"
    assert mine._failure.message == stood + said
    assert not mine.has_cause
    for commands, text in (((STOPS, BAD), "step 3: nan"), ((STOPS, BAD), "lost rank 4"), ((GOOD, BAD), lost)):
        mine, processes, group = watched(*commands, notes={1: text}, ended=[1])
        mine._explain(processes, group)
        assert mine._failure.message == text


def test_bad_input_is_not_tried_again_whoever_says_it(watched, tmp_path):
    noted = {"line": "no", "code": UsageError.exit_code}
    for commands, note, left in (
        ((BAD, USAGE), noted, 0),
        ((USAGE, BAD), noted, 0),
        ((BAD, USAGE), {}, 2),  # the user's code
        ((BAD, "exit 3"), {"line": "no", "code": 3}, 0),
        ((BAD, "exit 3"), {"line": "no", "code": 3, "goes_back": True}, 2),
        ((BAD, BAD), {}, 2),
    ):
        mine, processes, group = watched(*commands, ended=[0, 1])
        for local, command in enumerate(commands):
            (tmp_path / f"note-{local}").write_text(json.dumps({"lockstep": {} if command == BAD else note}))
        mine._explain(processes, group)
        assert mine._remaining_restarts == left, (commands, note)
        assert mine.error().exit_code == (1 if left else note["code"])


@pytest.mark.parametrize("code", [2, 3, 75])
def test_a_code_counts_only_where_a_note_has_it(watched, tmp_path, code):
    def read(**note):
        mine, _, group = watched(f"exit {code}", ended=[0])
        (tmp_path / "note-0").write_text(json.dumps({"lockstep": note}))
        return mine._read_failure(0, code, 1.0, group)

    assert read(code=code, line="no").code == code
    for note in ({}, {"code": 1, "line": "SystemExit"}):
        found = read(**note)
        assert found.code == 1
        assert note.get("line", f"with code {code}") in str(found)
    (tmp_path / "ended").write_text(str(code))  # the run's own end
    assert read().code == code


@pytest.mark.parametrize(
    ("code", "message", "kills", "words"),
    [
        (-9, "", 8, "rank 1 was the first to end, killed by SIGKILL, before step 1: out of memory, by the kernel"),
        (-9, "", 7, "by SIGKILL, before step 1: something outside the run killed it"),
        (-15, "", 8, "by SIGTERM, before step 1: somebody or something ended it before its steps began"),
        (-2, "", 7, "by SIGINT, before step 1: somebody or something ended it before its steps began"),
        (-1, "", 7, "by SIGHUP, before step 1: somebody or something ended it before its steps began"),
        (-11, "", 8, "by SIGSEGV, before step 1: it crashed; its stack is above"),
        (-9, "no", 8, "rank 1 failed first before step 1: no"),
        (-15, "no", 7, "rank 1 failed first before step 1: no"),
        (3, "no", 7, "rank 1 failed first before step 1: no"),
    ],
)
def test_the_last_line_says_what_a_code_means(watched, monkeypatch, code, message, kills, words):
    mine = watched()[0]
    mine._failure = failures.ProcessFailure(1, code, message)
    monkeypatch.setattr(agent, "count_oom_kills", lambda: kills)
    error = mine.error()
    assert words in str(error)
    assert str(error).endswith("the newest checkpoint, if there is one") == (not message)
    assert error.exit_code == {-15: 143, -2: 130, -1: 129}.get(code if not message else 0, max(code, 1))


def test_a_failure_on_another_node_is_told_as_one(watched):
    error = watched()[0].error()
    assert str(error).startswith("the processes failed on another node; see its launcher's last line; the same")
    assert error.exit_code == 1


def test_signals_reach_running_processes_and_end_restarts(watched, monkeypatch):
    left = []
    monkeypatch.setattr(agent, "leave_terminal", lambda: left.append(1))

    class Fake:
        def __init__(self, code):
            self.code, self.sent = code, []

        def poll(self):
            return self.code

        def send_signal(self, number):
            self.sent.append(number)

    mine, runs, ended = watched()[0], Fake(None), Fake(0)
    mine._processes = lambda: {0: runs, 1: ended}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        mine._forward(int(number), None)
        assert mine.stop_signal is number
    assert runs.sent == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    assert (ended.sent, left, mine._remaining_restarts) == ([], [1], 0)
    for _ in range(2):
        mine._forward(int(signal.SIGINT), None)
    assert runs.sent[-2:] == [signal.SIGINT, signal.SIGKILL]  # a second Ctrl-C ends them at once


def test_stopped_rank_is_killed_after_a_signal_and_others_save(watched, monkeypatch, capfd):
    mine, processes, group = watched(STOPS, SLEEPS, SLEEPS)
    mine._job = job(nodes=(2, 2))
    monkeypatch.setenv(FOLDER_VARIABLE, str(mine._folder))
    for slot in (4, 6):
        monkeypatch.setenv("RANK", str(slot))
        Progress.of(slot).at(3, COMPUTING)
    os.waitid(os.P_PID, processes[0].pid, os.WSTOPPED)
    mine.stop_signal, mine._stopped_at = signal.SIGTERM, time.monotonic() - 29.0
    mine._kill_unresponsive()
    assert [process.poll() for process in processes.values()] == [None] * 3
    mine._stopped_at -= 2.0
    mine._kill_unresponsive()
    assert [processes[local].wait() for local in (0, 1)] == [-9, -9]
    mine._kill_unresponsive()
    assert processes[2].poll() is None
    lines = [*capfd.readouterr().err.splitlines(), str(mine._read_failure(0, -9, 1.0, group))]
    for line, *words in zip(lines, ("rank 4", "rank 5", "rank 4"), ("SIGSTOP", "no run", "step 4"), strict=True):
        assert names(line, *words, socket.gethostname(), "30 s after SIGTERM")


def test_orphans_are_reaped_and_idle_process_loss_is_told_once(watched, capfd):
    mine, processes, _ = watched(BAD, "exit 7")
    with orphans.adopt_orphans() as adopted:
        assert adopted
        made = subprocess.run(["sh", "-c", "sleep 0.1 & echo $!"], stdout=subprocess.PIPE, check=True)
        pid = int(made.stdout)
        mine._can_fork, mine._preloaded = True, SimpleNamespace(process=processes[1])
        until = time.monotonic() + 10
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
            mine._reap()
            time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")
    assert [processes[local].wait() for local in (0, 1)] == [1, 7]
    mine._reap()
    assert (mine._can_fork, capfd.readouterr().err.count("lockstep: ")) == (False, 1)


def test_who_was_stopped_is_known_from_who_runs_or_is_gone():
    assert not agent._is_stopped(os.getpid())
    assert not agent._is_stopped(2**30)
    with subprocess.Popen([sys.executable, "-c", "print(end='up', flush=True); input()"], stdin=-1, stdout=-1) as child:
        child.stdout.read(2)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert agent._is_stopped(child.pid)
        child.kill()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RendezvousError("no answer\nand more"),
            "the nodes did not meet at 127.0.0.1:0 (RendezvousError); check --nnodes",
        ),
        (DistError("timed out"), "the nodes did not meet at 127.0.0.1:0 (DistError); check --nnodes"),
        (SignalException("died", signal.SIGTERM), "ended by SIGTERM, and the processes with it"),
    ],
)
def test_an_end_in_the_meeting_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, error, words):
    seen = {}

    class Agent:
        def __init__(self, asked, folder, adopts):
            seen.update(os.environ, places=(folder / "places").is_dir(), folder=folder)

        def run(self):
            raise error

        def end(self):
            seen["ended"] = True

    monkeypatch.setattr(agent, "_Agent", Agent)
    for name in (FOLDER_VARIABLE, LAUNCHER_VARIABLE, "MINE", "THEIRS"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("MINE")
    with pytest.raises(LockstepError) as caught:
        agent.run(job(environment={"MINE": "new", "THEIRS": "new"}))
    assert str(caught.value).startswith(words)
    assert caught.value.exit_code == (143 if isinstance(error, SignalException) else 1)
    assert (seen["places"], seen["ended"], seen["folder"].exists()) == (True, True, False)
    assert (seen[FOLDER_VARIABLE], seen[LAUNCHER_VARIABLE]) == (
        str(seen["folder"] / "places"),
        str(seen["folder"] / "launcher"),
    )
    assert (seen["MINE"], seen["THEIRS"]) == ("new", "before")  # what is set already stays
    assert os.environ[LAUNCHER_VARIABLE] == "before"
    assert "MINE" not in os.environ


def test_waiting_nodes_are_counted_in_a_thread_and_reported_once(monkeypatch):
    asked, may, go_on = [], threading.Event(), threading.Event()
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(sleep=lambda _: go_on.wait(60), monotonic=time.monotonic))

    def ask():
        asked.append(threading.current_thread())
        may.wait(60)
        if len(asked) == 2:
            raise RendezvousError("the link is cut")
        return 3

    inner = SimpleNamespace(num_nodes_waiting=ask, next_rendezvous=lambda: "met")
    handler = rendezvous.NodeRendezvous(inner, job(is_host=False), None, print)
    assert handler.num_nodes_waiting() == 0
    may.set()
    while (found := handler.num_nodes_waiting()) == 0:
        pass
    assert [found, *(handler.num_nodes_waiting() for _ in range(3))] == [3, 0, 0, 0]
    assert len(asked) == 1  # as long as one asks or rests, no second one does
    assert asked[0] is not threading.current_thread()
    assert asked[0].daemon  # over a link that was cut it may sit there for minutes
    go_on.set()
    asked[0].join()
    assert handler.num_nodes_waiting() == 0
    asked[-1].join()
    assert len(asked) == 2  # and its failure is none of ours
    handler._counter._count = 1  # of a node that the next round takes in
    assert handler.next_rendezvous() == "met"
    assert handler.num_nodes_waiting() == 0


def launcher(port, *, is_host, said, **changes):
    """The rendezvous of a launcher on this machine."""
    asked = job(endpoint=f"127.0.0.1:{port}", is_host=is_host, **{"nodes": (2, 2), **changes})
    return rendezvous.open_rendezvous(asked, said.append)


def test_two_launchers_meet_in_any_order_and_report_missing_ones(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.2)
    port, said, found = free_port(), [[], []], []

    def join(number):
        handler = launcher(port, is_host=number == 0, said=said[number])
        found.append((handler, handler.next_rendezvous()))

    threads = [threading.Thread(target=join, args=(number,)) for number in (1, 0)]
    threads[0].start()
    until = time.monotonic() + 30
    while not said[1] and time.monotonic() < until:
        time.sleep(0.05)
    assert names(said[1][0], "node 0", f"127.0.0.1:{port}", "--master-addr", "--master-port")
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert sorted(info.rank for _, info in found) == [0, 1]
    for handler, _ in found:
        handler.shutdown()


def test_absent_node_is_reported_by_count_and_by_those_present(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.3)
    said = []
    handler = launcher(0, is_host=True, said=said, options={"join_timeout": "1"})
    with refuses(LockstepError, "1 of 2 nodes", socket.gethostname(), "127.0.0.1", "1 s") as caught:
        handler.next_rendezvous()
    assert caught.value.exit_code == 1
    assert names(said[0], "1 of 2 nodes", socket.gethostname(), "--master-addr")


def test_launcher_with_other_settings_than_node_0_is_refused():
    port = free_port()
    first = launcher(port, is_host=True, said=[])
    with refuses(ConfigError, "--nnodes", 3, 2):
        launcher(port, is_host=False, said=[], nodes=(3, 3))
    with refuses(ConfigError, "--rdzv-id", "other", "test"):
        launcher(port, is_host=False, said=[], run_id="other")
    assert names(first._describe(), "1 of 2 nodes", "--rdzv-id other")  # node 0 learns of it
    with refuses(ConfigError, "MASTER_PORT", port):
        launcher(port, is_host=True, said=[])  # node 0 twice
    first.shutdown()


def test_node_0_that_never_comes_is_named_after_the_limit():
    port = free_port()
    with refuses(LockstepError, "node 0", f"127.0.0.1:{port}", "1 s", "--master-port") as caught:
        launcher(port, is_host=False, said=[], options={"join_timeout": "1"})
    assert caught.value.exit_code == 1


def test_other_backends_are_torchs(monkeypatch):
    made = []
    inner = SimpleNamespace(num_nodes_waiting=int, use_agent_store=True)
    monkeypatch.setattr(rendezvous, "get_rendezvous_handler", lambda given: made.append(given) or inner)
    for options, seconds in (({}, "5"), ({"read_timeout": "77", "join_timeout": "9"}, "77")):
        handler = rendezvous.open_rendezvous(job(backend="etcd-v2", nodes=(1, 2), options=options), print)
        given = made.pop()
        assert (given.min_nodes, given.max_nodes, given.run_id, given.local_addr) == (1, 2, "test", "127.0.0.1")
        assert (given.get("read_timeout"), given.get("join_timeout")) == (seconds, options.get("join_timeout"))
        assert handler.use_agent_store


def test_an_end_on_another_node_is_no_failure_to_meet(watched, monkeypatch):
    mine = watched()[0]

    problems = [RendezvousConnectionError, RendezvousConnectionError, RendezvousClosedError]

    def meet(*_):
        raise problems.pop(0)

    monkeypatch.setattr(agent.LocalElasticAgent, "_rendezvous", meet)
    with pytest.raises(RendezvousConnectionError):  # at the start
        mine._rendezvous(None)
    mine._failure = failures.ProcessFailure(4, 1, "lost rank 5", follows=True)
    for words, code in (("node 0", 75), ("another node", 1)):
        with refuses(LockstepError, "lost rank 5", words) as caught:
            mine._rendezvous(None)
        assert caught.value.exit_code == code


def test_kills_are_added_up_over_our_groups_and_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "Path", lambda text: tmp_path / text.rpartition("/")[2])
    own = tmp_path / "cgroup"
    own.write_text("3:cpu,cpuacct:/other\n4:cpu,memory:/job\n0::/job\nnonsense\n")
    for name, text in (
        ("vmstat", "oom 5\noom_kill 3\n"),
        ("job/memory.events", "oom_kill 10\noom_kill 1\n"),
        ("memory/job/memory.oom_control", "oom_kill 100\n"),
        ("other/memory.events", "oom_kill 1000\n"),
        ("memory/memory.oom_control", "oom_kill many\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.count_oom_kills(tmp_path, own) == 113
    assert memory.count_oom_kills(tmp_path, tmp_path / "none") == 3


def test_survivors_are_chosen_at_the_launchers_meeting_point(tmp_path, monkeypatch):
    monkeypatch.setenv(MEETING_VARIABLE, "elsewhere:1")
    assert nodes.open_decisions(job(losses=0), str, tmp_path) is None
    assert MEETING_VARIABLE not in os.environ  # of another launcher around this one
    decisions = nodes.open_decisions(job(losses=3), str, tmp_path)
    assert decisions is not None  # the store is there as long as it is
    host, _, port = os.environ[MEETING_VARIABLE].rpartition(":")
    assert host == "127.0.0.1"
    assert TCPStore(host, int(port), None, False, timedelta(seconds=5), wait_for_workers=False).add("heard", 1) == 1
