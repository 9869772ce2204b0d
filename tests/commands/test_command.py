"""`lockstep train` as people start it: real processes, torchrun, kill -9, Ctrl-C, secrets in the environment."""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from ranks import run
from shell import environment, inspected

from lockstep import checkpoint, cli
from lockstep.logging.jsonl import read

TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}  # the square of {i}\n\n" for i in range(1500))
SECRET = "tr0ub4dor-and-3"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "code.txt").write_text(TEXT)
    return folder


def command(text, out, *flags, processes=0, python=sys.executable):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    settings = "--seq-len 32 --batch-size 8 --data.vocab-size 300 --log-freq 1 --max-steps 12 --ckpt-freq 2 --exact"
    return [
        *(python, *launcher, "-m", "lockstep", "train", "--save-dir", str(out), *settings.split()),
        *("--dataset-name", str(text / "code.txt"), "--data.cache", str(text / "cache"), *flags),
    ]


def go(arguments, code=0, **more):
    done = subprocess.run(arguments, env=environment(**more), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def start(arguments, **more):
    return subprocess.Popen(
        arguments,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until_step(folder, step, process, seconds=60.0):
    """Waits for the record of `step` (0: for anything to begin)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        found = read(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        if any(record["global_step"] >= step for record in found):
            return
        time.sleep(0.005)
    raise AssertionError(
        f"step {step} did not come: {process.communicate()[0] if process.poll() is not None else 'late'}"
    )


def children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def end(process):
    """No test leaves a process behind: the whole session that `start` made."""
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


def ended(world, argv):
    world.leave()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            cli.main(argv)
        except SystemExit as end:
            return end.code, said.getvalue()


def refused(arguments):
    """The last line of a command that ends with 2, in a process that has torch loaded already."""
    ((code, said),) = run(ended, 1, arguments[arguments.index("lockstep") + 1 :])
    assert code == 2, said
    assert "Traceback" not in said
    return said.splitlines()[-1]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The fingerprint of a run that nothing interrupted, alone."""
    out = tmp_path_factory.mktemp("whole")
    go(command(text, out, "--model.dropout", "0.1", python=warm.python()))
    return inspected(out / "default")


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])  # tests/matrix has exact runs on 4
def test_torchrun_and_alone_print_the_same_fingerprint(text, tmp_path, whole, processes):
    done = go(command(text, tmp_path, "--model.dropout", "0.1", processes=processes, python=warm.python()))
    assert done.stdout.count("finished; next: lockstep generate") == 1
    assert inspected(tmp_path / "default") == whole


@pytest.mark.parametrize(("processes", "again", "victim"), [(2, 0, 1), (0, 2, None)])
def test_run_killed_at_a_random_step_resumes_on_another_world(text, tmp_path, whole, processes, again, victim):
    step = random.SystemRandom().randint(3, 10)
    process = start(command(text, tmp_path, "--model.dropout", "0.1", processes=processes))
    try:
        until_step(tmp_path / "default", step, process)
        os.kill(process.pid if victim is None else children(process.pid)[victim], signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode != 0
    finally:
        end(process)
    go(command(text, tmp_path, "--model.dropout", "0.1", processes=again, python=warm.python()))
    assert inspected(tmp_path / "default") == whole, f"killed at step {step}"
    steps = [record["global_step"] for record in read(tmp_path / "default" / "metrics.jsonl") if "lr" in record]
    assert steps == list(range(1, 13))


def test_ctrl_c_ends_all_ranks_and_the_run_goes_on(text, tmp_path, whole):
    process = start(command(text, tmp_path, "--model.dropout", "0.1", processes=2))
    try:
        until_step(tmp_path / "default", 3, process)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert "interrupted: saved after step" in said
    saved = json.loads((tmp_path / "default" / "state.json").read_text())["global_step"]
    assert saved in checkpoint.list_steps(tmp_path / "default")
    go(command(text, tmp_path, "--model.dropout", "0.1", python=warm.python()))
    assert inspected(tmp_path / "default") == whole


def test_signal_to_one_rank_saves_all_and_exits_with_75(text, tmp_path):
    process = start(command(text, tmp_path))
    try:
        until_step(tmp_path / "default", 3, process)
        os.kill(process.pid, signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode == 75
    assert "ended by a signal: saved after step" in said.splitlines()[-1]


def test_secrets_reach_no_file_and_no_line(text, tmp_path):
    planted = {"MY_API_KEY": SECRET, "HF_TOKEN": "hf_" + "q" * 30, "NCCL_NOTE": f"https://user:{SECRET}@host/"}
    done = go(command(text, tmp_path, "--max-steps", "2", python=warm.python()), **planted)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6
    for where, content in [("output", (done.stdout + done.stderr).encode()), *((p, p.read_bytes()) for p in files)]:
        assert SECRET.encode() not in content, where
        assert b"q" * 30 not in content, where
    description = json.loads((tmp_path / "default" / "environment.json").read_text())
    assert {"MY_API_KEY", "HF_TOKEN", "HOME"} <= set(description["environment_names"])
    assert description["environment"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--model-name", "builtin:nanno"],
            "'builtin:nanno' is unknown: did you mean builtin:nano? A hub",
        ),
        (["--dataset-name", "/nowhere/at/all"], "--dataset-name"),
        (["--seq-len", "100000"], "--seq-len 100000 is longer than the context"),
        (["--save-dir", "/proc/nothing"], "--save-dir: cannot write to /proc"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(text, tmp_path, flags, line):
    last = refused(command(text, tmp_path / "out", *flags))
    assert last.startswith("lockstep: error: ")
    assert line in last
    assert not (tmp_path / "out").exists()


def test_a_refusal_as_a_person_sees_it(text, tmp_path):
    done = go(command(text, tmp_path / "out", "--model-name", "gpt9"), code=2)
    assert done.stderr.splitlines()[-1].startswith("lockstep: error: --model-name 'gpt9' ")
    assert "Traceback" not in done.stderr


def test_text_shorter_than_one_window(tmp_path):
    (tmp_path / "short.txt").write_text("only a few words\n" * 8)
    flags = ["--dataset-name", str(tmp_path / "short.txt"), "--data.cache", str(tmp_path / "cache")]
    assert "--seq-len" in refused([*command(tmp_path, tmp_path / "out"), *flags, "--seq-len", "128"])
    (tmp_path / "empty").mkdir()
    last = refused([*command(tmp_path, tmp_path / "out"), "--dataset-name", str(tmp_path / "empty")])
    assert "--dataset-name" in last
    assert not (tmp_path / "out").exists()
