"""The scoreboard of docs/inside/reliability.md against real runs on two processes; the short form is not marked slow.

A planted fault that is not caught is a failed test.
"""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import warm

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import (
    BEAT,
    UNLIKE,
    arguments,
    end,
    environment,
    finish,
    in_group,
    launch,
    memory_group,
    start,
    torchrun,
    until_step,
    workers,
)

from lockstep import checkpoint
from lockstep.logging.jsonl import read
from lockstep.report.goodput import goodput

WRITE = "lockstep.checkpoint.write:write_file"
UPDATE = "lockstep.engines.optimizer_step:OptimizerStep.__call__"
LONG = ("--max-steps", "60")  # agreeing takes up to sixteen of steps this short
BLOCK = "lockstep.models.gpt:Block.forward"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """What a run leaves that nothing disturbed, and which raised no alarm."""
    run = launch(data, tmp_path_factory.mktemp("whole"), python=warm.python())
    assert run.code == 0, run.said
    assert "warning" not in run.said
    return run.mark()


def test_r1_killed_rank_is_named_and_the_run_is_bitwise(data, tmp_path, whole):
    """Rank 0 holds the run's lock, and its loader processes were forked with it; rank 1 is killed under torchrun."""
    fault = {"rank": 0, "step": 7, "at": BEAT, "do": "kill"}
    run = launch(data, tmp_path, "--data.workers", "2", faults=[fault], restarts=1, python=warm.python())
    assert run.code == 0, run.said
    assert "rank 0 was the first to end, killed by SIGKILL, at step 7" in run.said
    assert "restart 1 of 1" in run.said
    assert run.mark() == whole
    assert run.state["restarts"] == 1
    spent = goodput(run.folder / "timeline.jsonl")
    first, second = spent.starts
    assert (first.ended, second.ended, second.last) == ("", "finished", 14)
    assert spent.seconds["lost"] > 0  # from the kill, which the launcher saw, to the new processes
    assert spent.wall <= run.seconds


def recovered(data, out, rank=1, step=7):
    """A run under plain torchrun that lost a rank once."""
    command = torchrun(data, out, restarts=1)
    return finish(start(command, [{"rank": rank, "step": step, "at": BEAT, "do": "kill"}]), out, time.monotonic())


@pytest.mark.slow
def test_r1_plain_torchrun_recovers_too(data, tmp_path, whole):
    run = recovered(data, tmp_path)
    assert run.code == 0, run.said
    assert run.mark() == whole
    assert run.state["restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_r1_plain_torchrun_recovers_ten_times(data, tmp_path, whole, seed):
    run = recovered(data, tmp_path, seed % 2, 1 + seed)
    assert run.code == 0, run.said
    assert run.mark() == whole


def test_r3_a_signal_to_one_rank_saves_and_says_75(data, tmp_path):
    run = launch(data, tmp_path, *LONG, faults=[{"rank": 1, "step": 6, "at": BEAT, "do": "usr1"}], python=warm.python())
    assert run.code == 75, run.said
    assert run.last.startswith("ended by a signal: saved after step ")
    assert run.steps[-1] == run.state["global_step"]  # nothing that was computed is lost
    assert launch(data, tmp_path, *LONG, python=warm.python()).code == 0
    assert run.steps == list(range(1, 61))


@pytest.mark.slow
def test_r3_a_signal_in_a_long_step_ends_the_run_after_it(data, tmp_path):
    place = "lockstep.tasks.language_model:CausalLM.loss"
    long = {"step": 0, "at": place, "do": "sleep", "seconds": 0.3, "always": True}
    faults = [{**long, "rank": 0}, {**long, "rank": 1}, {"rank": 1, "step": 4, "at": BEAT, "do": "term"}]
    run = launch(data, tmp_path, faults=faults, python=warm.python())
    assert run.code == 75, run.said
    assert run.state["global_step"] == run.steps[-1] == 5


def test_r11_a_stopped_rank_is_named_within_the_timeout(data, tmp_path):
    fault, mark = {"rank": 1, "step": 7, "at": BEAT, "do": "stop"}, tmp_path / "mark"
    run = launch(data, tmp_path, "--timeout", "6", faults=[fault], LOCKSTEP_CHAOS_MARK=str(mark))
    assert time.time() - float(mark.read_text()) < 4 * 6  # noticed after about one timeout, not after ten
    assert run.code == 1, run.said
    assert "rank 1 did not arrive: it was in step 7" in run.last
    hang = (run.folder / "logs" / "hang-00000.txt").read_text()
    assert "Thread" in hang
    assert "collectives, oldest first" in hang


def test_r7_a_nan_is_named_and_never_saved(data, tmp_path):
    fault = {"rank": 1, "step": 7, "at": BLOCK, "do": "nan", "always": True}
    run = launch(data, tmp_path, faults=[fault], python=warm.python())
    assert run.code == 1, run.said
    assert "step 8: the gradient is not finite (norm nan) and was not applied; micro-batch 1 (samples " in run.last
    assert "module 'blocks.0" in run.last
    path = checkpoint.newest(run.folder, say=print)
    assert checkpoint.read_state(path)["global_step"] == 5


@pytest.mark.slow
def test_r24_spoiled_weight_is_named_and_its_checkpoint_refused(data, tmp_path):
    """The checkpoint of step 10 is begun between the update and the next step."""
    faults = [{"rank": rank, "step": 9, "at": UPDATE, "do": "spoil"} for rank in (0, 1)]
    run = launch(data, tmp_path, faults=faults, python=warm.python())
    assert run.code == 1, run.said
    assert "model/tokens.weight" in run.last
    assert "sample" not in run.last
    assert checkpoint.list_steps(run.folder) == [5, 10]
    assert checkpoint.newest(run.folder, say=print) == checkpoint.path_of(run.folder, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "step", "code"), [("skip", 9, 1), ("rollback", 9, 0), ("stop", 13, 1)])
def test_r24_each_policy_ends_rightly(data, tmp_path, policy, step, code):
    faults = [{"rank": rank, "step": step, "at": UPDATE, "do": "spoil"} for rank in (0, 1)]
    run = launch(data, tmp_path, "--guards.nonfinite", policy, faults=faults)
    assert run.code == code, run.said
    assert ("model/tokens.weight" in run.last) == (code == 1)
    assert (checkpoint.newest(run.folder, say=print) == checkpoint.path_of(run.folder, 14)) == (code == 0)
    run = launch(data, tmp_path)
    assert (run.code, run.steps) == (0, list(range(1, 15))), run.said


@pytest.mark.slow
def test_r8_a_flipped_bit_names_the_tensor(data, tmp_path):
    fault = {"rank": 1, "step": 7, "at": UPDATE, "do": "flip"}
    run = launch(data, tmp_path, "--guards.desync-freq", "2", faults=[fault], python=warm.python())
    assert run.code == 1, run.said  # another start goes back to before it: 3 would be final
    assert "after step 8 rank 0 and rank 1 differ" in run.last
    assert "in model/tokens.weight" in run.last  # the first in the order of the model


def test_r15_a_second_run_is_refused_in_one_line(data, tmp_path):
    first = start(arguments(data, tmp_path, "--max-steps", "100000", processes=0))
    try:
        until_step(tmp_path, 2, first)
        second = launch(data, tmp_path, "--max-steps", "100000", processes=0, python=warm.python())
    finally:
        end(first)
    assert second.code == 2, second.said
    assert f"is in use by process {first.pid} on " in second.last
    third = start([warm.python(), *arguments(data, tmp_path, "--max-steps", "100000", processes=0)[1:]])
    try:
        deadline = time.monotonic() + 60
        log = tmp_path / "default" / "logs" / "rank-00000.log"
        while "cleared the lock of process" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        end(third)
    assert f"cleared the lock of process {first.pid} on" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_r1_twenty_random_kills(data, tmp_path, whole, seed):
    step, rank = 1 + (seed * 7) % 12, seed % 2
    run = launch(data, tmp_path, faults=[{"rank": rank, "step": step, "at": BEAT, "do": "kill"}], restarts=1)
    assert run.code == 0, run.said
    assert run.mark() == whole


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("call", range(1, 9))
def test_r2_a_kill_at_each_file_of_a_save(data, tmp_path, whole, processes, call):
    rank = call % processes
    fault = {"rank": rank, "step": 4, "at": WRITE, "do": "kill", "call": call}
    run = launch(data, tmp_path, faults=[fault], processes=processes, restarts=1)
    assert run.code == 0, run.said
    assert run.mark() == whole


@pytest.mark.slow
@pytest.mark.parametrize("number", ["term", "usr2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_r3_any_signal_to_any_rank(data, tmp_path, number, rank):
    run = launch(data, tmp_path, *LONG, faults=[{"rank": rank, "step": 6, "at": BEAT, "do": number}])
    assert run.code == 75, run.said
    assert run.steps[-1] == run.state["global_step"]


@pytest.mark.slow
def test_r3_a_file_named_stop(data, tmp_path):
    process = start(arguments(data, tmp_path, "--max-steps", "100000"))
    try:
        until_step(tmp_path, 3, process)
        (tmp_path / "default" / "STOP").touch()
        run = finish(process, tmp_path, time.monotonic(), 30)
    finally:
        end(process)
    assert run.code == 75, run.said
    assert not (tmp_path / "default" / "STOP").exists()


@pytest.mark.slow
def test_r3_a_signal_to_the_launcher(data, tmp_path):
    process = start(arguments(data, tmp_path, "--max-steps", "100000", restarts=3))
    try:
        until_step(tmp_path, 3, process)
        process.send_signal(signal.SIGTERM)
        run = finish(process, tmp_path, time.monotonic(), 30)
    finally:
        end(process)
    assert run.code == 75, run.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "code"),
    [((signal.SIGTERM, signal.SIGUSR2), 75), ((signal.SIGINT,) * 2, 130)],
    ids=["SIGTERM, SIGUSR2", "Ctrl-C twice"],
)
def test_r3_signals_in_a_save(data, tmp_path, numbers, code):
    """Whatever comes, no checkpoint is torn; a second Ctrl-C alone does not wait for the save."""
    slow = [{"rank": rank, "at": WRITE, "do": "sleep", "seconds": 0.5, "always": True} for rank in range(2)]
    process = start(arguments(data, tmp_path, "--max-steps", "100000", "--checkpoint.mode", "sync"), slow)
    try:
        until_step(tmp_path, 4, process)
        for number in numbers:
            time.sleep(0.5)
            process.send_signal(number)
        run = finish(process, tmp_path, time.monotonic(), 30)
    finally:
        end(process)
    assert run.code == code, run.said
    steps = checkpoint.list_steps(run.folder)
    assert bool(steps) == (code == 75)
    assert all(not checkpoint.verify(checkpoint.path_of(run.folder, step)) for step in steps)
    assert launch(data, tmp_path, "--max-steps", "100000", "--stop-at", "12").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("before", "code"), [([], 75), (["nohup"], 0)], ids=["terminal", "nohup"])
def test_r3_a_terminal_that_is_closed(data, tmp_path, before, code):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*before, *arguments(data, tmp_path, "--max-steps", "60")],
        env=environment(()),
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        until_step(tmp_path, 3, process)
        os.close(ours)
        assert process.wait(60) == code
    finally:
        end(process)
    steps = [record["global_step"] for record in read(tmp_path / "default" / "metrics.jsonl")]
    state = json.loads((tmp_path / "default" / "state.json").read_text())
    assert state["global_step"] == steps[-1] == (60 if code == 0 else state["global_step"])


@pytest.fixture
def small(tmp_path):
    """A file system of 34 MB: room for two checkpoints of these runs and not for three."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=34m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a file system can be mounted as root alone")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
def test_r4_a_full_disk_leaves_the_checkpoints_before(data, small):
    run = launch(data, small, "--max-steps", "40", "--checkpoint.keep", "9")
    assert run.code == 1, run.said
    assert "2 saves in a row failed" in run.last
    steps = checkpoint.list_steps(run.folder)
    assert steps
    assert all(not checkpoint.verify(checkpoint.path_of(run.folder, step)) for step in steps)
    assert not list((run.folder / "checkpoints").glob(".step-*"))


def test_r4_one_failed_save_does_not_end_the_run(data, tmp_path, whole):
    fault = {"rank": 0, "step": 4, "at": WRITE, "do": "raise", "error": "OSError", "errno": 28}
    run = launch(data, tmp_path, faults=[fault], python=warm.python())
    assert run.code == 0, run.said
    assert "No space left on device" in run.said
    assert run.mark() == whole


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_r7_a_bad_step_is_left_out(data, tmp_path, action):
    run = launch(
        data, tmp_path, "--guards.nonfinite", action, faults=[{"rank": 1, "step": 7, "at": BLOCK, "do": "nan"}]
    )
    assert run.code == 0, run.said
    assert json.loads((run.folder / "checkpoints" / "skips.json").read_text())["skipped"] == [8]
    assert run.steps == list(range(1, 15))


@pytest.mark.slow
def test_r11_a_rank_that_sleeps_is_named_with_its_line(data, tmp_path):
    run = launch(data, tmp_path, "--timeout", "6", faults=[{"rank": 1, "step": 7, "at": UPDATE, "do": "sleep"}])
    assert run.code == 1, run.said
    assert "rank 1 did not arrive: it is in step 8, at sitecustomize.py" in run.last


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_r12_a_slow_rank_is_named(data, tmp_path, rank):
    place = "lockstep.tasks.language_model:CausalLM.loss"
    fault = {"rank": rank, "step": 2, "at": place, "do": "sleep", "seconds": 0.05, "always": True}
    run = launch(data, tmp_path, "--max-steps", "60", faults=[fault])
    assert run.code == 0, run.said
    assert f"rank {rank} is slow: " in run.log()
    assert "of computing" in run.log()


@pytest.mark.slow
def test_r16_a_killed_loader_process_loses_no_sample(data, tmp_path, whole):
    run = launch(data, tmp_path, "--data.workers", "1", faults=[{"rank": 1, "step": 4, "at": BEAT, "do": "killworker"}])
    assert run.code == 0, run.said
    assert "a loader process died in step" in run.said
    assert '"loading/restarts": 1.0' in (run.folder / "metrics.jsonl").read_text()
    assert run.mark() == whole


@pytest.mark.slow
def test_r17_out_of_memory_is_said(data, tmp_path):
    with memory_group(1800) as group:
        if group is None:
            pytest.skip("a memory group of cgroup v1 can be made as root alone")
        fault = {"rank": 1, "step": 3, "at": BEAT, "do": "eat"}
        process = start(in_group(group, arguments(data, tmp_path)), [fault])
        run = finish(process, tmp_path, time.monotonic())
    assert run.code == 1, run.said
    assert "out of memory, by the kernel's count" in run.last


@pytest.mark.slow
def test_r18_two_one_two_ranks(data, tmp_path, whole):
    for processes, stop in ((2, "4"), (1, "9"), (2, "14")):
        run = launch(data, tmp_path, "--stop-at", stop, processes=processes)
        assert run.code == 0, run.said
    assert run.mark()[0] == whole[0]
    assert run.steps == list(range(1, 15))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--nnodes", "2", "--master-addr", "no.such.host.invalid"], "the name does not resolve"),
        (["--nnodes", "0"], "--nnodes is '0'"),
        (["--nproc-per-node", "0"], "--nproc-per-node is 0"),
        (["--master-port", "70000"], "--master-port is 70000"),
    ],
)
def test_r14_what_cannot_be_started_is_one_line(data, tmp_path, flags, line):
    command = [sys.executable, "-m", "lockstep", "launch", *flags, "--", "train", "--save-dir", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_r14_a_folder_that_cannot_be_written(data, tmp_path):
    path = tmp_path / "bound"
    path.mkdir()
    done = subprocess.run(["mount", "--bind", "-o", "ro", str(path), str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a read-only bind can be made as root alone")
    try:
        run = launch(data, path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
    assert run.code == 2, run.said
    assert "--save-dir: cannot write to" in run.last


@pytest.mark.slow
@pytest.mark.parametrize("key", UNLIKE)
def test_r10_ranks_that_start_unlike_each_other_are_refused(data, tmp_path, key):
    run = launch(data, tmp_path, faults=[{"rank": 1, **UNLIKE[key]}])
    assert run.code in (1, 3), run.said
    assert key in run.last
    assert "rank 1" in run.last
    assert not (run.folder / "metrics.jsonl").exists()


def test_r9_uneven_work_is_told_with_the_counts(data, tmp_path):
    at = "lockstep.distributed.exchange:StepExchange.__init__"
    fault = {"rank": 1, "at": at, "do": "argument", "position": 4, "value": 9}
    run = launch(data, tmp_path, faults=[fault])
    assert run.code == 1, run.said
    assert "rank 0 has 14, rank 1 has 9" in run.last


@pytest.mark.slow
def test_ten_clean_runs_raise_no_alarm(data, tmp_path):
    for number in range(10):
        run = launch(data, tmp_path / str(number), "--max-steps", "40")
        assert run.code == 0, run.said
        assert "warning" not in run.said, run.said


@pytest.mark.slow
def test_a_flip_in_the_last_steps_is_found_at_the_end(data, tmp_path):
    run = launch(data, tmp_path, faults=[{"rank": 1, "step": 12, "at": UPDATE, "do": "flip"}])
    assert run.code == 1, run.said
    assert "after step 14 rank 0 and rank 1 differ" in run.last


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_r4_the_disk_is_full_at_the_last_save(data, small, whole, mode):
    """The file system has room for the checkpoints of steps 5 and 10 alone; with more room the same command goes on."""
    flags = ("--checkpoint.keep", "9", "--checkpoint.mode", mode)
    subprocess.run(["mount", "-o", "remount,size=26m", str(small)], check=True)  # a checkpoint is 10 MB
    run = launch(data, small, *flags, python=warm.python())
    assert run.code == 1, run.said
    assert "the save after step 14 failed on rank 0" in run.last
    assert "MiB; make room" in run.last
    assert checkpoint.list_steps(run.folder) == [5, 10]
    assert not any(checkpoint.verify(checkpoint.path_of(run.folder, step)) for step in (5, 10))
    assert not list((run.folder / "checkpoints").glob(".step-*"))
    subprocess.run(["mount", "-o", "remount,size=100m", str(small)], check=True)
    again = launch(data, small, *flags, python=warm.python())
    assert again.code == 0, again.said
    assert again.mark() == whole


@pytest.mark.slow
def test_a_rank_that_is_stopped_before_the_first_step_is_named(data, tmp_path):
    fault = {"rank": 1, "at": "lockstep.training.start.build:build_model", "do": "stop"}
    run = launch(data, tmp_path, "--timeout", "6", faults=[fault])
    assert run.code == 1, run.said
    assert "rank 1 did not arrive: it was in its start, before step 1" in run.last


@pytest.mark.slow
def test_run_whose_checkpoints_are_all_damaged_does_not_restart(data, tmp_path):
    run = launch(data, tmp_path, "--stop-at", "5")
    records = (run.folder / "metrics.jsonl").read_text()
    (checkpoint.newest(run.folder, say=print) / "manifest.json").write_text("{}")
    run = launch(data, tmp_path)
    assert run.code == 2, run.said
    assert "none of its 1 checkpoints is complete" in run.last
    assert (run.folder / "metrics.jsonl").read_text() == records


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_and_its_run_saved(data, tmp_path):
    with open(tmp_path / "screen", "w") as screen:
        command = arguments(data, tmp_path, "--max-steps", "100000")
        process = subprocess.Popen(command, env=environment(), stdout=screen, stderr=screen, start_new_session=True)
    until_step(tmp_path, 3, process)
    pids = workers(process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids.values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "ended by a signal: saved after step " in (tmp_path / "screen").read_text()


@pytest.mark.slow
def test_the_launcher_leaves_nothing_behind(data, tmp_path):
    process = start(arguments(data, tmp_path, "--max-steps", "100000"))
    try:
        until_step(tmp_path, 2, process)
        pids = workers(process)
        assert sorted(pids) == [0, 1]
        process.send_signal(signal.SIGINT)
        run = finish(process, tmp_path, time.monotonic(), 30)
    finally:
        end(process)
    assert run.code == 130, run.said
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())
