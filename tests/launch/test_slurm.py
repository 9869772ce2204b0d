"""`lockstep launch --slurm` with a fake sbatch: its script, and what is refused; tests/slurm has a real one."""

import os
import re
import subprocess

import pytest
from refusals import names, refuses
from shell import SLURM_TASK
from test_launch import asked

from lockstep.errors import ConfigError, LockstepError
from lockstep.launch import command as command_module
from lockstep.launch import slurm
from lockstep.launch.command import command

STEP = SLURM_TASK | {"SLURM_STEP_NODELIST": "127.0.0.1"}


def script(capsys, *flags, train=()):
    assert command(["--slurm", *flags, "--dry-run", "--", "train", *train]) == 0
    return capsys.readouterr().out


def run_line(text, start):
    """The value of the variable that this line of the script sets."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    show = f'{line}; echo "$LOCKSTEP_RDZV_SECRET"'
    around = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_RDZV_SECRET"}
    return subprocess.run(["bash", "-c", show], env=around, capture_output=True, text=True, check=True).stdout.strip()


def options(text):
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def test_the_script_has_what_was_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--time",
        "4:00:00",
        "--partition",
        "gpu",
        "--set",
        "account=lab",
        "--max-restarts",
        "2",
        "--rdzv-secret-file",
        "s",
    ]
    text = script(capsys, *flags, train=["--experiment-name", "a", "--save-dir", "runs", "--lr", "1e-3"])
    found = options(text)
    assert found["output"] == f"{tmp_path}/runs/a/slurm/%j.out"
    wanted = {"nodes": "4", "gpus-per-node": "8", "time": "4:00:00", "partition": "gpu", "account": "lab"}
    assert wanted.items() <= found.items()
    assert found["signal"] == "USR1@300"
    assert found["ntasks-per-node"] == "1"
    assert "exclusive" in found
    assert "lockstep launch --nproc-per-node 8 --max-restarts 2 --rdzv-secret-file s" in text
    found = run_line(text, "export LOCKSTEP_RDZV_SECRET")
    assert re.fullmatch("[0-9a-f]{64}", found)
    assert f'--stderr "{tmp_path}/runs/a/slurm"/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.stderr' in text
    assert "-- train --experiment-name a --save-dir runs --lr 1e-3" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert not os.listdir(tmp_path)


def test_what_set_says_comes_last_and_nodes_may_be_shared(capsys):
    found = options(script(capsys, "--set", "signal=USR1@60", "--set", "cpus-per-task=4", "--set", "comment=a b"))
    assert (found["signal"], found["cpus-per-task"], found["comment"]) == ("USR1@60", "4", '"a b"')
    assert "exclusive" not in found
    found = options(script(capsys, "--set", "signal=", "--set", "no-requeue="))
    assert "signal" not in found
    assert found["no-requeue"] == ""


@pytest.mark.parametrize(
    ("time", "ahead"), [("10", 120), ("1-0", 300), ("2:30", 30), ("1:00:00", 300), ("infinite", 300), ("0-0:5:00", 60)]
)
def test_the_signal_comes_ahead_of_any_limit(capsys, time, ahead):
    assert options(script(capsys, "--time", time))["signal"] == f"USR1@{ahead}"


def test_an_array_of_seeds_has_a_folder_for_each(capsys, tmp_path):
    text = script(capsys, "--seeds", "1-3,7%2", train=["--save-dir", str(tmp_path), "--experiment-name", "a"])
    assert options(text)["array"] == "1-3,7%2"
    assert options(text)["output"] == f"{tmp_path}/a-seed%a/slurm/%A.out"
    assert '--experiment-name a-seed"$SLURM_ARRAY_TASK_ID" --seed "$SLURM_ARRAY_TASK_ID"' in text
    assert slurm._seeds("1-7:3,9%2") == [1, 4, 7, 9]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--slurm", "--nodes", "0"], ["--nodes", 0]),
        (["--slurm", "--gpus-per-node", "-1"], ["--gpus-per-node", -1]),
        (["--slurm", "--chain", "0"], ["--chain", 0]),
        (["--slurm", "--time", "soon"], ["--time", "soon"]),
        (["--slurm", "--time", "0"], ["--time"]),
        (["--slurm", "--seeds", "a"], ["--seeds", "a"]),
        (["--slurm", "--seeds", "1-2", "--chain", "2"], ["--seeds", "--chain"]),
        (["--slurm", "--set", "account"], ["--set", "account"]),
        (["--slurm", "--set", "comment=a\n#SBATCH --x"], ["--set"]),
        (["--slurm", "--set", "ntasks=4"], ["--set", "--nproc-per-node"]),
        (["--slurm", "--nnodes", "2"], ["--nnodes", "--nodes"]),
        (["--slurm", "--master-addr", "x"], ["--master-addr", "--slurm"]),
        (["--slurm", "--node-rank", "0"], ["--node-rank", "--slurm"]),
        (["--slurm", "no-such-file.sh"], ["--slurm", "no-such-file.sh"]),
        (["--partition", "gpu"], ["--partition", "--slurm"]),
        (["--chain", "2"], ["--chain", "--slurm"]),
    ],
)
def test_bad_flags_are_one_line(tmp_path, flags, named):
    with refuses(ConfigError, *named) as caught:
        command([*flags, "--", "train", "--save-dir", str(tmp_path)])
    assert "\n" not in str(caught.value)
    assert not os.listdir(tmp_path)


def test_a_template_of_the_users_is_filled_and_a_hole_is_named(capsys, tmp_path):
    file = tmp_path / "mine.sh"
    file.write_text("#!/bin/bash\n@{options}\nmodule load @{cuda}\nsrun @{command} # a@b $HOME\n")
    with refuses(ConfigError, "--slurm", str(file), "@{cuda}", "--set cuda"):
        command(["--slurm", str(file), "--dry-run", "--", "train"])
    assert command(["--slurm", str(file), "--set", "cuda=12.4", "--dry-run", "--", "train"]) == 0
    text = capsys.readouterr().out
    assert "module load 12.4\n" in text
    assert "a@b $HOME" in text
    assert "cuda" not in options(text)


def fake_sbatch(folder, monkeypatch, text):
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)


def test_without_sbatch_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with refuses(ConfigError, "--slurm", "sbatch", "--dry-run"):
        command(["--slurm", "--", "train", "--save-dir", str(tmp_path / "out")])
    assert not os.listdir(tmp_path)


def test_refusal_of_sbatch_is_shown_verbatim_and_nothing_stays(tmp_path, monkeypatch):
    words = "echo 'sbatch: error: invalid partition specified: x' >&2; echo 'sbatch: error: no job' >&2; exit 1"
    fake_sbatch(tmp_path, monkeypatch, words)
    with refuses(ConfigError, "invalid partition specified: x; no job"):
        command(["--slurm", "--", "train", "--save-dir", str(tmp_path / "out")])
    assert os.listdir(tmp_path) == ["bin"]


def test_a_chain_waits_for_the_job_before(tmp_path, monkeypatch, capsys):
    log = tmp_path / "log"
    fake_sbatch(tmp_path, monkeypatch, f'echo "$@" >>{log}; echo $((10 + $(wc -l <{log})))')
    assert (
        command(["--slurm", "--chain", "3", "--", "train", "--save-dir", str(tmp_path), "--experiment-name", "a"]) == 0
    )
    assert names(capsys.readouterr().out, "scancel 11 12 13", f"{tmp_path}/a/slurm/11.out")
    lines = log.read_text().splitlines()
    assert ["--dependency" in line for line in lines] == [False, True, True]
    assert "--dependency=afterany:12" in lines[2]
    assert (tmp_path / "a/slurm/12.chain").read_text().split() == ["11", "12", "13"]


def test_launchers_take_node_rank_and_address_from_srun(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    job = asked(monkeypatch)
    assert (job.nodes, job.run_id, job.is_host) == ((3, 3), "7.0.0", False)
    host, _, port = job.endpoint.partition(":")
    assert host == "127.0.0.1"
    assert 10000 <= int(port) < 30000
    own = asked(monkeypatch, "--nnodes", "1:3", "--node-rank", "0", "--master-addr", "127.0.0.2")
    assert (own.nodes, own.endpoint, own.is_host) == ((1, 3), "127.0.0.2:29400", True)
    assert asked(monkeypatch, "--nnodes", "1").nodes == (1, 1)  # a run of each
    with refuses(ConfigError, "--nnodes", 2, 3):
        command(["--nnodes", "2", "--", "train"])


def test_cores_are_divided_only_if_slurm_gave_them_to_us(monkeypatch):
    step = {"SLURM_STEP_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "12"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(command_module, "numa_nodes", lambda cpus: {0, 1})
    four = ("--nproc-per-node", "4")
    job = asked(monkeypatch, *four)
    assert [len(share) for share in job.shares] == [3, 3, 3, 3]
    assert frozenset.union(*job.shares) == set(range(12))
    assert job.environment["LOCKSTEP_CORES"] == "12"
    assert asked(monkeypatch).shares == ()
    for other in (
        {"SLURM_CPUS_ON_NODE": "6"},  # nothing confines this job to its cores
        {"SLURM_GPUS_ON_NODE": "4"},  # whose GPU is near which socket is not known
        {"GOMP_CPU_AFFINITY": "0-11"},
        {"SLURM_CPUS_ON_NODE": ""},
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,2"},  # another launcher on this node divides the same
    ):
        with monkeypatch.context() as patch:
            for name, value in other.items():
                patch.setenv(name, value)
            job = asked(monkeypatch, *four)
            assert (job.shares, job.environment.get("LOCKSTEP_CORES")) == ((), None), other
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    assert asked(monkeypatch, *four).shares == ()


def test_the_end_of_a_launcher_is_recorded(tmp_path, monkeypatch):
    with slurm.record_end():
        pass  # outside a job of ours
    monkeypatch.setenv("LOCKSTEP_SLURM_ENDS", str(tmp_path))
    error = LockstepError("rank 0 failed first")
    lost = LockstepError("lost the others")
    lost.follows = True
    for node, raised in (("a", lost), ("b", error), ("c", None), ("e", ConfigError("no such flag"))):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        with pytest.raises(LockstepError) if raised else slurm.record_end():
            if raised:
                with slurm.record_end():
                    assert (tmp_path / node).read_bytes() == b""  # a node that is lost now leaves it so
                    raise raised
    found = {node: (tmp_path / node).read_text().split(" ", 2) for node in "abce"}
    assert [found[node][0] for node in "abce"] == ["1", "0", "2", "-1"]
    assert names(found["b"][2], "rank 0 failed first")
    (tmp_path / "d").mkdir()  # it cannot be written, as on a full disk
    monkeypatch.setenv("SLURMD_NODENAME", "d")
    with slurm.record_end():
        pass
