"""`lockstep launch` before anything is started, and what is said of those that failed."""

import dataclasses
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from refusals import names, refuses

import lockstep
from lockstep import cli
from lockstep.distributed import progress
from lockstep.distributed.failures import ProcessFailure, first_failure, note
from lockstep.distributed.launcher import listen
from lockstep.distributed.progress import COMPUTING, Progress, RankProgress
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, PeerError
from lockstep.launch import agent, job
from lockstep.launch import workers as leash
from lockstep.launch.command import command
from lockstep.launch.job import Job
from lockstep.run_state import RunState
from lockstep.training.start.open_run import count_restarts
from lockstep.training.state.run_dir import RunFolder


def shown(capsys, *flags, train=()):
    assert command([*flags, "--dry-run", "--", "train", *train]) == 0
    return shlex.split(capsys.readouterr().out)


def test_the_dry_run_is_torchruns_command(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENCV_FOR_THREADS_NUM", raising=False)
    words = shown(capsys, "--nproc-per-node", "3", "--max-restarts", "2", train=["--exact", "--lr", "0.1"])
    assert {"OMP_NUM_THREADS=1", "OPENCV_FOR_THREADS_NUM=1"} <= set(words)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words
    assert {"--nnodes=1", "--nproc-per-node=3", "--max-restarts=2", "--rdzv-backend=c10d"} <= set(words)
    assert words[-6:] == ["-m", "lockstep", "train", "--exact", "--lr", "0.1"]


@pytest.mark.parametrize(("processes", "train", "threads"), [(3, [], 4), (3, ["--exact"], 1), (20, [], 1)])
def test_processes_share_the_cores(capsys, monkeypatch, processes, train, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr("lockstep.distributed.cpus.cpu_quota", lambda root: 0.0)
    assert f"OMP_NUM_THREADS={threads}" in shown(capsys, "--nproc-per-node", str(processes), train=train)


def asked(monkeypatch, *flags, rest=("train",)):
    """The Job that these flags ask for."""
    jobs = []
    monkeypatch.setattr(agent, "run", lambda job: (jobs.append(job), (True, None, 75))[1])
    assert command([*flags, "--", *rest]) == 75  # as the run says that saved itself
    return jobs[0]


def test_a_module_starts_as_under_torchrun(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # A name of its own: other tests leave folders on this process's sys.path.
    (tmp_path / "started_by_launch").mkdir()
    (tmp_path / "started_by_launch/train.py").write_text("")
    module = ["-m", "started_by_launch.train", "--lr", "1", "--", "-m"]
    assert asked(monkeypatch, "--nproc-per-node", "2", rest=module).command == ["-u", *module]
    assert command(["--nproc-per-node", "2", *module]) == 75


def test_single_node_meets_on_loopback_at_a_free_port(monkeypatch):
    one, other = asked(monkeypatch), asked(monkeypatch)
    assert (one.endpoint, one.processes, one.nodes, one.restarts) == ("127.0.0.1:0", 1, (1, 1), 0)
    assert (one.backend, one.options, one.is_host) == ("c10d", {}, True)
    assert one.run_id != other.run_id
    assert one.command == ["-m", "lockstep", "train"]
    assert one.environment["GLOO_SOCKET_IFNAME"] == "lo"
    given = asked(monkeypatch, "--rdzv-id", "mine", "--rdzv-conf", "a=1,b=2=3", "--master-addr", "127.0.0.2")
    assert (given.run_id, given.options, given.endpoint) == ("mine", {"a": "1", "b": "2=3"}, "127.0.0.2:0")


@pytest.mark.parametrize(
    ("flags", "endpoint", "is_host"),
    [
        (["--master-addr", "127.0.0.1"], "127.0.0.1:29400", True),
        (["--master-addr", "127.0.0.1", "--node-rank", "1"], "127.0.0.1:29400", False),
        (["--master-addr", "127.0.0.1", "--master-port", "65535"], "127.0.0.1:65535", True),
        (["--rdzv-endpoint", "127.0.0.1:2950"], "127.0.0.1:2950", True),
        (["--rdzv-endpoint", "127.0.0.1:2950", "--node-rank", "1"], "127.0.0.1:2950", False),
        (["--rdzv-endpoint", "[::1]:2950"], "::1:2950", True),
        (["--rdzv-endpoint", "192.0.2.1:2950"], "192.0.2.1:2950", False),  # no address of this node
    ],
)
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_one_of_several_nodes_holds_the_meeting_point(monkeypatch, nodes, flags, endpoint, is_host):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    job = asked(monkeypatch, "--nnodes", nodes, *flags)
    assert (job.endpoint, job.is_host, job.run_id) == (endpoint, is_host, "lockstep")
    if endpoint.startswith(("127", "::1")):
        assert job.environment["GLOO_SOCKET_IFNAME"] == "lo"  # on the way to node 0


def test_lost_processes_are_replaced_where_there_are_others(monkeypatch, capsys):
    two = ("--nproc-per-node", "2")
    found = [asked(monkeypatch, *flags) for flags in ((), two, (*two, "--max-losses", "3", "--min-ranks", "2"))]
    assert [(job.least, job.losses) for job in found] == [(1, 0), (1, 8), (2, 3)]
    several = asked(monkeypatch, *two, "--nnodes", "2", "--master-addr", "127.0.0.1", "--min-ranks", "4")
    assert (several.least, several.losses) == (4, 8)
    assert capsys.readouterr().err == ""
    other = ("--rdzv-backend", "etcd-v2", "--max-losses", "3")
    assert asked(monkeypatch, *two, "--nnodes", "2", "--master-addr", "127.0.0.1", *other).losses == 0
    assert names(capsys.readouterr().err, "--max-losses 3", "--rdzv-backend etcd-v2", "--max-restarts")


def test_a_gloo_interface_that_this_machine_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with refuses(ConfigError, "GLOO_SOCKET_IFNAME", "eth77", socket.gethostname(), "lo"):
        command(["--nnodes", "2", "--master-addr", "127.0.0.1", "--dry-run", "--", "train"])


def test_what_is_started_and_with_how_many_threads(monkeypatch, tmp_path):
    script = str(tmp_path / "mine.py")
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr("lockstep.distributed.cpus.cpu_quota", lambda root: 0.0)
    for rest, head, threads in (
        (["evaluate", "a"], ["-m", "lockstep"], "12"),  # its run's configuration says, when it is read
        ([script, "--lr", "1"], ["-u"], "12"),
        ([script, "--exact"], ["-u"], "1"),
    ):
        job = asked(monkeypatch, rest=rest)
        assert (job.command, job.environment["OMP_NUM_THREADS"]) == ([*head, *rest], threads)
    monkeypatch.delattr(os, "sched_getaffinity")  # not every system has it
    for count, threads in ((6, "6"), (None, "1")):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert asked(monkeypatch).environment["OMP_NUM_THREADS"] == threads


def test_nodes_meet_at_the_master(capsys, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    words = shown(capsys, "--nnodes", "1:2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "2950")
    assert {"--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:2950", "--rdzv-id=lockstep"} <= set(words)
    assert "GLOO_SOCKET_IFNAME=lo" in words


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "nothing follows `--`"),
        (["--nproc-per-node", "2", "train"], "`--` is missing before `train`"),
        (["--", "generate"], "'generate' follows `--`"),
        (["-m"], "-m needs the name of a module"),
        (
            ["--nproc-per-node", "2", "-m", "no_such.one", "--lr", "1"],
            "-m no_such.one: there is no no_such in the ",
        ),
        (["--", "-m", "lockstep.launch.nonesuch"], "there is no nonesuch in the package lockstep.launch"),
        (["-m", "lockstep.launch"], "-m lockstep.launch is a package without __main__.py"),
        (["--", "train", "--lrr", "1"], "unknown flag --lrr"),
        (["--", "train", "--hf-script", "script.py"], "--hf-args"),
        (["--nproc", "2", "--", "train"], "unknown flag --nproc: did you mean --nproc-per-node?"),
        (
            ["--lr", "2", "--", "train"],
            "unknown flag --lr: it is not a flag of launch; flags of train go after `-- train`",
        ),
        (["--nproc-per-node", "0", "--", "train"], "--nproc-per-node is 0"),
        (["--nnodes", "3:2", "--", "train"], "--nnodes is '3:2'"),
        (["--nnodes", "2", "--", "train"], "--nnodes 2 needs --master-addr"),
        (["--rdzv-endpoint", "host", "--", "train"], "--rdzv-endpoint is 'host'"),
        (["--rdzv-conf", "x", "--", "train"], "--rdzv-conf is 'x'"),
        (["--rdzv-conf", "a=1,=2", "--", "train"], "--rdzv-conf is 'a=1,=2'"),
        (["--rdzv-endpoint", "host:\u0662", "--", "train"], "--rdzv-endpoint is 'host:"),
        (["--rdzv-endpoint", ":29", "--", "train"], "--rdzv-endpoint is ':29'"),
        (["--rdzv-endpoint", "fd00::1:29400", "--", "train"], "--rdzv-endpoint is 'fd00::1:29400'"),
        (["--master-port", "65536", "--", "train"], "--master-port is 65536"),
        (["--max-restarts", "-1", "--", "train"], "--max-restarts is -1: it must be at least 0"),
        (["--node-rank", "-1", "--", "train"], "--node-rank is -1"),
        (["--max-losses", "-1", "--", "train"], "--max-losses is -1: it must be at least 0"),
        (["--min-ranks", "0", "--", "train"], "--min-ranks is 0: it must be at least 1"),
        (
            ["--nproc-per-node", "2", "--min-ranks", "3", "--", "train"],
            "--min-ranks is 3, but there are 2 processes: it must be at most 2",
        ),
        (["--nnodes", "0:2", "--", "train"], "--nnodes is '0:2'"),
        (["--nnodes", "one", "--", "train"], "--nnodes is 'one'"),
        (["--master-port", "-1", "--", "train"], "--master-port is -1"),
    ],
)
def test_bad_flags_are_one_line(argv, line):
    with pytest.raises(ConfigError) as caught:
        command(argv)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_failure_is_not_the_one_that_followed():
    place = RankProgress(7, "loading or computing", 1.0)
    lost = ProcessFailure(0, 1, "rank 0 lost the others", follows=True, when=1.0)
    killed = ProcessFailure(1, -signal.SIGKILL, when=2.0, place=place)
    later = ProcessFailure(2, 1, "RuntimeError: something", when=3.0)
    assert first_failure([lost, later, killed]) is killed
    assert str(killed) == "rank 1 was the first to end, killed by SIGKILL, at step 8 (loading or computing)"
    assert str(later) == "rank 2 failed first before step 1: RuntimeError: something"
    assert first_failure([lost]) is lost


def test_a_note_is_read_back_and_holds_no_secret(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setattr(progress, "_CURRENT", [])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("MY_TOKEN", "tr0ub4dor-and-3")
    note(LockstepError("no access with tr0ub4dor-and-3"))
    assert "tr0ub4dor" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (
        json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] == "rank 0: no access with ***"
    )  # torchrun's end
    assert json.loads(path.read_text())["message"]["message"] == "no access with ***"
    failure = ProcessFailure.read(4, 1, path, None, 0.0)
    assert (failure.message, failure.follows) == ("no access with ***", False)
    assert abs(failure.when - time.time()) < 60
    assert ProcessFailure.read(4, -9, path, None, 0.0).code == 1  # ended on its way out, after its word
    assert ProcessFailure.read(4, 0, path, None, 0.0).code == 0  # it caught the error, and ended itself
    note(PeerError("a second word is not written"))
    assert ProcessFailure.read(4, 1, path, None, 0.0) == failure


def test_torchruns_report_calls_the_first_failure_the_cause(tmp_path, monkeypatch):
    """It compares whole seconds, and of equal ones takes the lowest rank's."""
    monkeypatch.setattr(time, "time", lambda: 1000.7)
    told = {}
    for name, error in (("cause", LockstepError("no")), ("follows", PeerError("lost"))):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / name))
        note(error)
        told[name] = json.loads((tmp_path / name).read_text())["message"]["extraInfo"]["timestamp"]
    assert int(told["cause"]) < int(told["follows"])


def test_launch_reports_bad_input_once_for_all_processes(tmp_path, monkeypatch, capsys):
    def main():
        with pytest.raises(SystemExit, match="2"):
            cli.main(["train", "--batch-size", "none"])
        return capsys.readouterr().err

    monkeypatch.delenv("LOCKSTEP_PROGRESS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "torchrun.json"))
    assert main().count("\n") == 1
    monkeypatch.setenv("LOCKSTEP_PROGRESS", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "launch.json"))
    assert main() == ""
    assert "--batch-size" in ProcessFailure.read(0, 2, tmp_path / "launch.json", None, 0.0).message
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "launch.json"))
    assert main().count("\n") == 1  # the launcher gets no word of it


def test_an_error_is_noted_once_and_where_a_launcher_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("LOCKSTEP_PROGRESS", str(tmp_path))
    error = ConfigError("bad input")
    assert not note(error)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "note.json"))
    assert note(error)
    assert note(error)  # on its way out it is met again
    failure = ProcessFailure.read(0, -15, tmp_path / "note.json", None, 0.0)
    assert (failure.code, failure.message, failure.follows) == (2, "bad input", False)
    (tmp_path / "note.json").unlink()
    assert note(LockstepError("not of the input"))  # the launcher prints it, so the rank does not
    assert not ProcessFailure.read(0, 1, tmp_path / "note.json", None, 0.0).follows
    (tmp_path / "note.json").unlink()
    assert not note(ValueError("a bug"))  # its traceback is shown by the rank
    (tmp_path / "note.json").unlink()
    monkeypatch.delenv("LOCKSTEP_PROGRESS")
    assert not note(LockstepError("under plain torchrun nobody prints it but the rank"))
    monkeypatch.setenv("LOCKSTEP_PROGRESS", str(tmp_path))
    (tmp_path / "note.json").unlink()
    note(PeerError("gone"))
    failure = ProcessFailure.read(0, 1, tmp_path / "note.json", RankProgress(7, "saving", 1.0), 0.0)
    assert failure.follows
    assert str(failure) == "at step 7 (saving): gone"
    (tmp_path / "note.json").unlink()
    (tmp_path / "note.json").symlink_to(tmp_path / "target")
    note(LockstepError("through a link"))
    assert not (tmp_path / "target").exists()


LONG = '{"lockstep": {"line": "' + "x" * (1 << 20) + '"}}'


@pytest.mark.parametrize(
    "text", ["", "[]", '{"lockstep": 3}', "\x00" * 50, LONG], ids=["nothing", "list", "number", "zeros", "long"]
)
def test_a_note_that_is_no_note_is_no_word(tmp_path, text):
    path = tmp_path / "error.json"
    path.write_text(text)
    assert ProcessFailure.read(0, -9, path, None, 5.0) == ProcessFailure(0, -9, when=5.0)


def test_rank_ended_by_a_signal_comes_before_those_that_lost_it(tmp_path):
    lost = ProcessFailure(0, 1, "rank 0 lost the other ranks", follows=True, when=1.0)
    ended = ProcessFailure.read(1, -signal.SIGTERM, tmp_path / "none", None, 2.0)
    assert first_failure([lost, ended]) == ended
    assert str(ended) == "rank 1 was the first to end, killed by SIGTERM, before step 1"


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "SIGINT", 130), (None, "SIGTERM", 143)],
)
def test_an_end_by_a_signal_without_a_save_is_one_line(tmp_path, monkeypatch, number, name, code):
    monkeypatch.setattr(agent, "run", lambda job: (False, number, 0))
    with pytest.raises(LockstepError, match=f"ended by {name} before the run could save; the same") as caught:
        command(["--", "train", "--save-dir", str(tmp_path)])
    assert caught.value.exit_code == code


def script(*lines):
    """A Job whose processes run these lines of Python; each writes a byte into the file $STARTS when it starts."""
    text = "import os, signal, sys, time; open(os.environ['STARTS'], 'a').write('x'); " + "; ".join(lines)
    return Job(["-c", text], 1, (1, 1), "c10d", "127.0.0.1:0", {}, "test", True, 2, {})


def launched(job, starts, *signals, stop_seconds=30.0):
    """(exit code, how often the process was started) of the launcher in a process of its own."""
    code = "import sys; from lockstep.launch.agent import run; from lockstep.launch.job import Job; "
    code += "from lockstep.errors import LockstepError\n"
    code += f"from lockstep.launch import agent; agent._STOP_SECONDS = {stop_seconds}\n"
    code += f"try: print(run({job!r}))\nexcept LockstepError as error: print(error); sys.exit(error.exit_code)"
    environment = {**os.environ, "STARTS": str(starts)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as launcher:
        for number in signals:
            deadline = time.monotonic() + 60
            while not starts.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            launcher.send_signal(number)
        launcher.stdout.read()
    return launcher.returncode, len(starts.read_text())


NOTED = "from lockstep import errors; from lockstep.distributed.failures import note; error = errors.{}('no'); "
NOTED += "note(error); sys.exit(error.exit_code)"


@pytest.mark.parametrize(
    ("line", "code", "starts"),
    [
        (NOTED.format("UsageError"), 2, 1),
        (NOTED.format("DifferenceError"), 3, 1),
        (NOTED.format("StorageError"), 75, 3),
        ("sys.exit(2)", 1, 3),  # of the user's code, which means nothing by it
        ("os._exit(75)", 1, 3),
    ],
)
def test_bad_input_is_not_started_again_and_other_failures_are(tmp_path, line, code, starts):
    assert launched(script(line), tmp_path / "starts") == (code, starts)


def test_a_signal_to_the_launcher_stops_restarts(tmp_path):
    wait = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); open(os.environ['STARTS'], 'a').write('x')"
    assert launched(script(wait, "time.sleep(60)"), tmp_path / "starts", signal.SIGTERM)[1] <= 2


def test_stopped_process_of_a_run_is_killed_after_a_signal(tmp_path):
    text = "import os, signal; from lockstep.distributed.progress import COMPUTING, Progress; "
    text += "Progress.of(0).at(3, COMPUTING); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
    text += "open(os.environ['STARTS'], 'a').write('x'); os.kill(os.getpid(), signal.SIGSTOP)"
    stopped = dataclasses.replace(script(), command=["-c", text])
    assert launched(stopped, tmp_path / "starts", signal.SIGTERM, stop_seconds=1.0) == (1, 1)


def test_restarts_add_up_over_all_starts(monkeypatch):
    """`restarts` counts those of this launcher's start and of the ones before, each once."""
    state = RunState()
    for job_id, count, total in (("a", 0, 0), ("a", 1, 1), ("a", 3, 3), ("b", 0, 3), ("b", 2, 5), ("", 0, 5)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job_id)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        count_restarts(state)
        assert state.restarts == total


@pytest.mark.parametrize("stopped", [False, True], ids=["at once", "after a stop"])
def test_process_ends_with_a_killed_launcher_not_a_stopped_one(tmp_path, stopped):
    """Whoever its parent is, and whatever it forked itself."""
    child = "from lockstep.distributed.launcher import end_with_launcher; import os, time; end_with_launcher()"
    child += "; pid = os.fork(); pid and print('tied', flush=True); time.sleep(30 * bool(pid))"
    between = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); os._exit(0)"
    parent = "import os, subprocess, sys, time; from pathlib import Path; from lockstep.launch.workers import "
    parent += f"life_pipe; os.environ['LOCKSTEP_LAUNCHER'] = str(life_pipe(Path({str(tmp_path)!r})))"
    parent += "; subprocess.run([sys.executable, '-c', *sys.argv[1:]]); time.sleep(30)"
    command = [sys.executable, "-c", parent, between, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"tied\n"
        launcher.send_signal(signal.SIGSTOP if stopped else 0)
        ended_early = stopped and select.select([launcher.stdout], [], [], 0.5)[0]
        launcher.kill()
        began = time.monotonic()
        assert launcher.stdout.read() == b""  # the pipe closes when the child is gone too
    assert not ended_early
    assert time.monotonic() - began < 20


def test_folder_of_a_killed_launcher_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(leash.tempfile, "tempdir", str(tmp_path))
    living = leash.private_folder()
    dead = tmp_path / "lockstep-launch-dead"
    (dead / "places").mkdir(parents=True)
    young, pipe = tmp_path / "lockstep-launch-young", tmp_path / "lockstep-launch-pipe"
    young.mkdir()
    os.mkfifo(pipe)  # a stranger's, who would like us to wait for ever
    now = time.time()
    for folder, age in ((living, 90.0), (dead, 90.0), (young, 30.0), (pipe, 90.0)):
        os.utime(folder, (now - age, now - age))
    own = leash.private_folder()
    assert own.stat().st_mode & 0o777 == 0o700
    assert set(tmp_path.iterdir()) == {living, own, young, pipe}


def test_progress_outlives_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_PROGRESS", str(tmp_path))
    progress = Progress.of(3)
    progress.at(12, COMPUTING)
    place = RankProgress.read(tmp_path / "3")
    assert str(place) == "step 13 (loading or computing)" == str(progress.place)
    assert RankProgress.read(tmp_path / "4") is None
    (tmp_path / "5").write_bytes(b"short")
    assert RankProgress.read(tmp_path / "5") is None


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/job\n", "job/memory.events"), ("4:memory:/job\n", "memory/job/memory.oom_control")],
)
def test_kills_for_want_of_memory_are_counted(tmp_path, line, file):
    own = tmp_path / "cgroup"
    own.write_text(line)
    before = job.count_oom_kills(tmp_path, own)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("low 0\noom 9\noom_kill 2\n")
    assert job.count_oom_kills(tmp_path, own) == before + 2


def test_the_meeting_point_listens_on_its_address_alone():
    listener = listen("127.0.0.1", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=f"MASTER_PORT {port} on 127.0.0.1"):
        listen("127.0.0.1", port)
    listener.close()
    assert listen("192.0.2.1", 0) is None
    with pytest.raises(ConfigError, match="does not resolve"):
        listen("no.such.host.invalid", 0)


def test_a_run_leaves_word_of_its_end_for_its_own_launcher(tmp_path, monkeypatch):
    folder = RunFolder(str(tmp_path), "r")
    folder.claim()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    folder.write_end(75, 8, "preempted")
    assert json.loads((folder.path / "ended.json").read_text())["code"] == 75
    folder.remove_end()
    assert not (folder.path / "ended.json").exists()
    folder.release()


def test_a_dead_owners_lock_is_cleared_and_told(tmp_path):
    folder = RunFolder(str(tmp_path), "r")
    (tmp_path / "r").mkdir()
    line = f"process 999999 on {socket.gethostname()}, started 2026-01-01T00:00:00+0000"
    (tmp_path / "r" / "run.lock").write_text(line + "\n")
    folder.claim()
    assert folder.dead_owner == line
    other = RunFolder(str(tmp_path), "r")
    with pytest.raises(ConfigError, match="is in use by process"):
        other.claim()
    folder.release()
    other.claim()
    assert other.dead_owner == ""
    other.release()


_LOADS = """
import sys, time
import torch
from lockstep.data.batches import Batches, StepPlan, Loading
from lockstep.data.sampler import Sequential
from lockstep.training.state.run_dir import RunFolder
from lockstep.distributed.world import World

class Task:
    draws_random, items_per_sample, reduction = False, 0, "sum"
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index:
            print(f"loads {index}\\n", end="", flush=True)  # at once: the others write too
            time.sleep(60)
        return torch.ones(2)
    def collate(self, samples):
        return torch.stack(samples)
    def count(self, batch):
        return len(batch)

folder = RunFolder(sys.argv[1], "r")
folder.claim()
task = Task()
batches = Batches(task, task, Sequential(8), StepPlan(1, 1, 8), World(), seed=0, loading=Loading(2, 1))
feed = batches.from_step(0)
next(feed)
print("first batch\\n", end="", flush=True)
time.sleep(60)
"""


_SERVED = """
import multiprocessing, sys, time
from lockstep.data.loader import _end_with_parent as end_with_parent

def load():
    end_with_parent()
    print("loads", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    multiprocessing.Process(target=load).start()
    time.sleep(60)
"""


@pytest.fixture
def debian(monkeypatch):
    """A machine whose own name, node0, leads to its loopback."""
    true = socket.getaddrinfo

    def resolve(host, *args, **kwargs):
        return true("127.0.1.1" if host == "node0" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_a_name_that_other_nodes_cannot_follow_is_refused(debian, monkeypatch, capsys):
    line = "node0 is 127.0.1.1 on this node, where no other node can reach it"
    flags = ["--nnodes", "2", "--dry-run"]
    for where in (["--master-addr", "node0"], ["--rdzv-endpoint", "node0:2950"]):
        with pytest.raises(ConfigError, match=f"{where[0]} {line}") as caught:
            command([*flags, *where, "--", "train"])
        assert "\n" not in str(caught.value)
    for meant in ("127.0.0.1", "localhost"):  # several "nodes" on one machine
        assert command([*flags, "--master-addr", meant, "--", "train"]) == 0
    capsys.readouterr()
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
    for name, value in {**ours, "MASTER_ADDR": "node0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ConfigError, match=f"MASTER_ADDR {line}"):
        World.join(device="cpu", timeout=1.0)


def test_loaders_end_with_a_killed_rank_and_free_lock_and_pipes(tmp_path):
    with subprocess.Popen([sys.executable, "-c", _LOADS, str(tmp_path)], stdout=subprocess.PIPE) as rank:
        seen = {rank.stdout.readline() for _ in range(3)}
        assert seen == {b"first batch\n", b"loads 1\n", b"loads 2\n"}  # both sit in a sample for a minute
        rank.kill()
        began = time.monotonic()
        assert rank.stdout.read() == b""  # closed when the last process that holds it is gone
        assert time.monotonic() - began < 20
    folder = RunFolder(str(tmp_path), "r")
    folder.claim()
    assert f"process {rank.pid} on" in folder.dead_owner
    folder.release()


def test_forkserver_loader_and_its_server_end_with_the_rank(tmp_path):
    script = tmp_path / "served.py"
    script.write_text(_SERVED)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"loads\n"
        rank.kill()
        began = time.monotonic()
        assert rank.stdout.read() == b""
        assert time.monotonic() - began < 20


def test_the_lock_is_not_kept_by_what_its_owner_forked(tmp_path, monkeypatch):
    code = "import os, sys, time; from lockstep.training.state.run_dir import RunFolder"
    code += "; folder = RunFolder(sys.argv[1], 'r'); folder.claim()"
    code += "; os.fork() or print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        child = int(owner.stdout.readline())
        owner.kill()
    monkeypatch.setattr("lockstep.training.state.run_dir._EXIT_GRACE", 0.0)
    folder = RunFolder(str(tmp_path), "r")
    try:
        folder.claim()
    finally:
        os.kill(child, signal.SIGKILL)
    folder.release()


def test_what_a_dead_owner_left_with_its_lock_is_waited_for(tmp_path, monkeypatch):
    folder = RunFolder(str(tmp_path), "r")
    folder.claim()
    dead = f"process 999999 on {socket.gethostname()}, started 2026-01-01T00:00:00+0000\n"
    (tmp_path / "r" / "run.lock").write_text(dead)  # as if something held it that no fork of ours made
    other = RunFolder(str(tmp_path), "r")
    monkeypatch.setattr("lockstep.training.state.run_dir._EXIT_GRACE", 0.1)
    with pytest.raises(ConfigError, match="is in use by children of process 999999 on"):
        other.claim()
    monkeypatch.setattr("lockstep.training.state.run_dir._EXIT_GRACE", 60.0)
    ending = threading.Timer(0.2, folder._lock.close)
    ending.start()
    other.claim()
    ending.join()
    other.release()


def test_a_second_train_is_refused_before_torch_is_loaded(tmp_path):
    folder = RunFolder(str(tmp_path), "r")
    code = "import sys; from lockstep import cli\ntry: cli.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    flags = ["train", "--save-dir", str(tmp_path), "--experiment-name", "r"]
    folder.check_free()
    assert not list(tmp_path.iterdir())
    folder.claim()
    line = (folder.path / "run.lock").read_text()
    second = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert (second.returncode, second.stdout) == (2, "False\n")
    assert f"is in use by {line.strip()}" in second.stderr
    assert second.stderr.count("\n") == 1
    assert (folder.path / "run.lock").read_text() == line
    folder.release()
    folder.check_free()


def test_second_run_of_a_script_is_refused_before_its_model(tmp_path):
    class Unbuilt(lockstep.Task):
        dataset = loss = None

        def model(self):
            raise AssertionError("the folder is checked first")

    folder = RunFolder(str(tmp_path), "r")
    folder.claim()
    with refuses(ConfigError, folder.path):
        lockstep.Run(lockstep.Config(save_dir=str(tmp_path), experiment_name="r"), Unbuilt())()
    folder.release()


def test_unwritable_file_leaves_nothing_and_is_named(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lockstep.training.state.run_dir.os.fsync", full)
    with pytest.raises(OSError, match="state.json"):
        RunFolder(str(tmp_path), ".").write("state.json", "{}")
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.lock").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="--save-dir: cannot write to"):
        RunFolder(str(tmp_path), "r").claim()
    assert not (tmp_path / "target").exists()
